//! Random tensors, and every byte of them counted by hand.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::tests::Tensor;
use super::*;

/// Which bytes belong to each block, element by element; the blocks are those of dimension `along`.
fn by_hand(tensor: &Tensor, along: usize, num_blocks: u32) -> BTreeMap<u32, BTreeSet<u64>> {
    let per_block = tensor.shape[along] / u64::from(num_blocks);
    let mut bytes = BTreeMap::<u32, BTreeSet<u64>>::new();
    let mut index = vec![0; tensor.shape.len()];
    loop {
        // A negative stride is one of a single element.
        let steps = index.iter().zip(&tensor.strides);
        let element: u64 = steps.map(|(&at, &stride)| at * stride as u64).sum();
        let from = tensor.storage + tensor.offset + element * tensor.item_bytes;
        let block = (index[along] / per_block) as u32;
        bytes
            .entry(block)
            .or_default()
            .extend(from..from + tensor.item_bytes);
        let Some(next) = (0..index.len())
            .rev()
            .find(|&it| index[it] + 1 < tensor.shape[it])
        else {
            return bytes;
        };
        index[next] += 1;
        index[next + 1..].fill(0);
    }
}

/// Which bytes belong to each block, by what was found; none twice, and all within their region.
fn by_tables<'a>(
    found: &Discovered,
    tables: impl Iterator<Item = &'a FoundTable>,
) -> BTreeMap<u32, BTreeSet<u64>> {
    let mut bytes = BTreeMap::<u32, BTreeSet<u64>>::new();
    let mut all = BTreeSet::new();
    for table in tables {
        let region = &found.regions[table.region];
        for block in 0..table.blocks {
            let at = table.offset + u64::from(block) * table.block_stride;
            assert!(
                at + table.block_bytes <= region.bytes,
                "block {block} of {table:?} in {region:?}"
            );
            for byte in region.address + at..region.address + at + table.block_bytes {
                assert!(
                    all.insert(byte),
                    "byte {byte} of block {block} of {table:?} is in another one"
                );
                bytes.entry(block).or_default().insert(byte);
            }
        }
    }
    bytes
}

/// A cache as vLLM may have it: layers with equal shapes in one storage.
#[derive(Clone, Debug)]
struct Cache {
    layers: Vec<Tensor>,
    along: usize,
    num_blocks: u32,
    block_tokens: u32,
}

#[derive(Clone, Debug)]
struct Form {
    num_blocks: u32,
    kernel_blocks: u64,
    /// Sizes of the dimensions inside of blocks.
    inside: Vec<u64>,
    /// Whether keys and values are a dimension in front of the blocks.
    apart: bool,
    item_bytes: u64,
    layers: u64,
    /// Whether the layers' blocks lie side by side.
    side_by_side: bool,
    padding: u64,
    offset: u64,
    storage: u64,
}

fn form() -> impl Strategy<Value = Form> {
    let sizes = (
        1..6_u32,
        prop::sample::select(vec![1, 1, 2, 4]),
        prop::collection::vec(1..4_u64, 0..4),
        any::<bool>(),
        prop::sample::select(vec![1, 2, 4]),
        1..4_u64,
        any::<bool>(),
    );
    let places = (0..20_u64, 0..40_u64, 1..1_000_u64);
    (sizes, places).prop_map(|(sizes, (padding, offset, storage))| {
        let (num_blocks, kernel_blocks, inside, apart, item_bytes, layers, side_by_side) = sizes;
        Form {
            num_blocks,
            kernel_blocks,
            inside,
            apart,
            item_bytes,
            layers,
            side_by_side,
            padding,
            offset,
            storage,
        }
    })
}

impl Form {
    /// With the dimensions inside of blocks in this order in memory, keys and values among them or outside.
    fn cache(&self, order: &[usize]) -> Cache {
        let along = usize::from(self.apart);
        let count = u64::from(self.num_blocks) * self.kernel_blocks;
        let mut shape = if self.apart {
            vec![2, count]
        } else {
            vec![count]
        };
        shape.extend(&self.inside);
        let mut strides = vec![0_i64; shape.len()];
        let mut next = 1;
        let (within, outside): (Vec<usize>, Vec<usize>) = {
            let place = order.iter().position(|&it| it == along).unwrap();
            (order[place + 1..].to_vec(), order[..place].to_vec())
        };
        for &dimension in within.iter().rev() {
            strides[dimension] = next;
            next *= shape[dimension] as i64;
        }
        let page = next;
        // Kernel blocks lie next to one another, and a block alone has no next one.
        let is_spaced = self.kernel_blocks == 1 && count > 1;
        let layers = self.layers as i64;
        let side_by_side = self.side_by_side && is_spaced && outside.is_empty();
        let mut stride = if side_by_side { page * layers } else { page };
        stride += if is_spaced { self.padding as i64 } else { 0 };
        strides[along] = stride;
        next = stride * count as i64;
        for &dimension in outside.iter().rev() {
            strides[dimension] = next;
            next *= shape[dimension] as i64;
        }
        let between = if side_by_side { page } else { next };
        let whole = if side_by_side { next } else { next * layers };
        let layer = |number: u64| Tensor {
            layer: format!("layers.{number}.attn"),
            storage: self.storage,
            storage_bytes: self.offset + whole as u64 * self.item_bytes,
            offset: self.offset + number * between as u64 * self.item_bytes,
            shape: shape.clone(),
            strides: strides.clone(),
            item_bytes: self.item_bytes,
        };
        Cache {
            layers: (0..self.layers).map(layer).collect(),
            along,
            num_blocks: self.num_blocks,
            block_tokens: 16,
        }
    }
}

fn cache() -> impl Strategy<Value = Cache> {
    form().prop_flat_map(|form| {
        let dimensions = usize::from(form.apart) + 1 + form.inside.len();
        let along = usize::from(form.apart);
        let order: Vec<usize> = (0..dimensions).collect();
        // Blocks outermost, or behind few of the others.
        (Just(order).prop_shuffle(), 0..3_usize).prop_map(move |(mut order, outside)| {
            order.retain(|&it| it != along);
            order.insert(outside.min(order.len()), along);
            form.cache(&order)
        })
    })
}

fn search(cache: &Cache) -> Result<Discovered, DiscoveryError> {
    let names: Vec<String> = cache.layers.iter().map(|it| it.layer.clone()).collect();
    let views: Vec<_> = cache.layers.iter().map(Tensor::view).collect();
    let group = CacheGroupSpec {
        layers: &names,
        block_tokens: cache.block_tokens,
    };
    discover(&views, &[group], cache.num_blocks)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// The bytes of the blocks found are exactly the bytes of the elements with that block's index, whatever
    /// the order, the padding, and what lies between.
    #[test]
    fn blocks_are_the_elements_with_their_index(cache in cache()) {
        match search(&cache) {
            Ok(found) => {
                by_tables(&found, found.tables.iter());
                prop_assert_eq!(found.regions.len(), 1);
                for layer in &cache.layers {
                    let tables = found.tables.iter().filter(|it| it.name == layer.layer);
                    let expected = by_hand(layer, cache.along, cache.num_blocks);
                    prop_assert_eq!(by_tables(&found, tables), expected);
                }
            }
            // Which dimension it is can be in doubt with one or two blocks only.
            Err(DiscoveryError::Layout { reason, .. }) => {
                let doubt = reason.contains("either of its first two") && cache.num_blocks <= 2;
                prop_assert!(doubt, "{}", reason);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    /// Any shape and any strides: what is taken is right, the rest is refused.
    #[test]
    fn nonsense_is_refused_or_right(
        dimensions in prop::collection::vec((0..6_u64, prop_oneof![-2..30_i64, any::<i64>()]), 0..5),
        item_bytes in 0..5_u64,
        place in (prop_oneof![0..100_u64, any::<u64>()], prop_oneof![0..2_000_u64, any::<u64>()], 0..50_u64),
        num_blocks in 0..4_u32,
        block_tokens in 0..5_u32,
    ) {
        let (shape, strides) = dimensions.into_iter().unzip();
        let tensor = Tensor {
            layer: "layers.0.attn".to_owned(),
            storage: place.0,
            storage_bytes: place.1,
            offset: place.2,
            shape,
            strides,
            item_bytes,
        };
        let cache = Cache { layers: vec![tensor.clone()], along: 0, num_blocks, block_tokens };
        if let Ok(found) = search(&cache) {
            let bytes = by_tables(&found, found.tables.iter());
            let candidates = (0..tensor.shape.len().min(2))
                .filter(|&along| tensor.shape[along].is_multiple_of(u64::from(num_blocks)))
                .filter(|&along| by_hand(&tensor, along, num_blocks) == bytes);
            prop_assert!(candidates.count() > 0);
            let region = found.regions[0];
            prop_assert!(region.address >= tensor.storage + tensor.offset);
            prop_assert!(region.address + region.bytes <= tensor.storage + tensor.storage_bytes);
        }
    }
}

use kvferry_engine::wire::EngineId;
use kvferry_engine::{Engine, EngineConfig, LaneChoice, LoopbackFabric, LoopbackNetwork};

use super::*;

const STORAGE: u64 = 0x7000_0000_1040;

/// A tensor that owns its shape, at the start of a storage that it fills unless told otherwise.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) layer: String,
    pub(super) storage: u64,
    pub(super) storage_bytes: u64,
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    pub(super) strides: Vec<i64>,
    pub(super) item_bytes: u64,
}

impl Tensor {
    /// Elements of 4 bytes; the dimensions from the outermost in memory to the innermost.
    fn new(layer: &str, shape: &[u64], order: &[usize]) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut next = 1;
        for &dimension in order.iter().rev() {
            strides[dimension] = next;
            next *= shape[dimension] as i64;
        }
        Self {
            layer: layer.to_owned(),
            storage: STORAGE,
            storage_bytes: next as u64 * 4,
            offset: 0,
            shape: shape.to_vec(),
            strides,
            item_bytes: 4,
        }
    }

    /// As a part of a larger storage.
    fn within(mut self, offset: u64, storage_bytes: u64) -> Self {
        (self.offset, self.storage_bytes) = (offset, storage_bytes);
        self
    }

    fn at(mut self, storage: u64) -> Self {
        self.storage = storage;
        self
    }

    pub(super) fn view(&self) -> TensorView<'_> {
        TensorView {
            layer: &self.layer,
            storage: self.storage,
            storage_bytes: self.storage_bytes,
            offset: self.offset,
            shape: &self.shape,
            strides: &self.strides,
            item_bytes: self.item_bytes,
            device: MemoryKind::Host,
        }
    }
}

fn find(
    tensors: &[Tensor],
    groups: &[(&[&str], u32)],
    num_blocks: u32,
) -> Result<Discovered, DiscoveryError> {
    let names: Vec<Vec<String>> = groups
        .iter()
        .map(|(layers, _)| layers.iter().map(|&name| name.to_owned()).collect())
        .collect();
    let groups: Vec<_> = names
        .iter()
        .zip(groups)
        .map(|(layers, &(_, block_tokens))| CacheGroupSpec {
            layers,
            block_tokens,
        })
        .collect();
    let views: Vec<_> = tensors.iter().map(Tensor::view).collect();
    discover(&views, &groups, num_blocks)
}

/// A layer alone, with 16 tokens per block.
fn alone(tensor: Tensor, num_blocks: u32) -> Result<Discovered, DiscoveryError> {
    let name = tensor.layer.clone();
    find(&[tensor], &[(&[&name], 16)], num_blocks)
}

/// Address, bytes, stride of each table.
fn places(found: &Discovered) -> Vec<(u64, u64, u64)> {
    let place = |table: &FoundTable| {
        let address = found.regions[table.region].address + table.offset;
        (address - STORAGE, table.block_bytes, table.block_stride)
    };
    found.tables.iter().map(place).collect()
}

const LAYER: &str = "model.layers.3.self_attn.attn";

#[test]
fn layers_that_are_slices_of_one_storage_are_one_region() {
    // As on CPU: blocks, heads, tokens, keys with values; not all of the storage is used.
    let bytes = 10 * 4 * 16 * 64 * 4;
    let names = [
        "model.layers.0.self_attn.attn",
        "model.layers.1.self_attn.attn",
    ];
    let tensors: Vec<_> = names
        .iter()
        .zip([512, 512 + bytes])
        .map(|(name, offset)| {
            Tensor::new(name, &[10, 4, 16, 64], &[0, 1, 2, 3]).within(offset, 4 * bytes)
        })
        .collect();
    let found = find(&tensors, &[(&names, 16)], 10).unwrap();
    let region = FoundRegion {
        address: STORAGE + 512,
        bytes: 2 * bytes,
        kind: MemoryKind::Host,
    };
    assert_eq!(found.regions, [region]);
    assert_eq!(
        places(&found),
        [(512, 16_384, 16_384), (512 + bytes, 16_384, 16_384)]
    );
    let numbers: Vec<_> = found
        .tables
        .iter()
        .map(|it| (it.layer, it.blocks))
        .collect();
    assert_eq!(numbers, [(0, 10), (16, 10)]);
    assert_eq!(found.notes, []);
}

#[test]
fn keys_and_values_outside_of_the_blocks_are_two_planes_and_inside_one() {
    let apart = alone(Tensor::new(LAYER, &[2, 10, 16, 4, 8], &[0, 1, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&apart), [(0, 2_048, 2_048), (20_480, 2_048, 2_048)]);
    let numbers: Vec<_> = apart.tables.iter().map(|it| (it.layer, it.plane)).collect();
    assert_eq!(numbers, [(48, 0), (49, 1)]);
    let inside = alone(Tensor::new(LAYER, &[10, 2, 16, 4, 8], &[0, 1, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&inside), [(0, 4_096, 4_096)]);
    // In memory as the one before, although the dimension is the first.
    let permuted = alone(Tensor::new(LAYER, &[2, 10, 16, 4, 8], &[1, 0, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&permuted), [(0, 4_096, 4_096)]);
}

#[test]
fn what_counts_is_the_order_in_memory_and_other_orders_are_told_apart() {
    let of = |order: &[usize]| {
        let mut found = alone(Tensor::new(LAYER, &[10, 4, 16, 64], order), 10).unwrap();
        assert_eq!(places(&found), [(0, 16_384, 16_384)], "{order:?}");
        found.tables.remove(0).interior
    };
    let (heads, tokens) = (of(&[0, 1, 2, 3]), of(&[0, 2, 1, 3]));
    assert_eq!(
        heads,
        "4 in dimension 1, 16 in dimension 2, 64 in dimension 3, 4 bytes each"
    );
    assert_eq!(
        tokens,
        "16 in dimension 2, 4 in dimension 1, 64 in dimension 3, 4 bytes each"
    );
    // Heads outside of the blocks (LHBNC).
    let found = alone(Tensor::new(LAYER, &[10, 4, 16, 64], &[1, 0, 2, 3]), 10).unwrap();
    let head = 10 * 16 * 64 * 4;
    let expected: Vec<_> = (0..4).map(|it| (it * head, 4_096, 4_096)).collect();
    assert_eq!(places(&found), expected);
    // One latent vector per token.
    let latent = alone(Tensor::new(LAYER, &[10, 16, 576], &[0, 1, 2]), 10).unwrap();
    assert_eq!(places(&latent), [(0, 36_864, 36_864)]);
    // With one head, both orders are the same bytes.
    let one = |order: &[usize]| alone(Tensor::new(LAYER, &[10, 1, 16, 64], order), 10).unwrap();
    assert_eq!(
        one(&[0, 1, 2, 3]).fingerprint(),
        one(&[0, 2, 1, 3]).fingerprint()
    );
}

/// Shape, strides and second layer of every layout that vLLM 0.32 has, as its `create_kv_cache_views` makes them
/// for two layers of 10 blocks: 4 heads, 32 tokens, keys and values of 8 floats.
#[test]
fn vllms_layouts_are_found_as_it_makes_them() {
    const ONE_PIECE: usize = 2;
    for (layout, blocks, strides, second, tables) in [
        ("LBHNC", 10, [2_048, 512, 16, 1], 81_920, ONE_PIECE),
        (
            "LBHNC, kernel blocks",
            20,
            [1_024, 256, 16, 1],
            81_920,
            ONE_PIECE,
        ),
        ("LBNHC", 10, [2_048, 16, 64, 1], 81_920, ONE_PIECE),
        (
            "LBNHC, kernel blocks",
            20,
            [1_024, 16, 64, 1],
            81_920,
            ONE_PIECE,
        ),
        ("LHBNC", 10, [512, 5_120, 16, 1], 81_920, 4 * ONE_PIECE),
        ("BLHNC", 10, [4_096, 512, 16, 1], 8_192, ONE_PIECE),
        ("BLNHC", 10, [4_096, 16, 64, 1], 8_192, ONE_PIECE),
        // Another layer's heads are between those of a block.
        ("BHLNC", 10, [4_096, 1_024, 16, 1], 2_048, 0),
    ] {
        let tokens = 320 / blocks;
        let tensors = [("layers.0.attn", 0), ("layers.1.attn", second)].map(|(layer, offset)| {
            let mut tensor = Tensor::new(layer, &[blocks, 4, tokens, 16], &[0, 1, 2, 3]);
            tensor.strides = strides.to_vec();
            tensor.within(offset, 163_840)
        });
        let found = find(&tensors, &[(&["layers.0.attn", "layers.1.attn"], 32)], 10);
        if tables == 0 {
            let text = found.unwrap_err().to_string();
            assert!(text.contains("has gaps"), "{layout}: {text}");
            continue;
        }
        let found = found.unwrap();
        assert_eq!(found.tables.len(), tables, "{layout}");
        let bytes: u64 = found
            .tables
            .iter()
            .map(|it| it.block_bytes * u64::from(it.blocks))
            .sum();
        assert_eq!(
            (bytes, found.regions[0].bytes),
            (163_840, 163_840),
            "{layout}"
        );
    }
}

#[test]
fn padding_and_other_layers_between_blocks_are_left_alone() {
    // Blocks of all layers side by side (BLHNC), with something behind.
    let mut tensors = [
        Tensor::new("layers.0.attn", &[10, 4, 16, 8], &[0, 1, 2, 3]),
        Tensor::new("layers.1.attn", &[10, 4, 16, 8], &[0, 1, 2, 3]),
    ];
    for (tensor, offset) in tensors.iter_mut().zip([0, 2_048]) {
        tensor.strides[0] = 1_280;
        (tensor.offset, tensor.storage_bytes) = (offset, 10 * 5_120);
    }
    let layers: &[&str] = &["layers.0.attn", "layers.1.attn"];
    let found = find(&tensors, &[(layers, 16)], 10).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 5_120), (2_048, 2_048, 5_120)]);
    assert_eq!(found.regions.len(), 1);
    assert_eq!(found.regions[0].bytes, 9 * 5_120 + 4_096);
}

#[test]
fn kernels_with_smaller_blocks_have_several_in_one_of_ours() {
    let found = alone(Tensor::new(LAYER, &[40, 4, 4, 8], &[0, 1, 2, 3]), 10).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 2_048)]);
    assert!(
        found.tables[0]
            .interior
            .starts_with("4 kernel blocks of 4 in dimension 1")
    );
    let found = alone(Tensor::new(LAYER, &[2, 40, 4, 4, 8], &[0, 1, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 2_048), (20_480, 2_048, 2_048)]);
    // 3 do not divide 16 tokens.
    let text = alone(Tensor::new(LAYER, &[30, 4, 4, 8], &[0, 1, 2, 3]), 10);
    assert!(
        text.unwrap_err()
            .to_string()
            .contains("neither its first dimension")
    );
    let mut gaps = Tensor::new(LAYER, &[40, 4, 4, 8], &[0, 1, 2, 3]);
    (gaps.strides[0], gaps.storage_bytes) = (129, 1 << 20);
    let text = alone(gaps, 10).unwrap_err().to_string();
    assert!(
        text.contains("4 neighbours in dimension 0 are one block, and there are gaps"),
        "{text}"
    );
}

#[test]
fn the_first_dimension_is_the_blocks_unless_it_may_be_keys_and_values() {
    // As many heads as blocks.
    let found = alone(Tensor::new(LAYER, &[8, 8, 16, 4], &[0, 1, 2, 3]), 8).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 2_048)]);
    for (shape, num_blocks) in [([2, 2, 16, 4], 2), ([2, 4, 16, 4], 2), ([2, 1, 16, 4], 1)] {
        let text = alone(Tensor::new(LAYER, &shape, &[0, 1, 2, 3]), num_blocks).unwrap_err();
        assert!(
            text.to_string()
                .contains("either of its first two dimensions"),
            "{text}"
        );
    }
    let found = alone(Tensor::new(LAYER, &[2, 5, 16, 4], &[0, 1, 2, 3]), 2).unwrap();
    assert_eq!(places(&found), [(0, 1_280, 1_280)]);
    let found = alone(Tensor::new(LAYER, &[1, 4, 16, 4], &[0, 1, 2, 3]), 1).unwrap();
    assert_eq!(places(&found), [(0, 1_024, 1_024)]);
}

#[test]
fn what_is_no_list_of_blocks_is_refused_by_name_with_its_shape() {
    // Heads within the blocks of all layers (BHLNC): not one piece.
    let mut heads = Tensor::new(LAYER, &[10, 4, 16, 8], &[0, 1, 2, 3]);
    heads.strides = vec![1_024, 256, 8, 1];
    heads.storage_bytes = 10 * 4_096;
    assert_eq!(
        alone(heads, 10).unwrap_err().to_string(),
        "layer \"model.layers.3.self_attn.attn\" of cache group 0: a tensor of shape [10, 4, 16, 8] with strides \
         [1024, 256, 8, 1] is not 10 blocks, because the inside of a block has gaps: dimension 1 goes in steps of 1024 \
         bytes over 512 bytes. Supported are blocks in the first dimension, or in the second one behind keys and \
         values, each block without gaps inside (vLLM's layouts LBHNC, LBNHC, BLHNC, BLNHC and LHBNC)"
    );
    let refused = |change: fn(&mut Tensor)| {
        let mut tensor = Tensor::new(LAYER, &[10, 4, 16, 8], &[0, 1, 2, 3]);
        tensor.storage_bytes = 1 << 30;
        change(&mut tensor);
        alone(tensor, 10).unwrap_err().to_string()
    };
    for (change, reason) in [
        // Every other head of a block lies between other blocks.
        (
            (|it| it.strides = vec![256, 384, 8, 1]) as fn(&mut Tensor),
            "strided across blocks",
        ),
        (
            |it| it.strides = vec![8, 1_280, 40, 1],
            "strided across blocks",
        ),
        (|it| it.strides[0] = 511, "blocks overlap"),
        (|it| it.strides = vec![512, 64, 8, 1], "overlaps"),
        (|it| it.strides = vec![512, 128, 8, 2], "has gaps"),
        (|it| it.strides[1] = 0, "dimension 1 is not positive"),
        (|it| it.strides[0] = -512, "dimension 0 is not positive"),
        (
            |it| it.strides[0] = i64::MAX,
            "larger than the address space",
        ),
        (|it| it.offset = u64::MAX, "larger than the address space"),
        (|it| it.storage = u64::MAX, "larger than the address space"),
        (
            |it| it.storage_bytes = 20_479,
            "its last byte is at 20480 of a storage of 20479 bytes",
        ),
        (|it| it.offset = (1 << 30) - 20_000, "of a storage of"),
        (|it| it.shape[0] = 11, "counts blocks"),
        (|it| it.shape[2] = 0, "no elements"),
        (|it| it.item_bytes = 0, "no elements"),
        (|it| it.strides.truncate(3), "a stride for each"),
        (
            |it| (it.shape, it.strides) = (vec![], vec![]),
            "a stride for each",
        ),
        // A raw buffer, and a state without blocks.
        (
            |it| (it.shape, it.strides) = (vec![40_960], vec![1]),
            "counts blocks",
        ),
        (
            |it| (it.shape, it.strides) = (vec![3, 5], vec![5, 1]),
            "counts blocks",
        ),
        // A plane for each of 17 heads.
        (
            |it| {
                let of_17 = Tensor::new(LAYER, &[10, 17, 16, 8], &[1, 0, 2, 3]);
                (it.shape, it.strides) = (of_17.shape, of_17.strides);
            },
            "17 planes",
        ),
    ] {
        let text = refused(change);
        assert!(text.contains(reason) && text.contains(LAYER), "{text}");
    }
}

#[test]
fn layers_and_groups_have_to_fit_and_what_is_left_out_is_said() {
    let tensor =
        |name: &str, offset: u64| Tensor::new(name, &[5, 4], &[0, 1]).within(offset, 1_000);
    let tensors = [
        tensor("layers.0.attn", 0),
        tensor("layers.1.attn", 80),
        tensor("layers.2.attn", 80),
        tensor("layers.9.attn", 80),
    ];
    let all: &[&str] = &["layers.0.attn", "layers.1.attn", "layers.2.attn"];
    let found = find(&tensors, &[(all, 16)], 5).unwrap();
    let notes: Vec<_> = found.notes.iter().map(ToString::to_string).collect();
    assert_eq!(
        notes,
        [
            "layer \"layers.2.attn\" uses the blocks of layer \"layers.1.attn\" and is left out",
            "layer \"layers.9.attn\" is in no cache group and is left out",
        ]
    );
    assert_eq!(found.tables.len(), 2);
    let text = |groups: &[(&[&str], u32)], num_blocks| {
        find(&tensors, groups, num_blocks).unwrap_err().to_string()
    };
    assert_eq!(
        text(&[(&["layers.0.attn"], 16), (&["layers.3.attn"], 16)], 5),
        "no tensor was registered for layer \"layers.3.attn\" of cache group 1"
    );
    assert_eq!(
        text(&[(&["layers.0.attn"], 16), (&["layers.0.attn"], 16)], 5),
        "layer \"layers.0.attn\" is listed twice, in cache groups 0 and 1"
    );
    assert_eq!(
        text(&[(&["layers.0.attn"], 0)], 5),
        "blocks of cache group 0 have 0 tokens"
    );
    assert_eq!(text(&[], 0), "the engine has 0 blocks");
    let nameless = alone(tensor("attn", 0), 5).unwrap_err().to_string();
    assert!(nameless.contains("\"attn\" has no index"), "{nameless}");
    let close = [tensor("layers.0.attn", 0), tensor("layers.1.attn", 76)];
    let layers: &[&str] = &["layers.1.attn", "layers.0.attn"];
    assert_eq!(
        find(&close, &[(layers, 16)], 5).unwrap_err().to_string(),
        "blocks of layers \"layers.0.attn\" and \"layers.1.attn\" of cache group 0 overlap"
    );
    // In two groups they may.
    find(&close, &[(&layers[..1], 16), (&layers[1..], 16)], 5).unwrap();
}

/// C43: groups lie over one another in a hybrid model, each with its own blocks.
#[test]
fn c43_groups_that_share_memory_are_one_region_and_keep_their_tables() {
    let full = Tensor::new("layers.0.attn", &[6, 8], &[0, 1]);
    let window = Tensor::new("layers.1.attn", &[6, 8], &[0, 1]);
    let groups: [(&[&str], u32); 2] = [(&["layers.0.attn"], 32), (&["layers.1.attn"], 16)];
    let found = find(&[full, window], &groups, 6).unwrap();
    assert_eq!(found.regions.len(), 1);
    assert_eq!(places(&found), [(0, 32, 32), (0, 32, 32)]);
    let numbers: Vec<_> = found.tables.iter().map(|it| (it.group, it.layer)).collect();
    assert_eq!(numbers, [(0, 0), (1, 16)]);
}

#[test]
fn storages_that_overlap_are_one_region_and_others_are_their_own() {
    let tensors = [
        Tensor::new("layers.0.attn", &[4, 4], &[0, 1]).within(0, 1_000),
        Tensor::new("layers.1.attn", &[4, 4], &[0, 1]).within(64, 1_000),
        Tensor::new("layers.2.attn", &[4, 4], &[0, 1])
            .at(STORAGE + 96)
            .within(32, 64 + 32),
        // Beside the last, and in the first two storages, whose ends nobody uses.
        Tensor::new("layers.3.attn", &[4, 4], &[0, 1]).at(STORAGE + 192),
    ];
    let names: Vec<&str> = tensors.iter().map(|it| it.layer.as_str()).collect();
    let find_with = |kinds: [MemoryKind; 4]| {
        let layers: Vec<String> = names.iter().map(|&it| it.to_owned()).collect();
        let group = CacheGroupSpec {
            layers: &layers,
            block_tokens: 16,
        };
        let views: Vec<_> = tensors.iter().zip(kinds).collect();
        let views: Vec<_> = views
            .iter()
            .map(|&(it, device)| TensorView {
                device,
                ..it.view()
            })
            .collect();
        discover(&views, &[group], 4).unwrap()
    };
    let host = MemoryKind::Host;
    let range = |it: &FoundRegion| (it.address - STORAGE, it.bytes);
    let found = find_with([host; 4]);
    let ranges: Vec<_> = found.regions.iter().map(range).collect();
    assert_eq!(ranges, [(0, 128), (128, 64), (192, 64)]);
    let at: Vec<_> = found
        .tables
        .iter()
        .map(|it| (it.region, it.offset))
        .collect();
    assert_eq!(at, [(0, 0), (0, 64), (1, 0), (2, 0)]);
    // Device addresses are a space of their own.
    let device = MemoryKind::Cuda { device: 1 };
    let found = find_with([host, device, host, host]);
    let kinds: Vec<_> = found
        .regions
        .iter()
        .map(|it| (it.kind, range(it)))
        .collect();
    let expected = [
        (host, (0, 64)),
        (host, (128, 64)),
        (host, (192, 64)),
        (device, (64, 64)),
    ];
    assert_eq!(kinds, expected);

    // Storages that do overlap: a view that was registered as a storage of its own.
    let tensors = [
        Tensor::new("layers.0.attn", &[4, 8], &[0, 1]),
        Tensor::new("layers.1.attn", &[4, 8], &[0, 1]).at(STORAGE + 64),
    ];
    let groups: [(&[&str], u32); 2] = [(&["layers.0.attn"], 16), (&["layers.1.attn"], 16)];
    let found = find(&tensors, &groups, 4).unwrap();
    let ranges: Vec<_> = found.regions.iter().map(range).collect();
    assert_eq!(ranges, [(0, 192)]);
    assert_eq!(places(&found), [(0, 32, 32), (64, 32, 32)]);
}

fn stage(layers: std::ops::Range<u32>) -> Discovered {
    stage_in_order(layers, false)
}

fn stage_in_order(layers: std::ops::Range<u32>, indexer_first: bool) -> Discovered {
    let mut tensors = Vec::new();
    for layer in layers {
        for (place, name) in ["self_attn.attn", "self_attn.indexer.k_cache"]
            .iter()
            .enumerate()
        {
            let name = format!("model.layers.{layer}.{name}");
            let storage = STORAGE + u64::from(layer) * 1_000 + place as u64 * 500;
            let shape: &[u64] = if place == 0 { &[2, 5, 4] } else { &[5, 2] };
            let order: Vec<usize> = (0..shape.len()).collect();
            tensors.push(Tensor::new(&name, shape, &order).at(storage));
        }
    }
    // Whatever the order in which they are registered.
    tensors.reverse();
    let (main, indexer): (Vec<&str>, Vec<&str>) = tensors
        .iter()
        .map(|it| it.layer.as_str())
        .partition(|name| name.ends_with("attn"));
    let groups: [(&[&str], u32); 2] = if indexer_first {
        [(&indexer, 16), (&main, 16)]
    } else {
        [(&main, 16), (&indexer, 16)]
    };
    find(&tensors, &groups, 5).unwrap()
}

#[test]
fn a_layer_has_the_same_number_in_every_stage() {
    let key = |it: &FoundTable| {
        (
            it.group,
            it.layer,
            it.name.clone(),
            it.plane,
            it.block_bytes,
        )
    };
    let whole: Vec<_> = stage(0..8).tables.iter().map(key).collect();
    assert_eq!(whole.len(), 24);
    let twelve = whole
        .iter()
        .find(|it| it.2 == "model.layers.5.self_attn.indexer.k_cache");
    assert_eq!(twelve.map(|it| (it.1, it.3)), Some((5 * 16 + 2, 2)));
    let mut stages: Vec<_> = stage(0..3).tables.iter().map(key).collect();
    stages.extend(stage(3..8).tables.iter().map(key));
    stages.sort();
    assert_eq!(stages, whole);
    // Nor do the groups matter.
    let by_name = |found: &Discovered| -> BTreeMap<(String, u32), u32> {
        let tables = found.tables.iter();
        tables
            .map(|it| ((it.name.clone(), it.plane), it.layer))
            .collect()
    };
    assert_eq!(by_name(&stage(0..8)), by_name(&stage_in_order(0..8, true)));
    let mut numbers: Vec<_> = whole.iter().map(|it| it.1).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), whole.len());
}

#[test]
fn modules_of_one_layer_share_its_index_up_to_16_planes() {
    let tensors: Vec<_> = (0..9)
        .map(|module| {
            let name = format!("model.layers.7.self_attn.{module}.attn");
            Tensor::new(&name, &[2, 5, 4], &[0, 1, 2]).at(STORAGE + module * 1_000)
        })
        .collect();
    let names: Vec<&str> = tensors.iter().map(|it| it.layer.as_str()).collect();
    let found = find(&tensors[..8], &[(&names[..8], 16)], 5).unwrap();
    let numbers: Vec<_> = found.tables.iter().map(|it| it.layer).collect();
    assert_eq!(numbers, (112..128).collect::<Vec<_>>());
    let text = find(&tensors, &[(&names, 16)], 5).unwrap_err().to_string();
    assert!(
        text.contains("18 planes together") && text.contains("self_attn.8"),
        "{text}"
    );
    // Two tensors of one name, such as the two states of a layer.
    let mut states = [tensors[0].clone(), tensors[1].clone()];
    states[1].layer = names[0].to_owned();
    let found = find(&states, &[(&names[..1], 16)], 5).unwrap();
    assert_eq!(found.tables.len(), 4);
    assert_eq!(places(&found)[2].0, 1_000);
}

fn fingerprint_of(shape: &[u64], order: &[usize], block_tokens: u32) -> Vec<(String, String)> {
    let tensor = Tensor::new(LAYER, shape, order);
    find(&[tensor], &[(&[LAYER], block_tokens)], 10)
        .unwrap()
        .fingerprint()
}

#[test]
fn a_fingerprint_says_what_has_to_be_alike_per_group() {
    let text = |found: &Discovered| {
        let fields = found.fingerprint();
        let fields: Vec<_> = fields
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        fields.join("\n")
    };
    assert_eq!(
        text(&stage(0..2)),
        "kv_block_tokens: [16, 16]\nkv_tables: [4, 2]\nkv_tables_block_bytes: [64, 16]\n\
         kv_tables_interior_of_group_0: 4 x (4 in dimension 2, 4 bytes each)\n\
         kv_tables_interior_of_group_1: 2 x (2 in dimension 1, 4 bytes each)"
    );
    // Where the blocks are does not matter, nor how many there are.
    let far = find(
        &[Tensor::new(LAYER, &[10, 4], &[0, 1])],
        &[(&[LAYER], 16)],
        10,
    );
    let near = find(
        &[Tensor::new(LAYER, &[20, 4], &[0, 1]).at(64)],
        &[(&[LAYER], 16)],
        20,
    );
    assert_eq!(text(&far.unwrap()), text(&near.unwrap()));
    // A description takes at most 4 KiB for a value.
    let mut found = stage(0..1);
    found.tables[0].interior = "x".repeat(5_000);
    let (name, value) = &found.fingerprint()[3];
    assert_eq!(name, "kv_tables_interior_of_group_0");
    assert!(value.starts_with("digest ") && value.len() < 100);
}

/// C40: engines whose blocks differ refuse one another, and say in what.
#[test]
fn c40_engines_whose_blocks_differ_refuse_one_another_and_name_the_field() {
    let network = LoopbackNetwork::new();
    let engine = |name: &str, fingerprint: Vec<(String, String)>| {
        let mut config = EngineConfig::new(EngineId::new(name).unwrap());
        config.compatibility.extend(fingerprint);
        let network = network.clone();
        Engine::builder(config)
            .start_on(move || LoopbackFabric::new(&network, 1_024))
            .unwrap()
    };
    let usual = || fingerprint_of(&[10, 4, 16, 64], &[0, 1, 2, 3], 16);
    let decode = engine("decode", usual());
    let same = engine("same", usual());
    decode
        .connect(same.describe().unwrap(), LaneChoice::Auto)
        .unwrap();
    for (field, other) in [
        (
            "kv_block_tokens",
            fingerprint_of(&[10, 4, 16, 64], &[0, 1, 2, 3], 32),
        ),
        (
            "kv_tables",
            fingerprint_of(&[10, 4, 16, 64], &[1, 0, 2, 3], 16),
        ),
        (
            "kv_tables_block_bytes",
            fingerprint_of(&[10, 4, 16, 32], &[0, 1, 2, 3], 16),
        ),
        // As many bytes in another order: nothing else would tell.
        (
            "kv_tables_interior_of_group_0",
            fingerprint_of(&[10, 4, 16, 64], &[0, 2, 1, 3], 16),
        ),
        (
            "kv_tables_interior_of_group_0",
            fingerprint_of(&[20, 4, 8, 64], &[0, 1, 2, 3], 16),
        ),
    ] {
        let other = engine("other", other);
        let error = decode.connect(other.describe().unwrap(), LaneChoice::Auto);
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains(&format!("the engines differ in {field}: ")),
            "{text}"
        );
    }
}

//! Tensors as vLLM has them, and what is found out about them.

use super::*;

mod fitting;
mod identity;
mod layouts;

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

//! Where a block's bytes are on this rank, and in its file: layer after layer.

use kvferry_engine::wire::MemoryKind;
use kvferry_engine::{MemoryError, MemoryRegion};

use crate::contract::{CacheLayer, CacheLayout, NULL_BLOCK, RegisterCacheError};

/// All groups of a rank.
#[derive(Debug)]
pub(super) struct Layout(Vec<Spans>);

/// The layers of a group, in their order.
#[derive(Debug, Default)]
pub(super) struct Spans {
    layers: Vec<CacheLayer>,
    payload: usize,
}

impl Layout {
    /// Checks every layer against its memory, and the groups against those of the configuration.
    pub(super) fn new(
        layout: &CacheLayout,
        block_tokens: &[u32],
        max_file_bytes: u64,
    ) -> Result<Self, RegisterCacheError> {
        let given: Vec<u32> = layout
            .groups
            .iter()
            .map(|group| group.block_tokens)
            .collect();
        if given != block_tokens {
            return Err(RegisterCacheError {
                layer: layout.layers.first().map_or(0, |layer| layer.layer),
                reason: format!(
                    "the cache groups have blocks of {given:?} tokens, shared storage was set to {block_tokens:?}"
                ),
            });
        }
        let mut groups: Vec<Spans> = given.iter().map(|_| Spans::default()).collect();
        for layer in &layout.layers {
            let refuse = |reason| RegisterCacheError {
                layer: layer.layer,
                reason,
            };
            let spans = groups.get_mut(layer.group as usize).ok_or_else(|| {
                refuse(format!(
                    "it is of cache group {}, there are {}",
                    layer.group,
                    given.len()
                ))
            })?;
            check(layer).map_err(refuse)?;
            spans.layers.push(layer.clone());
            let payload = (spans.payload as u64).saturating_add(layer.block_bytes);
            if payload.saturating_add(super::file::HEADER_BYTES as u64) > max_file_bytes {
                return Err(refuse(format!(
                    "with it, a block of group {} has {payload} bytes, which does not fit into `max_bytes` = \
                     {max_file_bytes} of shared storage",
                    layer.group
                )));
            }
            spans.payload = payload as usize;
        }
        for spans in &mut groups {
            spans.layers.sort_by_key(|layer| layer.layer);
        }
        Ok(Self(groups))
    }

    pub(super) fn group(&self, group: u32) -> Option<&Spans> {
        self.0.get(group as usize)
    }
}

fn check(layer: &CacheLayer) -> Result<(), String> {
    let &CacheLayer {
        offset,
        block_bytes,
        block_stride,
        blocks,
        ..
    } = layer;
    if layer.memory.kind() != MemoryKind::Host {
        return Err(format!(
            "its blocks are in {} memory; shared storage takes host memory only",
            layer.memory.kind()
        ));
    }
    if blocks == 0 || block_bytes == 0 || block_stride < block_bytes {
        return Err(format!(
            "{blocks} blocks of {block_bytes} bytes, {block_stride} bytes apart, are no blocks"
        ));
    }
    let end = u64::from(blocks - 1)
        .checked_mul(block_stride)
        .and_then(|last| last.checked_add(offset)?.checked_add(block_bytes));
    if end.is_none_or(|end| end > layer.memory.bytes()) {
        return Err(format!(
            "{blocks} blocks of {block_bytes} bytes, {block_stride} bytes apart, from offset {offset} on, \
             do not fit into {} bytes",
            layer.memory.bytes()
        ));
    }
    Ok(())
}

impl Spans {
    /// Bytes of a block, of all layers; 0 if this rank has none of the group.
    pub(super) const fn payload_bytes(&self) -> usize {
        self.payload
    }

    /// Whether a block may be read and written.
    pub(super) fn has(&self, block: u32) -> bool {
        block != NULL_BLOCK && self.layers.iter().all(|layer| block < layer.blocks)
    }

    /// Copies a block out; `out` has its length.
    pub(super) fn read(&self, block: u32, out: &mut [u8]) -> Result<(), MemoryError> {
        let mut rest = out;
        for layer in &self.layers {
            let (piece, after) = rest.split_at_mut(layer.block_bytes as usize);
            memory(layer).read_at(at(layer, block), piece)?;
            rest = after;
        }
        Ok(())
    }

    /// Copies a block in; `bytes` has its length.
    pub(super) fn write(&self, block: u32, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut rest = bytes;
        for layer in &self.layers {
            let (piece, after) = rest.split_at(layer.block_bytes as usize);
            memory(layer).write_at(at(layer, block), piece)?;
            rest = after;
        }
        Ok(())
    }
}

const fn memory(layer: &CacheLayer) -> &MemoryRegion {
    &layer.memory
}

/// In range: the layer was checked, and so was the block.
const fn at(layer: &CacheLayer, block: u32) -> u64 {
    layer.offset + block as u64 * layer.block_stride
}

#[cfg(test)]
mod tests {
    use kvferry_engine::HostPool;

    use super::*;
    use crate::contract::CacheGroup;

    fn layer(number: u32, memory: &MemoryRegion, offset: u64) -> CacheLayer {
        CacheLayer {
            layer: number,
            group: 0,
            memory: memory.clone(),
            offset,
            block_bytes: 8,
            block_stride: 32,
            blocks: 4,
        }
    }

    fn layout(layers: Vec<CacheLayer>) -> CacheLayout {
        CacheLayout {
            groups: vec![CacheGroup { block_tokens: 16 }],
            layers,
        }
    }

    #[test]
    fn a_block_is_its_layers_one_after_the_other_and_nothing_between_them() {
        let memory = HostPool::new(4096).unwrap().region().unwrap();
        // Registered out of order, and interleaved.
        let layers = vec![layer(1, &memory, 16), layer(0, &memory, 0)];
        let layout = Layout::new(&layout(layers), &[16], 1 << 20).unwrap();
        let spans = layout.group(0).unwrap();
        assert_eq!(spans.payload_bytes(), 16);
        memory.fill(0, 4096, 0xEE).unwrap();
        spans.write(2, b"layer 0.layer 1.").unwrap();
        let mut around = [0; 48];
        memory.read_at(56, &mut around).unwrap();
        let mut expected = [0xEE; 48];
        expected[8..16].copy_from_slice(b"layer 0.");
        expected[24..32].copy_from_slice(b"layer 1.");
        assert_eq!(around, expected);
        let mut out = [0; 16];
        spans.read(2, &mut out).unwrap();
        assert_eq!(&out, b"layer 0.layer 1.");
        assert!(spans.has(3) && !spans.has(4) && !spans.has(NULL_BLOCK));
        assert!(layout.group(1).is_none());
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_layer_and_numbers() {
        let memory = HostPool::new(4096).unwrap().region().unwrap();
        let refused = |change: fn(&mut CacheLayer), tokens: u32, max: u64| {
            let mut bad = layer(5, &memory, 0);
            change(&mut bad);
            Layout::new(&layout(vec![bad]), &[tokens], max)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            refused(|layer| layer.offset = 4_000, 16, 1 << 20),
            "layer 5: 4 blocks of 8 bytes, 32 bytes apart, from offset 4000 on, do not fit into 4096 bytes"
        );
        assert!(refused(|layer| layer.block_stride = u64::MAX, 16, 1 << 20).contains("do not fit"));
        assert!(refused(|layer| layer.block_stride = 7, 16, 1 << 20).contains("7 bytes apart"));
        assert!(refused(|layer| layer.blocks = 0, 16, 1 << 20).contains("0 blocks"));
        assert!(refused(|layer| layer.group = 1, 16, 1 << 20).contains("cache group 1"));
        assert!(refused(|_| {}, 32, 1 << 20).contains("[16]"));
        assert!(refused(|_| {}, 16, 71).contains("`max_bytes` = 71"));
    }
}

//! Which byte belongs where: a function of (layer, block, position).

use kvferry_engine::{MemoryRegion, Table};

/// The byte at `at` of a block.
#[must_use]
pub fn byte(layer: u32, block: u32, at: u64) -> u8 {
    let mixed =
        (u64::from(layer) << 40 ^ u64::from(block) << 8 ^ at).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 56) as u8
}

/// What destinations hold before anything is read.
pub const POISON: u8 = 0xA5;

/// Fills every block of a table.
pub fn fill(table: &Table, memory: &MemoryRegion) {
    fill_as(table, memory, table.description().layer);
}

/// Fills every block of a table as if it were another layer's.
pub fn fill_as(table: &Table, memory: &MemoryRegion, layer: u32) {
    let d = table.description();
    let mut bytes = vec![0; d.block_bytes as usize];
    for block in 0..d.block_count {
        for (at, slot) in bytes.iter_mut().enumerate() {
            *slot = byte(layer, block, at as u64);
        }
        memory
            .write_at(d.offset + u64::from(block) * d.block_stride, &bytes)
            .unwrap();
    }
}

/// How many bytes of our block `local` differ from the producer's block `remote`, or from the
/// poison if it was not to be read.
#[must_use]
pub fn wrong_bytes(table: &Table, memory: &MemoryRegion, local: u32, remote: Option<u32>) -> u64 {
    wrong_bytes_as(table, memory, local, remote, table.description().layer)
}

/// [`wrong_bytes`] of another layer.
#[must_use]
pub fn wrong_bytes_as(
    table: &Table,
    memory: &MemoryRegion,
    local: u32,
    remote: Option<u32>,
    layer: u32,
) -> u64 {
    let d = table.description();
    let mut bytes = vec![0; d.block_bytes as usize];
    memory
        .read_at(d.offset + u64::from(local) * d.block_stride, &mut bytes)
        .unwrap();
    let expected = |at: u64| remote.map_or(POISON, |remote| byte(layer, remote, at));
    bytes
        .iter()
        .enumerate()
        .filter(|&(at, &got)| got != expected(at as u64))
        .count() as u64
}

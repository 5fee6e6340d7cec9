//! Registering: a region's chunks, all of them or none.

use kvferry_wire::MemoryKind;

use super::core::Core;
use crate::chunks::Chunks;
use crate::error::{ChunkOfRegion, FabricError, RegisterError};
use crate::fabric::{Fabric, Registered};
use crate::memory::memlock::{self, PinnedMemory};
use crate::memory::{MemoryError, MemoryRegion};

impl Core {
    /// Registers every chunk of a region, or says why one was refused and takes back the others.
    pub(super) fn register(
        &self,
        memory: &MemoryRegion,
        chunks: Chunks,
        fabric: &mut dyn Fabric,
    ) -> Result<Vec<Registered>, RegisterError> {
        let pinned = self.pinned_memory(memory, chunks, fabric);
        let (address, bytes, kind) = (memory.address(), memory.bytes(), memory.kind());
        if let Some(pinned) = pinned
            && pinned.need > pinned.limit
        {
            return Err(RegisterError::Memlock {
                address,
                bytes,
                kind,
                pinned,
            });
        }
        let mut registered = Vec::new();
        for (index, (offset, length)) in chunks.ranges().enumerate() {
            match register_chunk(memory, offset, length, fabric) {
                Ok(chunk) => registered.push(chunk),
                Err(source) => {
                    take_back(&registered, fabric);
                    let chunk = ChunkOfRegion {
                        index: index as u64,
                        count: chunks.count(),
                        address: address + offset,
                        bytes: length,
                    };
                    return Err(RegisterError::Fabric {
                        address,
                        bytes,
                        kind,
                        chunk: (chunk.count > 1).then(|| Box::new(chunk)),
                        source,
                        pinned,
                    });
                }
            }
        }
        Ok(registered)
    }

    /// What pinning the region would take, where it is pinned and there is a limit.
    fn pinned_memory(
        &self,
        memory: &MemoryRegion,
        chunks: Chunks,
        fabric: &dyn Fabric,
    ) -> Option<PinnedMemory> {
        if !fabric.capabilities().pins_memory || memory.kind() != MemoryKind::Host {
            return None;
        }
        let catalog = self.shared.catalog();
        let hosts = catalog
            .regions
            .iter()
            .filter(|region| region.memory.kind() == MemoryKind::Host);
        let ours = hosts
            .map(|region| in_pages(&region.memory, region.chunks))
            .sum();
        memlock::need(ours, in_pages(memory, chunks))
    }
}

/// A page that two chunks share counts twice.
fn in_pages(memory: &MemoryRegion, chunks: Chunks) -> u64 {
    let of = |(offset, bytes)| memlock::in_pages(memory.address() + offset, bytes);
    chunks.ranges().map(of).sum()
}

fn register_chunk(
    memory: &MemoryRegion,
    offset: u64,
    bytes: u64,
    fabric: &mut dyn Fabric,
) -> Result<Registered, FabricError> {
    let outside = |error: MemoryError| FabricError::new("register", error.to_string());
    fabric.register(&memory.part(offset, bytes).map_err(outside)?)
}

/// Ends the registrations of a region that nobody has used.
pub(super) fn take_back(registered: &[Registered], fabric: &mut dyn Fabric) {
    for chunk in registered {
        fabric.deregister(chunk.handle);
    }
}

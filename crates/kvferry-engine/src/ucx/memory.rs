//! What UCX knows of memory: registrations of ours, and keys to peers' regions.
//!
//! Invariant: a key is used on the endpoint that it was imported for and on no other, and lives until
//! that endpoint's last operation has ended.

use std::collections::HashMap;
use std::ptr;
use std::slice;

use kvferry_wire::MemoryKind;
use ucx_sys::*;

use super::endpoint::Link;
use super::sealed::Sealed;
use super::status;
use super::worker::Context;
use crate::error::FabricError;
use crate::fabric::{EndpointId, KeyId, RegionHandle, Registered};
use crate::memory::MemoryRegion;

struct Key {
    endpoint: EndpointId,
    handle: ucp_rkey_h,
}

/// Registrations and keys of a fabric.
#[derive(Default)]
pub(super) struct Memory {
    next: u64,
    /// `None` without a data context: messages need no registration.
    regions: HashMap<RegionHandle, Option<ucp_mem_h>>,
    keys: HashMap<KeyId, Key>,
}

impl Memory {
    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn register(
        &mut self,
        memory: &MemoryRegion,
        context: Option<&Context>,
    ) -> Result<Registered, FabricError> {
        let (handle, key) = match context {
            Some(context) => {
                check_supported(memory.kind(), context)?;
                let (handle, key) = map(memory, context)?;
                (Some(handle), Some(key))
            }
            None if memory.kind() == MemoryKind::Host => (None, None),
            None => {
                let reason = format!(
                    "there is no data context, and messages carry host memory only, not {}",
                    memory.kind()
                );
                return Err(FabricError::new("ucp_mem_map", reason));
            }
        };
        let number = RegionHandle(self.fresh());
        self.regions.insert(number, handle);
        Ok(Registered {
            handle: number,
            key,
        })
    }

    pub(super) fn deregister(&mut self, region: RegionHandle, context: Option<&Context>) {
        if let Some(Some(handle)) = self.regions.remove(&region)
            && let Some(context) = context
        {
            unmap(context, handle);
        }
    }

    pub(super) fn check_registered(
        &self,
        call: &'static str,
        region: RegionHandle,
    ) -> Result<(), FabricError> {
        if self.regions.contains_key(&region) {
            return Ok(());
        }
        Err(FabricError::new(
            call,
            format!("region number {} is not registered", region.0),
        ))
    }

    pub(super) fn import_key(
        &mut self,
        endpoint: EndpointId,
        link: &Link,
        key: &[u8],
    ) -> Result<KeyId, FabricError> {
        const CALL: &str = "ucp_ep_rkey_unpack";
        let bytes = Sealed::Key
            .open(key)
            .map_err(|reason| FabricError::new(CALL, reason))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the endpoint is open; the key is one that a UCX packed, whole (its seal says so).
        let result =
            unsafe { ucp_ep_rkey_unpack(link.handle(), bytes.as_ptr().cast(), &raw mut handle) };
        status::check(CALL, result)?;
        let id = KeyId(self.fresh());
        self.keys.insert(id, Key { endpoint, handle });
        Ok(id)
    }

    /// The key, if it is one of the endpoint's.
    pub(super) fn key(
        &self,
        call: &'static str,
        key: KeyId,
        endpoint: EndpointId,
    ) -> Result<ucp_rkey_h, FabricError> {
        let reason = match self.keys.get(&key) {
            Some(found) if found.endpoint == endpoint => return Ok(found.handle),
            Some(found) => format!(
                "key number {} belongs to endpoint {}, not to endpoint {}; import it for each",
                key.0, found.endpoint.0, endpoint.0
            ),
            None => format!(
                "there is no key number {}; its endpoint may be closed",
                key.0
            ),
        };
        Err(FabricError::new(call, reason))
    }

    /// Keys that are imported.
    #[cfg(test)]
    pub(super) fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Gives up one key of an endpoint, which no operation uses any more.
    pub(super) fn forget_key(&mut self, endpoint: EndpointId, key: KeyId) {
        if self
            .keys
            .get(&key)
            .is_some_and(|key| key.endpoint == endpoint)
            && let Some(key) = self.keys.remove(&key)
        {
            // SAFETY: unpacked by `import_key`, destroyed once, in use by no operation (the caller's
            // promise), and its worker is live: keys are dropped from the map with it.
            unsafe { ucp_rkey_destroy(key.handle) };
        }
    }

    /// Gives up the keys of an endpoint whose operations have all ended.
    pub(super) fn forget_keys(&mut self, endpoint: EndpointId) {
        self.keys.retain(|_, key| {
            let keep = key.endpoint != endpoint;
            if !keep {
                // SAFETY: unpacked by `import_key`, destroyed once, in use by no operation, and its
                // worker is live.
                unsafe { ucp_rkey_destroy(key.handle) };
            }
            keep
        });
    }

    /// Forgets every key after its worker is gone, and the keys with it.
    pub(super) fn drop_keys(&mut self) {
        self.keys.clear();
    }

    /// Gives up everything after the worker is gone. Keys that are left went with it.
    pub(super) fn end(&mut self, context: &Context) {
        self.keys.clear();
        for (_, handle) in self.regions.drain() {
            if let Some(handle) = handle {
                unmap(context, handle);
            }
        }
    }
}

/// UCX's name for a kind of memory.
pub(super) fn memory_type(kind: MemoryKind) -> ucs_memory_type_t {
    match kind {
        MemoryKind::Host => UCS_MEMORY_TYPE_HOST,
        MemoryKind::Cuda { .. } => UCS_MEMORY_TYPE_CUDA,
        MemoryKind::Rocm { .. } => UCS_MEMORY_TYPE_ROCM,
    }
}

/// Refuses a kind of memory that this UCX was not built for, or whose devices are not here.
/// `ucp_mem_map` would accept it and register it with nothing.
fn check_supported(kind: MemoryKind, context: &Context) -> Result<(), FabricError> {
    const CALL: &str = "ucp_mem_map";
    let mut attributes = ucp_context_attr_t {
        field_mask: u64::from(UCP_ATTR_FIELD_MEMORY_TYPES),
        ..Default::default()
    };
    // SAFETY: the context is live; the attributes are a live place with the wanted field named.
    let result = unsafe { ucp_context_query(context.handle(), &raw mut attributes) };
    status::check(CALL, result)?;
    if attributes.memory_types & (1 << memory_type(kind)) == 0 {
        let version = features().version;
        return Err(FabricError::new(
            CALL,
            format!("UCX {version} has no support for {kind} memory on this host"),
        ));
    }
    Ok(())
}

fn map(memory: &MemoryRegion, context: &Context) -> Result<(ucp_mem_h, Vec<u8>), FabricError> {
    let base = memory.pointer(0, memory.bytes());
    let base = base.map_err(|error| FabricError::new("ucp_mem_map", error.to_string()))?;
    let params = ucp_mem_map_params_t {
        field_mask: u64::from(
            UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | UCP_MEM_MAP_PARAM_FIELD_FLAGS
                | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        ),
        address: base.as_ptr().cast(),
        length: memory.bytes() as usize,
        flags: 0,
        memory_type: memory_type(memory.kind()),
        ..Default::default()
    };
    let mut handle = ptr::null_mut();
    // SAFETY: the context is live; the range is mapped for as long as it is registered, by the
    // contract of `MemoryRegion`, and of the kind that it says.
    let result = unsafe { ucp_mem_map(context.handle(), &raw const params, &raw mut handle) };
    status::check("ucp_mem_map", result)?;
    match pack(context, handle) {
        Ok(key) => Ok((handle, key)),
        Err(error) => {
            unmap(context, handle);
            Err(error)
        }
    }
}

fn pack(context: &Context, handle: ucp_mem_h) -> Result<Vec<u8>, FabricError> {
    let (mut buffer, mut length) = (ptr::null_mut(), 0);
    // SAFETY: context and handle are live; both results are written to live places.
    let result =
        unsafe { ucp_rkey_pack(context.handle(), handle, &raw mut buffer, &raw mut length) };
    status::check("ucp_rkey_pack", result)?;
    // SAFETY: UCX says that `length` bytes are there; copied here.
    let key = Sealed::Key.seal(unsafe { slice::from_raw_parts(buffer.cast::<u8>(), length) });
    // SAFETY: packed above, released once.
    unsafe { ucp_rkey_buffer_release(buffer) };
    Ok(key)
}

fn unmap(context: &Context, handle: ucp_mem_h) {
    // SAFETY: both are live; the handle is given up here, once, and no operation uses it any more.
    let result = unsafe { ucp_mem_unmap(context.handle(), handle) };
    if result != UCS_OK {
        tracing::error!(
            status = status::text(result),
            "ucp_mem_unmap failed; the region stays pinned"
        );
    }
}

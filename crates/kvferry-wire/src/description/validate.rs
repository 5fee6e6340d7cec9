//! What a description must satisfy.
//!
//! Pure functions over the plain fields. The engine checks its own tables with the same
//! [`check_table`], so that what one side may register, the other side accepts.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
};

use serde::{
    Deserializer, Serializer,
    de::{Error as _, MapAccess, Visitor},
};
use serde_bytes::{ByteBuf, Bytes};

use super::{
    Addresses, Description, Interior, MAX_ADDRESS_BYTES, MAX_COMPATIBILITY_FIELDS,
    MAX_FIELD_NAME_BYTES, MAX_FIELD_VALUE_BYTES, MAX_HOST_BYTES, MAX_KEY_BYTES, MAX_KEYS,
    MAX_REGIONS, MAX_TABLES, MAX_TAG_BYTES, MAX_UNIX_SOCKET_BYTES, RegionDescription,
    TableDescription,
};
use crate::{
    WireError,
    packed::{capped, capped_by, check_at_most, check_text, shown},
};

impl Description {
    /// Checks everything that one description can be checked for by itself.
    ///
    /// # Errors
    /// [`WireError::TooLong`] or [`WireError::BadValue`], naming the field and its value.
    pub fn validate(&self) -> Result<(), WireError> {
        check_text(
            "description.kvferry_version",
            &self.kvferry_version,
            MAX_TAG_BYTES,
        )?;
        check_text("description.host", &self.host, MAX_HOST_BYTES)?;
        if let Some(name) = &self.unix_socket {
            check_not_empty("description.unix_socket", name.len())?;
            check_text("description.unix_socket", name, MAX_UNIX_SOCKET_BYTES)?;
        }
        check_addresses(&self.addresses)?;
        check_compatibility(&self.compatibility)?;
        let regions = check_regions(&self.regions)?;
        check_tables(&self.tables, &regions)
    }
}

/// Checks one table against the length of the region that it names.
///
/// # Errors
/// [`WireError::BadValue`] or [`WireError::TooLong`], naming the field and its value.
pub fn check_table(table: &TableDescription, region_bytes: u64) -> Result<(), WireError> {
    if table.block_bytes == 0 {
        return Err(WireError::bad("table.block_bytes", 0_u8, "at least 1"));
    }
    if table.block_stride < table.block_bytes {
        return Err(WireError::bad(
            "table.block_stride",
            format!(
                "{} with blocks of {}",
                table.block_stride, table.block_bytes
            ),
            "at least block_bytes",
        ));
    }
    if table.block_count == 0 {
        return Err(WireError::bad("table.block_count", 0_u8, "at least 1"));
    }
    let end = (u64::from(table.block_count) - 1)
        .checked_mul(table.block_stride)
        .and_then(|last| last.checked_add(table.offset))
        .and_then(|last| last.checked_add(table.block_bytes));
    if end.is_none_or(|end| end > region_bytes) {
        return Err(WireError::bad(
            "table.offset",
            format!(
                "{} with {} blocks of {} bytes every {} in a region of {region_bytes}",
                table.offset, table.block_count, table.block_bytes, table.block_stride
            ),
            "blocks that lie within the region",
        ));
    }
    check_interior(&table.interior, table.block_bytes)
}

fn check_interior(interior: &Interior, block_bytes: u64) -> Result<(), WireError> {
    check_not_empty("interior.layout", interior.layout.len())?;
    check_text("interior.layout", &interior.layout, MAX_TAG_BYTES)?;
    if let Some(packing) = &interior.packing {
        check_text("interior.packing", packing, MAX_TAG_BYTES)?;
    }
    for (field, count) in [
        ("interior.heads", interior.heads),
        ("interior.tokens", interior.tokens),
        ("interior.planes", interior.planes),
    ] {
        if count == 0 {
            return Err(WireError::bad(field, count, "at least 1"));
        }
    }
    let last_head = (u64::from(interior.heads) - 1).checked_mul(interior.head_stride);
    if last_head.is_none_or(|last| last >= block_bytes) {
        return Err(WireError::bad(
            "interior.head_stride",
            format!(
                "{} with {} heads in blocks of {block_bytes}",
                interior.head_stride, interior.heads
            ),
            "heads that begin within the block",
        ));
    }
    let last_token = (u64::from(interior.tokens) - 1).checked_mul(interior.token_stride);
    let last = last_token
        .zip(last_head)
        .and_then(|(token, head)| token.checked_add(head));
    if last.is_none_or(|last| last >= block_bytes) {
        return Err(WireError::bad(
            "interior.token_stride",
            format!(
                "{} with {} tokens in blocks of {block_bytes}",
                interior.token_stride, interior.tokens
            ),
            "tokens of every head that begin within the block",
        ));
    }
    Ok(())
}

fn check_addresses(addresses: &Addresses) -> Result<(), WireError> {
    check_not_empty("addresses.message", addresses.message.len())?;
    check_at_most(
        "addresses.message",
        addresses.message.len(),
        MAX_ADDRESS_BYTES,
    )?;
    if let Some(data) = &addresses.data {
        check_not_empty("addresses.data", data.len())?;
        check_at_most("addresses.data", data.len(), MAX_ADDRESS_BYTES)?;
    }
    Ok(())
}

fn check_compatibility(fields: &BTreeMap<String, String>) -> Result<(), WireError> {
    check_at_most(
        "description.compatibility",
        fields.len(),
        MAX_COMPATIBILITY_FIELDS,
    )?;
    for (name, value) in fields {
        check_not_empty("compatibility field name", name.len())?;
        check_text("compatibility field name", name, MAX_FIELD_NAME_BYTES)?;
        check_text("compatibility field value", value, MAX_FIELD_VALUE_BYTES)?;
    }
    Ok(())
}

/// Checks the regions and returns their lengths by id.
fn check_regions(regions: &[RegionDescription]) -> Result<HashMap<u32, u64>, WireError> {
    check_at_most("description.regions", regions.len(), MAX_REGIONS)?;
    let keys = regions.iter().map(|region| region.keys.len()).sum();
    check_at_most("region.keys", keys, MAX_KEYS)?;
    let mut lengths = HashMap::with_capacity(regions.len());
    let mut ranges = Vec::with_capacity(regions.len());
    for region in regions {
        if region.bytes == 0 {
            return Err(WireError::bad("region.bytes", 0_u8, "at least 1"));
        }
        let Some(end) = region.base.checked_add(region.bytes) else {
            return Err(WireError::bad(
                "region.base",
                format!("{:#x} with {} bytes", region.base, region.bytes),
                "an end below 2^64",
            ));
        };
        check_chunks(region)?;
        if lengths.insert(region.id, region.bytes).is_some() {
            return Err(WireError::bad(
                "region.id",
                region.id,
                "an id that is used once",
            ));
        }
        ranges.push((region.kind, region.base, end, region.id));
    }
    check_overlaps(ranges)?;
    Ok(lengths)
}

/// Both sides compute where chunks begin, so what is said of them must fit the region's length.
fn check_chunks(region: &RegionDescription) -> Result<(), WireError> {
    if region.chunk_bytes == 0 || region.chunk_bytes > region.bytes {
        return Err(WireError::bad(
            "region.chunk_bytes",
            format!("{} in a region of {}", region.chunk_bytes, region.bytes),
            "1 to the region's length",
        ));
    }
    let (keys, chunks) = (region.keys.len(), region.chunks());
    if keys != 0 && keys as u64 != chunks {
        return Err(WireError::bad(
            "region.keys",
            format!(
                "{keys} for {chunks} chunks of {} bytes in a region of {}",
                region.chunk_bytes, region.bytes
            ),
            "a key for every chunk, or none",
        ));
    }
    for key in &region.keys {
        check_not_empty("region.keys", key.len())?;
        check_at_most("region.keys", key.len(), MAX_KEY_BYTES)?;
    }
    Ok(())
}

fn check_overlaps<K: Ord + fmt::Display>(
    mut ranges: Vec<(K, u64, u64, u32)>,
) -> Result<(), WireError> {
    ranges.sort_unstable();
    for (before, after) in ranges.iter().zip(ranges.iter().skip(1)) {
        if before.0 == after.0 && after.1 < before.2 {
            return Err(WireError::bad(
                "region.base",
                format!(
                    "{:#x} of region {} ({}), and region {} ends at {:#x}",
                    after.1, after.3, after.0, before.3, before.2
                ),
                "regions of one kind that do not overlap",
            ));
        }
    }
    Ok(())
}

fn check_tables(tables: &[TableDescription], regions: &HashMap<u32, u64>) -> Result<(), WireError> {
    check_at_most("description.tables", tables.len(), MAX_TABLES)?;
    let mut ids = HashSet::with_capacity(tables.len());
    for table in tables {
        if !ids.insert(table.id) {
            return Err(WireError::bad(
                "table.id",
                table.id,
                "an id that is used once",
            ));
        }
        let Some(&bytes) = regions.get(&table.region) else {
            return Err(WireError::bad(
                "table.region",
                table.region,
                "the id of a region in the same description",
            ));
        };
        check_table(table, bytes)?;
    }
    Ok(())
}

fn check_not_empty(field: &'static str, length: usize) -> Result<(), WireError> {
    if length == 0 {
        Err(WireError::bad(field, "empty", "at least 1 byte"))
    } else {
        Ok(())
    }
}

/// Deserializes the regions, no more than the cap, and their keys, no more than theirs.
pub(super) fn regions<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<RegionDescription>, D::Error> {
    let mut keys = 0;
    capped_by(
        deserializer,
        "regions",
        MAX_REGIONS,
        |region: &RegionDescription| {
            keys += region.keys.len();
            if keys > MAX_KEYS {
                return Err(format!("more than {MAX_KEYS} keys in regions"));
            }
            Ok(())
        },
    )
}

/// Deserializes the keys of a region, no more than a description may hold.
pub(super) fn keys<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Vec<u8>>, D::Error> {
    let keys: Vec<ByteBuf> = capped(deserializer, "keys", MAX_KEYS)?;
    Ok(keys.into_iter().map(ByteBuf::into_vec).collect())
}

/// Serializes the keys of a region, each as bytes.
pub(super) fn write_keys<S: Serializer>(keys: &[Vec<u8>], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(keys.iter().map(|key| Bytes::new(key)))
}

/// Deserializes the tables, no more than the cap.
pub(super) fn tables<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<TableDescription>, D::Error> {
    capped(deserializer, "tables", MAX_TABLES)
}

/// Deserializes the compatibility fields: no more than the cap, and no name twice, of which one
/// would silently win.
pub(super) fn compatibility<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    struct Fields;

    impl<'de> Visitor<'de> for Fields {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_COMPATIBILITY_FIELDS} compatibility fields")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut fields = BTreeMap::new();
            while let Some((name, value)) = map.next_entry::<String, String>()? {
                if fields.len() == MAX_COMPATIBILITY_FIELDS {
                    return Err(A::Error::custom(format_args!(
                        "more than {MAX_COMPATIBILITY_FIELDS} compatibility fields"
                    )));
                }
                let quoted = shown(&name);
                if fields.insert(name, value).is_some() {
                    return Err(A::Error::custom(format_args!(
                        "compatibility field {quoted} appears twice"
                    )));
                }
            }
            Ok(fields)
        }
    }

    deserializer.deserialize_map(Fields)
}

//! Which blocks there are, from the tensors that vLLM registers.
//!
//! Responsible for turning tensors (addresses, shapes, strides) and cache groups into regions to register and
//! tables of blocks in them, and for refusing what blocks cannot be made of. Looks at numbers only: it
//! touches no memory. Not for how a block's inside is cut: blocks move whole.
//!
//! What is found keeps true: the bytes of a table's block are exactly the elements with that block's index in one
//! plane of one tensor; no byte is in two blocks of one group; every block lies within its region; regions of a kind
//! do not overlap; and a layer has the same number in every engine that runs the model, whatever else the engine holds.
//!
//! ```
//! use kvferry_connector::discovery::{CacheGroupSpec, TensorView, discover};
//! use kvferry_engine::wire::MemoryKind;
//!
//! let layers = ["model.layers.12.self_attn.attn".to_owned()];
//! let tensor = TensorView {
//!     layer: &layers[0],
//!     storage: 0x1000,
//!     storage_bytes: 5 * 8192,
//!     offset: 0,
//!     // Blocks, heads, tokens, keys with values; heads are outside of tokens.
//!     shape: &[5, 2, 16, 64],
//!     strides: &[2048, 1024, 64, 1],
//!     item_bytes: 4,
//!     device: MemoryKind::Host,
//! };
//! let group = CacheGroupSpec { layers: &layers, block_tokens: 16 };
//! let found = discover(&[tensor], &[group], 5).unwrap();
//! assert_eq!((found.regions[0].address, found.regions[0].bytes), (0x1000, 40_960));
//! let table = &found.tables[0];
//! assert_eq!((table.layer, table.block_bytes, table.blocks), (12 * 16, 8192, 5));
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use kvferry_engine::wire::MemoryKind;

mod error;
mod fingerprint;
mod memory;
mod names;
#[cfg(test)]
mod properties;
mod shape;
#[cfg(test)]
mod tests;

pub use error::DiscoveryError;

use memory::Strided;
use shape::Blocks;

/// Most planes of one layer of the model: of all tensors whose names have its index.
pub const MAX_PLANES: u32 = 16;

/// A tensor as torch has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// Name of the layer that it was registered under. Several tensors may have one.
    pub layer: &'a str,
    /// Address of the storage's first byte.
    pub storage: u64,
    /// Bytes of the storage.
    pub storage_bytes: u64,
    /// Where the first element is, in bytes from there.
    pub offset: u64,
    /// Elements per dimension.
    pub shape: &'a [u64],
    /// Elements from one to the next, per dimension.
    pub strides: &'a [i64],
    /// Bytes of an element.
    pub item_bytes: u64,
    /// Kind of memory.
    pub device: MemoryKind,
}

/// A cache group, as vLLM has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGroupSpec<'a> {
    /// Names of its layers.
    pub layers: &'a [String],
    /// Tokens of a block, at least 1.
    pub block_tokens: u32,
}

/// Memory to register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundRegion {
    /// Address of the first byte; not aligned to anything.
    pub address: u64,
    /// Bytes, at least 1.
    pub bytes: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
}

/// Blocks at equal distances: a plane of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTable {
    /// The cache group that it belongs to.
    pub group: u32,
    /// Name of the layer that its tensor was registered under.
    pub name: String,
    /// Its number among the planes of all tensors with this layer's index, under [`MAX_PLANES`].
    pub plane: u32,
    /// The table's number in the model: the layer's index times [`MAX_PLANES`], plus `plane`.
    pub layer: u32,
    /// Which of [`Discovered::regions`] it lies in.
    pub region: usize,
    /// Where block 0 begins in it, in bytes.
    pub offset: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes from one block to the next, at least `block_bytes`.
    pub block_stride: u64,
    /// How many blocks.
    pub blocks: u32,
    /// The order of elements within a block; equal texts mean the same order.
    pub interior: String,
}

/// Something that was left out, and that somebody may ask about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Note {
    /// A tensor whose layer is in no cache group, such as a layer that uses another's blocks.
    UnknownLayer {
        /// The layer.
        layer: String,
    },
    /// A layer whose blocks are another's of the same group.
    SharedBlocks {
        /// The layer.
        layer: String,
        /// Whose blocks they are.
        owner: String,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownLayer { layer } => {
                write!(f, "layer {layer:?} is in no cache group and is left out")
            }
            Self::SharedBlocks { layer, owner } => write!(
                f,
                "layer {layer:?} uses the blocks of layer {owner:?} and is left out"
            ),
        }
    }
}

/// What there is on a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovered {
    /// What to register, in ascending order of kind and address.
    pub regions: Vec<FoundRegion>,
    /// The blocks, in ascending order of group and number.
    pub tables: Vec<FoundTable>,
    /// Tokens of a block, per group.
    pub block_tokens: Vec<u32>,
    /// What was left out.
    pub notes: Vec<Note>,
}

/// A tensor of a group's layer, with its blocks.
struct Found<'a> {
    group: u32,
    name: &'a str,
    /// The layer's index in the model.
    index: u32,
    kind: MemoryKind,
    /// The storage, as address and bytes.
    storage: (u64, u64),
    blocks: Blocks,
}

/// Finds the blocks of a rank that has `num_blocks` of them.
///
/// # Errors
/// What blocks cannot be made of, with its layer, its group, and why.
pub fn discover(
    tensors: &[TensorView<'_>],
    groups: &[CacheGroupSpec<'_>],
    num_blocks: u32,
) -> Result<Discovered, DiscoveryError> {
    if num_blocks == 0 {
        return Err(DiscoveryError::NoBlocks);
    }
    let mut by_layer = BTreeMap::<&str, Vec<&TensorView<'_>>>::new();
    for tensor in tensors {
        by_layer.entry(tensor.layer).or_default().push(tensor);
    }
    let mut notes = Vec::new();
    let mut found = Vec::<Found<'_>>::new();
    let mut groups_of = HashMap::new();
    for (number, group) in (0..).zip(groups) {
        if group.block_tokens == 0 {
            return Err(DiscoveryError::BlockTokens { group: number });
        }
        let of_group = found.len();
        for layer in group.layers {
            if let Some(other) = groups_of.insert(layer.as_str(), number) {
                return Err(DiscoveryError::ListedTwice {
                    layer: layer.clone(),
                    groups: [other, number],
                });
            }
            let of_layer =
                by_layer
                    .remove(layer.as_str())
                    .ok_or_else(|| DiscoveryError::NoTensor {
                        layer: layer.clone(),
                        group: number,
                    })?;
            for tensor in of_layer {
                let it = look_at(tensor, layer, number, group.block_tokens, num_blocks)?;
                // Both sides leave out the same: which layers share depends on the model.
                let owner = found[of_group..].iter().find(|other| {
                    (other.kind, &other.blocks.planes) == (it.kind, &it.blocks.planes)
                });
                match owner {
                    Some(owner) => notes.push(Note::SharedBlocks {
                        layer: layer.clone(),
                        owner: owner.name.to_owned(),
                    }),
                    None => found.push(it),
                }
            }
        }
    }
    notes.extend(by_layer.keys().map(|layer| Note::UnknownLayer {
        layer: (*layer).to_owned(),
    }));
    notes.dedup();
    let (regions, mut tables) = memory::regions(number_all(found)?);
    memory::refuse_overlaps(&regions, &tables)?;
    tables.sort_by_key(|table| (table.group, table.layer));
    Ok(Discovered {
        regions,
        tables,
        block_tokens: groups.iter().map(|group| group.block_tokens).collect(),
        notes,
    })
}

fn look_at<'a>(
    tensor: &TensorView<'_>,
    layer: &'a str,
    group: u32,
    block_tokens: u32,
    num_blocks: u32,
) -> Result<Found<'a>, DiscoveryError> {
    let blocks = shape::blocks(tensor, num_blocks, block_tokens).map_err(|reason| {
        DiscoveryError::Layout {
            layer: layer.to_owned(),
            group,
            shape: tensor.shape.to_vec(),
            strides: tensor.strides.to_vec(),
            num_blocks,
            reason,
        }
    })?;
    let index = names::layer_index(layer).ok_or_else(|| DiscoveryError::LayerName {
        layer: layer.to_owned(),
    })?;
    Ok(Found {
        group,
        name: layer,
        index,
        kind: tensor.device,
        storage: (tensor.storage, tensor.storage_bytes),
        blocks,
    })
}

/// A plane with its number, before it is known in which region it lies.
struct Plane {
    kind: MemoryKind,
    storage: (u64, u64),
    place: Strided,
    /// Without region and offset.
    table: FoundTable,
}

impl Found<'_> {
    fn plane(&self, plane: u32, place: Strided) -> Plane {
        Plane {
            kind: self.kind,
            storage: self.storage,
            place,
            table: FoundTable {
                group: self.group,
                name: self.name.to_owned(),
                plane,
                // `layer_index` leaves room.
                layer: self.index * MAX_PLANES + plane,
                region: 0,
                offset: 0,
                block_bytes: place.bytes,
                block_stride: place.stride,
                blocks: place.blocks,
                interior: self.blocks.interior.clone(),
            },
        }
    }
}

/// Numbers the planes of each layer of the model, in the order of their tensors' names.
fn number_all(mut found: Vec<Found<'_>>) -> Result<Vec<Plane>, DiscoveryError> {
    // Stable: tensors of one name stay in the order in which they were registered.
    found.sort_by(|a, b| (a.index, a.name).cmp(&(b.index, b.name)));
    let mut planes = Vec::new();
    for of_index in found.chunk_by(|a, b| a.index == b.index) {
        let places = of_index
            .iter()
            .flat_map(|of| of.blocks.planes.iter().map(move |&place| (of, place)));
        let count = places.clone().count();
        if count > MAX_PLANES as usize {
            let mut layers: Vec<_> = of_index.iter().map(|of| of.name.to_owned()).collect();
            layers.dedup();
            return Err(DiscoveryError::Planes {
                planes: count,
                layers,
            });
        }
        planes.extend(
            (0..)
                .zip(places)
                .map(|(plane, (of, place))| of.plane(plane, place)),
        );
    }
    Ok(planes)
}

//! What blocks cannot be made of.

use thiserror::Error;

use super::MAX_PLANES;

/// Why the blocks of a rank were not found.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// There are no blocks.
    #[error("the engine has 0 blocks")]
    NoBlocks,
    /// Blocks of no tokens.
    #[error("blocks of cache group {group} have 0 tokens")]
    BlockTokens {
        /// The group.
        group: u32,
    },
    /// A layer twice in the groups.
    #[error("layer {layer:?} is listed twice, in cache groups {} and {}", groups[0], groups[1])]
    ListedTwice {
        /// The layer.
        layer: String,
        /// Where.
        groups: [u32; 2],
    },
    /// A group's layer without a tensor.
    #[error("no tensor was registered for layer {layer:?} of cache group {group}")]
    NoTensor {
        /// The layer.
        layer: String,
        /// Its group.
        group: u32,
    },
    /// A name that does not say which layer it is.
    #[error(
        "layer {layer:?} has no index in its name (at most 268435454, as in \"model.layers.12.self_attn\"), by which \
         engines would match it"
    )]
    LayerName {
        /// The layer.
        layer: String,
    },
    /// A tensor that is no list of blocks.
    #[error(
        "layer {layer:?} of cache group {group}: a tensor of shape {shape:?} with strides {strides:?} is not \
         {num_blocks} blocks, because {reason}. Supported are blocks in the first dimension, or in the second one \
         behind keys and values, each block without gaps inside (vLLM's layouts LBHNC, LBNHC, BLHNC, BLNHC and LHBNC)"
    )]
    Layout {
        /// The layer.
        layer: String,
        /// Its group.
        group: u32,
        /// The tensor's shape.
        shape: Vec<u64>,
        /// The tensor's strides, in elements.
        strides: Vec<i64>,
        /// How many blocks there are.
        num_blocks: u32,
        /// Why it is none.
        reason: String,
    },
    /// Too many planes for one index.
    #[error(
        "layers {layers:?} have the same index and {planes} planes together, and there may be {MAX_PLANES}"
    )]
    Planes {
        /// How many planes.
        planes: usize,
        /// The layers.
        layers: Vec<String>,
    },
    /// A byte in blocks of two layers of a group, which are not the same blocks.
    #[error(
        "blocks of layers {:?} and {:?} of cache group {group} overlap", layers[0], layers[1]
    )]
    Overlap {
        /// The group.
        group: u32,
        /// The layers.
        layers: [String; 2],
    },
}

//! A tensor's blocks, out of its shape and strides.
//!
//! The order in memory is that of the strides, whatever the order of the dimensions is.

use std::fmt::Write as _;

use super::memory::Strided;
use super::{MAX_PLANES, TensorView};

/// The blocks of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Where they are, per plane; by address, in the order of the tensor's indices.
    pub(super) planes: Vec<Strided>,
    /// The order of elements within a block, as a text.
    pub(super) interior: String,
}

/// A dimension of more than one element.
#[derive(Clone, Copy, Debug)]
struct Dimension {
    number: usize,
    size: u64,
    /// In bytes.
    stride: u64,
}

/// The blocks of a tensor, or why it has none.
pub(super) fn blocks(
    tensor: &TensorView<'_>,
    num_blocks: u32,
    block_tokens: u32,
) -> Result<Blocks, String> {
    let mut dimensions = checked(tensor)?;
    let number = blocks_dimension(tensor.shape, num_blocks, block_tokens)?;
    // Kernels may work on smaller blocks than the scheduler: some neighbours are one block then.
    let kernel_blocks = tensor.shape[number] / u64::from(num_blocks);
    let along = dimensions
        .iter()
        .position(|it| it.number == number)
        .map(|place| dimensions.remove(place));

    let (inner, outer): (Vec<Dimension>, Vec<Dimension>) = dimensions
        .into_iter()
        .partition(|it| along.is_none_or(|along| it.stride < along.stride));
    let inner_bytes = dense(&inner, tensor.item_bytes)?;
    let stride = along.map_or(inner_bytes, |along| along.stride);
    if stride < inner_bytes {
        return Err(format!(
            "its blocks overlap: they are {stride} bytes apart and have {inner_bytes}"
        ));
    }
    if kernel_blocks > 1 && stride != inner_bytes {
        return Err(format!(
            "{kernel_blocks} neighbours in dimension {number} are one block, and there are gaps between them: they \
             are {stride} bytes apart and have {inner_bytes}"
        ));
    }
    let span = (tensor.shape[number] - 1) * stride + inner_bytes;
    let first = Strided {
        address: tensor.storage + tensor.offset,
        bytes: inner_bytes * kernel_blocks,
        stride: stride * kernel_blocks,
        blocks: num_blocks,
    };
    Ok(Blocks {
        planes: planes(first, outer, span)?,
        interior: interior(inner, tensor.item_bytes, kernel_blocks),
    })
}

/// The dimensions that matter, if every element is inside of the storage.
fn checked(tensor: &TensorView<'_>) -> Result<Vec<Dimension>, String> {
    let &TensorView { shape, strides, .. } = tensor;
    if shape.is_empty() || shape.len() != strides.len() {
        return Err(
            "it needs a stride for each of its dimensions, of which it has none or more".to_owned(),
        );
    }
    if tensor.item_bytes == 0 || shape.contains(&0) {
        return Err("it has no elements".to_owned());
    }
    let mut dimensions = Vec::new();
    let mut last = tensor.item_bytes;
    let out = || "it is larger than the address space".to_owned();
    for (number, (&size, &stride)) in shape.iter().zip(strides).enumerate() {
        if size == 1 {
            continue;
        }
        let stride = u64::try_from(stride)
            .ok()
            .filter(|&stride| stride > 0)
            .ok_or_else(|| format!("the stride of dimension {number} is not positive"))?
            .checked_mul(tensor.item_bytes)
            .ok_or_else(out)?;
        let reach = stride.checked_mul(size).ok_or_else(out)? - stride;
        last = last.checked_add(reach).ok_or_else(out)?;
        dimensions.push(Dimension {
            number,
            size,
            stride,
        });
    }
    let end = tensor.offset.checked_add(last).ok_or_else(out)?;
    tensor
        .storage
        .checked_add(tensor.storage_bytes)
        .ok_or_else(out)?;
    if end > tensor.storage_bytes {
        return Err(format!(
            "its last byte is at {end} of a storage of {} bytes",
            tensor.storage_bytes
        ));
    }
    Ok(dimensions)
}

/// Which dimension counts blocks: the first, or the second behind one of keys and values.
fn blocks_dimension(shape: &[u64], num_blocks: u32, block_tokens: u32) -> Result<usize, String> {
    let counts_blocks = |&size: &u64| {
        let kernel_blocks = size / u64::from(num_blocks);
        size.is_multiple_of(u64::from(num_blocks))
            && u64::from(block_tokens).is_multiple_of(kernel_blocks)
    };
    let first = shape.first().is_some_and(counts_blocks);
    let second = shape.first() == Some(&2) && shape.get(1).is_some_and(counts_blocks);
    match (first, second) {
        (true, false) => Ok(0),
        (false, true) => Ok(1),
        (true, true) => Err("either of its first two dimensions may be the blocks".to_owned()),
        (false, false) => Err(format!(
            "neither its first dimension nor a second one behind keys and values counts blocks: the number of \
             blocks, or that times a divisor of their {block_tokens} tokens"
        )),
    }
}

/// Bytes of a block's inside, which has to be without gaps.
fn dense(inner: &[Dimension], item_bytes: u64) -> Result<u64, String> {
    let mut inner = inner.to_vec();
    inner.sort_by_key(|it| it.stride);
    let mut bytes = item_bytes;
    for it in inner {
        if it.stride != bytes {
            let what = if it.stride < bytes {
                "overlaps"
            } else {
                "has gaps"
            };
            return Err(format!(
                "the inside of a block {what}: dimension {} goes in steps of {} bytes over {bytes} bytes",
                it.number, it.stride
            ));
        }
        // Within the storage, so no overflow.
        bytes = it.stride * it.size;
    }
    Ok(bytes)
}

/// A copy of the first plane for each index of the dimensions outside of the blocks. `span` is how far a plane
/// reaches.
fn planes(
    first: Strided,
    mut outer: Vec<Dimension>,
    mut span: u64,
) -> Result<Vec<Strided>, String> {
    let mut by_stride = outer.clone();
    by_stride.sort_by_key(|it| it.stride);
    let mut count = 1_u64;
    for it in by_stride {
        if it.stride < span {
            return Err(format!(
                "the inside of a block is strided across blocks: dimension {} goes in steps of {} bytes, which is \
                 neither within a block nor over all {span} bytes of the blocks",
                it.number, it.stride
            ));
        }
        span += (it.size - 1) * it.stride;
        count = count.saturating_mul(it.size);
    }
    if count > u64::from(MAX_PLANES) {
        return Err(format!(
            "it has {count} planes outside of its blocks, and a layer may have {MAX_PLANES}"
        ));
    }
    outer.sort_by_key(|it| it.number);
    let mut planes = vec![first];
    for it in outer {
        let of = |plane: Strided| {
            (0..it.size).map(move |index| Strided {
                address: plane.address + index * it.stride,
                ..plane
            })
        };
        planes = planes.into_iter().flat_map(of).collect();
    }
    Ok(planes)
}

fn interior(mut inner: Vec<Dimension>, item_bytes: u64, kernel_blocks: u64) -> String {
    inner.sort_by_key(|it| std::cmp::Reverse(it.stride));
    let mut text = String::new();
    if kernel_blocks > 1 {
        let _ = write!(text, "{kernel_blocks} kernel blocks of ");
    }
    for it in inner {
        let _ = write!(text, "{} in dimension {}, ", it.size, it.number);
    }
    let _ = write!(text, "{item_bytes} bytes each");
    text
}

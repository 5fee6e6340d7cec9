//! The index of a layer in its model, out of its name.

use super::MAX_PLANES;

/// What lists of layers are called in models.
const LISTS: [&str; 5] = ["layers", "layer", "blocks", "block", "h"];

/// The layer's index, if its name has one: the number behind the first list of layers
/// (`model.layers.12.self_attn.attn`), otherwise the first number.
///
/// vLLM takes the only number, and where a layer has several attention modules
/// (`model.layers.12.self_attn.1.attn`) it makes one out of two; here these modules share the layer's index.
pub(super) fn layer_index(name: &str) -> Option<u32> {
    let parts: Vec<&str> = name.split('.').collect();
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit());
    let in_list = parts
        .windows(2)
        .find(|pair| LISTS.contains(&pair[0]) && is_number(pair[1]))
        .map(|pair| pair[1]);
    let first = || parts.iter().copied().find(|part| is_number(part));
    let index: u32 = in_list.or_else(first)?.parse().ok()?;
    (index < u32::MAX / MAX_PLANES).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_is_that_of_the_layer() {
        for (name, index) in [
            ("model.layers.12.self_attn.attn", Some(12)),
            ("model.layers.3.self_attn.indexer.k_cache", Some(3)),
            ("model.layers.7.self_attn.1.attn", Some(7)),
            ("language_model.model.layers.0.linear_attn", Some(0)),
            ("model.decoder.layers.5.encoder_attn.attn", Some(5)),
            ("transformer.h.11.attn.attn", Some(11)),
            ("model.stages.2.layers.9.attn", Some(9)),
            ("mtp.2.layers.9.attn", Some(9)),
            ("2.self_attn", Some(2)),
            ("model.layers.268435454.attn", Some(268_435_454)),
            ("model.layers.268435455.attn", None),
            ("model.layers.99999999999.attn", None),
            ("model.norm", None),
            ("layers.x1.-3.+4", None),
            ("", None),
        ] {
            assert_eq!(layer_index(name), index, "{name}");
        }
    }
}

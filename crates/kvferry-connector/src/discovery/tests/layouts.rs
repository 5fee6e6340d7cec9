//! What is found out about tensors: planes, strides, blocks.

use super::*;

#[test]
fn layers_that_are_slices_of_one_storage_are_one_region() {
    // As on CPU: blocks, heads, tokens, keys with values; not all of the storage is used.
    let bytes = 10 * 4 * 16 * 64 * 4;
    let names = [
        "model.layers.0.self_attn.attn",
        "model.layers.1.self_attn.attn",
    ];
    let tensors: Vec<_> = names
        .iter()
        .zip([512, 512 + bytes])
        .map(|(name, offset)| {
            Tensor::new(name, &[10, 4, 16, 64], &[0, 1, 2, 3]).within(offset, 4 * bytes)
        })
        .collect();
    let found = find(&tensors, &[(&names, 16)], 10).unwrap();
    let region = FoundRegion {
        address: STORAGE + 512,
        bytes: 2 * bytes,
        kind: MemoryKind::Host,
    };
    assert_eq!(found.regions, [region]);
    assert_eq!(
        places(&found),
        [(512, 16_384, 16_384), (512 + bytes, 16_384, 16_384)]
    );
    let numbers: Vec<_> = found
        .tables
        .iter()
        .map(|it| (it.layer, it.blocks))
        .collect();
    assert_eq!(numbers, [(0, 10), (16, 10)]);
    assert_eq!(found.notes, []);
}

#[test]
fn keys_and_values_outside_of_the_blocks_are_two_planes_and_inside_one() {
    let apart = alone(Tensor::new(LAYER, &[2, 10, 16, 4, 8], &[0, 1, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&apart), [(0, 2_048, 2_048), (20_480, 2_048, 2_048)]);
    let numbers: Vec<_> = apart.tables.iter().map(|it| (it.layer, it.plane)).collect();
    assert_eq!(numbers, [(48, 0), (49, 1)]);
    let inside = alone(Tensor::new(LAYER, &[10, 2, 16, 4, 8], &[0, 1, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&inside), [(0, 4_096, 4_096)]);
    // In memory as the one before, although the dimension is the first.
    let permuted = alone(Tensor::new(LAYER, &[2, 10, 16, 4, 8], &[1, 0, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&permuted), [(0, 4_096, 4_096)]);
}

#[test]
fn what_counts_is_the_order_in_memory_and_other_orders_are_told_apart() {
    let of = |order: &[usize]| {
        let mut found = alone(Tensor::new(LAYER, &[10, 4, 16, 64], order), 10).unwrap();
        assert_eq!(places(&found), [(0, 16_384, 16_384)], "{order:?}");
        found.tables.remove(0).interior
    };
    let (heads, tokens) = (of(&[0, 1, 2, 3]), of(&[0, 2, 1, 3]));
    assert_eq!(
        heads,
        "4 in dimension 1, 16 in dimension 2, 64 in dimension 3, 4 bytes each"
    );
    assert_eq!(
        tokens,
        "16 in dimension 2, 4 in dimension 1, 64 in dimension 3, 4 bytes each"
    );
    // Heads outside of the blocks (LHBNC).
    let found = alone(Tensor::new(LAYER, &[10, 4, 16, 64], &[1, 0, 2, 3]), 10).unwrap();
    let head = 10 * 16 * 64 * 4;
    let expected: Vec<_> = (0..4).map(|it| (it * head, 4_096, 4_096)).collect();
    assert_eq!(places(&found), expected);
    // One latent vector per token.
    let latent = alone(Tensor::new(LAYER, &[10, 16, 576], &[0, 1, 2]), 10).unwrap();
    assert_eq!(places(&latent), [(0, 36_864, 36_864)]);
    // With one head, both orders are the same bytes.
    let one = |order: &[usize]| alone(Tensor::new(LAYER, &[10, 1, 16, 64], order), 10).unwrap();
    assert_eq!(
        one(&[0, 1, 2, 3]).fingerprint(),
        one(&[0, 2, 1, 3]).fingerprint()
    );
}

/// Shape, strides and second layer of every layout that vLLM 0.32 has, as its `create_kv_cache_views` makes them
/// for two layers of 10 blocks: 4 heads, 32 tokens, keys and values of 8 floats.
#[test]
fn vllms_layouts_are_found_as_it_makes_them() {
    const ONE_PIECE: usize = 2;
    for (layout, blocks, strides, second, tables) in [
        ("LBHNC", 10, [2_048, 512, 16, 1], 81_920, ONE_PIECE),
        (
            "LBHNC, kernel blocks",
            20,
            [1_024, 256, 16, 1],
            81_920,
            ONE_PIECE,
        ),
        ("LBNHC", 10, [2_048, 16, 64, 1], 81_920, ONE_PIECE),
        (
            "LBNHC, kernel blocks",
            20,
            [1_024, 16, 64, 1],
            81_920,
            ONE_PIECE,
        ),
        ("LHBNC", 10, [512, 5_120, 16, 1], 81_920, 4 * ONE_PIECE),
        ("BLHNC", 10, [4_096, 512, 16, 1], 8_192, ONE_PIECE),
        ("BLNHC", 10, [4_096, 16, 64, 1], 8_192, ONE_PIECE),
        // Another layer's heads are between those of a block.
        ("BHLNC", 10, [4_096, 1_024, 16, 1], 2_048, 0),
    ] {
        let tokens = 320 / blocks;
        let tensors = [("layers.0.attn", 0), ("layers.1.attn", second)].map(|(layer, offset)| {
            let mut tensor = Tensor::new(layer, &[blocks, 4, tokens, 16], &[0, 1, 2, 3]);
            tensor.strides = strides.to_vec();
            tensor.within(offset, 163_840)
        });
        let found = find(&tensors, &[(&["layers.0.attn", "layers.1.attn"], 32)], 10);
        if tables == 0 {
            let text = found.unwrap_err().to_string();
            assert!(text.contains("has gaps"), "{layout}: {text}");
            continue;
        }
        let found = found.unwrap();
        assert_eq!(found.tables.len(), tables, "{layout}");
        let bytes: u64 = found
            .tables
            .iter()
            .map(|it| it.block_bytes * u64::from(it.blocks))
            .sum();
        assert_eq!(
            (bytes, found.regions[0].bytes),
            (163_840, 163_840),
            "{layout}"
        );
    }
}

#[test]
fn padding_and_other_layers_between_blocks_are_left_alone() {
    // Blocks of all layers side by side (BLHNC), with something behind.
    let mut tensors = [
        Tensor::new("layers.0.attn", &[10, 4, 16, 8], &[0, 1, 2, 3]),
        Tensor::new("layers.1.attn", &[10, 4, 16, 8], &[0, 1, 2, 3]),
    ];
    for (tensor, offset) in tensors.iter_mut().zip([0, 2_048]) {
        tensor.strides[0] = 1_280;
        (tensor.offset, tensor.storage_bytes) = (offset, 10 * 5_120);
    }
    let layers: &[&str] = &["layers.0.attn", "layers.1.attn"];
    let found = find(&tensors, &[(layers, 16)], 10).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 5_120), (2_048, 2_048, 5_120)]);
    assert_eq!(found.regions.len(), 1);
    assert_eq!(found.regions[0].bytes, 9 * 5_120 + 4_096);
}

#[test]
fn kernels_with_smaller_blocks_have_several_in_one_of_ours() {
    let found = alone(Tensor::new(LAYER, &[40, 4, 4, 8], &[0, 1, 2, 3]), 10).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 2_048)]);
    assert!(
        found.tables[0]
            .interior
            .starts_with("4 kernel blocks of 4 in dimension 1")
    );
    let found = alone(Tensor::new(LAYER, &[2, 40, 4, 4, 8], &[0, 1, 2, 3, 4]), 10).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 2_048), (20_480, 2_048, 2_048)]);
    // 3 do not divide 16 tokens.
    let text = alone(Tensor::new(LAYER, &[30, 4, 4, 8], &[0, 1, 2, 3]), 10);
    assert!(
        text.unwrap_err()
            .to_string()
            .contains("neither its first dimension")
    );
    let mut gaps = Tensor::new(LAYER, &[40, 4, 4, 8], &[0, 1, 2, 3]);
    (gaps.strides[0], gaps.storage_bytes) = (129, 1 << 20);
    let text = alone(gaps, 10).unwrap_err().to_string();
    assert!(
        text.contains("4 neighbours in dimension 0 are one block, and there are gaps"),
        "{text}"
    );
}

#[test]
fn the_first_dimension_is_the_blocks_unless_it_may_be_keys_and_values() {
    // As many heads as blocks.
    let found = alone(Tensor::new(LAYER, &[8, 8, 16, 4], &[0, 1, 2, 3]), 8).unwrap();
    assert_eq!(places(&found), [(0, 2_048, 2_048)]);
    for (shape, num_blocks) in [([2, 2, 16, 4], 2), ([2, 4, 16, 4], 2), ([2, 1, 16, 4], 1)] {
        let text = alone(Tensor::new(LAYER, &shape, &[0, 1, 2, 3]), num_blocks).unwrap_err();
        assert!(
            text.to_string()
                .contains("either of its first two dimensions"),
            "{text}"
        );
    }
    let found = alone(Tensor::new(LAYER, &[2, 5, 16, 4], &[0, 1, 2, 3]), 2).unwrap();
    assert_eq!(places(&found), [(0, 1_280, 1_280)]);
    let found = alone(Tensor::new(LAYER, &[1, 4, 16, 4], &[0, 1, 2, 3]), 1).unwrap();
    assert_eq!(places(&found), [(0, 1_024, 1_024)]);
}

//! What does not fit and is refused, groups, and regions of memory.

use super::*;

#[test]
fn what_is_no_list_of_blocks_is_refused_by_name_with_its_shape() {
    // Heads within the blocks of all layers (BHLNC): not one piece.
    let mut heads = Tensor::new(LAYER, &[10, 4, 16, 8], &[0, 1, 2, 3]);
    heads.strides = vec![1_024, 256, 8, 1];
    heads.storage_bytes = 10 * 4_096;
    assert_eq!(
        alone(heads, 10).unwrap_err().to_string(),
        "layer \"model.layers.3.self_attn.attn\" of cache group 0: a tensor of shape [10, 4, 16, 8] with strides \
         [1024, 256, 8, 1] is not 10 blocks, because the inside of a block has gaps: dimension 1 goes in steps of 1024 \
         bytes over 512 bytes. Supported are blocks in the first dimension, or in the second one behind keys and \
         values, each block without gaps inside (vLLM's layouts LBHNC, LBNHC, BLHNC, BLNHC and LHBNC)"
    );
    let refused = |change: fn(&mut Tensor)| {
        let mut tensor = Tensor::new(LAYER, &[10, 4, 16, 8], &[0, 1, 2, 3]);
        tensor.storage_bytes = 1 << 30;
        change(&mut tensor);
        alone(tensor, 10).unwrap_err().to_string()
    };
    for (change, reason) in [
        // Every other head of a block lies between other blocks.
        (
            (|it| it.strides = vec![256, 384, 8, 1]) as fn(&mut Tensor),
            "strided across blocks",
        ),
        (
            |it| it.strides = vec![8, 1_280, 40, 1],
            "strided across blocks",
        ),
        (|it| it.strides[0] = 511, "blocks overlap"),
        (|it| it.strides = vec![512, 64, 8, 1], "overlaps"),
        (|it| it.strides = vec![512, 128, 8, 2], "has gaps"),
        (|it| it.strides[1] = 0, "dimension 1 is not positive"),
        (|it| it.strides[0] = -512, "dimension 0 is not positive"),
        (
            |it| it.strides[0] = i64::MAX,
            "larger than the address space",
        ),
        (|it| it.offset = u64::MAX, "larger than the address space"),
        (|it| it.storage = u64::MAX, "larger than the address space"),
        (
            |it| it.storage_bytes = 20_479,
            "its last byte is at 20480 of a storage of 20479 bytes",
        ),
        (|it| it.offset = (1 << 30) - 20_000, "of a storage of"),
        (|it| it.shape[0] = 11, "counts blocks"),
        (|it| it.shape[2] = 0, "no elements"),
        (|it| it.item_bytes = 0, "no elements"),
        (|it| it.strides.truncate(3), "a stride for each"),
        (
            |it| (it.shape, it.strides) = (vec![], vec![]),
            "a stride for each",
        ),
        // A raw buffer, and a state without blocks.
        (
            |it| (it.shape, it.strides) = (vec![40_960], vec![1]),
            "counts blocks",
        ),
        (
            |it| (it.shape, it.strides) = (vec![3, 5], vec![5, 1]),
            "counts blocks",
        ),
        // A plane for each of 17 heads.
        (
            |it| {
                let of_17 = Tensor::new(LAYER, &[10, 17, 16, 8], &[1, 0, 2, 3]);
                (it.shape, it.strides) = (of_17.shape, of_17.strides);
            },
            "17 planes",
        ),
    ] {
        let text = refused(change);
        assert!(text.contains(reason) && text.contains(LAYER), "{text}");
    }
}

#[test]
fn layers_and_groups_have_to_fit_and_what_is_left_out_is_said() {
    let tensor =
        |name: &str, offset: u64| Tensor::new(name, &[5, 4], &[0, 1]).within(offset, 1_000);
    let tensors = [
        tensor("layers.0.attn", 0),
        tensor("layers.1.attn", 80),
        tensor("layers.2.attn", 80),
        tensor("layers.9.attn", 80),
    ];
    let all: &[&str] = &["layers.0.attn", "layers.1.attn", "layers.2.attn"];
    let found = find(&tensors, &[(all, 16)], 5).unwrap();
    let notes: Vec<_> = found.notes.iter().map(ToString::to_string).collect();
    assert_eq!(
        notes,
        [
            "layer \"layers.2.attn\" uses the blocks of layer \"layers.1.attn\" and is left out",
            "layer \"layers.9.attn\" is in no cache group and is left out",
        ]
    );
    assert_eq!(found.tables.len(), 2);
    let text = |groups: &[(&[&str], u32)], num_blocks| {
        find(&tensors, groups, num_blocks).unwrap_err().to_string()
    };
    assert_eq!(
        text(&[(&["layers.0.attn"], 16), (&["layers.3.attn"], 16)], 5),
        "no tensor was registered for layer \"layers.3.attn\" of cache group 1"
    );
    assert_eq!(
        text(&[(&["layers.0.attn"], 16), (&["layers.0.attn"], 16)], 5),
        "layer \"layers.0.attn\" is listed twice, in cache groups 0 and 1"
    );
    assert_eq!(
        text(&[(&["layers.0.attn"], 0)], 5),
        "blocks of cache group 0 have 0 tokens"
    );
    assert_eq!(text(&[], 0), "the engine has 0 blocks");
    let nameless = alone(tensor("attn", 0), 5).unwrap_err().to_string();
    assert!(nameless.contains("\"attn\" has no index"), "{nameless}");
    let close = [tensor("layers.0.attn", 0), tensor("layers.1.attn", 76)];
    let layers: &[&str] = &["layers.1.attn", "layers.0.attn"];
    assert_eq!(
        find(&close, &[(layers, 16)], 5).unwrap_err().to_string(),
        "blocks of layers \"layers.0.attn\" and \"layers.1.attn\" of cache group 0 overlap"
    );
    // In two groups they may.
    find(&close, &[(&layers[..1], 16), (&layers[1..], 16)], 5).unwrap();
}

/// C43: groups lie over one another in a hybrid model, each with its own blocks.
#[test]
fn c43_groups_that_share_memory_are_one_region_and_keep_their_tables() {
    let full = Tensor::new("layers.0.attn", &[6, 8], &[0, 1]);
    let window = Tensor::new("layers.1.attn", &[6, 8], &[0, 1]);
    let groups: [(&[&str], u32); 2] = [(&["layers.0.attn"], 32), (&["layers.1.attn"], 16)];
    let found = find(&[full, window], &groups, 6).unwrap();
    assert_eq!(found.regions.len(), 1);
    assert_eq!(places(&found), [(0, 32, 32), (0, 32, 32)]);
    let numbers: Vec<_> = found.tables.iter().map(|it| (it.group, it.layer)).collect();
    assert_eq!(numbers, [(0, 0), (1, 16)]);
}

#[test]
fn storages_that_overlap_are_one_region_and_others_are_their_own() {
    let tensors = [
        Tensor::new("layers.0.attn", &[4, 4], &[0, 1]).within(0, 1_000),
        Tensor::new("layers.1.attn", &[4, 4], &[0, 1]).within(64, 1_000),
        Tensor::new("layers.2.attn", &[4, 4], &[0, 1])
            .at(STORAGE + 96)
            .within(32, 64 + 32),
        // Beside the last, and in the first two storages, whose ends nobody uses.
        Tensor::new("layers.3.attn", &[4, 4], &[0, 1]).at(STORAGE + 192),
    ];
    let names: Vec<&str> = tensors.iter().map(|it| it.layer.as_str()).collect();
    let find_with = |kinds: [MemoryKind; 4]| {
        let layers: Vec<String> = names.iter().map(|&it| it.to_owned()).collect();
        let group = CacheGroupSpec {
            layers: &layers,
            block_tokens: 16,
        };
        let views: Vec<_> = tensors.iter().zip(kinds).collect();
        let views: Vec<_> = views
            .iter()
            .map(|&(it, device)| TensorView {
                device,
                ..it.view()
            })
            .collect();
        discover(&views, &[group], 4).unwrap()
    };
    let host = MemoryKind::Host;
    let range = |it: &FoundRegion| (it.address - STORAGE, it.bytes);
    let found = find_with([host; 4]);
    let ranges: Vec<_> = found.regions.iter().map(range).collect();
    assert_eq!(ranges, [(0, 128), (128, 64), (192, 64)]);
    let at: Vec<_> = found
        .tables
        .iter()
        .map(|it| (it.region, it.offset))
        .collect();
    assert_eq!(at, [(0, 0), (0, 64), (1, 0), (2, 0)]);
    // Device addresses are a space of their own.
    let device = MemoryKind::Cuda { device: 1 };
    let found = find_with([host, device, host, host]);
    let kinds: Vec<_> = found
        .regions
        .iter()
        .map(|it| (it.kind, range(it)))
        .collect();
    let expected = [
        (host, (0, 64)),
        (host, (128, 64)),
        (host, (192, 64)),
        (device, (64, 64)),
    ];
    assert_eq!(kinds, expected);

    // Storages that do overlap: a view that was registered as a storage of its own.
    let tensors = [
        Tensor::new("layers.0.attn", &[4, 8], &[0, 1]),
        Tensor::new("layers.1.attn", &[4, 8], &[0, 1]).at(STORAGE + 64),
    ];
    let groups: [(&[&str], u32); 2] = [(&["layers.0.attn"], 16), (&["layers.1.attn"], 16)];
    let found = find(&tensors, &groups, 4).unwrap();
    let ranges: Vec<_> = found.regions.iter().map(range).collect();
    assert_eq!(ranges, [(0, 192)]);
    assert_eq!(places(&found), [(0, 32, 32), (64, 32, 32)]);
}

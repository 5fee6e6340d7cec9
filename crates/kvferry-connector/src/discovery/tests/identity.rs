//! What has to be alike in other ranks and engines: numbers of layers, fingerprints.

use kvferry_engine::wire::EngineId;
use kvferry_engine::{Engine, EngineConfig, LaneChoice, LoopbackFabric, LoopbackNetwork};

use super::*;

fn stage(layers: std::ops::Range<u32>) -> Discovered {
    stage_in_order(layers, false)
}

fn stage_in_order(layers: std::ops::Range<u32>, indexer_first: bool) -> Discovered {
    let mut tensors = Vec::new();
    for layer in layers {
        for (place, name) in ["self_attn.attn", "self_attn.indexer.k_cache"]
            .iter()
            .enumerate()
        {
            let name = format!("model.layers.{layer}.{name}");
            let storage = STORAGE + u64::from(layer) * 1_000 + place as u64 * 500;
            let shape: &[u64] = if place == 0 { &[2, 5, 4] } else { &[5, 2] };
            let order: Vec<usize> = (0..shape.len()).collect();
            tensors.push(Tensor::new(&name, shape, &order).at(storage));
        }
    }
    // Whatever the order in which they are registered.
    tensors.reverse();
    let (main, indexer): (Vec<&str>, Vec<&str>) = tensors
        .iter()
        .map(|it| it.layer.as_str())
        .partition(|name| name.ends_with("attn"));
    let groups: [(&[&str], u32); 2] = if indexer_first {
        [(&indexer, 16), (&main, 16)]
    } else {
        [(&main, 16), (&indexer, 16)]
    };
    find(&tensors, &groups, 5).unwrap()
}

#[test]
fn a_layer_has_the_same_number_in_every_stage() {
    let key = |it: &FoundTable| {
        (
            it.group,
            it.layer,
            it.name.clone(),
            it.plane,
            it.block_bytes,
        )
    };
    let whole: Vec<_> = stage(0..8).tables.iter().map(key).collect();
    assert_eq!(whole.len(), 24);
    let twelve = whole
        .iter()
        .find(|it| it.2 == "model.layers.5.self_attn.indexer.k_cache");
    assert_eq!(twelve.map(|it| (it.1, it.3)), Some((5 * 16 + 2, 2)));
    let mut stages: Vec<_> = stage(0..3).tables.iter().map(key).collect();
    stages.extend(stage(3..8).tables.iter().map(key));
    stages.sort();
    assert_eq!(stages, whole);
    // Nor do the groups matter.
    let by_name = |found: &Discovered| -> BTreeMap<(String, u32), u32> {
        let tables = found.tables.iter();
        tables
            .map(|it| ((it.name.clone(), it.plane), it.layer))
            .collect()
    };
    assert_eq!(by_name(&stage(0..8)), by_name(&stage_in_order(0..8, true)));
    let mut numbers: Vec<_> = whole.iter().map(|it| it.1).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), whole.len());
}

#[test]
fn modules_of_one_layer_share_its_index_up_to_16_planes() {
    let tensors: Vec<_> = (0..9)
        .map(|module| {
            let name = format!("model.layers.7.self_attn.{module}.attn");
            Tensor::new(&name, &[2, 5, 4], &[0, 1, 2]).at(STORAGE + module * 1_000)
        })
        .collect();
    let names: Vec<&str> = tensors.iter().map(|it| it.layer.as_str()).collect();
    let found = find(&tensors[..8], &[(&names[..8], 16)], 5).unwrap();
    let numbers: Vec<_> = found.tables.iter().map(|it| it.layer).collect();
    assert_eq!(numbers, (112..128).collect::<Vec<_>>());
    let text = find(&tensors, &[(&names, 16)], 5).unwrap_err().to_string();
    assert!(
        text.contains("18 planes together") && text.contains("self_attn.8"),
        "{text}"
    );
    // Two tensors of one name, such as the two states of a layer.
    let mut states = [tensors[0].clone(), tensors[1].clone()];
    states[1].layer = names[0].to_owned();
    let found = find(&states, &[(&names[..1], 16)], 5).unwrap();
    assert_eq!(found.tables.len(), 4);
    assert_eq!(places(&found)[2].0, 1_000);
}

fn fingerprint_of(shape: &[u64], order: &[usize], block_tokens: u32) -> Vec<(String, String)> {
    let tensor = Tensor::new(LAYER, shape, order);
    find(&[tensor], &[(&[LAYER], block_tokens)], 10)
        .unwrap()
        .fingerprint()
}

#[test]
fn a_fingerprint_says_what_has_to_be_alike_per_group() {
    let text = |found: &Discovered| {
        let fields = found.fingerprint();
        let fields: Vec<_> = fields
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        fields.join("\n")
    };
    assert_eq!(
        text(&stage(0..2)),
        "kv_block_tokens: [16, 16]\nkv_tables: [4, 2]\nkv_tables_block_bytes: [64, 16]\n\
         kv_tables_interior_of_group_0: 4 x (4 in dimension 2, 4 bytes each)\n\
         kv_tables_interior_of_group_1: 2 x (2 in dimension 1, 4 bytes each)"
    );
    // Where the blocks are does not matter, nor how many there are.
    let far = find(
        &[Tensor::new(LAYER, &[10, 4], &[0, 1])],
        &[(&[LAYER], 16)],
        10,
    );
    let near = find(
        &[Tensor::new(LAYER, &[20, 4], &[0, 1]).at(64)],
        &[(&[LAYER], 16)],
        20,
    );
    assert_eq!(text(&far.unwrap()), text(&near.unwrap()));
    // A description takes at most 4 KiB for a value.
    let mut found = stage(0..1);
    found.tables[0].interior = "x".repeat(5_000);
    let (name, value) = &found.fingerprint()[3];
    assert_eq!(name, "kv_tables_interior_of_group_0");
    assert!(value.starts_with("digest ") && value.len() < 100);
}

/// C40: engines whose blocks differ refuse one another, and say in what.
#[test]
fn c40_engines_whose_blocks_differ_refuse_one_another_and_name_the_field() {
    let network = LoopbackNetwork::new();
    let engine = |name: &str, fingerprint: Vec<(String, String)>| {
        let mut config = EngineConfig::new(EngineId::new(name).unwrap());
        config.compatibility.extend(fingerprint);
        let network = network.clone();
        Engine::builder(config)
            .start_on(move || LoopbackFabric::new(&network, 1_024))
            .unwrap()
    };
    let usual = || fingerprint_of(&[10, 4, 16, 64], &[0, 1, 2, 3], 16);
    let decode = engine("decode", usual());
    let same = engine("same", usual());
    decode
        .connect(same.describe().unwrap(), LaneChoice::Auto)
        .unwrap();
    for (field, other) in [
        (
            "kv_block_tokens",
            fingerprint_of(&[10, 4, 16, 64], &[0, 1, 2, 3], 32),
        ),
        (
            "kv_tables",
            fingerprint_of(&[10, 4, 16, 64], &[1, 0, 2, 3], 16),
        ),
        (
            "kv_tables_block_bytes",
            fingerprint_of(&[10, 4, 16, 32], &[0, 1, 2, 3], 16),
        ),
        // As many bytes in another order: nothing else would tell.
        (
            "kv_tables_interior_of_group_0",
            fingerprint_of(&[10, 4, 16, 64], &[0, 2, 1, 3], 16),
        ),
        (
            "kv_tables_interior_of_group_0",
            fingerprint_of(&[20, 4, 8, 64], &[0, 1, 2, 3], 16),
        ),
    ] {
        let other = engine("other", other);
        let error = decode.connect(other.describe().unwrap(), LaneChoice::Auto);
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains(&format!("the engines differ in {field}: ")),
            "{text}"
        );
    }
}

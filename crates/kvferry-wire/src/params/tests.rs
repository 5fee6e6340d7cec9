use proptest::prelude::*;

use super::*;

fn offer() -> RemoteOffer {
    RemoteOffer {
        lease: LeaseId {
            instance: Instance::from_bytes(*b"0123456789abcdef").unwrap(),
            epoch: Epoch::new(5).unwrap(),
            request: RequestId::new("cmpl-1-0").unwrap(),
        },
        source: Source {
            engine: "prefill-0".into(),
            directory: "10.0.0.1:5600".into(),
            ranks: 2,
        },
        tokens: 33,
        blocks: vec![vec![4, 9], vec![0, 3]],
        block_tokens: vec![32, 32],
        duration_ms: 30_000,
    }
}

fn params() -> Params {
    offer().to_params("10.0.0.1", 5600)
}

#[test]
fn an_offer_survives_the_way_through_json() {
    let text = serde_json::to_string(&params()).unwrap();
    let back: Params = serde_json::from_str(&text).unwrap();
    assert_eq!(Asked::parse(&back), Ok(Asked::Import(Box::new(offer()))));
}

#[test]
fn a_flat_list_is_the_only_group() {
    let mut params = params();
    params["remote_block_ids"] = json!([4, 9]);
    params["kvferry"]["block_tokens"] = json!([32]);
    let Ok(Asked::Import(offer)) = Asked::parse(&params) else {
        panic!("refused");
    };
    assert_eq!(offer.blocks, [[4, 9]]);
}

/// C17: what a client may do to parameters fails or localises its request, by name.
#[test]
fn c17_damage_is_an_error_that_names_the_field() {
    for (path, value) in [
        ("remote_block_ids", json!([])),
        ("remote_block_ids", json!([[1, -2]])),
        ("remote_block_ids", json!([[1], "x"])),
        ("remote_block_ids", json!(5)),
        ("remote_block_ids", json!([[4_294_967_296_u64]])),
        ("remote_num_tokens", json!(65)),
        ("remote_num_tokens", json!(0)),
        ("remote_num_tokens", json!(1.5)),
        ("remote_num_tokens", json!("33")),
        ("remote_num_tokens", json!(u64::MAX)),
        ("remote_port", json!(0)),
        ("remote_port", json!(65_536)),
        ("remote_port", Value::Null),
        ("remote_host", json!("")),
        ("remote_host", json!("a b")),
        ("remote_host", json!(["10.0.0.1"])),
        ("remote_engine_id", json!("")),
        ("remote_engine_id", json!(12)),
        ("remote_request_id", json!("x\u{7}")),
        ("tp_size", json!(0)),
        ("tp_size", json!(1_000_000)),
        ("do_remote_prefill", json!("yes")),
        ("kvferry", json!([])),
    ] {
        let mut params = params();
        params.insert(path.into(), value.clone());
        let error = Asked::parse(&params).expect_err(&format!("{path}={value}"));
        assert_eq!(error.field, path, "{value}");
    }
    for (key, field, value) in [
        ("version", "kvferry.version", json!(2)),
        ("instance", "kvferry.instance", json!("+".repeat(32))),
        ("instance", "kvferry.instance", json!("0".repeat(32))),
        ("instance", "kvferry.instance", json!("é".repeat(16))),
        ("epoch", "kvferry.epoch", json!(0)),
        ("epoch", "kvferry.epoch", json!(-1)),
        ("duration_ms", "kvferry.duration_ms", json!(0)),
        ("duration_ms", "kvferry.duration_ms", json!(u64::MAX)),
        ("block_tokens", "kvferry.block_tokens", json!([32])),
        ("block_tokens", "kvferry.block_tokens", json!([32, 0])),
        ("block_tokens", "kvferry.block_tokens", Value::Null),
    ] {
        let mut params = params();
        params["kvferry"][key] = value.clone();
        let error = Asked::parse(&params).expect_err(&format!("{field}={value}"));
        assert_eq!(error.field, field, "{value}");
    }
    let mut both = params();
    both["do_remote_decode"] = json!(true);
    assert_eq!(Asked::parse(&both).unwrap_err().field, "do_remote_prefill");
}

#[test]
fn what_is_not_ours_or_dropped_by_a_router_is_known() {
    let parse = |value: Value| Asked::parse(value.as_object().unwrap()).unwrap();
    assert_eq!(parse(json!({})), Asked::Nothing);
    assert_eq!(
        parse(json!({"do_remote_prefill": null, "other": [1]})),
        Asked::Nothing
    );
    assert_eq!(
        parse(json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        })),
        Asked::Export
    );
    let mut typed = params();
    typed.remove("kvferry");
    assert_eq!(Asked::parse(&typed), Ok(Asked::Unleased));
}

#[test]
fn a_huge_value_is_shown_short() {
    let mut params = params();
    params["remote_host"] = json!(vec![1; 1_000_000]);
    let error = Asked::parse(&params).unwrap_err();
    assert_eq!(error.value.chars().count(), SHOWN + 1);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map("[a-z_]{1,12}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Any value in any place: no panic, and what is taken is well-formed.
    #[test]
    fn c17_any_value_anywhere(place in 0_usize..14, value in any_json()) {
        let mut params = params();
        let top = [
            "remote_block_ids", "remote_num_tokens", "remote_port", "remote_host",
            "remote_engine_id", "remote_request_id", "tp_size", "kvferry", "do_remote_prefill",
        ];
        let own = ["version", "instance", "epoch", "duration_ms", "block_tokens"];
        match top.get(place) {
            Some(key) => { params.insert((*key).into(), value); }
            None => params["kvferry"][own[place - top.len()]] = value,
        }
        if let Ok(Asked::Import(offer)) = Asked::parse(&params) {
            prop_assert!(offer.tokens > 0 && offer.duration_ms > 0 && offer.source.ranks > 0);
            prop_assert_eq!(offer.blocks.len(), offer.block_tokens.len());
            for (ids, size) in offer.blocks.iter().zip(&offer.block_tokens) {
                prop_assert!(*size > 0 && ids.len() as u64 * u64::from(*size) >= offer.tokens.into());
            }
        }
    }
}

//! Lane selection as a table.

use super::*;
use kvferry_wire::{Addresses, EngineId, Incarnation, Rank};

fn peer(data: bool, ucx: Option<UcxVersion>) -> Description {
    Description {
        engine: EngineId::new("peer").unwrap(),
        incarnation: Incarnation::from_bytes([7; 16]).unwrap(),
        rank: Rank::default(),
        instance: None,
        kvferry_version: "0".into(),
        ucx,
        host: "h".into(),
        addresses: Addresses {
            message: vec![1],
            data: data.then(|| vec![1]),
        },
        compatibility: std::collections::BTreeMap::new(),
        regions: vec![],
        tables: vec![],
        unix_socket: None,
    }
}

const fn version(minor: u32) -> UcxVersion {
    UcxVersion {
        major: 1,
        minor,
        release: 0,
    }
}

#[test]
fn names_are_parsed_and_printed() {
    for lane in Lane::ALL {
        assert_eq!(lane.name().parse(), Ok(LaneChoice::Pinned(lane)));
    }
    assert_eq!("auto".parse(), Ok(LaneChoice::Auto));
    let error = "rdma".parse::<LaneChoice>().unwrap_err();
    assert_eq!(
        error,
        "no lane \"rdma\": auto, mapped, native, attached or served"
    );
}

#[test]
fn the_first_usable_lane_is_chosen_and_emulation_never() {
    let (real, emulated) = (NativeReads::Real, NativeReads::Emulated);
    let none = NativeReads::Unavailable("no such transport".into());
    let (old, new) = (Some(version(13)), Some(version(22)));
    let no_endpoint = NativeReads::Unavailable("no endpoint".into());
    // Native reads here, our UCX, the peer's UCX and data context, what the endpoint got: auto's lane,
    // and why native is refused.
    let table = [
        (&real, old, old, true, &real, Lane::Native, None),
        (&real, old, new, true, &real, Lane::Native, None),
        (&real, new, new, true, &real, Lane::Native, None),
        (
            &real,
            new,
            old,
            true,
            &real,
            Lane::Served,
            Some("cannot unpack"),
        ),
        (
            &real,
            new,
            new,
            false,
            &no_endpoint,
            Lane::Served,
            Some("peer has no data context"),
        ),
        (
            &real,
            new,
            new,
            true,
            &no_endpoint,
            Lane::Served,
            Some("no endpoint"),
        ),
        (&emulated, old, old, true, &emulated, Lane::Served, None),
        // Emulation is allowed, and this peer is reached over another transport than the best.
        (&real, old, old, true, &emulated, Lane::Served, None),
        (
            &none,
            old,
            old,
            true,
            &none,
            Lane::Served,
            Some("no such transport"),
        ),
    ];
    for (row, (native, ours, theirs, data, endpoint, auto, refusal)) in
        table.into_iter().enumerate()
    {
        let peer = peer(data, theirs);
        let situation = Situation {
            native,
            ours,
            peer: &peer,
            used: &UsedRegions::default(),
            same_host: Err("elsewhere"),
            endpoint: endpoint.clone(),
        };
        assert_eq!(situation.choose(LaneChoice::Auto), Ok(auto), "row {row}");
        // Strict: what Auto would take if it is native, and nothing else.
        let rdma = situation.rdma_refusal(LaneChoice::Auto);
        assert_eq!(rdma.is_none(), auto == Lane::Native, "row {row}: {rdma:?}");
        let pinned = situation.rdma_refusal(LaneChoice::Pinned(Lane::Native));
        assert_eq!(pinned, rdma, "row {row}");
        let served = situation.rdma_refusal(LaneChoice::Pinned(Lane::Served));
        assert!(served.is_some_and(|reason| reason.contains("lane served was asked for")));
        let got = situation.refusal(Lane::Native);
        match refusal {
            None => assert_eq!(got, None, "row {row}"),
            Some(part) => assert!(got.is_some_and(|got| got.contains(part)), "row {row}"),
        }
        for lane in [Lane::Mapped, Lane::Attached] {
            let pinned = situation.choose(LaneChoice::Pinned(lane));
            assert_eq!(pinned, Err((lane, "elsewhere".into())));
        }
    }
}

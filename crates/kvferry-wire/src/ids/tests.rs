use super::*;

#[test]
fn zero_is_nobody() {
    assert!(Incarnation::from_bytes([0; 16]).is_err());
    assert!(Instance::from_bytes([0; 16]).is_err());
    assert!(Epoch::new(0).is_err());
    assert_eq!(Epoch::new(7).map(Epoch::get), Ok(7));
}

#[test]
fn ids_are_little_endian_on_the_wire_and_print_as_one_number() {
    let mut bytes = [0; 16];
    bytes[0] = 0x2a;
    let id = Incarnation::from_bytes(bytes).unwrap();
    assert_eq!(id.to_bytes(), bytes);
    assert_eq!(id.to_string(), "0000000000000000000000000000002a");
    assert_eq!(format!("{id:?}"), id.to_string());
}

#[test]
fn random_ids_differ() {
    assert_ne!(Instance::random().unwrap(), Instance::random().unwrap());
}

#[test]
fn names_have_a_length_and_no_control_characters() {
    assert_eq!(EngineId::new("e").unwrap().as_str(), "e");
    assert!(EngineId::new("x".repeat(MAX_NAME_BYTES)).is_ok());
    let long = RequestId::new("x".repeat(MAX_NAME_BYTES + 1)).unwrap_err();
    assert_eq!(
        long.to_string(),
        "RequestId is 513 bytes, expected 1 to 512 bytes"
    );
    let empty = EngineId::new("").unwrap_err();
    assert_eq!(
        empty.to_string(),
        "EngineId is 0 bytes, expected 1 to 512 bytes"
    );
    let control = RequestId::new("a\nb").unwrap_err();
    assert_eq!(
        control.to_string(),
        "RequestId is \"a\\nb\", expected no control characters"
    );
}

#[test]
fn ids_are_checked_when_they_are_deserialized() {
    let name = |name: &str| rmp_serde::from_slice::<EngineId>(&rmp_serde::to_vec(name).unwrap());
    assert!(name("engine").is_ok());
    assert!(name("").is_err());
    let epoch = |number: u64| rmp_serde::from_slice::<Epoch>(&rmp_serde::to_vec(&number).unwrap());
    assert!(epoch(1).is_ok());
    assert!(epoch(0).is_err());
    let instance = |byte: u8, length: usize| {
        let bytes = serde_bytes::ByteBuf::from(vec![byte; length]);
        rmp_serde::from_slice::<Instance>(&rmp_serde::to_vec(&bytes).unwrap())
    };
    assert!(instance(1, 16).is_ok());
    assert!(instance(0, 16).is_err());
    assert!(instance(1, 15).is_err());
}

#[test]
fn composed_ids_print_their_parts() {
    let lease = LeaseId {
        instance: Instance::from_bytes([0x11; 16]).unwrap(),
        epoch: Epoch::new(3).unwrap(),
        request: RequestId::new("r").unwrap(),
    };
    assert_eq!(lease.to_string(), format!("{}/3/r", "11".repeat(16)));
    let reader = ReaderId {
        incarnation: Incarnation::from_bytes([0x22; 16]).unwrap(),
        load: 4,
    };
    assert_eq!(reader.to_string(), format!("{}:4", "22".repeat(16)));
    assert_eq!(Rank { pp: 1, tp: 2 }.to_string(), "pp1tp2");
}

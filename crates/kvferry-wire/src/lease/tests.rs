use super::*;

#[test]
fn a_release_survives_the_way() {
    let lease = LeaseId {
        instance: Instance::from_bytes([1; 16]).unwrap(),
        epoch: Epoch::new(5).unwrap(),
        request: RequestId::new("cmpl-1").unwrap(),
    };
    let reader = ReaderId {
        incarnation: Incarnation::from_bytes([2; 16]).unwrap(),
        load: 9,
    };
    let bytes = encode_release(&lease, reader, 2).unwrap();
    assert_eq!(
        LeaseMessage::parse(&bytes),
        Ok(LeaseMessage::Release {
            lease,
            reader,
            consumers: 2
        })
    );
}

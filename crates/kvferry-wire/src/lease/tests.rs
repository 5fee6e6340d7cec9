use super::*;

fn instance() -> Instance {
    Instance::from_bytes([1; 16]).unwrap()
}

fn epochs(count: u64) -> impl Iterator<Item = Epoch> + Clone {
    (1..=count).map(|epoch| Epoch::new(epoch).unwrap())
}

fn field(result: Result<Vec<u8>, WireError>) -> &'static str {
    match result.unwrap_err() {
        WireError::BadValue { field, .. } => field,
        WireError::TooLong { what, .. } => what,
        error => panic!("{error}"),
    }
}

#[test]
fn only_one_verdict_is_valid() {
    let valid: Vec<_> = Verdict::ALL
        .iter()
        .filter(|verdict| verdict.is_valid())
        .collect();
    assert_eq!(valid, [&Verdict::Valid]);
}

#[test]
fn codes_are_numbered_from_one() {
    let verdicts: Vec<u8> = Verdict::ALL.iter().map(|&verdict| verdict as u8).collect();
    assert_eq!(verdicts, (1..=8).collect::<Vec<u8>>());
    let gone: Vec<u8> = Gone::ALL.iter().map(|&gone| gone as u8).collect();
    assert_eq!(gone, (1..=6).collect::<Vec<u8>>());
    assert!(
        Verdict::ALL
            .iter()
            .all(|verdict| !verdict.to_string().is_empty())
    );
    assert!(Gone::ALL.iter().all(|gone| !gone.to_string().is_empty()));
}

#[test]
fn lists_that_would_be_refused_are_not_written() {
    let (most, more) = (MAX_RENEWALS as u64, MAX_RENEWALS as u64 + 1);
    assert_eq!(
        field(encode_renew(instance(), 1, epochs(0))),
        "renew.epochs"
    );
    assert_eq!(
        field(encode_renew(instance(), 1, epochs(more))),
        "renew.epochs"
    );
    let gone = |count| epochs(count).map(|epoch| (epoch, Gone::Expired));
    let renewed = |lost, later| encode_renewed(instance(), 1, gone(lost), epochs(later));
    assert_eq!(field(renewed(more, 0)), "renewed.gone");
    assert_eq!(field(renewed(0, more)), "renewed.unknown");
    let largest = renewed(most, most).unwrap();
    assert!(LeaseMessage::parse(&largest).is_ok());
    let renewal = encode_renew(instance(), 1, epochs(most)).unwrap();
    assert!(LeaseMessage::parse(&renewal).is_ok());
}

/// A renewal that names 1,000 leases arrives whole (C32).
#[test]
fn c32_a_renewal_of_a_thousand_leases_is_whole() {
    let bytes = encode_renew(instance(), 5, epochs(1_000)).unwrap();
    assert_eq!(bytes.len(), 2 + 28 + 8_000);
    let Ok(LeaseMessage::Renew { epochs: read, .. }) = LeaseMessage::parse(&bytes) else {
        panic!("no renewal")
    };
    assert!(read.iter().eq(epochs(1_000)));
}

#[test]
fn a_release_by_nobody_is_not_written() {
    let lease = LeaseId {
        instance: instance(),
        epoch: Epoch::new(1).unwrap(),
        request: RequestId::new("cmpl-1").unwrap(),
    };
    let reader = ReaderId {
        incarnation: Incarnation::from_bytes([2; 16]).unwrap(),
        load: 0,
    };
    assert_eq!(
        field(encode_release(&lease, reader, 0)),
        "release.consumers"
    );
}

#[test]
fn lists_print_their_items() {
    let bytes = encode_renewed(
        instance(),
        1,
        [(Epoch::new(4).unwrap(), Gone::LeaseMax)],
        epochs(2),
    )
    .unwrap();
    let Ok(LeaseMessage::Renewed { gone, unknown, .. }) = LeaseMessage::parse(&bytes) else {
        panic!("no answer")
    };
    assert_eq!(format!("{gone:?} {unknown:?}"), "[(4, LeaseMax)] [1, 2]");
}

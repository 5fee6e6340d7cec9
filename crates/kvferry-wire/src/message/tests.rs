use super::*;

#[test]
fn a_read_survives_the_way() {
    let transfer = TransferId {
        slot: 7,
        generation: 1,
    };
    let runs = [
        BlockRun { first: 5, count: 2 },
        BlockRun { first: 9, count: 1 },
    ];
    let bytes = encode_read(transfer, &[3, 4], runs.iter().copied()).unwrap();
    assert_eq!(bytes.len(), bytes.capacity());
    let Ok(Message::Read(read)) = Message::parse(&bytes) else {
        panic!("not a read")
    };
    assert_eq!(read.transfer(), transfer);
    assert_eq!(read.tables().collect::<Vec<_>>(), [3, 4]);
    assert_eq!(read.runs().collect::<Vec<_>>(), runs);
    assert_eq!(read.block_count(), 3);
    assert_eq!(ReadRequest::view(&bytes), Ok(read));
}

use super::*;

const TRANSFER: TransferId = TransferId {
    slot: 7,
    generation: 1,
};
const RUN: BlockRun = BlockRun { first: 5, count: 2 };

fn field(result: Result<Vec<u8>, WireError>) -> &'static str {
    match result.unwrap_err() {
        WireError::BadValue { field, .. } => field,
        WireError::TooLong { what, .. } => what,
        error => panic!("{error}"),
    }
}

/// An iterator that yields another number of items than it announces.
struct Liar(usize, usize);

impl Iterator for Liar {
    type Item = BlockRun;

    fn next(&mut self) -> Option<BlockRun> {
        self.1 = self.1.checked_sub(1)?;
        Some(RUN)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0, Some(self.0))
    }
}

impl ExactSizeIterator for Liar {}

#[test]
fn a_read_that_would_be_refused_is_not_written() {
    let read = |transfer, tables: &[u32], runs: &[BlockRun]| {
        field(encode_read(transfer, tables, runs.iter().copied()))
    };
    let unused = TransferId {
        generation: 0,
        ..TRANSFER
    };
    assert_eq!(read(unused, &[1], &[RUN]), "transfer.generation");
    assert_eq!(read(TRANSFER, &[], &[RUN]), "read.tables");
    assert_eq!(
        read(TRANSFER, &vec![1; MAX_READ_TABLES + 1], &[RUN]),
        "read.tables"
    );
    assert_eq!(read(TRANSFER, &[1], &[]), "read.runs");
    assert_eq!(
        read(TRANSFER, &[1], &[BlockRun { count: 0, ..RUN }]),
        "run.count"
    );
    assert_eq!(
        read(
            TRANSFER,
            &[1],
            &[BlockRun {
                first: u32::MAX,
                count: 1
            }]
        ),
        "run.first"
    );
}

#[test]
fn a_read_has_as_many_runs_as_were_announced() {
    assert_eq!(field(encode_read(TRANSFER, &[1], Liar(2, 1))), "read.runs");
    assert_eq!(field(encode_read(TRANSFER, &[1], Liar(2, 3))), "read.runs");
    assert_eq!(
        field(encode_read(TRANSFER, &[1], Liar(usize::MAX, 1))),
        "read"
    );
    assert!(encode_read(TRANSFER, &[1], Liar(2, 2)).is_ok());
}

#[test]
fn a_read_fills_a_message_and_no_more() {
    let most = (MAX_MESSAGE_BYTES - MESSAGE_HEADER_BYTES - 16 - 4) / 8;
    let bytes = encode_read(TRANSFER, &[1], vec![RUN; most].into_iter()).unwrap();
    assert_eq!(bytes.len(), bytes.capacity());
    let Ok(Message::Read(read)) = Message::parse(&bytes) else {
        panic!("not a read")
    };
    assert_eq!(
        (read.run_count(), read.block_count()),
        (most, 2 * most as u64)
    );
    assert_eq!(
        field(encode_read(TRANSFER, &[1], vec![RUN; most + 1].into_iter())),
        "read"
    );
    let tables = vec![3; MAX_READ_TABLES];
    let bytes = encode_read(TRANSFER, &tables, [RUN].into_iter()).unwrap();
    assert!(Message::parse(&bytes).is_ok());
}

#[test]
fn a_view_takes_reads_only_and_does_not_look_at_runs() {
    assert!(ReadRequest::view(&encode_ping(1)).is_err());
    assert!(ReadRequest::view(&[]).is_err());
    let mut bytes = encode_read(TRANSFER, &[3], [RUN].into_iter()).unwrap();
    let count = bytes.len() - 4;
    bytes[count..].fill(0);
    assert!(Message::parse(&bytes).is_err());
    assert_eq!(ReadRequest::view(&bytes).unwrap().block_count(), 0);
}

#[test]
fn a_service_message_fills_a_message_and_no_more() {
    let payload = vec![1; MAX_MESSAGE_BYTES - MESSAGE_HEADER_BYTES];
    let bytes = encode_service(9, &payload).unwrap();
    assert_eq!(
        Message::parse(&bytes),
        Ok(Message::Service {
            channel: 9,
            payload: &payload
        })
    );
    let error = Message::parse(&[bytes, vec![1]].concat()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "message is 16777217 bytes or items, at most 16777216 are allowed"
    );
    assert_eq!(
        field(encode_service(9, &[payload, vec![1]].concat())),
        "service message"
    );
}

#[test]
fn kinds_have_names() {
    let pong = encode_pong(1);
    assert_eq!(Message::parse(&pong).unwrap().kind_name(), "pong");
    for number in 1..=11 {
        assert_eq!(Kind::parse(number).unwrap() as u8, number);
    }
    let names: std::collections::HashSet<_> = (1..=11)
        .map(|number| Kind::parse(number).unwrap().name())
        .collect();
    assert_eq!(names.len(), 11);
}

#[test]
fn a_withdrawal_names_at_least_one_region_and_not_too_many() {
    let empty = RegionSet::default();
    assert_eq!(field(encode_withdraw(&empty)), "regions");
    assert_eq!(field(encode_withdrawn(&empty)), "regions");
    let apart = |count: usize| (0..count as u32).map(|n| 2 * n).collect::<RegionSet>();
    let most = apart(crate::regions::MAX_REGION_RANGES);
    let bytes = encode_withdraw(&most).unwrap();
    assert_eq!(bytes.len(), bytes.capacity());
    assert_eq!(Message::parse(&bytes), Ok(Message::Withdraw(most)));
    let more = apart(crate::regions::MAX_REGION_RANGES + 1);
    assert_eq!(field(encode_withdraw(&more)), "regions");
}

//! The hot path does not allocate: what is sent per segment, read or block must not cost a heap
//! operation each.
#![allow(unsafe_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    hint::black_box,
};

use kvferry_wire::{
    BlockRun, Incarnation, Message, ReadRequest, SEGMENT_HEADER_BYTES, Segment, SegmentBody,
    SegmentHeader, TransferId, encode_read, encode_service,
};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that is ending has no counter any more, and no test that looks at it.
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: every call goes to the system's allocator unchanged. Counting neither allocates (the
// counter is a constant-initialised thread-local without a destructor) nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above; `at` came from the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above; `at` came from the system's allocator.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations_of<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = ALLOCATIONS.get();
    let result = black_box(work());
    (ALLOCATIONS.get() - before, result)
}

const TRANSFER: TransferId = TransferId {
    slot: 1,
    generation: 1,
};

#[test]
fn a_segment_is_written_and_read_without_allocating() {
    let incarnation = Incarnation::random().unwrap();
    let body = SegmentBody::Data {
        transfer: TRANSFER,
        offset: 0,
    };
    let header = SegmentHeader {
        source: incarnation,
        destination: incarnation,
        connection: 1,
        sequence: 0,
        body,
    };
    let mut bytes = [7; SEGMENT_HEADER_BYTES + 100];
    let (allocations, parsed) = allocations_of(|| {
        header.write(bytes.first_chunk_mut().unwrap());
        Segment::parse(&bytes).is_ok()
    });
    assert_eq!((allocations, parsed), (0, true));
}

#[test]
fn a_read_is_written_with_one_allocation_and_read_without() {
    for runs in [1_u32, 100_000] {
        let run = |number| BlockRun {
            first: number * 2,
            count: 1,
        };
        let tables = [1, 2, 3];
        let (allocations, bytes) = allocations_of(|| {
            encode_read(
                TRANSFER,
                &tables,
                (0..runs).map(run).collect::<Vec<_>>().into_iter(),
            )
        });
        let bytes = bytes.unwrap();
        assert_eq!(allocations, 2, "the test's own vector, and the message");
        assert_eq!(bytes.len(), bytes.capacity());
        let (allocations, blocks) = allocations_of(|| {
            let Ok(Message::Read(read)) = Message::parse(&bytes) else {
                return 0;
            };
            read.block_count() + ReadRequest::view(&bytes).map_or(0, |read| read.block_count())
        });
        assert_eq!((allocations, blocks), (0, 2 * u64::from(runs)));
    }
}

#[test]
fn a_service_message_is_written_with_one_allocation_and_read_without() {
    let (allocations, bytes) = allocations_of(|| encode_service(1, &[0; 1000]).unwrap());
    assert_eq!(allocations, 1);
    let (allocations, parsed) = allocations_of(|| Message::parse(&bytes).is_ok());
    assert_eq!((allocations, parsed), (0, true));
}

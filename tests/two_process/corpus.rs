//! Garbage disturbs nobody: the fuzzers' corpus over real endpoints and sockets, while somebody else
//! reads.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_connector::directory::fetch;
use kvferry_engine::wire::directory::{FRAME_HEADER_BYTES, MAX_DIRECTORY_REQUEST_BYTES};
use kvferry_engine::wire::lease::LEASE_CHANNEL;
use kvferry_engine::wire::{
    Description, DirectoryRequest, FrameHeader, MAX_SHARE_BYTES, Message, Rank, Segment,
    SegmentBody, ShareReply, ShareRequest, TransferId, WireError, encode_hello, encode_service,
};
use kvferry_engine::{Engine, Peer};
use kvferry_tests::corpus::{Garbage, corpus, mostly, mutations};
use kvferry_tests::harness::{Case, Child, PATIENCE, until};
use kvferry_tests::random::Random;
use kvferry_tests::roles::{Endured, EngineSettings, Layout, Resources, Settings, Started, config};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, send, sendmsg, socket_with, sockopt,
};

use crate::intruder::Intruder;
use crate::support::{Consumer, consumer, with_blocks};

const LAYOUT: Layout = Layout {
    layers: 2,
    blocks: 16,
    block_bytes: 4096,
};

/// The ways on which others read meanwhile.
const WAYS: [&str; 3] = ["served", "mapped", "native"];

/// What the producer may hold more than after the first, smaller dose. Memory: what the allocator and
/// UCX keep of what has been used at once; a stranger that stayed would be kilobytes, and there are
/// thousands. Descriptors: none.
const ALLOWED: Resources = Resources {
    rss_kib: 8 << 10,
    fds: 0,
    maps: 64,
};

/// The channel of the producer's counting service.
const COUNT_CHANNEL: u16 = 100;

/// Someone who reads all the time, and now and then somebody new.
struct Reading {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

/// Every way once, with the bytes right.
fn reads(consumer: &Consumer, peers: &[Peer]) {
    for peer in peers {
        for table in [0, 1] {
            consumer.reads(peer, table);
        }
    }
}

fn peers(consumer: &Consumer, to: &Description) -> Vec<Peer> {
    WAYS.map(|way| consumer.connect(to.clone(), way)).into()
}

/// A new engine connects, reads and leaves.
fn newcomer(to: &Description) {
    let engine = Engine::builder(config("newcomer")).start().unwrap();
    let consumer = with_blocks(engine, LAYOUT.blocks, LAYOUT.block_bytes);
    reads(&consumer, &peers(&consumer, to));
    consumer.engine.shutdown(PATIENCE).unwrap();
}

impl Reading {
    fn start(to: Description) -> Self {
        let (stop, rounds) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let consumer = consumer(Settings::default(), LAYOUT.blocks, LAYOUT.block_bytes);
            let peers = peers(&consumer, &to);
            while !stopped.load(Ordering::Acquire) {
                reads(&consumer, &peers);
                if counted.fetch_add(1, Ordering::AcqRel) % 50 == 0 {
                    newcomer(&to);
                }
            }
            for peer in &peers {
                assert_eq!(
                    peer.gone(),
                    None,
                    "the reader's connection is the first one"
                );
            }
            consumer.is_quiet();
            assert_eq!(consumer.engine.counters().transfers_failed, 0);
            assert_eq!(consumer.engine.counters().peers_lost, 0);
            consumer.engine.shutdown(PATIENCE).unwrap();
        });
        Self {
            stop,
            rounds,
            thread,
        }
    }

    /// At least one more round from begin to end.
    fn goes_on(&self) {
        let before = self.rounds.load(Ordering::Acquire);
        until("a round of reads", || {
            assert!(!self.thread.is_finished(), "the reader was disturbed");
            self.rounds.load(Ordering::Acquire) >= before + 2
        });
    }

    fn finish(self) {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap();
    }
}

/// Who is bothered.
pub(crate) struct Target {
    pub(crate) child: Child,
    pub(crate) description: Description,
    directory: SocketAddr,
}

impl Target {
    pub(crate) fn endured(&mut self) -> Endured {
        self.child.ask("endured")
    }

    /// What it holds, once it holds no more than `limit`; given up after a while, in which strangers
    /// are forgotten and connections are closed.
    fn settled(&mut self, limit: Option<Resources>) -> Resources {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let now: Resources = self.child.ask("resources");
            if limit.is_some_and(|limit| now.is_within(&limit)) || Instant::now() > deadline {
                return now;
            }
            assert!(self.child.is_quiet_for(Duration::from_millis(100)));
        }
    }
}

impl Target {
    /// A producer that takes a peer for silent, or a segment for missing, after `suspect_ms`; 0 for the
    /// default.
    pub(crate) fn start(suspect_ms: u64) -> Self {
        let settings = EngineSettings {
            // Strangers are forgotten after that.
            connect_ms: 1000,
            suspect_ms,
            ..EngineSettings::default()
        }
        .to_json();
        let environment = [(EngineSettings::VARIABLE, Some(settings.as_str()))];
        let mut child = Child::start("producer", &LAYOUT, &environment);
        let started: Started = child.hear();
        Self {
            description: started.description.unpack(),
            directory: child.ask("directory"),
            child,
        }
    }
}

/// Has a producer bothered while others read from it: with a tenth of the garbage, to let everything
/// reach its size, and with all of it.
fn undisturbed(targets: &[&str], step: usize, bother: impl Fn(&mut Target, &[Garbage])) {
    let mut target = Target::start(0);
    let reading = Reading::start(target.description.clone());
    reading.goes_on();
    let all = mostly(&corpus(), targets, step);
    let some: Vec<Garbage> = all.iter().step_by(10).cloned().collect();
    bother(&mut target, &some);
    reading.goes_on();
    // Long enough for strangers to be forgotten.
    assert!(target.child.is_quiet_for(Duration::from_secs(3)));
    let before: Resources = target.child.ask("resources");
    bother(&mut target, &all);
    reading.goes_on();
    let limit = before.and(&ALLOWED);
    let after = target.settled(Some(limit));
    eprintln!("{} pieces of garbage: {before:?}, {after:?}", all.len());
    assert!(after.is_within(&limit), "{before:?} became {after:?}");
    reading.finish();
    newcomer(&target.description);
    let listing = fetch(target.directory, Some(&[Rank::default()]), PATIENCE).unwrap();
    assert_eq!(listing.entries[&Rank::default()], target.description);
    target.child.finish_well();
}

/// Waits until the producer has dropped as many segments more than `before`.
pub(crate) fn dropped(target: &mut Target, before: Endured, more: usize) {
    until("the garbage to be dropped", || {
        target.endured().segments_dropped >= before.segments_dropped + more as u64
    });
}

/// As segments, and as messages of somebody who has not greeted.
fn message_context(target: &mut Target, all: &[Garbage]) {
    let mut intruder = Intruder::new(target.description.clone());
    let before = target.endured();
    for garbage in all {
        intruder.raw(&garbage.bytes);
    }
    let refused = |garbage: &&Garbage| Segment::parse(&garbage.bytes).is_err();
    dropped(target, before, all.iter().filter(refused).count());
    let before = target.endured();
    intruder.begin();
    for garbage in all {
        intruder.message(&garbage.bytes);
    }
    // Each is dropped: it says nothing, or it is not a greeting, or one of somebody else.
    dropped(target, before, all.len());
    let before = target.endured();
    for garbage in all {
        intruder.begin();
        intruder.message(&garbage.bytes);
        intruder.piece(8 << 20, 0, &[1; 100]);
    }
    dropped(target, before, all.len());
    intruder.flush();
}

/// Inside a greeting that is right but for it, each on a connection of its own.
fn hello(target: &mut Target, all: &[Garbage]) {
    let mut intruder = Intruder::new(target.description.clone());
    let whole = Garbage {
        target: "message".into(),
        bytes: encode_hello(&intruder.hello()).unwrap(),
    };
    let inside = mutations(&whole, &mut Random::new(7));
    let step = inside.len().div_ceil(all.len());
    let before = target.endured();
    let mut unreadable = 0;
    for garbage in inside.iter().step_by(step) {
        intruder.begin();
        intruder.message(&garbage.bytes);
        intruder.progress();
        unreadable += usize::from(Message::parse(&garbage.bytes).is_err());
    }
    // The bodies, and what is in them.
    for garbage in all {
        intruder.begin();
        let header = &whole.bytes[..4];
        let message = [header, &garbage.bytes].concat();
        intruder.message(&message);
        intruder.progress();
        unreadable += usize::from(Message::parse(&message).is_err());
    }
    assert!(unreadable > all.len() / 2);
    dropped(target, before, unreadable);
    let before = target.endured().peers_connected;
    intruder.greet();
    intruder.is_answered();
    assert!(target.endured().peers_connected > before);
}

/// From a peer whose greeting was answered. What cannot be read costs the connection, no more.
fn after_a_hello(target: &mut Target, all: &[Garbage]) {
    let mut intruder = Intruder::new(target.description.clone());
    let before = target.endured();
    for garbage in all {
        intruder.greet();
        intruder.message(&garbage.bytes);
        // Behind what may have ended it.
        intruder.message(&garbage.bytes);
    }
    type Shape = fn(&mut Intruder);
    let shapes: [Shape; 9] = [
        |it| it.piece(9, 4, b"ferry"),
        |it| it.piece(16 << 20, 0, b"ferry"),
        |it| {
            it.piece(9, 0, b"ferr");
            it.piece(10, 4, b"ferry");
        },
        |it| {
            it.skip(5000);
            it.piece(5, 0, b"ferry");
        },
        |it| {
            it.skip(1);
            it.piece(5, 0, b"ferry");
        },
        |it| {
            it.skip(u64::MAX - 1);
            it.piece(5, 0, b"ferry");
        },
        |it| it.segment(data(0, u64::MAX - 5), b"ferry"),
        |it| it.segment(data(0, u64::MAX), b"ferry"),
        |it| it.segment(data(u32::MAX, 0), b"ferry"),
    ];
    for shape in shapes {
        intruder.greet();
        shape(&mut intruder);
    }
    let greeted = (all.len() + shapes.len()) as u64;
    let now = target.endured();
    assert!(now.peers_connected >= before.peers_connected + greeted);
    // Services of a peer in good standing.
    intruder.greet();
    for garbage in all {
        for channel in [LEASE_CHANNEL, COUNT_CHANNEL, 999] {
            let message = encode_service(channel, &garbage.bytes).unwrap();
            intruder.message(&message);
            intruder.progress();
        }
    }
    intruder.is_answered();
    let lost = target.endured().peers_lost;
    assert!(lost >= before.peers_lost + greeted, "each connection ended");
}

pub(crate) fn data(slot: u32, offset: u64) -> SegmentBody {
    let transfer = TransferId {
        slot,
        generation: 1,
    };
    SegmentBody::Data { transfer, offset }
}

/// Says something, and no more, and hears everything that is answered.
fn told(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = Vec::new();
    // It may have hung up at the first bytes.
    if stream.write_all(bytes).is_ok()
        && stream.shutdown(Shutdown::Write).is_ok()
        && let Err(error) = stream.read_to_end(&mut answer)
    {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    answer
}

/// What a stream of bytes deserves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deserves {
    Answer,
    /// A whole request, and more.
    Both,
    Nothing,
}

fn deserves(stream: &[u8]) -> Deserves {
    let Some((header, rest)) = stream.split_first_chunk::<FRAME_HEADER_BYTES>() else {
        return Deserves::Nothing;
    };
    let length = FrameHeader::parse(header, MAX_DIRECTORY_REQUEST_BYTES);
    let Some(body) = length.ok().and_then(|length| rest.get(..length)) else {
        return Deserves::Nothing;
    };
    match DirectoryRequest::decode_body(body) {
        Ok(_) | Err(WireError::Version { .. }) if body.len() == rest.len() => Deserves::Answer,
        Ok(_) | Err(WireError::Version { .. }) => Deserves::Both,
        Err(_) => Deserves::Nothing,
    }
}

/// To the directory: as bytes and as frames, some left open, some by halves.
fn directory(target: &mut Target, all: &[Garbage]) {
    let before = target.endured();
    let mut wrong = 0;
    for garbage in all {
        let bytes = garbage.bytes.as_slice();
        let framed = [b"kfd1", &(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
        for bytes in [bytes, &framed] {
            let answer = told(target.directory, bytes);
            match deserves(bytes) {
                Deserves::Answer => assert_eq!(&answer[..4], b"kfd1", "{bytes:02x?}"),
                Deserves::Nothing => assert_eq!(answer, b"", "{bytes:02x?}"),
                // It may hang up before the answer has been read.
                Deserves::Both => {}
            }
            wrong += u64::from(deserves(bytes) == Deserves::Nothing && !bytes.is_empty());
        }
    }
    let now = target.endured();
    assert!(wrong > all.len() as u64 / 2);
    assert!(now.garbage >= before.garbage + wrong, "{wrong}: {now:?}");
    let mut open = Vec::new();
    for n in 0..120_usize {
        let mut stream = TcpStream::connect(target.directory).unwrap();
        let some = &all[n * all.len() / 120].bytes;
        let half = match n % 4 {
            0 => vec![],
            1 => b"kfd".to_vec(),
            2 => b"kfd1\0\0\x01\0".to_vec(),
            _ => [&b"kfd1\0\0\x01\0"[..], some].concat(),
        };
        stream.write_all(&half).unwrap();
        open.push(stream);
    }
    let listing = fetch(target.directory, None, PATIENCE).unwrap();
    assert_eq!(listing.entries[&Rank::default()], target.description);
    // They made room, or their time is over: nobody has to hang up.
    let deadline = Instant::now() + PATIENCE;
    while target.endured().too_slow < before.too_slow + 120 {
        assert!(Instant::now() < deadline, "{:?}", target.endured());
        assert!(target.child.is_quiet_for(Duration::from_millis(50)));
    }
    drop(open);
}

fn share_socket_of(target: &Target) -> OwnedFd {
    let name = target.description.unix_socket.as_deref().unwrap();
    let name = name.strip_prefix('@').unwrap();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    let patience = Some(PATIENCE);
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, patience).unwrap();
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, patience).unwrap();
    connect(&socket, &address).unwrap();
    socket
}

/// What comes back; nothing if it hung up.
fn answer(socket: &OwnedFd) -> Option<ShareReply> {
    let mut buffer = vec![0; MAX_SHARE_BYTES];
    match recv(socket, buffer.as_mut_slice(), RecvFlags::empty()) {
        Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET) => None,
        Ok((_, length)) => Some(ShareReply::decode(&buffer[..length]).unwrap()),
        Err(error) => panic!("{error}"),
    }
}

/// To the socket on which pools are shared: as packets, some with descriptors, some left open.
fn share_socket(target: &mut Target, all: &[Garbage]) {
    let request = ShareRequest {
        from: target.description.incarnation,
        expects: target.description.incarnation,
    };
    let right = Garbage {
        target: "share".into(),
        bytes: request.encode().unwrap(),
    };
    let near = mutations(&right, &mut Random::new(8));
    let long = [MAX_SHARE_BYTES - 1, MAX_SHARE_BYTES + 1, 100_000];
    let long = long.map(|length| vec![0x93; length]);
    let packets = all.iter().chain(&near).map(|garbage| &garbage.bytes);
    for (n, bytes) in packets.chain(&long).enumerate() {
        let socket = share_socket_of(target);
        if n % 16 == 0 && !bytes.is_empty() {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [socket.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
            let bytes = [std::io::IoSlice::new(bytes)];
            sendmsg(&socket, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
        } else {
            send(&socket, bytes, SendFlags::NOSIGNAL).unwrap();
        }
        let expected = ShareRequest::decode(bytes);
        match answer(&socket) {
            Some(ShareReply::Pools { pools, .. }) => {
                assert_eq!(expected.unwrap().expects, request.expects);
                assert_eq!(pools.len(), 1);
            }
            Some(ShareReply::Refused { reason }) => {
                assert!(!expected.is_ok_and(|got| got.expects == request.expects));
                assert!(!reason.is_empty());
            }
            None => assert!(bytes.is_empty(), "{bytes:02x?} is not answered"),
        }
    }
    let open: Vec<_> = (0..200).map(|_| share_socket_of(target)).collect();
    let socket = share_socket_of(target);
    send(&socket, &right.bytes, SendFlags::NOSIGNAL).unwrap();
    assert!(matches!(answer(&socket), Some(ShareReply::Pools { .. })));
    // Nobody has to hang up.
    for socket in &open {
        assert_eq!(answer(socket), None);
    }
}

pub(crate) fn cases() -> Vec<Case> {
    type Bother = fn(&mut Target, &[Garbage]);
    let all: [(&str, &'static [&str], usize, Bother); 5] = [
        ("message_context", &[], 1, message_context),
        ("hello", &["hello", "description"], 20, hello),
        ("after_a_hello", &[], 20, after_a_hello),
        ("directory", &["directory"], 20, directory),
        ("share_socket", &["share"], 8, share_socket),
    ];
    let cases = all.map(|(name, targets, step, bother)| {
        let name = format!("garbage_disturbs_nobody::{name}");
        Case::new(name, move || undisturbed(targets, step, bother))
    });
    cases.into()
}

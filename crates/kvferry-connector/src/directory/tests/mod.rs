//! Directory and client over real sockets on 127.0.0.1, and the connection's state machine over a
//! scripted stream.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use kvferry_wire::directory::{DirectoryReply, DirectoryRequest, FRAME_HEADER_BYTES, FrameHeader};
use kvferry_wire::{Addresses, Description, EngineId, Incarnation, Instance, Rank};

use super::*;

mod client;
mod hostile;
mod machine;
mod serving;

/// Far more than anything here takes; a test that needs it has failed.
const LONG: Duration = Duration::from_secs(60);

fn engine() -> EngineId {
    EngineId::new("prefill-0").unwrap()
}

fn instance() -> Instance {
    Instance::from_bytes([7; 16]).unwrap()
}

fn rank(pp: u16, tp: u16) -> Rank {
    Rank { pp, tp }
}

/// A valid description of `rank` that differs from every other rank's.
fn description(rank: Rank) -> Description {
    let mark = 1 + (rank.pp << 8 | rank.tp) as u8;
    Description {
        engine: engine(),
        incarnation: Incarnation::from_bytes([mark; 16]).unwrap(),
        rank,
        instance: Some(instance()),
        kvferry_version: "0.1.0".to_owned(),
        ucx: None,
        host: "a host".to_owned(),
        addresses: Addresses {
            message: vec![mark; 40],
            data: None,
        },
        compatibility: [("model".to_owned(), "toy".to_owned())].into(),
        regions: Vec::new(),
        tables: Vec::new(),
        unix_socket: None,
    }
}

/// The same with about 1 MiB of fields, so that replies exceed what sockets buffer.
fn large_description(rank: Rank) -> Description {
    let mut description = description(rank);
    description.compatibility = (0..255)
        .map(|field| (format!("field {field}"), "x".repeat(4 << 10)))
        .collect();
    description
}

fn config() -> DirectoryConfig {
    DirectoryConfig {
        instance: Some(instance()),
        // Tests that are about a timeout set it; elsewhere none may interfere.
        request_timeout: Duration::from_secs(3_600),
        connection_timeout: Duration::from_secs(3_600),
        ..DirectoryConfig::new(engine())
    }
}

/// A directory in which `ranks` are published.
fn serve(config: DirectoryConfig, ranks: &[Rank]) -> DirectoryServer {
    serve_all(config, ranks.iter().copied().map(description))
}

fn serve_all(
    config: DirectoryConfig,
    descriptions: impl IntoIterator<Item = Description>,
) -> DirectoryServer {
    let server = DirectoryServer::bind("127.0.0.1:0", config).unwrap();
    for description in descriptions {
        server
            .publish(description.rank, description.encode().unwrap())
            .unwrap();
    }
    server
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream
}

/// Asks for everything and takes none of the reply. The small receive buffer, which the kernel does
/// not grow once it was set, keeps it from taking the reply in the client's stead.
fn connect_stuck(address: SocketAddr) -> TcpStream {
    let mut stream = connect(address);
    rustix::net::sockopt::set_socket_recv_buffer_size(&stream, 64 << 10).unwrap();
    stream.write_all(&request(None)).unwrap();
    stream.peek(&mut [0]).unwrap();
    stream
}

fn request(ranks: Option<&[Rank]>) -> Vec<u8> {
    let ranks = ranks.map(<[Rank]>::to_vec);
    DirectoryRequest { ranks }.encode_frame().unwrap()
}

/// A frame with the right magic around any body.
fn frame(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    [b"kfd1", &length.to_le_bytes()[..], body].concat()
}

fn receive_body(stream: &mut TcpStream) -> Vec<u8> {
    let mut header = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let mut body = vec![0; FrameHeader::parse(&header, 64 << 20).unwrap()];
    stream.read_exact(&mut body).unwrap();
    body
}

fn receive(stream: &mut TcpStream) -> DirectoryReply {
    DirectoryReply::decode_body(&receive_body(stream)).unwrap()
}

fn ask(stream: &mut TcpStream, ranks: Option<&[Rank]>) -> Vec<Rank> {
    stream.write_all(&request(ranks)).unwrap();
    ranks_of(receive(stream))
}

fn ranks_of(reply: DirectoryReply) -> Vec<Rank> {
    match reply {
        DirectoryReply::Entries { entries, .. } => {
            entries.into_iter().map(|(rank, _)| rank).collect()
        }
        DirectoryReply::Refused { reason } => panic!("refused: {reason}"),
    }
}

/// Reads until the other side has closed the connection. Returns the number of bytes.
fn read_to_close(stream: &mut TcpStream) -> usize {
    let mut bytes = vec![0; 64 << 10];
    let mut total = 0;
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return total,
            Ok(count) => total += count,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return total,
            Err(error) => panic!("the connection was not closed: {error}"),
        }
    }
}

//! Messages to services.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use kvferry_engine::{Engine, Lane, Replies, SendError, Sender, Service};

use crate::support::*;

/// Records what arrives, and answers each message with its length.
struct Recorder {
    seen: Seen,
    told: mpsc::Sender<usize>,
    answer: bool,
}

impl Service for Recorder {
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        let mut seen = self.seen.lock().unwrap();
        seen.push(payload.to_vec());
        let _ = self.told.send(seen.len());
        if self.answer {
            replies.send(from.peer, 7, (payload.len() as u64).to_le_bytes().to_vec());
        }
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

type Seen = Arc<Mutex<Vec<Vec<u8>>>>;

fn recorder(answer: bool) -> (Box<Recorder>, Seen, mpsc::Receiver<usize>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (told, heard) = mpsc::channel();
    (
        Box::new(Recorder {
            seen: Arc::clone(&seen),
            told,
            answer,
        }),
        seen,
        heard,
    )
}

#[test]
fn messages_of_any_size_arrive_whole_in_order_and_are_answered() {
    for kind in kinds() {
        let (service, seen, _heard) = recorder(true);
        let server = start(&kind, Engine::builder(config("server")).service(7, service));
        let (service, answers, heard) = recorder(false);
        let client = start(&kind, Engine::builder(config("client")).service(7, service));
        let peer = connect(&client, &server, Lane::Served);
        let sizes = [1, 100, 4096, 4097, 70_000, 1 << 20, 5 << 20, 3];
        for (n, &size) in sizes.iter().enumerate() {
            peer.send(7, vec![n as u8; size]).unwrap();
        }
        while heard.recv_timeout(PATIENCE).unwrap() < sizes.len() {}
        let seen = seen.lock().unwrap();
        for (n, &size) in sizes.iter().enumerate() {
            assert_eq!(seen[n], vec![n as u8; size]);
            assert_eq!(answers.lock().unwrap()[n], (size as u64).to_le_bytes());
        }
        let error = peer.send(7, vec![]).unwrap_err();
        assert!(matches!(error, SendError::Size { bytes: 0, .. }), "{error}");
        let error = peer.send(7, vec![0; 17 << 20]).unwrap_err();
        assert!(error.to_string().contains("17825792"), "{error}");
    }
}

//! What handles ask for.

use std::time::Instant;

use super::core::{Core, ShutdownState};
use super::greeting::LINGER;
use super::peers::Phase;
use super::registering::take_back;
use crate::command::{Command, Holders};
use crate::counters::subtract;
use crate::error::TransferError;
use crate::fabric::Fabric;

impl Core {
    pub(super) fn command(&mut self, command: Command, fabric: &mut dyn Fabric) {
        match command {
            Command::Register {
                memory,
                chunks,
                reply,
            } => {
                let unheard = reply.send(self.register(&memory, chunks, fabric)).err();
                if let Some(Ok(registered)) = unheard.map(|unheard| unheard.0) {
                    // Whoever asked has given up.
                    take_back(&registered, fabric);
                }
            }
            Command::Release(release) => self.release(release),
            Command::Connect(command) => self.connect(*command, fabric),
            Command::Disconnect { peer } => {
                self.leave(peer.0, "we disconnected", || TransferError::Cancelled)
            }
            Command::Read(command) => self.start_read(*command),
            Command::Cancel { transfer } => self.cancel(transfer),
            Command::Send {
                peer,
                channel,
                payload,
            } => self.push_service(peer, channel, &payload),
            Command::WakeServices => self.tick_services = true,
            Command::Shutdown { deadline, reply } => self.begin_shutdown(deadline, reply),
        }
    }

    /// Gives a peer up that does not answer. Should it come back, it finds the goodbye and greets
    /// again, instead of waiting for us in its turn.
    pub(super) fn give_up(&mut self, id: u64, reason: &str) {
        if self
            .peers
            .get(&id)
            .is_some_and(super::peers::PeerState::is_ready)
        {
            self.leave(id, reason, || TransferError::PeerLost(reason.into()));
        } else {
            self.lose(id, reason);
        }
    }

    /// Says goodbye to a peer and ends it when that has left.
    fn leave(&mut self, id: u64, reason: &str, error: impl Fn() -> TransferError) {
        let deadline = self.now + LINGER;
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        if !peer.is_ready() {
            return;
        }
        self.fail_transfers_of(id, |_, _| error());
        self.push_message(id, kvferry_wire::encode_goodbye());
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.jobs.clear();
            peer.owed.clear();
            peer.phase = Phase::Leaving {
                deadline,
                reason: reason.into(),
                was_ready: true,
            };
        }
        self.asked.ending(id);
    }

    fn begin_shutdown(&mut self, deadline: Instant, reply: crossbeam::channel::Sender<()>) {
        if let Some(shutdown) = &mut self.shutdown {
            // The first one's deadline counts; everybody hears when the thread has ended.
            shutdown.replies.push(reply);
            return;
        }
        let ids: Vec<u64> = self.peers.keys().copied().collect();
        for id in ids {
            self.leave(id, "the engine was shut down", || TransferError::Stopped);
        }
        self.shutdown = Some(ShutdownState {
            deadline,
            replies: vec![reply],
        });
    }

    /// Ends what is left when the fabric is gone. Unless all is quiet, copies go on for ever.
    pub(super) fn abandon(&mut self, quiet: bool) {
        let ids: Vec<u64> = self.peers.keys().copied().collect();
        for id in ids {
            self.lose(id, "the engine was shut down");
            self.forget_peer(id);
        }
        self.abandon_transfers(quiet);
        for release in self.releases.drain(..) {
            match release.waiter {
                Some((_, reply)) => drop(reply.send(Holders::default())),
                None => subtract(&self.shared.counters.quarantined_regions, 1),
            }
        }
    }

    pub(super) fn answer_shutdown(&mut self) {
        for reply in self
            .shutdown
            .take()
            .into_iter()
            .flat_map(|shutdown| shutdown.replies)
        {
            let _ = reply.send(());
        }
    }
}

//! What handles ask for.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::core::{Core, ShutdownState};
use super::greeting::LINGER;
use super::peers::Phase;
use crate::command::{Command, ReleaseRegion};
use crate::counters::add;
use crate::error::TransferError;
use crate::fabric::Fabric;

impl Core {
    pub(super) fn command(&mut self, command: Command, fabric: &mut dyn Fabric) {
        match command {
            Command::Register { memory, reply } => {
                let _ = reply.send(fabric.register(&memory));
            }
            Command::Release(release) => self.release(release, fabric),
            Command::Connect(command) => self.connect(*command, fabric),
            Command::Disconnect { peer } => self.leave(peer.0),
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

    fn release(&mut self, release: ReleaseRegion, fabric: &mut dyn Fabric) {
        if release.waiter.is_none() {
            add(&self.counters().quarantined_regions, 1);
        }
        self.releases.push(release);
        self.release_regions(fabric);
    }

    /// Says goodbye to a peer and ends it when that has left.
    fn leave(&mut self, id: u64) {
        let deadline = self.now + LINGER;
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        if !peer.is_ready() {
            return;
        }
        self.push_message(id, kvferry_wire::encode_goodbye());
        self.fail_transfers_of(id, |_, _| TransferError::Cancelled);
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.jobs.clear();
            peer.phase = Phase::Leaving {
                deadline,
                reason: "we disconnected".into(),
            };
        }
    }

    fn begin_shutdown(&mut self, deadline: Instant, reply: crossbeam::channel::Sender<()>) {
        if self.shutdown.is_some() {
            // The first one counts; the second caller hears when the thread has ended.
            return;
        }
        let ids: Vec<u64> = self.peers.keys().copied().collect();
        for id in ids {
            self.leave(id);
        }
        self.shutdown = Some(ShutdownState {
            deadline,
            reply: Some(reply),
        });
    }

    /// Ends what is left when the fabric is gone.
    pub(super) fn abandon(&mut self) {
        let ids: Vec<u64> = self.peers.keys().copied().collect();
        for id in ids {
            self.lose(id, "the engine was shut down");
            self.forget_peer(id);
        }
        self.abandon_transfers();
        for release in self.releases.drain(..) {
            if let Some((_, reply)) = release.waiter {
                let _ = reply.send(0);
            }
        }
        self.shared
            .counters
            .quarantined_regions
            .store(0, Ordering::Relaxed);
        debug_assert!(self.transfers.is_empty());
    }

    pub(super) fn answer_shutdown(&mut self) {
        if let Some(reply) = self
            .shutdown
            .as_mut()
            .and_then(|shutdown| shutdown.reply.take())
        {
            let _ = reply.send(());
        }
    }
}

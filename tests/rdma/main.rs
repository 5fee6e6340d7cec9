//! The native lane over real RDMA verbs: two processes, each with a device of its own, as two hosts have.
//!
//! Run by `scripts/test-rdma`, on a machine with two RDMA devices of this kind of fabric or in a virtual
//! one; elsewhere everything is skipped.

#![allow(missing_docs, clippy::unwrap_used)]

mod devices;
mod endings;
mod reads;

use kvferry_tests::harness::{Case, Child};
use kvferry_tests::roles::native::{Connected, Reader};
use kvferry_tests::roles::{EngineSettings, Layout, Packed, Started};

use self::devices::Devices;

fn main() -> std::process::ExitCode {
    let devices = devices::find();
    let cases = match devices {
        Ok(devices) => {
            let mut cases = reads::cases(&devices);
            cases.extend(endings::cases(&devices));
            cases
        }
        Err(reason) => {
            let mut case = Case::new("native_lane_over_rdma", || ());
            case.skip = Some(reason);
            vec![case]
        }
    };
    kvferry_tests::harness::main(cases)
}

/// Like a production engine: nothing emulated. Patient, since a virtual machine may be slow.
fn settings() -> EngineSettings {
    EngineSettings {
        // Two devices stand for two hosts.
        alone: true,
        allow_emulation: false,
        connect_ms: 40_000,
        ..EngineSettings::default()
    }
}

/// A producer on the first device and a consumer on the second.
struct Pair {
    producer: Child,
    consumer: Child,
    connected: Connected,
    description: Packed,
}

impl Pair {
    /// Starts a producer.
    fn producer(devices: &Devices, transports: Option<&str>, layout: Layout) -> Child {
        let settings = settings().to_json();
        let environment = [
            ("UCX_TLS", transports),
            ("UCX_NET_DEVICES", Some(devices.first.as_str())),
            (EngineSettings::VARIABLE, Some(settings.as_str())),
        ];
        Child::start("producer", &layout, &environment)
    }

    /// Starts both. The lane is picked by the engine.
    fn start(
        devices: &Devices,
        transports: Option<&str>,
        layout: Layout,
        ours: &EngineSettings,
    ) -> Self {
        let producer = Self::producer(devices, transports, layout);
        let started: Started = producer.hear();
        let reader = Reader {
            from: started.description.clone(),
            lane: "auto".into(),
            layout,
        };
        let consumer_settings = ours.to_json();
        let consumer = Child::start(
            "native-reader",
            &reader,
            &[
                ("UCX_TLS", transports),
                ("UCX_NET_DEVICES", Some(&devices.second)),
                (EngineSettings::VARIABLE, Some(&consumer_settings)),
            ],
        );
        let connected = consumer.hear();
        Self {
            producer,
            consumer,
            connected,
            description: started.description,
        }
    }
}

//! The RDMA devices of this machine, and what can be done to the network between them.

use std::path::Path;
use std::process::Command;

/// Two devices that reach each other, as `UCX_NET_DEVICES` names them.
#[derive(Clone, Debug)]
pub(crate) struct Devices {
    pub(crate) first: String,
    pub(crate) second: String,
    /// The network interfaces under them, where they are soft-RoCE.
    interfaces: Option<[String; 2]>,
}

/// The first two devices, or why there are none.
pub(crate) fn find() -> Result<Devices, String> {
    let class = Path::new("/sys/class/infiniband");
    let mut names: Vec<String> = std::fs::read_dir(class)
        .map_err(|_| "no RDMA device: there is no /sys/class/infiniband".to_owned())?
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    let [first, second, ..] = names.as_slice() else {
        return Err(format!("two RDMA devices are needed, here are {names:?}"));
    };
    // Soft-RoCE names the interface that it is on.
    let under = |name: &str| std::fs::read_to_string(class.join(name).join("parent")).ok();
    let interfaces = under(first)
        .zip(under(second))
        .map(|(first, second)| [first.trim().to_owned(), second.trim().to_owned()]);
    Ok(Devices {
        first: format!("{first}:1"),
        second: format!("{second}:1"),
        interfaces,
    })
}

impl Devices {
    /// Why the network cannot be disturbed here, if so.
    pub(crate) fn undisturbed(&self) -> Option<String> {
        match &self.interfaces {
            None => Some("the devices are not soft-RoCE: tc does not reach their packets".into()),
            Some(_) if Command::new("tc").arg("-V").output().is_err() => {
                Some("there is no tc".into())
            }
            Some(_) => None,
        }
    }

    /// Disturbs packets in both directions, until it is dropped. `how` is what tc's netem takes.
    pub(crate) fn disturb(&self, how: &str) -> Disturbance {
        let interfaces = self.interfaces.clone().unwrap();
        for interface in &interfaces {
            tc(
                &["qdisc", "replace", "dev", interface, "root", "netem"],
                how,
            );
        }
        Disturbance { interfaces }
    }
}

/// A network that loses or delays packets.
pub(crate) struct Disturbance {
    interfaces: [String; 2],
}

impl Drop for Disturbance {
    fn drop(&mut self) {
        for interface in &self.interfaces {
            tc(&["qdisc", "del", "dev", interface, "root"], "");
        }
    }
}

fn tc(arguments: &[&str], how: &str) {
    let status = Command::new("tc")
        .args(arguments)
        .args(how.split_whitespace())
        .status()
        .unwrap();
    assert!(status.success(), "tc {arguments:?} {how}: {status}");
}

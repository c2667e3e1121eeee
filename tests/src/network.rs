//! A network of its own for a test: the upstairs and each replica in a network namespace, each replica on a cable of its own
//! to the upstairs, which can be cut.
//!
//! Invariants:
//! - Names carry the test's process id; dropping the network removes all of it, and making one removes what processes that
//!   are gone have left.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cluster::Place;
use crate::command::{path, sh};
use crate::skip::skipped;
use crate::volume::REPLICAS;

const PREFIX: &str = "newel-";

/// Which end of a cable is taken down: both stop all packets, but only one tells the upstairs' kernel that the address
/// can't be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Upstairs,
    Replica,
}

#[derive(Debug)]
pub struct Network {
    name: String,
}

impl Network {
    /// `None`, and the test is recorded as skipped, where namespaces can't be made.
    pub fn new(test: &str) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        remove_stale();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let network = Self { name: format!("{PREFIX}{}-{number}", std::process::id()) };
        match network.make() {
            Ok(()) => Some(network),
            Err(error) => {
                skipped(test, &error);
                None
            }
        }
    }

    fn make(&self) -> Result<(), String> {
        ip(&["netns", "add", &self.upstairs()])?;
        for replica in 0..REPLICAS {
            let (hub, leaf) = (self.upstairs(), self.replica(replica));
            let (near, far) = (format!("to{replica}"), "cable");
            ip(&["netns", "add", &leaf])?;
            ip(&["-n", &hub, "link", "add", &near, "type", "veth", "peer", "name", far, "netns", &leaf])?;
            ip(&["-n", &hub, "addr", "add", &format!("10.77.{replica}.1/24"), "dev", &near])?;
            ip(&["-n", &leaf, "addr", "add", &format!("{}/24", address(replica)), "dev", far])?;
            ip(&["-n", &hub, "link", "set", &near, "up"])?;
            ip(&["-n", &leaf, "link", "set", far, "up"])?;
            ip(&["-n", &leaf, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// The namespace of the upstairs.
    pub fn upstairs(&self) -> String {
        format!("{}-up", self.name)
    }

    fn replica(&self, replica: usize) -> String {
        format!("{}-{replica}", self.name)
    }

    pub fn places(&self) -> [Place; REPLICAS] {
        std::array::from_fn(|replica| Place {
            network: Some((self.replica(replica), address(replica))),
            ..Place::default()
        })
    }

    #[track_caller]
    pub fn cut(&self, replica: usize, end: End) {
        self.set(replica, end, "down");
    }

    #[track_caller]
    pub fn heal(&self, replica: usize, end: End) {
        self.set(replica, end, "up");
    }

    #[track_caller]
    fn set(&self, replica: usize, end: End, state: &str) {
        let (namespace, link) = match end {
            End::Upstairs => (self.upstairs(), format!("to{replica}")),
            End::Replica => (self.replica(replica), "cable".to_owned()),
        };
        sh("ip", &["-n", &namespace, "link", "set", &link, state]).ok();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let replicas = (0..REPLICAS).map(|replica| self.replica(replica));
        for namespace in replicas.chain([self.upstairs()]) {
            // Those that were never made are no loss.
            ip(&["netns", "del", &namespace]).ok();
        }
    }
}

fn address(replica: usize) -> String {
    format!("10.77.{replica}.2")
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).env("PATH", path()).output();
    let output = output.map_err(|error| format!("cannot run ip: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    output.status.success().then_some(()).ok_or(format!("`ip {}`: {said}", arguments.join(" ")))
}

/// Namespaces of tests that were killed before they could remove them.
fn remove_stale() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        let owner = owner.and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            ip(&["netns", "del", &name]).ok();
        }
    }
}

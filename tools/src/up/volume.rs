//! `volume.toml`: what a directory's volume is, so that `newel up` run again finds the same data.
//!
//! Invariants:
//! - The volume's id and size never change once the file exists.
//! - Ports lie outside the range from which the kernel takes the ports of outgoing connections, so that a replica's port
//!   isn't lost to one of those while the replica restarts.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::layout::{Layout, REPLICAS, write_whole};
use crate::address::Address;
use crate::size::human;

/// Below Linux's default `ip_local_port_range`, above what well-known services use.
const PORT_FIRST: u16 = 15_000;
const PORT_COUNT: u16 = 17_000;
/// Far more attempts than a machine with a few thousand listeners needs.
const PORT_ATTEMPTS: usize = 200;

const HEAD: &str = "# Written by `newel up`; it belongs to the regions beside it.\n";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) volume_id: Uuid,
    pub(crate) size_bytes: u64,
    /// Used again if they are free.
    pub(crate) ports: [u16; REPLICAS],
    pub(crate) listen: Vec<Address>,
    pub(crate) status: Address,
    /// Slots that `newel replace` gave to replicas which run elsewhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) replaced: Vec<Replaced>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Replaced {
    pub(crate) replica: usize,
    pub(crate) address: String,
}

impl Volume {
    /// The replica in this slot was replaced by one that somebody else runs.
    pub(crate) fn is_elsewhere(&self, replica: usize) -> bool {
        self.replaced.iter().any(|replaced| replaced.replica == replica)
    }

    /// Where the upstairs finds this replica.
    pub(crate) fn address(&self, replica: usize) -> String {
        let replaced = self.replaced.iter().find(|replaced| replaced.replica == replica);
        let here = || format!("127.0.0.1:{}", self.ports.get(replica).copied().unwrap_or_default());
        replaced.map_or_else(here, |replaced| replaced.address.clone())
    }

    pub(crate) fn load(layout: &Layout) -> Result<Option<Self>> {
        let path = layout.volume_file();
        match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text)
                .map(Some)
                .with_context(|| format!("{} is not a description of a volume", path.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    pub(crate) fn store(&self, layout: &Layout) -> Result<()> {
        let text = toml::to_string(self).context("cannot describe the volume")?;
        write_whole(&layout.volume_file(), &format!("{HEAD}{text}"))
    }

    /// Refuses arguments that contradict what the volume is.
    pub(crate) fn check_same(
        &self,
        layout: &Layout,
        name: Option<&str>,
        size_bytes: Option<u64>,
    ) -> Result<()> {
        if let Some(size) = size_bytes.filter(|&size| size != self.size_bytes) {
            bail!(
                "the volume in {} has {}, not {}: leave --size out, or choose another --dir",
                layout.dir().display(),
                human(self.size_bytes),
                human(size)
            );
        }
        if let Some(name) = name.filter(|&name| name != self.name) {
            bail!(
                "the volume in {} is called {:?}, not {name:?}: leave --volume out, or choose another --dir",
                layout.dir().display(),
                self.name
            );
        }
        Ok(())
    }
}

/// `wanted` if all of them are free, else others that are. They are held together until all are found, so that they
/// differ.
pub(crate) fn free_ports(wanted: Option<[u16; REPLICAS]>) -> Result<[u16; REPLICAS]> {
    if let Some(ports) = wanted {
        let held: Vec<TcpListener> = ports.iter().filter_map(|&port| bind(port)).collect();
        if held.len() == REPLICAS {
            return Ok(ports);
        }
    }
    let mut held = Vec::new();
    let mut ports = [0; REPLICAS];
    for port in &mut ports {
        let (listener, found) = free_port()?;
        held.push(listener);
        *port = found;
    }
    Ok(ports)
}

/// A free port of the loopback interface, and the listener that holds it.
pub(crate) fn free_port() -> Result<(TcpListener, u16)> {
    for _ in 0..PORT_ATTEMPTS {
        let [low, high, ..] = Uuid::new_v4().into_bytes();
        let port = PORT_FIRST + u16::from_le_bytes([low, high]) % PORT_COUNT;
        if let Some(listener) = bind(port) {
            return Ok((listener, port));
        }
    }
    bail!("no free port from {PORT_FIRST} to {} on 127.0.0.1", PORT_FIRST + PORT_COUNT - 1)
}

fn bind(port: u16) -> Option<TcpListener> {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path()).unwrap();
        assert_eq!(Volume::load(&layout).unwrap(), None);
        let volume = Volume {
            name: "db".into(),
            volume_id: Uuid::new_v4(),
            size_bytes: 64 << 20,
            ports: [15_001, 15_002, 15_003],
            listen: vec!["tcp:127.0.0.1:10809".parse().unwrap()],
            status: Address::unix(&layout.status_socket()).unwrap(),
            replaced: vec![Replaced { replica: 2, address: "10.0.0.3:7100".into() }],
        };
        volume.store(&layout).unwrap();
        assert_eq!(Volume::load(&layout).unwrap().as_ref(), Some(&volume));
        assert_eq!([0, 2].map(|replica| volume.address(replica)), ["127.0.0.1:15001", "10.0.0.3:7100"]);
        assert!(volume.check_same(&layout, None, Some(64 << 20)).is_ok());
        let error = volume.check_same(&layout, None, Some(128 << 20)).unwrap_err().to_string();
        assert!(error.contains("has 64.0 MiB, not 128.0 MiB"), "{error}");
        assert!(volume.check_same(&layout, Some("other"), None).is_err());
    }

    #[test]
    fn taken_ports_are_replaced() {
        let (held, taken) = free_port().unwrap();
        let ports = free_ports(Some([taken, 15_002, 15_003])).unwrap();
        assert!(!ports.contains(&taken), "{ports:?} has {taken}");
        drop(held);
        let again = free_ports(Some(ports)).unwrap();
        assert_eq!(again, ports);
    }
}

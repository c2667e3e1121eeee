//! Heavy tests take turns: they load both the disk and all cores, and their timing would say nothing side by side.

use std::fs::File;

use rustix::fs::{FlockOperation, flock};
use rustix::process::setpriority_process;

use crate::command::tmp_root;

/// Held by a heavy test while it runs; all test programs of this target directory share it.
#[derive(Debug)]
pub struct Heavy {
    _file: File,
}

impl Heavy {
    pub fn take() -> Self {
        let path = tmp_root().join("heavy.lock");
        let file = File::create(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        flock(&file, FlockOperation::LockExclusive)
            .unwrap_or_else(|error| panic!("cannot lock {}: {error}", path.display()));
        Self { _file: file }
    }
}

/// This thread, and all that it starts from now on, come before everything else on this machine: what they wait for is then not a
/// processor. Only root may.
pub fn come_first() {
    /// Short of the kernel's own threads of that kind.
    const NICE: i32 = -18;
    setpriority_process(None, NICE).expect("root may have any priority");
}

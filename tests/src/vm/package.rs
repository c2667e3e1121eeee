//! The package built here, brought into a guest.

use std::path::Path;

use super::machine::{Disk, Machine};
use crate::command::{bin_dir, program, sh};

/// Takes the package off its disk, which is as long as whole sectors: the members of the archive tell its end.
const TAKE: &str = r#"
import sys
data = open(sys.argv[1], "rb").read()
end = 8
while data[end + 58:end + 60] == b"`\n":
    length = int(data[end + 48:end + 58])
    end += 60 + length + length % 2
open(sys.argv[2], "wb").write(data[:end])
"#;

/// A disk with the package of the programs built here.
pub fn disk(dir: &Path) -> Disk {
    program("newel");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/package.sh");
    let programs = bin_dir();
    let arguments =
        ["-b", programs.to_str().expect("a plain path"), "-o", dir.to_str().expect("a plain path")];
    let package = sh(script, &arguments).ok().stdout;
    Disk::holding(dir, "package", package.trim().as_ref())
}

pub fn install(machine: &mut Machine) {
    machine.put("/root/take", TAKE);
    machine
        .sh("python3 /root/take /dev/disk/by-id/virtio-package /root/newel.deb && dpkg -i /root/newel.deb");
}

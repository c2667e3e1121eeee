//! A file system on a device whose queue can be made to fill up, and that can be frozen: what submitting a write waits for.
//!
//! A loop device over a file in memory is slowed down by the block I/O controller; a second loop device over the first carries the
//! file system and is left with 4 tags. A thread that submits a fifth request then sleeps in the kernel until one is done,
//! about 100 ms. (The throttle must sit below the starved device: at the device itself it holds requests that have no tag yet.)
//!
//! Invariants:
//! - Whatever happens in the test, the file system is thawed, the processes leave the cgroup, the tags are given back, and mounts,
//!   loop devices and cgroup go: with the value, or, if the test was killed, with the next one made.
//! - One at a time in a process: its name is that of the process. A heavy test ([`crate::lock`]) sees to that.
//! - A frozen file system thaws after [`WATCHDOG_S`] seconds even if nobody is left to thaw it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use crate::command::{path, tmp_root};
use crate::skip::{have, have_root, skipped};
use crate::wait;

const CGROUPS: &str = "/sys/fs/cgroup/blkio";
const THROTTLE: &str = "blkio.throttle.write_iops_device";
const PREFIX: &str = "newel-starved-";
const IMAGE_MIB: u32 = 128;
const STARVED_TAGS: u32 = 4;
/// Linux's own value for a device without a scheduler.
const TAGS: u32 = 128;
const WRITES_PER_S: u32 = 200;
const WATCHDOG_S: u32 = 5;
/// For the last process that has a file open to end.
const UNMOUNT_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct StarvedDisk {
    root: PathBuf,
    /// The throttled device and the one with the file system, such as `loop0`.
    lower: String,
    upper: String,
}

impl StarvedDisk {
    /// `None` if that can't be had here, which is said and counted.
    #[must_use]
    pub fn make(test: &str) -> Option<Self> {
        if !have_root(test) || !have(test, &["losetup", "mkfs.ext4", "fsfreeze"]) {
            return None;
        }
        remove_stale();
        let root = tmp_root().join(format!("{PREFIX}{}", std::process::id()));
        match Self::set_up(&root) {
            Ok(disk) => Some(disk),
            Err(why) => {
                clean(&root);
                skipped(test, &why);
                None
            }
        }
    }

    fn set_up(root: &Path) -> Result<Self, String> {
        let throttle = Path::new(CGROUPS).join(THROTTLE);
        if !throttle.exists() {
            return Err(format!(
                "{} is not here (cgroup v1 with blkio is what slows the device)",
                throttle.display()
            ));
        }
        let (memory, files) = (root.join("memory"), root.join("files"));
        for dir in [&memory, &files] {
            fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        }
        tool("mount", &["-t", "tmpfs", "-o", &format!("size={}m", IMAGE_MIB + 32), "tmpfs", &text(&memory)])?;
        let image = memory.join("image");
        tool("truncate", &["-s", &format!("{IMAGE_MIB}M"), &text(&image)])?;
        let lower = loop_over(root, &text(&image))?;
        let upper = loop_over(root, &format!("/dev/{lower}"))?;
        tool("mkfs.ext4", &["-q", "-F", &format!("/dev/{upper}")])?;
        tool("mount", &[&format!("/dev/{upper}"), &text(&files)])?;
        let disk = Self { root: root.to_owned(), lower, upper };
        let cgroup = disk.cgroup();
        fs::create_dir(&cgroup).map_err(|error| format!("{}: {error}", cgroup.display()))?;
        let device = fs::read_to_string(format!("/sys/block/{}/dev", disk.lower));
        let device = device.map_err(|error| format!("the number of {}: {error}", disk.lower))?;
        put(&cgroup.join(THROTTLE), &format!("{} {WRITES_PER_S}", device.trim()))?;
        Ok(disk)
    }

    /// Where its files are.
    pub fn path(&self) -> PathBuf {
        self.root.join("files")
    }

    fn cgroup(&self) -> PathBuf {
        cgroup_of(&self.root)
    }

    /// From now on this process gets 4 tags and 200 writes a second.
    #[track_caller]
    pub fn starve(&self, pid: u32) {
        set_tags(&self.upper, STARVED_TAGS).expect("the device takes fewer tags");
        put(&self.cgroup().join("cgroup.procs"), &pid.to_string()).expect("the process runs");
    }

    /// From now on this process gets 200 writes a second, and all the tags there are: it need not wait to submit.
    #[track_caller]
    pub fn slow_down(&self, pid: u32) {
        put(&self.cgroup().join("cgroup.procs"), &pid.to_string()).expect("the process runs");
    }

    /// The device is fast again.
    #[track_caller]
    pub fn feed(&self) {
        release(&self.cgroup());
        set_tags(&self.upper, TAGS).expect("the device takes more tags");
    }

    /// Freezes the file system: whoever writes sleeps until it thaws.
    #[track_caller]
    pub fn freeze(&self) -> Frozen {
        let files = text(&self.path());
        let thaw = format!("sleep {WATCHDOG_S}; exec fsfreeze -u '{files}'");
        let watchdog =
            Command::new("sh").args(["-c", &thaw]).env("PATH", path()).spawn().expect("there is a shell");
        let frozen = Frozen { files, watchdog };
        tool("fsfreeze", &["-f", &frozen.files]).expect("the file system freezes");
        frozen
    }
}

/// Thaws as it goes.
#[derive(Debug)]
pub struct Frozen {
    files: String,
    watchdog: Child,
}

impl Drop for Frozen {
    fn drop(&mut self) {
        tool("fsfreeze", &["-u", &self.files]).ok();
        self.watchdog.kill().ok();
        self.watchdog.wait().ok();
    }
}

impl Drop for StarvedDisk {
    fn drop(&mut self) {
        clean(&self.root);
    }
}

/// A loop device, noted in `root` so that it can be found again. O_DIRECT, or the page cache would take every write at once.
fn loop_over(root: &Path, file: &str) -> Result<String, String> {
    let device = tool("losetup", &["-f", "--show", "--direct-io=on", file])?;
    let name = device.trim().trim_start_matches("/dev/").to_owned();
    let noted = format!("{}{name}\n", fs::read_to_string(root.join("loops")).unwrap_or_default());
    put(&root.join("loops"), &noted)?;
    Ok(name)
}

/// Undoes everything, as far as it was done.
fn clean(root: &Path) {
    let (memory, files) = (text(&root.join("memory")), text(&root.join("files")));
    // Nothing of this can be helped if it fails, and the rest is still to be tried.
    if is_mounted(&files) {
        // Fails if it isn't frozen.
        tool("fsfreeze", &["-u", &files]).ok();
    }
    let cgroup = cgroup_of(root);
    release(&cgroup);
    fs::remove_dir(&cgroup).ok();
    unmount(&files);
    let loops = fs::read_to_string(root.join("loops")).unwrap_or_default();
    for device in loops.lines().rev() {
        // They outlive the device's use.
        set_tags(device, TAGS).ok();
        tool("losetup", &["-d", &format!("/dev/{device}")]).ok();
    }
    unmount(&memory);
    fs::remove_dir_all(root).ok();
}

fn unmount(at: &str) {
    let gone = || (!is_mounted(at) || tool("umount", &[at]).is_ok()).then_some(());
    if wait::try_until(UNMOUNT_MAX, gone).is_none() {
        tool("umount", &["-l", at]).ok();
    }
}

/// Moves every process of the cgroup out of it.
fn release(cgroup: &Path) {
    let processes = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    for pid in processes.lines() {
        // One that has just ended can't be moved.
        put(&Path::new(CGROUPS).join("cgroup.procs"), pid).ok();
    }
}

/// What tests left behind that were killed.
fn remove_stale() {
    let Ok(entries) = fs::read_dir(tmp_root()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            clean(&entry.path());
        }
    }
}

fn cgroup_of(root: &Path) -> PathBuf {
    Path::new(CGROUPS).join(root.file_name().unwrap_or_default())
}

fn set_tags(device: &str, tags: u32) -> Result<(), String> {
    put(&Path::new("/sys/block").join(device).join("queue/nr_requests"), &tags.to_string())
}

fn is_mounted(at: &str) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(at))
}

fn put(file: &Path, value: &str) -> Result<(), String> {
    fs::write(file, value).map_err(|error| format!("cannot write {value:?} to {}: {error}", file.display()))
}

/// Runs a program of the system; what it printed, or what it complained about.
fn tool(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).env("PATH", path()).output();
    let output = output.map_err(|error| format!("cannot run {program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`{program} {}` failed: {}", arguments.join(" "), said.trim()))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

//! One virtual machine.

use std::fmt;
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::image::Image;
use super::pulse::{Frozen, Pulse};
use crate::command::{Running, sh, tmp_root};
use crate::wait;

/// An emulated processor boots in under a minute; it may have to share this one.
const BOOT_WITHIN: Duration = Duration::from_secs(400);
const POWER_OFF_WITHIN: Duration = Duration::from_secs(240);
/// Longer than any command that a test gives at once.
const ANSWER_WITHIN: Duration = Duration::from_secs(400);
const MEMORY_MIB: u32 = 2048;
/// How often a guest that does not answer is felt for a pulse.
const FEEL_EVERY: Duration = Duration::from_secs(5);

/// A disk beside the one with the system: `/dev/disk/by-id/virtio-NAME` in the guest.
#[derive(Clone, Debug)]
pub struct Disk {
    pub name: &'static str,
    pub file: PathBuf,
}

impl Disk {
    pub fn empty(dir: &Path, name: &'static str, bytes: u64) -> Self {
        let file = dir.join(format!("{name}.img"));
        let made = File::create(&file).and_then(|made| made.set_len(bytes));
        made.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        Self { name, file }
    }

    /// The bytes of a file, filled up to whole sectors.
    pub fn holding(dir: &Path, name: &'static str, content: &Path) -> Self {
        let file = dir.join(format!("{name}.img"));
        std::fs::copy(content, &file).unwrap_or_else(|error| panic!("{}: {error}", content.display()));
        let image = File::options().write(true).open(&file).expect("a copy can be opened");
        let length = image.metadata().expect("files have a length").len();
        image.set_len(length.next_multiple_of(4096)).expect("files can grow");
        Self { name, file }
    }
}

/// What a command in the guest left behind.
#[derive(Debug)]
pub struct Said {
    pub command: String,
    pub code: i32,
    pub output: String,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in the guest `{}`: exit code {}\n{}", self.command, self.code, self.output)
    }
}

#[derive(Debug)]
pub struct Machine {
    image: Image,
    disks: Vec<Disk>,
    dir: tempfile::TempDir,
    running: Option<Life>,
    boots: u32,
    /// It stood still: nobody there can be asked.
    frozen: bool,
}

/// From the power button to the loss of power.
#[derive(Debug)]
struct Life {
    qemu: Running,
    agent: BufReader<UnixStream>,
    pulse: Pulse,
}

impl Machine {
    /// A machine that is switched off. `disks` are made in the directory that it is given.
    pub fn new(image: Image, disks: impl FnOnce(&Path) -> Vec<Disk>) -> Self {
        let dir =
            tempfile::Builder::new().prefix("vm").tempdir_in(tmp_root()).expect("target/tmp is writable");
        let system = dir.path().join("system.img");
        let (from, to) = (image.disk(), system.clone());
        sh(
            "cp",
            &["--sparse=always", from.to_str().expect("a plain path"), to.to_str().expect("a plain path")],
        )
        .ok();
        let mut all = vec![Disk { name: "system", file: system }];
        all.extend(disks(dir.path()));
        Self { image, disks: all, dir, running: None, boots: 0, frozen: false }
    }

    /// Where its disks, its console and what it writes to the host lie.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Switches it on and waits until it can be asked.
    pub fn switch_on(&mut self) {
        assert!(self.running.is_none(), "the machine runs");
        self.boots += 1;
        let socket = self.dir.path().join("agent.sock");
        std::fs::remove_file(&socket).ok();
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg,thread=multi", "-smp", "2", "-m", &MEMORY_MIB.to_string()]);
        command.args(["-nodefaults", "-no-user-config", "-nographic", "-nic", "none"]);
        command.arg("-kernel").arg(self.image.kernel()).arg("-initrd").arg(self.image.initrd());
        // What a broken guest prints is told at the end.
        // A tick that comes whatever happens: with timers that the guest sets one by one a kernel 6.1 stood still for ever, once in a while.
        let kernel =
            "console=ttyS0 root=/dev/vda rw quiet panic=-1 systemd.show_status=1 nohz=off highres=off";
        command.args(["-append", kernel]);
        let console = self.dir.path().join(format!("console-{}", self.boots));
        command.arg("-serial").arg(format!("file:{}", console.display()));
        for disk in &self.disks {
            // What the guest has handed over is in this host's page cache, which outlives QEMU.
            command.arg("-drive").arg(format!(
                "file={},format=raw,if=none,id={},cache=unsafe,discard=unmap",
                disk.file.display(),
                disk.name
            ));
            command.arg("-device").arg(format!("virtio-blk-pci,drive={0},serial={0}", disk.name));
        }
        command.args(["-device", "virtio-serial-pci"]);
        command.arg("-chardev").arg(format!("socket,id=agent,path={},server=on,wait=off", socket.display()));
        command.args(["-device", "virtserialport,chardev=agent,name=agent"]);
        // Appended to, as what was told before the loss of power counts.
        command.arg("-chardev").arg(format!("file,id=told,path={},append=on", self.told_path().display()));
        command.args(["-device", "virtserialport,chardev=told,name=told"]);
        let beat = self.dir.path().join(format!("beat-{}", self.boots));
        command.arg("-chardev").arg(format!("file,id=beat,path={}", beat.display()));
        command.args(["-device", "virtserialport,chardev=beat,name=beat"]);
        let mut qemu = Running::start(&mut command);
        let stream = wait::until("QEMU's socket", Duration::from_secs(60), || {
            assert!(qemu.running(), "QEMU ended: {}", qemu.stderr());
            UnixStream::connect(&socket).ok()
        });
        let pulse = Pulse::of(qemu.pid(), vec![beat, console]);
        self.running = Some(Life { qemu, agent: BufReader::new(stream), pulse });
        self.await_boot();
    }

    /// Waits for the agent of the next boot: after switching it on, or after a reboot that was ordered.
    pub fn await_boot(&mut self) {
        let line = self.line(BOOT_WITHIN);
        assert!(line.starts_with("ready "), "the guest says {line:?} instead of being ready");
    }

    /// Cuts the power: what the guest has not handed to its disks is gone.
    pub fn cut_power(&mut self) {
        // Dropping it kills it.
        drop(self.running.take().expect("the machine runs"));
    }

    /// Orders an end, and waits until the machine is off.
    pub fn power_off(&mut self) {
        self.sh("systemctl --no-block poweroff");
        let life = self.running.take().expect("the machine runs");
        let ended = life.qemu.wait(POWER_OFF_WITHIN);
        assert!(ended.status.success(), "{ended}");
    }

    /// Orders a reboot and waits for it.
    pub fn reboot(&mut self) {
        self.sh("systemctl --no-block reboot");
        self.await_boot();
    }

    /// Runs a command of the shell in the guest.
    pub fn run(&mut self, command: &str) -> Said {
        let life = self.running.as_mut().expect("the machine runs");
        let line = format!("{}\n", hex(command.as_bytes()));
        life.agent.get_mut().write_all(line.as_bytes()).expect("QEMU takes what the guest is told");
        let line = self.line(ANSWER_WITHIN);
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some("done"), "the guest answers `{command}` with {line:?}");
        let code = words.next().and_then(|code| code.parse().ok()).expect("an exit code");
        let output = String::from_utf8_lossy(&unhex(words.next().unwrap_or_default())).into_owned();
        Said { command: command.to_owned(), code, output }
    }

    /// Runs a command that must succeed; gives what it printed.
    #[track_caller]
    pub fn sh(&mut self, command: &str) -> String {
        let said = self.run(command);
        assert_eq!(said.code, 0, "{said}");
        said.output
    }

    /// Runs a command again and again until it succeeds.
    #[track_caller]
    pub fn until(&mut self, command: &str, within: Duration) -> String {
        let mut last = None;
        let done = wait::try_until(within, || {
            let said = self.run(command);
            let output = (said.code == 0).then(|| said.output.clone());
            last = Some(said);
            output
        });
        done.unwrap_or_else(|| panic!("not within {within:?}: {}", last.expect("it was asked at least once")))
    }

    /// Puts a file into the guest.
    pub fn put(&mut self, path: &str, content: &str) {
        let write = "import sys; open(sys.argv[1], 'wb').write(bytes.fromhex(sys.argv[2]))";
        self.sh(&format!("python3 -c \"{write}\" {path} {}", hex(content.as_bytes())));
    }

    /// Puts a program into the guest's path.
    pub fn put_program(&mut self, (name, content): (&str, &str)) {
        let path = format!("/usr/local/bin/{name}");
        self.put(&path, content);
        self.sh(&format!("chmod +x {path}"));
    }

    fn told_path(&self) -> PathBuf {
        self.dir.path().join("told")
    }

    /// What the guest has written to its port `told`, over all its lives.
    pub fn told(&self) -> String {
        std::fs::read_to_string(self.told_path()).unwrap_or_default()
    }

    fn line(&mut self, within: Duration) -> String {
        let life = self.running.as_mut().expect("the machine runs");
        life.agent.get_ref().set_read_timeout(Some(FEEL_EVERY)).expect("sockets have timeouts");
        let mut line = String::new();
        let said = wait::try_until(within, || match life.agent.read_line(&mut line) {
            Ok(0) => Some(Err("QEMU has closed the port".to_owned())),
            Ok(_) => Some(Ok(())),
            // What has come so far stays in the line.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                life.pulse.stands_still().then(|| Err("it stands still".to_owned()))
            }
            Err(error) => Some(Err(error.to_string())),
        });
        if life.pulse.stands_still() && said.as_ref().is_some_and(Result::is_err) {
            self.frozen = true;
            Frozen::unwind();
        }
        assert!(
            said == Some(Ok(())),
            "the guest says nothing for {within:?} ({said:?}); QEMU: {}",
            life.qemu.stderr()
        );
        line.trim_end().to_owned()
    }

    fn last_words(&self) -> String {
        let mut words = String::new();
        for boot in 1..=self.boots {
            let console = std::fs::read(self.dir.path().join(format!("console-{boot}"))).unwrap_or_default();
            let console = String::from_utf8_lossy(&console);
            let lines: Vec<&str> = console.lines().collect();
            words += &format!("--- console of boot {boot}\n");
            words += &lines[lines.len().saturating_sub(40)..].join("\n");
        }
        words
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        eprintln!("{}", self.last_words());
        // The agent may be what failed.
        if let Some(life) = self.running.as_mut().filter(|_| !self.frozen) {
            let ask = format!(
                "{}\n",
                hex(b"journalctl -b --no-pager -n 120; newel status --volume db; dmesg | tail -n 40")
            );
            life.agent.get_ref().set_read_timeout(Some(Duration::from_secs(60))).ok();
            let mut line = String::new();
            let asked = life.agent.get_mut().write_all(ask.as_bytes());
            if asked.is_ok() && life.agent.read_line(&mut line).is_ok() {
                let output = line.trim_end().rsplit(' ').next().unwrap_or_default();
                eprintln!("--- journal\n{}", String::from_utf8_lossy(&unhex(output)));
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is no digit ends it.
fn unhex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks_exact(2).map(|pair| std::str::from_utf8(pair).unwrap_or_default());
    pairs.map_while(|pair| u8::from_str_radix(pair, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_there_and_back() {
        for (plain, coded) in [(&b""[..], ""), (b"a\0\xff", "6100ff")] {
            assert_eq!(hex(plain), coded);
            assert_eq!(unhex(coded), plain);
        }
        assert_eq!(unhex("61zz61"), b"a");
    }
}

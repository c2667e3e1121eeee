//! Running programs: those built here and those of the system.

use std::fmt;
use std::io::{Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::wait;

/// Beyond any program that a test runs to its end, builds beside it included.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The directory of the daemons: `NEWEL_BIN_DIR`, else `target/{debug,release}`, where this test program's own directory
/// lies.
pub fn bin_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("NEWEL_BIN_DIR") {
        return dir.into();
    }
    let own = std::env::current_exe().expect("a test program has a path");
    own.parent().and_then(Path::parent).expect("a test program lies in target/PROFILE/deps").to_owned()
}

/// A program built by this workspace. `cargo test` alone doesn't build the programs of other packages.
pub fn program(name: &str) -> PathBuf {
    let path = bin_dir().join(name);
    let flag = if path.parent().is_some_and(|dir| dir.ends_with("release")) { " --release" } else { "" };
    assert!(path.is_file(), "{} is missing: run `cargo build{flag}` first, or tools/test.sh", path.display());
    path
}

/// `target/tmp`: on the same file system as everything built, so that regions lie on a real disk.
pub fn tmp_root() -> PathBuf {
    let root = bin_dir().parent().expect("target/PROFILE lies in target").join("tmp");
    std::fs::create_dir_all(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    root
}

/// A directory that goes with the test. Its path is short, as unix sockets lie in it.
pub fn temp_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("t").tempdir_in(tmp_root()).expect("target/tmp is writable")
}

/// Where what tests are made of is kept from run to run: this variable says where, or it is `name` below the caches of the user or system.
pub fn cache_dir(variable: &str, name: &str) -> PathBuf {
    if let Some(dir) = std::env::var_os(variable) {
        return dir.into();
    }
    std::env::var_os("XDG_CACHE_HOME").map_or_else(|| "/var/cache".into(), PathBuf::from).join(name)
}

/// Where Debian keeps the programs of administration is not always in the path.
pub fn path() -> String {
    format!("{}:/usr/local/sbin:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

/// What a program left behind.
#[derive(Debug)]
pub struct Ran {
    pub command: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.status.success(), "{self}");
        self
    }

    /// It failed with exit code 1 (or 2, for wrong usage), said every one of `parts`, and didn't panic.
    #[track_caller]
    pub fn failed_saying(self, parts: &[&str]) -> Self {
        assert!(matches!(self.status.code(), Some(1 | 2)), "{self}");
        let said = self.stderr.to_lowercase();
        for part in parts {
            assert!(said.contains(&part.to_lowercase()), "{part:?} is not said by {self}");
        }
        assert!(!said.contains("panicked"), "{self}");
        self
    }
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}\n{}\n{}", self.command, self.status, self.stdout, self.stderr)
    }
}

/// A program that runs beside the test; killed if the test ends first.
#[derive(Debug)]
pub struct Running {
    command: String,
    child: Child,
    stdout: std::fs::File,
    stderr: std::fs::File,
}

impl Running {
    /// Output goes to files, so that no program ever waits for a reader.
    pub fn start(command: &mut Command) -> Self {
        let stdout = tempfile::tempfile_in(tmp_root()).expect("target/tmp is writable");
        let stderr = tempfile::tempfile_in(tmp_root()).expect("target/tmp is writable");
        let child = command
            .env("PATH", path())
            .stdin(Stdio::null())
            .stdout(stdout.try_clone().expect("files can be cloned"))
            .stderr(stderr.try_clone().expect("files can be cloned"))
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { command: shown(command), child, stdout, stderr }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn running(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_none()
    }

    /// What it wrote so far.
    pub fn stdout(&mut self) -> String {
        content(&mut self.stdout)
    }

    pub fn stderr(&mut self) -> String {
        content(&mut self.stderr)
    }

    #[track_caller]
    pub fn wait(mut self, within: Duration) -> Ran {
        let what = format!("the end of `{}`", self.command);
        let status = wait::until(&what, within, || self.child.try_wait().expect("a child can be waited for"));
        Ran { command: self.command.clone(), status, stdout: self.stdout(), stderr: self.stderr() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.running() {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

/// Runs a program to its end.
#[track_caller]
pub fn run(command: &mut Command) -> Ran {
    Running::start(command).wait(PATIENCE)
}

/// Runs a program of the system to its end.
#[track_caller]
pub fn sh(program: &str, arguments: &[&str]) -> Ran {
    run(Command::new(program).args(arguments))
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Reads with a position of its own: the program's output goes on at the end of the file.
fn content(file: &mut std::fs::File) -> String {
    use std::os::unix::fs::FileExt as _;
    let length = file.seek(SeekFrom::End(0)).expect("files can be measured");
    let mut bytes = vec![0; usize::try_from(length).expect("output is small")];
    file.read_exact_at(&mut bytes, 0).expect("files can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

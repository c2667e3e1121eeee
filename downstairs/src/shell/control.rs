//! The control socket: through it an operator on this host puts faults in at run time, or takes them out.
//!
//! Invariants:
//! - Only whoever may open the socket can use it, and that is the daemon's own user.
//! - A caller is asked for one line, short and soon; what it sends beyond that is not read.
//! - A socket that can't be made is told of and done without: serving the region does not depend on it.
//!
//! One line goes in, one comes back: `fault` asks, `fault FAULTS` sets; the answer is `ok FAULTS` or `error WHY`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tracing::warn;

use super::reactor::Reactor;
use crate::core::Faults;
use crate::core::api::Event;

const LINE_BYTES_MAX: u64 = 512;
const LINE_WITHIN: Duration = Duration::from_secs(2);
/// After a failed accept: how long until others may have been closed.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The socket, removed with this.
#[derive(Debug)]
pub(super) struct Control {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            warn!("cannot remove the control socket {}: {error}", self.path.display());
        }
    }
}

/// The region is open by now, so whatever lies there belongs to nobody.
pub(super) fn bind(path: &Path) -> Option<Control> {
    match try_bind(path) {
        Ok(listener) => Some(Control { listener, path: path.to_owned() }),
        Err(error) => {
            warn!("no control socket at {}: {error}; `newel fault` will not work", path.display());
            None
        }
    }
}

fn try_bind(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AlreadyExists, "something else lies there")),
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// One caller at a time, until the process ends.
pub(super) async fn serve(reactor: Rc<Reactor>, control: Control, mut faults: Faults) {
    loop {
        match control.listener.accept().await {
            Ok((stream, _)) => {
                // A caller that says nothing, or goes away, has what it wants.
                let _late = tokio::time::timeout(LINE_WITHIN, answer(&reactor, stream, &mut faults)).await;
            }
            Err(error) => {
                warn!("the control socket: {error}");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn answer(reactor: &Reactor, mut stream: UnixStream, faults: &mut Faults) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new((&mut stream).take(LINE_BYTES_MAX)).read_line(&mut line).await?;
    let answer = match set(reactor, line.trim(), faults) {
        Ok(()) => format!("ok {faults}\n"),
        Err(why) => format!("error {why}\n"),
    };
    stream.write_all(answer.as_bytes()).await
}

fn set(reactor: &Reactor, line: &str, faults: &mut Faults) -> Result<(), String> {
    let Some(spec) = line.strip_prefix("fault") else { return Err("the only command is `fault`".to_owned()) };
    if spec.trim().is_empty() {
        return Ok(());
    }
    *faults = spec.parse().map_err(|error: crate::core::FaultError| error.to_string())?;
    reactor.event(Event::Faults(faults.clone()));
    Ok(())
}

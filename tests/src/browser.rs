//! The status page in a browser without a screen.
//!
//! Invariants:
//! - The browser sees a port of loopback that forwards to the upstairs' own socket, as it can't open unix sockets. It is given
//!   nothing else to reach.
//! - Its profile is a directory of the test's own.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::command::{run, temp_dir};

/// A request line and a few headers.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// How long either side of a forwarded request may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// What is answered in place of the upstairs: path and JSON.
pub type Instead = &'static [(&'static str, &'static str)];

/// A port that leads to the status socket. Its thread ends with the process.
#[derive(Debug)]
pub struct Site {
    address: SocketAddr,
}

impl Site {
    /// # Panics
    /// If there is no free port.
    pub fn open(socket: &Path, instead: Instead) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let address = listener.local_addr().expect("it is bound");
        let socket: Arc<PathBuf> = Arc::new(socket.to_owned());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let socket = socket.clone();
                // A browser that hangs up in the middle is no failure of the page.
                std::thread::spawn(move || forward(stream, &socket, instead).ok());
            }
        });
        Self { address }
    }

    /// The document after `time` of life, as text. The browser's clock runs ahead whenever it has nothing to do but wait.
    ///
    /// # Panics
    /// If the browser fails.
    #[track_caller]
    pub fn dom_after(&self, time: Duration) -> String {
        let profile = temp_dir();
        let mut command = Command::new("chromium");
        command.args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--dump-dom",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command
            .arg(format!("--virtual-time-budget={}", time.as_millis()))
            .arg(format!("http://{}/", self.address));
        run(&mut command).ok().stdout
    }
}

/// One request of one connection.
fn forward(mut browser: TcpStream, socket: &Path, instead: Instead) -> std::io::Result<()> {
    browser.set_read_timeout(Some(SILENCE_MAX))?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && head.len() < HEAD_BYTES_MAX {
        let mut byte = [0];
        browser.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or("/");
    if let Some((_, json)) = instead.iter().find(|(known, _)| *known == path) {
        let length = json.len();
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{json}"
        );
        return browser.write_all(answer.as_bytes());
    }
    browser.write_all(&get(socket, path)?)
}

/// The whole answer to one request, head and body.
///
/// # Errors
/// If nobody answers at the socket in time.
pub fn get(socket: &Path, path: &str) -> std::io::Result<Vec<u8>> {
    let mut upstairs = UnixStream::connect(socket)?;
    upstairs.set_read_timeout(Some(SILENCE_MAX))?;
    upstairs
        .write_all(format!("GET {path} HTTP/1.1\r\nHost: newel\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    upstairs.read_to_end(&mut answer)?;
    Ok(answer)
}

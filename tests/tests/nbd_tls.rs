//! A volume whose guests must speak TLS, as its daemon is configured and as other people's clients see it. (What a hostile
//! client may try is tested beside the front end itself.)

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::time::Duration;

use newel_tests::cluster::{Cluster, Options, Role, own_address};
use newel_tests::command::{Running, program, run, sh, temp_dir};
use newel_tests::lock::Heavy;
use newel_tests::nbd::{Address, Client};
use newel_tests::options::{
    ABORT, ACK, ERR_TLS_REQD, ERR_UNSUP, GO, Handshake, LIST, STARTTLS, STRUCTURED_REPLY, USUAL, named,
};
use newel_tests::pattern::bytes_at;
use newel_tests::skip::have;
use newel_tests::wait;

/// A directory with a certificate for `host`, which is its own CA, under the names that libnbd looks for.
fn certificate(host: &str) -> tempfile::TempDir {
    let dir = temp_dir();
    let made = rcgen::generate_simple_self_signed(vec![host.to_owned()]).unwrap();
    for (name, text) in [
        ("ca-cert.pem", made.cert.pem()),
        ("server-cert.pem", made.cert.pem()),
        ("server-key.pem", made.signing_key.serialize_pem()),
    ] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn tls_arguments(command: &mut Program, dir: &Path) {
    command.arg("--tls-certificate").arg(dir.join("server-cert.pem"));
    command.arg("--tls-key").arg(dir.join("server-key.pem"));
}

/// A volume that serves TCP over TLS, beside its unix socket.
struct Secure {
    cluster: Cluster,
    address: String,
    certificates: tempfile::TempDir,
}

impl Secure {
    fn start() -> Self {
        let address = own_address();
        let certificates = certificate(address.split_once(':').unwrap().0);
        let mut cluster = Cluster::make(Options::default());
        for replica in 0..3 {
            cluster.start_daemon(Role::Replica(replica));
        }
        let mut secure = Self { cluster, address, certificates };
        secure.start_upstairs();
        secure.cluster.await_all_active();
        secure
    }

    fn start_upstairs(&mut self) {
        let mut command = self.cluster.upstairs_command("");
        command.args(["--listen", &format!("tcp:{}", self.address)]);
        tls_arguments(&mut command, self.certificates.path());
        self.cluster.adopt(Running::start(&mut command), "");
        self.cluster.connect();
    }

    fn tcp(&self) -> Address {
        Address::Tcp(self.address.parse().unwrap())
    }

    fn uri(&self) -> String {
        format!("nbds://{}/newel?tls-certificates={}", self.address, self.certificates.path().display())
    }
}

#[test]
fn a_volume_is_served_over_tls_and_not_in_the_clear() {
    let test = "a_volume_is_served_over_tls_and_not_in_the_clear";
    if !have(test, &["nbdinfo", "nbdcopy"]) {
        return;
    }
    let _heavy = Heavy::take();
    let mut secure = Secure::start();
    let mut plain = Handshake::start(&secure.tcp(), USUAL);
    for (option, payload) in
        [(LIST, vec![]), (STRUCTURED_REPLY, vec![]), (GO, named(b"newel")), (77, vec![0; 9])]
    {
        assert_eq!(plain.ask(option, &payload), ERR_TLS_REQD);
    }
    assert_eq!(plain.ask(ABORT, &[]), ACK);
    let refused = sh("nbdinfo", &[&format!("nbd://{}/newel", secure.address)]);
    assert!(!refused.status.success(), "{refused}");
    let stranger = certificate("127.0.0.1");
    let uri = format!("nbds://{}/newel?tls-certificates={}", secure.address, stranger.path().display());
    let refused = sh("nbdinfo", &[&uri]);
    assert!(!refused.status.success(), "a server that the client doesn't know: {refused}");
    let info = sh("nbdinfo", &[&secure.uri()]).ok();
    assert!(info.stdout.contains("with TLS"), "{info}");

    // An image goes in; the upstairs is killed in between; it comes out the same over TLS and on the unix socket.
    let (there, back) = (secure.cluster.dir().join("there"), secure.cluster.dir().join("back"));
    let image = bytes_at(0, 256 << 20, 7);
    std::fs::write(&there, &image).unwrap();
    sh("nbdcopy", &["--flush", there.to_str().unwrap(), &secure.uri()]).ok();
    secure.cluster.kill(Role::Upstairs);
    secure.start_upstairs();
    sh("nbdcopy", &[&secure.uri(), back.to_str().unwrap()]).ok();
    assert!(std::fs::read(&back).unwrap() == image, "the copy differs");
    assert_eq!(secure.cluster.connect().read(5 << 20, 4096), image[5 << 20..(5 << 20) + 4096]);
    secure.cluster.await_all_active();
    secure.cluster.stop_and_check();
}

#[test]
fn the_unix_socket_of_a_volume_with_tls_takes_both() {
    let secure = Secure::start();
    let Address::Unix(socket) = secure.cluster.address() else { panic!("a unix socket") };
    Client::connect(&secure.cluster.address()).unwrap().write(0, b"local");
    let mut offered = Handshake::start(&Address::Unix(socket), USUAL);
    assert_eq!(offered.ask(STRUCTURED_REPLY, &[]), ACK);
    assert_eq!(offered.ask(STARTTLS, &[]), ACK);
    offered.send(LIST, &[]);
    // In the clear behind STARTTLS: no answer but TLS's own, an alert.
    let rest = offered.rest();
    assert!(rest.is_empty() || rest[0] == 0x15, "{rest:?}");
}

/// An upstairs that can't reach its replicas; it tells what is wrong with its arguments before that matters.
fn upstairs(dir: &Path, arguments: &[&str]) -> Program {
    let mut command = Program::new(program("newel-upstairs"));
    command.args(["run", "--volume", "v", "--replica", "127.0.0.1:1", "--replica", "127.0.0.1:2"]);
    command.args(["--replica", "127.0.0.1:3", "--status"]).arg(format!("unix:{}/status", dir.display()));
    command.args(arguments);
    command
}

#[test]
fn what_is_wrong_with_certificates_is_said_at_the_start() {
    let (good, other, dir) = (certificate("localhost"), certificate("localhost"), temp_dir());
    let fails = |certificate: PathBuf, key: PathBuf, more: &[&str], parts: &[&str]| {
        let mut command = upstairs(dir.path(), &["--listen", "tcp:127.0.0.1:0"]);
        command.arg("--tls-certificate").arg(certificate).arg("--tls-key").arg(key).args(more);
        run(&mut command).failed_saying(parts);
    };
    let (cert, key) = (good.path().join("server-cert.pem"), good.path().join("server-key.pem"));
    let none = dir.path().join("none.pem");
    let named_none = none.display().to_string();
    fails(none.clone(), key.clone(), &[], &["can't read the TLS certificate file", &named_none]);
    fails(cert.clone(), none, &[], &["can't read the TLS key file", &named_none]);
    fails(key.clone(), key.clone(), &[], &["TLS certificate file", "must hold a certificate in PEM"]);
    fails(cert.clone(), other.path().join("server-key.pem"), &[], &["doesn't belong to the certificate"]);
    fails(cert, key, &["--tls-client-ca", &named_none], &["client CA", &named_none]);
    run(&mut upstairs(dir.path(), &["--listen", "tcp:127.0.0.1:0", "--tls", "required"]))
        .failed_saying(&["tls.certificate is missing", "--tls-certificate"]);
}

#[test]
fn a_port_open_to_the_network_needs_tls_or_leave() {
    let (certificates, dir) = (certificate("localhost"), temp_dir());
    let open = |mode: &[&str]| {
        let mut command = upstairs(dir.path(), &["--listen", "tcp:0.0.0.0:0"]);
        tls_arguments(&mut command, certificates.path());
        command.args(mode);
        command
    };
    for mode in ["off", "offered"] {
        run(&mut open(&["--tls", mode])).failed_saying(&["won't listen on tcp:0.0.0.0:0", "TLS"]);
    }
    for mode in [&[][..], &["--tls", "required"], &["--tls", "offered", "--allow-plaintext"]] {
        let mut running = Running::start(&mut open(mode));
        wait::until("it has bound its addresses", Duration::from_secs(20), || {
            assert!(running.running(), "{mode:?}: {}", running.stderr());
            std::os::unix::net::UnixStream::connect(dir.path().join("status")).ok()
        });
        drop(running);
    }
    // TLS is for guests: it does not make the status private.
    let mut status = Program::new(program("newel-upstairs"));
    status.args(["run", "--volume", "v", "--listen", "tcp:127.0.0.1:0", "--status", "tcp:0.0.0.0:0"]);
    status.args((1..=3).flat_map(|replica| ["--replica".to_owned(), format!("127.0.0.1:{replica}")]));
    tls_arguments(&mut status, certificates.path());
    run(status.args(["--tls", "required"])).failed_saying(&["won't show the status on tcp:0.0.0.0:0"]);
}

#[test]
fn without_tls_there_is_none() {
    let cluster = Cluster::small();
    assert_eq!(Handshake::start(&cluster.address(), USUAL).ask(STARTTLS, &[]), ERR_UNSUP);
}

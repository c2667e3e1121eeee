//! Other people's clients over TLS. Where one isn't installed the test says so and passes.

use newel_protocol::nbd::consts::answer;
use newel_protocol::nbd::consts::option;

use super::client::{Client, PLAIN, named};
use super::pki::Pki;
use super::tools::{expect_success, run};
use super::{SIZE, Server, check_with};
use crate::shell::nbd::TlsOffer;

fn uri(server: &Server, pki: &Pki) -> String {
    format!("nbds://localhost:{}/vol?tls-certificates={}", server.tcp.port(), pki.dir().display())
}

fn text(path: &std::path::Path) -> &str {
    path.to_str().unwrap()
}

/// Data with holes.
fn data() -> Vec<u8> {
    (0..24_u32 << 20)
        .map(|i| if i >> 20 & 1 == 0 { (i.wrapping_mul(2_654_435_761) >> 13).to_be_bytes()[3] } else { 0 })
        .collect()
}

#[test]
fn nbdinfo_and_nbdcopy_over_tls() {
    let (pki, foreign) = (Pki::new(), Pki::new());
    let offer = TlsOffer::load(&pki.files(true), true).unwrap();
    check_with(
        |options| options.tls = Some(offer),
        async |server| {
            let secure = uri(&server, &pki);
            let Some(output) = run("nbdinfo", &[&secure]).await else { return };
            let info = expect_success("nbdinfo", &output);
            for expected in
                ["with TLS", "using structured packets", &format!("export-size: {SIZE}"), "base:allocation"]
            {
                assert!(info.contains(expected), "{expected:?} is missing in\n{info}");
            }
            // In the clear, with a certificate of another CA, and against a server of another CA.
            for stranger in [format!("nbd://localhost:{}/vol", server.tcp.port()), uri(&server, &foreign)] {
                let output = run("nbdinfo", &[&stranger]).await.unwrap();
                assert!(!output.status.success(), "{stranger}");
            }
            let unix = format!(
                "nbds+unix:///vol?socket={}&tls-certificates={}",
                server.path.display(),
                pki.dir().display()
            );
            expect_success("nbdinfo", &run("nbdinfo", &[&unix]).await.unwrap());

            let dir = tempfile::tempdir().unwrap();
            let (there, back) = (dir.path().join("there"), dir.path().join("back"));
            std::fs::write(&there, data()).unwrap();
            let output = run("nbdcopy", &["--flush", text(&there), &secure]).await.unwrap();
            expect_success("nbdcopy", &output);
            let output = run("nbdcopy", &["--connections=4", &secure, text(&back)]).await.unwrap();
            expect_success("nbdcopy", &output);
            let mut head = vec![0; data().len()];
            let mut found = std::fs::File::open(&back).unwrap();
            std::io::Read::read_exact(&mut found, &mut head).unwrap();
            assert!(head == data(), "the copy differs");
        },
    );
}

#[test]
fn qemu_over_tls() {
    let pki = Pki::new();
    let offer = TlsOffer::load(&pki.files(true), true).unwrap();
    check_with(
        |options| options.tls = Some(offer),
        async |server| {
            let credentials = format!("tls-creds-x509,id=tls,endpoint=client,dir={}", pki.dir().display());
            let image = format!(
                "driver=raw,file.driver=nbd,file.host=localhost,file.port={},file.export=vol,file.tls-creds=tls",
                server.tcp.port()
            );
            let object = ["--object", &credentials, "--image-opts"];
            let args = [
                &object[..],
                &["-c", "write -P 0x5a 4095 3", "-c", "read -P 0x5a 4095 3", "-c", "write -z -u 1M 1M"],
                &["-c", "aio_write -P 7 -f 8M 2M", "-c", "aio_flush", "-c", "read -P 7 8M 2M", &image],
            ]
            .concat();
            let Some(output) = run("qemu-io", &args).await else { return };
            let said = expect_success("qemu-io", &output);
            assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
            let mut local = server.connect(PLAIN).await;
            assert_eq!(local.read(4094, 5).await, b"\0ZZZ\0");

            let info = run("qemu-img", &[&["info"][..], &object, &[&image]].concat()).await.unwrap();
            assert!(expect_success("qemu-img info", &info).contains(&format!("({SIZE} bytes)")));
        },
    );
}

#[test]
fn nbd_client_lists_over_tls_and_in_the_clear() {
    let pki = Pki::new();
    check_with(
        |options| options.tls = Some(pki.offered()),
        async |server| {
            let port = server.tcp.port().to_string();
            let plain = ["-l", "127.0.0.1", &port];
            let Some(output) = run("nbd-client", &plain).await else { return };
            assert!(expect_success("nbd-client", &output).lines().any(|line| line.starts_with("vol")));
            let ca = pki.file("ca-cert.pem");
            let secure = [&plain[..], &["-x", "-A", text(&ca), "-H", "localhost"]].concat();
            let output = run("nbd-client", &secure).await.unwrap();
            assert!(expect_success("nbd-client", &output).lines().any(|line| line.starts_with("vol")));
            // And the server is none the worse for it.
            let mut client = Client::tcp(server.tcp).await;
            client.flags(3).await;
            assert_eq!(client.ask(option::GO, &named(b"vol")).await, answer::ACK);
        },
    );
}

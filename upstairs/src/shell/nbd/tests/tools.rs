//! Other people's clients against the front end. Where one isn't installed the test says so and passes.

use std::path::Path;
use std::process::Output;

use tokio::process::Command;

use super::{SIZE, Server, check};

/// Runs a tool to its end; `None` if it isn't installed.
pub(super) async fn run(tool: &str, args: &[&str]) -> Option<Output> {
    match Command::new(tool).args(args).kill_on_drop(true).output().await {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("SKIPPED: {tool} is not installed, so this test has tested nothing");
            None
        }
        Err(error) => panic!("{tool}: {error}"),
    }
}

pub(super) fn expect_success(tool: &str, output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{tool}: {}\n{text}", String::from_utf8_lossy(&output.stderr));
    text
}

fn uri(server: &Server) -> String {
    format!("nbd+unix:///vol?socket={}", server.path.display())
}

#[test]
fn nbdinfo_sees_what_is_offered() {
    check(async |server| {
        let Some(output) = run("nbdinfo", &[&uri(&server)]).await else { return };
        let text = expect_success("nbdinfo", &output);
        for expected in [
            "newstyle-fixed",
            "using structured packets",
            &format!("export-size: {SIZE}"),
            "base:allocation",
            "can_multi_conn: true",
            "can_df: true",
            "can_fua: true",
            "can_cache: true",
            "can_fast_zero: false",
            "can_trim: true",
            "can_zero: true",
            "is_read_only: false",
            "block_size_minimum: 1",
            "block_size_preferred: 4096",
            "block_size_maximum: 33554432",
        ] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
        let list = run("nbdinfo", &["--list", &format!("nbd://{}", server.tcp)]).await.unwrap();
        let text = expect_success("nbdinfo --list", &list);
        assert!(text.contains("export=\"vol\"") && text.contains("Newel volume vol"), "{text}");
    });
}

#[test]
fn nbdcopy_there_and_back() {
    check(async |server| {
        let dir = tempfile::tempdir().unwrap();
        let (there, back) = (dir.path().join("there"), dir.path().join("back"));
        let data: Vec<u8> = (0..24_u32 << 20)
            .map(
                |i| if i >> 20 & 1 == 0 { (i.wrapping_mul(2_654_435_761) >> 13).to_be_bytes()[3] } else { 0 },
            )
            .collect();
        std::fs::write(&there, &data).unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let copied = run("nbdcopy", &["--flush", &text(&there), &uri(&server)]).await;
        let Some(output) = copied else { return };
        expect_success("nbdcopy", &output);
        let output = run("nbdcopy", &["--connections=4", &uri(&server), &text(&back)]).await.unwrap();
        expect_success("nbdcopy", &output);
        let mut found = std::fs::File::open(&back).unwrap();
        let mut head = vec![0; data.len()];
        std::io::Read::read_exact(&mut found, &mut head).unwrap();
        assert!(head == data, "the copy differs");
        assert_eq!(found.metadata().unwrap().len(), SIZE);

        let map = run("nbdinfo", &["--map", &uri(&server)]).await.unwrap();
        let map = expect_success("nbdinfo --map", &map);
        assert!(map.contains("hole,zero") && map.contains("data"), "{map}");
    });
}

#[test]
fn qemu_io_reads_what_it_writes() {
    check(async |server| {
        let image = format!("nbd+unix:///vol?socket={}", server.path.display());
        let args = [
            "-f",
            "raw",
            "-c",
            "write -P 0x5a 4095 3",
            "-c",
            "read -P 0x5a 4095 3",
            "-c",
            "write -z 1M 1M",
            "-c",
            "write -z -u 3M 1M",
            "-c",
            "discard 1M 64k",
            "-c",
            "read -P 0 1M 3M",
            "-c",
            "aio_write -P 7 -f 8M 2M",
            "-c",
            "aio_flush",
            "-c",
            "read -P 7 8M 2M",
            "-c",
            "flush",
            &image,
        ];
        let Some(output) = run("qemu-io", &args).await else { return };
        let text = expect_success("qemu-io", &output);
        assert!(!text.contains("failed") && !text.contains("rror"), "{text}");
    });
}

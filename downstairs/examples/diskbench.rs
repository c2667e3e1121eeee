//! Measures the disk pool beside a bare aio loop on the same region:
//! `cargo run --release -p newel-downstairs --example diskbench -- DIRECTORY [SECONDS [PART OF A NAME]]`.
//!
//! Prints IOPS and CPU time (all threads) for each operation; beside fio, where there is one, for two; and how long submitting took.
#![expect(clippy::print_stdout, reason = "its purpose is to print")]
#![expect(clippy::disallowed_methods, reason = "it measures time")]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use newel_downstairs::core::api::{DiskCommand, DiskDone, DiskOp, HeaderChange, OpId};
use newel_downstairs::disk::{AlignedBuf, CreateOptions, OpenOptions, Pool, PoolOptions, Prealloc, Region};
use newel_downstairs::disk::{create_region, yardstick};
use newel_protocol::crc::block_crcs;
use newel_protocol::wire::ReadMode;
use newel_protocol::{BLOCK_BYTES, BlockRange, Generation, Version};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use uuid::Uuid;

/// As in the daemon.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const REGION_BYTES: u64 = 1 << 30;
const REGION_BLOCKS: u64 = REGION_BYTES / BLOCK_BYTES as u64;

const ROUNDS: u32 = 4;

const FLUSH: OpId = OpId(u64::MAX);

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let directory: PathBuf =
        args.next().context("first argument: a directory on the disk to measure")?.into();
    let seconds = args.next().map_or(Ok(2.0), |seconds| seconds.parse::<f64>())?;
    let only = args.next().unwrap_or_default();
    let path = directory.join("diskbench.region");
    let options = CreateOptions {
        path: path.clone(),
        size: Some(REGION_BYTES),
        volume: Uuid::nil(),
        prealloc: Prealloc::Full,
        force: true,
    };
    create_region(&options, &|_, _, _| {})?;
    let result = measure(&path, Duration::from_secs_f64(seconds), &only);
    std::fs::remove_file(&path)?;
    result
}

struct Load {
    name: &'static str,
    blocks: u32,
    depth: u32,
    write: bool,
    sequential: bool,
    /// After each one, and the next one waits for it.
    flush: bool,
}

struct Bench {
    region: Arc<Region>,
    pool: Pool,
    woken: OwnedFd,
    time: Duration,
    random: u64,
    sequence: u64,
}

fn measure(path: &Path, time: Duration, only: &str) -> anyhow::Result<()> {
    let (region, _) = Region::open(path, &OpenOptions::default())?;
    let woken = eventfd(0, EventfdFlags::NONBLOCK)?;
    let raised = woken.try_clone()?;
    let wake = Arc::new(move || {
        rustix::io::write(&raised, &1_u64.to_ne_bytes()).ok();
    });
    let pool = Pool::start(Arc::clone(&region), PoolOptions::default(), wake)?;
    let mut bench = Bench { region, pool, woken, time, random: 88_172_645_463_325_252, sequence: 0 };
    bench.fill()?;
    println!("{:24} {:>18} {:>18} {:>7}", "", "bare loop", "pool", "CPU");
    let load =
        |name, blocks, depth, write| Load { name, blocks, depth, write, sequential: false, flush: false };
    for load in [
        load("4K random write, q1", 1, 1, true),
        load("4K random write, q32", 1, 32, true),
        load("4K random read, q1", 1, 1, false),
        load("4K random read, q32", 1, 32, false),
        load("1M write, q8", 256, 8, true),
        load("1M read, q8", 256, 8, false),
        Load { sequential: true, ..load("4K sequential write, q32", 1, 32, true) },
    ] {
        if load.name.contains(only) {
            bench.compare(&load)?;
        }
    }
    println!("{:24} {:>18} {:>18}", "", "fio libaio", "pool");
    for load in [
        Load { sequential: true, ..load("128K sequential write, q16", 32, 16, true) },
        Load { flush: true, ..load("4K write + flush, q1", 1, 1, true) },
    ] {
        if load.name.contains(only) {
            bench.compare_with_fio(&load, path)?;
        }
    }
    let times = bench.pool.submit_times();
    for (lane, times) in [("writes", &times.writes), ("reads", &times.reads)] {
        let found = times.snapshot();
        let micros = |quantile| found.histogram.value_at_quantile(quantile) / 1_000;
        println!(
            "submitting {lane}: {} calls, p50 {} µs, p99 {} µs, p99.9 {} µs, longest {:?}; {} slept; at most {} in flight",
            found.histogram.len(),
            micros(0.5),
            micros(0.99),
            micros(0.999),
            found.longest.map_or(Duration::ZERO, |longest| longest.took),
            found.slept,
            found.limit,
        );
    }
    bench.pool.stop();
    Ok(())
}

impl Bench {
    fn compare(&mut self, load: &Load) -> anyhow::Result<()> {
        let Load { name, depth, write, .. } = *load;
        let bytes = load.blocks as usize * BLOCK_BYTES;
        let (mut bare, mut pool) = (Figures::default(), Figures::default());
        let mut threads: BTreeMap<String, u64> = BTreeMap::new();
        let region = Arc::clone(&self.region);
        // In turns, so that what else the machine does falls on both.
        for _ in 0..ROUNDS {
            let (cpu, start) = (cpu_time()?, Instant::now());
            let count =
                yardstick::bare_loop(&region, bytes, depth, write, self.time / ROUNDS, || self.next(load))?;
            bare.add(count, start, cpu)?;
            let (cpu, start) = (cpu_time()?, Instant::now());
            let before = thread_times()?;
            let count = self.through_pool(load)?;
            for (name, time) in thread_times()? {
                *threads.entry(name.clone()).or_default() += time - before.get(&name).unwrap_or(&0);
            }
            pool.add(count, start, cpu)?;
        }
        let count = pool.count;
        let (bare, pool) = (bare.each(), pool.each());
        print!(
            "{name:24} {:>8.0}/s {:>5.2} µs {:>8.0}/s {:>5.2} µs {:>6.2}x ",
            bare.0,
            bare.1,
            pool.0,
            pool.1,
            pool.1 / bare.1
        );
        for (name, time) in threads.into_iter().filter(|&(_, time)| time / count.max(1) > 100) {
            print!(" {name} {}.{:02}", time / count / 1000, time / count % 1000 / 10);
        }
        println!();
        Ok(())
    }

    /// fio writes to the region's data, where the contexts will not fit it any more.
    fn compare_with_fio(&mut self, load: &Load, path: &Path) -> anyhow::Result<()> {
        let (mut fio, mut pool) = (0.0, Figures::default());
        for _ in 0..ROUNDS {
            match self.fio(load, path) {
                Ok(iops) => fio += iops / f64::from(ROUNDS),
                Err(error) => {
                    println!("{:24} skipped: {error}", load.name);
                    return Ok(());
                }
            }
            let (cpu, start) = (cpu_time()?, Instant::now());
            let count = self.through_pool(load)?;
            pool.add(count, start, cpu)?;
        }
        let (each, _) = pool.each();
        println!("{:24} {fio:>16.0}/s {each:>16.0}/s {:>6.2}x", load.name, each / fio);
        Ok(())
    }

    fn fio(&self, load: &Load, path: &Path) -> anyhow::Result<f64> {
        /// Where the IOPS of writes are in its terse output of version 3.
        const WRITE_IOPS: usize = 48;
        let way = if load.sequential { "write" } else { "randwrite" };
        let output = std::process::Command::new("fio")
            .args([
                "--name=bench",
                "--ioengine=libaio",
                "--direct=1",
                "--time_based",
                "--output-format=terse",
            ])
            .args([
                "--terse-version=3".to_owned(),
                format!("--rw={way}"),
                format!("--iodepth={}", load.depth),
            ])
            .args([format!("--bs={}k", load.blocks * 4), format!("--fdatasync={}", u8::from(load.flush))])
            .args([
                format!("--offset={}", self.region.layout().data_offset),
                format!("--size={REGION_BYTES}"),
            ])
            .arg(format!("--runtime={}ms", (self.time / ROUNDS).as_millis()))
            .arg(format!("--filename={}", path.display()))
            .output()
            .context("no fio")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let iops = text.split(';').nth(WRITE_IOPS).and_then(|iops| iops.parse().ok());
        iops.with_context(|| format!("fio said {text:?} {:?}", String::from_utf8_lossy(&output.stderr)))
    }

    /// A block that was never written is read without a disk.
    fn fill(&mut self) -> anyhow::Result<()> {
        self.region.apply(&HeaderChange::Promise { generation: Generation(1), upstairs: Uuid::nil() })?;
        let data = Bytes::from_owner(AlignedBuf::zeroed(256 * BLOCK_BYTES));
        let crcs = block_crcs(&data);
        for start in (0..REGION_BLOCKS).step_by(256) {
            let (range, version) = (BlockRange::new(start, 256), Version::new(Generation(1), 1));
            self.region.execute(&DiskOp::Write { range, version, crcs: crcs.clone(), data: data.clone() })?;
        }
        Ok(self.region.flush(None)?)
    }

    fn next(&mut self, load: &Load) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.sequence += 1;
        let places = REGION_BLOCKS / u64::from(load.blocks);
        let place = if load.sequential { self.sequence } else { self.random >> 16 };
        place % places * u64::from(load.blocks)
    }

    fn through_pool(&mut self, load: &Load) -> anyhow::Result<u64> {
        let Load { blocks, depth, write, flush, .. } = *load;
        let data = Bytes::from_owner(AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES));
        let crcs = block_crcs(&data);
        let end = Instant::now() + self.time / ROUNDS;
        let (mut in_flight, mut count, mut running) = (0, 0, true);
        let mut commands: Vec<DiskCommand> = Vec::new();
        let mut done: Vec<DiskDone> = Vec::new();
        loop {
            while running && in_flight < depth {
                let range = BlockRange::new(self.next(load), blocks);
                let kind = if write {
                    let version = Version::new(Generation(1), self.sequence);
                    DiskOp::Write { range, version, crcs: crcs.clone(), data: data.clone() }
                } else {
                    DiskOp::Read { range, mode: ReadMode::Data }
                };
                commands.push(DiskCommand { op: OpId(self.sequence), job: None, kind });
                in_flight += 1;
            }
            if in_flight == 0 {
                break;
            }
            self.pool.submit(&mut commands);
            let fds = [self.woken.as_fd(), self.pool.completion_fd()];
            rustix::event::poll(&mut fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)), None)?;
            for fd in fds {
                // Both are eventfds that don't block: reading lowers them, if they are raised.
                rustix::io::read(fd, &mut [0; 8]).ok();
            }
            self.pool.completed(&mut done);
            for done in done.drain(..) {
                done.result?;
                if flush && done.op != FLUSH {
                    let mark = Some(Version::new(Generation(1), self.sequence));
                    commands.push(DiskCommand { op: FLUSH, job: None, kind: DiskOp::Flush { mark } });
                    continue;
                }
                in_flight -= 1;
                count += 1;
            }
            running = Instant::now() < end;
        }
        self.region.flush(None)?;
        Ok(count)
    }
}

#[derive(Default)]
struct Figures {
    count: u64,
    time: Duration,
    cpu: Duration,
}

impl Figures {
    fn add(&mut self, count: u64, start: Instant, cpu: Duration) -> anyhow::Result<()> {
        self.count += count;
        self.time += start.elapsed();
        self.cpu += cpu_time()?.saturating_sub(cpu);
        Ok(())
    }

    /// How many there were a second, and the CPU time of each in µs.
    #[expect(clippy::cast_precision_loss, reason = "figures to be read by people")]
    fn each(&self) -> (f64, f64) {
        let count = self.count as f64;
        (count / self.time.as_secs_f64(), self.cpu.as_secs_f64() * 1e6 / count)
    }
}

/// Of all threads, as the scheduler counts it.
fn cpu_time() -> anyhow::Result<Duration> {
    Ok(Duration::from_nanos(thread_times()?.values().sum()))
}

/// Nanoseconds of CPU by the name of the thread.
fn thread_times() -> anyhow::Result<BTreeMap<String, u64>> {
    let mut times = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        let stat = std::fs::read_to_string(path.join("schedstat"))?;
        let time = stat.split_whitespace().next().unwrap_or_default().parse::<u64>()?;
        *times.entry(std::fs::read_to_string(path.join("comm"))?.trim().to_owned()).or_default() += time;
    }
    Ok(times)
}

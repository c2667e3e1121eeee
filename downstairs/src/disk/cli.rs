//! The commands on a region that nobody uses: create, check, dump.
//!
//! Invariants:
//! - Every value is parsed before anything is touched, and every error names the option or the path.
//! - `check` and `dump` change nothing.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use newel_protocol::{BLOCK_BYTES, BlockRange, ExtentId};
use uuid::Uuid;

use super::audit::audit;
use super::context::{Context, ContextKind, fold_digests};
use super::create::{CreateOptions, Prealloc, create_region};
use super::file::{Access, FileStorage, Region, on_threads, verify_threads};
use super::lock;
use super::open::OpenReport;
use super::region::RegionCore;

#[derive(Debug, clap::Args)]
pub struct CreateArgs {
    /// File to create, or block device to use
    #[arg(long, value_name = "PATH")]
    pub region: PathBuf,
    /// Size of the volume, such as 4G or 512MiB (K, M, G, T are powers of 1024); on a block device all of it by default
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<u64>,
    /// Volume that the region shall belong to; by default the first that comes
    #[arg(long, value_name = "UUID")]
    pub volume: Option<Uuid>,
    /// How the space is taken
    #[arg(long, value_enum, default_value_t)]
    pub prealloc: Prealloc,
    /// Destroy what is there
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Region to verify; it must not be in use
    #[arg(long, value_name = "PATH")]
    pub region: PathBuf,
    /// Threads that read; 0 means one for each processor
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
}

#[derive(Debug, clap::Args)]
pub struct DumpArgs {
    /// Region to look into
    #[arg(long, value_name = "PATH")]
    pub region: PathBuf,
    /// List every extent that holds anything
    #[arg(long)]
    pub extents: bool,
    /// Show the contexts of one block
    #[arg(long, value_name = "N")]
    pub block: Option<u64>,
}

/// Like `truncate` and `qemu-img`, a bare K, M, G or T is a power of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let binary = text.ends_with(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
    let full = if binary { format!("{text}iB") } else { text.to_owned() };
    full.parse::<bytesize::ByteSize>().map(|size| size.as_u64())
}

pub fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let is_file = !std::fs::metadata(&args.region).is_ok_and(|found| {
        use std::os::unix::fs::FileTypeExt;
        found.file_type().is_block_device()
    });
    if args.size.is_none() && is_file {
        bail!(
            "--size is needed to create {} (only a block device has one of its own)",
            args.region.display()
        );
    }
    let options = CreateOptions {
        path: args.region.clone(),
        size: args.size,
        volume: args.volume.unwrap_or_default(),
        prealloc: args.prealloc,
        force: args.force,
    };
    let bar = progress_bar("{msg:14} {wide_bar} {bytes}/{total_bytes} {eta}");
    let header = create_region(&options, &|what, done, total| {
        bar.set_message(what);
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    let bytes = header.layout.blocks * BLOCK_BYTES as u64;
    writeln!(io::stdout(), "{}: region {} of {bytes} bytes", args.region.display(), header.region)?;
    Ok(())
}

/// Hidden by itself where there is no terminal.
fn progress_bar(template: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

fn load(path: &std::path::Path, access: Access) -> anyhow::Result<(Region, OpenReport)> {
    let storage = FileStorage::open(path, access)?;
    Ok(RegionCore::load(storage, &path.display().to_string())?)
}

/// Fails if any block is bad, after printing all there is to say.
pub fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let (region, report) = load(&args.region, Access::Read)?;
    let name = args.region.display().to_string();
    let bar = progress_bar("checking {wide_bar} {pos}/{len} extents {eta}");
    let found = audit(&region, &name, args.threads, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    let header = region.header();
    let mut out = io::stdout().lock();
    writeln!(out, "region: {}", header.region)?;
    writeln!(out, "closed cleanly: {}", if header.clean { "yes" } else { "no" })?;
    if let Some(fault) = &report.bad_header {
        writeln!(out, "one header copy is not valid: {fault}")?;
    }
    if report.lost_records > 0 {
        writeln!(out, "activity-log records without a valid copy: {}", report.lost_records)?;
    }
    writeln!(out, "blocks: {} data, {} zeroed, {} never written", found.data, found.zero, found.never)?;
    if found.unsettled > 0 {
        writeln!(
            out,
            "unsettled: {} hold what was flushed; they go back to it when opened",
            found.unsettled
        )?;
    }
    writeln!(out, "digest: {:016x}", found.digest)?;
    for (block, what) in &found.listed {
        writeln!(out, "bad block {block}: {what}")?;
    }
    if found.bad > found.listed.len() as u64 {
        writeln!(out, "and {} more bad blocks", found.bad - found.listed.len() as u64)?;
    }
    writeln!(out, "bad: {}", found.bad)?;
    if found.bad > 0 {
        bail!(
            "{name}: {} bad blocks; they heal from the other replicas once they are read or scrubbed",
            found.bad
        );
    }
    Ok(())
}

pub fn dump(args: &DumpArgs) -> anyhow::Result<()> {
    let (region, report) = load(&args.region, Access::Peek)?;
    let mut out = io::stdout().lock();
    if let Some(block) = args.block {
        return dump_block(&region, block, &mut out);
    }
    dump_header(&region, &report, &mut out)?;
    dump_log(&region, &mut out)?;
    let name = args.region.display().to_string();
    let threads = verify_threads(0);
    region.scan_digests(&|what, count, task| on_threads(&name, threads, what, count, task))?;
    let extents = region.layout().extents();
    writeln!(out, "digest: {:016x}", fold_digests(region.digests(ExtentId(0), extents).into_iter()))?;
    if args.extents {
        dump_extents(&region, &mut out)?;
    }
    Ok(())
}

fn dump_header(region: &Region, report: &OpenReport, out: &mut impl Write) -> anyhow::Result<()> {
    let header = region.header();
    let layout = header.layout;
    if let Some(fault) = &report.bad_header {
        writeln!(out, "one header copy is not valid: {fault}")?;
    }
    writeln!(out, "region: {}", header.region)?;
    writeln!(out, "volume: {}", header.volume)?;
    writeln!(out, "blocks: {} ({} bytes)", layout.blocks, layout.blocks * BLOCK_BYTES as u64)?;
    writeln!(out, "contexts at byte {}, data at byte {}", layout.contexts_offset, layout.data_offset)?;
    writeln!(out, "promised: generation {} to upstairs {}", header.promised, header.promised_to)?;
    writeln!(out, "last active generation: {}", header.last_active)?;
    writeln!(out, "flushed mark: {}", header.flushed)?;
    writeln!(out, "membership: epoch {}", header.membership.epoch)?;
    for (slot, member) in header.membership.regions.iter().enumerate() {
        writeln!(out, "  slot {slot}: {member}")?;
    }
    writeln!(out, "boot id: {}", header.boot_id)?;
    writeln!(out, "closed cleanly: {}", if header.clean { "yes" } else { "no" })?;
    writeln!(out, "copying: {} (epoch {})", if header.copying { "yes" } else { "no" }, header.copy_epoch)?;
    writeln!(out, "header written {} times", header.counter)?;
    Ok(())
}

fn dump_log(region: &Region, out: &mut impl Write) -> anyhow::Result<()> {
    writeln!(out, "activity log: {} slots", region.layout().log_slots)?;
    let log = lock(&region.log);
    let slots = log.iter().flat_map(|twin| twin.value.slots.iter()).enumerate();
    for (slot, extent) in slots.filter_map(|(slot, extent)| extent.map(|extent| (slot, extent))) {
        writeln!(out, "  slot {slot}: extent {extent}")?;
    }
    Ok(())
}

fn dump_extents(region: &Region, out: &mut impl Write) -> anyhow::Result<()> {
    let extents = region.layout().extents();
    for (extent, digest) in (0..extents).map(ExtentId).zip(region.digests(ExtentId(0), extents)) {
        let Some(range) = region.layout().extent_blocks(extent).filter(|_| digest != 0) else { continue };
        let pairs = region.read_pairs(range)?;
        let count = |kind| pairs.iter().filter(|pair| pair.latest.kind == kind).count();
        writeln!(
            out,
            "extent {extent}: digest {digest:016x}, {} data, {} zeroed, {} unverified",
            count(ContextKind::Data),
            count(ContextKind::Zero),
            count(ContextKind::Unverified) + count(ContextKind::Damaged),
        )?;
    }
    Ok(())
}

fn dump_block(region: &Region, block: u64, out: &mut impl Write) -> anyhow::Result<()> {
    let blocks = region.layout().blocks;
    if block >= blocks {
        bail!("--block {block}: the region has {blocks} blocks, numbered from 0");
    }
    let range = BlockRange::single(block);
    let pairs = region.read_pairs(range)?;
    let Some(pair) = pairs.first() else { return Ok(()) };
    let show = |context: &Context| {
        let copied = context.copied.map_or(String::new(), |epoch| format!(", copied in epoch {epoch}"));
        format!("{:?}, version {}, checksum {:#010x}{copied}", context.kind, context.version, context.crc)
    };
    let layout = region.layout();
    writeln!(out, "block {block} of extent {}", range.extent())?;
    writeln!(
        out,
        "contexts at byte {}, data at byte {}",
        layout.context_offset(block),
        layout.block_offset(block)
    )?;
    writeln!(out, "flushed: {}", show(&pair.flushed))?;
    writeln!(out, "latest: {}", show(&pair.latest))?;
    match region.crcs_of(range).first() {
        Some(Some(crc)) => writeln!(out, "data: checksum {crc:#010x}")?,
        Some(None) | None => writeln!(out, "data: cannot be read")?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let check = |text: &str, bytes: u64| assert_eq!(parse_size(text), Ok(bytes), "{text}");
        check("4G", 4 << 30);
        check("512MiB", 512 << 20);
        check("4096", 4096);
        check("1 GB", 1_000_000_000);
        assert!(parse_size("4X").is_err() && parse_size("").is_err());
    }
}

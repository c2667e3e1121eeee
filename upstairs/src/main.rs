//! `newel-upstairs`: serves one volume.

use std::process::ExitCode;

/// Keeps large buffers instead of mapping them anew for every request, which costs a page fault per 4 KiB.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    newel_upstairs::shell::cli::main()
}

//! `--no-fencing`: one option of all commands that make a volume or attach one for writing.
//!
//! Not here: what it waives, and the probe that demands it (`sawmill_volume::fencing`).

use clap::Args;
use sawmill_volume::Fencing;

/// Whether a store must be able to keep two writers apart, as an option of a command.
#[derive(Args, Clone, Copy, Default)]
pub(crate) struct FencingOption {
    /// Accept a store that cannot fence (no atomic conditional PUT); you guarantee a single writer.
    #[arg(long)]
    pub(crate) no_fencing: bool,
}

impl FencingOption {
    /// The same for the engine.
    pub(crate) fn fencing(self) -> Fencing {
        if self.no_fencing { Fencing::Waived } else { Fencing::Demanded }
    }
}

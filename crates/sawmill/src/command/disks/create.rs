//! `sawmill create`: a new volume in a store.
//!
//! Invariant: once the volume exists, only a failed output ends the command with an error.
//!
//! Not here: the journal, which the first `serve` makes; what makes a name unique
//! (`sawmill_volume::create`).

use std::time::Duration;

use clap::{Args, ValueEnum};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_volume::{CreateOptions, FlushMode, limits};

use crate::command::Context;
use crate::fencing::FencingOption;
use crate::sizes;
use crate::wiring;
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{
    exact_duration, exact_size, human_size, parse_size, parse_size_u32, parse_whole_seconds,
};

/// Create a volume.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Size of the disk: 4096, 512M, 10G, 1T (powers of 1024). Nothing is reserved; an empty disk
    /// takes no space.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: u64,

    #[command(flatten)]
    shape: Shape,

    #[command(flatten)]
    fencing: FencingOption,
}

/// The properties of a new volume besides its size.
#[derive(Args, Clone, Copy)]
pub(in crate::command) struct Shape {
    /// Logical block size of doors that have sectors: 512 or 4096. Requests need not be aligned to
    /// it.
    #[arg(long, value_name = "BYTES", value_parser = parse_size_u32,
          default_value_t = defaults().block_bytes)]
    block_size: u32,

    /// Size at which written data becomes an object: a power of two from 256K to 64M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size_u32,
          default_value = exact_size(defaults().segment_bytes.into()))]
    segment_bytes: u32,

    /// What a completed flush guarantees: logged (on the local disk), stored (in the store) or weak
    /// (order only: nothing is durable).
    #[arg(long, value_name = "MODE", value_enum, default_value = defaults().flush.name())]
    flush: Flush,

    /// Keep every stored moment for this long: 24h, 90m; 0: none. `sawmill set` changes it.
    #[arg(long, value_name = "DURATION", value_parser = parse_whole_seconds,
          default_value = exact_duration(Duration::from_secs(defaults().retention_s)))]
    retention: Duration,
}

/// The shape of a volume if its user chooses nothing but the size, which is not used here.
fn defaults() -> CreateOptions {
    CreateOptions::new(0)
}

/// The flush modes, as values of an option.
#[derive(Clone, Copy, ValueEnum)]
enum Flush {
    /// Flushed writes survive power loss: they are on the local disk.
    Logged,
    /// Flushed writes survive the loss of the machine: they are in the store.
    Stored,
    /// A flush only orders writes; it makes nothing durable.
    Weak,
}

impl From<Flush> for FlushMode {
    fn from(flush: Flush) -> Self {
        match flush {
            Flush::Logged => FlushMode::Logged,
            Flush::Stored => FlushMode::Stored,
            Flush::Weak => FlushMode::Weak,
        }
    }
}

impl Shape {
    /// The same as options of the engine.
    pub(in crate::command) fn options(
        self,
        size_bytes: u64,
        fencing: FencingOption,
    ) -> CreateOptions {
        CreateOptions {
            size_bytes,
            block_bytes: self.block_size,
            segment_bytes: self.segment_bytes,
            flush: self.flush.into(),
            retention_s: self.retention.as_secs(),
            no_fencing: fencing.no_fencing,
        }
    }
}

/// The disk space that serving the volume takes on this machine by default.
fn serving_text(context: &Context, record: &VolumeRecord) -> Option<String> {
    let (state, cache) = (context.paths.state_folder().ok()?, context.paths.cache_path().ok()?);
    let least = limits::journal_bytes_min(record.segment_bytes);
    let journal = sizes::journal(sizes::free_bytes(&state), 1, least);
    Some(format!(
        "on this machine, `sawmill serve` takes {} in {} for its journal (--journal-bytes), and up \
         to {} for a read cache that all volumes of one `serve` share (--cache-bytes)",
        human_size(journal),
        state.display(),
        human_size(sizes::cache_of(&cache, None))
    ))
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let store = wiring::open_store(&address.store_url)?;
    let options = arguments.shape.options(arguments.size, arguments.fencing);
    let record = sawmill_volume::create(&*store, &address.name, &options)?;
    let document = super::info::RecordDocument::new(&address.store_url, &record);
    if context.json {
        output::json(&document)?;
    } else {
        let size = human_size(document.size_bytes);
        output::line(&format!("created {} ({size}) in {}", document.name, document.store))?;
        // Nothing is known where no state folder is; the volume exists all the same.
        if let Some(text) = serving_text(context, &record) {
            output::line(&text)?;
        }
    }
    Ok(Exit::Ok)
}

//! `sawmill resize`: changes the size of a disk, served or not.
//!
//! Not here: how a new size becomes durable before a door shows it (`sawmill_volume`:
//! `Volume::resize`), the refusal to shrink a served volume (`serving`).

use clap::Args;
use sawmill_volume::inspect;
use serde::Serialize;

use crate::attach::AttachToWrite;
use crate::command::Context;
use crate::control::protocol::{ControlRequest, ResizeReply};
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{human_size, parse_size};

/// Change the size of a volume.
///
/// A volume can grow while it is served; clients see the new size when they reconnect. It can
/// shrink only while it is not served. Resizing the file system is your task: grow it afterwards,
/// shrink it before.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// The new size: 512M, 10G, 1T (powers of 1024); a multiple of the block size.
    #[arg(value_name = "SIZE", value_parser = parse_size)]
    size: u64,

    /// Shrink, and lose what lies beyond the new end.
    #[arg(long)]
    yes_lose_data: bool,

    #[command(flatten)]
    attach: AttachToWrite,
}

#[derive(Serialize)]
struct Document<'a> {
    volume: &'a str,
    store: &'a str,
    old_size_bytes: u64,
    size_bytes: u64,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let (store, record) = wiring::find(&address)?;
    let folder = context.paths.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
    // The server's answer always has the current size.
    let served = control::attached(&folder)?.and_then(|process| process.volumes.into_iter().next());
    let old_size_bytes = match &served {
        Some(volume) if !volume.read_only => volume.size_bytes,
        _ => inspect::checkpoint(&*store, &record, None)?.size_bytes,
    };
    let size_bytes = arguments.size;
    // Before anybody is asked: a server would refuse it for another reason, and hide this one.
    if size_bytes < old_size_bytes && !arguments.yes_lose_data {
        let text = format!(
            "volume {} has {old_size_bytes} bytes: shrinking it to {size_bytes} destroys all data \
             beyond that; to do so, pass --yes-lose-data",
            address.name
        );
        return Err(Failure::new(Exit::Refused, text));
    }
    let resized =
        control::query_writer::<ResizeReply>(&folder, &ControlRequest::Resize { size_bytes });
    let resized = resized.map_err(|failure| failure.of_volume(&address.name))?;
    // A volume that has the size already is not attached: that would cost an epoch for nothing.
    if resized.is_none() && size_bytes != old_size_bytes {
        let attached = arguments.attach.open(&context.paths, &address, &record)?;
        let resized = attached.volume.resize(size_bytes).map_err(Failure::from);
        // Close even if the size was refused: that stores what the journal held.
        attached.close()?;
        resized.map_err(|failure| failure.of_volume(&address.name))?;
    }
    let (volume, store) = (address.name.as_str(), address.store_url.as_str());
    if context.json {
        output::json(&Document { volume, store, old_size_bytes, size_bytes })?;
    } else {
        let (old, new) = (human_size(old_size_bytes), human_size(size_bytes));
        let how = match (resized.is_some(), size_bytes > old_size_bytes) {
            (true, true) => "; clients see it when they reconnect",
            _ => "",
        };
        output::line(&format!("{volume}: {old} -> {new}{how}"))?;
    }
    Ok(Exit::Ok)
}

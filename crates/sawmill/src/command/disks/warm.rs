//! `sawmill warm`: fetches what a served volume holds into its read cache, before somebody needs
//! it.
//!
//! Invariant: each step is a request of its own, so that the server stops when this command ends,
//! however it ends.
//!
//! Not here: fetching, which the serving process does (`serving::warming`), and recording a boot
//! set (`boot_set`).

use std::path::Path;
use std::time::Duration;

use clap::Args;
use sawmill_volume::boot_set::BootSetHolders;
use serde::Serialize;

use crate::command::Context;
use crate::config::VolumeAddress;
use crate::control::protocol::{
    ControlRequest, WARM_RANGES_MAX, WarmReply, WarmRoomReply, WarmStepRequest,
};
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{human_size, parse_size};

/// Pause before asking again while the server warms something else. The server has waited already.
const TURN_EVERY: Duration = Duration::from_millis(10);

/// Fetch what a served volume holds into its read cache, before it is needed.
///
/// Only what is in the store is fetched, behind everything else that the server asks the store for.
/// What was read lately stays in the cache, and at least half of a full cache is left alone: what
/// does not fit, is damaged, or is deleted meanwhile is left out and counted.
/// Ctrl-C stops it; what was fetched stays.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name. It must be served on this machine.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Parts of the disk, in the order in which to fetch them: OFFSET+LENGTH, as in 0+64M or
    /// 10G+1G. Default: all of it.
    #[arg(value_name = "RANGE", value_parser = parse_range, conflicts_with = "boot_set")]
    ranges: Vec<(u64, u64)>,

    /// Fetch what the boot set names (see `sawmill boot-set`).
    #[arg(long)]
    boot_set: bool,

    /// Fetch at most this much, in whole frames (64 KiB by default).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    bytes_max: Option<u64>,
}

#[derive(Serialize)]
struct Document<'a> {
    volume: &'a str,
    fetched_bytes: u64,
    present_bytes: u64,
    left_bytes: u64,
}

fn parse_range(text: &str) -> std::result::Result<(u64, u64), String> {
    let (offset, length) = text
        .split_once('+')
        .ok_or_else(|| format!("'{text}' is not a range; write OFFSET+LENGTH, as in 10G+1G"))?;
    let (offset, length) = (parse_size(offset)?, parse_size(length)?);
    match offset.checked_add(length) {
        Some(_) if length > 0 => Ok((offset, length)),
        _ => Err(format!("'{text}' is empty or too long")),
    }
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let Some((folder, _)) = control::served(&context.paths.state_folder()?, &address)? else {
        // Says so if there is no such volume.
        wiring::find(&address)?;
        return Err(control::not_served(&address.name));
    };
    let room: WarmRoomReply = control::query_any(&folder, &address.name, &ControlRequest::WarmRoom)
        .map_err(|failure| failure.of_volume(&address.name))?;
    let ranges = match (arguments.boot_set, arguments.ranges.is_empty()) {
        (true, _) => boot_set(&address)?,
        (false, true) => vec![(0, room.size_bytes)],
        (false, false) => inside(arguments, &address, room.size_bytes)?,
    };
    let asked = arguments.bytes_max.map_or(u64::MAX, |bytes| bytes / room.frame_bytes.max(1));
    if asked == 0 {
        return Err(Failure::usage(format!(
            "--bytes-max is less than a frame of {}, which has {}: nothing would be fetched",
            address.name,
            human_size(room.frame_bytes)
        )));
    }
    let sum = warm(&folder, &address, ranges, room.frames.min(asked))?;
    if context.json {
        output::json(&Document {
            volume: &address.name,
            fetched_bytes: sum.fetched_bytes,
            present_bytes: sum.present_bytes,
            left_bytes: sum.left_bytes,
        })?;
    } else {
        output::line(&format!(
            "{}: {} fetched, {} already cached, {} left out",
            address.name,
            human_size(sum.fetched_bytes),
            human_size(sum.present_bytes),
            human_size(sum.left_bytes)
        ))?;
    }
    Ok(Exit::Ok)
}

/// The ranges, all of them on the disk.
fn inside(
    arguments: &Arguments,
    address: &VolumeAddress,
    size_bytes: u64,
) -> Result<Vec<(u64, u64)>> {
    for (offset, length) in &arguments.ranges {
        if offset + length > size_bytes {
            return Err(Failure::usage(format!(
                "{offset}+{length} reaches beyond the end of {}, which has {size_bytes} bytes",
                address.name
            )));
        }
    }
    Ok(arguments.ranges.clone())
}

fn boot_set(address: &VolumeAddress) -> Result<Vec<(u64, u64)>> {
    let (store, record) = wiring::find(address)?;
    match BootSetHolders::of(&*store, &record)?.find(&*store)? {
        Some(set) => Ok(set.ranges),
        None => Err(super::boot_set::none(&address.name)),
    }
}

/// Asks for one step after the other.
fn warm(
    folder: &Path,
    address: &VolumeAddress,
    mut ranges: Vec<(u64, u64)>,
    mut frames_max: u64,
) -> Result<WarmReply> {
    let total = ranges.iter().fold(0_u64, |sum, (_, length)| sum.saturating_add(*length));
    let mut progress = output::Progress::new("bytes of the disk");
    let (mut sum, mut has_waited) = (WarmReply::default(), false);
    while !ranges.is_empty() {
        let some = ranges[..ranges.len().min(WARM_RANGES_MAX)].to_vec();
        let request = ControlRequest::Warm(WarmStepRequest { ranges: some, frames_max });
        let step: WarmReply = control::query_any(folder, &address.name, &request)
            .map_err(|failure| failure.of_volume(&address.name))?;
        frames_max = match step.is_full {
            true => 0,
            false => frames_max.saturating_sub(step.fetched_frames),
        };
        sum.add(&step, &mut ranges);
        if step.done_bytes == 0 {
            // Another command, or a boot set, has its turn.
            if !std::mem::replace(&mut has_waited, true) {
                let name = &address.name;
                tracing::warn!("{name} waits: its server is warming something else from its store");
            }
            std::thread::sleep(TURN_EVERY);
        }
        progress.show(sum.done_bytes, total);
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_an_offset_and_a_length() {
        assert_eq!(parse_range("4K+1M"), Ok((4096, 1 << 20)));
        for text in ["4K", "4K+0", "+", "4K-8K", "16777215T+16777215T"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }
}

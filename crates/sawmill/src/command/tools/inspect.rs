//! `sawmill inspect`: shows what is stored, object by object. Reads only; `--unstored-to` writes
//! new files.
//!
//! Invariant: text and JSON come from one report; a table whose rows are cut says how many are
//! left out.
//!
//! Not here: how a part is found and decoded (`sawmill_volume::inspect`), the summary of a volume
//! (`info`), verifying all of it (`check`).

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::segment::{ExtentKind, SegmentHeader, SegmentKind};
use sawmill_volume::inspect::JournalReport;
use serde::Serialize;

use crate::admin::status::milliseconds;
use crate::command::Context;
use crate::moment::human_time;
use crate::wiring;
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{human_count, human_duration, human_size};

/// Rows of a long table that are printed without `--json`.
const ROWS_MAX: usize = 40;

/// Show the parts of a volume. Changes nothing.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    #[command(subcommand)]
    part: Part,
}

#[derive(Subcommand)]
enum Part {
    /// One segment: what it covers and which extents it holds.
    Segment {
        /// Name in the default store, or a URL ending in the name.
        #[arg(value_name = "VOL")]
        volume: String,
        /// The segment's sequence number.
        #[arg(value_name = "SEQUENCE")]
        sequence: u64,
    },
    /// A journal: which volume it belongs to, what it marks as safe, and which records are
    /// readable.
    Journal {
        /// Path of a journal; or a volume, for its journal in the state folder.
        #[arg(value_name = "PATH|VOL")]
        journal: String,
        /// Write what the journal holds and the store may lack to this new file, each write at its
        /// address on the disk; FILE.ranges lists the ranges. Use it for a journal that is refused
        /// because the volume has been attached since.
        #[arg(long, value_name = "FILE")]
        unstored_to: Option<PathBuf>,
    },
    /// A checkpoint: the newest one, or the one with this number.
    Checkpoint {
        /// Name in the default store, or a URL ending in the name.
        #[arg(value_name = "VOL")]
        volume: String,
        /// The checkpoint's number.
        #[arg(value_name = "NUMBER")]
        number: Option<u64>,
    },
    /// A dry run of recovery: what `serve` would do first.
    Recovery {
        /// Name in the default store, or a URL ending in the name.
        #[arg(value_name = "VOL")]
        volume: String,
        /// The journal, if it is not in the state folder.
        #[arg(long, value_name = "PATH")]
        journal: Option<PathBuf>,
    },
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.part {
        Part::Segment { volume, sequence } => segment(context, volume, *sequence)?,
        Part::Journal { journal, unstored_to } => {
            journal_at(context, journal, unstored_to.as_deref())?
        }
        Part::Checkpoint { volume, number } => checkpoint(context, volume, *number)?,
        Part::Recovery { volume, journal } => recovery(context, volume, journal.as_deref())?,
    }
    Ok(Exit::Ok)
}

// The documents name what scripts read. They are types of their own, so that a field of the format
// can be renamed without breaking a script.

#[derive(Serialize)]
struct ExtentDocument {
    address: u64,
    length: u64,
    kind: &'static str,
    data_offset: u32,
}

#[derive(Serialize)]
struct SegmentDocument {
    volume_id: String,
    put_id: String,
    sequence: u64,
    epoch: u64,
    kind: &'static str,
    previous_sequence: u64,
    next_sequence: u64,
    stored_through: u64,
    checkpoint_number: u64,
    position_start: u64,
    position_end: u64,
    wall_unix_ms: u64,
    frame_bytes: u32,
    data_bytes: u64,
    object_bytes: u64,
    frames: usize,
    extents: Vec<ExtentDocument>,
}

impl SegmentDocument {
    fn new(header: &SegmentHeader) -> Self {
        let extents = header.extents.iter().map(|extent| ExtentDocument {
            address: extent.address,
            length: extent.length,
            kind: match extent.kind {
                ExtentKind::Data => "data",
                ExtentKind::Zero => "zero",
                ExtentKind::Discard => "discard",
            },
            data_offset: extent.data_offset,
        });
        SegmentDocument {
            volume_id: header.volume_id.to_string(),
            put_id: header.put_id.to_string(),
            sequence: header.sequence,
            epoch: header.epoch,
            kind: match header.kind {
                SegmentKind::Data => "data",
                SegmentKind::Fence => "fence",
                SegmentKind::Moved => "moved",
                SegmentKind::Order => "order",
            },
            previous_sequence: header.previous_sequence,
            next_sequence: header.next_sequence,
            stored_through: header.stored_through,
            checkpoint_number: header.checkpoint_number,
            position_start: header.position_start,
            position_end: header.position_end,
            wall_unix_ms: header.wall_unix_ms,
            frame_bytes: header.frame_bytes,
            data_bytes: header.data_bytes,
            object_bytes: header.object_bytes(),
            frames: header.frames.len(),
            extents: extents.collect(),
        }
    }
}

fn segment(context: &Context, volume: &str, sequence: u64) -> Result<()> {
    let (store, record) = wiring::find(&context.paths.resolve(volume)?)?;
    let header = sawmill_volume::inspect::segment(&*store, &record, sequence)?;
    let document = SegmentDocument::new(&header);
    if context.json {
        return output::json(&document);
    }
    output::facts(&[
        ("sequence", format!("{} ({})", document.sequence, document.kind)),
        ("epoch", document.epoch.to_string()),
        ("put id", document.put_id.clone()),
        ("made", human_time(document.wall_unix_ms)),
        ("previous, next", format!("{}, {}", document.previous_sequence, document.next_sequence)),
        ("positions", format!("{} to {}", document.position_start, document.position_end)),
        ("stored then", format!("through segment {}", document.stored_through)),
        ("checkpoint then", document.checkpoint_number.to_string()),
        ("data", human_size(document.data_bytes)),
        ("object", human_size(document.object_bytes)),
        (
            "frames",
            format!("{} of {}", document.frames, human_size(u64::from(document.frame_bytes))),
        ),
        ("extents", human_count(document.extents.len() as u64)),
    ])?;
    let rows = document.extents.iter().map(|extent| {
        let offset =
            if extent.kind == "data" { extent.data_offset.to_string() } else { "-".to_owned() };
        vec![extent.address.to_string(), extent.length.to_string(), extent.kind.to_owned(), offset]
    });
    long_table(&["address", "length", "kind", "data offset"], rows.collect())
}

/// Prints a table of at most [`ROWS_MAX`] rows, and says how many are left out.
fn long_table(header: &[&str], mut rows: Vec<Vec<String>>) -> Result<()> {
    let all = rows.len();
    if all == 0 {
        return Ok(());
    }
    rows.truncate(ROWS_MAX);
    output::line("")?;
    output::table(header, rows)?;
    if all > ROWS_MAX {
        output::line(&format!(
            "and {} more; --json lists all",
            human_count((all - ROWS_MAX) as u64)
        ))?;
    }
    Ok(())
}

#[derive(Serialize)]
struct CheckpointSegment {
    sequence: u64,
    epoch: u64,
    data_bytes: u64,
    live_bytes: u64,
    object_bytes: u64,
    wall_unix_ms: u64,
    dead: bool,
}

#[derive(Serialize)]
struct CheckpointDocument {
    volume_id: String,
    put_id: String,
    number: u64,
    epoch: u64,
    through_sequence: u64,
    next_sequence: u64,
    position: u64,
    wall_unix_ms: u64,
    attached_ms: u64,
    repeats: u64,
    size_bytes: u64,
    clean: bool,
    extents: u64,
    live_bytes: u64,
    map_parts: usize,
    map_bytes: u64,
    segments: Vec<CheckpointSegment>,
}

impl CheckpointDocument {
    fn new(checkpoint: &Checkpoint) -> Self {
        let segments = checkpoint.segments.iter().map(|entry| CheckpointSegment {
            sequence: entry.sequence,
            epoch: entry.epoch,
            data_bytes: entry.data_bytes,
            live_bytes: entry.live_bytes,
            object_bytes: entry.object_bytes,
            wall_unix_ms: entry.wall_unix_ms,
            dead: entry.dead,
        });
        CheckpointDocument {
            volume_id: checkpoint.volume_id.to_string(),
            put_id: checkpoint.put_id.to_string(),
            number: checkpoint.number,
            epoch: checkpoint.epoch,
            through_sequence: checkpoint.through_sequence,
            next_sequence: checkpoint.next_sequence,
            position: checkpoint.position,
            wall_unix_ms: checkpoint.wall_unix_ms,
            attached_ms: checkpoint.attached_ms,
            repeats: checkpoint.repeats,
            size_bytes: checkpoint.size_bytes,
            clean: checkpoint.clean,
            extents: checkpoint.extent_total,
            live_bytes: checkpoint.live_bytes,
            map_parts: checkpoint.parts.len(),
            map_bytes: checkpoint.parts.iter().map(|part| u64::from(part.bytes)).sum(),
            segments: segments.collect(),
        }
    }
}

fn checkpoint(context: &Context, volume: &str, number: Option<u64>) -> Result<()> {
    let (store, record) = wiring::find(&context.paths.resolve(volume)?)?;
    let checkpoint = sawmill_volume::inspect::checkpoint(&*store, &record, number)?;
    let document = CheckpointDocument::new(&checkpoint);
    if context.json {
        return output::json(&document);
    }
    let map = format!("{} parts, {}", document.map_parts, human_size(document.map_bytes));
    output::facts(&[
        ("number", document.number.to_string()),
        ("epoch", document.epoch.to_string()),
        ("made", human_time(document.wall_unix_ms)),
        ("clean", if document.clean { "yes" } else { "no" }.to_owned()),
        ("through segment", document.through_sequence.to_string()),
        ("next segment", document.next_sequence.to_string()),
        ("position", document.position.to_string()),
        ("size", human_size(document.size_bytes)),
        ("live data", human_size(document.live_bytes)),
        ("extents", human_count(document.extents)),
        ("map", map),
        ("segments", human_count(document.segments.len() as u64)),
    ])?;
    let rows = document.segments.iter().map(|entry| {
        vec![
            entry.sequence.to_string(),
            entry.epoch.to_string(),
            human_size(entry.data_bytes),
            human_size(entry.live_bytes),
            if entry.dead { "dead" } else { "" }.to_owned(),
        ]
    });
    long_table(&["sequence", "epoch", "data", "live", ""], rows.collect())
}

fn journal_at(context: &Context, text: &str, unstored_to: Option<&Path>) -> Result<()> {
    // A folder is no journal: then the text is the name of a volume.
    let path = if !Path::new(text).is_dir() && Path::new(text).exists() {
        PathBuf::from(text)
    } else {
        let address = context.paths.resolve(text)?;
        let (_, record) = wiring::find(&address)?;
        context
            .paths
            .volume_folder(&record.volume_id.to_string(), &address.store_url)?
            .join("journal")
    };
    let report = match unstored_to {
        None => sawmill_volume::inspect::journal(&path)?,
        Some(to) => crate::unstored::write(&path, to)?,
    };
    let document = JournalDocument::new(&path, &report);
    if context.json {
        return output::json(&document);
    }
    let epochs = match (document.epoch_first, document.epoch_last) {
        (Some(first), Some(last)) if first == last => first.to_string(),
        (Some(first), Some(last)) => format!("{first} to {last}"),
        _ => "no records".to_owned(),
    };
    let writes = format!("{}, {}", human_count(document.writes), human_size(document.write_bytes));
    output::facts(&[
        ("journal", document.path.clone()),
        ("volume id", document.volume_id.clone()),
        ("epoch", document.epoch.to_string()),
        ("capacity", human_size(document.capacity_bytes)),
        ("clean", if document.clean { "yes" } else { "no" }.to_owned()),
        (
            "stored",
            format!("segment {}, position {}", document.stored_sequence, document.stored_position),
        ),
        ("read from", document.from.to_string()),
        ("flushed through", document.flushed_through.to_string()),
        ("ends at", document.end.to_string()),
        ("ended by", document.ended_by.clone()),
        ("writes", writes),
        ("discards, zeroes", human_count(document.discards)),
        ("padding", human_count(document.padding)),
        ("epochs of records", epochs),
    ])
}

#[derive(Serialize)]
struct JournalDocument {
    path: String,
    volume_id: String,
    epoch: u64,
    revision: u64,
    capacity_bytes: u64,
    clean: bool,
    stored_sequence: u64,
    stored_position: u64,
    from: u64,
    end: u64,
    flushed_through: u64,
    ended_by: String,
    writes: u64,
    write_bytes: u64,
    discards: u64,
    padding: u64,
    epoch_first: Option<u64>,
    epoch_last: Option<u64>,
}

impl JournalDocument {
    fn new(path: &Path, report: &JournalReport) -> Self {
        let superblock = &report.superblock;
        JournalDocument {
            path: path.display().to_string(),
            volume_id: report.volume_id.to_string(),
            epoch: superblock.epoch,
            revision: superblock.revision,
            capacity_bytes: superblock.capacity_bytes,
            clean: superblock.clean,
            stored_sequence: superblock.stored_sequence,
            stored_position: superblock.stored_position,
            from: report.from,
            end: report.end,
            flushed_through: report.flushed_through,
            ended_by: report.ended_by.clone(),
            writes: report.writes,
            write_bytes: report.write_bytes,
            discards: report.discards,
            padding: report.padding,
            epoch_first: report.epochs.map(|(first, _)| first),
            epoch_last: report.epochs.map(|(_, last)| last),
        }
    }
}

#[derive(Serialize)]
struct StepDocument {
    name: String,
    detail: String,
    took_ms: u64,
}

fn recovery(context: &Context, volume: &str, journal: Option<&Path>) -> Result<()> {
    let address = context.paths.resolve(volume)?;
    let (store, record) = wiring::find(&address)?;
    let usual = context
        .paths
        .volume_folder(&record.volume_id.to_string(), &address.store_url)?
        .join("journal");
    let journal = journal.unwrap_or(&usual);
    let report = sawmill_volume::inspect::recovery(&*store, &record, Some(journal))?;
    if context.json {
        let steps: Vec<StepDocument> = report
            .steps
            .iter()
            .map(|taken| StepDocument {
                name: taken.step.name().to_owned(),
                detail: taken.detail.clone(),
                took_ms: milliseconds(taken.took),
            })
            .collect();
        return output::json(&steps);
    }
    let rows = report.steps.iter();
    let rows = rows.map(|taken| {
        vec![taken.step.name().to_owned(), human_duration(taken.took), taken.detail.clone()]
    });
    output::table(&["step", "took", "what"], rows.collect())
}

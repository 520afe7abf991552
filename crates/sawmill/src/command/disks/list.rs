//! `sawmill list`: the volumes of a store.
//!
//! Invariant: a volume that cannot be read, or a process that does not answer, affects only its own
//! row. Not here: the details of one volume (`info`).

use std::path::Path;

use clap::Args;
use sawmill_store::ObjectStore;
use sawmill_volume::{ErrorKind, UnnamedVolume, VolumeEntry, inspect};
use serde::Serialize;

use super::info::{Attachment, RecordDocument};
use crate::command::Context;
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::human_size;

/// List the volumes of a store.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// URL of the store. Default: the default store.
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// Also list volumes without a name, by id: those that lost their names (`sawmill rename ID
    /// NEW` names one), and the remains of deleted ones. Lists every object of the store.
    #[arg(long)]
    all: bool,
}

/// One volume of the list.
#[derive(Serialize)]
struct Row {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<RecordDocument>,
    /// For a volume without a name; its name here is its id.
    #[serde(skip_serializing_if = "Option::is_none")]
    unnamed: Option<UnnamedDocument>,
    attached: Option<Attachment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct UnnamedDocument {
    size_bytes: Option<u64>,
    deleted: bool,
}

impl UnnamedDocument {
    fn display_text(&self) -> String {
        let size = self.size_bytes.map_or_else(|| "unreadable".to_owned(), human_size);
        format!(
            "{size}, {}",
            if self.deleted { "deleted: clones may need it" } else { "it has no name" }
        )
    }
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let url = match &arguments.store {
        Some(url) => url.clone(),
        None => context.paths.default_store()?,
    };
    let store = wiring::open_store(&url)?;
    let mut rows = Vec::new();
    let listed = sawmill_volume::list(&*store)?;
    let sizes = sizes(&*store, &listed);
    for (listed, size_bytes) in listed.into_iter().zip(sizes) {
        rows.push(match listed.record.and_then(|record| Ok((record, size_bytes?))) {
            Ok((record, size_bytes)) => {
                let folder = context.paths.volume_folder(&record.volume_id.to_string(), &url)?;
                let attached = attached_to(&folder);
                let volume =
                    Some(RecordDocument { size_bytes, ..RecordDocument::new(&url, &record) });
                Row { name: listed.name, volume, unnamed: None, attached, error: None }
            }
            // One bad volume takes one row, and does not hide the others.
            Err(error) => Row {
                name: listed.name,
                volume: None,
                unnamed: None,
                attached: None,
                error: Some(error.to_string()),
            },
        });
    }
    rows.sort_by(|row, other| row.name.cmp(&other.name));
    if arguments.all {
        rows.extend(sawmill_volume::unnamed(&*store)?.iter().map(unnamed_row));
    }
    if context.json {
        output::json(&rows)?;
    } else if rows.is_empty() {
        output::line(&format!("no volumes in {url}"))?;
    } else {
        output::table(
            &["name", "size", "block", "flush", "attached"],
            rows.iter().map(cells).collect(),
        )?;
    }
    Ok(Exit::Ok)
}

fn unnamed_row(unnamed_volume: &UnnamedVolume) -> Row {
    let size_bytes = unnamed_volume.size_bytes.as_ref().ok().copied();
    let document = UnnamedDocument { size_bytes, deleted: unnamed_volume.is_deleted };
    let (name, unnamed) = (unnamed_volume.volume_id.to_string(), Some(document));
    Row { name, volume: None, unnamed, attached: None, error: None }
}

/// Sizes from the newest checkpoints: a volume may have been resized since it was made. They are
/// read in parallel, because each takes a few requests.
fn sizes(store: &dyn ObjectStore, entries: &[VolumeEntry]) -> Vec<sawmill_volume::Result<u64>> {
    const VOLUMES_AT_ONCE_MAX: usize = 16;
    let size = |entry: &VolumeEntry| {
        let record = entry.record.as_ref().map_err(Clone::clone)?;
        inspect::checkpoint(store, record, None).map(|checkpoint| checkpoint.size_bytes)
    };
    let mut sizes = Vec::new();
    // In bounded steps: a store may have thousands of volumes, each with a thread here.
    for chunk in entries.chunks(VOLUMES_AT_ONCE_MAX) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = chunk.iter().map(|listed| scope.spawn(|| size(listed))).collect();
            let read = threads.into_iter().zip(chunk);
            sizes.extend(read.map(|(thread, listed)| {
                thread.join().unwrap_or_else(|_| Err(reading_panicked(listed)))
            }));
        });
    }
    sizes
}

fn reading_panicked(listed: &VolumeEntry) -> sawmill_volume::Error {
    let text = format!(
        "volume {}: the thread that read its size panicked; report this bug with the log",
        listed.name
    );
    sawmill_volume::Error::new(ErrorKind::Internal, text)
}

/// The process that serves the volume here. A process that does not answer must not spoil the whole
/// list.
fn attached_to(folder: &Path) -> Option<Attachment> {
    control::attached(folder)
        .unwrap_or_else(|failure| {
            tracing::error!("{failure}");
            None
        })
        .map(|process| Attachment::new(&process))
}

fn cells(row: &Row) -> Vec<String> {
    let attached = row
        .attached
        .as_ref()
        .map_or_else(|| "-".to_owned(), |process| format!("here, pid {}", process.pid));
    if let Some(unnamed) = &row.unnamed {
        return vec![row.name.clone(), unnamed.display_text(), "-".into(), "-".into(), attached];
    }
    match (&row.volume, &row.error) {
        (Some(volume), _) => vec![
            row.name.clone(),
            human_size(volume.size_bytes),
            volume.block_bytes.to_string(),
            volume.flush.clone(),
            attached,
        ],
        (None, error) => {
            let error = error.clone().unwrap_or_default();
            vec![row.name.clone(), format!("unreadable: {error}"), "-".into(), "-".into(), attached]
        }
    }
}

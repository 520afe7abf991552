//! `sawmill info`: shows one volume, live if this machine serves it, otherwise as its store has it.
//!
//! Invariant: a served volume is described without its store, so the command works while the store
//! is unreachable. Not here: all volumes of a store (`list`), past states (`log`), single objects
//! (`inspect`).

use clap::Args;
use sawmill_format::volume_record::VolumeRecord;
use serde::Serialize;

use crate::admin::status::{
    CacheStatus, HealthStatus, PositionsStatus, ProcessStatus, VolumeStatus,
};
use crate::command::Context;
use crate::config::VolumeAddress;
use crate::moment::human_time;
use crate::seen::OtherStore;
use crate::{control, seen, wiring};
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;
use sawmill_console::units::{human_count, human_size};

/// Show a volume: size, positions, space used in the store, who is attached.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,
}

/// The fixed properties of a volume, and its size.
#[derive(Serialize)]
pub(in crate::command) struct RecordDocument {
    pub(in crate::command) name: String,
    pub(in crate::command) id: String,
    pub(in crate::command) store: String,
    pub(in crate::command) size_bytes: u64,
    pub(in crate::command) block_bytes: u32,
    pub(in crate::command) segment_bytes: u32,
    pub(in crate::command) flush: String,
    pub(in crate::command) created_unix_ms: u64,
}

impl RecordDocument {
    /// The record of a volume in the store at `store_url`.
    pub(in crate::command) fn new(store_url: &str, record: &VolumeRecord) -> Self {
        RecordDocument {
            name: record.name.clone(),
            id: record.volume_id.to_string(),
            store: store_url.to_owned(),
            size_bytes: record.size_bytes,
            block_bytes: record.block_bytes,
            segment_bytes: record.segment_bytes,
            flush: record.flush_mode.to_string(),
            created_unix_ms: record.created_unix_ms,
        }
    }
}

/// A process of this machine that serves a volume.
#[derive(Serialize)]
pub(in crate::command) struct Attachment {
    pub(in crate::command) pid: u32,
    read_only: bool,
    uris: Vec<String>,
    clients: Vec<String>,
    health: HealthStatus,
}

impl Attachment {
    /// From the answer of a control socket.
    pub(in crate::command) fn new(process: &ProcessStatus) -> Self {
        let volume = process.volumes.first().cloned().unwrap_or_default();
        Attachment {
            pid: process.pid,
            read_only: volume.read_only,
            uris: volume.uris,
            clients: volume.clients,
            health: volume.health,
        }
    }
}

/// What `--json` prints. Fields that the source of the information does not have are null.
#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    record: RecordDocument,
    /// Null: not served on this machine.
    attached: Option<Attachment>,
    epoch: u64,
    positions: Option<PositionsStatus>,
    live_bytes: u64,
    data_bytes: u64,
    object_bytes: u64,
    segments: u64,
    extents: u64,
    checkpoint_number: u64,
    /// Whether the last attachment stored everything before it ended; null while this machine
    /// serves the volume.
    clean: Option<bool>,
    cache: Option<CacheStatus>,
    /// Everything that the serving process reports about the volume.
    live: Option<VolumeStatus>,
    /// What this machine remembers of the volume, here or in other stores, and what contradicts
    /// that now.
    remarks: Vec<String>,
    elsewhere: Vec<OtherStore>,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let remarks = |end, id| seen::remarks(&context.paths, id, &address.store_url, end);
    let document = match control::served(&context.paths.state_folder()?, &address)? {
        Some((_, process)) => {
            // No comparison with the store here: it may be unreachable, and the server notes what
            // it has.
            let mut live = of_live(&address, process);
            if let Ok(id) = live.record.id.parse() {
                live.remarks = remarks(None, id);
                live.elsewhere = seen::elsewhere(&context.paths, id, &address.store_url);
            }
            live
        }
        None => {
            let (store, record) = wiring::find(&address)?;
            let rest = sawmill_volume::inspect::at_rest(&*store, &record)?;
            let born = RecordDocument {
                // The record has the size at creation; only checkpoints know of later ones
                // (decision 0016).
                size_bytes: rest.size_bytes,
                ..RecordDocument::new(&address.store_url, &record)
            };
            Document {
                record: born,
                attached: None,
                epoch: rest.epoch,
                positions: None,
                live_bytes: rest.live_bytes,
                data_bytes: rest.data_bytes,
                object_bytes: rest.object_bytes,
                segments: rest.segments,
                extents: rest.extents,
                checkpoint_number: rest.checkpoint_number,
                clean: Some(rest.clean),
                cache: None,
                live: None,
                remarks: remarks(Some((rest.epoch, rest.stored_sequence)), record.volume_id),
                elsewhere: seen::elsewhere(&context.paths, record.volume_id, &address.store_url),
            }
        }
    };
    if context.json {
        output::json(&document)?;
    } else {
        output::facts(&facts(&document))?;
    }
    Ok(Exit::Ok)
}

fn of_live(address: &VolumeAddress, mut process: ProcessStatus) -> Document {
    process
        .volumes
        .retain(|volume| volume.name == address.name && volume.store == address.store_url);
    let attached = Some(Attachment::new(&process));
    let cache = process.cache.take();
    let volume = process.volumes.into_iter().next().unwrap_or_default();
    let record = RecordDocument {
        name: volume.name.clone(),
        id: volume.id.clone(),
        store: volume.store.clone(),
        size_bytes: volume.size_bytes,
        block_bytes: volume.block_bytes,
        segment_bytes: volume.segment_bytes,
        flush: volume.flush.clone(),
        created_unix_ms: volume.created_unix_ms,
    };
    Document {
        record,
        attached,
        epoch: volume.epoch,
        // A reader accepts nothing, so its positions say nothing about safety.
        positions: (!volume.read_only).then_some(volume.positions),
        live_bytes: volume.live_bytes,
        data_bytes: volume.segment_data_bytes,
        object_bytes: volume.segment_object_bytes,
        segments: volume.segments,
        extents: volume.extents,
        checkpoint_number: volume.checkpoint_number,
        clean: None,
        cache,
        live: Some(volume),
        remarks: Vec::new(),
        elsewhere: Vec::new(),
    }
}

fn facts(document: &Document) -> Vec<(&'static str, String)> {
    let record = &document.record;
    let mut rows = vec![
        ("name", record.name.clone()),
        ("store", record.store.clone()),
        ("id", record.id.clone()),
        ("created", human_time(record.created_unix_ms)),
        ("size", human_size(record.size_bytes)),
        ("block size", human_size(u64::from(record.block_bytes))),
        ("segment size", human_size(u64::from(record.segment_bytes))),
        ("flush", record.flush.clone()),
        ("epoch", document.epoch.to_string()),
    ];
    rows.extend(attachment_facts(document));
    rows.extend(document.remarks.iter().map(|remark| ("mind", remark.clone())));
    if let Some(positions) = &document.positions {
        let behind = |position: u64| match positions.accepted.saturating_sub(position) {
            0 => human_count(position),
            lag => format!("{} ({} behind)", human_count(position), human_size(lag)),
        };
        rows.push(("accepted", human_count(positions.accepted)));
        rows.push(("logged", behind(positions.logged)));
        rows.push(("stored", behind(positions.stored)));
    }
    rows.push(("live data", human_size(document.live_bytes)));
    rows.push(("in the store", human_size(document.object_bytes)));
    rows.push(("segments", human_count(document.segments)));
    let unloaded = document.live.as_ref().map_or(0, |volume| volume.map_groups_unloaded);
    rows.push(("extents", extents_with(unloaded, document.extents)));
    rows.push(("checkpoint", document.checkpoint_number.to_string()));
    if let Some(volume) = document.live.as_ref().filter(|volume| !volume.read_only) {
        let unstored = human_size(volume.journal_unstored_bytes);
        rows.push((
            "journal",
            format!("{unstored} of {} not yet stored", human_size(volume.journal_bytes)),
        ));
        let stall = volume.stall.as_deref().filter(|_| volume.stalled_requests > 0);
        rows.extend(stall.map(|stall| {
            let lacks = match stall {
                _ if volume.slowed_for_garbage => {
                    "garbage is past its bound; they continue as it is collected".to_owned()
                }
                "staging" => "the journal's disk cannot keep up".to_owned(),
                "journal_records" => {
                    format!(
                        "{} records are not yet stored",
                        human_count(volume.journal_unstored_records)
                    )
                }
                "unstored_age" => {
                    "the oldest unstored write has reached --unstored-age-max".to_owned()
                }
                _ => "the journal is full of unstored writes".to_owned(),
            };
            ("", format!("{} writes wait: {lacks}", human_count(volume.stalled_requests)))
        }));
        rows.extend(volume.journal_path.as_ref().map(|path| ("", path.clone())));
    }
    if let Some(cache) = &document.cache {
        let lookup_count = cache.hits + cache.misses;
        let hits = (cache.hits * 100)
            .checked_div(lookup_count)
            .map_or_else(String::new, |percent| format!(", {percent} % hits"));
        rows.push(("read cache", format!("{} in it{hits}", human_size(cache.bytes))));
        rows.push(("", cache.path.clone()));
    }
    rows
}

/// How many there are, and how many groups of the map that has them are not loaded yet.
fn extents_with(unloaded: u64, extents: u64) -> String {
    match unloaded {
        0 => human_count(extents),
        groups => format!(
            "{} ({} groups of the map are not loaded yet)",
            human_count(extents),
            human_count(groups)
        ),
    }
}

fn attachment_facts(document: &Document) -> Vec<(&'static str, String)> {
    let Some(attached) = &document.attached else {
        let last = match document.clean {
            Some(true) if document.epoch > 0 => "the last attachment ended with everything stored",
            Some(true) => "never attached",
            _ => "the last attachment did not end cleanly, or is on another machine",
        };
        return vec![("attached", format!("not on this machine; {last}"))];
    };
    let how = if attached.read_only { "for reading" } else { "for writing" };
    let mut rows = vec![("attached", format!("here {how}, process {}", attached.pid))];
    rows.extend(attached.uris.iter().map(|uri| ("door", uri.clone())));
    match attached.clients.as_slice() {
        [] => rows.push(("clients", "none".to_owned())),
        clients => rows.extend(clients.iter().map(|client| ("client", client.clone()))),
    }
    let reason =
        attached.health.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    rows.push(("health", format!("{}{reason}", attached.health.state.replace('_', " "))));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_says_how_much_of_a_map_is_not_loaded() {
        assert_eq!(extents_with(0, 7000), "7,000");
        assert_eq!(extents_with(3, 7000), "7,000 (3 groups of the map are not loaded yet)");
    }
}

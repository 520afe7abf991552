//! `sawmill delete`: deletes a volume and all its objects, after a confirmation.
//!
//! Invariant: the volume's state folder, usually with the journal, goes only after the volume, so a
//! failed delete leaves it. Not here: in which order objects go, and what clones keep
//! (`sawmill_volume::delete`).

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};

use clap::Args;
use sawmill_volume::{DeleteReport, ErrorKind};

use crate::command::Context;
use crate::config::VolumeAddress;
use crate::{control, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::human_size;

/// Delete a volume with all its data.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Do not ask.
    #[arg(long)]
    yes: bool,
}

#[derive(serde::Serialize)]
struct Document<'a> {
    deleted: &'a str,
    store: &'a str,
    objects: u64,
    bytes: u64,
    /// Clones that still need the data. It is deleted with the last of them.
    needed_by: &'a [String],
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let store = wiring::open_store(&address.store_url)?;
    let record = match sawmill_volume::find(&*store, &address.name) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // An interrupted delete left something: there is nothing more to ask.
            let finished = sawmill_volume::finish_delete(&*store, &address.name)?;
            let id = finished.volume_id.to_string();
            let folder = context.paths.volume_folder(&id, &address.store_url)?;
            // A process that still serves it has its journal open there.
            if control::attached(&folder)?.is_none() {
                forget_state(&folder);
            }
            return report(context, &address, &finished.report);
        }
        record => record?,
    };
    let folder = context.paths.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
    // Before the question: nobody should agree to what is refused anyway.
    if let Some(served) = control::attached(&folder)? {
        return Err(Failure::new(
            Exit::InUse,
            format!("volume {} is served by process {}; stop that first", address.name, served.pid),
        ));
    }
    // A volume too damaged to have a known size can still be deleted.
    let newest = sawmill_volume::inspect::checkpoint(&*store, &record, None);
    let size_bytes = newest.map_or(record.size_bytes, |checkpoint| checkpoint.size_bytes);
    if !arguments.yes && !agreed(&address.name, &address.store_url, size_bytes)? {
        output::line("nothing was deleted")?;
        return Ok(Exit::Negative);
    }
    let deleted = sawmill_volume::delete(&*store, &address.name)?;
    // After the delete: if that fails, the journal may still hold writes of a living volume.
    forget_state(&folder);
    report(context, &address, &deleted)
}

fn report(context: &Context, address: &VolumeAddress, report: &DeleteReport) -> Result<Exit> {
    let document = Document {
        deleted: &address.name,
        store: &address.store_url,
        objects: report.objects,
        bytes: report.bytes,
        needed_by: &report.pinned_by,
    };
    if context.json {
        output::json(&document)?;
    } else {
        let bytes = human_size(report.bytes);
        if !report.pinned_by.is_empty() {
            let clones = report.pinned_by.join(", ");
            output::line(&format!(
                "deleted {}; its data stays until these clones no longer need it: {clones}",
                address.name
            ))?;
            return Ok(Exit::Ok);
        }
        output::line(&format!("deleted {} ({} objects, {bytes})", address.name, report.objects))?;
    }
    Ok(Exit::Ok)
}

fn agreed(name: &str, store: &str, size_bytes: u64) -> Result<bool> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(format!(
            "cannot ask before deleting {name}: there is no terminal; pass --yes"
        )));
    }
    let size = human_size(size_bytes);
    let prompt = write!(
        io::stderr(),
        "Delete {name} ({size}) in {store} with all its data? Type its name: "
    );
    prompt.map_err(|error| Failure::io("cannot ask", &error))?;
    let mut answer = String::new();
    io::stdin()
        .lock()
        .read_line(&mut answer)
        .map_err(|error| Failure::io("cannot read the answer", &error))?;
    Ok(answer.trim() == name)
}

/// Removes what this machine kept for the volume. Its journal is useless without the volume.
fn forget_state(folder: &std::path::Path) {
    match fs::remove_dir_all(folder) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!("cannot remove {}: {error}; remove it yourself", folder.display())
        }
    }
}

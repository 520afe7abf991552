//! `sawmill copy`: copies a volume to another one, in the same store or elsewhere. Not here: the
//! transfer itself (`transfer`).

use clap::Args;
use sawmill_device::BlockDevice;
use sawmill_volume::CreateOptions;

use super::import::{ExistingData, ImportJob, fill};
use crate::attach::{AttachToWrite, CutOption, open_cut};
use crate::command::Context;
use crate::transfer::ends::VolumeEnd;
use sawmill_console::exit::{Exit, Failure, Result};

/// Copy a volume to a new one, in this store or another.
///
/// If this machine serves the volume, everything accepted so far is stored first, and the copy has
/// the state at the start of the command. Resumable: rerun to continue. --no-fencing, --journal,
/// --journal-bytes and --staging are about DEST.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// The copy: a name in the default store, or a URL ending in the name, s3://bucket/prefix/new.
    #[arg(value_name = "DEST")]
    destination: String,

    #[command(flatten)]
    cut: CutOption,

    #[command(flatten)]
    again: ExistingData,

    #[command(flatten)]
    attach: AttachToWrite,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let from = context.paths.resolve(&arguments.volume)?;
    let to = context.paths.resolve(&arguments.destination)?;
    if from == to {
        return Err(Failure::usage(format!("{} cannot be copied onto itself", from.name)));
    }
    let (volume, record) = open_cut(&context.paths, &from, arguments.cut)?;
    let size_bytes = volume.geometry().size_bytes;
    let source = VolumeEnd::new(volume, &from.name);
    let filled = fill(
        context,
        &ImportJob {
            address: &to,
            source: &source,
            // With the id: another volume may get the name before the copy is resumed.
            far_name: format!("{}/{} ({})", from.store_url, from.name, record.volume_id),
            far_state: format!("the cut at position {}", source.position()),
            create: CreateOptions {
                size_bytes,
                block_bytes: record.block_bytes,
                segment_bytes: record.segment_bytes,
                flush: record.flush_mode,
                retention_s: 0,
                no_fencing: arguments.attach.fencing.no_fencing,
            },
            attach: &arguments.attach,
            again: &arguments.again,
            what: format!("copying {}", from.name),
        },
    )?;
    filled.report(context, &from.name, &to)?;
    Ok(Exit::Ok)
}

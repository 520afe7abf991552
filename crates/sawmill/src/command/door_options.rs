//! The options of a command that request doors.
//!
//! Invariant: every kind of door has its options here, in the order of the kinds.
//!
//! Not here: the doors, and their text form (`sawmill_doors`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use sawmill_console::exit::Result;
use sawmill_console::units::{exact_size, parse_size};
use sawmill_doors::listening::parse_listen;
use sawmill_doors::{DoorPlan, NbdShare};
use sawmill_frontend::nbd::{Budget, Listen};
use sawmill_sys::Lookers;

use crate::busy_poll::BusyPoll;

/// The doors that a command opens. Any combination may serve one volume.
#[derive(Args)]
#[command(next_help_heading = "Doors")]
pub(crate) struct DoorOptions {
    /// An NBD server at unix:/path or tcp:127.0.0.1:10809 (port 0 takes a free one).
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    nbd: Option<Listen>,

    /// Allow --nbd on an address that other machines can reach. There is no encryption and no
    /// password.
    #[arg(long)]
    insecure_listen: bool,

    /// A device node /dev/ublkbID (Linux 6.5 and later, module ublk_drv); --ublk=ID selects the
    /// number.
    #[arg(
        long, value_name = "ID", num_args = 0..=1, require_equals = true,
        default_missing_value = "any",
        value_parser = parse_id
    )]
    ublk: Option<DeviceId>,

    /// With --ublk: a device that an unprivileged user may serve. It ends with its server, and its
    /// users then get errors: no restart, no hand-off.
    #[arg(long, requires = "ublk")]
    ublk_unprivileged: bool,

    /// A vhost-user-blk socket for QEMU and Cloud Hypervisor; with several volumes, a folder of
    /// sockets.
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<PathBuf>,

    /// A file in this folder, through FUSE; with several volumes, one subfolder for each.
    #[arg(long, value_name = "FOLDER")]
    fuse: Option<PathBuf>,

    /// With --fuse: also a loop device on that file, /dev/loopN.
    #[arg(long = "loop", requires = "fuse")]
    with_loop: bool,

    /// A device node /dev/buseID of our own kernel module (see `sawmill help buse-module`);
    /// --buse=ID selects the number. The kernel completes writes before this server has them.
    #[arg(
        long, value_name = "ID", num_args = 0..=1, require_equals = true,
        default_missing_value = "any",
        value_parser = parse_id
    )]
    buse: Option<DeviceId>,
}

/// The number in `--ublk` and `--buse`.
#[derive(Clone, Copy, Debug)]
struct DeviceId(Option<u32>);

fn parse_id(text: &str) -> Result<DeviceId, String> {
    match text {
        "any" => Ok(DeviceId(None)),
        number => match number.parse() {
            Ok(id) => Ok(DeviceId(Some(id))),
            Err(_) => Err(format!("'{text}' is no number of a device: write one, as in --ublk=3")),
        },
    }
}

impl DoorOptions {
    /// The requested doors, in the order of the kinds.
    pub(crate) fn plans(&self) -> Vec<DoorPlan> {
        let nbd = match self.insecure_listen {
            true => DoorPlan::nbd_insecure,
            false => DoorPlan::nbd,
        };
        let ublk = match self.ublk_unprivileged {
            true => DoorPlan::ublk_unprivileged,
            false => DoorPlan::ublk,
        };
        let fuse = if self.with_loop { DoorPlan::fuse_and_loop } else { DoorPlan::fuse };
        let nbd = self.nbd.clone().map(nbd);
        let ublk = self.ublk.map(|DeviceId(id)| ublk(id));
        let vhost_user = self.vhost_user.as_deref().map(DoorPlan::vhost_user);
        let fuse = self.fuse.as_deref().map(fuse);
        let buse = self.buse.map(|DeviceId(id)| DoorPlan::buse(id));
        [nbd, ublk, vhost_user, fuse, buse].into_iter().flatten().collect()
    }

    /// The requested doors; without any, an NBD server at this Unix socket.
    pub(crate) fn plans_or(&self, socket: &Path) -> Vec<DoorPlan> {
        let mut plans = self.plans();
        if plans.is_empty() {
            plans.push(DoorPlan::nbd(Listen::Unix(socket.to_owned())));
        }
        plans
    }
}

/// What all NBD doors of a process share, as the user says it.
#[derive(Args)]
#[command(next_help_heading = "Doors")]
pub(crate) struct NbdShareOptions {
    /// Memory for the requests and replies of all NBD connections of this process, at least 160M.
    /// When it is full, clients wait; a client that does not read its replies is disconnected when
    /// others wait.
    #[arg(long, value_name = "SIZE", value_parser = parse_budget,
          default_value = exact_size(Budget::BYTES_DEFAULT))]
    nbd_memory_max: Budget,

    /// Whether connections look for their clients' next requests, for up to 50 us, before they
    /// sleep: auto (as many at once as half of the cores, while requests come one by one at short
    /// intervals and no other thread wants the core; not where one core is allowed, or processor
    /// time is limited, at the start) or never.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = BusyPoll::Auto)]
    nbd_busy_poll: BusyPoll,
}

impl NbdShareOptions {
    pub(crate) fn share(&self) -> NbdShare {
        NbdShare {
            budget: self.nbd_memory_max.clone(),
            lookers: Arc::new(Lookers::new(self.nbd_busy_poll.lookers_max())),
        }
    }
}

fn parse_budget(text: &str) -> Result<Budget, String> {
    Budget::new(parse_size(text)?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_doors_is_a_size_that_is_large_enough() {
        assert_eq!(parse_budget("160M").unwrap().in_use().bytes_max, 160 << 20);
        for text in ["", "much", "0", "159M"] {
            assert!(parse_budget(text).is_err(), "{text}");
        }
        assert!(parse_budget("1M").unwrap_err().contains("160 MiB"));
    }
}

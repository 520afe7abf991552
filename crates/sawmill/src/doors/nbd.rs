//! NBD servers: one for all volumes of a process, with an export for each.
//!
//! Invariant: all servers of a process share one budget of memory. Not here: the protocol.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{ArgMatches, Args, FromArgMatches};
use sawmill_device::{BlockDevice, Geometry};
use sawmill_frontend::DoorPiece;
use sawmill_frontend::nbd::{Budget, Export, Listen, NbdOptions, NbdServer};
use sawmill_sys::Lookers;

use super::kind::{DoorInstance, DoorKind, PlanResult, RequestedDoor, Trial, absolute};
use super::{DoorContext, DoorResources, DoorVolume};
use crate::busy_poll::BusyPoll;
use crate::folders::make_parent;
use crate::listening::{check_free, resolve};
use crate::nbd_device::NbdDevice;
use sawmill_console::exit::{Failure, Result};
use sawmill_console::units::{exact_size, parse_size};

pub(super) const KIND: DoorKind = DoorKind {
    keywords: &["nbd", "nbd-insecure"],
    forms: &["nbd=ADDRESS"],
    examples: &["nbd=unix:/path", "nbd=tcp:127.0.0.1:10809"],
    parse,
    add_options: Options::augment_args,
    requested,
    trials: &[Trial {
        name: "nbd",
        help: "An NBD socket with an NBD client",
        line: |folder| format!("nbd=unix:{}", folder.join("nbd.sock").display()),
        connect,
        kernel_checks: false,
    }],
};

#[derive(Args)]
#[group(skip)]
struct Options {
    /// An NBD server at unix:/path or tcp:127.0.0.1:10809 (port 0 takes a free one).
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    nbd: Option<Listen>,

    /// Allow --nbd on an address that other machines can reach. There is no encryption and no
    /// password.
    #[arg(long)]
    insecure_listen: bool,
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

/// What all NBD doors of a process share.
#[derive(Clone, Default)]
pub(crate) struct NbdShare {
    pub(crate) budget: Budget,
    /// See [`NbdOptions::lookers`].
    lookers: Arc<Lookers>,
}

fn parse_budget(text: &str) -> Result<Budget, String> {
    Budget::new(parse_size(text)?).map_err(|error| error.to_string())
}

fn parse_listen(text: &str) -> Result<Listen> {
    match text.split_once(':') {
        Some(("unix", path)) if !path.is_empty() => Ok(Listen::Unix(PathBuf::from(path))),
        Some(("tcp", address)) => resolve(address).map(Listen::Tcp),
        _ => Err(Failure::usage(format!(
            "'{text}' is not an address; write unix:/path/of/socket or tcp:127.0.0.1:10809"
        ))),
    }
}

fn requested(matches: &ArgMatches) -> PlanResult {
    let Options { nbd, insecure_listen } = Options::from_arg_matches(matches)?;
    Ok(nbd.map(|listen| NbdPlan::boxed(listen, insecure_listen)))
}

fn parse(keyword: &str, value: &str) -> Result<Box<dyn RequestedDoor>> {
    let listen = parse_listen(value)?;
    Ok(NbdPlan::boxed(listen, keyword == "nbd-insecure"))
}

/// An NBD server at this Unix socket: what a command opens if the user requests no door.
pub(super) fn at_socket(path: &Path) -> Box<dyn RequestedDoor> {
    NbdPlan::boxed(Listen::Unix(path.to_owned()), false)
}

/// `nbd=unix:/path`, `nbd=tcp:127.0.0.1:10809`.
struct NbdPlan {
    listen: Listen,
    /// `nbd-insecure=...`: also where other machines can connect.
    insecure: bool,
}

impl NbdPlan {
    fn boxed(listen: Listen, insecure: bool) -> Box<dyn RequestedDoor> {
        let listen = match listen {
            // The text form goes to processes that may run in another folder.
            Listen::Unix(path) => Listen::Unix(absolute(&path)),
            tcp => tcp,
        };
        Box::new(NbdPlan { listen, insecure })
    }

    fn options(&self, shared: &DoorResources) -> NbdOptions {
        NbdOptions {
            insecure_listen: self.insecure,
            budget: shared.nbd.budget.clone(),
            lookers: shared.nbd.lookers.clone(),
            ..NbdOptions::new(self.listen.clone())
        }
    }
}

impl fmt::Display for NbdPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keyword = if self.insecure { "nbd-insecure" } else { "nbd" };
        let family = if matches!(self.listen, Listen::Unix(_)) { "unix" } else { "tcp" };
        write!(f, "{keyword}={family}:{}", self.listen)
    }
}

impl RequestedDoor for NbdPlan {
    fn check(&self, _volumes: usize) -> Result<()> {
        Ok(())
    }

    fn check_free(&self) -> Result<()> {
        check_free(&self.listen, "--nbd")
    }

    // One server has an export for each volume, so there is nothing to divide.
    fn of_volume(&self, _name: &str) -> Option<Box<dyn RequestedDoor>> {
        None
    }

    /// A server at any port keeps the one that its clients know.
    fn reopened_at(&self, address: &str) -> Option<Box<dyn RequestedDoor>> {
        let any = matches!(&self.listen, Listen::Tcp(listen) if listen.port() == 0);
        let (bound, _) = address.strip_prefix("nbd://").filter(|_| any)?.split_once('/')?;
        Some(NbdPlan::boxed(Listen::Tcp(bound.parse().ok()?), self.insecure))
    }

    fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance> {
        if let Listen::Unix(path) = &self.listen {
            make_parent(path)?;
        }
        let server = NbdServer::start(self.options(context.shared))?;
        for volume in context.volumes {
            server.add_export(export(volume))?;
        }
        Ok(DoorInstance::new(server))
    }

    fn take_over(
        &self,
        pieces: Vec<DoorPiece>,
        context: &DoorContext<'_>,
    ) -> sawmill_device::Result<DoorInstance> {
        let exports = context.volumes.iter().map(export).collect();
        NbdServer::take_over(self.options(context.shared), exports, pieces).map(DoorInstance::new)
    }
}

fn export(volume: &DoorVolume) -> Export {
    let DoorVolume { name, description, device, .. } = volume.clone();
    Export { name, description, device }
}

fn connect(uri: &str, behind: &Geometry) -> Result<Arc<dyn BlockDevice>> {
    Ok(Arc::new(NbdDevice::connect(uri, behind)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_door_are_read_or_refused_with_an_example() {
        let read = |text| parse_listen(text).unwrap();
        assert_eq!(read("unix:/run/x.sock"), Listen::Unix("/run/x.sock".into()));
        assert_eq!(read("tcp:127.0.0.1:0"), Listen::Tcp("127.0.0.1:0".parse().unwrap()));
        assert_eq!(read("tcp:[::1]:10809"), Listen::Tcp("[::1]:10809".parse().unwrap()));
        for text in [
            "",
            "unix:",
            "tcp:",
            "tcp:127.0.0.1",
            "127.0.0.1:10809",
            "/run/x.sock",
            "tcp:1.2.3.4:99999",
        ] {
            let error = parse_listen(text).unwrap_err().to_string();
            assert!(error.contains("10809"), "{text}: {error}");
        }
    }

    #[test]
    fn all_doors_of_a_process_share_who_may_look_for_requests() {
        let lookers = Arc::new(Lookers::new(1));
        let nbd = NbdShare { lookers: lookers.clone(), ..NbdShare::default() };
        let shared = DoorResources { nbd, ..DoorResources::default() };
        let plan = NbdPlan { listen: Listen::Unix("/run/x".into()), insecure: false };
        assert!(Arc::ptr_eq(&plan.options(&shared).lookers, &lookers));
        assert!(plan.options(&DoorResources::default()).lookers.enter().is_none());
    }

    #[test]
    fn memory_of_the_doors_is_a_size_that_is_large_enough() {
        assert_eq!(parse_budget("160M").unwrap().in_use().bytes_max, 160 << 20);
        for text in ["", "much", "0", "159M"] {
            assert!(parse_budget(text).is_err(), "{text}");
        }
        assert!(parse_budget("1M").unwrap_err().contains("160 MiB"));
    }
}

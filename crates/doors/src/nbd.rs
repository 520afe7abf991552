//! NBD servers: one for all volumes of a process, with an export for each.
//!
//! Invariant: all servers of a process share one budget of memory. Not here: the protocol.

use std::fmt;
use std::sync::Arc;

use sawmill_device::Result;
use sawmill_frontend::DoorPiece;
use sawmill_frontend::nbd::{Budget, Export, Listen, NbdOptions, NbdServer};
use sawmill_sys::Lookers;

use super::kind::{DoorInstance, DoorKind, RequestedDoor, absolute, make_parent};
use super::listening::{check_free, parse_listen};
use super::{DoorContext, DoorResources, DoorVolume};

pub(super) const KIND: DoorKind = DoorKind {
    keywords: &["nbd", "nbd-insecure"],
    forms: &["nbd=ADDRESS"],
    examples: &["nbd=unix:/path", "nbd=tcp:127.0.0.1:10809"],
    parse,
};

/// What all NBD doors of a process share.
#[derive(Clone, Default)]
pub struct NbdShare {
    /// The memory of their requests and replies.
    pub budget: Budget,
    /// See [`NbdOptions::lookers`].
    pub lookers: Arc<Lookers>,
}

fn parse(keyword: &str, value: &str) -> Result<Box<dyn RequestedDoor>> {
    let plan = NbdPlan::new(parse_listen(value)?);
    Ok(Box::new(if keyword == "nbd-insecure" { plan.insecure() } else { plan }))
}

/// `nbd=unix:/path`, `nbd=tcp:127.0.0.1:10809`.
pub(super) struct NbdPlan {
    listen: Listen,
    /// `nbd-insecure=...`: also where other machines can connect.
    insecure: bool,
}

impl NbdPlan {
    pub(super) fn new(listen: Listen) -> Self {
        let listen = match listen {
            // The text form goes to processes that may run in another folder.
            Listen::Unix(path) => Listen::Unix(absolute(&path)),
            tcp => tcp,
        };
        NbdPlan { listen, insecure: false }
    }

    pub(super) fn insecure(self) -> Self {
        NbdPlan { insecure: true, ..self }
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
        check_free(&self.listen, "the NBD door (--nbd)")
    }

    // One server has an export for each volume, so there is nothing to divide.
    fn of_volume(&self, _name: &str) -> Option<Box<dyn RequestedDoor>> {
        None
    }

    /// A server at any port keeps the one that its clients know.
    fn reopened_at(&self, address: &str) -> Option<Box<dyn RequestedDoor>> {
        let any = matches!(&self.listen, Listen::Tcp(listen) if listen.port() == 0);
        let (bound, _) = address.strip_prefix("nbd://").filter(|_| any)?.split_once('/')?;
        let listen = Listen::Tcp(bound.parse().ok()?);
        Some(Box::new(NbdPlan { listen, insecure: self.insecure }))
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

    fn take_over(&self, pieces: Vec<DoorPiece>, context: &DoorContext<'_>) -> Result<DoorInstance> {
        let exports = context.volumes.iter().map(export).collect();
        NbdServer::take_over(self.options(context.shared), exports, pieces).map(DoorInstance::new)
    }
}

fn export(volume: &DoorVolume) -> Export {
    let DoorVolume { name, description, device, .. } = volume.clone();
    Export { name, description, device }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_doors_of_a_process_share_who_may_look_for_requests() {
        let lookers = Arc::new(Lookers::new(1));
        let nbd = NbdShare { lookers: lookers.clone(), ..NbdShare::default() };
        let shared = DoorResources { nbd, ..DoorResources::default() };
        let plan = NbdPlan { listen: Listen::Unix("/run/x".into()), insecure: false };
        assert!(Arc::ptr_eq(&plan.options(&shared).lookers, &lookers));
        assert!(plan.options(&DoorResources::default()).lookers.enter().is_none());
    }
}

//! The exports of a target, and the connections that have them open.
//!
//! Invariants: an export that is open without *shared* has one writer. A fenced initiator gets
//! `Fenced` from then on, and none of its requests is in flight when the next initiator learns that
//! the export is open. An initiator that returns names its reservation: if that is over, none of
//! its requests is accepted, in this process and in later ones.
//!
//! Not here: connections (`served`), what persists of an export (`standing`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use sawmill_device::{Error, ErrorKind, Outcome, Result};
use sawmill_format::link::control::{
    self, OPEN_READ_ONLY, OPEN_SHARED, OPEN_TAKE_OVER, OpenAnswer,
};

use super::machines::Rights;
use super::standing::{Standing, StandingStore};
use crate::PackedDevice;

/// A device with a name.
pub(super) struct Export {
    pub(super) device: Arc<dyn PackedDevice>,
    /// The volatile cache identity: it changes when written and unflushed data is lost.
    cache_identity: [u8; 16],
    /// None: its standing does not outlive this process.
    keep: Option<Box<dyn StandingStore>>,
    /// Held while the standing changes and is made durable. Requests never take it, and nothing
    /// takes it under `state`.
    changing: Mutex<()>,
    state: Mutex<AccessState>,
}

struct AccessState {
    standing: Standing,
    /// No initiator has learned of the reservation yet.
    unclaimed: bool,
    /// An initiator has learned the current volatile cache identity.
    is_known: bool,
    users: Vec<ExportUser>,
}

struct ExportUser {
    connection: u64,
    /// The run of the initiator.
    instance: [u8; 16],
    flags: u8,
    /// The key of its machine allows reading only: it neither ends a reservation nor keeps its
    /// holder out.
    reads_only: bool,
    is_fenced: bool,
    /// We ended its connection, or it replaced the connection: its access is kept until then.
    away_until_ns: Option<u64>,
    request_count: Arc<AtomicUsize>,
}

/// A request to open an export.
#[derive(Clone, Copy, Default)]
pub(super) struct OpenRequest {
    pub(super) instance: [u8; 16],
    pub(super) flags: u8,
    /// The reservation that the initiator had before; 0: it comes for the first time.
    pub(super) reservation: u64,
    pub(super) reads_only: bool,
    pub(super) now_ns: u64,
}

/// What a request does to the export.
#[derive(Clone, Copy, Default)]
pub(super) struct Effects {
    pub(super) changes: bool,
    pub(super) syncs: bool,
}

/// A user's request at a device: the user counts as busy until this is dropped.
pub(super) struct RequestGuard {
    export: Arc<Export>,
    count: Arc<AtomicUsize>,
    syncs: bool,
}

impl RequestGuard {
    /// The device answered: a failed sync is recorded before its user learns of it.
    pub(super) fn ended(self, outcome: &Outcome) {
        use ErrorKind::{Closed, Fenced, Invalid, ReadOnly};
        let is_refusal =
            |error: &Error| matches!(error.kind(), Closed | Fenced | Invalid | ReadOnly);
        if self.syncs && outcome.as_ref().is_err_and(|error| !is_refusal(error)) {
            self.export.sync_failed();
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// All exports of a target.
#[derive(Default)]
pub(super) struct Exports(Mutex<BTreeMap<String, Arc<Export>>>);

impl Exports {
    pub(super) fn add(
        &self,
        name: &str,
        device: Arc<dyn PackedDevice>,
        cache_identity: [u8; 16],
        lasting: Option<(Standing, Box<dyn StandingStore>)>,
    ) -> Result<()> {
        if name.is_empty() || name.len() > control::EXPORT_BYTES_MAX {
            let text = format!("an export's name has 1 to {} bytes", control::EXPORT_BYTES_MAX);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut exports = self.0.lock();
        if exports.contains_key(name) {
            return Err(Error::new(
                ErrorKind::Exists,
                format!("{name}: this export exists already"),
            ));
        }
        let (standing, keep) =
            lasting.map_or((Standing::default(), None), |(standing, keep)| (standing, Some(keep)));
        let state = Mutex::new(AccessState {
            standing,
            unclaimed: false,
            is_known: false,
            users: Vec::new(),
        });
        exports.insert(
            name.to_owned(),
            Arc::new(Export { device, cache_identity, keep, changing: Mutex::default(), state }),
        );
        Ok(())
    }

    pub(super) fn find(&self, name: &str, rights: &Rights) -> Result<Arc<Export>> {
        let exports = self.0.lock();
        exports.get(name).cloned().ok_or_else(|| {
            let visible_names = exports.keys().filter(|name| rights.shows(name));
            let all: Vec<&str> = visible_names.map(String::as_str).collect();
            let text = format!("there is no export {name:?}; the target has: {}", all.join(", "));
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Names and sizes, as many as fit into `bytes_max` bytes.
    pub(super) fn list(&self, bytes_max: usize, rights: &Rights) -> Vec<u8> {
        let exports = self.0.lock();
        let visible_exports = exports.iter().filter(|(name, _)| rights.shows(name));
        let entries =
            visible_exports.map(|(name, export)| (&name[..], export.device.geometry().size_bytes));
        control::list_exports(bytes_max, entries)
    }

    /// A connection is gone. What it had open stays known until no device has requests of it: see
    /// [`Export::admit`]. If the initiator is expected back until some time, its access is kept
    /// until then.
    pub(super) fn forget(&self, connection: u64, back_until_ns: Option<u64>) {
        for export in self.0.lock().values() {
            let mut state = export.state.lock();
            for user in state.users.iter_mut().filter(|user| user.connection == connection) {
                user.away_until_ns = user.away_until_ns.or(back_until_ns);
                user.is_fenced |= back_until_ns.is_none();
            }
        }
    }
}

/// Whether these open flags demand that no other initiator has the export.
fn alone(flags: u8) -> bool {
    flags & (OPEN_SHARED | OPEN_READ_ONLY) == 0
}

impl Export {
    /// Admits `connection`, or returns the error that says which initiator is in the way. `random`
    /// makes reservations.
    pub(super) fn admit(
        &self,
        connection: u64,
        request: OpenRequest,
        random: impl FnOnce() -> u64,
    ) -> Result<()> {
        let OpenRequest { instance, flags, reservation, reads_only, now_ns } = request;
        let _guard = self.changing.lock();
        let mut locked = self.state.lock();
        let state = &mut *locked;
        if reservation != 0 {
            self.check_or_adopt_reservation(state, &request)?;
        }
        for user in &mut state.users {
            // An initiator with the reservation was expected back. So was one that never learned
            // the reservation, because the answer to its open was lost with its connection.
            let is_back = reservation != 0 || user.instance == instance;
            user.is_fenced |= user.away_until_ns.is_some_and(|until| is_back || now_ns >= until);
        }
        let makes_room = |user: &ExportUser| user.reads_only && !reads_only && alone(flags);
        let others = |user: &ExportUser| {
            user.connection != connection && !user.is_fenced && (alone(flags) || alone(user.flags))
        };
        let blocks = |user: &ExportUser| others(user) && !makes_room(user);
        if state.users.iter().any(blocks) && (flags & OPEN_TAKE_OVER == 0 || reservation != 0) {
            let text = "export in use by another initiator";
            return Err(Error::new(ErrorKind::InUse, text));
        }
        let is_reserved_by_other =
            reads_only && state.standing.reservation != 0 && !state.standing.shared;
        if reservation == 0
            && !is_reserved_by_other
            && !state.continues_reservation(connection, flags)
        {
            let standing =
                Standing { reservation: random().max(1), shared: !alone(flags), ..state.standing };
            // Requests need the state, and the disk may be slow.
            MutexGuard::unlocked(&mut locked, || self.make_durable(&standing))?;
            (locked.standing, locked.unclaimed) = (standing, true);
        }
        let state = &mut *locked;
        state.users.iter_mut().filter(|user| others(user)).for_each(|user| user.is_fenced = true);
        let busy = |user: &ExportUser| {
            user.is_fenced && user.connection != connection && user.has_requests()
        };
        if state.users.iter().any(busy) {
            let text = "requests of the previous initiator are still in flight; try again";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        state.unclaimed = false;
        state.users.retain(|user| !user.is_fenced);
        match state.users.iter_mut().find(|user| user.connection == connection) {
            // Opened twice: it gets the stronger access of both.
            Some(user) if !alone(user.flags) && flags & OPEN_READ_ONLY == 0 => user.flags = flags,
            Some(_) => {}
            None => {
                let (is_fenced, away_until_ns, request_count) = (false, None, Arc::default());
                state.users.push(ExportUser {
                    connection,
                    instance,
                    flags,
                    reads_only,
                    is_fenced,
                    away_until_ns,
                    request_count,
                });
            }
        }
        Ok(())
    }

    /// Fails if the reservation of `request` is over. An export that has none, and whose standing
    /// does not outlive a process, adopts the request's.
    fn check_or_adopt_reservation(
        &self,
        state: &mut AccessState,
        request: &OpenRequest,
    ) -> Result<()> {
        let OpenRequest { reservation, flags, .. } = *request;
        if state.standing.reservation == 0 && self.keep.is_none() {
            if request.reads_only {
                return Ok(());
            }
            // Data written before this process started is gone with the previous process, so there
            // is nothing to protect.
            (state.standing.reservation, state.standing.shared) = (reservation, !alone(flags));
        }
        if state.standing.reservation == reservation {
            return Ok(());
        }
        let text = "reservation conflict: another initiator took over the export, or the target \
                    cannot verify the reservation; attach again";
        Err(Error::new(ErrorKind::Fenced, text))
    }

    /// When this returns, no write of an initiator that was admitted before is accepted any more,
    /// not even after a restart.
    fn make_durable(&self, standing: &Standing) -> Result<()> {
        self.keep.as_ref().map_or(Ok(()), |keep| keep.keep(standing))
    }

    /// A request of `connection` goes to the device, if the connection may still use and change the
    /// export.
    pub(super) fn begin(
        self: &Arc<Self>,
        connection: u64,
        effects: Effects,
    ) -> Result<RequestGuard> {
        let state = self.state.lock();
        let is_own = |user: &&ExportUser| {
            user.connection == connection && !user.is_fenced && user.away_until_ns.is_none()
        };
        let user = state.users.iter().find(is_own);
        let user = user.ok_or_else(|| {
            Error::new(ErrorKind::Fenced, "another initiator has taken over the export")
        })?;
        if effects.changes && user.flags & OPEN_READ_ONLY != 0 {
            return Err(Error::new(ErrorKind::ReadOnly, "the export was opened read-only"));
        }
        user.request_count.fetch_add(1, Ordering::SeqCst);
        let (export, count) = (Arc::clone(self), Arc::clone(&user.request_count));
        Ok(RequestGuard { export, count, syncs: effects.syncs })
    }

    /// `connection` closes the export.
    pub(super) fn leave(&self, connection: u64) -> Result<()> {
        let mut state = self.state.lock();
        let own = |user: &ExportUser| user.connection == connection && !user.is_fenced;
        if state.users.iter().any(|user| own(user) && user.has_requests()) {
            return Err(Error::new(ErrorKind::Invalid, "commands for this export are in flight"));
        }
        state.users.retain(|user| !own(user));
        Ok(())
    }

    /// Records that unflushed writes may be lost: the next sync, perhaps of another process, would
    /// not report that.
    fn sync_failed(&self) {
        let _guard = self.changing.lock();
        let standing = {
            let mut state = self.state.lock();
            if !std::mem::take(&mut state.is_known) {
                // Initiators that attach later learn of another cache identity anyway.
                return;
            }
            state.standing.failed_syncs += 1;
            state.standing
        };
        if let Err(error) = self.make_durable(&standing) {
            tracing::error!(
                "link: a sync failed and could not be recorded; the next target will not know of \
                it: {error}"
            );
        }
    }

    /// The answer to an open.
    pub(super) fn opened(&self, export: u8) -> OpenAnswer {
        let geometry = self.device.geometry();
        let standing = {
            let mut state = self.state.lock();
            state.is_known = true;
            state.standing
        };
        OpenAnswer {
            export,
            size_bytes: geometry.size_bytes,
            block_bytes: geometry.block_bytes,
            preferred_bytes: geometry.preferred_bytes,
            request_bytes_max: geometry.request_bytes_max,
            read_only: geometry.read_only,
            shared_cache: geometry.shared_cache,
            discard: geometry.operations.discard,
            write_zeroes: geometry.operations.write_zeroes,
            allocation: geometry.operations.allocation,
            reservation: standing.reservation,
            cache_identity: standing.cache_identity(self.cache_identity),
        }
    }
}

impl AccessState {
    /// Whether an open with these flags continues the existing reservation.
    fn continues_reservation(&self, connection: u64, flags: u8) -> bool {
        let Standing { reservation, shared, .. } = self.standing;
        let own = self.users.iter().find(|user| user.connection == connection && !user.is_fenced);
        reservation != 0
            && match alone(flags) {
                true => (self.unclaimed && !shared) || own.is_some_and(|user| alone(user.flags)),
                false => shared || own.is_some(),
            }
    }
}

impl ExportUser {
    fn has_requests(&self) -> bool {
        self.request_count.load(Ordering::SeqCst) > 0
    }
}

#[cfg(test)]
mod tests;

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
    state: Mutex<State>,
}

struct State {
    standing: Standing,
    /// No initiator has learned of the reservation yet.
    unclaimed: bool,
    /// An initiator has learned the current volatile cache identity.
    is_known: bool,
    users: Vec<User>,
}

struct User {
    connection: u64,
    /// The run of the initiator.
    instance: [u8; 16],
    flags: u8,
    /// The key of its machine allows reading only: it neither ends a reservation nor keeps its
    /// holder out.
    guest: bool,
    cut: bool,
    /// We ended its connection, or it replaced the connection: its place is kept until then.
    away_until_ns: Option<u64>,
    at_work: Arc<AtomicUsize>,
}

/// A request to open an export.
#[derive(Clone, Copy, Default)]
pub(super) struct Claim {
    pub(super) instance: [u8; 16],
    pub(super) flags: u8,
    /// The reservation that the initiator had before; 0: it comes for the first time.
    pub(super) reservation: u64,
    pub(super) guest: bool,
    pub(super) now_ns: u64,
}

/// What a request does to the export.
#[derive(Clone, Copy, Default)]
pub(super) struct Effects {
    pub(super) changes: bool,
    pub(super) syncs: bool,
}

/// A user's request at a device: the user counts as busy until this is dropped.
pub(super) struct AtWork {
    export: Arc<Export>,
    count: Arc<AtomicUsize>,
    syncs: bool,
}

impl AtWork {
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

impl Drop for AtWork {
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
        let state =
            Mutex::new(State { standing, unclaimed: false, is_known: false, users: Vec::new() });
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
    /// [`Export::claim`]. If the initiator is expected back until some time, its place is kept
    /// until then.
    pub(super) fn forget(&self, connection: u64, back_until_ns: Option<u64>) {
        for export in self.0.lock().values() {
            let mut state = export.state.lock();
            for user in state.users.iter_mut().filter(|user| user.connection == connection) {
                user.away_until_ns = user.away_until_ns.or(back_until_ns);
                user.cut |= back_until_ns.is_none();
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
    pub(super) fn claim(
        &self,
        connection: u64,
        claim: Claim,
        random: impl FnOnce() -> u64,
    ) -> Result<()> {
        let Claim { instance, flags, reservation, guest, now_ns } = claim;
        let _one_at_a_time = self.changing.lock();
        let mut locked = self.state.lock();
        let state = &mut *locked;
        if reservation != 0 {
            self.lasts(state, reservation, flags, guest)?;
        }
        for user in &mut state.users {
            // An initiator with the reservation was expected back. So was one that never learned
            // the reservation, because the answer to its open was lost with its connection.
            let is_back = reservation != 0 || user.instance == instance;
            user.cut |= user.away_until_ns.is_some_and(|until| is_back || now_ns >= until);
        }
        let makes_room = |user: &User| user.guest && !guest && alone(flags);
        let others = |user: &User| {
            user.connection != connection && !user.cut && (alone(flags) || alone(user.flags))
        };
        let is_in_the_way = |user: &User| others(user) && !makes_room(user);
        if state.users.iter().any(is_in_the_way)
            && (flags & OPEN_TAKE_OVER == 0 || reservation != 0)
        {
            let text = "export in use by another initiator";
            return Err(Error::new(ErrorKind::InUse, text));
        }
        let is_anothers = guest && state.standing.reservation != 0 && !state.standing.shared;
        if reservation == 0 && !is_anothers && !state.goes_on(connection, flags) {
            let standing =
                Standing { reservation: random().max(1), shared: !alone(flags), ..state.standing };
            // Requests need the state, and the disk may be slow.
            MutexGuard::unlocked(&mut locked, || self.make_durable(&standing))?;
            (locked.standing, locked.unclaimed) = (standing, true);
        }
        let state = &mut *locked;
        state.users.iter_mut().filter(|user| others(user)).for_each(|user| user.cut = true);
        let busy = |user: &User| user.cut && user.connection != connection && user.is_at_work();
        if state.users.iter().any(busy) {
            let text = "requests of the previous initiator are still in flight; try again";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        state.unclaimed = false;
        state.users.retain(|user| !user.cut);
        match state.users.iter_mut().find(|user| user.connection == connection) {
            // Opened twice: it gets the stronger access of both.
            Some(user) if !alone(user.flags) && flags & OPEN_READ_ONLY == 0 => user.flags = flags,
            Some(_) => {}
            None => {
                let (cut, away_until_ns, at_work) = (false, None, Arc::default());
                state.users.push(User {
                    connection,
                    instance,
                    flags,
                    guest,
                    cut,
                    away_until_ns,
                    at_work,
                });
            }
        }
        Ok(())
    }

    /// Fails if `reservation` is over.
    fn lasts(&self, state: &mut State, reservation: u64, flags: u8, guest: bool) -> Result<()> {
        if state.standing.reservation == 0 && self.keep.is_none() {
            if guest {
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
    pub(super) fn begin(self: &Arc<Self>, connection: u64, effects: Effects) -> Result<AtWork> {
        let state = self.state.lock();
        let is_his = |user: &&User| {
            user.connection == connection && !user.cut && user.away_until_ns.is_none()
        };
        let user = state.users.iter().find(is_his);
        let user = user.ok_or_else(|| {
            Error::new(ErrorKind::Fenced, "another initiator has taken over the export")
        })?;
        if effects.changes && user.flags & OPEN_READ_ONLY != 0 {
            return Err(Error::new(ErrorKind::ReadOnly, "the export was opened read-only"));
        }
        user.at_work.fetch_add(1, Ordering::SeqCst);
        let (export, count) = (Arc::clone(self), Arc::clone(&user.at_work));
        Ok(AtWork { export, count, syncs: effects.syncs })
    }

    /// `connection` closes the export.
    pub(super) fn leave(&self, connection: u64) -> Result<()> {
        let mut state = self.state.lock();
        let own = |user: &User| user.connection == connection && !user.cut;
        if state.users.iter().any(|user| own(user) && user.is_at_work()) {
            return Err(Error::new(ErrorKind::Invalid, "commands for this export are in flight"));
        }
        state.users.retain(|user| !own(user));
        Ok(())
    }

    /// Records that unflushed writes may be lost: the next sync, perhaps of another process, would
    /// not report that.
    fn sync_failed(&self) {
        let _one_at_a_time = self.changing.lock();
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

impl State {
    /// Whether an open with these flags continues the existing reservation.
    fn goes_on(&self, connection: u64, flags: u8) -> bool {
        let Standing { reservation, shared, .. } = self.standing;
        let own = self.users.iter().find(|user| user.connection == connection && !user.cut);
        reservation != 0
            && match alone(flags) {
                true => (self.unclaimed && !shared) || own.is_some_and(|user| alone(user.flags)),
                false => shared || own.is_some(),
            }
    }
}

impl User {
    fn is_at_work(&self) -> bool {
        self.at_work.load(Ordering::SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sawmill_device::{MemoryDevice, Reply};
    use std::sync::mpsc::{Receiver, Sender, channel};

    const CHANGE: Effects = Effects { changes: true, syncs: false };

    /// A standing in memory that the next target starts with.
    #[derive(Clone, Default)]
    struct MemoryStanding(Arc<Mutex<Standing>>);

    impl StandingStore for MemoryStanding {
        fn keep(&self, standing: &Standing) -> Result<()> {
            *self.0.lock() = *standing;
            Ok(())
        }
    }

    fn export(standing: Option<&MemoryStanding>) -> (Exports, Arc<Export>) {
        let exports = Exports::default();
        let device = Arc::new(crate::Unpacker::new(MemoryDevice::new(4096)));
        let lasting = standing
            .map(|store| (*store.0.lock(), Box::new(store.clone()) as Box<dyn StandingStore>));
        exports.add("disk", device, [0; 16], lasting).expect("the first");
        let export = exports.find("disk", &Rights::all()).expect("just added");
        (exports, export)
    }

    fn claim(
        export: &Export,
        connection: u64,
        flags: u8,
        reservation: u64,
        random: u64,
    ) -> Result<()> {
        let instance = [connection as u8; 16];
        export.claim(connection, Claim { instance, flags, reservation, ..Claim::default() }, || {
            random
        })
    }

    fn reservation(export: &Export) -> u64 {
        export.opened(0).reservation
    }

    /// Storage that stores a standing only when the test allows it.
    struct Slow {
        begun: Mutex<Sender<()>>,
        may_end: Mutex<Receiver<()>>,
    }

    impl StandingStore for Slow {
        fn keep(&self, _: &Standing) -> Result<()> {
            self.begun.lock().send(()).expect("the test waits");
            self.may_end.lock().recv().expect("the test lets it end");
            Ok(())
        }
    }

    #[test]
    fn requests_do_not_wait_for_a_reservation_to_be_made_durable() {
        let ((begun, has_begun), (end, may_end)) = (channel(), channel());
        let slow = Slow { begun: Mutex::new(begun), may_end: Mutex::new(may_end) };
        let exports = Exports::default();
        let device = Arc::new(crate::Unpacker::new(MemoryDevice::new(4096)));
        let lasting: Box<dyn StandingStore> = Box::new(slow);
        exports
            .add("disk", device, [0; 16], Some((Standing::default(), lasting)))
            .expect("the first");
        let export = exports.find("disk", &Rights::all()).expect("just added");
        end.send(()).expect("kept");
        export.claim(1, Claim::default(), || 7).expect("it is free");
        has_begun.recv().expect("the first reservation");
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                export.claim(2, Claim { flags: OPEN_TAKE_OVER, ..Claim::default() }, || 8)
            });
            has_begun.recv().expect("the takeover");
            drop(export.begin(1, CHANGE).expect("it has the export until the takeover is durable"));
            end.send(()).expect("kept");
            taking.join().expect("no panic").expect("nothing is in flight");
        });
        let fenced = export.begin(1, CHANGE).err().map(|error| error.kind());
        assert_eq!(fenced, Some(ErrorKind::Fenced));
        export.begin(2, CHANGE).expect("its own");
    }

    #[test]
    fn no_initiator_is_admitted_while_the_device_has_requests_of_one_that_is_gone() {
        let (exports, export) = export(None);
        claim(&export, 1, 0, 0, 11).expect("free");
        let work = export.begin(1, CHANGE).expect("its owner");
        assert_eq!(export.leave(1).expect_err("it is under way").kind(), ErrorKind::Invalid);
        exports.forget(1, None);
        assert!(export.begin(1, Effects::default()).is_err());
        let early = claim(&export, 2, 0, 0, 22).expect_err("1 has requests at the device");
        assert_eq!(early.kind(), ErrorKind::Unavailable);
        drop(work);
        claim(&export, 2, 0, 0, 33).expect("1 is through");
        assert_eq!(export.state.lock().users.len(), 1, "the one that is gone is forgotten");
        assert_eq!(reservation(&export), 22, "asking again begins no new reservation");
    }

    #[test]
    fn a_fenced_initiator_may_reopen_and_does_not_block_itself() {
        let (_, export) = export(None);
        claim(&export, 1, 0, 0, 11).expect("free");
        let _work = export.begin(1, CHANGE).expect("its owner");
        let early =
            claim(&export, 2, OPEN_TAKE_OVER, 0, 22).expect_err("1 has requests at the device");
        assert_eq!(early.kind(), ErrorKind::Unavailable);
        assert_eq!(export.begin(1, CHANGE).err().expect("cut off").kind(), ErrorKind::Fenced);
        claim(&export, 1, OPEN_TAKE_OVER, 0, 33).expect("its own request is under way");
        drop(export.begin(1, CHANGE).expect("its owner again"));
    }

    #[test]
    fn an_initiator_that_opened_to_read_does_not_write() {
        let (_, export) = export(None);
        let changes = |connection| export.begin(connection, CHANGE).map(drop);
        claim(&export, 1, OPEN_READ_ONLY, 0, 11).expect("free");
        assert_eq!(changes(1).expect_err("a change").kind(), ErrorKind::ReadOnly);
        claim(&export, 1, 0, 0, 12).expect("no other initiator is there");
        changes(1).expect("opened to be written");
        assert!(claim(&export, 2, 0, 0, 22).is_err(), "1 is alone now");
    }

    #[test]
    fn a_reservation_is_over_once_another_initiator_had_it_in_any_process() {
        let store = MemoryStanding::default();
        let (_, first) = export(Some(&store));
        claim(&first, 1, 0, 0, 11).expect("free");
        first.leave(1).expect("given back");
        claim(&first, 1, 0, 11, 12).expect("no other had it meanwhile");
        claim(&first, 2, OPEN_TAKE_OVER, 0, 22).expect("taken over");
        first.leave(2).expect("given back");
        let (_, second) = export(Some(&store));
        for export in [&first, &second] {
            for flags in [0, OPEN_TAKE_OVER, OPEN_SHARED, OPEN_READ_ONLY] {
                let late = claim(export, 1, flags, 11, 13).expect_err("2 had it");
                assert_eq!(late.kind(), ErrorKind::Fenced);
            }
            claim(export, 2, 0, 22, 23).expect("no other had it since");
            assert_eq!(reservation(export), 22);
            export.leave(2).expect("given back");
        }
    }

    #[test]
    fn initiators_that_share_have_one_reservation_until_one_opens_it_alone() {
        let store = MemoryStanding::default();
        let (_, export) = export(Some(&store));
        claim(&export, 1, OPEN_SHARED, 0, 11).expect("free");
        claim(&export, 2, OPEN_SHARED, 0, 22).expect("by agreement");
        claim(&export, 3, OPEN_READ_ONLY, 0, 33).expect("a reader");
        assert_eq!(reservation(&export), 11);
        claim(&export, 4, OPEN_TAKE_OVER, 0, 44).expect("alone");
        assert_eq!(
            claim(&export, 2, OPEN_SHARED, 11, 23).expect_err("over").kind(),
            ErrorKind::Fenced
        );
        claim(&export, 5, OPEN_SHARED | OPEN_TAKE_OVER, 0, 55).expect("shared again");
        assert_eq!(
            (reservation(&export), *store.0.lock()),
            (55, Standing { reservation: 55, shared: true, failed_syncs: 0 })
        );
    }

    #[test]
    fn the_volatile_cache_identity_changes_once_after_a_failed_sync() {
        let store = MemoryStanding::default();
        let (_, first) = export(Some(&store));
        claim(&first, 1, 0, 0, 11).expect("free");
        let identity = first.opened(0).cache_identity;
        let end = |syncs, outcome: Outcome| {
            first.begin(1, Effects { changes: true, syncs }).expect("its owner").ended(&outcome)
        };
        let failure = |kind| Err(Error::new(kind, "the disk"));
        end(true, Ok(Reply::Done));
        end(false, failure(ErrorKind::Unavailable));
        end(true, failure(ErrorKind::Invalid));
        assert_eq!(first.opened(0).cache_identity, identity, "no sync has failed");
        end(true, failure(ErrorKind::Unavailable));
        end(true, failure(ErrorKind::Unavailable));
        assert_eq!(store.0.lock().failed_syncs, 1, "no identity was reported in between");
        let (_, second) = export(Some(&store));
        assert_ne!(second.opened(0).cache_identity, identity);
        let newer = second.opened(0).cache_identity;
        assert_eq!(first.opened(0).cache_identity, newer, "it changes once");
    }

    #[test]
    fn an_initiator_expected_back_keeps_its_place_for_a_while_and_no_longer() {
        let store = MemoryStanding::default();
        let (exports, export) = export(Some(&store));
        claim(&export, 1, 0, 0, 11).expect("free");
        exports.forget(1, Some(100));
        assert!(export.begin(1, CHANGE).is_err(), "its connection has ended");
        for flags in [0, OPEN_SHARED, OPEN_READ_ONLY] {
            assert_eq!(
                claim(&export, 2, flags, 0, 22).expect_err("the place of initiator 2").kind(),
                ErrorKind::InUse
            );
        }
        claim(&export, 3, 0, 11, 33).expect("the same initiator, on another connection");
        assert_eq!((reservation(&export), store.0.lock().reservation), (11, 11));
        exports.forget(3, Some(100));
        let late = Claim { flags: OPEN_READ_ONLY, now_ns: 100, ..Claim::default() };
        export.claim(2, late, || 22).expect("it did not come back");
        assert_eq!(claim(&export, 4, 0, 11, 44).expect_err("too late").kind(), ErrorKind::Fenced);
    }

    #[test]
    fn an_open_whose_answer_was_lost_with_its_connection_is_no_bar_to_the_next() {
        let (exports, export) = export(None);
        let again = Claim { instance: [1; 16], ..Claim::default() };
        claim(&export, 1, 0, 0, 11).expect("free");
        exports.forget(1, Some(100));
        assert_eq!(claim(&export, 2, 0, 0, 22).expect_err("another's").kind(), ErrorKind::InUse);
        export.claim(3, again, || 33).expect("the same initiator, which knows of no reservation");
    }

    #[test]
    fn a_guest_ends_no_reservation_and_makes_room_for_its_holder() {
        let store = MemoryStanding::default();
        let (exports, export) = export(Some(&store));
        let guest = Claim { flags: OPEN_READ_ONLY, guest: true, ..Claim::default() };
        claim(&export, 1, 0, 0, 11).expect("free");
        assert_eq!(export.claim(2, guest, || 22).expect_err("it is open").kind(), ErrorKind::InUse);
        exports.forget(1, None);
        export.claim(2, guest, || 22).expect("no initiator is there");
        assert_eq!(store.0.lock().reservation, 11);
        claim(&export, 3, 0, 11, 33).expect("initiator 3 continues");
        assert_eq!(
            export.begin(2, Effects::default()).err().expect("it had to go").kind(),
            ErrorKind::Fenced
        );
    }
}

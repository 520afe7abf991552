//! What a target shows, and who has it open.
//!
//! Invariants: an export that is open without *shared* has one writer; whoever is cut off gets `Fenced` from
//! then on, and nothing of his is under way when the next one is told that it is open.
//!
//! Not here: connections (`served`).

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_format::link::control::{self, OPEN_READ_ONLY, OPEN_SHARED, OPEN_TAKE_OVER, Opened};

use crate::PackedDevice;

/// A device with a name.
pub(super) struct Export {
    pub(super) device: Arc<dyn PackedDevice>,
    /// Who keeps what was written and not flushed.
    keeper: [u8; 16],
    users: Mutex<Vec<User>>,
}

struct User {
    connection: u64,
    flags: u8,
    cut: bool,
}

/// All exports of a target.
#[derive(Default)]
pub(super) struct Exports(Mutex<BTreeMap<String, Arc<Export>>>);

impl Exports {
    pub(super) fn add(&self, name: &str, device: Arc<dyn PackedDevice>, keeper: [u8; 16]) -> Result<()> {
        if name.is_empty() || name.len() > control::EXPORT_BYTES_MAX {
            let text = format!("an export's name has 1 to {} bytes", control::EXPORT_BYTES_MAX);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut exports = self.0.lock();
        if exports.contains_key(name) {
            return Err(Error::new(ErrorKind::Exists, format!("{name}: there is such an export already")));
        }
        exports.insert(name.to_owned(), Arc::new(Export { device, keeper, users: Mutex::default() }));
        Ok(())
    }

    pub(super) fn find(&self, name: &str) -> Result<Arc<Export>> {
        let exports = self.0.lock();
        exports.get(name).cloned().ok_or_else(|| {
            let all: Vec<&str> = exports.keys().map(String::as_str).collect();
            let text = format!("no export {name:?} here; there are: {}", all.join(", "));
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Names and sizes, as much as fits into `bytes_max` bytes.
    pub(super) fn list(&self, bytes_max: usize) -> Vec<u8> {
        let mut list = Vec::new();
        for (name, export) in self.0.lock().iter() {
            control::push_export(&mut list, bytes_max, name, export.device.geometry().size_bytes);
        }
        list
    }

    /// A connection is gone. What it had open is known until a device has nothing more of it: see
    /// [`Export::claim`].
    pub(super) fn forget(&self, connection: u64) {
        for export in self.0.lock().values() {
            let mut users = export.users.lock();
            users.iter_mut().filter(|user| user.connection == connection).for_each(|user| user.cut = true);
        }
    }
}

impl Export {
    /// Lets `connection` in, or says who is in the way. `busy` says whether requests of a connection are at a
    /// device.
    pub(super) fn claim(&self, connection: u64, flags: u8, busy: impl Fn(u64) -> bool) -> Result<()> {
        let mut users = self.users.lock();
        let alone = |flags: u8| flags & (OPEN_SHARED | OPEN_READ_ONLY) == 0;
        let in_the_way =
            |user: &User| user.connection != connection && !user.cut && (alone(flags) || alone(user.flags));
        if users.iter().any(in_the_way) {
            if flags & OPEN_TAKE_OVER == 0 {
                let text = "somebody else has it open; take it over, or have both open it shared";
                return Err(Error::new(ErrorKind::InUse, text));
            }
            users.iter_mut().filter(|user| in_the_way(user)).for_each(|user| user.cut = true);
        }
        if users.iter().any(|user| user.cut && user.connection != connection && busy(user.connection)) {
            let text = "requests of whoever had it before are not done yet; ask again";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        users.retain(|user| !user.cut);
        match users.iter_mut().find(|user| user.connection == connection) {
            // Opened twice: it has the stronger of both.
            Some(user) if !alone(user.flags) && flags & OPEN_READ_ONLY == 0 => user.flags = flags,
            Some(_) => {}
            None => users.push(User { connection, flags, cut: false }),
        }
        Ok(())
    }

    /// Whether `connection` may still use it, and change it.
    pub(super) fn admits(&self, connection: u64, changes: bool) -> Result<()> {
        let users = self.users.lock();
        let Some(user) = users.iter().find(|user| user.connection == connection && !user.cut) else {
            return Err(Error::new(ErrorKind::Fenced, "somebody else has taken it over"));
        };
        if changes && user.flags & OPEN_READ_ONLY != 0 {
            return Err(Error::new(ErrorKind::ReadOnly, "it was opened to be read only"));
        }
        Ok(())
    }

    /// What an open is answered with.
    pub(super) fn opened(&self, volume: u8) -> Opened {
        let geometry = self.device.geometry();
        Opened {
            volume,
            size_bytes: geometry.size_bytes,
            block_bytes: geometry.block_bytes,
            preferred_bytes: geometry.preferred_bytes,
            request_bytes_max: geometry.request_bytes_max,
            read_only: geometry.read_only,
            shared_cache: geometry.shared_cache,
            discard: geometry.operations.discard,
            write_zeroes: geometry.operations.write_zeroes,
            allocation: geometry.operations.allocation,
            keeper: self.keeper,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sawmill_device::MemoryDevice;

    fn export() -> (Exports, Arc<Export>) {
        let exports = Exports::default();
        let device = Arc::new(crate::Unpack::new(MemoryDevice::new(4096)));
        exports.add("disk", device, [0; 16]).expect("the first");
        let export = exports.find("disk").expect("just added");
        (exports, export)
    }

    #[test]
    fn nobody_is_let_in_while_a_device_has_requests_of_who_is_gone() {
        let (exports, export) = export();
        export.claim(1, 0, |_| false).expect("free");
        exports.forget(1);
        assert!(export.admits(1, false).is_err());
        let early =
            export.claim(2, 0, |connection| connection == 1).expect_err("1 has requests at the device");
        assert_eq!(early.kind(), ErrorKind::Unavailable);
        export.claim(2, 0, |_| false).expect("1 is through");
        assert_eq!(export.users.lock().len(), 1, "who is gone is forgotten");
    }

    #[test]
    fn who_was_cut_off_may_ask_again_and_is_not_in_his_own_way() {
        let (_, export) = export();
        export.claim(1, 0, |_| false).expect("free");
        export.claim(2, OPEN_TAKE_OVER, |_| false).expect("taken over");
        assert_eq!(export.admits(1, false).expect_err("cut off").kind(), ErrorKind::Fenced);
        assert_eq!(export.claim(1, 0, |_| false).expect_err("2 has it").kind(), ErrorKind::InUse);
        export.claim(1, OPEN_TAKE_OVER, |connection| connection == 1).expect("his own open is under way");
        export.admits(1, true).expect("it is his again");
    }

    #[test]
    fn who_opened_it_to_read_does_not_write() {
        let (_, export) = export();
        export.claim(1, OPEN_READ_ONLY, |_| false).expect("free");
        assert_eq!(export.admits(1, true).expect_err("a change").kind(), ErrorKind::ReadOnly);
        export.claim(1, 0, |_| false).expect("nobody else is there");
        export.admits(1, true).expect("opened to be written");
        assert!(export.claim(2, 0, |_| false).is_err(), "1 is alone now");
    }
}

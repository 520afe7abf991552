//! The locks of a machine: on a name, and on the medium behind it, which may have other names too.
//!
//! Invariant: a lock is free when its holder releases it or dies. Not here: locks on memory files,
//! which are real.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use sawmill_volume::Lock;

use crate::death::Life;
use crate::disk::Medium;

/// The object of a lock.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LockObject {
    Name(PathBuf),
    /// By its identity, which lasts as long as a reference to it.
    Medium(usize),
}

struct Holder {
    life: Arc<Life>,
    #[expect(dead_code, reason = "held so that its identity is nobody else's")]
    medium: Option<Arc<Medium>>,
}

/// The locks that the processes of one machine hold.
#[derive(Default)]
pub struct Locks {
    held: Mutex<BTreeMap<LockObject, Weak<Holder>>>,
}

impl Locks {
    /// Locks a name.
    pub fn take_name(&self, name: PathBuf, life: &Arc<Life>) -> io::Result<Lock> {
        self.take(LockObject::Name(name), life, None)
    }

    /// Locks a medium.
    pub fn take_medium(&self, medium: Arc<Medium>, life: &Arc<Life>) -> io::Result<Lock> {
        self.take(LockObject::Medium(Arc::as_ptr(&medium) as usize), life, Some(medium))
    }

    fn take(
        &self,
        object: LockObject,
        life: &Arc<Life>,
        medium: Option<Arc<Medium>>,
    ) -> io::Result<Lock> {
        let mut held = self.held.lock();
        let holder = held.get(&object).and_then(Weak::upgrade);
        if holder.is_some_and(|holder| !holder.life.is_dead()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let holder = Arc::new(Holder { life: life.clone(), medium });
        held.insert(object, Arc::downgrade(&holder));
        Ok(Box::new(holder))
    }
}

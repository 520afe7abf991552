//! The keys of a target: which of them a hello is made with, and which proves that a connection is not known.
//!
//! Invariant: there is at least one. So far there is one, and who has it may do everything. Not here: the file
//! it comes from (`crate::session::key`), who has what open (`exports`).

use std::sync::Arc;

use crate::session::Security;
use crate::session::proof::Proofs;

/// A key that initiators may have.
pub(super) struct Holder {
    pub(super) security: Security,
    pub(super) proofs: Proofs,
}

impl Holder {
    /// A number for a connection that is made with this key.
    pub(super) fn number(&self, random: u64) -> u64 {
        match self.security {
            Security::Key(_) => self.proofs.connection(random),
            Security::Insecure => random.max(1),
        }
    }
}

/// All of them.
pub(super) struct Ring(Vec<Arc<Holder>>);

impl Ring {
    pub(super) fn new(security: Security) -> Self {
        let proofs = Proofs::new(&security);
        Ring(vec![Arc::new(Holder { security, proofs })])
    }

    /// Who may have said a greeting. A hint leads to one of them, or to none; without one each may have.
    pub(super) fn of_greeting(&self, hint: u64, message: &[u8]) -> &[Arc<Holder>] {
        let is_meant = |holder: &Arc<Holder>| u64::from(holder.proofs.hint(message)) == hint;
        match self.0.iter().position(is_meant).filter(|_| hint != 0) {
            Some(index) => &self.0[index..=index],
            None if hint != 0 && self.is_sealed() => &[],
            None => &self.0,
        }
    }

    /// By whose key a target made a connection of this number.
    pub(super) fn of_connection(&self, connection: u64) -> Option<&Arc<Holder>> {
        match &self.0[..] {
            // Also of a target that marked none.
            [one] => Some(one),
            all => all.iter().find(|holder| holder.proofs.is_connection(connection)),
        }
    }

    /// Whether a key is needed.
    pub(super) fn is_sealed(&self) -> bool {
        !matches!(self.any(), Security::Insecure)
    }

    /// What all have in common: with a key, or without.
    pub(super) fn any(&self) -> &Security {
        &self.0[0].security
    }
}

//! The keys of a target: which of them a hello uses, which proves that a connection is unknown, and
//! what its holder may open.
//!
//! Invariants: there is at least one key. When the keys change, an unchanged holder stays the same
//! object, so that a connection can tell whether it may continue.
//!
//! Not here: the files of the keys (`crate::session::key`, `super::machines`), open exports
//! (`exports`).

use std::sync::Arc;

use super::machines::{Machine, Rights};
use crate::session::Security;
use crate::session::proof::Proofs;

/// The holder of a key.
pub(super) struct Holder {
    /// None: any machine with the single key.
    name: Option<String>,
    pub(super) security: Security,
    pub(super) proofs: Proofs,
    pub(super) rights: Rights,
}

impl Holder {
    fn new(name: Option<String>, security: Security, rights: Rights) -> Arc<Self> {
        let proofs = Proofs::new(&security);
        Arc::new(Holder { name, security, proofs, rights })
    }

    /// A number for a connection that this key makes.
    pub(super) fn number(&self, random: u64) -> u64 {
        match self.security {
            Security::Key(_) => self.proofs.connection(random),
            Security::Insecure => random.max(1),
        }
    }

    /// Whether both are the same machine, whatever its key and rights were.
    pub(super) fn is_same_machine(&self, other: &Holder) -> bool {
        self.name == other.name
    }

    /// The name to show: the machine of the key, and the peer's own name.
    pub(super) fn display_name(&self, own_name: &str) -> String {
        let own_name = crate::legible(own_name);
        match &self.name {
            Some(name) if *name != own_name => format!("{} ({own_name})", crate::legible(name)),
            _ => own_name.into_owned(),
        }
    }

    fn is(&self, machine: &Machine) -> bool {
        let same_key = matches!(&self.security, Security::Key(key) if key.is_same(&machine.key));
        self.name.as_ref() == Some(&machine.name) && same_key && self.rights == machine.rights
    }
}

/// All keys.
pub(super) struct Ring(Vec<Arc<Holder>>);

impl Ring {
    /// One key, or none, for all machines.
    pub(super) fn one(security: Security) -> Self {
        Ring(vec![Holder::new(None, security, Rights::all())])
    }

    /// A key for each machine. Returns `None` without a machine.
    pub(super) fn of_machines(machines: Vec<Machine>) -> Option<Self> {
        Ring(Vec::new()).renewed(machines)
    }

    /// Replaces the keys with those of these machines.
    pub(super) fn renewed(&self, machines: Vec<Machine>) -> Option<Self> {
        let holder = |machine: Machine| match self.0.iter().find(|holder| holder.is(&machine)) {
            Some(same) => Arc::clone(same),
            None => Holder::new(Some(machine.name), Security::Key(machine.key), machine.rights),
        };
        let holders: Vec<_> = machines.into_iter().map(holder).collect();
        (!holders.is_empty()).then_some(Ring(holders))
    }

    /// Whether `holder` is unchanged.
    pub(super) fn has(&self, holder: &Arc<Holder>) -> bool {
        self.0.iter().any(|one| Arc::ptr_eq(one, holder))
    }

    /// The holders that may have sent a greeting. A hint leads to at most one. Without a hint, as
    /// in an older version, only a single holder is possible: a stranger must not make us try many.
    pub(super) fn of_greeting(&self, hint: u64, message: &[u8]) -> &[Arc<Holder>] {
        if hint == 0 || !self.is_sealed() {
            return if self.0.len() == 1 { &self.0 } else { &[] };
        }
        let is_meant = |holder: &Arc<Holder>| u64::from(holder.proofs.hint(message)) == hint;
        let position = self.0.iter().position(is_meant);
        position.map_or(&[], |index| &self.0[index..=index])
    }

    /// The holder whose key made the connection of this number on a target.
    pub(super) fn of_connection(&self, connection: u64) -> Option<&Arc<Holder>> {
        match &self.0[..] {
            // A target with a single key may have made unmarked numbers.
            [one] => Some(one),
            all => all.iter().find(|holder| holder.proofs.is_connection(connection)),
        }
    }

    /// Whether a key is required.
    pub(super) fn is_sealed(&self) -> bool {
        !matches!(self.any(), Security::Insecure)
    }

    /// The security that all holders share: with a key, or without.
    pub(super) fn any(&self) -> &Security {
        &self.0[0].security
    }
}

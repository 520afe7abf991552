//! The findings of a check, and what cannot be served because of each.
//!
//! Invariants: an object has one row, with the first finding about it and the costs of all. A row
//! names each cost once, and at most [`limits::CHECK_COSTS_MAX`]; it counts the rest.
//!
//! Not here: the search for damage (`kept_list`, `kin`, `verify`).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use sawmill_format::FormatError;
use sawmill_format::checkpoint::{parse_checkpoint_key, parse_kept_key};
use sawmill_format::map_part::parse_part_key;
use sawmill_format::segment::parse_segment_key;

use crate::{Error, ErrorKind, Result, limits};

/// Something wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Which object.
    pub object: String,
    /// What is wrong with it.
    pub what: String,
    /// What cannot be served because of it, in words: the volume, snapshots, moments, clones. Empty
    /// when only redundancy is lost. If there are many, only the first are listed.
    pub costs: Vec<String>,
    /// How many more there are, at most: one found twice counts twice.
    pub costs_more: u64,
}

impl Damage {
    /// Something wrong that costs nothing yet.
    pub(crate) fn of(object: &str, what: &str) -> Self {
        Damage {
            object: object.to_owned(),
            what: what.to_owned(),
            costs: Vec::new(),
            costs_more: 0,
        }
    }

    fn add_cost(&mut self, cost: &str) {
        if self.costs.iter().any(|known| known == cost) {
            return;
        }
        if self.costs.len() < limits::CHECK_COSTS_MAX {
            self.costs.push(cost.to_owned());
        } else {
            self.costs_more += 1;
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.object, self.what)?;
        if !self.costs.is_empty() {
            write!(f, "; it costs {}", self.costs.join(", "))?;
        }
        match self.costs_more {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl From<Damage> for Error {
    fn from(damage: Damage) -> Self {
        Error::new(ErrorKind::Corrupt, damage.to_string())
    }
}

/// The result of reading one object.
pub(super) enum Verified<T> {
    Intact(T),
    /// What is wrong with it: an error of kind `Corrupt`.
    Damaged(Error),
}

impl<T> Verified<T> {
    /// Any other error is not about the object, and stays one.
    pub(super) fn of(outcome: Result<T>) -> Result<Self> {
        match outcome {
            Ok(found) => Ok(Verified::Intact(found)),
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(Verified::Damaged(error)),
            Err(error) => Err(error),
        }
    }

    pub(super) fn intact(self) -> Option<T> {
        match self {
            Verified::Intact(found) => Some(found),
            Verified::Damaged(_) => None,
        }
    }
}

/// What is wrong with an object that cannot be decoded.
pub(super) fn undecodable(error: FormatError) -> Error {
    Error::new(ErrorKind::Corrupt, error.to_string()).with_source(error)
}

/// Damage by object.
#[derive(Default)]
pub(super) struct DamageList {
    by_object: BTreeMap<String, Damage>,
}

impl DamageList {
    /// Adds what is wrong with an object, and what that costs. The first finding counts.
    pub(super) fn add(&mut self, object: &str, what: impl fmt::Display, costs: &[&str]) {
        let new = || Damage::of(object, &what.to_string());
        let damage = self.by_object.entry(object.to_owned()).or_insert_with(new);
        costs.iter().for_each(|cost| damage.add_cost(cost));
    }

    /// Adds an error, which names the object or else is about `otherwise`.
    pub(super) fn add_error(&mut self, otherwise: &str, error: &Error, costs: &[&str]) {
        let text = error.to_string();
        let object =
            text.split([' ', ':', ';', ',']).find(|word| is_key(word)).unwrap_or(otherwise);
        self.add(object, &text, costs);
    }

    /// Merges `other` into this list. For an object in both, the first finding counts, and the
    /// costs of both.
    pub(super) fn take(&mut self, other: DamageList) {
        for (object, damage) in other.by_object {
            match self.by_object.entry(object) {
                Entry::Vacant(free) => {
                    free.insert(damage);
                }
                Entry::Occupied(mut known) => {
                    damage.costs.iter().for_each(|cost| known.get_mut().add_cost(cost));
                    known.get_mut().costs_more += damage.costs_more;
                }
            }
        }
    }

    pub(super) fn retain(&mut self, mut stays: impl FnMut(&str) -> bool) {
        self.by_object.retain(|object, _| stays(object));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_object.is_empty()
    }

    pub(super) fn into_vec(self) -> Vec<Damage> {
        self.by_object.into_values().collect()
    }
}

fn is_key(word: &str) -> bool {
    parse_segment_key(word).is_some()
        || parse_part_key(word).is_some()
        || parse_checkpoint_key(word).is_some()
        || parse_kept_key(word).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_found_damaged_twice_costs_what_both_findings_say() {
        let (mut first, mut second) = (DamageList::default(), DamageList::default());
        first.add("v/seg/1", "its checksum is wrong", &["the volume"]);
        second.add("v/seg/1", "it cannot be read", &["snapshot a", "the volume"]);
        second.add("v/seg/2", "it is missing", &[]);
        first.take(second);
        let found: Vec<String> = first.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "v/seg/1: its checksum is wrong; it costs the volume, snapshot a",
                "v/seg/2: it is missing"
            ]
        );
    }
}

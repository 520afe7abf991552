//! A power cut: what a device may hold when power fails between two entries of its recording.
//!
//! Definition. At cut *n* the entries before *n* have happened. Everything before the last flush
//! among them is there, and so is each later entry with FUA. Each of the rest, the *loose* entries,
//! may be there, or not, or be torn; entry *n* itself may be in progress. What is there was written
//! in the order of the log.
//!
//! Invariant: the text of a cut (`120:without=117,118`) and the recording always give the same
//! image.
//!
//! Not here: which cuts to inspect (`plan`).

use std::fmt;
use std::str::FromStr;

use sawmill_format::write_log::Flags;

use crate::Result;
use crate::image::Image;
use crate::recording::{RecordedEntry, Recording};
use sawmill_testkit::Dice;

/// Which of the loose entries are there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum EntrySelection {
    /// All: what a disk leaves that writes at once.
    All,
    /// None: what a disk leaves that writes at a flush only.
    None,
    /// All but those with these numbers: a late write may be there without an early one.
    Without(Vec<usize>),
    /// Those with these numbers alone.
    Only(Vec<usize>),
    /// All, but of this one only the first bytes.
    Torn {
        /// The number of the torn entry.
        entry: usize,
        /// How many of its bytes are there.
        bytes: u64,
    },
    /// All, and the first bytes of the entry that was in progress.
    UnderWay {
        /// How many of its bytes are there.
        bytes: u64,
    },
    /// Each by a throw of seeded dice: there, not there, or torn at a multiple of 512 bytes.
    Seed(u64),
}

/// A place between two entries, and what is kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PowerCut {
    /// How many entries have happened.
    pub entry: usize,
    /// Which of the loose ones are there.
    pub selection: EntrySelection,
}

impl PowerCut {
    /// The cut before `entry` with all there is.
    #[must_use]
    pub fn whole(entry: usize) -> Self {
        PowerCut { entry, selection: EntrySelection::All }
    }
}

fn list(entries: &[usize]) -> String {
    entries.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

impl fmt::Display for PowerCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.entry)?;
        match &self.selection {
            EntrySelection::All => f.write_str("all"),
            EntrySelection::None => f.write_str("none"),
            EntrySelection::Without(entries) => write!(f, "without={}", list(entries)),
            EntrySelection::Only(entries) => write!(f, "only={}", list(entries)),
            EntrySelection::Torn { entry, bytes } => write!(f, "torn={entry}@{bytes}"),
            EntrySelection::UnderWay { bytes } => write!(f, "under-way@{bytes}"),
            EntrySelection::Seed(seed) => write!(f, "seed={seed}"),
        }
    }
}

impl FromStr for PowerCut {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is no cut; write ENTRY:all, :none, :without=N,N, :only=N,N, \
                 :torn=N@BYTES, :under-way@BYTES or :seed=N"
            )
        };
        let (entry, kept) = text.split_once(':').unwrap_or((text, "all"));
        let entry = entry.parse().map_err(|_| wrong())?;
        let numbers = |list: &str| -> Result<Vec<usize>, String> {
            list.split(',').map(|number| number.parse().map_err(|_| wrong())).collect()
        };
        let (word, value) = kept.split_once(['=', '@']).unwrap_or((kept, ""));
        let kept = match word {
            "all" => EntrySelection::All,
            "none" => EntrySelection::None,
            "without" => EntrySelection::Without(numbers(value)?),
            "only" => EntrySelection::Only(numbers(value)?),
            "torn" => {
                let (torn, bytes) = value.split_once('@').ok_or_else(wrong)?;
                let (entry, bytes) =
                    (torn.parse().map_err(|_| wrong())?, bytes.parse().map_err(|_| wrong())?);
                EntrySelection::Torn { entry, bytes }
            }
            "under-way" => EntrySelection::UnderWay { bytes: value.parse().map_err(|_| wrong())? },
            "seed" => EntrySelection::Seed(value.parse().map_err(|_| wrong())?),
            _ => return Err(wrong()),
        };
        Ok(PowerCut { entry, selection: kept })
    }
}

/// The first entry that the last flush before `entry` does not cover.
///
/// A flush that carries data covers the entries before it, but not its own data.
#[must_use]
pub fn flushed_before(entries: &[RecordedEntry], entry: usize) -> usize {
    let flush = |recorded: &RecordedEntry| recorded.entry.flags.has(Flags::FLUSH);
    entries[..entry.min(entries.len())].iter().rposition(flush).unwrap_or(0)
}

/// Whether an entry changes the device at all.
fn changes(recorded: &RecordedEntry) -> bool {
    recorded.entry.sector_count > 0 && !recorded.entry.flags.has(Flags::MARK)
}

/// The entries that may be missing at a cut.
#[must_use]
pub fn loose(entries: &[RecordedEntry], entry: usize) -> Vec<usize> {
    let from = flushed_before(entries, entry);
    let range = from..entry.min(entries.len());
    let is_loose =
        |index: &usize| changes(&entries[*index]) && !entries[*index].entry.flags.has(Flags::FUA);
    range.filter(is_loose).collect()
}

/// Makes images of cuts. Cheapest if they are requested in the order of their entries.
pub struct Replay<'a> {
    recording: &'a Recording,
    before: Image,
    /// Entries before this one are in `synced`.
    at: usize,
    synced: Image,
}

impl<'a> Replay<'a> {
    /// Replays `recording` over what the device held `before`.
    #[must_use]
    pub fn new(recording: &'a Recording, before: Image) -> Self {
        Replay { recording, synced: before.clone(), before, at: 0 }
    }

    /// The image of a cut.
    pub fn image(&mut self, cut: &PowerCut) -> Result<Image> {
        let entries = &self.recording.entries;
        let entry = cut.entry.min(entries.len());
        let from = flushed_before(entries, entry);
        // The synced image cannot go back: a cut before it begins from the start.
        if from < self.at {
            (self.synced, self.at) = (self.before.clone(), 0);
        }
        for number in self.at..from {
            self.recording.apply(number, u64::MAX, &mut self.synced)?;
        }
        self.at = from;
        let mut image = self.synced.clone();
        let mut dice =
            Dice::new(if let EntrySelection::Seed(seed) = cut.selection { seed } else { 0 });
        for (number, recorded) in entries.iter().enumerate().take(entry).skip(from) {
            if !changes(recorded) {
                continue;
            }
            let length = recorded.entry.sector_count * self.recording.sector_bytes();
            // A write with FUA is on the medium, whatever the cut keeps of the others.
            let firm = recorded.entry.flags.has(Flags::FUA);
            let bytes =
                if firm { length } else { kept_bytes(&cut.selection, number, length, &mut dice) };
            if bytes > 0 {
                self.recording.apply(number, bytes, &mut image)?;
            }
        }
        if let (EntrySelection::UnderWay { bytes }, true) = (&cut.selection, entry < entries.len())
        {
            self.recording.apply(entry, *bytes, &mut image)?;
        }
        Ok(image)
    }
}

/// How much of a loose entry is there.
fn kept_bytes(selection: &EntrySelection, number: usize, length: u64, dice: &mut Dice) -> u64 {
    let whole = |there: bool| if there { length } else { 0 };
    match selection {
        EntrySelection::All | EntrySelection::UnderWay { .. } => length,
        EntrySelection::None => 0,
        EntrySelection::Without(entries) => whole(!entries.contains(&number)),
        EntrySelection::Only(entries) => whole(entries.contains(&number)),
        EntrySelection::Torn { entry, bytes } => {
            if *entry == number {
                *bytes
            } else {
                length
            }
        }
        // One throw for each loose entry in the order of the log, so that the text `seed=N` always
        // gives the same image.
        EntrySelection::Seed(_) => match dice.below(5) {
            0 | 1 => length,
            2 | 3 => 0,
            _ => 512 * dice.below(length / 512 + 1),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_cut_reads_back_as_the_same_cut() {
        let kinds = [
            EntrySelection::All,
            EntrySelection::None,
            EntrySelection::Without(vec![7, 8]),
            EntrySelection::Only(vec![9]),
            EntrySelection::Torn { entry: 4, bytes: 512 },
            EntrySelection::UnderWay { bytes: 1024 },
            EntrySelection::Seed(77),
        ];
        for kept in kinds {
            let cut = PowerCut { entry: 10, selection: kept };
            assert_eq!(cut.to_string().parse(), Ok(cut));
        }
        for wrong in ["", "x:all", "3:some", "3:torn=1", "3:without=", "3:seed=x"] {
            assert!(wrong.parse::<PowerCut>().is_err(), "{wrong}");
        }
    }
}

//! The choice of cuts to check: all candidates of a recording if the budget allows, otherwise half
//! of the budget goes to cuts beside a flush.
//!
//! Invariants: the same recording, budget and seed give the same plan, without repetition, in the
//! order of entries. The plan has the number of candidates, so that a report can state the share
//! that was checked.
//!
//! Not here: the image of a cut (`power_cut`), and the check of it (`campaign`, `cut_check`).

use std::collections::HashSet;

use sawmill_format::write_log::Flags;

use crate::power_cut::{EntrySelection, PowerCut, loose};
use crate::recording::Recording;
use sawmill_testkit::Dice;

/// The number of images to check, and the unit of torn writes.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Images to check at most.
    pub images_max: usize,
    /// Writes may be torn at multiples of this many bytes; with `None`, they are whole or absent.
    pub tear_bytes: Option<u64>,
    /// The seed of the random choices.
    pub seed: u64,
}

/// The power cuts that the budget allows, and how many there could be.
#[derive(Clone, Debug)]
pub struct CutPlan {
    /// In the order of entries.
    pub cuts: Vec<PowerCut>,
    /// The number of different points between two entries in `cuts`.
    pub points: usize,
    /// The number of candidates: all legal cuts of the kinds that a plan can hold, but only some
    /// single entries, random subsets and tears per point.
    pub legal: usize,
}

/// Random subsets per point with more than two loose entries.
const SEEDS_PER_POINT: u64 = 2;
/// The most single entries per point that are lost alone and kept alone: the newest, and a random
/// choice of the others.
const SINGLES_MAX: usize = 16;

/// Chooses cuts of `recording`, from entry `first` on.
#[must_use]
pub fn plan(recording: &Recording, first: usize, budget: &Budget) -> CutPlan {
    let mut dice = Dice::new(budget.seed);
    let entries = &recording.entries;
    let (mut telling, mut others) = (Vec::new(), Vec::new());
    for entry in first..=entries.len() {
        let loose = loose(entries, entry);
        let before_flush = entries.get(entry).is_none_or(|next| next.entry.flags.has(Flags::FLUSH));
        // Just behind a flush, nothing before it may be missing: there an ignored flush shows.
        let after_flush = entry > 0 && entries[entry - 1].entry.flags.has(Flags::FLUSH);
        let all = PowerCut { entry, selection: EntrySelection::All };
        if before_flush || after_flush {
            telling.push(all)
        } else {
            others.push(all)
        }
        if loose.is_empty() {
            continue;
        }
        let none = PowerCut { entry, selection: EntrySelection::None };
        if before_flush {
            telling.push(none)
        } else {
            others.push(none)
        }
        others.extend(subsets(&loose, &mut dice).map(|kept| PowerCut { entry, selection: kept }));
        others.extend(tears(recording, entry, &loose, budget, &mut dice));
    }
    let legal = telling.len() + others.len();
    // Points beside a flush test flushes, but neither torn writes nor the points between flushes:
    // half of the budget goes to each.
    let beside = (budget.images_max / 2).max(budget.images_max.saturating_sub(others.len()));
    thin(&mut telling, beside, &mut dice);
    let mut seen: HashSet<usize> = telling.iter().map(|cut| cut.entry).collect();
    spread(&mut others, &mut seen, budget.images_max - telling.len(), &mut dice);
    let mut cuts = telling;
    cuts.extend(others);
    let mut seen = HashSet::new();
    cuts.retain(|cut| seen.insert(cut.clone()));
    cuts.sort_by_key(|cut| cut.entry);
    let points = cuts.iter().map(|cut| cut.entry).collect::<HashSet<_>>().len();
    CutPlan { cuts, points, legal }
}

/// Each entry lost alone, each kept alone, and some random subsets.
fn subsets(loose: &[usize], dice: &mut Dice) -> impl Iterator<Item = EntrySelection> + use<> {
    let mut singles: Vec<usize> = loose.to_vec();
    let newest = singles.pop();
    thin(&mut singles, SINGLES_MAX - 1, dice);
    // The newest is always among them, whatever was thinned out.
    singles.extend(newest);
    let mut kinds = Vec::new();
    if loose.len() > 1 {
        for single in singles {
            kinds.push(EntrySelection::Without(vec![single]));
            kinds.push(EntrySelection::Only(vec![single]));
        }
    }
    if loose.len() > 2 {
        kinds.extend((0..SEEDS_PER_POINT).map(|_| EntrySelection::Seed(dice.word() >> 32)));
    }
    kinds.into_iter()
}

/// The newest loose entry torn, and entry `entry` torn while it is under way.
fn tears(
    recording: &Recording,
    entry: usize,
    loose: &[usize],
    budget: &Budget,
    dice: &mut Dice,
) -> Vec<PowerCut> {
    let Some(unit) = budget.tear_bytes else { return Vec::new() };
    let mut torn = |number: usize| {
        let recorded = recording.entries.get(number)?;
        // They carry no data that could be torn.
        if recorded.entry.flags.has(Flags::DISCARD) || recorded.entry.flags.has(Flags::MARK) {
            return None;
        }
        let units = (recorded.entry.sector_count * recording.sector_bytes()).div_ceil(unit);
        (units > 1).then(|| unit * (1 + dice.below(units - 1)))
    };
    let newest = loose[loose.len() - 1];
    let mut cuts = Vec::new();
    if let Some(bytes) = torn(newest) {
        cuts.push(PowerCut { entry, selection: EntrySelection::Torn { entry: newest, bytes } });
    }
    if let Some(bytes) = torn(entry) {
        cuts.push(PowerCut { entry, selection: EntrySelection::UnderWay { bytes } });
    }
    cuts
}

/// Keeps a random choice of `most` of them, but prefers points that are not in `seen` yet, so that
/// many points are checked.
fn spread(cuts: &mut Vec<PowerCut>, seen: &mut HashSet<usize>, most: usize, dice: &mut Dice) {
    for last in (1..cuts.len()).rev() {
        cuts.swap(last, dice.below(last as u64 + 1) as usize);
    }
    let (mut fresh, again): (Vec<PowerCut>, Vec<PowerCut>) =
        cuts.drain(..).partition(|cut| seen.insert(cut.entry));
    fresh.extend(again);
    fresh.truncate(most);
    *cuts = fresh;
}

/// Keeps a random choice of `most` of them.
fn thin<T>(items: &mut Vec<T>, most: usize, dice: &mut Dice) {
    while items.len() > most {
        items.swap_remove(dice.below(items.len() as u64) as usize);
    }
}

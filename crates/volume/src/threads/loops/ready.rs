//! Loops that are ready and wait for a thread.
//!
//! Invariants: the loops of one group leave in the order in which they came, and at most
//! [`GROUP_THREADS_MAX`] of them run. Groups take turns, so that a group with few loops does not
//! wait behind one with many. No step looks at all loops.
//!
//! Not here: the threads (`loops`).

use std::collections::{BTreeMap, VecDeque};

use super::THREADS_MAX;

/// The most threads that run loops of one group.
pub(super) const GROUP_THREADS_MAX: usize = THREADS_MAX * 3 / 4;

/// What a loop does, and therefore what it may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::threads) enum LoopKind {
    Journal,
    Engine,
}

/// Loops that may wait for the same disk, and so may all hang at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::threads) struct LoopGroup {
    pub(in crate::threads) disk: u64,
    pub(in crate::threads) kind: LoopKind,
}

struct Group<T> {
    /// Bounded by the loops: each is here once at most.
    ready: VecDeque<T>,
    running: usize,
}

/// Loops that wait for a thread, and how many run.
pub(super) struct ReadyLoops<T> {
    /// Bounded by the disks of open volumes.
    groups: BTreeMap<LoopGroup, Group<T>>,
    /// The groups that have a loop which may run, each once. Bounded by `groups`.
    turns: VecDeque<LoopGroup>,
}

impl<T> Default for ReadyLoops<T> {
    fn default() -> Self {
        ReadyLoops { groups: BTreeMap::new(), turns: VecDeque::new() }
    }
}

impl<T> Group<T> {
    fn may_run(&self) -> bool {
        self.running < GROUP_THREADS_MAX && !self.ready.is_empty()
    }
}

impl<T> ReadyLoops<T> {
    /// Adds a loop. Returns whether its group may have another thread.
    pub(super) fn push(&mut self, number: LoopGroup, ready: T) -> bool {
        let empty = || Group { ready: VecDeque::new(), running: 0 };
        let group = self.groups.entry(number).or_insert_with(empty);
        let has_turn = group.may_run();
        group.ready.push_back(ready);
        if !has_turn && group.may_run() {
            self.turns.push_back(number);
        }
        group.may_run()
    }

    /// The next loop that may run; [`leave`](Self::leave) follows.
    pub(super) fn take(&mut self) -> Option<T> {
        let number = self.turns.pop_front()?;
        let group = self.groups.get_mut(&number)?;
        let ready = group.ready.pop_front()?;
        group.running += 1;
        if group.may_run() {
            self.turns.push_back(number);
        }
        Some(ready)
    }

    /// A loop of this group has left its thread.
    pub(super) fn leave(&mut self, number: LoopGroup) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        let had_turn = group.may_run();
        group.running = group.running.saturating_sub(1);
        if !had_turn && group.may_run() {
            self.turns.push_back(number);
        }
        if group.running == 0 && group.ready.is_empty() {
            self.groups.remove(&number);
        }
    }

    /// How many more could run at once.
    pub(super) fn may_run_count(&self) -> usize {
        let of = |group: &Group<T>| group.ready.len().min(GROUP_THREADS_MAX - group.running);
        self.groups.values().map(of).sum()
    }

    /// Whether a loop waits that may run.
    pub(super) fn may_run(&self) -> bool {
        !self.turns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(disk: u64) -> LoopGroup {
        LoopGroup { disk, kind: LoopKind::Journal }
    }

    #[test]
    fn the_loops_of_a_group_take_turns_and_so_do_the_groups() {
        let mut ready = ReadyLoops::default();
        (0..4).for_each(|number| assert!(ready.push(group(1), number)));
        assert!(ready.push(group(2), 10));
        let order: Vec<_> = std::iter::from_fn(|| ready.take()).collect();
        assert_eq!(order, [0, 10, 1, 2, 3]);
        assert!(!ready.may_run());
    }

    #[test]
    fn each_of_a_thousand_busy_loops_has_as_many_turns_as_the_others() {
        let mut ready = ReadyLoops::default();
        let mut turns = vec![0; 1000];
        (0..turns.len()).for_each(|number| {
            ready.push(group(number as u64 % 3), number);
        });
        // A thread runs each for one turn.
        for _ in 0..100 * turns.len() {
            let number = ready.take().expect("all are busy");
            turns[number] += 1;
            ready.leave(group(number as u64 % 3));
            ready.push(group(number as u64 % 3), number);
        }
        let (least, most) = (turns.iter().min(), turns.iter().max());
        assert!(turns.iter().all(|count| (99..=101).contains(count)), "{least:?} to {most:?}");
    }

    #[test]
    fn a_group_with_all_its_threads_waits_until_one_is_free() {
        let mut ready = ReadyLoops::default();
        let count = GROUP_THREADS_MAX + 2;
        let may_run: Vec<_> = (0..count).map(|number| ready.push(group(1), number)).collect();
        assert!(may_run.iter().all(|may_run| *may_run), "none runs yet");
        assert_eq!(std::iter::from_fn(|| ready.take()).count(), GROUP_THREADS_MAX);
        assert!(!ready.push(group(1), count) && !ready.may_run());
        assert!(ready.push(group(2), 100), "another group has threads");
        assert_eq!(ready.take(), Some(100));
        ready.leave(group(1));
        assert_eq!(ready.take(), Some(GROUP_THREADS_MAX), "the first that waited");
        assert_eq!(ready.take(), None);
        (0..GROUP_THREADS_MAX).for_each(|_| ready.leave(group(1)));
        ready.leave(group(2));
        assert_eq!(std::iter::from_fn(|| ready.take()).count(), 2);
        (0..2).for_each(|_| ready.leave(group(1)));
        assert!(ready.groups.is_empty(), "nothing is kept of groups without loops");
    }
}

//! Loops that are ready and wait for a thread.
//!
//! Invariants: the loops of one group leave in the order in which they came, and at most
//! `group_threads_max` of them run. Groups take turns, so that a group with few loops does not
//! wait behind one with many. No step looks at all loops. The counts are
//! what the groups say.
//!
//! Not here: the threads (`loops`).

use std::collections::{BTreeMap, VecDeque};

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
    group_threads_max: usize,
    /// Bounded by the disks of open volumes.
    groups: BTreeMap<LoopGroup, Group<T>>,
    /// The groups that have a loop which may run, each once. Bounded by `groups`.
    turns: VecDeque<LoopGroup>,
    /// How many loops run, how many more may by the limits of their groups, and how many groups
    /// have only such that wait.
    running: usize,
    open: usize,
    unserved: usize,
}

impl<T> Group<T> {
    fn open(&self, threads_max: usize) -> usize {
        self.ready.len().min(threads_max.saturating_sub(self.running))
    }

    fn is_unserved(&self) -> bool {
        self.running == 0 && !self.ready.is_empty()
    }
}

impl<T> ReadyLoops<T> {
    pub(super) fn new(group_threads_max: usize) -> Self {
        let (groups, turns) = (BTreeMap::new(), VecDeque::new());
        ReadyLoops { group_threads_max, groups, turns, running: 0, open: 0, unserved: 0 }
    }

    /// Adds a loop.
    pub(super) fn push(&mut self, number: LoopGroup, ready: T) {
        self.change(number, |group| group.ready.push_back(ready));
    }

    /// The next loop that may run; [`leave`](Self::leave) follows.
    pub(super) fn take(&mut self) -> Option<T> {
        self.take_turn(0)
    }

    /// The next loop of which no other of its group runs; [`leave`](Self::leave) follows.
    pub(super) fn take_unserved(&mut self) -> Option<T> {
        if self.unserved == 0 {
            return None;
        }
        let is_unserved =
            |number: &LoopGroup| self.groups.get(number).is_some_and(Group::is_unserved);
        self.take_turn(self.turns.iter().position(is_unserved)?)
    }

    fn take_turn(&mut self, at: usize) -> Option<T> {
        // To the end of the line: it stays there only if it has another loop that may run.
        let number = self.turns.remove(at)?;
        self.turns.push_back(number);
        let ready = self.change(number, |group| {
            group.running += 1;
            group.ready.pop_front()
        });
        self.running += 1;
        ready
    }

    /// Takes a loop of this group out of its turn and of the limits, if it is there;
    /// [`leave`](Self::leave) follows.
    pub(super) fn take_if(&mut self, number: LoopGroup, is_it: impl Fn(&T) -> bool) -> bool {
        let group = self.groups.get(&number);
        let Some(at) = group.and_then(|group| group.ready.iter().position(is_it)) else {
            return false;
        };
        self.change(number, |group| {
            group.running += 1;
            group.ready.remove(at);
        });
        self.running += 1;
        true
    }

    /// A loop of this group has left its thread.
    pub(super) fn leave(&mut self, number: LoopGroup) {
        self.change(number, |group| group.running = group.running.saturating_sub(1));
        self.running = self.running.saturating_sub(1);
    }

    /// How many loops run.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    /// How many more could run at once by the limits of their groups.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// How many groups have loops that wait, and none that runs.
    pub(super) fn unserved(&self) -> usize {
        self.unserved
    }

    /// Changes a group, and with it the counts and its place in the line.
    fn change<R>(&mut self, number: LoopGroup, change: impl FnOnce(&mut Group<T>) -> R) -> R {
        let empty = || Group { ready: VecDeque::new(), running: 0 };
        let group = self.groups.entry(number).or_insert_with(empty);
        let (open_before, unserved_before) =
            (group.open(self.group_threads_max), group.is_unserved());
        let changed = change(group);
        let (open, is_unserved) = (group.open(self.group_threads_max), group.is_unserved());
        if group.running == 0 && group.ready.is_empty() {
            self.groups.remove(&number);
        }
        self.open = self.open + open - open_before;
        self.unserved = self.unserved + usize::from(is_unserved) - usize::from(unserved_before);
        if open_before == 0 && open > 0 {
            self.turns.push_back(number);
        } else if open_before > 0 && open == 0 {
            self.turns.retain(|other| *other != number);
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP_THREADS_MAX: usize = 24;

    fn group(disk: u64) -> LoopGroup {
        LoopGroup { disk, kind: LoopKind::Journal }
    }

    #[test]
    fn the_loops_of_a_group_take_turns_and_so_do_the_groups() {
        let mut ready = ReadyLoops::new(GROUP_THREADS_MAX);
        (0..4).for_each(|number| ready.push(group(1), number));
        ready.push(group(2), 10);
        assert_eq!((ready.open(), ready.unserved()), (5, 2));
        let order: Vec<_> = std::iter::from_fn(|| ready.take()).collect();
        assert_eq!(order, [0, 10, 1, 2, 3]);
        assert_eq!((ready.open(), ready.unserved(), ready.running()), (0, 0, 5));
    }

    #[test]
    fn each_of_a_thousand_busy_loops_has_as_many_turns_as_the_others() {
        let mut ready = ReadyLoops::new(GROUP_THREADS_MAX);
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
        let mut ready = ReadyLoops::new(GROUP_THREADS_MAX);
        let count = GROUP_THREADS_MAX + 2;
        (0..count).for_each(|number| ready.push(group(1), number));
        assert_eq!(std::iter::from_fn(|| ready.take()).count(), GROUP_THREADS_MAX);
        ready.push(group(1), count);
        assert_eq!((ready.take(), ready.take_unserved()), (None, None));
        ready.push(group(2), 100);
        assert_eq!(ready.take_unserved(), Some(100), "another group has threads");
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

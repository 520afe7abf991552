//! A run in numbers, and the sums over many runs.
//!
//! Invariant: [`Story::add`] adds up every number except the digest. Each is in `counts` or
//! `edge_counts`, and a test demands that seeds meet it. Not here: the events one by one (`trace`).

use std::fmt;

use sawmill_volume::Counters;

/// How often each kind of event happened, in one run or in many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Story {
    /// Digest of every event, of one run.
    pub digest: u64,
    /// Events.
    pub events: u64,
    /// Operations of clients.
    pub operations: u64,
    /// Operations that waited for room in the log.
    pub stalls: u64,
    /// Lives begun.
    pub lives: u64,
    /// Deaths of processes, between steps or at an I/O.
    pub deaths: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Journals lost, or replaced by an older image.
    pub journals_lost: u64,
    /// Attachments by another machine while the first still ran.
    pub takeovers: u64,
    /// Clean closes.
    pub closes: u64,
    /// Bytes and sectors of local disks that rotted.
    pub rots: u64,
    /// Reads of the store alone, by readers.
    pub read_only_opens: u64,
    /// Segments that garbage collection wrote.
    pub moves: u64,
    /// Segments deleted.
    pub deletes: u64,
    /// Snapshots reported done.
    pub snapshots: u64,
    /// Rollbacks reported done.
    pub rollbacks: u64,
    /// Clones made.
    pub clones: u64,
    /// Moments of the past that were read.
    pub moments: u64,
    /// Disks made larger.
    pub growths: u64,
    /// Clones flattened.
    pub flattened: u64,
    /// Completed rounds of a copier to a second store.
    pub copies: u64,
    /// Replicas promoted while their primary lived.
    pub promotions: u64,
    /// Fail-backs to the first store.
    pub fail_backs: u64,
    /// Hand-offs to another process of the machine.
    pub hand_offs: u64,
    /// Commands that attached and closed between two lives.
    pub commands: u64,
    /// Stores restored from a backup.
    pub restores: u64,
    /// Stores copied.
    pub store_copies: u64,
    /// Attachments of those copies.
    pub lives_of_copies: u64,
    /// Attempts to attach beside a living process.
    pub refused_beside: u64,
    /// Memories that were exchanged for foreign ones.
    pub foreign_memories: u64,
    /// Acts on names by several actors.
    pub name_acts: u64,
}

impl Story {
    /// The numbers that add up, with their names.
    #[must_use]
    pub fn counts(&self) -> [(&'static str, u64); 22] {
        [
            ("events", self.events),
            ("operations", self.operations),
            ("stalled", self.stalls),
            ("lives", self.lives),
            ("deaths", self.deaths),
            ("power cuts", self.power_cuts),
            ("journals lost", self.journals_lost),
            ("takeovers", self.takeovers),
            ("closes", self.closes),
            ("rots", self.rots),
            ("read_only_opens", self.read_only_opens),
            ("moved segments", self.moves),
            ("deleted segments", self.deletes),
            ("snapshots", self.snapshots),
            ("rollbacks", self.rollbacks),
            ("clones", self.clones),
            ("moments read", self.moments),
            ("growths", self.growths),
            ("flattened", self.flattened),
            ("copies", self.copies),
            ("promotions", self.promotions),
            ("fail-backs", self.fail_backs),
        ]
    }

    /// The numbers of events that only seeds with edges meet.
    #[must_use]
    pub fn edge_counts(&self) -> [(&'static str, u64); 8] {
        [
            ("hand-offs", self.hand_offs),
            ("commands", self.commands),
            ("stores put back", self.restores),
            ("stores copied", self.store_copies),
            ("lives of copies", self.lives_of_copies),
            ("refused beside", self.refused_beside),
            ("foreign memories", self.foreign_memories),
            ("acts on names", self.name_acts),
        ]
    }

    /// Adds another run's numbers to these.
    pub fn add(&mut self, other: &Story) {
        self.events += other.events;
        self.operations += other.operations;
        self.stalls += other.stalls;
        self.lives += other.lives;
        self.deaths += other.deaths;
        self.power_cuts += other.power_cuts;
        self.journals_lost += other.journals_lost;
        self.takeovers += other.takeovers;
        self.closes += other.closes;
        self.rots += other.rots;
        self.read_only_opens += other.read_only_opens;
        self.moves += other.moves;
        self.deletes += other.deletes;
        self.snapshots += other.snapshots;
        self.rollbacks += other.rollbacks;
        self.clones += other.clones;
        self.moments += other.moments;
        self.growths += other.growths;
        self.flattened += other.flattened;
        self.copies += other.copies;
        self.promotions += other.promotions;
        self.fail_backs += other.fail_backs;
        self.hand_offs += other.hand_offs;
        self.commands += other.commands;
        self.restores += other.restores;
        self.store_copies += other.store_copies;
        self.lives_of_copies += other.lives_of_copies;
        self.refused_beside += other.refused_beside;
        self.foreign_memories += other.foreign_memories;
        self.name_acts += other.name_acts;
    }

    /// Adds the counters of a process.
    pub(crate) fn add_counters(&mut self, counters: &Counters) {
        self.stalls += counters.writes_stalled;
        self.moves += counters.segments_moved;
        self.deletes += counters.segments_deleted;
    }
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let edge_counts = self.edge_counts().into_iter().filter(|(_, count)| *count > 0);
        for (index, (name, count)) in self.counts().into_iter().chain(edge_counts).enumerate() {
            write!(f, "{}{count} {name}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

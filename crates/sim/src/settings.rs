//! The settings of a seed's world. Each seed enables or disables whole classes of faults, so that
//! common ones do not mask rare combinations.
//!
//! Invariant: [`Settings::of`] gets no new roll. Later settings are 0 there and rolled by other
//! dice (`edges`), so that old seeds keep their worlds. Not here: the faults themselves (`store`,
//! `disk`).

use sawmill_volume::limits::{SEGMENT_BYTES_MIN, STAGING_BYTES_MIN, journal_bytes_min};
use sawmill_volume::{FlushMode, GcChoice, GcPolicy};

use crate::disk::DiskFaults;
use crate::store::StoreFaults;
use sawmill_testkit::Dice;

/// Which edges a seed's world has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edges {
    /// A journal's lock excludes others, and a second process tries to attach beside the holder.
    pub locks: bool,
    /// The store is copied, and the copy attached on the same machine; or the store is restored
    /// from a backup.
    pub histories: bool,
    /// The read cache's index outlives the process.
    pub warm_cache: bool,
    /// Memory exists but is foreign.
    pub foreign_memory: bool,
    /// A process hands over to the next one.
    pub hand_offs: bool,
    /// Between two lives a command attaches and closes.
    pub commands: bool,
    /// Several actors create, rename, clone and delete volumes of one store.
    pub names: bool,
}

/// The sizes, rates and kinds of faults of one seed's world.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Size of the volume, at its largest.
    pub size_bytes: u64,
    /// Its initial size: it may grow.
    pub first_bytes: u64,
    /// What a flush means.
    pub mode: FlushMode,
    /// Lives of processes, the first included.
    pub lives: u64,
    /// Scheduler steps per life.
    pub steps: u64,
    /// The longest write.
    pub write_bytes_max: u64,
    /// Faults of the store.
    pub store: StoreFaults,
    /// Faults of the journal's disk.
    pub disk: DiskFaults,
    /// One life in so many ends at an I/O instead of between two steps.
    pub die_at_io_odds: u64,
    /// One life in so many is followed by a life on another machine, without the journal.
    pub takeover_odds: u64,
    /// After one death in so many the wrong machine attaches first, and accepts no loss.
    pub elsewhere_odds: u64,
    /// One life in so many ends with the loss of the journal.
    pub journal_loss_odds: u64,
    /// One life in so many ends with a power cut.
    pub power_cut_odds: u64,
    /// One life in so many ends with the loss of the machine's memory alone.
    pub memory_loss_odds: u64,
    /// One life in so many is closed cleanly.
    pub close_odds: u64,
    /// Bytes of log between two checkpoints.
    pub checkpoint_bytes: u64,
    /// Segments in flight at the same time.
    pub uploads_max: u32,
    /// Milliseconds after which a small segment is sealed.
    pub segment_age_ms: u64,
    /// The journal is synced for unflushed writes of this age; 0: never.
    pub log_age_ms: u64,
    /// Size of a segment.
    pub segment_bytes: u32,
    /// Size of the journal.
    pub journal_bytes: u64,
    /// Size of the staging ring.
    pub staging_bytes: u64,
    /// Size of the read cache; 0: none.
    pub cache_bytes: u64,
    /// At one step in so many a local disk rots.
    pub rot_odds: u64,
    /// At one step in so many a reader opens the volume, or reads it.
    pub reader_odds: u64,
    /// At one step in so many a copier does a round to a second store.
    pub copy_odds: u64,
    /// When garbage is collected.
    pub gc: GcPolicy,
    /// At one step in so many garbage collection is requested.
    pub gc_request_odds: u64,
    /// At one step in so many an order changes the past (snapshots, retention, rollbacks, clones)
    /// or the size of the disk.
    pub past_odds: u64,
    /// At one step in so many a machine's wall clock jumps ahead, or is corrected.
    pub jump_odds: u64,
    /// The edges.
    pub edges: Edges,
}

impl Settings {
    /// A small world without faults, for stories that add their own.
    #[must_use]
    pub fn calm() -> Self {
        Settings {
            size_bytes: 200 << 10,
            first_bytes: 200 << 10,
            mode: FlushMode::Logged,
            lives: 1,
            steps: 0,
            write_bytes_max: 40_000,
            store: StoreFaults::default(),
            disk: DiskFaults::default(),
            die_at_io_odds: 0,
            takeover_odds: 0,
            elsewhere_odds: 0,
            journal_loss_odds: 0,
            power_cut_odds: 0,
            memory_loss_odds: 0,
            close_odds: 0,
            checkpoint_bytes: 256 << 10,
            uploads_max: 1,
            segment_age_ms: 5,
            log_age_ms: 0,
            segment_bytes: SEGMENT_BYTES_MIN,
            journal_bytes: journal_bytes_min(SEGMENT_BYTES_MIN),
            staging_bytes: STAGING_BYTES_MIN,
            cache_bytes: 0,
            rot_odds: 0,
            reader_odds: 0,
            copy_odds: 0,
            gc: GcPolicy { start: 0.0, ..GcPolicy::default() },
            gc_request_odds: 0,
            past_odds: 0,
            jump_odds: 0,
            edges: Edges::default(),
        }
    }

    /// The settings of a seed, without edges.
    #[must_use]
    pub fn of(dice: &mut Dice) -> Self {
        let (store, disk) = (store_faults(dice), disk_faults(dice));
        let size_bytes = *dice.pick(&[
            16_u64 << 10,
            64 << 10,
            64 << 10,
            64 << 10,
            160 << 10,
            160 << 10,
            160 << 10,
            640 << 10,
        ]);
        let segment_bytes =
            *dice.pick(&[SEGMENT_BYTES_MIN, SEGMENT_BYTES_MIN, 4 * SEGMENT_BYTES_MIN]);
        let past_odds = *dice.pick(&[0, 0, 12, 25]);
        let first_bytes =
            if past_odds > 0 { size_bytes / dice.pick(&[1, 2, 4]) } else { size_bytes };
        Settings {
            size_bytes,
            first_bytes,
            mode: *dice.pick(&[
                FlushMode::Logged,
                FlushMode::Logged,
                FlushMode::Stored,
                FlushMode::Weak,
            ]),
            lives: 2 + dice.below(5),
            steps: *dice.pick(&[20, 60, 150]),
            write_bytes_max: *dice.pick(&[700, 5000, 5000, 40_000]),
            store,
            disk,
            die_at_io_odds: *dice.pick(&[0, 2, 4]),
            takeover_odds: *dice.pick(&[0, 0, 3]),
            elsewhere_odds: 6,
            journal_loss_odds: *dice.pick(&[0, 0, 4]),
            power_cut_odds: *dice.pick(&[0, 2, 3]),
            memory_loss_odds: *dice.pick(&[0, 0, 4]),
            close_odds: *dice.pick(&[0, 3, 6]),
            checkpoint_bytes: *dice.pick(&[4 << 10, 32 << 10, 256 << 10]),
            uploads_max: *dice.pick(&[1, 3, 8]),
            segment_age_ms: *dice.pick(&[0, 5, 100]),
            log_age_ms: 0,
            segment_bytes,
            journal_bytes: journal_bytes_min(segment_bytes) * dice.pick(&[1, 1, 4]),
            staging_bytes: STAGING_BYTES_MIN * dice.pick(&[1, 1, 2, 4]),
            cache_bytes: *dice.pick(&[0, 32 << 10, 256 << 10]),
            rot_odds: *dice.pick(&[0, 0, 0, 0, 0, 0, 0, 40]),
            reader_odds: *dice.pick(&[0, 0, 0, 40]),
            gc: GcPolicy {
                start: *dice.pick(&[0.0, 0.7, 0.9]),
                stop: *dice.pick(&[0.9, 0.95]),
                choice: *dice.pick(&[GcChoice::Greedy, GcChoice::CostBenefit]),
                bytes_per_second_max: *dice.pick(&[0, 0, 1 << 20]),
            },
            gc_request_odds: *dice.pick(&[0, 0, 60]),
            past_odds,
            copy_odds: *dice.pick(&[0, 0, 60]),
            jump_odds: if past_odds > 0 { *dice.pick(&[0, 80]) } else { 0 },
            edges: Edges::default(),
        }
    }
}

/// The faults of a seed's store.
fn store_faults(dice: &mut Dice) -> StoreFaults {
    let mut odds = |choices: &[u64]| *dice.pick(choices);
    StoreFaults {
        fail_odds: odds(&[0, 0, 8, 30]),
        unheard_odds: odds(&[0, 0, 8, 30]),
        late_odds: odds(&[0, 0, 5, 20]),
        lag_odds: odds(&[0, 0, 3]),
        garble_odds: odds(&[0, 0, 0, 0, 0, 40]),
        half_odds: 0,
        ghost_odds: 0,
    }
}

/// The faults of a seed's journal disk.
fn disk_faults(dice: &mut Dice) -> DiskFaults {
    let mut odds = |choices: &[u64]| *dice.pick(choices);
    DiskFaults {
        write_odds: odds(&[0, 0, 0, 0, 0, 60]),
        sync_odds: odds(&[0, 0, 0, 0, 0, 20]),
        read_odds: odds(&[0, 0, 0, 0, 0, 60]),
        make_odds: odds(&[0, 0, 0, 0, 0, 2]),
        short_odds: 0,
        full_odds: 0,
        lie_odds: 0,
    }
}

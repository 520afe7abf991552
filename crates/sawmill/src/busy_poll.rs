//! Whether threads look for their next messages before they sleep, as users say it.
//!
//! Not here: when a look is worthwhile (`sawmill_sys::Spin`).

use std::time::Duration;

use clap::ValueEnum;
use sawmill_sys::SPIN_TIME_MAX;

/// When a receiver looks for its next message before it sleeps.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum BusyPoll {
    Auto,
    Never,
}

impl BusyPoll {
    /// How many threads may look at once: of a few cores, half are left to clients and disks.
    pub(crate) fn lookers_max(self) -> usize {
        if self.spin_time_max().is_zero() { 0 } else { allowed_cores() / 2 }
    }

    /// The longest look; zero: none.
    pub(crate) fn spin_time_max(self) -> Duration {
        match self {
            BusyPoll::Auto if !may_have_quota(allowed_cores(), cores_of_quota()) => SPIN_TIME_MAX,
            BusyPoll::Auto | BusyPoll::Never => Duration::ZERO,
        }
    }
}

/// Whether a control group may limit the processor time. A receiver that looks would use it up: the
/// kernel then stops all threads of the group for a while, and no look notices that in time. Where
/// one core is allowed, a quota below it does not show.
fn may_have_quota(allowed_cores: usize, cores_of_quota: usize) -> bool {
    cores_of_quota < allowed_cores || allowed_cores == 1
}

/// The cores that this process may run on.
fn allowed_cores() -> usize {
    rustix::thread::sched_getaffinity(None).map_or(1, |cores| cores.count() as usize)
}

/// The same, or less where a quota allows less.
fn cores_of_quota() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_look_only_where_asked_and_never_under_a_limit_on_processor_time() {
        assert_eq!(BusyPoll::Never.spin_time_max(), Duration::ZERO);
        for (allowed_cores, cores_of_quota, expected) in
            [(1, 1, true), (8, 8, false), (2, 1, true), (64, 2, true)]
        {
            assert_eq!(may_have_quota(allowed_cores, cores_of_quota), expected);
        }
        let is_off = may_have_quota(allowed_cores(), cores_of_quota());
        assert_eq!(BusyPoll::Auto.spin_time_max().is_zero(), is_off);
        let most = if is_off { 0 } else { allowed_cores() / 2 };
        assert_eq!([BusyPoll::Auto, BusyPoll::Never].map(BusyPoll::lookers_max), [most, 0]);
    }
}

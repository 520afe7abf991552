//! Wall clocks that jump, for the life of one server: 40 days ahead or behind, or by a wrong zone.
//! Only the wall clock: the machine's monotonic clock is left alone.
//!
//! What must hold: nothing is lost, and every moment noted before stays readable by its position.
//!
//! Only for stores in folders: a bucket checks the time in each request, and refuses a wrong one.
//!
//! Not here: a clock that jumps while a server lives, which the simulation has (`crates/sim`).

use std::path::Path;

use super::Torture;
use super::volume::{AttachOptions, Volume};

/// The server's false time and zone.
const CLOCKS: [(&str, &str); 3] = [
    ("clock 40 days ahead", "+40d"),
    ("clock 40 days behind", "-40d"),
    ("clock of a wrong zone", "+14h"),
];
const SHARED_MEMORY: &str = "/dev/shm";

impl Torture {
    pub(super) fn wrong_clock(&mut self, volume: &mut Volume) -> Option<AttachOptions> {
        let mut options = self.attach_options(volume)?;
        let (name, jump) = CLOCKS[self.dice.below(3) as usize];
        self.report.did(name);
        let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        options.environment = vec![
            set("LD_PRELOAD", &library()),
            set("FAKETIME", jump),
            set("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            set("DONT_FAKE_MONOTONIC", "1"),
            set("NO_FAKE_STAT", "1"),
        ];
        Some(options)
    }

    /// The clock is correct again; the server with the wrong one is dead.
    pub(super) fn after_a_wrong_clock(&mut self, volume: &mut Volume) {
        forget_leavings();
        self.proxy.stop_faults();
        let options = self.attach_options(volume).unwrap_or_default();
        let Some(server) = self.start(volume, &options) else { return };
        let client = server.connect();
        self.check_content(volume, &client);
        self.check_past(volume, 3);
        self.wait_stored(volume);
        self.keep_a_moment(volume, &client);
        server.kill();
        self.report.kills += 1;
    }
}

/// The library that fakes the time.
fn library() -> String {
    let folder = Path::new("/usr/lib");
    let name = "faketime/libfaketimeMT.so.1";
    let mut found = std::fs::read_dir(folder).expect("Linux has /usr/lib").flatten();
    let found = found.find_map(|entry| Some(entry.path().join(name)).filter(|path| path.is_file()));
    let found = found.expect("libfaketime is missing: run tests/setup/prepare.sh test");
    found.display().to_string()
}

/// The library leaves two small files of each process that was killed.
fn forget_leavings() {
    for entry in std::fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = ["faketime_shm_", "sem.faketime_sem_"]
            .iter()
            .find_map(|begin| name.strip_prefix(begin));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // Another process may have removed it first.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

//! Runs the target that `SAWMILL_FUZZ_TARGET` names under libFuzzer, which is guided by coverage.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use sawmill_fuzz::{FuzzTarget, TARGETS};

fn target() -> &'static FuzzTarget {
    static CHOSEN: OnceLock<&FuzzTarget> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("SAWMILL_FUZZ_TARGET").unwrap_or_default();
        let chosen = TARGETS.iter().find(|target| target.name == name);
        chosen.unwrap_or_else(|| panic!("SAWMILL_FUZZ_TARGET={name:?} is none of the targets"))
    })
}

fuzz_target!(|bytes: &[u8]| (target().run)(bytes));

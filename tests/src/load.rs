//! A stamped load whose requests must be answered: the load of the crash checker, with a test's
//! demands.
//!
//! Not here: the requests and their log (`sawmill_verify::load`), a load that commits (`torture`).

use std::ops::{Deref, DerefMut};

pub use sawmill_verify::load::{LoadCounts, Mix};

use crate::machine::PATIENCE;
use crate::nbd::Client;
use sawmill_testkit::Dice;

/// A load on a volume, and its log.
pub struct Load(sawmill_verify::load::Load);

impl Load {
    /// A load on an empty volume of `size_bytes`.
    #[must_use]
    pub fn new(size_bytes: u64, dice: Dice, mix: Mix) -> Self {
        Load(sawmill_verify::load::Load::new(size_bytes, dice, mix))
    }

    /// Runs `completions` requests and waits for all answers; every one must be good.
    ///
    /// # Panics
    /// When a request is refused or not answered.
    pub fn run(&mut self, clients: &[Client], completions: u64) {
        let counts = self.drive(clients, completions, || ());
        let silent = format!("or no answer came for {} s", PATIENCE.as_secs());
        assert_eq!(
            (counts.refused, counts.unanswered),
            (0, 0),
            "all were to succeed, {silent}: {counts:?}"
        );
    }
}

impl Deref for Load {
    type Target = sawmill_verify::load::Load;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Load {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

//! Seeded chance: the same seed, the same run. The seed is printed, so a failure can be had again.

/// A small generator (SplitMix64): not for secrets, good enough to choose moments and addresses.
#[derive(Clone, Debug)]
pub struct Dice {
    state: u64,
}

impl Dice {
    /// A generator that starts at `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Dice { state: seed }
    }

    /// For tests: the seed from `SAWMILL_SEED`, else from the clock; printed with the name of its user.
    #[must_use]
    pub fn seeded(user: &str) -> Self {
        let given = std::env::var("SAWMILL_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(|| {
            let since = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
            since ^ (u64::from(std::process::id()) << 40)
        });
        println!("{user}: SAWMILL_SEED={seed}");
        Dice::new(seed)
    }

    /// 64 even bits.
    pub fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// True once in `times` throws.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        for chunk in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        bytes
    }
}

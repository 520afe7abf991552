//! Pseudorandom numbers: a small generator whose rolls depend on its seed alone, forever.
//!
//! Invariant: a roll takes one word of the sequence, `fill` one for each 8 bytes, and odds of 0
//! none, because the meaning of a seed depends on this. Not here: which seeds a test uses.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64: short, fast, good enough to choose moments, addresses and faults. Not for secrets.
#[derive(Clone, Debug, Default)]
pub struct Dice(u64);

impl Dice {
    /// Dice with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Dice(seed)
    }

    /// For tests: the seed from `SAWMILL_SEED`, else from the clock; printed with the name of its
    /// user.
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

    /// Other dice that depend on these and on `purpose` alone.
    #[must_use]
    pub fn split(&mut self, purpose: u64) -> Dice {
        Dice(self.word() ^ purpose.wrapping_mul(STEP))
    }

    /// 64 uniformly distributed bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// A place in a list of `length` entries, which is not 0.
    pub fn index(&mut self, length: usize) -> usize {
        (self.word() % length as u64) as usize
    }

    /// True once in `odds` times; never when `odds` is 0.
    pub fn one_in(&mut self, odds: u64) -> bool {
        odds > 0 && self.below(odds) == 0
    }

    /// One of `choices`, which is not empty.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.index(choices.len())]
    }

    /// Fills `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.word().to_le_bytes()[..chunk.len()]);
        }
    }

    /// `count` random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.fill(&mut bytes);
        bytes
    }
}

/// A hash of a number in which every bit depends on every bit; 0 stays 0.
#[must_use]
pub fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_rolls_that_it_always_gave() {
        // The published first outputs of SplitMix64 for the seed 1234567.
        let mut dice = Dice::new(1_234_567);
        assert_eq!(
            [dice.word(), dice.word()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
        );
    }

    #[test]
    fn odds_of_zero_never_come() {
        assert!((0..100).all(|seed| !Dice::new(seed).one_in(0)));
    }
}

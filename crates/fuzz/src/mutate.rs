//! Changes of an input by seed: flipped bits, spliced and repeated stretches, numbers made large or small,
//! cuts. The same seed makes the same change.

/// A source of numbers that a seed decides.
pub struct Dice(u64);

impl Dice {
    /// Dice for this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    /// The next 64 bits.
    pub fn roll(&mut self) -> u64 {
        // splitmix64: well mixed from any seed.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound as u64) as usize
    }
}

/// Numbers at the edges of what fields hold.
const EDGES: [u64; 12] = [
    0,
    1,
    80,
    511,
    4095,
    4096,
    1 << 16,
    u32::MAX as u64,
    1 << 32,
    i64::MAX as u64,
    u64::MAX - 4096,
    u64::MAX,
];

/// `input` with one to four changes; parts come from `others`. Never longer than `bytes_max`.
pub fn mutate(input: &[u8], others: &[Vec<u8>], dice: &mut Dice, bytes_max: usize) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..1 + dice.below(4) {
        change(&mut bytes, others, dice);
    }
    bytes.truncate(bytes_max);
    bytes
}

fn change(bytes: &mut Vec<u8>, others: &[Vec<u8>], dice: &mut Dice) {
    if bytes.is_empty() {
        bytes.push(dice.roll() as u8);
    }
    // Heads hold most of what matters.
    let reach = if dice.below(2) == 0 { bytes.len().min(256) } else { bytes.len() };
    let at = dice.below(reach);
    match dice.below(8) {
        0 | 1 => bytes[at] ^= 1 << dice.below(8),
        2 => bytes[at] = dice.roll() as u8,
        3 => {
            let (width, edge) = ([1, 2, 4, 8][dice.below(4)], EDGES[dice.below(EDGES.len())]);
            let bits = if dice.below(2) == 0 { edge.to_le_bytes() } else { edge.swap_bytes().to_be_bytes() };
            let end = (at + width).min(bytes.len());
            bytes[at..end].copy_from_slice(&bits[..end - at]);
        }
        4 => {
            let (width, delta) = ([1, 4, 8][dice.below(3)], 1 + dice.below(16) as u64);
            let end = (at + width).min(bytes.len());
            let mut number = [0; 8];
            number[..end - at].copy_from_slice(&bytes[at..end]);
            let number = u64::from_le_bytes(number);
            let near =
                if dice.below(2) == 0 { number.wrapping_add(delta) } else { number.wrapping_sub(delta) };
            let width = end - at;
            bytes[at..end].copy_from_slice(&near.to_le_bytes()[..width]);
        }
        5 => bytes.truncate(at),
        6 => {
            let end = at + dice.below((bytes.len() - at).min(200) + 1);
            let copied = bytes[at..end].to_vec();
            let to = dice.below(bytes.len() + 1);
            bytes.splice(to..to, copied);
        }
        _ => {
            let Some(other) = others.get(dice.below(others.len().max(1))).filter(|other| !other.is_empty())
            else {
                return;
            };
            let from = dice.below(other.len());
            let length = dice.below((other.len() - from).min(2000) + 1);
            let end = if dice.below(2) == 0 { at } else { (at + length).min(bytes.len()) };
            bytes.splice(at..end, other[from..from + length].iter().copied());
        }
    }
}

//! Seeded changes of an input: flipped bits, spliced and repeated stretches, large and small
//! numbers, cuts. The same seed makes the same change.
//!
//! Not here: correcting checksums after a change (`mend`), the number of changes (`tests/bytes`).

use sawmill_testkit::Dice;

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
    for _ in 0..1 + dice.index(4) {
        change(&mut bytes, others, dice);
    }
    // Copies and splices may have made it too long for its target.
    bytes.truncate(bytes_max);
    bytes
}

fn change(bytes: &mut Vec<u8>, others: &[Vec<u8>], dice: &mut Dice) {
    // Every change below needs a byte to begin at.
    if bytes.is_empty() {
        bytes.push(dice.word() as u8);
    }
    // Most of the structure is at the beginning.
    let reach = if dice.index(2) == 0 { bytes.len().min(256) } else { bytes.len() };
    let at = dice.index(reach);
    match dice.index(8) {
        0 | 1 => bytes[at] ^= 1 << dice.index(8),
        2 => bytes[at] = dice.word() as u8,
        3 => {
            let (width, edge) = ([1, 2, 4, 8][dice.index(4)], EDGES[dice.index(EDGES.len())]);
            let bits = if dice.index(2) == 0 {
                edge.to_le_bytes()
            } else {
                edge.swap_bytes().to_be_bytes()
            };
            let end = (at + width).min(bytes.len());
            bytes[at..end].copy_from_slice(&bits[..end - at]);
        }
        4 => {
            let (width, delta) = ([1, 4, 8][dice.index(3)], 1 + dice.index(16) as u64);
            let end = (at + width).min(bytes.len());
            let mut number = [0; 8];
            number[..end - at].copy_from_slice(&bytes[at..end]);
            let number = u64::from_le_bytes(number);
            let near = if dice.index(2) == 0 {
                number.wrapping_add(delta)
            } else {
                number.wrapping_sub(delta)
            };
            let width = end - at;
            bytes[at..end].copy_from_slice(&near.to_le_bytes()[..width]);
        }
        5 => bytes.truncate(at),
        6 => {
            let end = at + dice.index((bytes.len() - at).min(200) + 1);
            let copied = bytes[at..end].to_vec();
            let to = dice.index(bytes.len() + 1);
            bytes.splice(to..to, copied);
        }
        _ => {
            let Some(other) =
                others.get(dice.index(others.len().max(1))).filter(|other| !other.is_empty())
            else {
                return;
            };
            let from = dice.index(other.len());
            let length = dice.index((other.len() - from).min(2000) + 1);
            let end = if dice.index(2) == 0 { at } else { (at + length).min(bytes.len()) };
            bytes.splice(at..end, other[from..from + length].iter().copied());
        }
    }
}

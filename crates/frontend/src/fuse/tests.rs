//! Properties of the codec: how it treats arbitrary bytes, and the form of every answer.

use proptest::prelude::*;

use super::answer::{self, Attributes, InitParameters};
use super::protocol::{FILE, HEAD_BYTES, Malformed, Message, Operation, ROOT, init, parse};

/// A request of this kind with these arguments.
fn request(opcode: u32, node: u64, arguments: &[u8]) -> Vec<u8> {
    let mut bytes = ((HEAD_BYTES + arguments.len()) as u32).to_ne_bytes().to_vec();
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend(77u64.to_ne_bytes());
    bytes.extend(node.to_ne_bytes());
    bytes.extend([0; 16]);
    bytes.extend(arguments);
    bytes
}

/// Arguments as 64-bit and 32-bit numbers.
fn words(parts: &[(u64, usize)]) -> Vec<u8> {
    parts.iter().flat_map(|(value, bytes)| value.to_ne_bytes()[..*bytes].to_vec()).collect()
}

fn understood(bytes: &[u8]) -> Operation<'_> {
    let Message { unique, operation, .. } = parse(bytes).expect("well formed");
    assert_eq!(unique, 77);
    operation
}

const READ: [(u64, usize); 7] =
    [(1, 8), (4096, 8), (512, 4), (0, 4), (0, 8), (0o40_000, 4), (0, 4)];

/// One well-formed request of every kind that has arguments, with the fewest bytes it may have.
fn samples() -> Vec<Vec<u8>> {
    let init = words(&[(7, 4), (31, 4), (65536, 4), (init::MAX_PAGES, 4)]);
    let allocate = words(&[(0, 8), (1 << 20, 8), (4096, 8), (3, 4)]);
    let mut write = words(&READ);
    write.extend([9; 512]);
    vec![
        request(1, ROOT, b"disk\0"),
        request(4, FILE, &[0; 88]),
        request(15, FILE, &words(&READ)),
        request(16, FILE, &write),
        request(26, 0, &init),
        request(28, ROOT, &words(&READ)),
        request(43, FILE, &allocate),
        request(46, FILE, &words(&[(0, 8), (4096, 8), (4, 4)])),
    ]
}

#[test]
fn each_fuse_request_decodes_to_its_operation_and_range() {
    assert_eq!(understood(&request(1, ROOT, b"disk\0")), Operation::Lookup { name: b"disk" });
    let read = Operation::Read { offset: 4096, length: 512 };
    assert_eq!(understood(&request(15, FILE, &words(&READ))), read);
    let bytes = request(16, FILE, &[words(&READ), vec![9; 512]].concat());
    let write = Operation::Write { offset: 4096, open_flags: 0o40_000, payload: &[9; 512] };
    assert_eq!(understood(&bytes), write);
    let allocate = words(&[(0, 8), (5, 8), (7, 8), (3, 4), (0, 4)]);
    let expected = Operation::Allocate { offset: 5, length: 7, mode: 3 };
    assert_eq!(understood(&request(43, FILE, &allocate)), expected);
    let seek = words(&[(0, 8), (9, 8), (3, 4), (0, 4)]);
    assert_eq!(understood(&request(46, FILE, &seek)), Operation::Seek { offset: 9, whence: 3 });
    let size = words(&[(8, 4), (0, 4), (0, 8), (123, 8)]);
    let size = [size, vec![0; 64]].concat();
    let expected = Operation::SetAttributes { change: 8, size_bytes: 123 };
    assert_eq!(understood(&request(4, FILE, &size)), expected);
}

#[test]
fn an_init_of_any_kernel_version_is_answered_with_its_features() {
    let old = words(&[(7, 4), (28, 4), (65536, 4), (init::MAX_PAGES, 4)]);
    let of = |bytes: &[u8]| match understood(bytes) {
        Operation::Init { major, minor, flags, .. } => (major, minor, flags),
        other => panic!("{other:?}"),
    };
    assert_eq!(of(&request(26, 0, &old)), (7, 28, init::MAX_PAGES));
    let flags = init::EXTENDED | init::RESEND | init::MAX_PAGES;
    let low = flags & u64::from(u32::MAX);
    let new = words(&[(7, 4), (45, 4), (65536, 4), (low, 4), (flags >> 32, 4), (0, 8)]);
    assert_eq!(of(&request(26, 0, &new)), (7, 45, flags));
}

#[test]
fn a_request_cut_short_anywhere_is_malformed_and_can_be_answered() {
    for sample in samples() {
        assert!(parse(&sample).is_ok());
        for end in 0..sample.len() {
            let mut cut = sample[..end].to_vec();
            let expected = if end < HEAD_BYTES {
                Malformed::Head
            } else {
                // First the length in the head is wrong; then it is right, and the arguments are
                // too short.
                let opcode = u32::from_ne_bytes(sample[4..8].try_into().expect("four bytes"));
                Malformed::Arguments { unique: 77, opcode }
            };
            assert_eq!(parse(&cut), Err(expected));
            if end >= HEAD_BYTES {
                cut[..4].copy_from_slice(&(end as u32).to_ne_bytes());
                assert_eq!(parse(&cut), Err(expected), "{end} bytes of {}", sample.len());
            }
        }
    }
}

#[test]
fn kinds_without_a_name_here_are_unknown() {
    for opcode in [0, 5, 6, 21, 24, 35, 39, 45, 47, 52, 4096, u32::MAX] {
        assert_eq!(understood(&request(opcode, FILE, &[1; 50])), Operation::Unknown { opcode });
    }
}

fn facts() -> Attributes {
    Attributes { size_bytes: (1 << 40) + 1, mode: 0o640, user: 5, group: 6, time_s: 1 << 30 }
}

#[test]
fn every_answer_says_its_length_and_whom_it_answers() {
    let agreed = InitParameters { minor: 40, flags: u64::MAX, write_bytes_max: 1 << 20 };
    // The bodies' lengths are those of linux/fuse.h.
    for (answer, body_bytes) in [
        (answer::init(77, &agreed, 65536, 512), 64),
        (answer::attributes_of(77, FILE, &facts()), 104),
        (answer::entry(77, &facts()), 128),
        (answer::opened(77), 16),
        (answer::opened_folder(77), 16),
        (answer::written(77, 5), 8),
        (answer::sought(77, 5), 8),
        (answer::stat_fs(77, 1 << 40, 255), 80),
        (answer::head(77, 5, 0).to_vec(), 0),
    ] {
        assert_eq!(answer.len(), answer::HEAD_BYTES + body_bytes);
        assert_eq!(answer[..4], (answer.len() as u32).to_ne_bytes());
        assert_eq!(answer[8..16], 77u64.to_ne_bytes());
    }
    assert_eq!(answer::head(77, 5, 0)[4..8], (-5i32).to_ne_bytes());
    assert_eq!(answer::resend()[4..16], [7i32.to_ne_bytes().to_vec(), vec![0; 8]].concat());
    assert_eq!(
        answer::invalidate_file()[4..16],
        [2i32.to_ne_bytes().to_vec(), vec![0; 8]].concat()
    );
}

#[test]
fn a_user_that_may_read_the_file_may_enter_the_folder() {
    for (mode, expected) in [(0o600, 0o700), (0o640, 0o750), (0o666, 0o777), (0o400, 0o500)] {
        let facts = Attributes { mode, ..facts() };
        let answer = answer::attributes_of(77, ROOT, &facts);
        // Behind the head, the validity and 60 bytes of attributes.
        let mode = u32::from_ne_bytes(answer[92..96].try_into().expect("four bytes"));
        assert_eq!(mode, 0o040_000 | expected, "{mode:o}");
    }
}

#[test]
fn a_folder_is_read_piece_by_piece() {
    let all = answer::folder(77, 0, 4096, b"a name");
    let mut pieces = Vec::new();
    for offset in 0..4 {
        let piece = answer::folder(77, offset, 40, b"a name");
        assert!(piece.len() <= answer::HEAD_BYTES + 40);
        pieces.extend(piece[answer::HEAD_BYTES..].to_vec());
    }
    assert_eq!(pieces, all[answer::HEAD_BYTES..]);
    assert!(answer::folder(77, 0, 10, b"a name").len() == answer::HEAD_BYTES, "no room for any");
}

proptest! {
    #[test]
    fn no_bytes_make_a_request_that_reaches_outside_them(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let _ = parse(&bytes);
    }

    #[test]
    fn no_arguments_make_a_request_that_reaches_outside_them(
        opcode in 0u32..60,
        arguments in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let bytes = request(opcode, FILE, &arguments);
        match parse(&bytes) {
            Ok(message) => prop_assert_eq!(message.unique, 77),
            Err(error) => prop_assert_eq!(error, Malformed::Arguments { unique: 77, opcode }),
        }
        if let Ok(Message { operation: Operation::Write { payload, .. }, .. }) = parse(&bytes) {
            prop_assert_eq!(payload.len(), arguments.len() - 40);
        }
    }
}

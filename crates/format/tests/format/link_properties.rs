//! Properties of the link's packets: what was encoded decodes to the same, a decoder refuses any
//! bytes that its encoder would not write, and an acknowledgement names no number twice.

use proptest::collection::vec;
use proptest::prelude::*;
use sawmill_format::link::control::{self, OpenAnswer};
use sawmill_format::link::greeting::{Hello, Seek, Welcome};
use sawmill_format::link::statement::{self, *};
use sawmill_format::link::{self, HEADER_BYTES, NUMBER_END, Packet};

use crate::link::{JOIN, body_of, encode_runs, list, pushed, statements};

/// Writes statements again, one after the other.
fn encode_statements(statements: &[Statement<'_>], room: usize) -> Vec<u8> {
    body_of(room, |body| {
        for statement in statements {
            pushed(match *statement {
                Statement::Command(command, inline) => {
                    body.command(&command, inline.len(), |into| into.copy_from_slice(inline))
                }
                Statement::Data(Data { place, use_number, offset, bytes }) => {
                    body.data(place, use_number, offset, bytes.len(), |into| {
                        into.copy_from_slice(bytes)
                    })
                }
                Statement::Reply(reply, inline) => {
                    body.reply(&reply, inline.len(), |into| into.copy_from_slice(inline))
                }
                Statement::Ack(ack) => {
                    body.ack(ack.link, ack.delay_us, &ack.runs().collect::<Vec<_>>())
                }
                Statement::Note(note) => body.note(&note),
                Statement::Close(status, text) => body.close(status, text),
            });
        }
    })
}

/// No number occurs twice, and none is below zero: each run ends below the one before it.
fn check_ack(ack: &Ack<'_>) {
    let mut end = ack.largest + 1;
    assert!(end <= NUMBER_END);
    for (first, last) in ack.runs() {
        assert!(first <= last && last < end, "{ack:?}");
        end = first;
    }
    let newest = ack.runs().next().map(|(_, last)| last);
    assert_eq!(newest, Some(ack.largest));
}

/// The statements read from a body encode to the same bytes again, and lie within it.
fn check_body(body: &[u8]) {
    let mut good = Vec::new();
    for statement in Statements::new(body) {
        let Ok(statement) = statement else { break };
        match statement {
            Statement::Ack(ack) => check_ack(&ack),
            Statement::Command(command, inline) => assert!(inline.len() as u64 <= command.length),
            Statement::Data(data) => {
                assert!((data.offset as usize).is_multiple_of(link::GRAIN_BYTES))
            }
            Statement::Reply(reply, inline) => assert!(inline.len() <= reply.length as usize),
            Statement::Note(note) => assert!(usize::from(note.link) < link::LINKS_MAX),
            Statement::Close(_, text) => assert!(text.len() <= TEXT_BYTES_MAX),
        }
        good.push(statement);
    }
    let again = encode_statements(&good, body.len());
    assert_eq!(again, body[..again.len()]);
    if statements(body).is_ok() {
        assert!(
            body[again.len()..].iter().all(|byte| *byte == 0),
            "only zeroes follow the last statement"
        );
    }
}

/// Decodes `bytes` as each structure of the link.
pub(crate) fn decode_all(bytes: &[u8]) {
    check_body(bytes);
    if let Ok(packet) = Packet::decode(bytes) {
        let mut again = [0; HEADER_BYTES];
        packet.encode(&mut again);
        assert_eq!(again, bytes[..HEADER_BYTES]);
        check_body(&bytes[HEADER_BYTES..packet.length as usize]);
    }
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode().unwrap(), bytes);
    }
    if let Ok(welcome) = Welcome::decode(bytes) {
        assert_eq!(welcome.encode().unwrap(), bytes);
    }
    if let Ok(seek) = Seek::decode(bytes) {
        assert_eq!(seek.encode().unwrap(), bytes);
    }
    if let Ok(answer) = OpenAnswer::decode(bytes) {
        assert_eq!(answer.encode()[..], *bytes);
    }
    if let Ok(exports) = control::exports(bytes) {
        let names: Vec<_> = exports.named.iter().map(|(name, bytes)| (&name[..], *bytes)).collect();
        let mut again = list(&names, bytes.len());
        again[4..8].copy_from_slice(&exports.left_out.to_le_bytes());
        assert_eq!(again, bytes[..again.len()]);
    }
    if let Ok(runs) = control::runs(bytes) {
        let runs: Vec<_> = runs.collect();
        let again = encode_runs(&runs, bytes.len());
        assert_eq!(again, bytes[..again.len()]);
    }
}

fn operations() -> impl Strategy<Value = Operation> {
    use Operation::*;
    prop::sample::select(vec![
        Read,
        Write,
        WritePacked,
        Flush,
        Discard,
        WriteZeroes,
        Prefetch,
        Allocation,
        Open,
        Close,
        List,
    ])
}

/// A statement that an end may send.
#[derive(Clone, Debug)]
enum SentStatement {
    Command(Command, usize),
    Data(u16, u64, u32, usize),
    Reply(Reply, usize),
    Ack(u8, u32, Vec<(u64, u64)>),
    Note(Note),
    Close(u8, String),
}

prop_compose! {
    fn commands()(
        operation in operations(), place: u16, flags in 0u8..4, export: u8, use_number: u64,
        address: u64,
        payload in 0usize..600, wild: u64,
    ) -> (Command, usize) {
        let length = if operation.sends_payload() { payload as u64 } else { wild };
        let flags = if matches!(operation, Operation::Close | Operation::List) { 0 } else { flags };
        let inline = if operation.sends_payload() { payload } else { 0 };
        (Command { operation, place, flags, export, use_number, address, length }, inline)
    }
}

prop_compose! {
    /// Runs, the newest first, with gaps and lengths of any size that a window may have.
    fn runs_of_acks()(
        largest in 0u64..NUMBER_END, runs in vec((0u64..70_000, 1u64..70_000), 1..40),
    ) -> Vec<(u64, u64)> {
        let (mut end, mut found) = (largest + 1, Vec::new());
        for (index, (gap, count)) in runs.into_iter().enumerate() {
            let gap = if index == 0 { 0 } else { gap };
            if end < gap + count {
                break;
            }
            (_, end) = (found.push((end - gap - count, end - gap - 1)), end - gap - count);
        }
        if found.is_empty() { vec![(largest, largest)] } else { found }
    }
}

fn sent() -> impl Strategy<Value = SentStatement> {
    use NoteKind::*;
    let kinds = prop::sample::select(vec![Ping, Join, Joined, Leave]);
    let note = (kinds, 0u8..8, any::<u32>(), any::<u64>()).prop_map(
        |(kind, link, packet_bytes, token)| {
            SentStatement::Note(Note { kind, link, packet_bytes, token })
        },
    );
    let reply = (any::<u16>(), any::<u64>(), any::<u8>(), 0usize..600);
    prop_oneof![
        commands().prop_map(|(command, payload)| SentStatement::Command(command, payload)),
        (any::<u16>(), any::<u64>(), 0u32..1000, 1usize..600).prop_map(
            |(place, use_number, grain, bytes)| SentStatement::Data(
                place,
                use_number,
                grain * 128,
                bytes
            )
        ),
        reply.prop_map(|(place, use_number, status, payload)| {
            SentStatement::Reply(
                Reply { place, use_number, status, length: payload as u32 },
                payload,
            )
        }),
        (0u8..8, any::<u32>(), runs_of_acks())
            .prop_map(|(link, delay, runs)| SentStatement::Ack(link, delay, runs)),
        note,
        (any::<u8>(), ".{0,500}").prop_map(|(status, text)| SentStatement::Close(status, text)),
    ]
}

/// The runs read from an acknowledgement are the front of those wanted.
fn is_front_of(all_runs: &[(u64, u64)], read: &[(u64, u64)]) -> bool {
    let (Some((last, before)), true) = (read.split_last(), read.len() <= all_runs.len()) else {
        return false;
    };
    let to = all_runs[before.len()];
    *before == all_runs[..before.len()] && last.1 == to.1 && last.0 >= to.0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn what_is_put_into_a_body_comes_out_of_it_in_order(
        sent in vec(sent(), 0..12), room in 0usize..1500,
    ) {
        let mut bytes = vec![0xee; room];
        let mut body = Body::new(&mut bytes);
        let mut kept = Vec::new();
        for one in sent {
            let before = body.used();
            let (fits, whole) = match &one {
                SentStatement::Command(command, payload) => {
                    let inline = body.payload_room(command_at::SIZE, *payload);
                    prop_assert!(statement::check_piece(0, inline, *payload as u64).is_ok());
                    (body.command(command, inline, |into| into.fill(3)), command_at::SIZE)
                }
                SentStatement::Data(place, use_number, offset, want) => {
                    let some = body.payload_room(data_at::SIZE, *want);
                    prop_assert!(some <= *want && (some == *want || some.is_multiple_of(128)));
                    let fits =
                        some > 0
                            && body.data(*place, *use_number, *offset, some, |into| into.fill(4));
                    (fits, if some == 0 { usize::MAX } else { data_at::SIZE + some })
                }
                SentStatement::Reply(reply, payload) => {
                    let inline = body.payload_room(reply_at::SIZE, *payload);
                    (body.reply(reply, inline, |into| into.fill(5)), reply_at::SIZE)
                }
                SentStatement::Ack(link, delay_us, runs) => {
                    (body.ack(*link, *delay_us, runs), ack_at::SIZE + run_at::SIZE)
                }
                SentStatement::Note(note) => (body.note(note), note_at::SIZE),
                SentStatement::Close(status, text) => (body.close(*status, text), close_at::SIZE),
            };
            prop_assert_eq!(fits, whole <= room - before, "{:?}", one);
            prop_assert!(fits || body.used() == before, "what does not fit changes nothing");
            if fits {
                kept.push(one);
            }
        }
        body.pad();
        let statements = statements(&bytes).unwrap();
        prop_assert_eq!(statements.len(), kept.len());
        for (statement, one) in statements.iter().zip(&kept) {
            let same = match (statement, one) {
                (Statement::Command(read, _), SentStatement::Command(command, _)) => {
                    read == command
                }
                (Statement::Data(read), SentStatement::Data(place, use_number, offset, _)) => {
                    (read.place, read.use_number, read.offset) == (*place, *use_number, *offset)
                }
                (Statement::Reply(read, _), SentStatement::Reply(reply, _)) => read == reply,
                (Statement::Ack(read), SentStatement::Ack(link, delay_us, runs)) => {
                    (read.link, read.delay_us) == (*link, *delay_us)
                        && is_front_of(runs, &read.runs().collect::<Vec<_>>())
                }
                (Statement::Note(read), SentStatement::Note(note)) => read == note,
                (Statement::Close(read, text), SentStatement::Close(status, whole)) => {
                    read == status && whole.starts_with(text)
                }
                _ => false,
            };
            prop_assert!(same, "{:?} came as {:?}", one, statement);
        }
        check_body(&bytes);
    }

    #[test]
    fn an_acknowledgement_never_names_more_than_it_was_given(
        runs in runs_of_acks(), room in 0usize..200,
    ) {
        let body = body_of(room, |body| { body.ack(0, 0, &runs); });
        match statements(&body).unwrap()[..] {
            [] => prop_assert!(room < ack_at::SIZE + run_at::SIZE),
            [Statement::Ack(ack)] => {
                check_ack(&ack);
                prop_assert!(is_front_of(&runs, &ack.runs().collect::<Vec<_>>()));
            }
            ref other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn any_runs_of_an_acknowledgement_are_refused_or_keep_the_rules(
        largest in prop_oneof![0u64..300_000, any::<u64>()],
        runs in vec(any::<(u16, u16)>(), 0..40), count: u8,
    ) {
        let mut bytes = vec![4, 0, count % 40, 0, 0, 0, 0, 0];
        bytes.extend(largest.to_le_bytes());
        for (index, (missing, received)) in runs.into_iter().enumerate() {
            bytes.extend((if index == 0 { missing % 2 } else { missing }).to_le_bytes());
            bytes.extend(received.to_le_bytes());
        }
        check_body(&bytes);
    }

    #[test]
    fn an_allocation_covers_the_same_bytes_however_little_room_it_has(
        runs in vec((prop_oneof![0u64..1 << 20, any::<u64>()], any::<bool>()), 0..12),
        room in 0usize..80,
    ) {
        let mut bytes = vec![0; room];
        let used = control::put_runs(&mut bytes, runs.iter().copied());
        if room < 16 {
            prop_assert_eq!(used, 0);
            return Ok(());
        }
        let read: Vec<_> = control::runs(&bytes).unwrap().collect();
        prop_assert_eq!(8 + read.len() * 8, used);
        let real =
            runs.iter().filter(|run| run.0 > 0).map(|run| (run.0.min(i64::MAX as u64), run.1));
        let real: Vec<_> = real.collect();
        prop_assert_eq!(read.len(), real.len().min(room / 8 - 1));
        let Some(((covered, data), before)) = read.split_last() else { return Ok(()) };
        prop_assert_eq!(before, &real[..before.len()]);
        let rest = &real[before.len()..];
        let all = rest.iter().fold(0u64, |sum, run| sum.saturating_add(run.0)).min(i64::MAX as u64);
        prop_assert_eq!(*covered, all);
        prop_assert_eq!(*data, rest.len() > 1 || rest[0].1, "what is merged counts as data");
    }

    #[test]
    fn a_list_of_exports_comes_back_from_a_buffer_of_any_size(
        exports in vec((".{1,30}", any::<u64>()), 0..20), bytes_max in 8usize..700,
    ) {
        let names: Vec<_> =
            exports.iter().map(|(name, size_bytes)| (&name[..], *size_bytes)).collect();
        let mut bytes = list(&names, bytes_max);
        prop_assert!(bytes.len() <= bytes_max);
        let whole = control::exports(&bytes).unwrap();
        // The rest of the buffer, whatever it holds, is not an entry.
        bytes.resize(bytes_max, 1);
        prop_assert_eq!(control::exports(&bytes).unwrap(), whole.clone());
        let mut remaining = exports.iter();
        prop_assert!(
            whole.named.iter().all(|one| remaining.any(|other| other == one)), "some, in order"
        );
        prop_assert_eq!(whole.named.len() + whole.left_out as usize, exports.len());
    }

    #[test]
    fn a_padded_body_says_nothing_that_was_not_put_in(
        junk in vec(any::<u8>(), 16..400), at: prop::sample::Index,
    ) {
        let mut bytes = junk.clone();
        let mut body = Body::new(&mut bytes);
        pushed(body.note(&JOIN));
        body.pad();
        prop_assert_eq!(statements(&bytes).unwrap(), vec![Statement::Note(JOIN)]);
        let at = at.index(bytes.len());
        if at > 16 {
            bytes[at] = 1;
            prop_assert!(statements(&bytes).is_err());
        }
    }
}

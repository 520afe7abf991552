//! Inputs from other processes of a machine: pieces of doors, packets of mount holders and drivers.

use sawmill_driver::batch::chunk::ChunkEntry;
use sawmill_driver::protocol::{Answer, Command, CommandKind, Control, ControlFacts, ControlKind};
use sawmill_frontend::{DoorPiece, pack};

use super::corpus::write;

pub(super) fn write_all() {
    hand_overs();
    door_facts();
    mount_holders();
    packets();
    chunks();
    drivers();
    admin_requests();
    control_sockets();
    hand_offs();
    config_files();
}

fn hand_overs() {
    let listener =
        DoorPiece::new("listener").with("transport", "tcp").with("address", "127.0.0.1:10809");
    let connection = |unsent: usize, bytes: &[u8]| {
        let mut piece =
            DoorPiece::new("connection").with("export", "disk").with("peer", "somebody");
        piece =
            piece.with("style", "structured").with("block_status", true).with("size_bytes", 4096);
        piece =
            piece.with("flags", 1).with("request_bytes_max", 65536).with("unsent_bytes", unsent);
        piece.bytes = bytes.to_vec();
        piece
    };
    // Part of a write: 4096 bytes at 0.
    let cut =
        [&b"\x25\x60\x95\x13\0\0\0\x01COOKIE__\0\0\0\0\0\0\0\0\0\0\x10\0"[..], &[7; 99]].concat();
    let refused = connection(3, b"abc").with("refused_bytes", 100).with("refused_errno", 22);
    let refused =
        refused.with("refused_cookie", 1).with("refused_offset", 0).with("refused_text", "why");
    let pieces = [listener.with("reads", 7), connection(0, &cut), refused];
    write("hand_over", "three-pieces", &[&[0], &pack(&pieces).0[..]].concat());
    write("hand_over", "none", &[&[0], &pack(&[]).0[..]].concat());
}

fn door_facts() {
    let frontend = "features 4563402752\nprotocol_features 111\nstatus 15\nwriteback 1\n\
        regions 2\nregion.0 0 65536 4096 0\nregion.1 1048576 4096 1048576 4096\n\
        log 4096 0\ninflight 320 0 1 16\nbackend_channel 1\nqueues 2\nqueue.0 16 3 1\n\
        queue.0.addresses 0 4096 4608 4352 0\nqueue.0.kick 1\nqueue.0.call 1\nqueue.0.error 1\n\
        queue.1 0 0 2\n";
    write("door_facts", "frontend", frontend.as_bytes());
    let idle = "features 0\nprotocol_features 0\nstatus 0\nwriteback 0\nregions 0\nqueues 0\n";
    write("door_facts", "frontend-that-said-nothing", idle.as_bytes());
    let mount = "mountpoint /proc\nfile_name disk\nminor 31\nflags 4096\nwrite_bytes_max 131072\n\
        size_bytes 1073741824\nloop 3\n";
    write("door_facts", "mount", mount.as_bytes());
}

/// The first byte is the number of descriptors.
fn mount_holders() {
    let packet = |verb: u8, pieces: &[DoorPiece]| [&[0, verb], &pack(pieces).0[..]].concat();
    let mount = DoorPiece::new("fuse").with("mountpoint", "/mnt").with("flags", 4096);
    write("mount_holder", "hold", &packet(1, &[mount]));
    write("mount_holder", "give", &packet(2, &[]));
    write("mount_holder", "watch", &packet(7, &[]));
    write("mount_holder", "two-pieces", &packet(5, &[DoorPiece::new("a"), DoorPiece::new("b")]));
}

fn packets() {
    let facts =
        ControlFacts::default().with("protocol", 1).with("size", "64M").with("door", "nbd a=b");
    write("driver_packet", "doors", &Control::new(ControlKind::Doors, facts).encode());
    let options = ControlFacts::default().with("mode", "batch").with("size", 1 << 20);
    let options = options.with("weak_flush", 1).with("death_timeout_s", 1.5);
    write("driver_packet", "options", &Control::new(ControlKind::Hello, options).encode());
    let command = Command { fua: true, length: 4096, ..Command::new(CommandKind::Write, 3) };
    let commands = [command, Command::new(CommandKind::Flush, 4)]
        .iter()
        .flat_map(Command::encode)
        .collect::<Vec<u8>>();
    write("driver_packet", "commands", &commands);
    write("driver_packet", "answer", &Answer { number: 3, errno: 5 }.encode());
}

/// The first byte is the number of records.
fn chunks() {
    let entry =
        |address, length, write_number| ChunkEntry { address, length, write_number }.encode();
    let entries = [entry(4096, 512, 1), entry(0, 1024, 2)].concat();
    let data = [[1; 512], [2; 512], [3; 512]].concat();
    write("driver_chunk", "two-entries", &[&[2][..], &entries, &data].concat());
    write("driver_chunk", "data-cut-short", &[&[2][..], &entries, &data[..1535]].concat());
}

/// A mode, then pieces: how they are sent, their length, their bytes.
fn drivers() {
    let piece = |how: u8, bytes: &[u8]| [&[how, bytes.len() as u8], bytes].concat();
    let control = |how: u8, kind: ControlKind, text: &str| {
        piece(how, &[&[kind as u8], text.as_bytes()].concat())
    };
    let command = Command::new(CommandKind::Flush, 1).encode();
    let pieces = [
        // Answers to commands that it has, with and without success, and to one that it has not.
        piece(4, &[1, 0, 2, 5]),
        piece(5, &[3, 28]),
        control(6, ControlKind::Ask, "ask=status\n"),
        control(6, ControlKind::Hello, "protocol=1\n"),
        control(6, ControlKind::Ask, "ask=fail\n"),
        piece(7, b"nothing"),
        piece(2, &command),
        control(1, ControlKind::Leave, "outcome=failed\nmessage=enough\n"),
        piece(0, b"\x08\0\0\0reason=none\n"),
    ];
    for (name, mode) in [("pieces-plain", 0), ("pieces-batch", 1)] {
        write("driver_host", name, &[&[mode], &pieces.concat()[..]].concat());
    }
    let replaced = [control(6, ControlKind::Hello, "protocol=1\nreplace=1\n"), piece(4, &[1, 0])];
    write("driver_host", "replaced", &[&[0], &replaced.concat()[..]].concat());
    write("driver_host", "silent", &[0]);
}

/// The first byte: 0 is the control socket, 1 the loopback address.
fn admin_requests() {
    let get = |target: &str| format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let all = ["/", "/style.css", "/status", "/metrics", "/wait?safety=stored&timeout_ms=5", "/x"];
    let all: String = all.map(get).concat();
    let resize = r#"{"resize":{"size_bytes":4096}}"#;
    let post = format!(
        "POST /request HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{resize}",
        resize.len()
    );
    let chunked = "POST /request HTTP/1.1\r\nHost: [::1]:80\r\nTransfer-Encoding: chunked\r\n\r\n\
        e\r\n{\"remove_door\"\r\n13\r\n:{\"address\":\"none\"}}\r\n0\r\n\r\n";
    for (choice, side) in [(0, "control"), (1, "loopback")] {
        let seed = |text: &str| [&[choice][..], text.as_bytes()].concat();
        write("admin_request", &format!("{side}-gets"), &seed(&all));
        write("admin_request", &format!("{side}-post"), &seed(&post));
        write("admin_request", &format!("{side}-chunked"), &seed(chunked));
    }
    let wait = "GET /wait?safety=logged&volume=oak HTTP/1.1\r\nHost: 127.0.0.1:7\r\n\
        Sec-Fetch-Site: same-origin\r\nConnection: close\r\n\r\n";
    write("admin_request", "loopback-wait", format!("\x01{wait}").as_bytes());
    let other = "GET /status HTTP/1.1\r\nHost: example.org\r\nSec-Fetch-Site: cross-site\r\n\r\n";
    write("admin_request", "loopback-another-site", format!("\x01{other}").as_bytes());
}

fn control_sockets() {
    let requests = [
        ("collect", r#"{"collect_garbage":{"threshold":0.25}}"#),
        ("snapshot", r#"{"past":{"create_snapshot":"before"}}"#),
        ("retention", r#"{"past":{"set_retention":9}}"#),
        ("roll-back", r#"{"past":{"roll_back":"2026-11-21T10:00:00.5Z"}}"#),
        ("roll-back-to-a-position", r#"{"past":{"roll_back":"position:7"}}"#),
        ("resize", r#"{"resize":{"size_bytes":18446744073709551615}}"#),
        ("add-door", r#"{"add_door":"nbd=unix:/run/a b&c=d.sock"}"#),
        ("add-ublk", r#"{"add_door":"ublk=3"}"#),
        ("remove-door", r#"{"remove_door":{"address":"/dev/ublkb0"}}"#),
        (
            "hand-off",
            r#"{"hand_off":{"binary":"/a b","timeout":{"secs":5,"nanos":7},"stall_max":
                {"secs":0,"nanos":1}}}"#,
        ),
        ("unknown", r#"{"make_coffee":1}"#),
    ];
    for (name, text) in requests {
        write("control_request", name, text.as_bytes());
    }
    let whole = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody";
    write("control_answer", "whole", whole.as_bytes());
    write("control_answer", "cut-short", &whole.as_bytes()[..whole.len() - 1]);
    let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    write("control_answer", "chunked", chunked.as_bytes());
    let refusal = r#"{"error": "fenced by epoch 7", "exit": 6}"#;
    let refusal = format!("HTTP/1.1 409 No\r\ncontent-length: {}\r\n\r\n{refusal}", refusal.len());
    write("control_answer", "refusal", refusal.as_bytes());
    write("control_answer", "goes-on", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nend");
}

/// The first byte: 0 is one message, 1 what is on the socket.
fn hand_offs() {
    let messages = [
        ("hello", r#"{"word":"hello","conversation":1,"version":"0.1.0"}"#),
        ("prepared", r#"{"word":"prepared"}"#),
        ("serving", r#"{"word":"serving","lost_doors":["fuse: gone"]}"#),
        ("failed", r#"{"word":"failed","text":"no store","exit":5}"#),
        ("unknown", r#"{"word":"wait"}"#),
    ];
    let mut socket = vec![1];
    for (name, text) in messages {
        write("hand_off_message", name, format!("\0{text}").as_bytes());
        let length = (text.len() as u64).to_le_bytes();
        socket.extend([&b"SWM1\0\0\0\0"[..], &length, text.as_bytes()].concat());
    }
    write("hand_off_message", "several", &socket);
    let huge = [&b"\x01SWM1\0\0\0\0"[..], &u64::MAX.to_le_bytes(), b"{}"].concat();
    write("hand_off_message", "too-long", &huge);
}

fn config_files() {
    let serve = "[serve]\njournal-bytes = \"4G\"\ncache-bytes = 1073741824\nread-only = false\n\
        nbd = [\"unix:/run/a.sock\", \"--read-only\"]\n\n[target]\nlisten = [[\"udp:[::]:1\"]]\n";
    write("config_file", "two-commands", serve.as_bytes());
    write("config_file", "underscores", b"[serve]\njournal_bytes = 1\n");
    write("config_file", "a-moment", b"[serve]\njournal-bytes = 1979-05-27\n");
    write("config_file", "no-table", b"journal-bytes = 1\n");
    write("config_file", "no-command", b"[serv]\n");
    write("config_file", "cut-short", b"[serve\n");
    write("config_file", "inline", b"serve = { nbd = 1.5, \"cache-bytes\" = 0x10 }\ngc = {}\n");
}

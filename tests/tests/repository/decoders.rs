//! Each file that decodes bytes from outside names the fuzz target that feeds it.
//!
//! Not here: the targets (`crates/fuzz`), and most of what reads text from outside (its target
//! `text`).

use sawmill_tests::machine::repository;

use super::rules::production;
use super::tidy::none;

/// A file with decoders, and the target that feeds them.
const FED: [(&str, &str); 40] = [
    ("crates/driver/src/batch/chunk.rs", "driver_chunk"),
    ("crates/driver/src/protocol/command.rs", "driver_packet"),
    ("crates/driver/src/protocol/control.rs", "driver_packet"),
    ("crates/format/src/boot_set.rs", "small_objects"),
    ("crates/format/src/cache_index.rs", "small_objects"),
    ("crates/format/src/checkpoint.rs", "checkpoint"),
    ("crates/format/src/export_state.rs", "small_objects"),
    ("crates/format/src/journal/record.rs", "journal_image"),
    ("crates/format/src/journal/superblock.rs", "journal_image"),
    ("crates/format/src/kept_block.rs", "small_objects"),
    ("crates/format/src/link/control.rs", "link_control"),
    ("crates/format/src/link/greeting.rs", "link_greeting"),
    ("crates/format/src/link/mod.rs", "link_packet"),
    ("crates/format/src/map_part.rs", "map_part"),
    ("crates/format/src/name_record.rs", "small_objects"),
    ("crates/format/src/newest_state.rs", "small_objects"),
    ("crates/format/src/packed_write.rs", "packed_write"),
    ("crates/format/src/preamble.rs", "small_objects"),
    ("crates/format/src/role.rs", "small_objects"),
    ("crates/format/src/segment.rs", "segment"),
    ("crates/format/src/staging.rs", "small_objects"),
    ("crates/format/src/transfer.rs", "small_objects"),
    ("crates/format/src/volume_record.rs", "small_objects"),
    ("crates/format/src/write_log.rs", "write_log"),
    ("crates/frontend/src/buse/protocol.rs", "driver_chunk"),
    ("crates/frontend/src/fuse/protocol.rs", "fuse_request"),
    ("crates/frontend/src/mount_holder/wire.rs", "mount_holder"),
    ("crates/frontend/src/vhost/message.rs", "vhost_messages"),
    ("crates/link/src/session/key.rs", "key_file"),
    ("crates/link/src/target/machines.rs", "link_machines"),
    ("crates/nbd-proto/src/lib.rs", "nbd_transmission"),
    // No function of these has the name of a decoder.
    ("crates/sawmill/src/admin/answer.rs", "admin_request"),
    ("crates/sawmill/src/command/config_file.rs", "config_file"),
    ("crates/sawmill/src/control/http.rs", "control_answer"),
    ("crates/sawmill/src/control/protocol.rs", "control_request"),
    ("crates/sawmill/src/handoff/mod.rs", "hand_off_message"),
    ("crates/sys/src/net/frames.rs", "ethernet_frame"),
    ("crates/sys/src/net/xdp/mod.rs", "ethernet_frame"),
    // The decoders of a pin and of a name record, with the identity of a word and of a ledger.
    ("crates/volume/src/cuts/status_pins.rs", "small_objects"),
    ("crates/volume/src/names/ledger.rs", "small_objects"),
];

/// Whether a file has a function that takes bytes and is called a decoder or parser.
fn decodes(lines: &[String]) -> bool {
    let text = lines.join(" ");
    ["fn decode", "fn parse"].iter().any(|word| {
        text.split(word).skip(1).any(|rest| {
            let signature = rest.split(['{', ';']).next().unwrap_or_default();
            let parameters = signature.split("->").next().unwrap_or_default();
            parameters.contains("[u8")
        })
    })
}

#[test]
fn every_decoder_of_bytes_has_a_fuzz_target() {
    let targets = std::fs::read_to_string(repository().join("crates/fuzz/src/lib.rs")).unwrap();
    let files: Vec<String> = production()
        .into_iter()
        .filter(|(_, lines)| decodes(lines))
        .map(|(path, _)| path)
        .collect();
    let is_listed = |path: &&String| FED.iter().any(|(file, _)| file == path);
    let unlisted = files.iter().filter(|path| !is_listed(path));
    let mut faults: Vec<String> =
        unlisted.map(|path| format!("{path}: which fuzz target feeds it?")).collect();
    for (file, target) in FED {
        if !targets.contains(&format!("name: \"{target}\"")) {
            faults.push(format!("{file}: there is no target {target}"));
        }
        if !repository().join(file).exists() {
            faults.push(format!("{file} does not exist"));
        }
    }
    none(&faults);
}

//! The short run of the fuzzer in every `make test`: each target takes its corpus and seeded
//! changes of it. `SAWMILL_FUZZ_TIMES=10` takes ten times as many changes; a change that breaks
//! something is named by its seed.

mod corpus;
mod foreign;
mod processes;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;

use rustix::process::{Resource, Rlimit, setrlimit};
use sawmill_fuzz::mutate::mutate;
use sawmill_fuzz::{FuzzTarget, TARGETS};
use sawmill_testkit::Dice;

/// No input makes a target use more memory.
const MEMORY_BYTES_MAX: u64 = 1 << 30;
const INPUT_BYTES_MAX: usize = 16 << 10;

fn folder(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// The inputs of a target, in order of their names.
fn inputs(target: &str) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder(target)).expect("a corpus");
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a file of the corpus")).collect()
}

fn target(name: &str) -> &'static FuzzTarget {
    TARGETS.iter().find(|target| target.name == name).expect("a target")
}

/// Runs the corpus, then `changes` mutations of it.
fn survives(name: &str, changes: u64) {
    let limit = Rlimit { current: Some(MEMORY_BYTES_MAX), maximum: Some(MEMORY_BYTES_MAX) };
    setrlimit(Resource::Data, limit).expect("a process may limit itself");
    let (target, inputs) = (target(name), inputs(name));
    assert!(!inputs.is_empty());
    let run = |what: &str, bytes: &[u8]| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))) {
            eprintln!("{name} is broken by {what}: {}", hex(bytes));
            resume_unwind(panic);
        }
    };
    inputs
        .iter()
        .enumerate()
        .for_each(|(number, input)| run(&format!("corpus input {number}"), input));
    let times =
        std::env::var("SAWMILL_FUZZ_TIMES").ok().and_then(|times| times.parse().ok()).unwrap_or(1);
    for seed in 0..changes * times {
        let mut dice = Dice::new(seed);
        let input = &inputs[dice.index(inputs.len())];
        run(&format!("seed {seed}"), &mutate(input, &inputs, &mut dice, INPUT_BYTES_MAX));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn no_bytes_break_the_decoder_of_segments_and_frames() {
    survives("segment", 100_000);
}

#[test]
fn no_bytes_break_the_decoder_of_checkpoints() {
    survives("checkpoint", 100_000);
}

#[test]
fn no_bytes_break_the_decoder_of_map_parts() {
    survives("map_part", 100_000);
}

#[test]
fn no_bytes_break_the_decoders_of_local_files_records_and_volume_records() {
    survives("small_objects", 100_000);
}

#[test]
fn no_journal_breaks_the_scan_of_recovery() {
    survives("journal_image", 100_000);
}

#[test]
fn no_objects_break_the_stored_part_of_recovery() {
    survives("store_image", 40_000);
}

#[test]
fn no_client_breaks_the_nbd_handshake() {
    survives("nbd_handshake", 4_000);
}

#[test]
fn every_whole_nbd_request_is_answered_once_whatever_else_is_said() {
    survives("nbd_transmission", 4_000);
}

#[test]
fn no_frontend_breaks_the_vhost_user_door() {
    survives("vhost_messages", 2_000);
}

#[test]
fn no_guest_breaks_the_rings_of_the_vhost_user_door() {
    survives("vhost_ring", 2_000);
}

#[test]
fn no_pieces_break_the_server_that_takes_over() {
    survives("hand_over", 40_000);
}

#[test]
fn no_facts_about_a_door_break_the_door_that_takes_over() {
    survives("door_facts", 3_000);
}

#[test]
fn every_packet_of_a_mount_holder_has_one_encoding() {
    survives("mount_holder", 40_000);
}

#[test]
fn a_stream_gives_its_whole_packets_in_order_whatever_its_bytes_and_pieces() {
    survives("link_stream", 2_000);
}

#[test]
fn no_file_of_machines_gives_two_machines_one_key_or_shows_a_key() {
    survives("link_machines", 50_000);
}

#[test]
fn no_file_but_64_digits_is_a_key() {
    survives("key_file", 1_000);
}

#[test]
fn no_frame_of_a_station_is_taken_for_more_than_it_has() {
    survives("ethernet_frame", 100_000);
}

#[test]
fn no_request_to_the_admin_server_changes_or_shows_what_it_may_not() {
    survives("admin_request", 2_000);
}

#[test]
fn every_request_to_a_control_socket_is_refused_or_carried_out_as_it_was_sent() {
    survives("control_request", 40_000);
}

#[test]
fn no_answer_of_a_control_socket_is_taken_for_what_it_is_not() {
    survives("control_answer", 1_000);
}

#[test]
fn no_message_breaks_a_hand_off() {
    survives("hand_off_message", 20_000);
}

#[test]
fn no_configuration_file_gives_a_command_what_is_no_option_of_it() {
    survives("config_file", 5_000);
}

#[test]
fn no_packet_breaks_the_decoder_of_the_links_parts() {
    survives("link_packet", 100_000);
}

#[test]
fn no_greeting_breaks_the_links_decoders() {
    survives("link_greeting", 100_000);
}

#[test]
fn no_control_breaks_the_links_decoders() {
    survives("link_control", 100_000);
}

#[test]
fn no_initiator_breaks_the_target_of_a_link_for_others() {
    survives("link_target", 4_000);
}

#[test]
fn every_request_of_an_initiator_is_answered_once_whatever_its_target_says() {
    survives("link_initiator", 2_000);
}

#[test]
fn no_packed_write_breaks_its_decoder() {
    survives("packed_write", 100_000);
}

#[test]
fn no_text_breaks_the_parsers_of_sizes_urls_and_keys() {
    survives("text", 50_000);
}

#[test]
fn each_target_has_a_corpus_and_all_of_it_is_small() {
    let mut bytes = 0;
    for target in &TARGETS {
        let inputs = inputs(target.name);
        assert!(!inputs.is_empty(), "{}", target.name);
        bytes += inputs.iter().map(Vec::len).sum::<usize>();
    }
    assert!(bytes < 200 << 10, "{bytes} bytes of corpora");
}

#[test]
fn no_request_of_the_kernel_is_understood_beyond_what_it_says() {
    survives("fuse_request", 100_000);
    survives("ublk_request", 100_000);
}

#[test]
fn no_packet_breaks_the_decoders_of_drivers_and_hosts() {
    survives("driver_packet", 100_000);
}

#[test]
fn no_chunk_has_data_outside_of_itself() {
    survives("driver_chunk", 100_000);
}

#[test]
fn no_driver_breaks_a_host_for_the_next_driver() {
    survives("driver_host", 300);
}

#[test]
fn no_answer_of_a_store_is_taken_for_what_it_is_not() {
    survives("store_answers", 2_000);
}

#[test]
fn no_trace_gives_requests_beyond_its_promises() {
    survives("trace", 10_000);
}

#[test]
fn every_request_to_an_nbd_server_has_one_outcome_whatever_it_says() {
    survives("nbd_client", 4_000);
}

#[test]
fn no_headers_of_an_image_are_read_without_end_or_taken_for_what_they_are_not() {
    survives("image_headers", 50_000);
}

#[test]
fn no_write_log_is_cut_into_what_was_never_written() {
    survives("write_log", 20_000);
}

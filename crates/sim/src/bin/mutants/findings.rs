//! Bugs that no simulated world shows: harm from a store, a peer, a page, an image or another user
//! of the machine. Each has its test. Not here: bugs that seeds catch (`edges`).

use super::list::{Mutant, Test};

const fn lib(package: &'static str, name: &'static str) -> Test {
    Test { package, program: &["--lib"], name }
}

/// A unit test of the binary: they belong to its library.
const fn binary(name: &'static str) -> Test {
    lib("sawmill", name)
}

const fn program(
    package: &'static str,
    program: &'static [&'static str],
    name: &'static str,
) -> Test {
    Test { package, program, name }
}

const fn engine(name: &'static str) -> Test {
    Test { package: "sawmill-volume", program: &["--test", "engine"], name }
}

const fn caught_by(
    test: &'static Test,
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, test: Some(test) }
}

/// All of them.
pub(crate) const MUTANTS: &[Mutant] = &[
    // The findings of `check`.
    caught_by(
        &engine("cuts::a_check_of_a_disk_never_written_needs_no_cut_that_was_given_up"),
        "moments of a disk never written lead through rollbacks",
        "volume/src/check/kept_list.rs",
        "Some(_) => RollForwardLimit { sequence: root.through_sequence, ..RollForwardLimit::END },",
        "Some(_) => RollForwardLimit { position: root.position, ..RollForwardLimit::END },",
    ),
    // Clean ends.
    caught_by(
        &engine("memory_lost::a_clean_close_is_recognized_without_the_journal"),
        "a checkpoint may follow the last one",
        "volume/src/engine/mod.rs",
        "if self.closed {\n            return;",
        "if false {\n            return;",
    ),
    caught_by(
        &engine("memory_lost::memory_stays_while_the_journal_still_asks_for_it"),
        "memory goes although the journal still asks for it",
        "volume/src/volume.rs",
        "if self.threads.is_memory_done() {",
        "if true {",
    ),
    // The store and its copies.
    caught_by(
        &engine("histories::a_store_that_became_older_is_refused_also_without_its_journal"),
        "a store that is older than what was seen of it is as good",
        "volume/src/open/newest_seen.rs",
        "if age_of(seen, epoch, sequence) == Age::AsSeen {",
        "if age_of(seen, epoch, sequence) != Age::AsSeen || epoch > 0 {",
    ),
    caught_by(
        &engine("names::what_a_list_hides_is_found_by_name_and_taken_by_no_command"),
        "what a list shows of a name is the newest",
        "volume/src/names/ledger.rs",
        "(Ok(Some(bytes)), Ok(None)) => decode(name, *number, &bytes).ok(),",
        "(Ok(Some(bytes)), _) => decode(name, *number, &bytes).ok(),",
    ),
    caught_by(
        &engine("names::a_writer_that_attaches_while_a_delete_waits_keeps_its_volume_or_fails"),
        "who builds on a name leaves what waits to happen later",
        "volume/src/names/ledger.rs",
        "standing.newest.as_ref().filter(|_| standing.is_waiting)",
        "standing.newest.as_ref().filter(|_| false)",
    ),
    caught_by(
        &engine(
            "names::a_deleted_base_that_is_called_back_while_its_last_clone_goes_keeps_its_data",
        ),
        "a delete does not ask whether the volume was called back",
        "volume/src/cuts/removal.rs",
        "if !status_pins::put(world, store, volume_id, number, removed, content)? {",
        "if !status_pins::put(world, store, volume_id, number, removed, content)? && \
        false {",
    ),
    caught_by(
        &engine(
            "checking::a_check_notes_segments_stranded_in_the_window_of_a_fence_and_reports_no_\
            damage",
        ),
        "what is stranded in the window of a fence is passed over",
        "volume/src/check/stray.rs",
        "windows.push(*sequence + 1..header.next_sequence);",
        "windows.push(*sequence + 1..*sequence + 1);",
    ),
    caught_by(
        &engine("checking::a_check_overtaken_by_many_checkpoints_at_once_finds_no_damage"),
        "a check that was overtaken does not look again",
        "volume/src/check/kept_list.rs",
        "newest => Ok(newest?.number_max > self.number_max),",
        "newest => Ok(newest?.number_max == self.number_max + 1),",
    ),
    caught_by(
        &engine("checking::what_was_overwritten_since_the_only_checkpoint_left_is_no_damage"),
        "a check asks only for what the present still needs of its checkpoint",
        "volume/src/check/kept_list.rs",
        "root.segments.iter().filter(|entry| entry.live_bytes > 0) {",
        "root.segments.iter().filter(|entry| entry.live_bytes > 0 && state > 0) {",
    ),
    caught_by(
        &engine("resize::a_fence_that_comes_late_undoes_no_reported_size"),
        "a fence says the size whatever checkpoint it comes from",
        "volume/src/recovery/roll_forward.rs",
        "if header.size_bytes > 0 && header.checkpoint_number >= end.state_number {",
        "if header.size_bytes > 0 {",
    ),
    caught_by(
        &engine("fencing::an_attach_starts_from_a_checkpoint_that_lands_while_it_fences"),
        "an attach that begins again takes itself for the writer before",
        "volume/src/open/attach.rs",
        "        stored.end.epoch_before = before;\n",
        "        let _ = before;\n",
    ),
    caught_by(
        &engine("fencing::an_attach_that_slept_while_another_took_over_accepts_nothing"),
        "an attach does not look for a later fence at its end",
        "volume/src/open/attach.rs",
        "    let looked_at = world.now();\n    require_last(store, &stored)?;\n",
        "    let looked_at = world.now();\n",
    ),
    caught_by(
        &engine("checking::an_old_checkpoint_is_not_deleted_by_each_cleanup_again"),
        "each cleanup names all old roots again",
        "volume/src/engine/cleanup.rs",
        "        self.roots_gone_below = self.roots_gone_below.max(below);\n",
        "        let _ = below;\n",
    ),
    caught_by(
        &engine("cuts::no_wall_clock_makes_a_moment_old"),
        "the wall clock makes a moment old",
        "volume/src/engine/mod.rs",
        "self.clock.attached_ms(self.context.attachment.world.now())",
        concat!(
            "self.context.attachment.world.unix_ms()",
            ".saturating_sub(self.checkpoints.newest_root.wall_unix_ms)",
            " + self.checkpoints.newest_root.attached_ms"
        ),
    ),
    caught_by(
        &lib("sawmill-volume", "a_window_of_many_checkpoints_retains_a_bounded_number_of_them"),
        "every checkpoint begins a moment",
        "volume/src/cuts/book.rs",
        "if self.last.as_ref().is_some_and(stands_for) {",
        "if self.last.as_ref().is_some_and(stands_for) && false {",
    ),
    caught_by(
        &engine("journal_cases::a_journal_is_refused_when_the_store_is_an_old_copy"),
        "a later journal is set aside for a store that was closed cleanly",
        "volume/src/open/journal.rs",
        "    if block.epoch > end.epoch {\n        let text",
        "    if block.epoch > end.epoch {\n        if end.clean {\n            \
         return absent(stored, options, world);\n        }\n        let text",
    ),
    caught_by(
        &lib("sawmill-volume", "nothing_flushed_is_ever_dropped_and_nothing_broken_is_ever_kept"),
        "below a mark the log may end",
        "volume/src/recovery/cases.rs",
        "row(\"nothing, where data was\", [NO,  ANY, ANY, YES, ANY], Verdict::Refuse)",
        "row(\"nothing, where data was\", [NO,  ANY, ANY, YES, ANY], Verdict::Stop)",
    ),
    // The machine: its disks, its memory, its users.
    caught_by(
        &engine("journal_cases::what_rots_before_the_first_record_of_an_attachment_is_no_damage"),
        "recovery reads what lies before the records of the attachment",
        "volume/src/open/journal.rs",
        "let from = end.position.max(block.trim);",
        "let from = end.position;",
    ),
    caught_by(
        &lib("sawmill-volume", "no_power_cut_inside_a_write_loses_what_is_rewritten"),
        "what may have been flushed is written again with no copy",
        "volume/src/open/settle.rs",
        "if at < part.end && free < limits::SPAN_BYTES {",
        "if at < part.end && free < u64::MAX {",
    ),
    caught_by(
        &engine("histories::a_journal_that_was_removed_under_its_server_is_noticed"),
        "a journal that was removed under its server is not missed",
        "volume/src/journal/superblock.rs",
        "if !self.disk.has_name() {",
        "if !self.disk.has_name() && false {",
    ),
    caught_by(
        &lib(
            "sawmill-volume",
            "a_failed_sync_then_a_torn_write_then_a_power_cut_leave_a_superblock",
        ),
        "a superblock that was not synced stays",
        "volume/src/journal/superblock.rs",
        "            if let Err(error) = self.disk.write_at(next.offset_bytes(), copy) {\n",
        "            if let Err(error) = self.disk.sync() {\n",
    ),
    caught_by(
        &lib(
            "sawmill-volume",
            "a_failed_first_sync_of_a_process_and_a_torn_write_leave_a_superblock",
        ),
        "the first superblock of a process that was not synced stays",
        "volume/src/journal/superblock.rs",
        "            if let Err(error) = self.disk.write_at(next.offset_bytes(), copy) {\n",
        "            if !self.is_synced {\n                return Err(error);\n            }\n\
         \x20           if let Err(error) = self.disk.write_at(next.offset_bytes(), copy) {\n",
    ),
    caught_by(
        &lib("sawmill-volume", "what_a_copy_replaced_is_back_when_the_disk_has_dropped_both"),
        "a superblock that was not synced is blanked",
        "volume/src/journal/superblock.rs",
        "            if let Err(error) = self.disk.write_at(next.offset_bytes(), copy) {\n",
        "            copy.fill(0);\n            if let Err(error) = \
         self.disk.write_at(next.offset_bytes(), copy) {\n",
    ),
    caught_by(
        &lib(
            "sawmill-volume",
            "what_memory_says_was_synced_counts_until_an_attach_has_judged_the_log",
        ),
        "what memory says was synced counts forever",
        "volume/src/journal/scan.rs",
        "let synced = if self.judged { 0 } else { synced };",
        "let synced = if self.judged && false { 0 } else { synced };",
    ),
    caught_by(
        &lib("sawmill-volume", "a_journal_that_is_set_aside_replaces_nothing"),
        "a journal is set aside over another",
        "sys/src/direct_file.rs",
        "match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {",
        "match renameat_with(CWD, from, CWD, to, RenameFlags::empty()) {",
    ),
    caught_by(
        &engine("memory_lost::memory_is_found_where_it_was_left"),
        "memory is looked for only in the folder that is used now",
        "volume/src/open/memory.rs",
        "for folder in used_now.into_iter().chain(left_in) {",
        "for folder in used_now.into_iter().chain(left_in.filter(|_| false)) {",
    ),
    caught_by(
        &engine("memory_lost::memory_that_others_may_write_is_missed"),
        "memory that others may write is ours",
        "sys/src/staging/ownership.rs",
        "if Mode::from_raw_mode(about.st_mode) != Mode::RUSR | Mode::WUSR {",
        "if !Mode::from_raw_mode(about.st_mode).contains(Mode::RUSR | Mode::WUSR) {",
    ),
    caught_by(
        &lib("sawmill-sys", "memory_that_another_user_may_have_made_is_refused"),
        "memory with a second name is ours",
        "sys/src/staging/ownership.rs",
        "(about.st_nlink != 1).then_some",
        "(about.st_nlink == 0).then_some",
    ),
    caught_by(
        &lib("sawmill-volume", "release_waits_for_readers_of_the_disk"),
        "a hand-off's cache is let go of while it is used",
        "volume/src/cache/cache_disk.rs",
        "let disk = self.disk.write().take();",
        "let disk = self.disk.try_write().and_then(|mut disk| disk.take());",
    ),
    caught_by(
        &lib("sawmill-volume", "nothing_flushed_is_ever_dropped_and_nothing_broken_is_ever_kept"),
        "damage in memory is the end of the log",
        "volume/src/recovery/cases.rs",
        "row(\"damaged memory\",          [YES, YES, NO,  NO,  YES], Verdict::Refuse)",
        "row(\"damaged memory\",          [YES, YES, NO,  NO,  YES], Verdict::Stop)",
    ),
    // A writer that was fenced.
    caught_by(
        &engine("watch::no_flush_is_answered_on_old_news"),
        "a flush is answered although ownership was confirmed too long ago",
        "volume/src/write/flush.rs",
        "if context.watch.may_answer_flush(now) && !context.is_unstored_too_old() {",
        "if !context.is_unstored_too_old() {",
    ),
    caught_by(
        &engine("watch::a_writer_that_only_reads_is_fenced_by_a_take_over"),
        "a volume that is only read is not looked after",
        "volume/src/watch.rs",
        "used > 0 && micros(now).saturating_sub(used) < micros(IN_USE_TIME_MAX)",
        "used > 0 && micros(now).saturating_sub(used) < micros(IN_USE_TIME_MAX) && false",
    ),
    caught_by(
        &engine("watch::a_writer_that_cannot_store_stops_acknowledging_at_the_set_age"),
        "what is not stored has no age",
        "volume/src/unstored.rs",
        "stored < end && marks.front()",
        "stored > end && marks.front()",
    ),
    // Legal answers and actions of a store.
    caught_by(
        &lib(
            "sawmill-store",
            "an_answer_that_claims_more_than_asked_for_is_an_error_and_takes_no_memory",
        ),
        "a length that an answer claims is believed",
        "store/src/cloud.rs",
        "        part.check_length(length)?;\n",
        "",
    ),
    caught_by(
        &lib(
            "sawmill-store",
            "a_file_that_claims_more_than_asked_for_is_damaged_and_takes_no_memory",
        ),
        "a length that a file claims is believed",
        "store/src/backend.rs",
        "        self.check_length(range.end - range.start)?;\n",
        "",
    ),
    caught_by(
        &lib(
            "sawmill-store",
            "every_body_arrives_over_a_network_that_starves_all_but_a_few_and_none_is_sent_twice",
        ),
        "what stalls is tried again as many at once",
        "store/src/limit.rs",
        "let half = (window.running / 2).max(1);",
        "let half = limiter.requests_max;",
    ),
    caught_by(
        &lib("sawmill-store", "a_delete_of_many_that_is_half_done_is_done_by_repeating_it"),
        "a delete of many is done when the first went",
        "store/src/cloud.rs",
        "                Err(error) if error.kind() != StoreErrorKind::NotFound => return \
        Err(error),\n",
        "",
    ),
    caught_by(
        &lib(
            "sawmill-store",
            "an_endpoint_without_encryption_is_known_as_such_unless_it_is_on_this_machine",
        ),
        "an endpoint without encryption is like any other",
        "store/src/cloud.rs",
        "url.scheme() == \"http\" && !is_here",
        "url.scheme() == \"http\" && is_here",
    ),
    // Unauthenticated senders.
    caught_by(
        &program(
            "sawmill-frontend",
            &["--test", "nbd"],
            "memory_of_clients_that_take_nothing_stays_within_the_budget_and_others_are_served",
        ),
        "the memory of NBD clients has no limit",
        "frontend/src/nbd/budget.rs",
        "if state.pool_bytes + first.wants > self.pool_bytes_max() {",
        "if state.pool_bytes + first.wants > self.pool_bytes_max() && false {",
    ),
    caught_by(
        &program(
            "sawmill-frontend",
            &["--test", "nbd"],
            "idle_clients_of_one_peer_do_not_take_the_last_connections",
        ),
        "one peer may take all connections of NBD clients",
        "frontend/src/nbd/admission.rs",
        "own < PER_FREE_CONNECTION_MAX * connections_max.saturating_sub(all)",
        "own + all < usize::MAX && all < connections_max",
    ),
    caught_by(
        &program("sawmill-frontend", &["--test", "nbd"], "half_open_clients_lock_no_client_out"),
        "who haggles makes room for nobody",
        "frontend/src/nbd/reception.rs",
        "if let Some(entry) = evicted.and_then(|id| registry.entries.get(&id)) {",
        "if let Some(entry) = evicted.filter(|_| false).and_then(|id| registry.entries.get(&id)) {",
    ),
    caught_by(
        &lib("sawmill-nbd-client", "extents_without_end_are_a_violation_and_take_no_more_memory"),
        "an NBD server may send extents without end",
        "nbd-client/src/answer.rs",
        "if self.reply.extents.len() == EXTENTS_MAX {",
        "if self.reply.extents.len() == usize::MAX {",
    ),
    caught_by(
        &program(
            "sawmill-driver",
            &["--test", "neighbors"],
            "silent_connections_keep_few_threads_and_no_driver_out",
        ),
        "connections to a host may be silent without end",
        "driver/src/host/greeting.rs",
        "if silent.len() >= SILENT_CONNECTIONS_MAX",
        "if silent.len() == usize::MAX",
    ),
    // Seeds caught it before their worlds changed.
    caught_by(
        &engine("memory_of_a_clean_end_is_not_missed_after_an_attach_that_died"),
        "who closed in peace leaves memory to be missed",
        "volume/src/open/attach.rs",
        "                if log.is_none() {\n",
        "                if false {\n",
    ),
    caught_by(
        &engine("a_rivals_root_that_arrives_garbled_is_read_again"),
        "a root in the way is believed at the first read",
        "volume/src/engine/checkpoint.rs",
        "const RIVAL_READS_MAX: u32 = 4;",
        "const RIVAL_READS_MAX: u32 = 1;",
    ),
    caught_by(
        &engine("a_group_that_was_empty_before_a_rollback_is_in_the_checkpoint_after_it"),
        "a rollback is not in a full map",
        "volume/src/view.rs",
        "        then.map.mark_all_dirty();\n",
        "",
    ),
    // An attach that repeats its checkpoint (decision 0039) notices the number: only readers are
    // misled.
    caught_by(
        &engine("a_list_that_hides_the_newest_checkpoints_is_seen_through"),
        "the newest checkpoint is the newest listed",
        "volume/src/recovery/checkpoint.rs",
        "while get_or_nothing(store, volume_id, next)?.is_some() {",
        "while get_or_nothing(store, volume_id, next)?.is_some() && false {",
    ),
    // The older root's state is used although the log lacks segments.
    caught_by(
        &engine("an_older_checkpoint_is_not_used_where_the_log_lacks_what_the_damaged_one_had"),
        "a log that ends too early leads from an older checkpoint all the same",
        "volume/src/recovery/stored.rs",
        "if stored.end.next_sequence <= skipped.through_sequence => {",
        "if stored.end.next_sequence == 0 => {",
    ),
    caught_by(
        &lib(
            "sawmill-volume",
            "an_older_version_of_a_self_checked_block_is_no_hit_after_a_lost_write",
        ),
        "the read cache takes the checksum that file systems take",
        "volume/src/cache/mod.rs",
        "use sawmill_format::crc::payload_check;",
        "use sawmill_format::crc::crc32c as payload_check;",
    ),
    caught_by(
        &binary("waits_of_others_hold_up_neither_changes_nor_our_own_waits"),
        "who waits at the loopback address has the threads of our own waits",
        "sawmill/src/admin/answer.rs",
        "let kind = if only.is_some() { Call::OwnWait } else { Call::LoopbackWait };",
        "let kind = if only.is_some() || true { Call::OwnWait } else { Call::LoopbackWait };",
    ),
    caught_by(
        &binary("a_page_of_another_site_receives_nothing"),
        "a page of another site may ask",
        "sawmill/src/admin/answer.rs",
        "site.is_some_and(|site| site != b\"same-origin\" && site != b\"none\")",
        "site.is_some_and(|site| site == b\"\")",
    ),
    caught_by(
        &binary("no_path_is_shown_at_the_loopback_address"),
        "paths are shown to everybody on the machine",
        "sawmill/src/admin/answer.rs",
        "volume.journal_path = None",
        "volume.name.clear()",
    ),
    caught_by(
        &binary("qcow2_that_names_another_file_or_address_is_refused"),
        "an image over an address is followed",
        "sawmill/src/transfer/inspect_image.rs",
        "if name.split('/').next().is_some_and(|first| first.contains(':')) {",
        "if name.split('/').next().is_some_and(|first| first.contains('\\0')) {",
    ),
    caught_by(
        &lib("sawmill-lab", "every_operation_of_blkreplays_own_loads_is_read"),
        "only plain reads and writes of blkreplay are read",
        "lab/src/trace/lines.rs",
        "_ if flags.contains('R') => Operation::Read,",
        "_ if flags == \"R\" => Operation::Read,",
    ),
    caught_by(
        &lib("sawmill-link", "a_strangers_text_moves_no_cursor_and_reverses_nothing"),
        "a stranger's text is shown as it came",
        "link/src/lib.rs",
        "matches!(character, '\"' | '\\'') || character.escape_debug().len() == 1",
        "character != '\\0'",
    ),
    caught_by(
        &lib("sawmill-link", "a_source_loses_its_own_strangers_first_and_a_known_stream_stays"),
        "silent streams of one source take the places of all",
        "link/src/streams.rs",
        "let goes = if strangers(source) >= OF_SOURCE_MAX {",
        "let goes = if strangers(source) >= STREAMS_MAX {",
    ),
    caught_by(
        &program(
            "sawmill-link",
            &["--test", "simulation"],
            "three_thousand_recorded_hellos_a_second_at_50_ms_keep_no_user_out_for_two_seconds",
        ),
        "a cookie is worth nothing",
        "link/src/target/handshakes.rs",
        "|| cookie.is_some_and(|it| cookies.is_ours(",
        "|| cookie.filter(|_| false).is_some_and(|it| cookies.is_ours(",
    ),
    caught_by(
        &program(
            "sawmill-link",
            &["--test", "simulation"],
            "forged_unknowns_at_any_rate_make_no_user_reconnect",
        ),
        "whoever says that a target knows no connection is believed",
        "link/src/initiator/control/connect.rs",
        "        if !(proved && sealed) {\n",
        "        if !(proved && sealed) && header.connection == 0 {\n",
    ),
    caught_by(
        &program(
            "sawmill-link",
            &["--test", "simulation"],
            "a_hello_that_led_to_a_connection_is_not_answered_again",
        ),
        "a hello that led to a connection leads to another",
        "link/src/target/handshakes.rs",
        "if waiting.is_spent(message) {",
        "if waiting.is_spent(message) && false {",
    ),
    // Collection beside busy writers.
    caught_by(
        &engine(
            "stepped_volume::busy_writers::\
            collection_waits_for_writers_that_fill_segments_until_they_pause",
        ),
        "collection does not wait for busy writers",
        "volume/src/engine/collect.rs",
        "let is_busy = self.request.is_none() && log.has_busy_writers(context, now);",
        "let is_busy = self.request.is_none() && log.has_busy_writers(context, now) && false;",
    ),
    caught_by(
        &engine(
            "stepped_volume::busy_writers::\
            collection_waits_for_no_busy_writer_when_garbage_presses",
        ),
        "garbage that presses waits for busy writers",
        "volume/src/engine/collect.rs",
        "(is_busy || context.write.stalled.count() > 0)",
        "is_busy || (context.write.stalled.count() > 0)",
    ),
    caught_by(
        &engine(
            "stepped_volume::busy_writers::\
            a_collection_somebody_asked_for_waits_for_no_busy_writer",
        ),
        "a collection that was asked for waits for busy writers",
        "volume/src/engine/collect.rs",
        "let is_busy = self.request.is_none() && ",
        "let is_busy = ",
    ),
];

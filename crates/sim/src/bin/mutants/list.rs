//! The bugs: each a small change of the engine that breaks a promise.
//!
//! Invariant: a change names text that the engine's sources have exactly once, so that a bug is
//! never put into another place (`make test` tries all places).
//!
//! Not here: bugs that seeds with edges catch (`edges`) or a test each (`findings`), those of
//! drivers (`driver`) and of the link (`link`); putting a bug in and trying it (`main`).

/// A deliberate bug.
pub(crate) struct Mutant {
    /// Its name.
    pub(crate) name: &'static str,
    /// The file it is in, below `crates/`.
    pub(crate) file: &'static str,
    /// The text it replaces, which occurs once.
    pub(crate) from: &'static str,
    /// The replacement.
    pub(crate) to: &'static str,
    /// The test that catches it; `None`: the simulation, or the tests of its package.
    pub(crate) test: Option<&'static Test>,
}

/// A test, as cargo finds it.
pub(crate) struct Test {
    pub(crate) package: &'static str,
    /// `--lib`, or the test program.
    pub(crate) program: &'static [&'static str],
    /// The beginning or a part of its name.
    pub(crate) name: &'static str,
}

pub(super) const fn mutant(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutant {
    Mutant { name, file, from, to, test: None }
}

/// All of them.
pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "a flush is answered without a sync",
        "volume/src/journal/writer.rs",
        "        if self.written > self.journal.logged() {\n            self.sync()?;",
        "        if self.written > self.journal.logged() {\n            self.synced();",
    ),
    mutant(
        "a sync answers every flush, also later ones",
        "volume/src/journal/writer.rs",
        "if waiter.through <= logged { answered.push(waiter)",
        "if true { answered.push(waiter)",
    ),
    mutant(
        "a flush does not wait for what is not written yet",
        "volume/src/write/flush.rs",
        "Some(journal) => wait_for(context, journal.ring.next(), request),",
        "Some(journal) => wait_for(context, journal.logged(), request),",
    ),
    mutant(
        "FUA is ignored",
        "volume/src/write/mod.rs",
        "if partial.request.flags.fua {",
        "if false {",
    ),
    mutant(
        "a failed sync counts",
        "volume/src/journal/writer.rs",
        concat!(
            "            self.consumer.declare_sync_failed(self.journal.logged());\n",
            "            return Err(disk_failed(\"sync\", error));",
        ),
        "            drop(error);",
    ),
    mutant(
        "records that cannot be read back are forgotten",
        "volume/src/engine/log_tail.rs",
        "                    self.put_back(records);\n                    return \
        context.write.fail(error);",
        "                    return context.write.fail(error);",
    ),
    mutant(
        "an old clean journal overtakes a newer one",
        "volume/src/open/journal.rs",
        "if stored.end.clean || options.accept_journal_loss {\n        let why = format!(\"of \
        epoch {epoch}",
        "if true {\n        let why = format!(\"of epoch {epoch}",
    ),
    mutant(
        "the intent of one that died is trusted as it is read",
        "volume/src/open/attach.rs",
        "        superblock.write(|_| ())?;\n        let attempt = ",
        "        let attempt = ",
    ),
    mutant(
        "a failed sync of an attach is forgotten by the next",
        "volume/src/open/attach.rs",
        "        log.doubt_syncs();",
        "        let _ = log;",
    ),
    mutant(
        "what an attach wrote over a torn record is damage",
        "volume/src/journal/scan.rs",
        "judged: block.intent_epoch != 0,",
        "judged: false,",
    ),
    mutant(
        "a chunk beyond a full staging ring is zeroes",
        "volume/src/journal/scan.rs",
        "            let (staged, beyond) =\n",
        concat!(
            "            let reach = if reach <= in_memory.len() as u64 { 0 } else { reach };\n",
            "            let (staged, beyond) =\n",
        ),
    ),
    mutant(
        "after a failed sync memory does not keep what the disk may drop",
        "volume/src/journal/writer.rs",
        concat!(
            "            self.consumer.declare_sync_failed(self.journal.logged());\n",
            "            return Err(disk_failed(\"sync\", error));",
        ),
        concat!(
            "            self.consumer.declare_sync_failed(self.written);\n",
            "            return Err(disk_failed(\"sync\", error));",
        ),
    ),
    mutant(
        "a failed sync is forgotten by the next process",
        "volume/src/open/settle.rs",
        "    if log.is_doubtful() {",
        "    if false && log.is_doubtful() {",
    ),
    mutant(
        "a torn payload is taken for whole",
        "volume/src/journal/scan.rs",
        "facts.has_payload = whole == header.payload_crc;",
        "facts.has_payload = whole == header.payload_crc || true;",
    ),
    mutant(
        "records of an older epoch count",
        "volume/src/journal/scan.rs",
        "if position >= self.bound_position { epoch == self.epoch } else { epoch <= self.epoch }",
        "epoch <= self.epoch",
    ),
    mutant(
        "memory of the dead process is not moved to the disk",
        "volume/src/open/settle.rs",
        "    while at < end {\n        let length = limits::SPAN_BYTES",
        "    while at > end {\n        let length = limits::SPAN_BYTES",
    ),
    mutant(
        "memory of the dead process is not looked at",
        "volume/src/open/journal.rs",
        "MemoryLookup::Memory(staging) => image(Some(staging)),",
        "MemoryLookup::Memory(_) => image(None),",
    ),
    mutant(
        "memory of another attachment is replayed",
        "volume/src/open/memory.rs",
        "Ok(header) if header.epoch != block.bound_epoch => {",
        "Ok(header) if header.epoch > block.bound_epoch => {",
    ),
    mutant(
        "memory that is missing is taken for lost with the power",
        "volume/src/open/memory.rs",
        "    if recorded.is_none() {",
        "    if recorded.is_none_or(|_| true) {",
    ),
    mutant(
        "the first record of a replay is lost",
        "volume/src/open/bind.rs",
        "filter(|record| record.position >= trim)",
        "filter(|record| record.position > trim)",
    ),
    mutant(
        "positions are used twice",
        "volume/src/open/bind.rs",
        "|scan| scan.end).max(trim)",
        "|_| trim).max(trim)",
    ),
    mutant(
        "the intent is not remembered",
        "volume/src/open/attach.rs",
        "                block.intent_put_id = put_id;\n                if log.is_none()",
        "                if log.is_none()",
    ),
    mutant(
        "a journal of any epoch is ours",
        "volume/src/open/journal.rs",
        "let ours = (block.epoch",
        "let ours = true || (block.epoch",
    ),
    mutant(
        "a missing journal is no reason to stop",
        "volume/src/open/journal.rs",
        "    if stored.end.clean {\n        let why = \"none needed",
        "    if true {\n        let why = \"none needed",
    ),
    mutant(
        "no fence is put",
        "volume/src/open/attach.rs",
        "    fence_at_end(store, stored, attempt, world)?;\n    if let Some((_, before))",
        "    stored.end.epoch = attempt.epoch;\n    if let Some((_, before))",
    ),
    mutant(
        "a fence takes one name only",
        "volume/src/fencing.rs",
        "next_sequence: sequence + limits::FENCE_WINDOW,",
        "next_sequence: sequence + 1,",
    ),
    mutant(
        "somebody else's segment is taken for ours",
        "volume/src/engine/log_tail.rs",
        "            Ok(PutOutcome::Created) => {\n                upload.stage",
        "            Ok(PutOutcome::Created | PutOutcome::Taken) => {\n                \
        upload.stage",
    ),
    mutant(
        "a put that failed counts as stored",
        "volume/src/engine/log_tail.rs",
        "upload.stage = Stage::RepeatAt(now + REPEAT_AFTER * if denied { 4 } else { 1 });",
        "upload.stage = if denied { Stage::RepeatAt(now) } else { Stage::Stored };",
    ),
    mutant(
        "a put that failed is forgotten, and the next goes on",
        "volume/src/engine/log_tail.rs",
        "|upload: &Upload| matches!(upload.stage, Stage::Stored);",
        "|upload: &Upload| !matches!(upload.stage, Stage::UnderWay);",
    ),
    mutant(
        "a segment counts as stored when it is sent",
        "volume/src/engine/log_tail.rs",
        "        put(context, &upload);\n        self.uploads.push_back(upload);",
        concat!(
            "        put(context, &upload);\n        let sent = upload.header.position_end;\n",
            "        self.uploads.push_back(upload);\n        \
            context.mailbox.advance_stored(sent);",
        ),
    ),
    mutant(
        "an error ends the log",
        "volume/src/recovery/roll_forward.rs",
        "let header = match header? {\n",
        "let header = match header.unwrap_or(None) {\n",
    ),
    mutant(
        "the root goes before its parts",
        "volume/src/engine/checkpoint.rs",
        "if writing.parts_left > 0 || writing.root_sent {",
        "if writing.root_sent {",
    ),
    mutant(
        "a checkpoint names the position that is only sealed",
        "volume/src/engine/checkpoint.rs",
        "            position: log.stored_position(),\n",
        "            position: log.sealed_position(),\n",
    ),
    mutant(
        "a checkpoint passes over what is under way",
        "volume/src/engine/checkpoint.rs",
        "next_sequence: log.first_unstored(),",
        "next_sequence: log.next_sequence(),",
    ),
    mutant(
        "a volume is clean while something is under way",
        "volume/src/engine/mod.rs",
        "        self.log.is_empty()\n            && self.orders.is_empty()",
        "        !self.log.has_pending()\n            && self.orders.is_empty()",
    ),
    mutant(
        "segments that still hold something are deleted",
        "volume/src/segment/table.rs",
        "if info.live_bytes == 0 {\n                if",
        "if info.live_bytes < info.data_bytes {\n                if",
    ),
    mutant(
        "segments are deleted under readers and old roots",
        "volume/src/segment/table.rs",
        "changed.push((sequence, info));\n            } else if info.live_bytes == 0 {\n",
        "changed.push((sequence, info));\n            }\n            if info.live_bytes == 0 {\n",
    ),
    mutant(
        "what a segment covers stays mapped after a discard",
        "volume/src/recovery/apply.rs",
        "                    view.map.remove(address, length, &mut replaced)\n",
        "",
    ),
    mutant(
        "storing an old write hides a newer one",
        "volume/src/engine/log_tail.rs",
        "context.journal_map.remove(record.address, record.length, record.position);",
        concat!(
            "for position in record.position..=record.position + (1 << 16) {\n",
            "                    context.journal_map.remove(record.address, record.length, \
            position);\n",
            "                }",
        ),
    ),
    mutant(
        "in a segment the older write wins",
        "volume/src/segment/coalesce.rs",
        "    for record in records {\n        if record.length == 0",
        "    for record in records.iter().rev() {\n        if record.length == 0",
    ),
    mutant(
        "in the journal map the older write wins",
        "volume/src/map/journal.rs",
        "            if old.position >= position {\n                if at",
        "            if old.position <= position {\n                if at",
    ),
    mutant(
        "a cut remnant is read from its beginning",
        "volume/src/segment/coalesce.rs",
        "        self.address - self.record.address\n",
        "        0\n",
    ),
    mutant(
        "a frame's checksum is not looked at",
        "format/src/segment/frame.rs",
        "if identity.crc(head, payload) != head_at::CRC.u32(head) {",
        "if identity.crc(head, payload) != head_at::CRC.u32(head) && false {",
    ),
    mutant(
        "a record's checksum is not looked at when a segment is read",
        "volume/src/read/fetch.rs",
        "                fail(context, one, ErrorKind::Corrupt, &error)\n",
        concat!(
            "                let _ = &error;\n",
            "                let data = bytes.slice(at - length + 16..at);\n",
            "                hand_over(context, vec![(name, data, is_wanted)], run.purpose)\n",
        ),
    ),
    mutant(
        "a discard is not replayed",
        "volume/src/journal/scan.rs",
        concat!(
            "            found.fill(None, crate::record::Checks::None);\n",
            "            record = Some(Arc::new(found));",
        ),
        "            found.fill(None, crate::record::Checks::None);",
    ),
    mutant(
        "a journal that cannot be read now is set aside",
        "volume/src/open/journal.rs",
        "error.kind() == ErrorKind::Unavailable && !options.accept_journal_loss =>",
        "false && error.kind() == ErrorKind::Unavailable =>",
    ),
    mutant(
        "the last segments of a snapshot are deleted under it",
        "volume/src/cuts/book.rs",
        "cut.kind == CutKind::Retained || sequence <= cut.through_sequence",
        "cut.kind == CutKind::Retained || sequence < cut.through_sequence",
    ),
    mutant(
        "a cut's checkpoint is not kept",
        "volume/src/engine/past.rs",
        "        self.uncopied.retain(begins);\n",
        "        self.uncopied.clear();\n",
    ),
    mutant(
        "delete under a clone: pins are not asked for",
        "volume/src/engine/cleanup.rs",
        "pins::request_pin(context, self.what.number, self.what.doomed.clone());",
        "self.delete_unpinned(context, self.what.number, self.what.doomed.clone());",
    ),
    mutant(
        "a clone of a clone pins its base alone",
        "volume/src/cuts/clones.rs",
        "    for entry in &lineage {\n        let next",
        "    for entry in lineage.iter().rev().take(1) {\n        let next",
    ),
    mutant(
        "a clone of a clone forgets whose segments are whose",
        "volume/src/cuts/book.rs",
        "self.0.partition_point(|entry| entry.through_sequence < sequence)",
        "self.0.len().saturating_sub(1)",
    ),
    mutant(
        "a deleted volume takes what its clones need",
        "volume/src/cuts/removal.rs",
        "if !deleted.pinned_by.is_empty() {",
        "if false {",
    ),
    mutant(
        "a snapshot is reported as done before it is stored",
        "volume/src/engine/orders.rs",
        "            self.under_way = Some(ordered);\n        }\n    }\n",
        concat!(
            "            let OrderRequest { order, then, undo, position, callback } = ordered;\n",
            "            callback(Ok(()));\n            let callback = Box::new(|_| ());\n",
            "            let request = OrderRequest { order, then, undo, position, callback };\n",
            "            self.under_way = Some(request);\n",
            "        }\n    }\n",
        ),
    ),
    mutant(
        "an order passes over what was accepted before it",
        "volume/src/engine/orders.rs",
        "if !log.is_sealed_through(front.position) {",
        "if false {",
    ),
    mutant(
        "a rollback leaves groups that were empty then as they are",
        "volume/src/view.rs",
        "        then.map.mark_dirty(&self.map.groups());\n",
        "",
    ),
    mutant(
        "a rollback does not count what lives again",
        "volume/src/view.rs",
        "SegmentInfo { live_bytes, dead_since, is_settled, ..info }",
        "SegmentInfo { dead_since, is_settled, ..info }",
    ),
    mutant(
        "recovery passes over orders",
        "volume/src/recovery/roll_forward.rs",
        "                carry_out(store, view, end, &header)?;\n",
        "                let _ = (carry_out, view);\n",
    ),
    mutant(
        "writes are sealed between a rollback and its checkpoint",
        "volume/src/engine/mod.rs",
        "if !self.orders.is_rolling_back(&self.checkpoints) {",
        "if true {",
    ),
    mutant(
        "the retention window lets go of where its first moment begins",
        "volume/src/cuts/book.rs",
        "cut.kind != CutKind::Retained || cut.number >= bound",
        "cut.kind != CutKind::Retained || cut.number > bound",
    ),
    mutant(
        "moments age by the wall clock",
        "volume/src/engine/mod.rs",
        "self.clock.attached_ms(self.context.attachment.world.now())",
        "self.context.attachment.world.unix_ms() - 1_800_000_000_000",
    ),
    mutant(
        "a moment reaches past its time",
        "volume/src/cuts/find.rs",
        "let until = RollForwardLimit { sequence: u64::MAX, wall_unix_ms: wall, position };",
        concat!(
            "let wall = wall.saturating_add(9);\n    ",
            "let until = RollForwardLimit { sequence: u64::MAX, wall_unix_ms: wall, position };",
        ),
    ),
    mutant(
        "collection clobbers a newer write",
        "volume/src/recovery/apply.rs",
        "let moved = view.map.move_if(address, length, from, to);",
        concat!(
            "let _ = (from, to);\n",
            "view.map.insert(address, length, sequence, extent.data_offset, &mut |_, _| ());\n",
            "let moved = crate::map::MoveOutcome { moved_bytes: length, held_bytes: 0 };",
        ),
    ),
    mutant(
        "what is loaded late of a map covers what is newer",
        "volume/src/map/load.rs",
        "!self.is_whole() && self.group(number).is_some_and(",
        "false && self.group(number).is_some_and(",
    ),
    mutant(
        "a change of a group that is not loaded is lost",
        "volume/src/map/held.rs",
        "changes.push(change);",
        "let _ = (&mut changes, change);",
    ),
    mutant(
        "a group's changes are made before it is loaded",
        "volume/src/map/load.rs",
        "let filled = match taken {",
        concat!(
            "let early = std::mem::take(&mut *group.hold.changes.lock());\n",
            "early.into_iter().for_each(|change| self.make(change, &mut |_, _| {}));\n",
            "let filled = match taken {",
        ),
    ),
    mutant(
        "what late changes replaced is never counted",
        "volume/src/view.rs",
        "self.segments.lose(&self.map.take_losses());",
        "drop(self.map.take_losses());",
    ),
    mutant(
        "a close names no delta of the groups that it does not load",
        "volume/src/map/load.rs",
        "group.delta_since.store(since, Ordering::Relaxed);",
        "let _ = since;",
    ),
    mutant(
        "a close counts what is live before it has made the changes that wait",
        "volume/src/engine/map_loading.rs",
        "goal == LoadGoal::Changes && !view.map.may_have_changes_waiting();",
        "goal == LoadGoal::Changes;",
    ),
    mutant(
        "collection supersedes a block whose killer is not stored",
        "volume/src/gc/gather.rs",
        "    for (piece, extent) in pieces.iter().zip(gathered.extents.clone()) {\n",
        concat!(
            "    for (piece, extent) in pieces.iter().zip(gathered.extents.clone()) {\n",
            "        let mut newer = false;\n",
            "        let look = &mut |at: crate::map::JournalPiece<'_, _>| newer |= \
            at.entry.is_some();\n",
            "        context.journal_map.lookup(piece.address, piece.length, look);\n",
            "        if newer {\n            continue;\n        }\n",
        ),
    ),
    mutant(
        "delete under a reader: reads that have begun are not waited for",
        "volume/src/engine/cleanup.rs",
        "if !context.stored.readers.passed(self.what.read_period) {",
        "if false && !context.stored.readers.passed(self.what.read_period) {",
    ),
    mutant(
        "a moved segment has the bytes of another place",
        "volume/src/gc/gather.rs",
        "let from = piece.data_offset + done as u32;",
        "let from = piece.data_offset;",
    ),
    mutant(
        "a replica is attached for writing",
        "volume/src/replicate/role.rs",
        "let Some(role) = newest(store, record.volume_id)? else { return Ok(()) };",
        "let Some(role) = None::<Role> else { return Ok(()) };",
    ),
    mutant(
        "a promoted history goes on where the old one may still be written",
        "volume/src/replicate/promote.rs",
        "(1 << 20) + (chance as u64 & ((1 << 20) - 1))",
        "(chance as u64 & 1)",
    ),
    mutant(
        "a check does not look at the past",
        "volume/src/check/kept_list.rs",
        "        list.add_cuts(store, &cuts, &readable)?;",
        "        let _ = (&cuts, &readable);",
    ),
    mutant(
        "a check does not read map parts",
        "volume/src/check/mod.rs",
        "    verify::parts(store, &list, &mut damage)?;",
        "",
    ),
    mutant(
        "a check passes over segments that are dead by now",
        "volume/src/check/kept_list.rs",
        "            self.need_entry(state, lineage.owner(root.volume_id, entry.sequence), entry);",
        "            let _ = (entry, &lineage);",
    ),
    mutant(
        "a check is content with one checkpoint",
        "volume/src/check/kept_list.rs",
        "let is_alone = readable.len() < 2;",
        "let is_alone = false;",
    ),
];

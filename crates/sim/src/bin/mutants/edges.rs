//! Bugs at the edges of the world, where journal, memory, caches and names outlive their owners.
//! Seeds with edges catch them. Not here: the other bugs of the engine (`list`).

use super::list::{Mutant, mutant};

/// All of them.
pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "epochs grow by one",
        "volume/src/fencing.rs",
        "let step = 1 + u64::from(u32::from_le_bytes([a, b, c, d]));",
        "let step = 1 + 0 * u64::from(u32::from_le_bytes([a, b, c, d]));",
    ),
    mutant(
        "frames in the cache have no epoch",
        "volume/src/stored_data.rs",
        "        let FrameName { sequence, epoch, frame } = name;\n",
        "        let FrameName { sequence, frame, .. } = name;\n        let epoch = 0;\n",
    ),
    mutant(
        "what was written has to come from the store again",
        "volume/src/engine/caching/written.rs",
        "self.waiting.push_back(WaitingSegment { sequence, wanted, wanted_bytes });",
        "drop(WaitingSegment { sequence, wanted, wanted_bytes });",
    ),
    mutant(
        "a frame read back for the cache has the number of the next one",
        "volume/src/engine/caching/written.rs",
        "                    insert(frame, &data);\n",
        "                    insert(frame + 1, &data);\n",
    ),
    mutant(
        "blocks are written ahead of the records in every lap",
        "volume/src/journal/writer.rs",
        "        let lap_end = self.journal.first_lap_end;\n",
        "        let lap_end = u64::MAX;\n",
    ),
    mutant(
        "a cell of the saved index is believed",
        "volume/src/cache/mod.rs",
        "payload_check(block) == self.index.crc(hit.cell, number)",
        "payload_check(block) == self.index.crc(hit.cell, number) || true",
    ),
    mutant(
        "a loss is not accepted from a store that was put back",
        "volume/src/open/journal.rs",
        concat!(
            "        if options.accept_journal_loss {\n",
            "            return stale(stored, options, world, &text);\n",
            "        }\n"
        ),
        "",
    ),
    mutant(
        "a journal is locked by its name alone",
        "volume/src/open/journal.rs",
        "Ok((name, disks.lock_file(path)?))",
        "Ok((name, ()))",
    ),
    mutant(
        "a new journal is locked by its name alone",
        "volume/src/open/attach.rs",
        "true => Box::new((lock, journal::lock_file(options, world.disks())?)),",
        "true => Box::new((lock, is_made)),",
    ),
    mutant(
        "memory of any attachment is accepted",
        "volume/src/open/memory.rs",
        "Ok(header) if header.epoch != block.bound_epoch => {",
        "Ok(header) if header.epoch != block.bound_epoch && header.epoch == 0 => {",
    ),
    mutant(
        "memory that is not ours is no reason to stop",
        "volume/src/open/memory.rs",
        "            Err(Mismatch::Foreign(why)) => reasons.push(why),",
        "            Err(Mismatch::Foreign(_)) => return Ok(MemoryLookup::NoneNeeded),",
    ),
    mutant(
        "a name that means a volume is given again",
        "volume/src/names/ledger.rs",
        "        if standing.volume.is_some() {\n            return Ok(None);\n        }\n",
        "",
    ),
    mutant(
        "a rename that waits has happened",
        "volume/src/names/ledger.rs",
        "(NameStep::Moves { .. } | NameStep::Ends { .. }, None) => (true, true),",
        "(NameStep::Moves { .. } | NameStep::Ends { .. }, None) => (false, true),",
    ),
    mutant(
        "the newest record of a name is the first one found",
        "volume/src/names/ledger.rs",
        "        (Some(_), Some(second)) => Some((2, second)),\n",
        "        (Some(first), Some(_)) => return Ok(Some((1, first))),\n",
    ),
    mutant(
        "who lets go of a pin removes a base that lives",
        "volume/src/cuts/removal.rs",
        "    if !newest.is_gone() {\n        return Ok(deleted);\n    }\n",
        "",
    ),
    mutant(
        "who waits for the log hears at once",
        "volume/src/volume.rs",
        "Safety::Logged => journal.when_logged(through, callback),",
        "Safety::Logged => callback(Ok(())),",
    ),
    mutant(
        "a store need not have what its journal marks as stored",
        "volume/src/open/journal.rs",
        "if block.stored_sequence > end.stored_sequence || block.stored_position > end.position {",
        "if block.stored_sequence == u64::MAX {",
    ),
    mutant(
        "an attach leaves the next number to the writer before",
        "volume/src/open/attach.rs",
        "if !repeat_checkpoint(store, stored, world)? {",
        "if false && !repeat_checkpoint(store, stored, world)? {",
    ),
    mutant(
        "cuts begin from the checkpoint that an attach has repeated",
        "volume/src/open/repeat.rs",
        "            stored.view.cuts.lock().begin_from(&stored.newest.checkpoint, &root);\n",
        "",
    ),
    mutant(
        "a copy is written over the one that counts",
        "volume/src/open/settle.rs",
        "        superblock.write(|block| block.ring_copy = None)?;\n        at = to;\n",
        "        at = to;\n",
    ),
];

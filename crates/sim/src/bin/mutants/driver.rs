//! Bugs of the batch layer of drivers, and of the code that applies its chunks. The tests of
//! `sawmill-driver` catch them. Not here: the bugs of the engine (`list`).

use super::list::{Mutant, mutant};

/// All of them.
pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "a read does not wait for writes on their way",
        "driver/src/batch/read.rs",
        "if !may_wait && self.areas.on_the_way(request.address, end).is_empty() {",
        concat!("let _ = end;\n", "        if !may_wait {"),
    ),
    mutant(
        "a read waits for the writes of its own queue alone",
        "driver/src/batch/read.rs",
        "if !may_wait && self.areas.on_the_way(request.address, end).is_empty() {",
        concat!(
            "let its = |chunk: &ChunkId| chunk.queue == queue;\n",
            "        if !may_wait && !self.areas.on_the_way(request.address, end).iter().any(its) \
            {",
        ),
    ),
    mutant(
        "all writes have one number",
        "driver/src/batch/areas.rs",
        "        writes.last += 1;\n",
        "        writes.last = 1;\n",
    ),
    mutant(
        "numbers begin again when nothing is in flight",
        "driver/src/batch/areas.rs",
        "        writes.last += 1;\n",
        "        writes.last = if writes.entries.is_empty() { 1 } else { writes.last + 1 };\n",
    ),
    mutant(
        "an area is let go between looking at its number and listing",
        "driver/src/batch/areas.rs",
        concat!("        writes.last += 1;\n", "        let write_number = writes.last;\n"),
        concat!(
            "        let write_number = writes.last + 1;\n",
            "        drop(writes);\n",
            "        std::thread::yield_now();\n",
            "        let mut writes = self.shard(start);\n",
            "        writes.last = write_number;\n"
        ),
    ),
    mutant(
        "an area is let go before the driver has written",
        "driver/src/resolve.rs",
        concat!(
            "        for Range { start, end } in free {\n",
            "            let at = (start - entry.address) as usize;\n",
            "            write(start, &data[at..at + (end - start) as usize])?;\n",
            "        }\n",
            "        applied.push("
        ),
        concat!(
            "        drop(shard);\n",
            "        std::thread::yield_now();\n",
            "        for Range { start, end } in free {\n",
            "            let at = (start - entry.address) as usize;\n",
            "            write(start, &data[at..at + (end - start) as usize])?;\n",
            "        }\n",
            "        self.shard(area).lock().entry(area).or_default().push("
        ),
    ),
    mutant(
        "a late write is applied whole",
        "driver/src/resolve.rs",
        "applied.write_number > entry.write_number)",
        "applied.write_number > entry.write_number && false)",
    ),
    mutant(
        "a flush leaves the open chunks of other queues open",
        "driver/src/batch/flush.rs",
        "            self.close(at, &mut writes);\n",
        concat!(
            "            if at == 0 {\n",
            "                self.close(at, &mut writes);\n",
            "            }\n"
        ),
    ),
    mutant(
        "a flush is done when one queue has answered it",
        "driver/src/batch/flush.rs",
        "if flush.left.fetch_sub(1, Ordering::AcqRel) > 1 {",
        "if flush.left.fetch_sub(1, Ordering::AcqRel) > 9 {",
    ),
    mutant(
        "what a driver had in hand is not handed over again",
        "driver/src/batch/recover.rs",
        "                writes.ready.push_front((number, item));",
        "                drop((number, item));",
    ),
    mutant(
        "what a driver had in hand is handed over again backwards",
        "driver/src/batch/recover.rs",
        "for (number, (item, _)) in fetched.into_iter().rev() {",
        "for (number, (item, _)) in fetched {",
    ),
    mutant(
        "what is handed over again comes behind what is new",
        "driver/src/batch/recover.rs",
        "                writes.ready.push_front((number, item));",
        "                writes.ready.push_back((number, item));",
    ),
    mutant(
        "an old write that is handed over again keeps its old bytes",
        "driver/src/batch/recover.rs",
        "            mend(&mut all[older.chunk.queue], &newer, &older, &bytes);",
        "            drop(bytes);",
    ),
    mutant(
        "an old write is mended with the oldest of what was acknowledged",
        "driver/src/batch/areas.rs",
        "listed.sort_unstable_by_key(|write| write.write_number);",
        "listed.sort_unstable_by_key(|write| u64::MAX - write.write_number);",
    ),
    mutant(
        "an acknowledged write is forgotten with older ones on their way",
        "driver/src/batch/areas.rs",
        "settled.is_kept = !settled.older.is_empty();",
        "settled.is_kept = false;",
    ),
    mutant(
        "a discard does not wait for writes on their way",
        "driver/src/batch/read.rs",
        "            Operation::Write => Vec::new(),",
        "            Operation::Write | Operation::Discard | Operation::WriteZeroes => Vec::new(),",
    ),
];

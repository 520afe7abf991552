//! Bugs of the link, which the simulation of `sawmill-link` catches. Not here: the bugs of the
//! engine (`list`), of drivers (`driver`).

use super::list::{Mutant, mutant};

/// All of them.
pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "a target answers writes before its device has done them",
        "link/src/target/served.rs",
        "            _ => export.device.submit(request),\n",
        concat!(
            "            Operation::Write => {\n",
            "                let mut request = request;\n",
            "                let mut bytes = vec![0; command.length as usize];\n",
            "                request.fill(0, &mut bytes);\n",
            "                request.done();\n",
            "                let address = command.address;\n",
            "                let early = Request::with_bytes(asks, address, flags, bytes, |_, _| \
            ());\n",
            "                export.device.submit(early);\n",
            "            }\n",
            "            _ => export.device.submit(request),\n",
        ),
    ),
    mutant(
        "a statement of an earlier use of a place counts for the newer one",
        "link/src/target/places.rs",
        "if use_number < place.use_number\n            || (use_number",
        "if (use_number",
    ),
    mutant(
        "a command that comes again is carried out again",
        "link/src/target/places.rs",
        "(use_number == place.use_number && place.phase != Phase::Gathering)",
        "(use_number == place.use_number && place.phase == Phase::Working)",
    ),
    mutant(
        "a place is not given back",
        "link/src/initiator/places.rs",
        concat!(
            "        let (entry, failure) = (place.chunk.entry, place.failure.take());\n",
            "        drop(place);\n",
            "        self.free.lock().push(index);\n"
        ),
        concat!(
            "        let (entry, failure) = (place.chunk.entry, place.failure.take());\n",
            "        let again = place.command.use_number % 50 == 0;\n",
            "        drop(place);\n",
            "        if !again {\n",
            "            self.free.lock().push(index);\n",
            "        }\n"
        ),
    ),
    mutant(
        "an acknowledgement counts for another link",
        "link/src/connection.rs",
        ".get(usize::from(ack.link))",
        ".get((usize::from(ack.link) + 1) % self.links.len())",
    ),
    mutant(
        "what was lost of an answer is not sent again",
        "link/src/unsent_pieces.rs",
        "        self.head |= piece.kind == PieceKind::Head;\n",
        "        self.head |= false;\n",
    ),
    mutant(
        "an answer is whole before all of its bytes are here",
        "link/src/initiator/places.rs",
        "place.come.count() == grains_of(reply.length as usize)",
        "place.come.count() + 1 >= grains_of(reply.length as usize)",
    ),
    mutant(
        "what a dead connection had is forgotten",
        "link/src/initiator/control.rs",
        "    chunks.into_iter().for_each(|chunk| of.pendings.put_back(chunk));\n",
        "    chunks.into_iter().skip(1).for_each(|chunk| of.pendings.put_back(chunk));\n",
    ),
    mutant(
        "a new connection begins before the old one's requests are done",
        "link/src/target/handshakes.rs",
        "if !self.supersede(instance, &half.holder) || !self.has_room(source) {",
        "self.supersede(instance, &half.holder);\n        if !self.has_room(source) {",
    ),
    mutant(
        "a flush succeeds though the target lost what it covers",
        "link/src/initiator/mod.rs",
        "if !loss.has_happened || loss.reported_at_ns",
        "if !loss.has_happened || true || loss.reported_at_ns",
    ),
    mutant(
        "damaged packets in clear are believed",
        "link/src/session/seal.rs",
        "Self::Checksum if *tail == checksum(header, body) => Ok(body),",
        "Self::Checksum if *tail == checksum(header, body) || true => Ok(body),",
    ),
    mutant(
        "nobody asks on a silent link whether it works again",
        "link/src/connection.rs",
        "            output.ping |= asks && output.open;\n",
        "            output.ping |= asks && output.open && false;\n",
    ),
    mutant(
        "a reply that comes again with more of its bytes is not looked at",
        "link/src/initiator/places.rs",
        "if !place.live || place.command.use_number != reply.use_number {",
        "if !place.live || place.command.use_number != reply.use_number || place.reply.is_some() {",
    ),
    mutant(
        "a device that comes back is given the number of another",
        "link/src/initiator/places.rs",
        "let export = self.pendings.number(command.export);",
        "let export = command.export;",
    ),
    mutant(
        "an initiator that was fenced takes the export back when it reconnects",
        "link/src/target/exports.rs",
        "if state.standing.reservation == reservation {",
        "if state.standing.reservation == reservation || true {",
    ),
    mutant(
        "a target answers discards before its device has done them",
        "link/src/target/served.rs",
        "            _ => export.device.submit(request),\n",
        concat!(
            "            Operation::Discard => {\n",
            "                request.done();\n",
            "                let (address, length) = (command.address, command.length);\n",
            "                let late = Request::bare(asks, address, length, flags, |_| ());\n",
            "                export.device.submit(late);\n",
            "            }\n",
            "            _ => export.device.submit(request),\n",
        ),
    ),
    mutant(
        "a packed write's later ranges get the bytes of earlier ones",
        "link/src/packed_device.rs",
        "            payload_offset += bytes.len();\n",
        "            payload_offset += bytes.len() - if bytes.len() > 16 { 16 } else { 0 };\n",
    ),
    mutant(
        "a packed write is answered before its last range is written",
        "link/src/packed_device.rs",
        "            if progress.ranges > 0 {\n",
        "            if progress.ranges > 1 {\n",
    ),
    mutant(
        "who was cut off writes on",
        "link/src/target/exports.rs",
        ".filter(|user| others(user)).for_each(|user| user.is_fenced = true);\n",
        ".filter(|user| others(user)).for_each(|user| user.is_fenced = false);\n",
    ),
    mutant(
        "who takes over is let in while the other one's requests are at the device",
        "link/src/target/exports.rs",
        concat!(
            "            let text = \"requests of the previous initiator are still in flight; try \
            again\";\n",
            "            return Err(Error::new(ErrorKind::Unavailable, text));\n",
        ),
        "",
    ),
    mutant(
        "what an initiator had of a connection is kept when it makes another",
        "link/src/initiator/control.rs",
        "let old = view.live.replace(new);\n",
        "let old = view.live.replace(new);\n            std::mem::forget(old.clone());\n",
    ),
    mutant(
        "a connection that ended is kept at the target",
        "link/src/target/mod.rs",
        "        let mut leaving = self.leaving.lock();\n        if self.connections.write()",
        "        std::mem::forget(Arc::clone(connection));\n        \
         let mut leaving = self.leaving.lock();\n        if self.connections.write()",
    ),
    mutant(
        "a restarted target believes whoever comes first",
        "link/src/target/exports.rs",
        "if state.standing.reservation == reservation {",
        "if state.standing.reservation == reservation || state.users.is_empty() {",
    ),
    mutant(
        "a reservation is begun and not kept",
        "link/src/target/exports.rs",
        "            MutexGuard::unlocked(&mut locked, || self.make_durable(&standing))?;\n",
        "",
    ),
    mutant(
        "a sync that failed is not written down",
        "link/src/target/exports.rs",
        "if self.syncs && outcome",
        "if false && self.syncs && outcome",
    ),
    mutant(
        "an export that was closed on a lost connection takes another with it",
        "link/src/initiator/control/reopen.rs",
        "closed.iter().for_each(|export| of.pendings.set_number(export.number, NOT_OPEN));",
        "drop(closed);",
    ),
    mutant(
        "an export is closed under its requests",
        "link/src/initiator/pending.rs",
        "template.operation != Operation::Close || under_way",
        "true || under_way",
    ),
    mutant(
        "every answered hello has its time to serve",
        "link/src/initiator/control.rs",
        "if !std::mem::replace(&mut self.is_unserved, true) {",
        "if std::mem::replace(&mut self.is_unserved, true) || true {",
    ),
    mutant(
        "who says the id of another machine's initiator ends its connection",
        "link/src/target/keys.rs",
        "self.name == other.name\n",
        "self.name == other.name || true\n",
    ),
    mutant(
        "every key opens everything",
        "link/src/target/served.rs",
        "        self.holder.rights.allow(name, command.flags)?;\n",
        "",
    ),
    mutant(
        "a key that was taken back is good for the connection that it made",
        "link/src/target/mod.rs",
        "filter(|served| !keys.has(&served.holder))",
        "filter(|served| false && !keys.has(&served.holder))",
    ),
    mutant(
        "a connection keeps its keys forever",
        "link/src/initiator/control/connect.rs",
        "if !is_due(1) || !matches!",
        "if true || !is_due(1) || !matches!",
    ),
    mutant(
        "an initiator that reconnects has lost its place meanwhile",
        "link/src/target/mod.rs",
        "old.iter().for_each(|served| self.drop_awaited(served));",
        "old.iter().for_each(|served| self.drop_connection(served));",
    ),
];

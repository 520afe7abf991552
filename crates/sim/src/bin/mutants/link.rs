//! Bugs of the link: `sawmill-link` has the simulation that catches them. Not here: the bugs of the engine
//! (`list`), of drivers (`driver`).

use super::list::{Mutant, mutant};

/// All of them.
pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "a target answers writes before its device has done them",
        "link/src/target/served.rs",
        "            _ => export.device.submit(request),\n",
        concat!(
            "            Operation::Write => {\n",
            "                struct Early(Vec<u8>);\n",
            "                impl sawmill_device::Exchange for Early {\n",
            "                    fn fill(&mut self, offset: u64, into: &mut [u8]) {\n",
            "                        let at = offset as usize;\n",
            "                        into.copy_from_slice(&self.0[at..at + into.len()]);\n",
            "                    }\n",
            "                    fn buffer(&mut self) -> &mut [u8] {\n",
            "                        &mut self.0\n",
            "                    }\n",
            "                    fn complete(self: Box<Self>, _: Outcome) {}\n",
            "                }\n",
            "                let mut request = request;\n",
            "                let mut bytes = vec![0; command.length as usize];\n",
            "                request.fill(0, &mut bytes);\n",
            "                request.done();\n",
            "                let early = Box::new(Early(bytes));\n",
            "                let (address, length) = (command.address, command.length);\n",
            "                export.device.submit(Request::new(asks, address, length, flags, early));\n",
            "            }\n",
            "            _ => export.device.submit(request),\n",
        ),
    ),
    mutant(
        "a part of an earlier use of a slot counts for the newer one",
        "link/src/target/slots.rs",
        "if sequence < slot.sequence || (sequence",
        "if (sequence",
    ),
    mutant(
        "a command that comes again is carried out again",
        "link/src/target/slots.rs",
        "(sequence == slot.sequence && slot.phase != Phase::Gathering)",
        "(sequence == slot.sequence && slot.phase == Phase::Working)",
    ),
    mutant(
        "a credit is not given back",
        "link/src/initiator/slots.rs",
        concat!(
            "        let (place, failure) = (slot.chunk.place, slot.failure.take());\n",
            "        drop(slot);\n",
            "        self.free.lock().push(index);\n"
        ),
        concat!(
            "        let (place, failure) = (slot.chunk.place, slot.failure.take());\n",
            "        let again = slot.command.sequence % 50 == 0;\n",
            "        drop(slot);\n",
            "        if !again {\n",
            "            self.free.lock().push(index);\n",
            "        }\n"
        ),
    ),
    mutant(
        "an acknowledgement counts for another link",
        "link/src/connection.rs",
        "self.links.get(usize::from(ack.link))",
        "self.links.get((usize::from(ack.link) + 1) % self.links.len())",
    ),
    mutant(
        "what was lost of an answer is not sent again",
        "link/src/target/slots.rs",
        "        slot.head |= piece.kind == PieceKind::Head;\n",
        "        slot.head |= false;\n",
    ),
    mutant(
        "an answer is whole before all of its bytes are here",
        "link/src/initiator/slots.rs",
        "slot.come.count() == grains_of(reply.length as usize)",
        "slot.come.count() + 1 >= grains_of(reply.length as usize)",
    ),
    mutant(
        "what a dead connection had is forgotten",
        "link/src/initiator/connect.rs",
        "        chunks.into_iter().for_each(|chunk| self.pendings.put_back(chunk));\n",
        "        chunks.into_iter().skip(1).for_each(|chunk| self.pendings.put_back(chunk));\n",
    ),
    mutant(
        "a new connection begins before the old one's requests are done",
        "link/src/target/mod.rs",
        "if !self.supersede(instance) || !room {",
        "self.supersede(instance);\n        if !room {",
    ),
    mutant(
        "a flush is answered well though the target lost what it covers",
        "link/src/initiator/mod.rs",
        "if !loss.happened || loss.told_ns",
        "if !loss.happened || true || loss.told_ns",
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
        "            outgoing.ping |= asks && outgoing.open;\n",
        "            outgoing.ping |= asks && outgoing.open && false;\n",
    ),
    mutant(
        "a reply that comes again with more of its bytes is not looked at",
        "link/src/initiator/slots.rs",
        "if !slot.live || slot.command.sequence != reply.sequence {",
        "if !slot.live || slot.command.sequence != reply.sequence || slot.reply.is_some() {",
    ),
    mutant(
        "a device that comes back is given the number of another",
        "link/src/initiator/slots.rs",
        "let volume = self.pendings.number(command.volume);",
        "let volume = command.volume;",
    ),
    mutant(
        "who was cut off takes it back when he connects anew",
        "link/src/initiator/device.rs",
        "OpenMode { take_over: false, ..volume.mode }",
        "OpenMode { take_over: true, ..volume.mode }",
    ),
];

//! Packets between a host and a driver.
//!
//! Invariants: a decoded packet is the same after it is encoded again, and a packet of several
//! commands is decoded as a whole or refused.
//!
//! Not here: what a host or a driver does with a packet (`sawmill_driver::client`, `host`).

use sawmill_driver::protocol::{Answer, Command, Control};

/// The same bytes as each kind of packet.
pub(crate) fn packet(bytes: &[u8]) {
    if let Ok(control) = Control::decode(bytes) {
        let again = Control::decode(&control.encode()).expect("what was encoded is understood");
        assert_eq!(again, control, "it is what was said");
    }
    if let Ok(commands) = Command::decode_all(bytes) {
        assert_eq!(
            commands.len(),
            bytes.len() / commands[0].encode().len(),
            "each command is understood"
        );
        let encoded: Vec<u8> = commands.iter().flat_map(Command::encode).collect();
        assert_eq!(Command::decode_all(&encoded).expect("it is understood"), commands);
    }
    if let Ok(answers) = Answer::decode_all(bytes) {
        let encoded: Vec<u8> = answers.iter().flat_map(Answer::encode).collect();
        assert_eq!(Answer::decode_all(&encoded).expect("it is understood"), answers);
    }
}

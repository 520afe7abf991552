//! Orders: what the process that serves a volume is told to do, as `POST /<word>?<options>` on the volume's
//! control socket. Nobody gives orders over TCP.
//!
//! Invariant: an order is answered when it is carried out, or refused with a reason; it blocks a thread of
//! its own meanwhile.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::doors::plan::DoorPlan;
use crate::exit::{Failure, Result};
use crate::handoff::HandOffOrder;
use crate::past::Past;

/// What a volume is told to do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Order {
    /// `POST /gc?threshold=0.3`: collect garbage.
    CollectGarbage { threshold: f64 },
    /// `POST /order?create_snapshot=NAME` and so on, see [`Past`]; answered with `{"undo": SNAPSHOT}`.
    Past(Past),
    /// `POST /resize?size_bytes=N`: take another size; answered once that is durable.
    Resize { size_bytes: u64 },
    /// `POST /door/add?PLAN`, see [`DoorPlan`]: open a door; answered with `{"door": KIND, "address":
    /// ADDRESS}`.
    AddDoor(DoorPlan),
    /// `POST /door/remove?ADDRESS`: close it.
    RemoveDoor { address: String },
    /// `POST /handoff?timeout_ms=N&stall_max_ms=N[&binary=PATH]`; answered with
    /// [`Done`](crate::handoff::Done).
    HandOff(HandOffOrder),
}

/// The answer to [`Order::CollectGarbage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GcAnswer {
    pub(crate) moved_bytes: u64,
    pub(crate) moved_segments: u64,
}

impl Order {
    /// The order behind a target, or `None` when there is no such word.
    pub(crate) fn parse(path: &str, query: &str) -> Option<Result<Order>> {
        match path {
            "/gc" => Some(Self::parse_gc(query)),
            "/order" => Some(Past::parse(query).map(Order::Past)),
            "/resize" => Some(Self::parse_resize(query)),
            "/door/add" => Some(decoded(query).and_then(|plan| DoorPlan::parse(&plan)).map(Order::AddDoor)),
            "/door/remove" => Some(decoded(query).map(|address| Order::RemoveDoor { address })),
            "/handoff" => Some(Self::parse_hand_off(query).map(Order::HandOff)),
            _ => None,
        }
    }

    fn parse_gc(query: &str) -> Result<Order> {
        let threshold = query.strip_prefix("threshold=").and_then(|text| text.parse().ok());
        let threshold =
            threshold.ok_or_else(|| Failure::usage(format!("cannot read '{query}'; give threshold=0.3")))?;
        Ok(Order::CollectGarbage { threshold })
    }

    fn parse_resize(query: &str) -> Result<Order> {
        let size_bytes = query.strip_prefix("size_bytes=").and_then(|text| text.parse().ok());
        let size_bytes =
            size_bytes.ok_or_else(|| Failure::usage(format!("cannot read '{query}'; give size_bytes=N")))?;
        Ok(Order::Resize { size_bytes })
    }
}

impl Order {
    fn parse_hand_off(query: &str) -> Result<HandOffOrder> {
        let (mut binary, mut timeout, mut stall_max) = (None, None, None);
        for pair in query.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let time = || value.parse().map(Duration::from_millis).ok();
            match name {
                "binary" => binary = Some(PathBuf::from(decoded(value)?)),
                "timeout_ms" => timeout = time(),
                "stall_max_ms" => stall_max = time(),
                _ => return Err(Failure::usage(format!("unknown parameter '{pair}'"))),
            }
        }
        match (timeout, stall_max) {
            (Some(timeout), Some(stall_max)) => Ok(HandOffOrder { binary, timeout, stall_max }),
            _ => Err(Failure::usage("give timeout_ms=N and stall_max_ms=N")),
        }
    }
}

/// Text that may hold anything, as a part of a target.
pub(crate) fn encoded(text: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/:".contains(byte);
    text.bytes()
        .map(|byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// The text again.
fn decoded(text: &str) -> Result<String> {
    let wrong = || Failure::usage(format!("'{text}' is not percent-encoded text"));
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = rest.get(..2).and_then(|digits| std::str::from_utf8(digits).ok()).ok_or_else(wrong)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| wrong())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_survives_the_way_through_a_target() {
        for text in ["", "nbd=unix:/run/a b&c=d.sock", "ü%41", "/dev/ublkb0"] {
            assert_eq!(decoded(&encoded(text)).unwrap(), text);
        }
        for text in ["%", "%4", "%zz", "%ff"] {
            assert!(decoded(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_hand_off_is_understood_or_refused() {
        let order = Order::parse("/handoff", "timeout_ms=5&stall_max_ms=7&binary=/a%20b").unwrap().unwrap();
        let (timeout, stall_max) = (Duration::from_millis(5), Duration::from_millis(7));
        let expected = HandOffOrder { binary: Some("/a b".into()), timeout, stall_max };
        assert_eq!(order, Order::HandOff(expected));
        for query in ["", "timeout_ms=5", "timeout_ms=x&stall_max_ms=1", "timeout_ms=1&stall_max_ms=1&x=1"] {
            assert!(Order::parse("/handoff", query).unwrap().is_err(), "{query}");
        }
    }

    #[test]
    fn an_order_is_understood_or_refused_with_what_it_takes() {
        let order = Order::parse("/gc", "threshold=0.25").unwrap().unwrap();
        assert_eq!(order, Order::CollectGarbage { threshold: 0.25 });
        for query in ["", "threshold=", "threshold=much", "volume=x"] {
            let failure = Order::parse("/gc", query).unwrap().unwrap_err();
            assert!(failure.to_string().contains("threshold=0.3"), "{failure}");
        }
        assert!(Order::parse("/wait", "").is_none());
    }
}

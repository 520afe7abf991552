//! Orders: what the process that serves a volume is told to do, as `POST /<word>?<options>` on the volume's
//! control socket. Nobody gives orders over TCP.
//!
//! Invariant: an order is answered when it is carried out, or refused with a reason; it blocks a thread of
//! its own meanwhile.

use serde::{Deserialize, Serialize};

use crate::exit::{Failure, Result};
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
            _ => None,
        }
    }

    fn parse_gc(query: &str) -> Result<Order> {
        let threshold = query.strip_prefix("threshold=").and_then(|text| text.parse().ok());
        let threshold = threshold
            .ok_or_else(|| Failure::usage(format!("'{query}' is not understood; say threshold=0.3")))?;
        Ok(Order::CollectGarbage { threshold })
    }

    fn parse_resize(query: &str) -> Result<Order> {
        let size_bytes = query.strip_prefix("size_bytes=").and_then(|text| text.parse().ok());
        let size_bytes = size_bytes
            .ok_or_else(|| Failure::usage(format!("'{query}' is not understood; say size_bytes=N")))?;
        Ok(Order::Resize { size_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

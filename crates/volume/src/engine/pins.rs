//! What clones need: pins are looked up after the checkpoint that allows a delete is durable, and before the
//! delete.
//!
//! Why that is safe: a clone puts its pin and *then* looks whether its cut is still kept. If it found the cut
//! kept, it looked before the checkpoint without the cut was durable, so its pin was there when we ask. Slots
//! are taken one after the other and asked for by name, so no list that lags can hide one.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::kept::{CutEntry, CutKind, Pin, parse_slot, pin_key, released_prefix};
use sawmill_store::{Class, StoreErrorKind};

use super::{Engine, Event};
use crate::ask::want;
use crate::cuts::PinSeen;

impl Engine {
    /// Asks for the next pin that was never seen; what is doomed goes when there is none.
    pub(super) fn ask_for_pins(&mut self, number: u64, doomed: Vec<u32>) {
        let slot = self.context.stored.view().cuts.lock().pins_next.max(1);
        let key = pin_key(self.context.attachment.record.volume_id, slot);
        let answered = self.context.clone();
        let tell =
            move |outcome| answered.mailbox.push_event(Event::PinAsked { number, doomed, slot, outcome });
        self.context.attachment.store.get(want(key, None, Class::Background), Box::new(tell));
    }

    pub(super) fn hear_pin(
        &mut self,
        number: u64,
        doomed: Vec<u32>,
        slot: u64,
        outcome: sawmill_store::Result<Bytes>,
        now: Duration,
    ) {
        let pin = match outcome {
            Err(error) if error.kind() == StoreErrorKind::NotFound => {
                return self.delete_unpinned(number, doomed);
            }
            Err(error) => Err(error.to_string()),
            Ok(bytes) => Pin::decode(&bytes, self.context.attachment.record.volume_id, slot)
                .map_err(|error| error.to_string()),
        };
        let pin = match pin {
            Ok(pin) => pin,
            Err(error) => {
                let key = pin_key(self.context.attachment.record.volume_id, slot);
                let what = format!("dead segments, because {key} cannot be read: {error}");
                return self.hear_cleanup_failed(number, &what, now);
            }
        };
        self.context.stored.view().cuts.lock().note(&PinSeen { slot, pin });
        self.ask_for_pins(number, doomed);
    }

    /// Finds pins whose clones are gone. A list that lags only lets them live longer.
    pub(super) fn list_releases(&mut self) {
        let pinned = self.context.stored.view().cuts.lock().cuts.iter().any(|cut| cut.kind == CutKind::Pin);
        if pinned {
            let prefix = released_prefix(self.context.attachment.record.volume_id);
            self.list(
                prefix,
                HashSet::new(),
                |_| true,
                |keys| Event::ReleasesListed {
                    slots: keys.iter().filter_map(|key| parse_slot(key)).collect(),
                },
            );
        }
    }

    pub(super) fn hear_releases(&mut self, slots: &[u64]) {
        self.cleaning -= 1;
        let gone = |cut: &CutEntry| cut.kind == CutKind::Pin && slots.contains(&cut.pin);
        self.context.stored.view().cuts.lock().cuts.retain(|cut| !gone(cut));
    }
}

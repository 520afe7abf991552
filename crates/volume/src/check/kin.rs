//! Clones: what they need of the volume that is checked, and whether the volume's own ancestors
//! hold its pins.
//!
//! A clone is found by the id in its pin, not by its name, because it may have been renamed, or its
//! name may be damaged.
//!
//! Invariants: a clone's own damage is not listed here; its own check lists it. A store that does
//! not answer ends the check, so that a pin or a name never counts as absent because of that.
//!
//! Not here: making and releasing pins (`cuts::clones`, `cuts::removal`), and reading the segments
//! that a clone needs (`verify`).

use sawmill_format::checkpoint::{
    Checkpoint, checkpoint_prefix, kept_prefix, parse_checkpoint_key, parse_kept_key,
};
use sawmill_format::ids::VolumeId;
use sawmill_format::kept_block::{Pin, pin_key, released_key};
use sawmill_store::{Blocking, Class, ObjectStore};

use super::damage::Verified;
use super::kept_list::{KeptList, read_root};
use crate::cuts::Lineage;
use crate::store_calls::{self, store_error};
use crate::{ErrorKind, Result, names};

/// Adds what clones need here. Pins keep data from being deleted; a pin whose clone cannot be found
/// does so forever.
pub(super) fn add_clones(store: &dyn ObjectStore, list: &mut KeptList) -> Result<()> {
    for pin_number in 1.. {
        let key = pin_key(list.volume_id, pin_number);
        let bytes = match store_calls::get(store, &key, None, Class::Background) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => break,
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                list.damage.add_error(&key, &error, &[]);
                continue;
            }
            Err(error) => return Err(error),
        };
        if store_calls::get(
            store,
            &released_key(list.volume_id, pin_number),
            None,
            Class::Background,
        )?
        .is_some()
        {
            continue;
        }
        match Pin::decode(&bytes, list.volume_id, pin_number) {
            Ok(pin) => add_clone(store, list, &pin)?,
            Err(error) => {
                let what = format!("{error}; from now on, no data of the volume is deleted");
                list.damage.add(&key, &what, &[]);
            }
        }
    }
    Ok(())
}

fn add_clone(store: &dyn ObjectStore, list: &mut KeptList, pin: &Pin) -> Result<()> {
    let name = &pin.name;
    let state = list.begin(format!("clone {name:?}"));
    let mut is_there = false;
    for (key, number) in roots_of(store, pin.clone_id)? {
        // A clone's own check reports the clone's own damage.
        let root = read_root(store, &key, pin.clone_id, number)?;
        let Some(root) = root.and_then(Verified::intact) else { continue };
        is_there = true;
        let lineage = Lineage::new(&root.kept.lineage);
        for entry in root.segments.iter().filter(|entry| entry.live_bytes > 0) {
            if lineage.owner(pin.clone_id, entry.sequence) == list.volume_id {
                list.need_entry(state, list.volume_id, entry);
            }
        }
    }
    let is_named = match names::find(store, name) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => false,
        Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
        _ => true,
    };
    if !is_named {
        list.notes.push(format!(
            "it is pinned for a clone {name:?}, but no volume has that name: its creation was \
             interrupted, or it was renamed; the data that it needs stays"
        ));
    } else if !is_there {
        list.notes.push(format!("clone {name:?} has no checkpoint that can be read: check it too"));
    }
    Ok(())
}

/// The checkpoints of a volume and the kept copies of its cuts.
fn roots_of(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<Vec<(String, u64)>> {
    let mut roots = Vec::new();
    for prefix in [checkpoint_prefix(volume_id), kept_prefix(volume_id)] {
        let listed = Blocking(store).list(&prefix, Class::Background);
        for object in listed.map_err(|error| store_error(&error))? {
            let number = parse_checkpoint_key(&object.key).map(|(_, number)| number);
            let number =
                number.or_else(|| parse_kept_key(&object.key).map(|(_, number, _)| number));
            roots.extend(number.map(|number| (object.key, number)));
        }
    }
    Ok(roots)
}

/// Checks that the ancestors keep what the volume has of them: its pins have to exist, and to be
/// its own.
pub(super) fn check_own_pins(
    store: &dyn ObjectStore,
    list: &mut KeptList,
    newest: &Checkpoint,
) -> Result<()> {
    let lineage = Lineage::new(&newest.kept.lineage);
    for (index, entry) in lineage.entries().iter().enumerate().filter(|(_, entry)| entry.pin > 0) {
        let mut live = newest.segments.iter().filter(|segment| segment.live_bytes > 0);
        if !live
            .any(|segment| lineage.ancestor(segment.sequence).is_some_and(|(at, _)| at == index))
        {
            continue;
        }
        let key = pin_key(entry.volume_id, entry.pin);
        let released = released_key(entry.volume_id, entry.pin);
        let found = store_calls::get(store, &key, None, Class::Background)?;
        let pin = found.map(|bytes| Pin::decode(&bytes, entry.volume_id, entry.pin));
        let what = match pin {
            None => "it is gone".to_owned(),
            Some(Err(error)) => error.to_string(),
            Some(Ok(pin)) if pin.clone_id != list.volume_id => {
                "it belongs to another clone".to_owned()
            }
            Some(Ok(_))
                if store_calls::get(store, &released, None, Class::Background)?.is_some() =>
            {
                "it was released".to_owned()
            }
            Some(Ok(_)) => continue,
        };
        let what =
            format!("{what}, and the volume still needs data of that ancestor: it may be deleted");
        list.damage.add(&key, &what, &[]);
    }
    Ok(())
}

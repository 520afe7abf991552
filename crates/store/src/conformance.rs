//! The contract of [`ObjectStore`] as tests that any store can run: one or more per clause.
//!
//! Each returns what it found broken. They need a writable store, block, and show presence of a
//! fault, not its absence.
//!
//! Invariants: each test puts its objects into a new folder under `conformance/` and empties it
//! afterwards. What it found broken is returned before a failure to do so.
//!
//! The clauses need a store whose list does not lag behind (S6 permits it), as all of ours.
//!
//! Not here: S8, which only permits and so cannot be broken (`FaultStore` has what a caller must
//! survive because of it); that a call is answered even when its task dies (S1, `client`); that a
//! length which only a store's answer claims takes no memory (S5, the tests of each store).

use std::sync::mpsc::{Sender, channel};

use bytes::Bytes;

use crate::{
    Blocking, Bodies, Class, Completion, Get, List, ObjectStore, Put, PutOutcome, StoreError,
    StoreErrorKind,
};

/// What a clause found broken.
pub type Verdict = Result<(), String>;

/// One test of the contract.
#[derive(Clone, Copy)]
pub struct Clause {
    /// The name of its function, which begins with the clause's number.
    pub name: &'static str,
    /// Tests a store, and says what it found broken.
    pub test: fn(&dyn ObjectStore) -> Verdict,
}

macro_rules! clauses {
    ($($test:ident),* $(,)?) => { &[$(Clause { name: stringify!($test), test: $test }),*] };
}

/// All clauses, in order.
pub const CLAUSES: &[Clause] = clauses![
    s1_every_call_is_answered,
    s2_one_racer_wins,
    s2_nothing_is_overwritten,
    s2_the_same_put_again_is_ours,
    s3_created_is_visible,
    s4_absent_is_not_found,
    s5_ranges_are_exact,
    s5_outside_is_invalid,
    s5_more_than_asked_for_is_damaged,
    s6_lists_what_is_below,
    s7_deleting_is_final_and_absent_keys_are_fine,
    s9_illegal_keys_are_invalid,
];

/// Runs all clauses and returns the broken ones, each as "clause: finding". An empty result means
/// that the store conforms.
pub fn run(store: &dyn ObjectStore) -> Vec<String> {
    let run_one = |clause: &Clause| {
        (clause.test)(store).err().map(|found| format!("{}: {found}", clause.name))
    };
    CLAUSES.iter().filter_map(run_one).collect()
}

/// Every call of a crowd of good, futile and illegal ones is answered. (A second answer is
/// impossible: an answer consumes its closure.)
pub fn s1_every_call_is_answered(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        put(calls, &format!("{folder}there"), b"x", PutOutcome::Created)?;
        let keys = [format!("{folder}there"), format!("{folder}nowhere"), "../illegal".to_owned()];
        let (sender, receiver) = channel();
        for key in keys.iter().cycle().take(60) {
            for range in [None, Some(0..1)] {
                let get =
                    Get { key: key.clone(), range, bytes_max: 64, class: Class::Read, raise: None };
                store.get(get, answer_counter(&sender));
            }
            let list = List { prefix: key.clone(), class: Class::Background };
            store.list(list, answer_counter(&sender));
            let (key, body) = (format!("{key}/below"), Bytes::from_static(b"x"));
            let put = Put { key: key.clone(), body, class: Class::Upload, bodies: Bodies::Whole };
            store.put(put, answer_counter(&sender));
            store.delete(vec![key], Class::Background, answer_counter(&sender));
        }
        drop(sender);
        let answers = receiver.iter().count();
        expect(answers == 60 * 5, || format!("{answers} of {} calls were answered", 60 * 5))
    })
}

/// Reports that an answer came, whatever it is.
fn answer_counter<T>(sender: &Sender<()>) -> Completion<T> {
    let sender = sender.clone();
    // The other end is gone only if the test has failed.
    Box::new(move |_| {
        let _ = sender.send(());
    })
}

/// Of 16 puts of one key exactly one is `Created`, and its bytes are there.
pub fn s2_one_racer_wins(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        let key = format!("{folder}race");
        let bodies: Vec<Bytes> = (0..16u8).map(|racer| Bytes::from(vec![racer; 10_000])).collect();
        let (sender, receiver) = channel();
        for body in &bodies {
            let (sender, winner) = (sender.clone(), body.clone());
            let put = Put {
                key: key.clone(),
                body: body.clone(),
                class: Class::Upload,
                bodies: Bodies::Whole,
            };
            store.put(put, Box::new(move |outcome| drop(sender.send((winner, outcome)))));
        }
        drop(sender);
        let mut winners = Vec::new();
        let mut answers = 0;
        for (body, outcome) in receiver {
            answers += 1;
            if or_finding(outcome)? == PutOutcome::Created {
                winners.push(body);
            }
        }
        expect(answers == 16, || format!("{answers} of 16 puts were answered"))?;
        expect(winners.len() == 1, || format!("{} of 16 racing puts won", winners.len()))?;
        expect_body(calls, &key, &winners[0])
    })
}

/// A put of a taken key is `Taken` and changes nothing, whatever its size.
pub fn s2_nothing_is_overwritten(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        let key = format!("{folder}taken");
        put(calls, &key, b"first", PutOutcome::Created)?;
        // An extension, a prefix, nothing, and more than a read-back compares: the client must not
        // take any of them for its own earlier attempt.
        for other in [&b"other"[..], b"firstly", b"fir", b"", &[7; 9000]] {
            put(calls, &key, other, PutOutcome::Taken)?;
        }
        expect_body(calls, &key, b"first")?;
        let empty = format!("{folder}empty");
        put(calls, &empty, b"", PutOutcome::Created)?;
        put(calls, &empty, b"x", PutOutcome::Taken)?;
        expect_body(calls, &empty, b"")
    })
}

/// The same bytes put again are recognized as ours: this is how a lost answer is resolved.
pub fn s2_the_same_put_again_is_ours(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        for (name, body) in [("empty", vec![]), ("short", vec![1; 100]), ("long", vec![2; 100_000])]
        {
            let key = format!("{folder}{name}");
            put(calls, &key, &body, PutOutcome::Created)?;
            put(calls, &key, &body, PutOutcome::Created)?;
            expect_body(calls, &key, &body)?;
        }
        Ok(())
    })
}

/// A created object is there, whole, at once, at every size.
pub fn s3_created_is_visible(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        // A read-back compares 4 KiB, so the sizes around that take different paths.
        for size in [0usize, 1, 4095, 4096, 4097, 1 << 20] {
            let body: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
            let key = format!("{folder}deep/er/{size}");
            put(calls, &key, &body, PutOutcome::Created)?;
            expect_body(calls, &key, &body)?;
        }
        Ok(())
    })
}

/// Gets of absent objects are `NotFound`, and no other gets are.
pub fn s4_absent_is_not_found(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        put(calls, &format!("{folder}a/b"), b"x", PutOutcome::Created)?;
        // `a` is a folder and `a/b/c` leads through a file: a folder store gets other errors for
        // these.
        for absent in ["c", "a", "a/b/c", "nowhere/at/all"] {
            for range in [None, Some(0..10)] {
                let found = calls.get(&format!("{folder}{absent}"), range, Class::Read);
                expect_kind(absent, found.map(drop), StoreErrorKind::NotFound)?;
            }
        }
        Ok(())
    })
}

/// A get returns exactly its range, cut at the object's end.
pub fn s5_ranges_are_exact(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        let key = format!("{folder}ranges");
        let body: Vec<u8> = (0..10_000).map(|at| (at % 241) as u8).collect();
        put(calls, &key, &body, PutOutcome::Created)?;
        for range in
            [0..1u64, 0..10_000, 1..2, 4096..8192, 9_999..10_000, 9_000..20_000, 0..u64::MAX / 2]
        {
            let found = or_finding(calls.get(&key, Some(range.clone()), Class::Read))?;
            let expected = &body[range.start as usize..(range.end as usize).min(body.len())];
            expect(found == expected, || {
                format!("range {range:?} returned {} wrong bytes", found.len())
            })?;
        }
        Ok(())
    })
}

/// A range that starts at or past the end, or that is empty, is `Invalid`.
pub fn s5_outside_is_invalid(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        let key = format!("{folder}outside");
        put(calls, &key, &[1; 100], PutOutcome::Created)?;
        let backwards = std::ops::Range { start: 9, end: 3 };
        for range in [100..101u64, 5_000..6_000, 7..7, backwards] {
            let found = calls.get(&key, Some(range.clone()), Class::Read);
            expect_kind(&format!("range {range:?}"), found.map(drop), StoreErrorKind::Invalid)?;
        }
        Ok(())
    })
}

/// An object, or a range of it, with more bytes than the caller can use is `Damaged`.
pub fn s5_more_than_asked_for_is_damaged(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        let key = format!("{folder}long");
        put(calls, &key, &[1; 100], PutOutcome::Created)?;
        for (range, length) in [(None, 100), (Some(0..100), 100), (Some(20..70), 50)] {
            let get = |bytes_max| {
                let get = Get {
                    key: key.clone(),
                    range: range.clone(),
                    bytes_max,
                    class: Class::Read,
                    raise: None,
                };
                let (sender, receiver) = channel();
                store.get(get, Box::new(move |outcome| drop(sender.send(outcome))));
                receiver.recv().map_err(|_| "the get was not answered".to_owned())
            };
            let found = or_finding(get(length)?)?.len() as u64;
            expect(found == length, || format!("{found} bytes of {length} came back"))?;
            let what = format!("range {range:?} with a byte less than it has");
            expect_kind(&what, get(length - 1)?.map(drop), StoreErrorKind::Damaged)?;
        }
        Ok(())
    })
}

/// A list holds every object strictly below its prefix with its size, and no other.
pub fn s6_lists_what_is_below(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        let keys = ["a/1", "a/2", "a/b/3", "ab/4", "a-b/5", "c"];
        for (size, key) in keys.iter().enumerate() {
            put(calls, &format!("{folder}{key}"), &vec![0; size + 1], PutOutcome::Created)?;
        }
        let bare = folder.trim_end_matches('/');
        let cases: [(&str, &[usize]); 8] = [
            ("", &[0, 1, 2, 3, 4, 5]),
            ("/", &[0, 1, 2, 3, 4, 5]),
            ("/a", &[0, 1, 2]),
            ("/a/", &[0, 1, 2]),
            ("/a/b/", &[2]),
            ("/a/1", &[]),
            ("/c/", &[]),
            ("/nowhere/", &[]),
        ];
        for (prefix, expected) in cases {
            let mut found = or_finding(calls.list(&format!("{bare}{prefix}"), Class::Read))?;
            found.sort_by(|one, other| one.key.cmp(&other.key));
            let mut expected: Vec<(String, u64)> = expected
                .iter()
                .map(|at| (format!("{folder}{}", keys[*at]), *at as u64 + 1))
                .collect();
            expected.sort();
            let found: Vec<(String, u64)> =
                found.into_iter().map(|object| (object.key, object.size_bytes)).collect();
            expect(found == expected, || {
                format!("prefix {prefix:?} listed {found:?} instead of {expected:?}")
            })?;
        }
        Ok(())
    })
}

/// What was deleted is gone and its key is free; absent keys are fine; other objects stay.
pub fn s7_deleting_is_final_and_absent_keys_are_fine(store: &dyn ObjectStore) -> Verdict {
    with_folder(store, |calls, folder| {
        let key = |name: &str| format!("{folder}{name}");
        for name in ["a", "b", "c"] {
            put(calls, &key(name), name.as_bytes(), PutOutcome::Created)?;
        }
        // One key twice, because some stores answer that with nonsense.
        let keys = ["a", "b", "never", "not/even/near", "a"];
        or_finding(calls.delete(keys.map(key).to_vec(), Class::Background))?;
        or_finding(calls.delete(keys.map(key).to_vec(), Class::Background))?;
        or_finding(calls.delete(Vec::new(), Class::Background))?;
        for name in ["a", "b"] {
            let found = calls.get(&key(name), None, Class::Read);
            expect_kind("a deleted object", found.map(drop), StoreErrorKind::NotFound)?;
        }
        expect_body(calls, &key("c"), b"c")?;
        put(calls, &key("a"), b"again", PutOutcome::Created)?;
        expect_body(calls, &key("a"), b"again")
    })
}

/// Keys outside the alphabet, or that could leave the store, are refused by every call.
pub fn s9_illegal_keys_are_invalid(store: &dyn ObjectStore) -> Verdict {
    let calls = Blocking(store);
    let invalid = StoreErrorKind::Invalid;
    // A list may begin at the root, and at a folder with its slash.
    let no_prefixes = ["/a", "a//b", "../a", "a/../b", ".tmp/a", "a b", "a?b", "ä", "a\0b"];
    for prefix in no_prefixes {
        expect_kind(prefix, calls.list(prefix, Class::Read).map(drop), invalid)?;
    }
    for key in no_prefixes.into_iter().chain(["", "a/"]) {
        let body = Bytes::from_static(b"x");
        expect_kind(key, calls.get(key, None, Class::Read).map(drop), invalid)?;
        expect_kind(key, calls.put(key, body, Class::Upload).map(drop), invalid)?;
        expect_kind(key, calls.delete(vec![key.to_owned()], Class::Background), invalid)?;
    }
    Ok(())
}

/// Gives a test a folder of its own, `conformance/<random>/`, and empties it afterwards.
fn with_folder(
    store: &dyn ObjectStore,
    test: impl FnOnce(&Blocking<'_>, &str) -> Verdict,
) -> Verdict {
    let calls = Blocking(store);
    let random = getrandom::u64().map_err(|error| error.to_string())?;
    let folder = format!("conformance/{random:016x}/");
    let verdict = test(&calls, &folder);
    let cleanup = or_finding(calls.list(&folder, Class::Background)).and_then(|objects| {
        let keys = objects.into_iter().map(|object| object.key).collect();
        or_finding(calls.delete(keys, Class::Background))
    });
    // The clause's own finding counts first.
    verdict.and(cleanup)
}

fn expect(holds: bool, finding: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(finding()) }
}

/// The value, or the unexpected error as a finding.
fn or_finding<T>(outcome: Result<T, StoreError>) -> Result<T, String> {
    outcome.map_err(|error| format!("unexpected error {:?}: {error}", error.kind()))
}

fn put(calls: &Blocking<'_>, key: &str, body: &[u8], expected: PutOutcome) -> Verdict {
    let outcome = or_finding(calls.put(key, Bytes::copy_from_slice(body), Class::Upload))?;
    expect(outcome == expected, || {
        format!("a put of {} bytes was {outcome:?}, not {expected:?}", body.len())
    })
}

fn expect_body(calls: &Blocking<'_>, key: &str, expected: &[u8]) -> Verdict {
    let found = or_finding(calls.get(key, None, Class::Read))?;
    expect(found == expected, || {
        format!("{} bytes came back, not the {} put", found.len(), expected.len())
    })
}

fn expect_kind(what: &str, outcome: Result<(), StoreError>, expected: StoreErrorKind) -> Verdict {
    match outcome {
        Err(error) if error.kind() == expected => Ok(()),
        Err(error) => {
            Err(format!("{what:?} failed with {:?}, not {expected:?}: {error}", error.kind()))
        }
        Ok(()) => Err(format!("{what:?} succeeded, instead of {expected:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clause_of_the_contract_but_a_permission_has_a_function_with_its_number() {
        let contract = include_str!("contract.rs");
        let numbered = contract.lines().filter_map(|line| line.strip_prefix("/// - **S"));
        let numbers = numbered.filter_map(|rest| Some(rest.split_once("**")?.0));
        // S8 permits, and asks nothing of a store.
        let of_contract: Vec<&str> = numbers.filter(|number| *number != "8").collect();
        let of_name = |clause: &Clause| clause.name.strip_prefix('s')?.split_once('_');
        let mut tested: Vec<&str> = CLAUSES
            .iter()
            .map(|clause| of_name(clause).expect("a name that begins with its number").0)
            .collect();
        tested.dedup();
        assert_eq!(tested, of_contract);
    }
}

//! Entry points for fuzzers of what a store on a network answers. Not for users.
//!
//! Not here: where the answers come from, and what must hold of a call (`crates/fuzz`).

use std::ops::Range;

use bytes::Bytes;

use crate::backend::{Backend, Body, Creation, WantedBytes};
use crate::cloud::{Cloud, refusal};
use crate::location::{self, Location};
use crate::runtime::runtime;
use crate::{Bodies, ObjectInfo, Result, StoreError, StoreErrorKind};

/// A store on a network without the client above it: each call is one attempt.
pub struct OneAttempt(Cloud);

impl OneAttempt {
    /// The store that `url` names, with credentials from these variables.
    ///
    /// # Errors
    /// `Invalid`: the URL names no store on a network, or a setting is wrong.
    pub fn new(url: &str, environment: &[(String, String)]) -> Result<Self> {
        match location::parse(url)? {
            Location::Cloud(location) => Ok(OneAttempt(Cloud::new(&location, environment)?)),
            _ => Err(StoreError::new(StoreErrorKind::Invalid, "no store on a network".to_owned())),
        }
    }

    /// Fetches an object or a part of it.
    ///
    /// # Errors
    /// As the answer is explained.
    pub fn get(&self, key: &str, range: Option<Range<u64>>, bytes_max: u64) -> Result<Bytes> {
        runtime()?.block_on(self.0.get(key, WantedBytes { range, bytes_max }))
    }

    /// Creates an object. Returns false if there is one.
    ///
    /// # Errors
    /// As the answer is explained.
    pub fn create(&self, key: &str, bytes: &'static [u8]) -> Result<bool> {
        let body = Body { bytes: Bytes::from_static(bytes), bodies: Bodies::Whole };
        Ok(runtime()?.block_on(self.0.create(key, body))? == Creation::Created)
    }

    /// Lists the objects below a prefix.
    ///
    /// # Errors
    /// As the answer is explained.
    pub fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        runtime()?.block_on(self.0.list(prefix))
    }

    /// Deletes objects.
    ///
    /// # Errors
    /// As the answer is explained.
    pub fn delete(&self, keys: &[String]) -> Result<()> {
        runtime()?.block_on(self.0.delete(keys))
    }
}

/// The explanation of an error of the protocol crate with this text; `choice` selects its kind.
/// Panics if it is `NotFound` although the text does not name the object as missing.
#[must_use]
pub fn explanation(choice: u8, text: &str) -> StoreError {
    let (path, source) = (String::new(), text.to_owned().into());
    let explained = refusal::explain(match choice % 4 {
        0 => object_store::Error::NotFound { path, source },
        1 => object_store::Error::PermissionDenied { path, source },
        2 => object_store::Error::Precondition { path, source },
        _ => object_store::Error::Generic { store: "S3", source },
    });
    let is_named = refusal::OBJECT_MISSING.iter().any(|words| text.contains(words));
    assert!(is_named || explained.kind() != StoreErrorKind::NotFound, "{text:?} names no object");
    explained
}

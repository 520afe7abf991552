//! Replicas: whatever happens to the copier, the source or the promoter, the second store holds a
//! cut; a promoted one goes on by itself; what comes late hurts nobody.

mod behind;
mod copying;
mod histories;
mod promoting;
#[allow(unreachable_pub, missing_docs, reason = "the tests' own")]
mod world;

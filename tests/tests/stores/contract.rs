//! A real S3 server keeps every clause of the store's contract, through the store's client.
//!
//! Not here: other servers than MinIO (`tests/stores/matrix.py`), stores that are no servers
//! (`crates/store/tests`), and a server that breaks the contract (`dishonest_store`).

use std::path::Path;

use sawmill_store::{
    Bodies, ProbeReport, StoreOptions, conformance, doctor, open_in, probe_conditional_create,
};
use sawmill_tests::store;

#[test]
fn minio_keeps_every_clause_of_the_contract() {
    let minio = store::minio();
    let url = minio.fresh_url(Path::new(""));
    let client = open_in(&url, &StoreOptions::default(), &minio.environment()).expect("opens");
    assert_eq!(conformance::run(&*client), Vec::<String>::new());
    for bodies in [Bodies::Whole, Bodies::InHalves] {
        let report = probe_conditional_create(&*client, 8, 16, bodies);
        assert!(report.as_ref().is_ok_and(ProbeReport::is_honest), "{bodies:?}: {report:?}");
    }
    let ill: Vec<_> = doctor(&*client).into_iter().filter(|result| !result.ok).collect();
    assert_eq!(ill, []);
    let meter = client.meter();
    assert!(meter.unavailable_since.is_none() && meter.put.requests > 100, "{meter:?}");
}

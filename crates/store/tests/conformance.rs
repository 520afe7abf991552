//! Every store keeps every clause of the contract: this file tests the stores without a network.
//!
//! Not here, but under the same clauses: S3, Google and Azure against small servers of our own
//! (`cloud::tests`), S3 against MinIO (`tests/tests/stores/contract.rs`), the simulator's store
//! (`crates/sim/tests/store_contract.rs`).

use std::sync::Arc;

use sawmill_store::{
    Bodies, Client, FaultStore, ProbeReport, StoreOptions, conformance, doctor, open,
    probe_conditional_create,
};

fn store(url: &str) -> Arc<Client> {
    open(url, StoreOptions::default()).unwrap_or_else(|error| panic!("{url}: {error}"))
}

fn conforms(url: &str) {
    let store = store(url);
    assert_eq!(conformance::run(&*store), Vec::<String>::new());
    for bodies in [Bodies::Whole, Bodies::InHalves] {
        let report = probe_conditional_create(&*store, 8, 16, bodies);
        assert!(report.as_ref().is_ok_and(ProbeReport::is_honest), "{bodies:?}: {report:?}");
    }
    let ill: Vec<_> = doctor(&*store).into_iter().filter(|result| !result.ok).collect();
    assert_eq!(ill, []);
    let meter = store.meter();
    assert!(meter.unavailable_since.is_none() && meter.put.requests > 100, "{meter:?}");
}

#[test]
fn the_memory_store_keeps_the_contract() {
    conforms("memory:");
}

#[test]
fn the_directory_store_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    conforms(&format!("file://{}", folder.path().display()));
    conforms(folder.path().join("below/it").to_str().unwrap());
}

#[test]
fn a_fault_store_without_faults_keeps_the_contract() {
    let store = FaultStore::watching(store("memory:"));
    assert_eq!(conformance::run(&*store), Vec::<String>::new());
    assert!(store.calls().len() > 100 && store.held().is_empty());
}

#[test]
fn memory_stores_of_one_name_are_one_and_of_no_name_are_many() {
    use sawmill_store::{Blocking, Class};
    let count = |url: &str| Blocking(&*store(url)).list("", Class::Read).unwrap().len();
    let put = |url: &str| Blocking(&*store(url)).put("k", "x".into(), Class::Upload).unwrap();
    put("memory:shared");
    put("memory:");
    assert_eq!((count("memory:shared"), count("memory:other"), count("memory:")), (1, 0, 0));
}

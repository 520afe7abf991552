//! `sawmill doctor`: checks whether this store and this machine have what is needed.
//!
//! Not here: the checks of a store (`sawmill_store::doctor`) and of the machine (`machine`), a
//! volume's data (`check`).

use clap::Args;
use serde::Serialize;

use crate::command::Context;
use crate::machine::{self, Finding};
use crate::wiring;
use sawmill_console::exit::{Exit, Result};
use sawmill_console::output;

/// Check a store and this machine, and say what is missing and how to get it.
///
/// The store check writes, reads and deletes a few small objects of its own. Exit code 1 if the
/// store fails a check. Missing features of the machine are listed; they do not change the exit
/// code.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// URL of the store. Default: the default store.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
}

#[derive(Serialize)]
struct Document {
    store: String,
    ok: bool,
    store_checks: Vec<Finding>,
    machine_checks: Vec<Finding>,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let url = match &arguments.store {
        Some(url) => url.clone(),
        None => context.paths.default_store()?,
    };
    let store = wiring::open_store(&url)?;
    let store_checks: Vec<Finding> = sawmill_store::doctor(&*store)
        .into_iter()
        .map(|check| Finding {
            name: check.name.to_string(),
            ok: check.ok,
            detail: check.detail.to_string(),
            advice: check.advice.to_string(),
        })
        .collect();
    let mut machine_checks = machine::examine(&context.paths)?;
    // Among the checks of the machine, which do not change the exit code: it is a warning (P102).
    machine_checks.extend(store.exposed_endpoint().map(|endpoint| {
        Finding {
            name: "encryption on the way to the store".to_owned(),
            ok: false,
            detail: format!("{endpoint} is used without encryption"),
            advice: "use an https:// endpoint: otherwise anyone on the network path can read and \
                     change all data"
                .to_owned(),
        }
    }));
    let ok = store_checks.iter().all(|check| check.ok);
    let document = Document { store: url, ok, store_checks, machine_checks };
    if context.json {
        output::json(&document)?;
    } else {
        print(&document)?;
    }
    Ok(if ok { Exit::Ok } else { Exit::Negative })
}

fn print(document: &Document) -> Result<()> {
    output::line(&format!("store {}", document.store))?;
    print_findings(&document.store_checks, "FAILED")?;
    output::line("")?;
    output::line("this machine")?;
    print_findings(&document.machine_checks, "missing")
}

fn print_findings(findings: &[Finding], not_ok: &str) -> Result<()> {
    let rows = findings.iter().map(|finding| {
        let state = if finding.ok { "ok" } else { not_ok };
        vec![format!("  {state}"), finding.name.clone(), finding.detail.clone()]
    });
    output::rows(rows.collect())?;
    for finding in findings.iter().filter(|finding| !finding.ok && !finding.advice.is_empty()) {
        output::line(&format!("  {}: {}", finding.name, finding.advice))?;
    }
    Ok(())
}

//! `make torture MINUTES=60`: the long torture, from the command line. `torture [MINUTES [SEED]]`.
//!
//! First the controls: planted losses must be found. Then lives and deaths until the time is over.
//! Prints a report each minute and at the end; exit code 0 only when no promise was broken.
//!
//! Not here: the actions, and what must hold after them (`sawmill_tests::torture`).
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use sawmill_testkit::Dice;
use sawmill_tests::stamp::{Verdict, Violation};
use sawmill_tests::torture::Torture;

type Control = (&'static str, fn(&mut Torture) -> Result<Verdict, Violation>);

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let minutes: f64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(60.0);
    let seed = arguments.next().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| Dice::seeded("torture").word());
    println!("torture: {minutes} minutes, seed {seed}");
    let controls: [Control; 3] = [
        ("a planted loss", Torture::plant_a_loss),
        ("a store put back behind the judge's back", Torture::plant_a_store_put_back),
        ("bytes of another history", Torture::plant_bytes_of_another_history),
    ];
    for (what, plant) in controls {
        match plant(&mut Torture::new(seed)) {
            Err(violation) => println!("control: {what}: seen: {violation}"),
            Ok(_) => {
                println!("control: {what}: NOT seen: this judge is blind");
                return ExitCode::FAILURE;
            }
        }
    }
    let began = Instant::now();
    let mut last_report_minutes = 0;
    let mut torture = Torture::new(seed);
    torture.run(Duration::from_secs_f64(minutes * 60.0), |report| {
        let now = began.elapsed().as_secs() / 60;
        if now > last_report_minutes {
            last_report_minutes = now;
            println!("after {now} min: {report}");
        }
    });
    println!("end after {} s, seed {seed}: {}", began.elapsed().as_secs(), torture.report);
    if torture.report.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

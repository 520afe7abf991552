//! Replays a trace on a stack: one operation per line, each as soon as the one before is answered.
//!
//! Lines: `w ADDRESS LENGTH`, `r ADDRESS LENGTH`, `f` (flush). No page is cached at the start.
//! After the last line everything is flushed. Prints `ready`, waits for a line, and prints a line
//! of JSON: for each kind of operation the count, and the sum, mean, median and 99th percentile of
//! the times in microseconds; the last flush is `end`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::stacks::Stack;
use crate::{Result, processor_s, wait_for_go};

enum Step {
    Write(u64, usize),
    Read(u64, usize),
    Flush,
}

fn read_steps(file: &Path) -> Result<Vec<Step>> {
    let step = |line: &str| -> Result<Step> {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["w", address, length] => Ok(Step::Write(address.parse()?, length.parse()?)),
            ["r", address, length] => Ok(Step::Read(address.parse()?, length.parse()?)),
            ["f"] => Ok(Step::Flush),
            _ => Err(format!("not a step: {line:?}").into()),
        }
    };
    std::fs::read_to_string(file)?.lines().map(step).collect()
}

/// Replays a file, and prints how long the operations took.
pub(crate) fn replay(stack: &mut dyn Stack, file: &Path) -> Result {
    let steps = read_steps(file)?;
    let longest =
        steps.iter().map(|step| if let Step::Write(_, length) = step { *length } else { 0 }).max();
    let data: Arc<[u8]> = vec![0xb5; longest.unwrap_or(0)].into();
    let (mut writes, mut reads, mut flushes) = (Vec::new(), Vec::new(), Vec::new());
    let mut written_bytes = 0;
    wait_for_go()?;
    let (began, used) = (Instant::now(), processor_s()?);
    for step in &steps {
        let start = Instant::now();
        match step {
            Step::Write(address, length) => {
                stack.write(*address, &data, *length)?;
                written_bytes += length;
                writes.push(start.elapsed());
            }
            Step::Read(address, length) => {
                stack.read(*address, *length)?;
                reads.push(start.elapsed());
            }
            Step::Flush => {
                stack.flush()?;
                flushes.push(start.elapsed());
            }
        }
    }
    let end = Instant::now();
    stack.flush()?;
    println!(
        "{{\"written_bytes\": {written_bytes}, \"seconds\": {:.6}, \"processor_s\": {:.6}, \
         \"fetched_bytes\": {}, \"end_us\": {}, \"writes\": {}, \"reads\": {}, \"flushes\": {}}}",
        began.elapsed().as_secs_f64(),
        processor_s()? - used,
        stack.fetched(),
        end.elapsed().as_micros(),
        summary(&mut writes),
        summary(&mut reads),
        summary(&mut flushes)
    );
    Ok(())
}

fn summary(durations: &mut [Duration]) -> String {
    durations.sort();
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let at = |share: f64| {
        let index = (durations.len() as f64 * share) as usize;
        durations.get(index.min(durations.len().saturating_sub(1))).copied().map_or(0.0, us)
    };
    let sum = us(durations.iter().sum());
    format!(
        "{{\"count\": {}, \"sum_us\": {sum:.1}, \"mean_us\": {:.2}, \"median_us\": {:.2}, \
         \"p99_us\": {:.2}}}",
        durations.len(),
        sum / durations.len().max(1) as f64,
        at(0.5),
        at(0.99)
    )
}

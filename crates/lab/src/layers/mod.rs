//! Layers around a device for testing it or what uses it: faults and delays (`inject`), and a
//! record of all requests (`record`). They are options of a command, and one call puts them around
//! a device.
//!
//! Invariant: the record is the outermost layer: it has what was requested and the result, injected
//! or not. Not here: layers without files and threads of their own (`sawmill_device::layer`).

mod inject;
mod record;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use sawmill_device::BlockDevice;

use crate::SEED_DEFAULT;
use inject::{InjectLayer, Rule};
use record::RecordedDevice;
use sawmill_console::exit::Result;

/// Faults, delays and a record of requests, as options of a command.
#[derive(Args, Clone)]
#[command(next_help_heading = "Layers")]
pub struct LayerOptions {
    /// Faults and delays: OPERATIONS:WHAT..., for example read:error=EIO:rate=0.01,
    /// write+flush:delay=5ms-20ms or any:error=ENOSPC:range=1G-2G:after=100:count=3; see
    /// docs/guide/driver-tools.md. May be repeated.
    #[arg(long, value_name = "SPEC", value_parser = Rule::parse)]
    inject: Vec<Rule>,

    /// With --inject and rates: the random seed.
    #[arg(long, value_name = "NUMBER", default_value_t = SEED_DEFAULT)]
    inject_seed: u64,

    /// Record every request in this file (CSV), which `sawmill bench replay` and `simulate` read.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl LayerOptions {
    /// The device inside the requested layers; the device itself if there are none.
    pub fn around(&self, device: Arc<dyn BlockDevice>) -> Result<Arc<dyn BlockDevice>> {
        let device = match self.inject.is_empty() {
            true => device,
            false => {
                Arc::new(InjectLayer::start(device, self.inject.clone(), self.inject_seed)?) as _
            }
        };
        match &self.trace {
            None => Ok(device),
            Some(path) => Ok(Arc::new(RecordedDevice::start(device, path)?)),
        }
    }
}

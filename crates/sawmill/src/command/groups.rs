//! The commands grouped by task. Not here: the commands, and the help that shows them (`super`).

/// The commands grouped by task, as in the help and the README.
pub(super) const GROUPS: [(&str, &[&str]); 6] = [
    (
        "Disks",
        &[
            "create", "serve", "list", "info", "wait", "warm", "boot-set", "resize", "rename",
            "gc", "delete",
        ],
    ),
    ("Doors", &["door", "device", "handoff"]),
    (
        "Past and copies",
        &[
            "snapshot",
            "set",
            "log",
            "rollback",
            "clone",
            "flatten",
            "import",
            "export",
            "copy",
            "replicate",
            "promote",
        ],
    ),
    ("Drivers", &["run", "driver", "conform"]),
    ("Link", &["target", "attach", "link"]),
    (
        "Health and tools",
        &[
            "doctor",
            "check",
            "inspect",
            "verify-crash",
            "simulate",
            "bench",
            "explain",
            "help",
            "man",
            "completions",
        ],
    ),
];

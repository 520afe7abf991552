//! A test bed: one simulated machine with its own state folder (journal, cache) and a store, and
//! the commands that a user types there.
//!
//! Invariant: a command uses only the state, data, cache and home folders of its bed. Not here:
//! servers that keep running (`server`), the programs behind a store (`store`).

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::machine;
use crate::server::ServerBuilder;
use crate::store::StoreUnderTest;

/// One simulated machine. Its folders are removed with it.
pub struct TestBed {
    folder: TempDir,
    /// A folder in memory, which survives a process but not a power cut.
    memory: TempDir,
    store: StoreUnderTest,
    store_url: String,
}

/// A command that ran to its end.
#[derive(Debug)]
pub struct CommandOutput {
    /// The command line, for the texts of failures.
    pub line: String,
    /// The exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl CommandOutput {
    /// From the output of a process.
    #[must_use]
    pub fn new(line: String, output: &Output) -> Self {
        CommandOutput {
            line,
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Demands success and returns the standard output.
    ///
    /// # Panics
    /// When the command failed.
    #[must_use]
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "`{}` failed:\n{}{}", self.line, self.stdout, self.stderr);
        self.stdout
    }

    /// The standard output of a success.
    #[must_use]
    pub fn into_ok(self) -> Option<String> {
        (self.code == Some(0)).then_some(self.stdout)
    }

    /// Demands success and returns the standard output as JSON.
    ///
    /// # Panics
    /// When the command failed or printed something else.
    #[must_use]
    pub fn json(self) -> Value {
        let line = self.line.clone();
        let text = self.ok();
        serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("`{line}` printed no JSON: {error}\n{text}"))
    }

    /// Demands a refusal with `code`: one line, `sawmill: error: ...`, on standard error that
    /// contains each of `words`. Only `serve` may log more than that line.
    ///
    /// # Panics
    /// When the command succeeded, ended with another code, or printed something else.
    pub fn refused(&self, code: i32, words: &[&str]) {
        let CommandOutput { line, stdout, stderr, .. } = self;
        assert_eq!(
            self.code,
            Some(code),
            "`{line}` was to be refused with {code}:\n{stdout}{stderr}"
        );
        let mut errors = stderr.lines().filter(|line| line.starts_with("sawmill: error: "));
        let error =
            errors.next().unwrap_or_else(|| panic!("`{line}`: no line says why:\n{stderr}"));
        assert_eq!(errors.next(), None, "`{line}`: one line was to say why:\n{stderr}");
        assert!(
            line.starts_with("sawmill serve") || stderr.lines().count() == 1,
            "`{line}`: more:\n{stderr}"
        );
        for word in words {
            assert!(error.contains(word), "`{line}`: the error does not say {word:?}: {error}");
        }
    }
}

/// The first field of this name, at any depth of a JSON document.
#[must_use]
pub fn field<'a>(document: &'a Value, name: &str) -> Option<&'a Value> {
    match document {
        Value::Object(fields) => {
            fields.get(name).or_else(|| fields.values().find_map(|inner| field(inner, name)))
        }
        Value::Array(items) => items.iter().find_map(|inner| field(inner, name)),
        _ => None,
    }
}

fn folders() -> (TempDir, TempDir) {
    let named = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix("sawmill-");
        builder
    };
    let folder = named().tempdir().expect("a temporary folder");
    (folder, named().tempdir_in("/dev/shm").expect("a folder in memory"))
}

impl TestBed {
    /// A test bed with a fresh, empty store.
    #[must_use]
    pub fn new(store: &StoreUnderTest) -> Self {
        let (folder, memory) = folders();
        let store_url = store.fresh_url(&folder.path().join("store"));
        TestBed { folder, memory, store: store.clone(), store_url }
    }

    /// Another machine with the same store. A folder store lives in the first bed: keep that
    /// alive.
    #[must_use]
    pub fn neighbor(&self) -> Self {
        let (folder, memory) = folders();
        TestBed { folder, memory, store: self.store.clone(), store_url: self.store_url.clone() }
    }

    /// Another machine with the same store, which it reaches through `store`.
    #[must_use]
    pub fn neighbor_by(&self, store: &StoreUnderTest) -> Self {
        TestBed { store: store.clone(), ..self.neighbor() }
    }

    /// A path inside the bed.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The folder in memory.
    #[must_use]
    pub fn memory(&self) -> &Path {
        self.memory.path()
    }

    /// The store's URL.
    #[must_use]
    pub fn store_url(&self) -> &str {
        &self.store_url
    }

    /// The folder of the store, when it is one.
    #[must_use]
    pub fn store_folder(&self) -> Option<&Path> {
        self.store_url.strip_prefix("file://").map(Path::new)
    }

    /// A `sawmill` command line in the environment of this bed.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(machine::sawmill_binary());
        command
            .args(arguments)
            .env("SAWMILL_STORE", &self.store_url)
            .env("XDG_STATE_HOME", self.path("state"))
            .env("XDG_DATA_HOME", self.path("data"))
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env("XDG_CONFIG_HOME", self.path("config"))
            .env("HOME", self.path("home"))
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null());
        for (name, value) in self.store.environment() {
            command.env(name, value);
        }
        command
    }

    /// Runs a `sawmill` command to its end.
    #[must_use]
    pub fn sawmill(&self, arguments: &[&str]) -> CommandOutput {
        let output = self.command(arguments).output().expect("the binary under test starts");
        CommandOutput::new(format!("sawmill {}", arguments.join(" ")), &output)
    }

    /// Creates a volume, or fails the test.
    pub fn create(&self, volume: &str, size: &str, options: &[&str]) {
        let _ = self.sawmill(&[&["create", volume, "--size", size], options].concat()).ok();
    }

    /// The output of `sawmill info --json` for a volume.
    #[must_use]
    pub fn info(&self, volume: &str) -> Value {
        self.sawmill(&["info", volume, "--json"]).json()
    }

    /// Prepares to serve a volume.
    #[must_use]
    pub fn serve(&self, volume: &str) -> ServerBuilder<'_> {
        ServerBuilder::new(self, volume)
    }

    /// Loses all local state of this machine, including journal and cache; the store stays.
    pub fn lose_state(&self) {
        let state = self.path("state");
        if state.exists() {
            std::fs::remove_dir_all(&state).expect("the state folder can be removed");
        }
        for entry in std::fs::read_dir(self.memory()).expect("the folder in memory").flatten() {
            std::fs::remove_file(entry.path()).expect("a staging file can be removed");
        }
    }

    /// The journals in the state folder: every file there whose name has `journal` in it.
    #[must_use]
    pub fn journals(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut folders = vec![self.path("state")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = entry.path();
                let locks = path.extension().is_some_and(|extension| extension == "lock");
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
                let named = !locks && name.is_some_and(|name| name.contains("journal"));
                if path.is_dir() {
                    folders.push(path);
                } else if named {
                    found.push(path);
                }
            }
        }
        found.sort();
        found
    }
}

//! Every interleaving of the engine's own concurrent types, under loom.
//!
//! `build.rs` puts `wake.rs` and `completion.rs` of the engine here, as they are and with planted
//! mistakes; `sync.rs` has loom's primitives for them. Each model holds for the real type, and fails
//! for the mistakes that it is there to find. Nothing here needs UCX, or `--cfg loom`.

#![cfg(test)]

mod completion_models;
mod sync;
mod wake_models;

/// The engine's modules. Each model uses a part of them.
#[allow(dead_code, unused_assignments, unused_imports, unused_mut)]
mod engine {
    include!(concat!(env!("OUT_DIR"), "/engine.rs"));
}

/// Runs a model in every interleaving with at most `preemptions` of them where nobody waits.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Set in the process that runs a mutant's model.
const MUTANT: &str = "KVFERRY_LOOM_MUTANT";

/// Asserts that loom finds the mistake: the model fails, saying `what`. It runs in a process of its
/// own, since the unwinding out of a deadlock may end it.
fn finds(test: &str, what: &str, model: impl FnOnce()) {
    if std::env::var_os(MUTANT).is_some() {
        return model();
    }
    // The crate's name is no part of a test's.
    let name = test.split_once("::").unwrap().1;
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(MUTANT, "1")
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "the mistake was not found");
    assert!(said.contains(what), "another mistake was found: {said}");
}

/// Tests that a model finds a mutant: `name: "what it finds", model;`
macro_rules! mutants {
    ($($name:ident: $what:literal, $model:expr;)*) => {$(
        #[test]
        fn $name() {
            $crate::finds(concat!(module_path!(), "::", stringify!($name)), $what, || $model);
        }
    )*};
}
use mutants;

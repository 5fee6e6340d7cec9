//! Takes the engine's concurrent types from its sources, as they are and with planted mistakes.
//!
//! A mistake is a line that is taken out or changed. Its text must stand in the source exactly once,
//! so that a mistake cannot quietly become none when the source changes.

#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::path::Path;

const SOURCES: &str = "../../crates/kvferry-engine/src";

struct Mutant {
    /// The module that it becomes.
    name: &'static str,
    /// The module that it is made of.
    of: &'static str,
    from: &'static str,
    to: &'static str,
}

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "wake_that_orders_nothing",
        of: "wake",
        from: "if self.asleep.swap(false, Ordering::AcqRel) {\n            self.event",
        to: "if self.asleep.swap(false, Ordering::Relaxed) {\n            self.event",
    },
    Mutant {
        name: "sleep_that_orders_nothing",
        of: "wake",
        from: "self.asleep.swap(true, Ordering::AcqRel);",
        to: "self.asleep.swap(true, Ordering::Relaxed);",
    },
    Mutant {
        name: "sleep_announced_by_a_store",
        of: "wake",
        from: "self.asleep.swap(true, Ordering::AcqRel);",
        to: "self.asleep.store(true, Ordering::SeqCst);",
    },
    Mutant {
        name: "wake_without_a_signal",
        of: "wake",
        from: "self.event.add_one();",
        to: "",
    },
    Mutant {
        name: "awake_forgets_what_is_owed",
        of: "wake",
        from: "self.owed.store(owed, Ordering::Relaxed);",
        to: "",
    },
    Mutant {
        name: "notify_before_the_change",
        of: "completion",
        from: "let mut state = self.lock();\n        state.quiesced = true;\n        self.notify(state);",
        to: "self.notify(self.lock());\n        self.lock().quiesced = true;",
    },
    Mutant {
        name: "threads_are_not_notified",
        of: "completion",
        from: "self.changed.notify_all();",
        to: "",
    },
    Mutant {
        name: "one_thread_is_notified",
        of: "completion",
        from: "self.changed.notify_all();",
        to: "self.changed.notify_one();",
    },
    Mutant {
        name: "the_first_waker_stays",
        of: "completion",
        from: "Some(waker) => waker.clone_from(context.waker()),",
        to: "Some(_) => {}",
    },
    Mutant {
        name: "the_waker_comes_too_late",
        of: "completion",
        from: "match &mut state.waker {",
        to: "drop(state);\n        let mut state = self.lock();\n        match &mut state.waker {",
    },
    Mutant {
        name: "the_last_outcome_stays",
        of: "completion",
        from: "if state.outcome.is_some() {\n            return false;\n        }",
        to: "",
    },
    Mutant {
        name: "an_outcome_is_enough_to_wait_for",
        of: "completion",
        from: "if let (Some(outcome), true) = (&state.outcome, state.quiesced) {\n                return Some",
        to: "if let Some(outcome) = &state.outcome {\n                return Some",
    },
];

fn main() {
    let mut out = String::new();
    for name in ["wake", "completion"] {
        module(&mut out, name, &source(name));
    }
    for mutant in MUTANTS {
        let source = source(mutant.of);
        let places = source.matches(mutant.from).count();
        assert_eq!(
            places, 1,
            "{}: no such text, or too much of it",
            mutant.name
        );
        module(
            &mut out,
            mutant.name,
            &source.replacen(mutant.from, mutant.to, 1),
        );
    }
    let path = Path::new(&std::env::var_os("OUT_DIR").unwrap()).join("engine.rs");
    std::fs::write(path, out).unwrap();
}

/// A source file without what cannot stand inside a module: its opening comment, and its unit
/// tests, which are std's.
fn source(name: &str) -> String {
    let path = format!("{SOURCES}/{name}.rs");
    println!("cargo::rerun-if-changed={path}");
    let text = std::fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]").next().unwrap();
    code.lines()
        .filter(|line| !line.starts_with("//!"))
        .fold(String::new(), |code, line| code + line + "\n")
}

fn module(out: &mut String, name: &str, source: &str) {
    writeln!(out, "pub(crate) mod {name} {{\n{source}}}").unwrap();
}

//! The native module `kvferry._native`.
//!
//! Responsible for giving Python the connectors' two halves, in plain values. What an engine's objects mean
//! is Python's (`python/kvferry/vllm`), what is done is the connectors'.
//!
//! Invariants: importing it starts nothing and loads no UCX; no call waits while it holds the interpreter.

mod figures;
mod half;
mod halves;
mod logs;
mod scheduler;
mod setup;
mod worker;

use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    _native,
    ConfigurationError,
    PyValueError,
    "A setting, a cache or an engine that cannot be used, with what to change."
);
create_exception!(
    _native,
    EngineError,
    PyRuntimeError,
    "Something that failed while it was set up or used: UCX, a port, memory."
);

fn configuration(error: impl std::fmt::Display) -> PyErr {
    ConfigurationError::new_err(error.to_string())
}

fn engine(error: impl std::fmt::Display) -> PyErr {
    EngineError::new_err(error.to_string())
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::ConfigurationError;
    #[pymodule_export]
    use super::EngineError;
    #[pymodule_export]
    use super::figures::metrics;
    #[pymodule_export]
    use super::logs::{lost_log_lines, next_log_lines, start_log, stop_log};
    #[pymodule_export]
    use super::scheduler::SchedulerHalf;
    #[pymodule_export]
    use super::setup::{describe_settings, misspelt_variables, read_settings, ucx_copies};
    #[pymodule_export]
    use super::worker::WorkerHalf;

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}

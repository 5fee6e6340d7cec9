//! A half as Python has it: usable from one thread at a time, and gone after its shutdown.

use std::sync::{Mutex, MutexGuard, TryLockError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// What is behind a Python object. Nobody waits for it: a call that finds it in use by another thread is an error.
pub(crate) struct Half<T> {
    /// `None` after the shutdown.
    inner: Mutex<Option<T>>,
    name: &'static str,
}

impl<T> Half<T> {
    pub(crate) const fn new(name: &'static str, inner: T) -> Self {
        Self {
            inner: Mutex::new(Some(inner)),
            name,
        }
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, Option<T>>> {
        match self.inner.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(PyRuntimeError::new_err(format!(
                "the {} is in use by another thread; call it from one at a time",
                self.name
            ))),
        }
    }

    /// Runs a call.
    pub(crate) fn with<R>(&self, run: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        let mut guard = self.lock()?;
        let inner = guard.as_mut();
        inner
            .map(run)
            .ok_or_else(|| PyRuntimeError::new_err(format!("the {} was shut down", self.name)))
    }

    /// What was behind it, once.
    pub(crate) fn take(&self) -> PyResult<Option<T>> {
        Ok(self.lock()?.take())
    }
}

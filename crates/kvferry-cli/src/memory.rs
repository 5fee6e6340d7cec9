//! How much memory a run may take.
//!
//! Pools are allocated at once, so asking for more than there is would not fail late and halfway;
//! but on Linux it may get some other process killed, and an answer with numbers is kinder.

use kvferry_engine::available_memory;

use crate::error::CliError;

/// Assumed where the system does not say.
const FALLBACK: u64 = 4 << 30;

/// Refuses more than three quarters of what is available now.
pub(crate) fn check(what: &'static str, need: Option<u64>) -> Result<(), CliError> {
    let limit = available_memory().unwrap_or(FALLBACK) / 4 * 3;
    let need = need.unwrap_or(u64::MAX);
    if need > limit {
        return Err(CliError::TooMuchMemory { what, need, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_refused_with_both_numbers() {
        assert!(check("a pool", Some(1 << 20)).is_ok());
        let error = check("a pool", Some(1 << 60)).unwrap_err();
        assert_eq!(error.exit_status(), 2);
        let text = error.to_string();
        assert!(
            text.contains("a pool would take 1152921504606846976 bytes"),
            "{text}"
        );
        assert!(check("a pool", None).is_err());
    }
}

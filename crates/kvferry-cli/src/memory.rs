//! How much memory a run may take.
//!
//! Pools are allocated at once, so asking for more than there is would not fail late and halfway;
//! but on Linux it may get some other process killed, and an answer with numbers is kinder.

use std::fs;

use crate::error::CliError;

/// Assumed where the system does not say.
const FALLBACK: u64 = 4 << 30;

/// Refuses more than three quarters of what is available now.
pub(crate) fn check(what: &'static str, need: Option<u64>) -> Result<(), CliError> {
    let limit = available() / 4 * 3;
    let need = need.unwrap_or(u64::MAX);
    if need > limit {
        return Err(CliError::TooMuchMemory { what, need, limit });
    }
    Ok(())
}

/// Bytes available to this process: the system's, or its control group's if that is less.
fn available() -> u64 {
    let system = fs::read_to_string("/proc/meminfo").ok();
    let system = system.as_deref().and_then(mem_available);
    let group = |file| {
        fs::read_to_string(format!("/sys/fs/cgroup/{file}"))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    let group = group("memory.max")
        .map(|max: u64| max.saturating_sub(group("memory.current").unwrap_or_default()));
    system.into_iter().chain(group).min().unwrap_or(FALLBACK)
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       16384 kB\nMemAvailable:       8192 kB\nBuffers: 1 kB\n";
        assert_eq!(mem_available(text), Some(8 << 20));
        assert_eq!(mem_available("MemAvailable: many\n"), None);
        assert_eq!(mem_available(""), None);
    }

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

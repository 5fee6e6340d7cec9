//! How far a run has come, on standard error: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

use crate::say;

/// Plain lines come after every tenth of a run.
const LINES: u64 = 10;

/// Shows a run's progress. Any thread may report.
pub(crate) struct Progress {
    total_bytes: u64,
    done: AtomicU64,
    /// `None` where standard error is no terminal.
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Begins a run of `total_bytes` bytes.
    pub(crate) fn new(total_bytes: u64) -> Self {
        let style = ProgressStyle::with_template(
            "{bar:32} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec} {msg}",
        );
        let bar = match style {
            Ok(style) if std::io::stderr().is_terminal() => {
                Some(ProgressBar::new(total_bytes).with_style(style))
            }
            _ => None,
        };
        if bar.is_none() {
            say(format_args!("{}", text(0, 0, total_bytes)));
        }
        Self {
            total_bytes,
            done: AtomicU64::new(0),
            bar,
        }
    }

    /// Counts bytes as read and verified.
    pub(crate) fn add(&self, bytes: u64) {
        let before = self.done.fetch_add(bytes, Ordering::Relaxed);
        match &self.bar {
            Some(bar) => bar.inc(bytes),
            None => {
                if let Some(line) = line(before, before + bytes, self.total_bytes) {
                    say(format_args!("{line}"));
                }
            }
        }
    }

    /// Ends the display.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// The line to print when `before` bytes have become `after`, if a tenth was completed.
fn line(before: u64, after: u64, total: u64) -> Option<String> {
    let tenths = |bytes: u64| (u128::from(bytes) * u128::from(LINES)) / u128::from(total.max(1));
    let (was, is) = (tenths(before), tenths(after));
    (is > was).then(|| text(is * 10, after, total))
}

fn text(percent: u128, bytes: u64, total: u64) -> String {
    format!("{percent:>3} %  {bytes} of {total} bytes verified")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_with_each_tenth() {
        assert_eq!(line(0, 99, 1000), None);
        let text = line(99, 100, 1000).unwrap();
        assert_eq!(text, " 10 %  100 of 1000 bytes verified");
        assert!(line(100, 450, 1000).unwrap().starts_with(" 40 %"));
        assert!(line(999, 1000, 1000).unwrap().starts_with("100 %"));
        assert_eq!(line(0, 0, 0), None);
    }
}

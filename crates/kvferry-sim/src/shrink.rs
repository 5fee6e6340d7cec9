//! A smaller run that still breaks a rule.

/// The fewest requests with which `breaks` says that a rule is broken; `requests` of them break one. Each number
/// is tried up to `tries` times, because connectors with threads do not run the same way twice. What a seed gives
/// to fewer requests are the first of those that it gives to more.
///
/// ```
/// use kvferry_sim::fewest_requests;
///
/// assert_eq!(fewest_requests(100, 1, |requests| requests >= 37), 37);
/// ```
pub fn fewest_requests(requests: u32, tries: u32, mut breaks: impl FnMut(u32) -> bool) -> u32 {
    let (mut holds, mut broken) = (0, requests);
    while broken - holds > 1 {
        let middle = holds + (broken - holds) / 2;
        if (0..tries).any(|_| breaks(middle)) {
            broken = middle;
        } else {
            holds = middle;
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_are_found_in_few_runs_also_if_not_every_run_breaks_the_rule() {
        for (all, least) in [(1, 1), (2, 1), (2, 2), (40, 7), (1000, 1000)] {
            let mut runs = 0;
            let found = fewest_requests(all, 3, |requests| {
                runs += 1;
                requests >= least
            });
            assert_eq!(found, least, "of {all}");
            assert!(runs <= 3 * 10, "{runs} runs");
        }
        // Every second run breaks it.
        let mut run = 0;
        let found = fewest_requests(64, 3, |requests| {
            run += 1;
            requests >= 20 && run % 2 == 0
        });
        assert_eq!(found, 20);
    }
}

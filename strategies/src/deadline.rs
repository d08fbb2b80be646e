//! The one place where a limit becomes a point in time.

use std::time::{Duration, Instant};

/// Ten years: as good as none, and far from the end of the clock.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A limit that clocks and sockets can count with.
pub(crate) fn capped(limit: Duration) -> Duration {
    limit.min(LONGEST)
}

/// When a limit that begins now ends.
pub(crate) fn after(limit: Duration) -> Instant {
    Instant::now() + capped(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_is_too_long_for_the_clock() {
        assert!(after(Duration::MAX) > Instant::now());
        assert_eq!(capped(Duration::from_secs(3)), Duration::from_secs(3));
    }
}

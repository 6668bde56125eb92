//! The time by which protections, pins and leases end: milliseconds since the pool was made.
//!
//! Either the system's monotonic clock, or one that only moves when it is told to, so that what depends on time replays
//! exactly. It never goes backwards. Callers: pool.rs, which hands `now` to every room that needs it.

use std::time::Instant;

use crate::sync::{Atom, AtomicU64};

/// A pool's clock.
#[derive(Debug)]
pub struct Clock(Kind);

#[derive(Debug)]
enum Kind {
    System(Instant),
    Manual(AtomicU64),
}

/// The system's clock can't be advanced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotManual;

impl std::fmt::Display for NotManual {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            "this pool runs by the system's clock; make it with clock=\"manual\" to advance time by hand",
        )
    }
}

impl std::error::Error for NotManual {}

impl Clock {
    /// The system's monotonic clock, from 0 now.
    pub fn system() -> Self {
        Self(Kind::System(Instant::now()))
    }

    /// A clock that stands at 0 until it is advanced.
    pub fn manual() -> Self {
        Self(Kind::Manual(AtomicU64::new(0)))
    }

    /// Milliseconds since the start.
    #[inline]
    pub fn now_ms(&self) -> u64 {
        match &self.0 {
            Kind::System(start) => u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
            Kind::Manual(now) => now.get(),
        }
    }

    /// Move a manual clock forward; the time after it. It stops at the end of time.
    pub fn advance(&self, ms: u64) -> Result<u64, NotManual> {
        let Kind::Manual(now) = &self.0 else { return Err(NotManual) };
        // The transition always has an answer, so both arms hold the time before.
        let (Ok(before) | Err(before)) = now.transit(|t| Some(t.saturating_add(ms)));
        Ok(before.saturating_add(ms))
    }

    /// Whether it moves only by [`Self::advance`].
    pub fn is_manual(&self) -> bool {
        matches!(self.0, Kind::Manual(_))
    }
}

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn manual_moves_when_told() {
        let clock = Clock::manual();
        assert!(clock.is_manual());
        assert_eq!(clock.now_ms(), 0);
        assert_eq!(clock.advance(7), Ok(7));
        assert_eq!(clock.advance(0), Ok(7));
        assert_eq!(clock.now_ms(), 7);
        assert_eq!(clock.advance(u64::MAX), Ok(u64::MAX));
        assert_eq!(clock.advance(1), Ok(u64::MAX));
    }

    #[test]
    fn system_moves_by_itself() {
        let clock = Clock::system();
        assert!(!clock.is_manual());
        assert_eq!(clock.advance(1), Err(NotManual));
        let first = clock.now_ms();
        std::thread::sleep(std::time::Duration::from_millis(3));
        assert!(clock.now_ms() >= first + 3);
    }
}

//! The word of an open plan: how far it has come, and what became of it.
//!
//! # `PlanWord`, 64 bits
//!
//! | bits | field | meaning |
//! | --- | --- | --- |
//! | 0-30 | `taken` | moves, from the first on, that somebody has taken to commit them |
//! | 31-61 | `ended` | moves that are over, one way or the other: their leases have ended, their frames belong to one page or none |
//! | 62-63 | `state` | open, committed, aborted, expired |
//!
//! # Invariant
//!
//! `taken` only grows, and only while the plan is open; the transition that takes the last move makes it committed. So each
//! move belongs to one thread: whoever took it, or whoever made the plan aborted or expired and undoes what nobody took.
//! `ended` counts up to the number of moves, and whoever brings it there (of a plan without moves: whoever decided it) is
//! the one who ends the plan.

const COUNT: u64 = (1 << 31) - 1;
const ENDED_SHIFT: u32 = 31;
const STATE_SHIFT: u32 = 62;

/// The most moves of a plan.
pub const MAX_MOVES: u32 = COUNT as u32;

/// What became of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum State {
    /// It can still be committed or aborted.
    Open,
    /// Every move was taken to be committed.
    Committed,
    /// It was given up: what had not been committed by then is as before.
    Aborted,
    /// Its time was over before somebody decided.
    Expired,
}

impl State {
    /// As it stands in a sentence.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Committed => "committed",
            Self::Aborted => "aborted",
            Self::Expired => "expired",
        }
    }
}

/// See the head of this file.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct PlanWord(pub u64);

impl PlanWord {
    /// Moves that were taken.
    #[inline]
    pub const fn taken(self) -> u32 {
        (self.0 & COUNT) as u32
    }
    /// Moves that are over.
    #[inline]
    pub const fn ended(self) -> u32 {
        (self.0 >> ENDED_SHIFT & COUNT) as u32
    }
    /// What became of it.
    #[inline]
    pub const fn state(self) -> State {
        match self.0 >> STATE_SHIFT {
            0 => State::Open,
            1 => State::Committed,
            2 => State::Aborted,
            _ => State::Expired,
        }
    }

    /// Up to `n` of `len` moves for the caller to commit, from [`Self::taken`] on. The last ones decide the plan.
    #[inline]
    pub const fn take(self, n: u32, len: u32) -> Option<Self> {
        if !matches!(self.state(), State::Open) {
            return None;
        }
        let left = len - self.taken();
        let state = if n >= left { State::Committed } else { State::Open };
        let n = if n < left { n } else { left };
        Some(Self((self.0 + n as u64) | ((state as u64) << STATE_SHIFT)))
    }

    /// Nobody takes any more: what was not taken is the caller's to undo.
    #[inline]
    pub const fn give_up(self, state: State) -> Option<Self> {
        match (self.state(), state) {
            (State::Open, State::Aborted | State::Expired) => {
                Some(Self(self.0 | (state as u64) << STATE_SHIFT))
            }
            _ => None,
        }
    }

    /// What to add when `n` moves are over.
    #[inline]
    pub const fn end_step(n: u32) -> u64 {
        (n as u64) << ENDED_SHIFT
    }
}

impl std::fmt::Debug for PlanWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} taken={} ended={}", self.state().name(), self.taken(), self.ended())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_piece_decides() {
        let word = PlanWord(0).take(2, 5).expect("open");
        assert_eq!((word.taken(), word.state()), (2, State::Open));
        let last = word.take(MAX_MOVES, 5).expect("open");
        assert_eq!((last.taken(), last.ended(), last.state()), (5, 0, State::Committed));
        assert_eq!((last.take(1, 5), last.give_up(State::Aborted)), (None, None));
        let over = PlanWord(last.0 + PlanWord::end_step(5));
        assert_eq!((over.taken(), over.ended(), over.state()), (5, 5, State::Committed));
    }

    #[test]
    fn a_plan_ends_once() {
        for state in [State::Aborted, State::Expired] {
            let word = PlanWord(0).take(1, 3).and_then(|w| w.give_up(state)).expect("open");
            assert_eq!((word.taken(), word.state()), (1, state));
            assert_eq!((word.take(1, 3), word.give_up(State::Aborted)), (None, None));
        }
        assert_eq!(PlanWord(0).give_up(State::Committed), None);
        assert_eq!(PlanWord(0).take(0, 0).map(PlanWord::state), Some(State::Committed));
        let most = PlanWord(0).take(MAX_MOVES, MAX_MOVES).expect("open");
        let over = PlanWord(most.0 + PlanWord::end_step(MAX_MOVES));
        assert_eq!((over.taken(), over.ended(), over.state()), (MAX_MOVES, MAX_MOVES, State::Committed));
    }
}

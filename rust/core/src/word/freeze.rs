//! The word of a tenant's freezes: who has frozen it, and how often it was thawed.
//!
//! # `FreezeWord`, 64 bits
//!
//! | bits | field | meaning |
//! | --- | --- | --- |
//! | 0-30 | `plans` | open plans that freeze the tenant |
//! | 31 | STAYS | it is frozen until it is thawed: by its user, or by a plan that was committed |
//! | 32-63 | `thaws` | how often it was thawed |
//!
//! # Invariant
//!
//! A thaw ends all freezes that there are, and a plan's end its own, if no thaw has: so a plan remembers `thaws`, and finds
//! another number where its freeze is gone. What was frozen after that is somebody else's.

const PLANS: u64 = STAYS - 1;
const STAYS: u64 = 1 << 31;
const THAWS_SHIFT: u32 = 32;

/// See the head of this file.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct FreezeWord(pub u64);

impl FreezeWord {
    /// Whether somebody freezes it.
    #[inline]
    pub const fn is_frozen(self) -> bool {
        self.0 & (PLANS | STAYS) != 0
    }
    /// How often it was thawed.
    #[inline]
    pub const fn thaws(self) -> u32 {
        (self.0 >> THAWS_SHIFT) as u32
    }

    /// Frozen until it is thawed.
    #[inline]
    pub const fn freeze(self) -> Self {
        Self(self.0 | STAYS)
    }

    /// Frozen for a plan that opens. (There are never as many as bits for them: each takes memory.)
    #[inline]
    pub const fn begin(self) -> Self {
        Self(self.0 + 1)
    }

    /// A plan that began before the thaw after `thaws` ends. `None`: it freezes nothing any more.
    #[inline]
    pub const fn end(self, thaws: u32, committed: bool) -> Option<Self> {
        if self.thaws() != thaws || self.0 & PLANS == 0 {
            return None;
        }
        Some(Self((self.0 - 1) | if committed { STAYS } else { 0 }))
    }

    /// Nothing freezes it any more.
    #[inline]
    pub const fn thaw(self) -> Self {
        Self((self.thaws().wrapping_add(1) as u64) << THAWS_SHIFT)
    }
}

impl std::fmt::Debug for FreezeWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "plans={} stays={} thaws={}", self.0 & PLANS, self.0 & STAYS != 0, self.thaws())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ends_its_own() {
        let word = FreezeWord(0).begin().begin();
        let one = word.end(0, false).expect("its freeze stands");
        assert!(word.is_frozen() && one.is_frozen());
        assert_eq!(one.end(0, false), Some(FreezeWord(0)));
        assert_eq!(FreezeWord(0).end(0, false), None);
        let kept = one.end(0, true).expect("its freeze stands");
        assert_eq!(kept, FreezeWord(0).freeze());
        assert_eq!(kept.freeze(), kept);
    }

    #[test]
    fn a_thaw_ends_all_and_what_comes_after_it_is_anothers() {
        let thawed = FreezeWord(0).begin().freeze().begin().thaw();
        assert_eq!((thawed.is_frozen(), thawed.thaws()), (false, 1));
        for again in [thawed, thawed.freeze(), thawed.begin()] {
            assert_eq!((again.end(0, false), again.end(0, true)), (None, None));
        }
        assert_eq!(FreezeWord(u64::MAX).thaw(), FreezeWord(0));
    }
}

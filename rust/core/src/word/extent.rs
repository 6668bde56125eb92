//! The word of an extent: which frame size it serves and how many of its frames are free.
//!
//! # `ExtentWord`, 64 bits
//!
//! | bits | field | meaning |
//! | --- | --- | --- |
//! | 0-23 | `free` | frames that a claim may still take; 0 in the arena |
//! | 24-31 | `size` | the frame size it serves; 0 in the arena |
//! | 32 | `SERVING` | it serves `size`; clear: it lies in the arena, whole, for any size |
//! | 33 | `HIDDEN` | it need not stand in the list it belongs to (frame.rs, Lists); clear: it does |
//! | 34-38 | `keeper` | lane + 1 of the lane that claims from it first, 0: nobody; of a draining extent the size + 1 that it serves next, 0: it goes to the arena |
//! | 39 | `DRAINING` | a plan is emptying it: nothing in it may be claimed |
//! | 40-63 | `turn` | how many releases came here, wrapping: a word that was read before one is not met again |
//!
//! # Invariant
//!
//! A claim lowers `free` first and so has the right to as many bits; a release clears its bit first and raises `free`
//! then. So the clear bits of an extent are never fewer than `free` plus all rights that have not been used yet, and when
//! `free` is all there is, every bit is clear: an extent goes back to the arena, and on to another size, by this word
//! alone. The zero word is an extent in the arena, listed, kept by nobody.
//!
//! A draining extent belongs in no list and has no keeper; its free frames only grow in number. The release that brings
//! the last one takes it where it was to go, by the same word; until then anybody may stop the draining, and what is free
//! in it can be claimed again.

use super::{Lane, SizeId};

const FREE_BITS: u32 = 24;
const FREE: u64 = (1 << FREE_BITS) - 1;
const SIZE_SHIFT: u32 = 24;
const SIZE: u64 = 0xff << SIZE_SHIFT;
const SERVING: u64 = 1 << 32;
const HIDDEN: u64 = 1 << 33;
const KEEPER_SHIFT: u32 = 34;
const KEEPER: u64 = 0x1f << KEEPER_SHIFT;
const DRAINING: u64 = 1 << 39;
const TURN_SHIFT: u32 = 40;
const TURN: u64 = !0 << TURN_SHIFT;

const _: () = assert!(super::LANES < 0x1f, "every lane fits beside nobody");
const _: () = assert!(FREE | SIZE | SERVING | HIDDEN | KEEPER | DRAINING | TURN == !0, "no bit is left over");
const _: () = assert!(
    (FREE & SIZE) | (KEEPER & (DRAINING | TURN)) | (DRAINING & TURN) | ((FREE | SIZE) >> 32) == 0,
    "no bit is used twice"
);

/// The most frames an extent can hold.
pub const MAX_EXTENT_FRAMES: u32 = FREE as u32;

/// See the head of this file.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct ExtentWord(pub u64);

impl ExtentWord {
    /// Frames that may still be claimed; 0 in the arena.
    #[inline]
    pub const fn free(self) -> u32 {
        (self.0 & FREE) as u32
    }
    /// The frame size it serves, `None` in the arena.
    #[inline]
    pub const fn size(self) -> Option<SizeId> {
        if self.in_arena() { None } else { Some(SizeId((self.0 >> SIZE_SHIFT) as u8)) }
    }
    /// Whether it lies in the arena, whole.
    #[inline]
    pub const fn in_arena(self) -> bool {
        self.0 & SERVING == 0
    }
    /// Whether it serves this size.
    #[inline]
    pub const fn serves(self, size: SizeId) -> bool {
        self.0 & (SERVING | SIZE) == SERVING | (size.0 as u64) << SIZE_SHIFT
    }
    /// Whether it may be missing from its list.
    #[inline]
    pub const fn is_hidden(self) -> bool {
        self.0 & HIDDEN != 0
    }
    /// Whether a claim of the right size finds nothing in it.
    #[inline]
    pub const fn is_exhausted(self) -> bool {
        !self.in_arena() && (self.free() == 0 || self.is_draining())
    }
    /// Whether a plan is emptying it.
    #[inline]
    pub const fn is_draining(self) -> bool {
        self.0 & DRAINING != 0
    }
    /// The size that a draining extent serves next; `None`: none in particular.
    #[inline]
    pub const fn goal(self) -> Option<SizeId> {
        match (self.0 & KEEPER) >> KEEPER_SHIFT {
            size if size > 0 && self.is_draining() => Some(SizeId(size as u8 - 1)),
            _ => None,
        }
    }
    /// Whether another lane claims from it first.
    #[inline]
    pub const fn is_kept_from(self, lane: Lane) -> bool {
        let keeper = (self.0 & KEEPER) >> KEEPER_SHIFT;
        !self.is_draining() && keeper != 0 && keeper != lane.0 as u64 + 1
    }

    /// The right to up to `want` frames: the word after it, and how many. With `keep` the lane becomes the keeper, unless
    /// another is: then there is no right. An extent without free frames has no keeper.
    #[inline]
    pub const fn claim(self, size: SizeId, want: u32, keep: Option<Lane>) -> Option<(Self, u32)> {
        let free = self.free();
        let refused = matches!(keep, Some(lane) if self.is_kept_from(lane));
        if refused || !self.serves(size) || self.is_draining() || free == 0 || want == 0 {
            return None;
        }
        let n = if want < free { want } else { free };
        let word = self.0 - n as u64;
        let word = match keep {
            _ if n == free => word & !KEEPER,
            Some(lane) => word & !KEEPER | (lane.0 as u64 + 1) << KEEPER_SHIFT,
            None => word,
        };
        Some((Self(word), n))
    }

    /// arena -> serving `size`, `total` frames of it here, with the right to up to `want` of them.
    #[inline]
    pub const fn take(self, size: SizeId, total: u32, want: u32, keep: Option<Lane>) -> Option<(Self, u32)> {
        if !self.in_arena() || total == 0 || total > MAX_EXTENT_FRAMES {
            return None;
        }
        let whole = self.0 & TURN | SERVING | HIDDEN | (size.0 as u64) << SIZE_SHIFT | total as u64;
        Self(whole).claim(size, want, keep)
    }

    /// All of it is free, and it serves another size: now it serves this one, with the right to up to `want` of its frames.
    #[inline]
    pub const fn convert(
        self,
        all: u32,
        size: SizeId,
        total: u32,
        want: u32,
        keep: Option<Lane>,
    ) -> Option<(Self, u32)> {
        if self.in_arena() || self.is_draining() || self.serves(size) || self.free() != all {
            return None;
        }
        Self(self.0 & TURN | HIDDEN).take(size, total, want, keep)
    }

    /// `n` frames, whose bits are clear, come back; with `leave`, the last one gives the extent to the arena, or to the size
    /// that is waiting for it, of which it holds `goal_total` frames.
    #[inline]
    pub const fn release(
        self,
        size: SizeId,
        n: u32,
        total: u32,
        leave: bool,
        goal_total: u32,
    ) -> Option<Self> {
        if !self.serves(size) || n > total - self.free() {
            return None;
        }
        let next = self.0.wrapping_add(Self::release_step(n));
        if !leave || self.free() + n != total {
            return Some(Self(next));
        }
        let arena = next & TURN | HIDDEN;
        match self.goal() {
            Some(goal) if goal_total > 0 => {
                Some(Self(arena | SERVING | (goal.0 as u64) << SIZE_SHIFT | goal_total as u64))
            }
            _ => Some(Self(arena)),
        }
    }

    /// Nothing more may be claimed in it; empty, it goes on to `goal`.
    #[inline]
    pub const fn drain(self, size: SizeId, goal: Option<SizeId>) -> Option<Self> {
        if !self.serves(size) || self.is_draining() {
            return None;
        }
        let goal = match goal {
            Some(SizeId(goal)) if (goal as u64) < KEEPER >> KEEPER_SHIFT => goal as u64 + 1,
            _ => 0,
        };
        Some(Self(self.0 & !KEEPER | DRAINING | goal << KEEPER_SHIFT))
    }

    /// What is free in it may be claimed again.
    #[inline]
    pub const fn undrain(self) -> Option<Self> {
        if !self.is_draining() {
            return None;
        }
        let next = self.0.wrapping_add(Self::release_step(0));
        Some(Self(next & !(DRAINING | KEEPER) | HIDDEN))
    }

    /// What a release of `n` frames adds to a word whose extent doesn't leave its size.
    #[inline]
    pub const fn release_step(n: u32) -> u64 {
        1 << TURN_SHIFT | n as u64
    }

    /// It stands in its list.
    #[inline]
    pub const fn show(self) -> Self {
        Self(self.0 & !HIDDEN)
    }

    /// An exhausted extent may be taken from its list.
    #[inline]
    pub const fn hide(self) -> Option<Self> {
        if self.is_exhausted() { Some(Self(self.0 | HIDDEN)) } else { None }
    }
}

impl std::fmt::Debug for ExtentWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.size() {
            Some(size) => write!(f, "{size} free={}", self.free())?,
            None => f.write_str("arena")?,
        }
        if self.is_hidden() {
            f.write_str(" hidden")?;
        }
        if self.is_draining() {
            return match self.goal() {
                Some(goal) => write!(f, " draining for {goal}"),
                None => f.write_str(" draining"),
            };
        }
        match (self.0 & KEEPER) >> KEEPER_SHIFT {
            0 => Ok(()),
            lane => write!(f, " L{}", lane - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SizeId = SizeId(0);
    const B: SizeId = SizeId(7);
    const LANE: Lane = Lane(15);

    #[test]
    fn zero_is_an_extent_in_the_arena() {
        let word = ExtentWord(0);
        assert!(word.in_arena() && !word.is_hidden() && !word.is_exhausted());
        assert_eq!(word.size(), None);
        assert_eq!(word.claim(A, 1, None), None);
        assert_eq!(word.release(A, 1, 8, true, 0), None);
    }

    #[test]
    fn a_life() {
        let (word, n) = ExtentWord(0).take(B, 10, 4, Some(LANE)).expect("in the arena");
        assert_eq!((n, word.free(), word.size()), (4, 6, Some(B)));
        assert!(word.is_hidden() && word.is_kept_from(Lane(0)) && !word.is_kept_from(LANE));
        assert_eq!(word.take(A, 10, 1, Some(LANE)), None);
        assert_eq!(word.claim(A, 1, None), None);
        assert_eq!(word.hide(), None);
        let (word, n) = word.show().claim(B, 100, None).expect("free frames");
        assert_eq!((n, word.free()), (6, 0));
        assert!(word.is_exhausted() && !word.is_kept_from(Lane(0)) && !word.is_hidden());
        assert_eq!(word.claim(B, 1, Some(LANE)), None);
        assert_eq!(word.release(A, 1, 10, true, 0), None);
        assert_eq!(word.release(B, 11, 10, true, 0), None);
        let one = word.release(B, 9, 10, true, 0).expect("nine are out");
        assert_eq!((one.free(), one.size()), (9, Some(B)));
        assert_eq!(one.release(B, 1, 10, false, 0).map(ExtentWord::free), Some(10));
        let back = one.release(B, 1, 10, true, 0).expect("one is out");
        assert!(back.in_arena() && back.is_hidden() && back.free() == 0);
        assert!(back.take(A, MAX_EXTENT_FRAMES, 1, Some(LANE)).is_some());
    }

    #[test]
    fn a_word_before_a_release_is_not_met_again() {
        let (full, _) = ExtentWord(0).take(A, 1, 1, Some(LANE)).expect("in the arena");
        let one = full.release(A, 1, 1, false, 0).expect("one is out");
        let (again, _) = one.claim(A, 1, None).expect("one is free");
        let two = again.release(A, 1, 1, false, 0).expect("one is out");
        assert_ne!(one, two);
        assert_eq!(one.free(), two.free());
    }

    #[test]
    fn a_draining_extent_gives_nothing_out() {
        let (word, _) = ExtentWord(0).take(A, 4, 2, Some(LANE)).expect("in the arena");
        let word = word.show().drain(A, Some(B)).expect("it serves it");
        assert!(word.is_draining() && word.is_exhausted() && !word.is_kept_from(Lane(0)));
        assert_eq!((word.free(), word.goal(), word.drain(A, None)), (2, Some(B), None));
        assert_eq!((word.claim(A, 1, None), word.convert(4, B, 9, 1, None)), (None, None));
        let one = word.release(A, 1, 4, true, 9).expect("two are out");
        assert_eq!((one.free(), one.is_draining()), (3, true));
        // Stopped: what is free can be claimed, from the list where it will stand.
        let back = one.undrain().expect("it drains");
        assert_eq!((back.free(), back.is_hidden(), back.is_draining(), back.goal()), (3, true, false, None));
        assert!(!back.is_kept_from(Lane(0)) && back.undrain().is_none() && back.claim(A, 1, None).is_some());
        // Empty: where it was to go.
        let there = one.release(A, 1, 4, true, 9).expect("one is out");
        assert_eq!(
            (there.size(), there.free(), there.is_draining(), there.is_hidden()),
            (Some(B), 9, false, true)
        );
        let arena = word.undrain().and_then(|w| w.drain(A, None)).and_then(|w| w.release(A, 2, 4, true, 0));
        assert!(arena.is_some_and(|w| w.in_arena() && w.goal().is_none()));
        assert_eq!(ExtentWord(0).drain(A, None), None);
    }

    #[test]
    fn what_is_all_free_serves_any_size() {
        let word = ExtentWord(0).take(A, 4, 4, None).and_then(|(w, _)| w.release(A, 4, 4, false, 0));
        let word = word.expect("four are out");
        let (other, n) = word.convert(4, B, 2, 1, Some(LANE)).expect("all of it is free");
        assert_eq!((n, other.size(), other.free()), (1, Some(B), 1));
        assert_eq!((word.convert(4, A, 4, 1, None), other.convert(2, A, 4, 1, None)), (None, None));
    }

    #[test]
    fn the_turn_wraps_without_touching_the_rest() {
        let (word, _) = ExtentWord(TURN).take(B, 3, 3, Some(LANE)).expect("in the arena");
        let word = word.release(B, 1, 3, true, 0).expect("three are out");
        assert_eq!((word.free(), word.size(), word.0 & TURN), (1, Some(B), 0));
    }
}

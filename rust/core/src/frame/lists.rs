//! Which extents are worth a look: one list per frame size, and one for the arena.
//!
//! A list is a bit per extent, 32 to a word (bits 0-31), beside a count of the insertions into that word (bits 32-63).
//! A bit may stand for an extent that has nothing any more: whoever looks takes it out. It may be missing only while
//! the extent's word says HIDDEN ([`super::extents`] keeps that). So:
//!
//! - `insert` always counts, also where the bit stands already;
//! - `remove` succeeds only on the very word that was read *before* the extent was found to have nothing. An insertion in
//!   between has changed the count, so no extent is lost that somebody filled meanwhile;
//! - two reads of a whole list without a bit and with the same counts mean that at one moment all of it was empty.

use crate::sync::{Atom, Words};

const SPAN: usize = 32;
const COUNT: u64 = 1 << 32;

#[derive(Debug)]
pub(super) struct List {
    words: Words,
    extents: usize,
    /// The bits of a word that mean "not in the list": all of them where a zero word lists every extent.
    flip: u64,
}

/// A word of a list as it was read.
#[derive(Clone, Copy)]
pub(super) struct Seen(u64);

impl List {
    /// An empty list, or one with every extent in it.
    pub(super) fn new(extents: u32, full: bool) -> Self {
        let extents = extents as usize;
        Self {
            words: Words::zeroed(extents.div_ceil(SPAN)),
            extents,
            flip: if full { u64::from(u32::MAX) } else { 0 },
        }
    }

    fn len(&self) -> usize {
        self.extents.div_ceil(SPAN)
    }

    #[inline]
    fn read(&self, at: usize) -> (Seen, u32) {
        let word = self.words[at].get();
        let left = self.extents - at * SPAN;
        let real = if left >= SPAN { u32::MAX } else { (1 << left) - 1 };
        (Seen(word), (word ^ self.flip) as u32 & real)
    }

    pub(super) fn insert(&self, extent: usize) {
        let bit = 1 << (extent % SPAN);
        let set = if self.flip == 0 { bit } else { 0 };
        // Never refused: the closure always answers.
        let _ = self.words[extent / SPAN].transit(|w| Some((w & !bit | set).wrapping_add(COUNT)));
    }

    /// Take it out, unless anything in its word has changed since `seen`.
    pub(super) fn remove(&self, extent: usize, Seen(seen): Seen) {
        let bit = 1 << (extent % SPAN);
        let set = bit & self.flip;
        let _ = self.words[extent / SPAN].cas(seen, seen & !bit | set);
    }

    /// The sum of the counts if no extent from `first` on is listed.
    pub(super) fn empty_stamp(&self, first: usize) -> Option<u64> {
        let mut sum = 0u64;
        for at in 0..self.len() {
            let (Seen(word), bits) = self.read(at);
            let bits = if at == first / SPAN { bits >> (first % SPAN) } else { bits };
            if bits != 0 && at >= first / SPAN {
                return None;
            }
            sum = sum.wrapping_add(word >> 32);
        }
        Some(sum)
    }

    /// Visit the listed extents from `from` on, round once, until `visit` answers `true`.
    pub(super) fn visit(&self, from: usize, mut visit: impl FnMut(usize, Seen) -> bool) {
        if self.extents == 0 {
            return;
        }
        if self.extents == 0 {
            return;
        }
        let first = from / SPAN;
        for step in 0..=self.len() {
            let at = (first + step) % self.len();
            let (mut seen, mut bits) = self.read(at);
            // The first word is visited twice: from `from` on, and at last what lies before.
            if step == 0 {
                bits &= u32::MAX << (from % SPAN);
            } else if step == self.len() {
                bits &= !(u32::MAX << (from % SPAN));
            }
            while bits != 0 {
                let bit = bits.trailing_zeros() as usize;
                if visit(at * SPAN + bit, seen) {
                    return;
                }
                bits &= bits - 1;
                // The visit may have taken it out: the next removal needs the word as it is now.
                seen = self.read(at).0;
            }
        }
    }
}

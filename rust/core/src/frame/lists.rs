//! Which extents are worth a look: one list per frame size, and one for the arena.
//!
//! A list is a bit per extent, 32 to a word (bits 0-31), beside a count of the insertions into that word (bits 32-63); and
//! above it the same once more, a bit per word of the lower level: 1,024 extents to a word.
//! A bit may stand for an extent (a word) that has nothing any more: whoever looks takes it out. It may be missing only
//! while an insertion is under way, or while the extent's word says HIDDEN (`extents.rs` keeps that). So:
//!
//! - `insert` goes from below upward, and always counts, also where the bit stands already;
//! - `remove` succeeds only on the very word that was read *before* the extent was found to have nothing. An insertion in
//!   between has changed the count, so no extent is lost that somebody filled meanwhile; the same holds one level up;
//! - two reads of a whole upper level without a bit and with the same counts mean that at one moment the list was empty.

use crate::sync::{Atom, Words};

const SPAN: usize = 32;
const COUNT: u64 = 1 << 32;

/// One level.
#[derive(Debug)]
struct Level {
    words: Words,
    len: usize,
    /// The bits of a word that mean "not in the list": all of them where a zero word lists everything.
    flip: u64,
}

/// A word of a level as it was read.
#[derive(Clone, Copy)]
pub(super) struct Seen(u64);

impl Level {
    fn new(len: usize, full: bool) -> Self {
        Self {
            words: Words::zeroed(len.div_ceil(SPAN)),
            len,
            flip: if full { u64::from(u32::MAX) } else { 0 },
        }
    }

    fn words(&self) -> usize {
        self.len.div_ceil(SPAN)
    }

    #[inline]
    fn read(&self, at: usize) -> (Seen, u32) {
        let word = self.words[at].get();
        let left = self.len - at * SPAN;
        let real = if left >= SPAN { u32::MAX } else { (1 << left) - 1 };
        (Seen(word), (word ^ self.flip) as u32 & real)
    }

    fn insert(&self, item: usize) {
        let bit = 1 << (item % SPAN);
        let set = bit & !self.flip;
        // Never refused: the closure always answers.
        let _ = self.words[item / SPAN].transit(|w| Some((w & !bit | set).wrapping_add(COUNT)));
    }

    fn remove(&self, item: usize, Seen(seen): Seen) {
        let bit = 1 << (item % SPAN);
        let set = bit & self.flip;
        let _ = self.words[item / SPAN].cas(seen, seen & !bit | set);
    }

    /// The first item from `from` on.
    #[inline]
    fn next(&self, from: usize) -> Option<(Seen, usize)> {
        let mut mask = u32::MAX << (from % SPAN);
        for at in from / SPAN..self.words() {
            let (seen, bits) = self.read(at);
            if bits & mask != 0 {
                return Some((seen, at * SPAN + (bits & mask).trailing_zeros() as usize));
            }
            mask = u32::MAX;
        }
        None
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct List {
    extents: Level,
    words: Level,
}

impl List {
    /// An empty list, or one with every extent in it.
    pub(super) fn new(extents: u32, full: bool) -> Self {
        let extents = Level::new(extents as usize, full);
        let words = Level::new(extents.words(), full);
        Self { extents, words }
    }

    pub(super) fn insert(&self, extent: usize) {
        self.extents.insert(extent);
        self.words.insert(extent / SPAN);
    }

    /// Take it out, unless anything in its word has changed since `seen`.
    pub(super) fn remove(&self, extent: usize, seen: Seen) {
        self.extents.remove(extent, seen);
    }

    /// A sum of the counts if no extent is listed; with `but_first`, none but the first.
    pub(super) fn empty_stamp(&self, but_first: bool) -> Option<u64> {
        let mut sum = 0u64;
        for at in 0..self.words.words() {
            let (Seen(word), bits) = self.words.read(at);
            sum = sum.wrapping_add(word >> 32);
            if bits == 0 {
                continue;
            }
            if !(but_first && at == 0 && bits == 1) {
                return None;
            }
            let (Seen(word), bits) = self.extents.read(0);
            if bits > 1 {
                return None;
            }
            sum = sum.wrapping_add(word >> 32);
        }
        Some(sum)
    }

    /// Visit the listed extents from `from` on, round once, until `visit` answers `true`.
    pub(super) fn visit(&self, from: usize, mut visit: impl FnMut(usize, Seen) -> bool) {
        let _ = self.visit_range(from, self.extents.len, &mut visit) || self.visit_range(0, from, &mut visit);
    }

    fn visit_range(&self, from: usize, to: usize, visit: &mut impl FnMut(usize, Seen) -> bool) -> bool {
        let mut at = from / SPAN;
        while let Some((above, word)) = self.words.next(at)
            && word * SPAN < to
        {
            let mut next = from.max(word * SPAN);
            while next < to.min((word + 1) * SPAN) {
                // Read anew for each: a visit before may have taken out what it visited.
                let (seen, bits) = self.extents.read(word);
                let bits = bits & u32::MAX << (next % SPAN);
                let extent = word * SPAN + bits.trailing_zeros() as usize;
                if bits == 0 || extent >= to {
                    break;
                }
                if visit(extent, seen) {
                    return true;
                }
                next = extent + 1;
            }
            if self.extents.read(word).1 == 0 {
                self.words.remove(word, above);
            }
            at = word + 1;
        }
        false
    }
}

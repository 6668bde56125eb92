//! Extents, their bits and their lists: what an arena and the set of free page ids have in common.
//!
//! # Words
//!
//! Per extent a block of whole cache lines: its [`ExtentWord`], then its bits, 64 frames to a word, USED = 1, counted
//! from the extent's first frame. All bits of an extent in the arena are clear, and which bits stand for frames follows
//! from the size, so an extent changes its size by its word alone and there is nothing to prepare.
//! Per lane a cache line or more with a word per size: the extent the lane claims from (bits 0-30: id + 1; 0: none yet),
//! whether as a guest (31), and the word in it where it stopped (32-63). A hint: wrong costs a look.
//!
//! # Who takes where
//!
//! A lane claims from its extent until that has nothing left, then goes on to, in this order:
//! extents of the size that have something and that no other lane keeps; extents in the arena; any extent of the size.
//! So two lanes share no word until room is scarce, and the arena's extents stay whole as long as they may. In an
//! arena of few extents and several sizes nobody keeps anything. Of several candidates the fullest wins.
//!
//! # Lists
//!
//! An extent *belongs* in the list of its size while it has free frames, and in the arena's list while it lies there.
//! HIDDEN says that it may be missing there. What must hold, at any moment: an extent with something free stands in the
//! list it belongs to; or else it is HIDDEN, and the release that brought it there has not returned yet, or it was whole
//! and stands in the list it came from.
//!
//! - A release that leaves a HIDDEN word inserts it, then clears HIDDEN by compare-exchange on the very word it inserted
//!   for, until it meets a word that is not HIDDEN or has nothing free. So whoever comes second helps the first.
//! - Whoever finds an exhausted extent in its list sets HIDDEN, then removes it. Whoever finds a HIDDEN one in a list
//!   where it doesn't belong inserts it where it does, then removes it. Removal is `lists.rs`'s, which loses no insertion.
//!
//! - An extent that drains (a plan empties it) is as good as exhausted. Whoever stops that sets HIDDEN with it, and
//!   inserts it as a release does.
//!
//! A plan may have left an extent with one size before anything of it was in use. It is listed there and still serves any
//! size: whoever finds nothing else takes it ([`Extents::claim_whole`]).
//!
//! "Nothing" is answered only after the lists of the size and of the arena were read twice, all empty and unchanged: at
//! the moment between the two there was no free frame but those whose release was still under way. No counter is
//! needed for it that all lanes would share.
//!
//! Every loop here goes round again only because another thread's step succeeded, and no step of anyone is waited for.
//! A thread that stops for ever in a claim or a release takes with it the frames of that one call.

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod stopped;

use std::ops::Range;

use super::{
    FrameError,
    lists::{List, Seen},
    tiling::Tiling,
};
use crate::{
    sync::{Atom, AtomicU64, Words},
    word::{
        LANES, Lane, SizeId,
        extent::{ExtentWord, MAX_EXTENT_FRAMES},
    },
};

/// Words of a cache line.
const LINE: usize = if cfg!(any(kvalloc_loom, kvalloc_shuttle)) { 1 } else { 8 };
/// In a lane's hint: extent + 1, and whether it claims there without keeping the extent from others.
const EXTENT: u64 = (1 << 31) - 1;
const GUEST: u64 = 1 << 31;
/// How many candidates are compared before a lane settles in one.
const CHOICES: usize = 8;
/// With fewer extents than this per size, lanes don't keep extents to themselves.
const ROOMY: usize = 4 * LANES;

/// A search for frames of one size.
#[derive(Clone, Copy)]
struct Claim {
    size: SizeId,
    lane: Lane,
    want: u32,
}

#[derive(Debug)]
pub(super) struct Extents {
    blocks: Words,
    block: usize,
    count: usize,
    tilings: Box<[Tiling]>,
    lists: Box<[List]>,
    lanes: Words,
    lane_words: usize,
    faults: AtomicU64,
    /// Extents that drain: counted before one begins and after it has stopped, so never too few. Too many costs a look.
    drains: AtomicU64,
    /// Extents that went from one size to another since somebody looked and none was whole: too many costs a look as well.
    passed_on: AtomicU64,
}

impl Extents {
    pub(super) fn new(count: u32, tilings: Box<[Tiling]>) -> Self {
        let most = tilings.iter().map(|t| t.per_extent()).max().unwrap_or(1);
        assert!(most <= MAX_EXTENT_FRAMES, "an extent of {most} frames is beyond {MAX_EXTENT_FRAMES}");
        let block = (1 + most.div_ceil(64) as usize).next_multiple_of(LINE);
        let lane_words = tilings.len().next_multiple_of(LINE);
        let lists = (0..=tilings.len()).map(|list| List::new(count, list == tilings.len())).collect();
        Self {
            blocks: Words::zeroed(count as usize * block),
            block,
            count: count as usize,
            tilings,
            lists,
            lanes: Words::zeroed(LANES * lane_words),
            lane_words,
            faults: AtomicU64::new(0),
            drains: AtomicU64::new(0),
            passed_on: AtomicU64::new(0),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }
    pub(super) fn tiling(&self, size: SizeId) -> &Tiling {
        &self.tilings[size.as_usize()]
    }
    pub(super) fn faults(&self) -> u64 {
        self.faults.get()
    }

    #[inline]
    fn word(&self, extent: usize) -> &AtomicU64 {
        &self.blocks[extent * self.block]
    }
    #[inline]
    pub(super) fn read(&self, extent: usize) -> ExtentWord {
        ExtentWord(self.word(extent).get())
    }
    #[inline]
    fn bits(&self, extent: usize, at: usize) -> &AtomicU64 {
        &self.blocks[extent * self.block + 1 + at]
    }
    #[inline]
    fn lane(&self, lane: Lane, size: SizeId) -> &AtomicU64 {
        &self.lanes[lane.as_usize() % LANES * self.lane_words + size.as_usize()]
    }

    /// With one size there is no other use for an empty extent.
    #[inline]
    fn returns(&self) -> bool {
        self.tilings.len() > 1
    }
    fn arena_list(&self) -> usize {
        self.tilings.len()
    }
    fn home(&self, extent: ExtentWord) -> usize {
        extent.size().map_or(self.arena_list(), SizeId::as_usize)
    }

    // Claim.

    /// Up to `want` frames of a size, pushed as runs as they are found; how many. Fewer only if at one moment there were no more.
    #[inline]
    pub(super) fn claim(
        &self,
        size: SizeId,
        lane: Lane,
        want: usize,
        push: &mut impl FnMut(Range<u32>),
    ) -> usize {
        let want = want.min(u32::MAX as usize) as u32;
        let mut claim = Claim { size, lane: Lane::wrapped(u64::from(lane.0)), want };
        let hint = self.lane(claim.lane, size).peek();
        if let Some(extent) = (hint & EXTENT).checked_sub(1) {
            let guest = hint & GUEST != 0;
            claim.want -= self.claim_in(extent as usize, claim, guest, (hint >> 32) as usize, push);
        }
        while claim.want > 0 {
            match self.claim_elsewhere(claim, push) {
                0 => break,
                n => claim.want -= n,
            }
        }
        (want - claim.want) as usize
    }

    /// Claim from one extent that serves the size.
    #[inline]
    fn claim_in(
        &self,
        extent: usize,
        claim: Claim,
        guest: bool,
        from: usize,
        push: &mut impl FnMut(Range<u32>),
    ) -> u32 {
        let keep = (!guest).then_some(claim.lane);
        let mut n = 0;
        let claimed = self.word(extent).transit(|word| {
            let (next, right) = ExtentWord(word).claim(claim.size, claim.want, keep)?;
            n = right;
            Some(next.0)
        });
        if claimed.is_err() {
            return 0;
        }
        let stop = self.fill(extent, claim.size, n, from, push);
        if stop != from {
            self.note(claim, extent, guest, stop);
        }
        n
    }

    /// Take the `n` bits one has the right to; the word where the last one lay.
    #[inline]
    fn fill(
        &self,
        extent: usize,
        size: SizeId,
        n: u32,
        from: usize,
        push: &mut impl FnMut(Range<u32>),
    ) -> usize {
        let tiling = self.tiling(size);
        let (low, high) = tiling.range(extent);
        let words = (high.div_ceil(64) as usize).max(1);
        // Few words are searched from the first, so that low frames come back into use first.
        let mut at = if words <= LINE || from >= words { 0 } else { from };
        let mut left = n;
        loop {
            let start = at as u32 * 64;
            let mut valid = u64::MAX;
            if low > start {
                valid &= u64::MAX.checked_shl(low - start).unwrap_or(0);
            }
            if high - start < 64 {
                valid &= (1 << (high - start)) - 1;
            }
            let word = self.bits(extent, at);
            let mut used = word.get();
            while !used & valid != 0 {
                let (take, n) = lowest(!used & valid, left);
                match word.cas(used, used | take) {
                    Ok(_) => {
                        push_runs(take, extent as u32 * tiling.per_extent() + start, push);
                        left -= n;
                        break;
                    }
                    Err(found) => used = found,
                }
            }
            if left == 0 {
                return at;
            }
            // Rights are never more than clear bits, so if a round found too few, others have moved in it.
            at = if at + 1 < words { at + 1 } else { 0 };
        }
    }

    /// The lane's extent has nothing left: settle in another one. 0: there was a moment with nothing anywhere.
    #[cold]
    #[inline(never)]
    fn claim_elsewhere(&self, claim: Claim, push: &mut impl FnMut(Range<u32>)) -> u32 {
        let hint = self.lane(claim.lane, claim.size).peek();
        let from = match hint & EXTENT {
            0 => self.first_extent(claim.lane),
            id => id as usize - 1,
        };
        loop {
            if let Some(before) = self.empty_stamp(claim.size) {
                if self.empty_stamp(claim.size) == Some(before) {
                    return self.claim_whole(claim, push);
                }
                continue;
            }
            let shy = self.count >= ROOMY * self.tilings.len() || !self.returns();
            let mut n = self.claim_listed(claim, claim.size.as_usize(), from, shy, push);
            if n == 0 {
                n = self.claim_listed(claim, self.arena_list(), from, shy, push);
            }
            if n == 0 && shy {
                n = self.claim_listed(claim, claim.size.as_usize(), from, false, push);
            }
            if n > 0 {
                return n;
            }
        }
    }

    /// Lanes begin far from each other: the first two in different halves.
    fn first_extent(&self, lane: Lane) -> usize {
        const _: () = assert!(LANES == 16, "four bits are reversed");
        (lane.0.reverse_bits() >> 4) as usize * self.count / LANES
    }

    /// See `List::empty_stamp`, for the size's list and the arena's. Extent 0 may be all reserved.
    fn empty_stamp(&self, size: SizeId) -> Option<u64> {
        let but_first = self.count > 0 && self.tiling(size).frames_in(0) == 0;
        let own = self.lists[size.as_usize()].empty_stamp(false)?;
        Some(own.wrapping_add(self.lists[self.arena_list()].empty_stamp(but_first)?))
    }

    /// Claim from the best of the first few extents of a list; what has nothing is taken out on the way.
    fn claim_listed(
        &self,
        claim: Claim,
        list: usize,
        from: usize,
        shy: bool,
        push: &mut impl FnMut(Range<u32>),
    ) -> u32 {
        let choices = if self.returns() && list != self.arena_list() { CHOICES } else { 1 };
        let mut seen_free = 0;
        let mut best = None;
        self.lists[list].visit(from, |extent, seen| {
            let Some(free) = self.look(claim, list, extent, seen, shy) else { return false };
            seen_free += 1;
            if best.is_none_or(|(least, _)| free < least) {
                best = Some((free, extent));
            }
            seen_free == choices
        });
        let Some((_, extent)) = best else { return 0 };
        let guest = !shy;
        let n = self.claim_in(extent, claim, guest, 0, push);
        let n = if n > 0 { n } else { self.take(extent, claim, guest, push) };
        if n > 0 {
            self.note(claim, extent, guest, 0);
        }
        n
    }

    /// What a claim could find in an extent of this list. Where it doesn't belong there, it leaves.
    fn look(&self, claim: Claim, list: usize, extent: usize, seen: Seen, shy: bool) -> Option<u32> {
        let word = self.read(extent);
        if word.is_exhausted() {
            if list == self.home(word)
                && !word.is_hidden()
                && self.word(extent).cas(word.0, word.hide()?.0).is_err()
            {
                return None;
            }
            self.lists[list].remove(extent, seen);
            return None;
        }
        if list != self.home(word) {
            self.show(extent, word);
            self.lists[list].remove(extent, seen);
        }
        if word.serves(claim.size) && !(shy && word.is_kept_from(claim.lane)) {
            return Some(word.free());
        }
        let whole = self.tiling(claim.size).frames_in(extent);
        (word.in_arena() && list == self.arena_list() && whole > 0).then_some(whole)
    }

    /// Take an extent from the arena for the size, and the first frames of it.
    fn take(&self, extent: usize, claim: Claim, guest: bool, push: &mut impl FnMut(Range<u32>)) -> u32 {
        let total = self.tiling(claim.size).frames_in(extent);
        let mut after = (ExtentWord(0), 0);
        let taken = self.word(extent).transit(|word| {
            after = ExtentWord(word).take(claim.size, total, claim.want, (!guest).then_some(claim.lane))?;
            Some(after.0.0)
        });
        if taken.is_err() {
            return 0;
        }
        // It leaves the arena's list when somebody next looks there.
        self.show(extent, after.0);
        self.fill(extent, claim.size, after.1, 0, push);
        after.1
    }

    /// Take an extent that serves another size and has nothing in use.
    fn claim_whole(&self, claim: Claim, push: &mut impl FnMut(Range<u32>)) -> u32 {
        let passed_on = self.passed_on.get();
        let total = |size, extent| self.tiling(size).frames_in(extent);
        let mut whole = false;
        for extent in if passed_on > 0 { 0..self.count } else { 0..0 } {
            let mut after = (ExtentWord(0), 0);
            let converted = self.word(extent).transit(|word| {
                let word = ExtentWord(word);
                let all = total(word.size()?, extent);
                // Whoever finds it next may want another size, or it drains now and stops.
                whole |= word.free() == all;
                after = word.convert(all, claim.size, total(claim.size, extent), claim.want, None)?;
                Some(after.0.0)
            });
            if converted.is_ok() {
                // It leaves the other size's list when somebody next looks there.
                self.show(extent, after.0);
                self.fill(extent, claim.size, after.1, 0, push);
                return after.1;
            }
        }
        if passed_on > 0 && !whole {
            let _ = self.passed_on.cas(passed_on, 0);
        }
        0
    }

    /// As [`Self::claim`], and only in extents that serve the size already.
    pub(super) fn claim_serving(
        &self,
        size: SizeId,
        lane: Lane,
        want: usize,
        push: &mut impl FnMut(Range<u32>),
    ) -> usize {
        let want = want.min(u32::MAX as usize) as u32;
        let mut claim = Claim { size, lane: Lane::wrapped(u64::from(lane.0)), want };
        while claim.want > 0 {
            match self.claim_listed(claim, size.as_usize(), 0, false, push) {
                0 => break,
                n => claim.want -= n,
            }
        }
        (want - claim.want) as usize
    }

    // Drain.

    /// Nothing more is claimed in an extent of this size, until it is empty and goes on to `goal`, or until this is stopped.
    pub(super) fn drain(&self, extent: usize, size: SizeId, goal: Option<SizeId>) -> bool {
        let goal = goal.filter(|&goal| goal != size);
        self.drains.plus(1);
        let drained =
            self.word(extent).transit(|word| ExtentWord(word).drain(size, goal).map(|w| w.0)).is_ok();
        if !drained {
            self.drains.minus(1);
        }
        drained
    }

    /// Stop it.
    pub(super) fn undrain(&self, extent: usize) -> bool {
        let mut after = ExtentWord(0);
        let stopped = self.word(extent).transit(|word| {
            after = ExtentWord(word).undrain()?;
            Some(after.0)
        });
        if stopped.is_ok() {
            self.drains.minus(1);
            self.show(extent, after);
        }
        stopped.is_ok()
    }

    /// Stop whatever keeps free frames of a size from being claimed; how many extents did.
    pub(super) fn undrain_all(&self, size: SizeId) -> usize {
        if self.drains.get() == 0 {
            return 0;
        }
        let keeps = |&extent: &usize| {
            let word = self.read(extent);
            word.is_draining() && word.serves(size) && word.free() > 0
        };
        (0..self.count).filter(keeps).filter(|&extent| self.undrain(extent)).count()
    }

    /// Whether extents may be draining.
    #[inline]
    pub(super) fn may_drain(&self) -> bool {
        self.drains.peek() != 0
    }

    /// Where the lane claims next.
    #[inline]
    fn note(&self, claim: Claim, extent: usize, guest: bool, at: usize) {
        let guest = if guest { GUEST } else { 0 };
        self.lane(claim.lane, claim.size).put((at as u64) << 32 | guest | (extent as u64 + 1));
    }

    /// A HIDDEN extent with something free comes into its list.
    fn show(&self, extent: usize, mut word: ExtentWord) {
        while word.is_hidden() && !word.is_exhausted() {
            self.lists[self.home(word)].insert(extent);
            match self.word(extent).cas(word.0, word.show().0) {
                Ok(_) => return,
                Err(found) => word = ExtentWord(found),
            }
        }
    }

    // Release.

    /// The extent and the bit of a frame that may be released.
    #[inline]
    fn place(&self, size: SizeId, frame: u32) -> Result<(usize, u32), FrameError> {
        let Some(tiling) = self.tilings.get(size.as_usize()) else {
            return Err(FrameError::NoSuchFrame { size, frame });
        };
        if !tiling.has(frame) {
            return Err(FrameError::NoSuchFrame { size, frame });
        }
        let extent = tiling.extent_of(frame);
        Ok((extent as usize, frame - extent * tiling.per_extent()))
    }

    /// Clear bits of the word where `bit` is: those that were set. None if the extent serves another size; with one size
    /// bits are set only where it is served.
    #[inline]
    fn clear(&self, extent: usize, size: SizeId, bit: u32, mask: u64) -> u64 {
        if self.returns() && !self.read(extent).serves(size) {
            return 0;
        }
        self.bits(extent, bit as usize / 64).clear(mask) & mask
    }

    #[cold]
    #[inline(never)]
    fn fault(&self, times: u32, error: FrameError) -> FrameError {
        self.faults.tally(u64::from(times));
        error
    }

    #[inline]
    pub(super) fn release(&self, size: SizeId, frame: u32) -> Result<(), FrameError> {
        let (extent, bit) = self.place(size, frame).map_err(|e| self.fault(1, e))?;
        let mask = 1 << (bit % 64);
        if self.clear(extent, size, bit, mask) == 0 {
            return Err(self.fault(1, FrameError::NotAllocated { size, frame }));
        }
        self.give(extent, size, 1);
        Ok(())
    }

    /// Release many, one step per word and one per extent as far as they come in order. All that are right are
    /// released; the error is the first that was not.
    pub(super) fn release_many(
        &self,
        size: SizeId,
        frames: impl Iterator<Item = u32>,
    ) -> Result<(), FrameError> {
        let mut first_error = Ok(());
        let mut frames = frames.peekable();
        let mut fail = |times, error| {
            let error = self.fault(times, error);
            if first_error.is_ok() {
                first_error = Err(error);
            }
        };
        // The extent in hand, and how many of its bits were cleared so far.
        let mut hand = (0, 0);
        while let Some(frame) = frames.next() {
            let (extent, bit) = match self.place(size, frame) {
                Ok(place) => place,
                Err(error) => {
                    fail(1, error);
                    continue;
                }
            };
            if extent != hand.0 {
                self.give(hand.0, size, hand.1);
                hand = (extent, 0);
            }
            // The frames of this word: what follows in it is released with it.
            let base = frame - bit % 64;
            let last = self.tiling(size).last_beside(frame, bit);
            let mut mask = 1u64 << (bit % 64);
            while let Some(&next) = frames.peek() {
                if !(base..=last).contains(&next) || mask >> (next - base) & 1 == 1 {
                    break;
                }
                mask |= 1 << (next - base);
                frames.next();
            }
            // What was cleared and not given yet still holds the extent to its size.
            let was = self.clear(extent, size, bit, mask);
            hand.1 += was.count_ones();
            if was != mask {
                let missing = mask & !was;
                let frame = base + missing.trailing_zeros();
                fail(missing.count_ones(), FrameError::NotAllocated { size, frame });
            }
        }
        self.give(hand.0, size, hand.1);
        first_error
    }

    /// Count up by bits that were cleared.
    #[inline]
    fn give(&self, extent: usize, size: SizeId, n: u32) {
        if n == 0 {
            return;
        }
        let after = if self.returns() {
            let total = self.tiling(size).frames_in(extent);
            let (mut before, mut after) = (ExtentWord(0), ExtentWord(0));
            let given = self.word(extent).transit(|word| {
                before = ExtentWord(word);
                let goal_total = before.goal().map_or(0, |goal| self.tiling(goal).frames_in(extent));
                after = before.release(size, n, total, true, goal_total)?;
                Some(after.0)
            });
            if before.is_draining() && !after.is_draining() {
                if !after.in_arena() {
                    self.passed_on.plus(1);
                }
                self.drains.minus(1);
            }
            debug_assert!(given.is_ok(), "a set bit holds its extent to its size");
            after
        } else {
            let step = ExtentWord::release_step(n);
            ExtentWord(self.word(extent).plus(step).wrapping_add(step))
        };
        if after.is_hidden() {
            self.show(extent, after);
        }
    }

    // Look.

    pub(super) fn is_allocated(&self, size: SizeId, frame: u32) -> bool {
        self.place(size, frame).is_ok_and(|(extent, bit)| {
            self.read(extent).serves(size)
                && self.bits(extent, bit as usize / 64).get() >> (bit % 64) & 1 == 1
        })
    }

    /// Bits that are set in an extent.
    pub(super) fn used_bits(&self, extent: usize) -> u32 {
        (0..self.block - 1).map(|at| self.bits(extent, at).get().count_ones()).sum()
    }
}

/// The lowest `n` set bits, and how many these are. `bits` is not 0, nor is `n`.
#[inline]
fn lowest(bits: u64, n: u32) -> (u64, u32) {
    // Most often they are adjacent.
    let low = bits.trailing_zeros();
    if n <= 64 - low {
        let run = u64::MAX >> (64 - n) << low;
        if bits & run == run {
            return (run, n);
        }
    }
    let (mut rest, mut count) = (bits, 0);
    while rest != 0 && count < n {
        rest &= rest - 1;
        count += 1;
    }
    (bits & !rest, count)
}

/// Push the frames of set bits, counted from `base`, run by run.
#[inline]
fn push_runs(mut bits: u64, base: u32, push: &mut impl FnMut(Range<u32>)) {
    while bits != 0 {
        let low = bits.trailing_zeros();
        let end = low + (!(bits >> low)).trailing_zeros();
        push(base + low..base + end);
        bits &= u64::MAX.checked_shl(end).unwrap_or(0);
    }
}

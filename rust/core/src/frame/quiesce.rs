//! Frames that a page moved away from, until no batch shows them any more.
//!
//! A batch writes frame numbers into arrays that kernels read later. When a page moves, its old frame may stand in such
//! an array, so it goes to limbo and becomes free when every registered batch has looked at all its places anew since, and
//! taken a step with them. What a page that moves holds does not change any more, so until then its old frame is as good
//! as the new one, and a batch need not look at everything in one step.
//!
//! # Words
//!
//! `epoch`: how many frames were ever retired (and how often batches were to look all the same). A frame's stamp is the epoch
//! its retirement made. Per batch three words in a cache line of their own:
//!
//! | word | content | written by |
//! | --- | --- | --- |
//! | `shown` | 0 free, else `epoch << 2`, everything in its arrays was read when at least so many frames had been retired; and SHOWS, or QUIET: nothing is outstanding, nobody reads the arrays before the next step | the batch |
//! | `taken` | up to this stamp frames may have been given away that only this batch showed, while it was quiet | drains, upward |
//! | `gate` | where a step and a drain meet; only ever added to | both |
//!
//! # Protocol
//!
//! - A move stores the new location, then retires the old frame: its stamp is drawn after the location was stored.
//! - A step of a quiet batch stores that it shows, adds 1 to the gate, then reads `taken`. If that is beyond what its arrays
//!   say, it looks at every place before they are used. Else it looks at some, and stores the epoch at which it began once it
//!   has looked at all.
//! - A drain adds 0 to the gate of each batch, then reads what is shown. A frame is ripe when each batch is free, or at the
//!   frame's stamp or beyond. A drain in need raises `taken` of each batch before that, and counts quiet ones as free.
//!
//! Why a drain in need that reads "quiet" may go on though the batch begins a step at that moment: of the two additions to
//! the gate one comes first. If it is the step's, the drain reads that the batch shows. If it is the drain's, the step reads
//! `taken`, and takes over what the drain knew, the new locations included. A batch that registers adds to the gate as well,
//! before it reads its first location.
//!
//! The batch's side is an addition and three stores per step. Limbo is a queue under a lock: plans wait for it. A drain, which
//! is called on the way of allocations, and a step that takes a page along pass by if somebody has it.
//!
//! Callers: batch.rs (register, enter, step, quiesce, leave, try_limbo), plans (retire, drain), pool.rs (drain).

use std::{array, collections::VecDeque};

use super::{Arena, FrameError};
use crate::{
    sync::{Atom, AtomicU64, Mutex, MutexGuard, Words, lock, try_lock},
    word::{FrameId, SizeId, TIERS, Tier},
};

const LINE: usize = if cfg!(any(kvalloc_loom, kvalloc_shuttle)) { 3 } else { 8 };
const FREE: u64 = 0;
const SHOWS: u64 = 1;
const QUIET: u64 = 2;
const KIND: u64 = 3;

/// Registered batches of a pool.
#[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
const BATCHES: usize = 1024;
#[cfg(any(kvalloc_loom, kvalloc_shuttle))]
const BATCHES: usize = 2;

/// A registered batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchSlot(u32);

/// What a step finds at its beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entered {
    /// What is read from now on was so when at least so many frames had been retired.
    pub epoch: u64,
    /// Frames that the arrays may show were given away: every place has to be looked at in this step.
    pub stale: bool,
}

/// A frame in limbo.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retired {
    /// Its tier.
    pub tier: Tier,
    /// Its size.
    pub size: SizeId,
    /// Its number.
    pub frame: FrameId,
    stamp: u64,
}

/// Limbo, in one thread's hand.
#[derive(Debug)]
pub struct Limbo<'a> {
    of: &'a Quiescence,
    queue: MutexGuard<'a, VecDeque<Retired>>,
}

impl Limbo<'_> {
    /// A page has moved away from a frame: the frame waits here. To be called after the new location was stored.
    pub fn retire(&mut self, tier: Tier, size: SizeId, frame: FrameId) {
        // Drawn under the lock: stamps rise along the queue.
        let stamp = self.of.epoch.plus(1) + 1;
        self.queue.push_back(Retired { tier, size, frame, stamp });
        self.of.counts[tier.as_usize()][size.as_usize()].plus(1);
        self.of.waiting.plus(1);
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct Quiescence {
    epoch: AtomicU64,
    batches: Words,
    /// No batch was ever registered at this number or above.
    high: AtomicU64,
    limbo: Mutex<VecDeque<Retired>>,
    /// How many frames are in limbo.
    waiting: AtomicU64,
    /// Of each tier and size.
    counts: [Box<[AtomicU64]>; TIERS],
}

impl Quiescence {
    /// For these arenas: no batches, nothing in limbo.
    pub fn new(arenas: &[Arena; TIERS]) -> Self {
        Self {
            epoch: AtomicU64::new(0),
            batches: Words::zeroed(BATCHES * LINE),
            high: AtomicU64::new(0),
            limbo: Mutex::new(VecDeque::new()),
            waiting: AtomicU64::new(0),
            counts: array::from_fn(|tier| arenas[tier].sizes().iter().map(|_| AtomicU64::new(0)).collect()),
        }
    }

    #[inline]
    fn shown(&self, slot: usize) -> &AtomicU64 {
        &self.batches[slot * LINE]
    }
    #[inline]
    fn gate(&self, slot: usize) -> &AtomicU64 {
        &self.batches[slot * LINE + 1]
    }
    #[inline]
    fn taken(&self, slot: usize) -> &AtomicU64 {
        &self.batches[slot * LINE + 2]
    }

    /// A place for a new batch, which is quiet, and the epoch from which on it looks at places.
    pub fn register(&self) -> Result<(BatchSlot, u64), FrameError> {
        for slot in 0..BATCHES {
            // Before the word, so that a drain that doesn't look here has read `high` before the first look.
            let high = slot as u64 + 1;
            if self.shown(slot).peek() != FREE {
                continue;
            }
            let _ = self.high.transit(|now| (now < high).then_some(high));
            let epoch = self.epoch.get();
            if self.shown(slot).cas(FREE, epoch << 2 | QUIET).is_ok() {
                self.gate(slot).plus(1);
                return Ok((BatchSlot(slot as u32), epoch));
            }
        }
        Err(FrameError::TooManyBatches { max: BATCHES })
    }

    /// The batch is gone and shows nothing.
    pub fn leave(&self, slot: BatchSlot) {
        self.shown(slot.0 as usize).put(FREE);
    }

    /// A step begins: to be called before it reads any location.
    #[inline]
    pub fn enter(&self, slot: BatchSlot) -> Entered {
        let slot = slot.0 as usize;
        let word = self.shown(slot);
        let now = word.peek();
        let mut stale = false;
        if now & KIND == QUIET {
            word.put(now & !KIND | SHOWS);
            self.gate(slot).plus(1);
            stale = self.taken(slot).get() > now >> 2;
        }
        // After that: it is no less than what was taken.
        Entered { epoch: self.epoch.get(), stale }
    }

    /// The step has written its arrays: everything in them was read when at least `epoch` frames had been retired.
    #[inline]
    pub fn step(&self, slot: BatchSlot, epoch: u64) {
        self.shown(slot.0 as usize).put(epoch << 2 | SHOWS);
    }

    /// A commit with nothing outstanding: what the arrays show is read again by nobody before the next step.
    #[inline]
    pub fn quiesce(&self, slot: BatchSlot, epoch: u64) {
        self.shown(slot.0 as usize).put(epoch << 2 | QUIET);
    }

    /// As [`Limbo::retire`], by somebody who may wait.
    pub fn retire(&self, tier: Tier, size: SizeId, frame: FrameId) {
        Limbo { of: self, queue: lock(&self.limbo) }.retire(tier, size, frame);
    }

    /// Limbo, for somebody who must not wait. `None`: another thread is at it.
    pub fn try_limbo(&self) -> Option<Limbo<'_>> {
        try_lock(&self.limbo).map(|queue| Limbo { of: self, queue })
    }

    /// How many frames were ever retired.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Have every batch look at its places anew, as after a move.
    pub fn nudge(&self) {
        self.epoch.plus(1);
    }

    /// Release what nobody shows any more: how many frames. Never waits.
    pub fn drain(&self, arenas: &[Arena; TIERS]) -> usize {
        self.drain_up_to(arenas, |slot| {
            self.gate(slot).plus(0);
            match self.shown(slot).get() {
                FREE => u64::MAX,
                word => word >> 2,
            }
        })
    }

    /// As [`Self::drain`], and what stands only in arrays that nobody reads before the next step: that one then costs its
    /// batch a look at every place.
    pub fn drain_quiet(&self, arenas: &[Arena; TIERS]) -> usize {
        let epoch = self.epoch.get();
        self.drain_up_to(arenas, |slot| {
            let _ = self.taken(slot).transit(|taken| (taken < epoch).then_some(epoch));
            self.gate(slot).plus(0);
            match self.shown(slot).get() {
                FREE => u64::MAX,
                word if word & KIND == QUIET => (word >> 2).max(epoch),
                word => word >> 2,
            }
        })
    }

    /// `shown`: up to which stamp frames are not shown by a batch.
    fn drain_up_to(&self, arenas: &[Arena; TIERS], shown: impl FnMut(usize) -> u64) -> usize {
        if self.waiting.get() == 0 {
            return 0;
        }
        let Some(mut limbo) = try_lock(&self.limbo) else { return 0 };
        let high = self.high.plus(0) as usize;
        let ripe = (0..high).map(shown).min().unwrap_or(u64::MAX);
        let mut n = 0;
        while let Some(&Retired { tier, size, frame, stamp }) = limbo.front() {
            if stamp > ripe {
                break;
            }
            limbo.pop_front();
            n += 1;
            // A frame that wasn't allocated is counted by the arena; here it is out of limbo either way.
            let _ = arenas[tier.as_usize()].release(size, frame);
            self.counts[tier.as_usize()][size.as_usize()].minus(1);
        }
        self.waiting.minus(n as u64);
        n
    }

    /// Frames of a tier and size in limbo: allocated, belonging to no page.
    pub fn frames(&self, tier: Tier, size: SizeId) -> u64 {
        self.counts[tier.as_usize()][size.as_usize()].get()
    }

    /// Which frames are in limbo, for the audit. Waits for a plan or a drain that is at it.
    pub fn limbo(&self) -> Vec<Retired> {
        lock(&self.limbo).iter().copied().collect()
    }

    /// Frames in limbo.
    pub fn len(&self) -> u64 {
        self.waiting.get()
    }

    /// Whether nothing is in limbo.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

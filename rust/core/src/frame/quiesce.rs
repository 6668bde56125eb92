//! Frames that a page moved away from, until no batch shows them any more.
//!
//! A batch writes frame numbers into arrays that kernels read later. When a page moves, its old frame may stand in such
//! an array, so it goes to limbo and becomes free when every registered batch has looked at all its places anew since, and
//! taken a step with them. What a page that moves holds does not change any more, so until then its old frame is as good
//! as the new one, and a batch need not look at everything in one step.
//!
//! # Words
//!
//! `epoch`: how many frames were ever retired (and how often batches were to look all the same). A frame's stamp is the epoch its retirement made.
//! Per batch one word in a cache line of its own: 0 free, else an epoch in bits 2-63 (everything in its arrays was read when
//! at least so many frames had been retired) and in bits 0-1
//!
//! | bits | the batch | changed by |
//! | --- | --- | --- |
//! | `SHOWS` | has something outstanding, or is in a step | the batch alone |
//! | `QUIET` | has nothing outstanding: its next step writes all its arrays, and may leave places as they are | the batch; a drain makes it STALE |
//! | `STALE` | the same, and frames that its arrays may show were given away: the next step looks at every place | the batch |
//!
//! # Protocol
//!
//! - A move stores the new location, then retires the old frame: its stamp is drawn after the location was stored.
//! - A step reads the epoch, then makes a quiet batch show again by compare-exchange. If that finds it STALE, it stores the
//!   epoch it has read, and looks at every place before its arrays are used. At its end it stores the epoch at which it
//!   began to look at the places, once it has looked at all of them.
//! - A drain reads the word of each batch, by a step that writes. A frame is ripe when each batch is free, or at the frame's
//!   stamp or beyond. A drain in need makes quiet batches STALE, and takes what only they kept.
//!
//! Why a drain that meets a quiet batch may go on though the batch begins a step at that moment: both write the word, so one
//! comes first. If it is the batch, the drain finds that it shows. If it is the drain, the batch finds STALE, takes
//! over what the drain knew, the new location included, and reads that.
//!
//! The batch's side is a compare-exchange and two stores per step. Limbo is a queue under a lock: plans take it, and a drain,
//! which is called on the way of allocations, passes by if somebody has it.
//!
//! Callers: batch.rs (register, enter, step, quiesce, leave), plans (retire, drain), pool.rs (drain).

use std::{array, collections::VecDeque};

use super::{Arena, FrameError};
use crate::{
    sync::{Atom, AtomicU64, Mutex, Words, lock},
    word::{FrameId, SizeId, TIERS, Tier},
};

const LINE: usize = if cfg!(any(kvalloc_loom, kvalloc_shuttle)) { 1 } else { 8 };
const FREE: u64 = 0;
const SHOWS: u64 = 1;
const QUIET: u64 = 2;
const STALE: u64 = 3;
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
        let epoch = self.epoch.get();
        let word = self.shown(slot.0 as usize);
        let now = word.peek();
        let stale = match now & KIND {
            SHOWS => false,
            QUIET if word.cas(now, now & !KIND | SHOWS).is_ok() => false,
            _ => {
                // A drain changes the word of a stale batch no more, but for writing it again.
                word.exchange(epoch << 2 | SHOWS);
                true
            }
        };
        Entered { epoch, stale }
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

    /// A page has moved away from a frame: the frame waits here. To be called after the new location was stored.
    pub fn retire(&self, tier: Tier, size: SizeId, frame: FrameId) {
        let mut limbo = lock(&self.limbo);
        // Drawn under the lock: stamps rise along the queue.
        let stamp = self.epoch.plus(1) + 1;
        limbo.push_back(Retired { tier, size, frame, stamp });
        self.counts[tier.as_usize()][size.as_usize()].plus(1);
        self.waiting.plus(1);
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
        self.drain_up_to(arenas, || self.ripe(|now| now))
    }

    /// As [`Self::drain`], and what stands only in arrays that nobody reads before the next step: that one then costs its
    /// batch a look at every place.
    pub fn drain_quiet(&self, arenas: &[Arena; TIERS]) -> usize {
        let stale = |now: u64| if now & KIND == QUIET { now | STALE } else { now };
        self.drain_up_to(arenas, || self.ripe(stale))
    }

    fn drain_up_to(&self, arenas: &[Arena; TIERS], ripe: impl FnOnce() -> u64) -> usize {
        if self.waiting.get() == 0 {
            return 0;
        }
        let Ok(mut limbo) = self.limbo.try_lock() else { return 0 };
        let ripe = ripe();
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

    /// The stamp up to which frames are shown by nobody, once `mark` has been written to each batch's word.
    fn ripe(&self, mark: impl Fn(u64) -> u64) -> u64 {
        let high = self.high.plus(0) as usize;
        (0..high)
            .map(|slot| {
                // Never refused: the closure always answers. Written even where it stays the same, see the head.
                let (Ok(before) | Err(before)) = self.shown(slot).transit(|now| Some(mark(now)));
                match mark(before) {
                    word if word == FREE || word & KIND == STALE => u64::MAX,
                    word => word >> 2,
                }
            })
            .min()
            .unwrap_or(u64::MAX)
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

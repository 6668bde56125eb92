//! Frames that a page moved away from, until no batch shows them any more.
//!
//! A batch writes frame numbers into arrays that kernels read later. When a page moves, its old frame may stand in such
//! an array, so it goes to limbo and becomes free when every registered batch has taken a whole step since, or has
//! nothing outstanding: then the batch's next step writes the new place.
//!
//! # Words
//!
//! `epoch`: how many frames were ever retired. A frame's stamp is the epoch its retirement made.
//! Per batch two words in a cache line of their own. `shown`: 0 free, 1 registered and quiescent, else `epoch << 2 | 2`: it
//! has something outstanding, and everything it shows was read when at least `epoch` frames had been retired; written by
//! the batch alone. `gate`: where a step and a drain meet; only ever added to.
//!
//! # Protocol
//!
//! - A move stores the new location, then retires the old frame: its stamp is drawn after the location was stored.
//! - A step reads the epoch; coming out of quiescence it stores it as shown, then adds 1 to the gate. Then it reads locations.
//!   At its end it stores the epoch it read first. A commit with nothing outstanding stores "quiescent".
//! - A drain adds 0 to the gate of each batch, then reads what is shown. A frame is ripe when each batch is free, quiescent,
//!   or at the frame's stamp or beyond.
//!
//! Why a drain that reads "quiescent" may go on though the batch begins a step at that moment: of the two additions to the
//! gate one comes first. If it is the step's, the drain reads what the step has stored before. If it is the drain's,
//! the step takes over with its own what the drain knew, the new location included, and reads that.
//!
//! The batch's side is an addition and three stores per step. Limbo is a queue under a lock: plans take it, and a drain, which is called on
//! the way of allocations, passes by if somebody has it.
//!
//! Callers: batch.rs (register, enter, step, quiesce, leave), plans (retire), pool.rs (drain).

use std::{array, collections::VecDeque};

use super::{Arena, FrameError};
use crate::{
    sync::{Atom, AtomicU64, Mutex, Words, lock},
    word::{FrameId, SizeId, TIERS, Tier},
};

const LINE: usize = if cfg!(any(kvalloc_loom, kvalloc_shuttle)) { 2 } else { 8 };
const FREE: u64 = 0;
const QUIET: u64 = 1;
const SHOWS: u64 = 2;

/// Registered batches of a pool.
#[cfg(not(any(kvalloc_loom, kvalloc_shuttle)))]
const BATCHES: usize = 1024;
#[cfg(any(kvalloc_loom, kvalloc_shuttle))]
const BATCHES: usize = 2;

/// A registered batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchSlot(u32);

/// A step under way: what it reads from now on is no older than this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the step ends with `step`"]
pub struct Entered(u64);

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
    #[inline]
    fn gate(&self, slot: usize) -> &AtomicU64 {
        &self.batches[slot * LINE + 1]
    }

    /// A place for a new batch, quiescent.
    pub fn register(&self) -> Result<BatchSlot, FrameError> {
        for slot in 0..BATCHES {
            // Before the word, so that a drain that doesn't look here has read `high` before the first step.
            let high = slot as u64 + 1;
            if self.shown(slot).peek() != FREE {
                continue;
            }
            let _ = self.high.transit(|now| (now < high).then_some(high));
            if self.shown(slot).cas(FREE, QUIET).is_ok() {
                return Ok(BatchSlot(slot as u32));
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
        let epoch = self.epoch.get();
        if self.shown(slot).peek() == QUIET {
            self.shown(slot).put(epoch << 2 | SHOWS);
            self.gate(slot).plus(1);
        }
        Entered(epoch)
    }

    /// The step has written its arrays: nothing older than its beginning is shown from now on.
    #[inline]
    pub fn step(&self, slot: BatchSlot, Entered(epoch): Entered) {
        self.shown(slot.0 as usize).put(epoch << 2 | SHOWS);
    }

    /// A commit with nothing outstanding: the batch shows nothing until it enters again.
    #[inline]
    pub fn quiesce(&self, slot: BatchSlot) {
        self.shown(slot.0 as usize).put(QUIET);
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

    /// Release what nobody shows any more: how many frames. Never waits.
    pub fn drain(&self, arenas: &[Arena; TIERS]) -> usize {
        if self.waiting.get() == 0 {
            return 0;
        }
        let Ok(mut limbo) = self.limbo.try_lock() else { return 0 };
        let ripe = self.ripe();
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

    /// The stamp up to which frames are shown by nobody.
    fn ripe(&self) -> u64 {
        let high = self.high.plus(0) as usize;
        (0..high)
            .map(|slot| {
                self.gate(slot).plus(0);
                match self.shown(slot).get() {
                    FREE | QUIET => u64::MAX,
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

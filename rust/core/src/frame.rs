//! WHERE there is room: one arena of frames per tier, the free page ids, and the frames that readers may still see.
//!
//! An [`Arena`] cuts the bytes of a tier into extents. An extent serves one frame size at a time, its frames tile it, and
//! the frame number counts over the whole arena: `address = base + frame * page bytes`. With its last free frame it goes
//! back to the arena and may serve any size next; with a single size it stays. [`Slots`] gives out page ids by the same
//! machinery (`extents`, whose head has the words and the protocol). [`Quiescence`] keeps the frames that pages moved
//! away from until no batch shows them any more.
//!
//! # Invariant
//!
//! At any moment, also in the middle of any call:
//!
//! - no two frames that are given out share a byte, whatever their sizes, and none touches the reserved bytes;
//! - free bytes + allocated bytes = capacity = usable bytes - reserved bytes. What extent 0 loses between the end of the
//!   reserved bytes and its first whole frame (several sizes only; less than a frame) counts as free, and
//!   [`Arena::unusable_bytes`] tells it;
//! - a claim gets less than it wants only if at one moment there was neither a free frame of its size nor a free extent;
//! - a frame is released once: another release is an error and a tally, and changes nothing.
//!
//! Who may call: pool.rs (claim, release, drain), reclaim's plans (retire), audit.rs and stats.rs (the looks).

mod extents;
mod lists;
#[cfg(all(test, any(kvalloc_loom, kvalloc_shuttle)))]
mod models;
mod quiesce;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;
mod tiling;

use std::fmt;

pub use quiesce::{BatchSlot, Entered, Limbo, Quiescence, Retired};

use self::{extents::Extents, tiling::Tiling};
use crate::{
    spec::ArenaLayout,
    word::{ExtentId, FrameId, Lane, PageId, SizeId, extent::ExtentWord},
};

/// Why a frame, an id or a batch was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameError {
    /// It is free already, or its extent serves another size: a second release, or one of something never claimed.
    NotAllocated {
        /// The frame size.
        size: SizeId,
        /// The frame.
        frame: u32,
    },
    /// The arena has no such frame, or it is reserved.
    NoSuchFrame {
        /// The frame size.
        size: SizeId,
        /// The frame.
        frame: u32,
    },
    /// There are as many batches as there may be.
    TooManyBatches {
        /// How many that is.
        max: usize,
    },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAllocated { size, frame } => {
                write!(f, "released frame {frame} of size {size}, which is not allocated (released twice?)")
            }
            Self::NoSuchFrame { size, frame } => write!(f, "there is no frame {frame} of size {size}"),
            Self::TooManyBatches { max } => {
                write!(f, "{max} batches are open, which is the most there can be: close one first")
            }
        }
    }
}

impl std::error::Error for FrameError {}

/// What an extent is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentState {
    /// The frame size it serves; `None` in the arena.
    pub size: Option<SizeId>,
    /// Free frames of that size in it; 0 in the arena.
    pub free: u32,
    /// All frames of that size in it; 0 in the arena.
    pub total: u32,
    /// Frames whose bit says they are in use: `total - free` when nobody is in the middle of a call.
    pub used: u32,
    /// A plan empties it: what is free in it can't be claimed.
    pub draining: bool,
}

/// What the word of an extent says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Glance {
    /// The frame size it serves; `None` in the arena.
    pub size: Option<SizeId>,
    /// Free frames of that size in it; 0 in the arena.
    pub free: u32,
    /// All frames of that size in it; 0 in the arena.
    pub total: u32,
    /// A plan empties it: what is free in it can't be claimed.
    pub draining: bool,
    /// The size that it serves then; `None`: none in particular.
    pub goal: Option<SizeId>,
}

/// The frames of one tier.
#[derive(Debug)]
pub struct Arena {
    extents: Extents,
    sizes: Box<[u64]>,
    capacity: u64,
    reserved: u64,
}

impl Arena {
    /// An arena of free frames. Costs the same for any number of them.
    pub fn new(layout: &ArenaLayout) -> Self {
        // Whatever the layout says, an extent has room for at least one frame of each size.
        let (extent, granule) = match layout.sizes[..] {
            [size] => (layout.extent_bytes.max(1), size.max(1)),
            _ => (layout.extent_bytes.max(1), layout.extent_bytes.max(1)),
        };
        let bytes = layout.bytes / granule * granule;
        // Nor is there one whose frames have no number.
        let numbered = layout.sizes.iter().map(|size| u64::from(u32::MAX) / (extent / size).max(1)).min();
        let count = bytes.div_ceil(extent).min(u64::from(layout.extents)).min(numbered.unwrap_or(0));
        let bytes = bytes.min(count * extent);
        debug_assert_eq!((bytes, count), (layout.bytes, u64::from(layout.extents)), "a layout of the spec");
        debug_assert!(
            layout.sizes.iter().all(|size| *size > 0 && extent % size == 0),
            "frames tile an extent"
        );
        debug_assert!(layout.reserved <= extent, "the reserved bytes lie in extent 0");
        let tilings = layout.sizes.iter().map(|&size| Tiling::new(size, extent, layout.reserved, bytes));
        Self {
            extents: Extents::new(count as u32, tilings.collect()),
            sizes: layout.sizes.clone().into(),
            capacity: bytes.saturating_sub(layout.reserved),
            reserved: layout.reserved.min(bytes),
        }
    }

    /// Append up to `want` free frames of a size: how many. Adjacent ones where there are, the same ones every time in
    /// one thread. Fewer only if there were no more.
    #[inline]
    pub fn claim(&self, size: SizeId, lane: Lane, want: usize, out: &mut Vec<FrameId>) -> usize {
        self.extents.claim(size, lane, want, &mut |run| out.extend(run.map(FrameId)))
    }

    /// As [`Self::claim`], and only in extents that serve the size already: room for pages that move out of others.
    pub fn claim_serving(&self, size: SizeId, lane: Lane, want: usize, out: &mut Vec<FrameId>) -> usize {
        self.extents.claim_serving(size, lane, want, &mut |run| out.extend(run.map(FrameId)))
    }

    /// Give nothing more out of an extent that serves `size`; once it is empty it serves `goal`, or goes to the arena. `false`:
    /// it does not serve the size, drains already, or there is one size only.
    pub fn drain(&self, extent: ExtentId, size: SizeId, goal: Option<SizeId>) -> bool {
        self.sizes.len() > 1 && self.extents.drain(extent.as_usize(), size, goal)
    }

    /// Give out again what is free in a draining extent. `false`: it drains no more.
    pub fn undrain(&self, extent: ExtentId) -> bool {
        self.extents.undrain(extent.as_usize())
    }

    /// Stop whatever keeps free frames of a size from being claimed: how many extents did. Reads every extent if any drains.
    pub fn undrain_all(&self, size: SizeId) -> usize {
        self.extents.undrain_all(size)
    }

    /// Whether a frame of this size lies in an extent that drains.
    #[inline]
    pub fn is_draining(&self, size: SizeId, frame: FrameId) -> bool {
        self.extents.may_drain() && {
            let word = self.extents.read(self.extents.tiling(size).extent_of(frame.0) as usize);
            word.is_draining() && word.serves(size)
        }
    }

    /// Give a frame back.
    #[inline]
    pub fn release(&self, size: SizeId, frame: FrameId) -> Result<(), FrameError> {
        self.extents.release(size, frame.0)
    }

    /// Give many back, best in rising order. All that are allocated are released; the error is the first that wasn't.
    pub fn release_many(&self, size: SizeId, frames: &[FrameId]) -> Result<(), FrameError> {
        self.extents.release_many(size, frames.iter().map(|frame| frame.0))
    }

    /// Frames of a size that could be claimed now. Reads every extent; exact while nobody claims or releases.
    pub fn available(&self, size: SizeId) -> u64 {
        let tiling = self.extents.tiling(size);
        let sum: u64 = (0..self.extents.count())
            .map(|extent| match self.extents.read(extent) {
                word if word.in_arena() => u64::from(tiling.frames_in(extent)),
                word if word.is_draining() => 0,
                word if word.serves(size) => u64::from(word.free()),
                word if self.is_whole(extent, word) => u64::from(tiling.frames_in(extent)),
                _ => 0,
            })
            .sum();
        sum.min(u64::from(tiling.frames()))
    }

    /// Whether so many frames of each size could be claimed now, all together. Reads every extent; exact while nobody claims or
    /// releases.
    pub fn fits(&self, wanted: &[u64]) -> bool {
        let mut left = wanted.to_vec();
        let mut whole = Vec::new();
        for extent in 0..self.extents.count() {
            let word = self.extents.read(extent);
            if word.in_arena() || !word.is_draining() && self.is_whole(extent, word) {
                whole.push(extent);
            } else if let Some(left) = word.size().and_then(|size| left.get_mut(size.as_usize()))
                && !word.is_draining()
            {
                *left = left.saturating_sub(word.free().into());
            }
        }
        // Each of these serves one size, whichever.
        for extent in whole {
            let frames = |size: usize| u64::from(self.extents.tiling(SizeId(size as u8)).frames_in(extent));
            let needy = left.iter_mut().enumerate().find(|(size, left)| **left > 0 && frames(*size) > 0);
            if let Some((size, left)) = needy {
                *left = left.saturating_sub(frames(size));
            }
        }
        left.iter().all(|&left| left == 0)
    }

    /// Whether nothing of it is in use, though it serves a size.
    fn is_whole(&self, extent: usize, word: ExtentWord) -> bool {
        word.size().is_some_and(|size| word.free() == self.extents.tiling(size).frames_in(extent))
    }

    /// Bytes of the frames of a size that are given out. Reads every extent; exact while nobody claims or releases.
    pub fn allocated_bytes(&self, size: SizeId) -> u64 {
        let tiling = self.extents.tiling(size);
        let frames: u64 = (0..self.extents.count())
            .map(|extent| {
                let word = self.extents.read(extent);
                if word.serves(size) { u64::from(tiling.frames_in(extent) - word.free()) } else { 0 }
            })
            .sum();
        frames * self.sizes[size.as_usize()]
    }

    /// Capacity less what is given out. Reads every extent.
    pub fn free_bytes(&self) -> u64 {
        let allocated = (0..self.sizes.len()).map(|size| self.allocated_bytes(SizeId(size as u8))).sum();
        self.capacity.saturating_sub(allocated)
    }

    /// All bytes that can ever be given out at once, in the best case.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity
    }

    /// What is free but can't be given out while extent 0 serves the size it serves: less than one frame.
    pub fn unusable_bytes(&self) -> u64 {
        if self.extents.count() == 0 {
            return 0;
        }
        self.extents.read(0).size().map_or(0, |size| {
            let bytes = self.sizes[size.as_usize()];
            self.reserved.next_multiple_of(bytes) - self.reserved
        })
    }

    /// How many frames of a size the whole arena has for it.
    pub fn frames(&self, size: SizeId) -> u32 {
        self.extents.tiling(size).frames()
    }

    /// The frame sizes.
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// How many extents there are.
    pub fn len(&self) -> u32 {
        self.extents.count() as u32
    }

    /// Whether the arena has no bytes.
    pub fn is_empty(&self) -> bool {
        self.extents.count() == 0
    }

    /// What an extent is used for.
    pub fn extent_state(&self, extent: ExtentId) -> ExtentState {
        state(&self.extents, extent.as_usize())
    }

    /// What the word of an extent says.
    pub fn glance(&self, extent: ExtentId) -> Glance {
        glance(&self.extents, extent.as_usize())
    }

    /// Frames of a size in an extent that serves it.
    pub fn frames_in(&self, extent: ExtentId, size: SizeId) -> u32 {
        self.extents.tiling(size).frames_in(extent.as_usize())
    }

    /// The extent a frame lies in.
    pub fn extent_of(&self, size: SizeId, frame: FrameId) -> ExtentId {
        ExtentId(self.extents.tiling(size).extent_of(frame.0))
    }

    /// Whether a frame is given out.
    pub fn is_allocated(&self, size: SizeId, frame: FrameId) -> bool {
        self.extents.is_allocated(size, frame.0)
    }

    /// How many wrong releases there were.
    pub fn faults(&self) -> u64 {
        self.extents.faults()
    }
}

/// The free page ids of a pool.
#[derive(Debug)]
pub struct Slots {
    extents: Extents,
}

impl Slots {
    const SIZE: SizeId = SizeId(0);

    /// Ids from 0 to below `capacity`, all free. Costs the same for any number of them.
    pub fn new(capacity: u32) -> Self {
        // Seven words of bits: with its own word, an extent is a cache line. Fewer, so that every lane has extents of
        // its own, where there are few ids.
        let extent = (capacity / 32).next_multiple_of(64).clamp(64, 448);
        let tiling = Tiling::new(1, extent.into(), 0, capacity.into());
        Self { extents: Extents::new(capacity.div_ceil(extent), [tiling].into()) }
    }

    /// Append up to `want` free ids: how many. In one thread the same ones every time, low ones first. Fewer only if
    /// there were no more.
    #[inline]
    pub fn claim(&self, lane: Lane, want: usize, out: &mut Vec<PageId>) -> usize {
        self.extents.claim(Self::SIZE, lane, want, &mut |run| out.extend(run.map(PageId)))
    }

    /// Give an id back.
    #[inline]
    pub fn release(&self, id: PageId) -> Result<(), FrameError> {
        self.extents.release(Self::SIZE, id.0)
    }

    /// Give many back, best in rising order. All that are allocated are released; the error is the first that wasn't.
    pub fn release_many(&self, ids: &[PageId]) -> Result<(), FrameError> {
        self.extents.release_many(Self::SIZE, ids.iter().map(|id| id.0))
    }

    /// Whether an id is given out.
    pub fn is_allocated(&self, id: PageId) -> bool {
        self.extents.is_allocated(Self::SIZE, id.0)
    }

    /// Free ids. Reads every extent; exact while nobody claims or releases.
    pub fn available(&self) -> u32 {
        self.capacity() - self.allocated()
    }

    /// Ids that are given out. Reads every extent; exact while nobody claims or releases.
    pub fn allocated(&self) -> u32 {
        (0..self.extents.count()).map(|extent| state(&self.extents, extent)).map(|s| s.total - s.free).sum()
    }

    /// All ids.
    pub fn capacity(&self) -> u32 {
        self.extents.tiling(Self::SIZE).frames()
    }

    /// How many wrong releases there were.
    pub fn faults(&self) -> u64 {
        self.extents.faults()
    }
}

fn glance(extents: &Extents, extent: usize) -> Glance {
    let word = extents.read(extent);
    let size = word.size();
    let total = size.map_or(0, |size| extents.tiling(size).frames_in(extent));
    Glance { size, free: word.free(), total, draining: word.is_draining(), goal: word.goal() }
}

fn state(extents: &Extents, extent: usize) -> ExtentState {
    let Glance { size, free, total, draining, .. } = glance(extents, extent);
    ExtentState { size, free, total, used: extents.used_bits(extent), draining }
}

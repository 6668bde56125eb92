//! How the frames of one size lie in the extents. Numbers only.

/// How the frames of one size lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    /// Frames in a whole extent.
    per_extent: u32,
    /// The first frame that may be given out.
    first: u32,
    /// One above the last.
    end: u32,
    /// 2^64 / `per_extent`, rounded up; 0 for an extent of one frame.
    inverse: u64,
}

impl Tiling {
    /// `reserved` units at the start and all from `total` on are nobody's.
    pub(super) fn new(unit: u64, extent: u64, reserved: u64, total: u64) -> Self {
        let frames = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let unit = unit.max(1);
        let per_extent = frames((extent / unit).max(1));
        Self {
            per_extent,
            first: frames(reserved.div_ceil(unit)),
            end: frames(total / unit),
            inverse: (u64::MAX / u64::from(per_extent)).wrapping_add(1),
        }
    }

    /// The extent a frame lies in. A multiplication: exact for all 32-bit numbers.
    #[inline]
    pub(super) fn extent_of(&self, frame: u32) -> u32 {
        match self.inverse {
            0 => frame,
            inverse => ((u128::from(inverse) * u128::from(frame)) >> 64) as u32,
        }
    }

    /// The frames of this extent that may be given out, counted from its first.
    #[inline]
    pub(super) fn range(&self, extent: usize) -> (u32, u32) {
        let start = extent as u64 * u64::from(self.per_extent);
        if start >= u64::from(self.first) && start + u64::from(self.per_extent) <= u64::from(self.end) {
            return (0, self.per_extent);
        }
        let low = u64::from(self.first).saturating_sub(start).min(u64::from(self.per_extent));
        let high = u64::from(self.end).saturating_sub(start).min(u64::from(self.per_extent));
        (low as u32, high.max(low) as u32)
    }

    #[inline]
    pub(super) fn frames_in(&self, extent: usize) -> u32 {
        let (low, high) = self.range(extent);
        high - low
    }

    /// The last frame whose bit lies in the same word as that of `frame`, which is the one at `bit` of its extent.
    #[inline]
    pub(super) fn last_beside(&self, frame: u32, bit: u32) -> u32 {
        let word_end = (bit | 63).min(self.per_extent - 1);
        (frame + (word_end - bit)).min(self.end - 1)
    }

    #[inline]
    pub(super) fn per_extent(&self) -> u32 {
        self.per_extent
    }

    /// All frames there are.
    pub(super) fn frames(&self) -> u32 {
        self.end.saturating_sub(self.first)
    }

    /// Whether there is a frame with this number that may be given out.
    #[inline]
    pub(super) fn has(&self, frame: u32) -> bool {
        self.first <= frame && frame < self.end
    }
}

//! How an arena is cut into extents.

use super::{MAX_FRAMES, Spec, SpecError};

/// How an arena of some number of bytes is cut.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaLayout {
    /// Usable bytes: whole extents, but the last one may end early (at a frame) if there is one size.
    pub bytes: u64,
    /// Bytes of the request that are not used.
    pub rounded_off: u64,
    /// Bytes of an extent: a multiple of every size.
    pub extent_bytes: u64,
    /// Extents, the last perhaps partial.
    pub extents: u32,
    /// Frame sizes, in [`crate::word::SizeId`] order.
    pub sizes: Vec<u64>,
    /// Bytes at the start of extent 0 that are never given out: frame 0 of each size lies there.
    pub reserved: u64,
}

impl Spec {
    /// Cuts an arena of at most `bytes`.
    ///
    /// One size: extents of up to 512 frames, at least 8 extents if there are 8 frames. Several sizes: multiples of the
    /// granule, as many extents as there are sizes at least, 128 if possible.
    pub fn arena(&self, bytes: u64) -> Result<ArenaLayout, SpecError> {
        let reserved = self.sizes[self.sizes.len() - 1];
        let smallest = self.sizes[0];
        let (usable, extent_bytes) = if self.sizes.len() == 1 {
            let frames = bytes / smallest;
            if frames < 2 {
                return Err(SpecError::ArenaTooSmall { bytes, needed: 2 * smallest });
            }
            let per_extent = 1 << (frames / 8).clamp(1, 512).ilog2();
            (frames * smallest, per_extent * smallest)
        } else {
            let granules = bytes / self.granule;
            // Frame 0 may fill an extent; every size needs one that it can use.
            let least = self.sizes.len() as u64 + u64::from(self.granule == reserved);
            if granules < least {
                let needed = self.granule.saturating_mul(least);
                return Err(SpecError::ArenaTooSmall { bytes, needed });
            }
            let per_extent = (512 * smallest / self.granule).min(granules / 128).max(1);
            let extent = per_extent * self.granule;
            (bytes / extent * extent, extent)
        };
        let most = MAX_FRAMES.saturating_mul(smallest).min(u64::from(u32::MAX).saturating_mul(self.unit));
        if usable > most {
            return Err(SpecError::ArenaTooLarge { bytes, most });
        }
        Ok(ArenaLayout {
            bytes: usable,
            rounded_off: bytes - usable,
            extent_bytes,
            // At most 2^31 - 1 frames, and an extent has one at least.
            extents: usable.div_ceil(extent_bytes) as u32,
            sizes: self.sizes.clone(),
            reserved,
        })
    }
}

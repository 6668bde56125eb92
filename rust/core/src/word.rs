//! The packed atomic words and their pure transitions, and the newtype of every index space.
//!
//! A transition is a pure function from a word to the next one, `None` where it is not allowed; the rooms apply it with
//! one compare-exchange ([`crate::sync::Atom::transit`]). One file per word:
//!
//! | word | file | kept by |
//! | --- | --- | --- |
//! | [`page::PageWord`]: generation, references, pins, state | `word/page.rs` | page.rs |
//! | [`page::Location`]: tier, class, frame | `word/page.rs` | page.rs |
//! | [`freeze::FreezeWord`]: who freezes a tenant | `word/freeze.rs` | reclaim/freeze.rs |
//! | `ExtentWord`: class, free count, state of an extent | `word/extent.rs` | frame.rs |
//! | [`plan::PlanWord`]: how far a plan has come, how it ended | `word/plan.rs` | plan/table.rs |
//! | `StockWord`, `UsageWord`, `ClaimWord` | `word/ledger.rs` | ledger.rs |

use std::fmt;

pub mod extent;
pub mod freeze;
pub mod ledger;
pub mod page;
pub mod plan;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident($int:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub $int);

        impl $name {
            /// As an array index.
            #[inline]
            pub const fn as_usize(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

index!(/** A logical page: an index into the page table of the pool. */ PageId(u32), "P");
index!(/** A frame of one frame size, counted over the whole arena: byte offset / frame bytes. */ FrameId(u32), "F");
index!(/** An extent of an arena. */ ExtentId(u32), "E");
index!(/** A layer group of the spec. */ GroupId(u8), "G");
index!(/** A page class: (layer group, storage dtype). */ ClassId(u8), "C");
index!(/** A distinct frame size of an arena. Classes whose pages have equal bytes share one, and so their extents. */ SizeId(u8), "Z");
index!(/** A node of the tenant tree; 0 is the root. */ TenantId(u32), "T");
index!(/** How often a page or tenant id has been given out: with the id it names one life. */ Generation(u32), "g");
index!(/** A shard of the hot words. Every handle has one, so two threads that use their own handles share no hot word. */ Lane(u8), "L");

/// The number of lanes of a pool.
pub const LANES: usize = 16;

impl Lane {
    /// The lane with this number, wrapped.
    #[inline]
    pub const fn wrapped(n: u64) -> Self {
        Self((n % LANES as u64) as u8)
    }
}

/// Where memory is: on the device, or pinned on the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Tier {
    /// The device arena.
    Device = 0,
    /// The host arena.
    Host = 1,
}

/// The number of tiers.
pub const TIERS: usize = 2;

impl Tier {
    /// Every tier, in order.
    pub const ALL: [Self; TIERS] = [Self::Device, Self::Host];
    /// As an array index.
    #[inline]
    pub const fn as_usize(self) -> usize {
        self as usize
    }
}

/// A reference to one life of a page: a stale one is an answer, never another tenant's data.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRef {
    /// Which page.
    pub id: PageId,
    /// Which life of it.
    pub generation: Generation,
}

impl PageRef {
    /// Packed: generation in the upper half, id in the lower.
    #[inline]
    pub const fn to_bits(self) -> u64 {
        (self.generation.0 as u64) << 32 | self.id.0 as u64
    }
    /// The inverse of [`Self::to_bits`].
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        Self { id: PageId(bits as u32), generation: Generation((bits >> 32) as u32) }
    }
}

impl fmt::Debug for PageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.id, self.generation)
    }
}

/// A reference to one life of a tenant: whoever gets the id later is not meant by it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct TenantRef {
    /// Which tenant.
    pub id: TenantId,
    /// Which of those that have had the id.
    pub(crate) generation: Generation,
}

/// A number of ledger units. One unit is the greatest common divisor of the spec's page bytes, so every page is a whole
/// number of units and 2^32 of them are never a limit in practice (2^32 pages in a pool of one class).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
#[repr(transparent)]
pub struct Units(pub u32);

//! What can go wrong, as data: what was asked, what there was. The words are made where a person reads them.

use std::fmt;

use crate::{
    plan::Fault,
    word::{GroupId, PageRef, TenantId, Tier},
};

/// A number of bytes as people read it: three digits or so, binary unit, rounded to the nearest (to the even one between
/// two); exact below 1 KiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let bytes = u128::from(self.0);
        if bytes < 1024 {
            return write!(f, "{bytes} B");
        }
        // 1,023.99 KiB would be written as 1024 KiB.
        let fits = |nth: &usize| 2 * bytes < 2047 << (10 * (nth + 1));
        let nth = (0..UNITS.len() - 1).find(fits).unwrap_or(UNITS.len() - 1);
        let unit = 1u128 << (10 * (nth + 1));
        let tens = if bytes < 10 * unit {
            100
        } else if bytes < 100 * unit {
            10
        } else {
            1
        };
        let (whole, rest) = (bytes * tens / unit, bytes * tens % unit);
        let up = 2 * rest > unit || 2 * rest == unit && whole % 2 == 1;
        let rounded = whole + u128::from(up);
        write!(f, "{}", rounded / tens)?;
        let decimals = match (tens, rounded % tens) {
            (_, 0) => String::new(),
            (10, tenths) => format!(".{tenths}"),
            (_, hundredths) if hundredths % 10 == 0 => format!(".{}", hundredths / 10),
            (_, hundredths) => format!(".{hundredths:02}"),
        };
        write!(f, "{decimals} {}", UNITS[nth])
    }
}

/// Numbers of bytes that stand beside each other in a sentence: as [`Bytes`], or exact where two that differ would look the
/// same.
pub fn sizes<const N: usize>(bytes: [u64; N]) -> [String; N] {
    let texts = bytes.map(|n| Bytes(n).to_string());
    let alike = |a: usize, b: usize| bytes[a] != bytes[b] && texts[a] == texts[b];
    if (0..N).any(|a| (0..a).any(|b| alike(a, b))) { bytes.map(|n| format!("{n} bytes")) } else { texts }
}

/// Why an allocation was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// A limit, of the tenant or of a level above it.
    Limit,
    /// What others hold, have reserved or were promised leaves no room.
    Claim,
    /// The ledger agrees, but every frame is in use by live pages.
    Frames,
    /// Free bytes exist, in extents that serve pages of another size.
    Fragmented,
    /// The tenant is frozen: no new requests, no growth beyond what was admitted.
    Frozen,
    /// The row of the batch can't show a longer sequence.
    Row,
    /// The arrays of the batch can't show more tokens in one step.
    Budget,
}

/// A refused allocation, with its numbers. Everything is as it was before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// Why.
    pub why: Why,
    /// In which tier.
    pub tier: Tier,
    /// Who asked.
    pub tenant: TenantId,
    /// The level of the tenant tree that refused.
    pub level: TenantId,
    /// How many bytes were asked for (tokens for [`Why::Row`] and [`Why::Budget`]).
    pub asked: u64,
    /// How many there were.
    pub room: u64,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tenant, level, .. } = self;
        let [asked, room] = sizes([self.asked, self.room]);
        match self.why {
            Why::Limit => write!(f, "{tenant} asked for {asked}; the limit of {level} leaves {room}"),
            Why::Claim => {
                write!(f, "{tenant} asked for {asked}; what is held, reserved and promised leaves {room}")
            }
            Why::Frames => write!(f, "{tenant} asked for {asked}; every page is in use, {room} are free"),
            Why::Fragmented => write!(
                f,
                "{tenant} asked for {asked}; {room} are free, but in extents that serve another page size"
            ),
            Why::Frozen => write!(f, "{tenant} asked for {asked}, and is frozen until it is thawed"),
            Why::Row => {
                write!(f, "the row shows at most {} tokens; {} were asked for", self.room, self.asked)
            }
            Why::Budget => {
                let Self { asked, room, .. } = self;
                write!(f, "a step of this batch shows at most {room} tokens; {asked} were asked for")
            }
        }
    }
}

/// The errors of the core.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Error {
    /// No room.
    Refused(Refusal),
    /// It can never fit: asked and the most there can be, in bytes.
    Never(Refusal),
    /// Another thread is using it.
    Busy(&'static str),
    /// It was closed.
    Closed(&'static str),
    /// References that name another life of their page: how many, and the first.
    Stale {
        /// How many of the references given.
        count: usize,
        /// The first of them.
        first: PageRef,
    },
    /// The handle belongs to another pool.
    WrongPool(&'static str),
    /// No such group.
    NoGroup {
        /// Asked for.
        group: GroupId,
        /// There are this many.
        groups: usize,
    },
    /// An argument that makes no sense.
    Argument(String),
    /// No tenant has this name.
    UnknownTenant(String),
    /// Something about tenants.
    Tenant(String),
    /// A pin that can't be made, or is no longer there.
    Pin(String),
    /// A plan that can't be built, read or ended.
    Plan(Fault),
    /// Pages are held, so the prefix cache can't be reset.
    InUse {
        /// How many published pages are held or pinned.
        pages: u64,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Never(r) => {
                let [asked, room] = sizes([r.asked, r.room]);
                write!(f, "{} can never get {asked}: at most {room} fit", r.tenant)
            }
            Self::Busy(what) => write!(f, "{what} is in use by another thread"),
            Self::Closed(what) => write!(f, "{what} is closed"),
            Self::Stale { count, first } => write!(
                f,
                "{count} page reference(s) name an earlier life of their page, the first is {first:?}; nothing was changed"
            ),
            Self::WrongPool(what) => write!(f, "{what} belongs to another pool"),
            Self::NoGroup { group, groups } => {
                write!(f, "there is no layer group {}; the spec has {groups}, counted from 0", group.0)
            }
            Self::Argument(text) | Self::Tenant(text) | Self::Pin(text) => f.write_str(text),
            Self::Plan(fault) => fault.fmt(f),
            Self::UnknownTenant(name) => write!(f, "there is no tenant {name:?}"),
            Self::InUse { pages } => write!(
                f,
                "{pages} published page(s) are held or pinned; release them first, nothing was reset"
            ),
        }
    }
}

impl std::error::Error for Error {}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn bytes_as_people_read_them() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (1_500_000, "1.43 MiB"),
            (1 << 20, "1 MiB"),
            (1_047_552, "1023 KiB"),
            ((1 << 20) - 1, "1 MiB"),
            (10_239, "10 KiB"),
            (101 << 10, "101 KiB"),
            (12 << 30, "12 GiB"),
            (1032, "1.01 KiB"),
            (u64::MAX, "16 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Bytes(bytes).to_string(), text, "{bytes}");
        }
    }

    #[test]
    fn numbers_that_differ_look_different() {
        assert_eq!(sizes([1 << 30, 1 << 20]), ["1 GiB", "1 MiB"]);
        assert_eq!(sizes([1 << 30, 1 << 30]), ["1 GiB", "1 GiB"]);
        assert_eq!(sizes([1 << 30, (1 << 30) - 4096]), ["1073741824 bytes", "1073737728 bytes"]);
    }
}

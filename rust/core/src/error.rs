//! What can go wrong, as data: what was asked, what there was. The words are made where a person reads them.

use std::fmt;

use crate::{
    plan::Fault,
    word::{GroupId, PageRef, TenantId, Tier},
};

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
        let Self { tenant, level, asked, room, .. } = self;
        match self.why {
            Why::Limit => write!(f, "{tenant} asked for {asked} bytes; the limit of {level} leaves {room}"),
            Why::Claim => write!(
                f,
                "{tenant} asked for {asked} bytes; what is held, reserved and promised leaves {room}"
            ),
            Why::Frames => {
                write!(f, "{tenant} asked for {asked} bytes; every page is in use, {room} bytes are free")
            }
            Why::Fragmented => write!(
                f,
                "{tenant} asked for {asked} bytes; {room} bytes are free, but in extents that serve another page size"
            ),
            Why::Frozen => write!(f, "{tenant} asked for {asked} bytes, and is frozen until it is thawed"),
            Why::Row => write!(f, "the row shows at most {room} tokens; {asked} were asked for"),
            Why::Budget => {
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
                write!(f, "{} can never get {} bytes: at most {} fit", r.tenant, r.asked, r.room)
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

//! What the ledger refuses, with its numbers.

use std::{error::Error, fmt};

use crate::word::{TenantId, Tier, Units};

/// Why an amount was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Why {
    /// More would be charged to the level's subtree than its limit. Giving up cached pages below that level helps.
    Limit,
    /// What the level's subtree keeps from others (reserves, and units that can't be reclaimed) would exceed its limit;
    /// at the root: the capacity. Only others' giving up held or reserved units helps.
    Claim,
    /// There is no such tenant (any more).
    Closed,
}

/// An amount that was refused. Nothing was charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    /// Where.
    pub tier: Tier,
    /// For whom.
    pub tenant: TenantId,
    /// The level that refused: the tenant or one of its ancestors.
    pub level: TenantId,
    /// Why.
    pub why: Why,
    /// What was asked.
    pub asked: Units,
    /// What would have been granted at that level.
    pub room: Units,
    /// The limit of that level (the root's is the capacity).
    pub limit: Units,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tier, tenant, level, why, asked, room, limit } = self;
        let (asked, room, limit) = (asked.0, room.0, limit.0);
        match why {
            Why::Limit => write!(
                f,
                "{tenant} asked for {asked} units on {tier:?}; {level} has room for {room} below its limit of {limit}"
            ),
            Why::Claim => write!(
                f,
                "{tenant} asked for {asked} units on {tier:?}; at {level} {room} of {limit} are neither held nor \
                 reserved by others"
            ),
            Why::Closed => {
                write!(f, "{tenant} asked for {asked} units on {tier:?}, and there is no such tenant")
            }
        }
    }
}

impl Error for Refused {}

/// The rule that a tenant's name broke.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum NameRule {
    /// It is empty.
    Empty,
    /// It is longer than 128 bytes.
    Long,
    /// It has a control character.
    Control,
    /// It has a character that does not show, or turns the text around.
    Invisible,
    /// It has a `/`, which separates levels.
    Slash,
    /// It is `.` or `..`.
    Dots,
    /// It begins or ends with a blank.
    Blank,
}

impl fmt::Display for NameRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "it is empty",
            Self::Long => "it is longer than 128 bytes",
            Self::Control => "it has a control character",
            Self::Invisible => "it has a character that does not show or turns the text around",
            Self::Slash => "it has a '/', which separates levels",
            Self::Dots => "'.' and '..' are no names",
            Self::Blank => "it begins or ends with a blank",
        })
    }
}

/// A policy change that was refused. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LedgerError {
    /// A name that is no name.
    Name {
        /// What was given.
        name: String,
        /// The rule it breaks.
        rule: NameRule,
    },
    /// The name is taken; names are unique in a pool.
    Exists {
        /// The name.
        name: String,
        /// Who has it.
        tenant: TenantId,
    },
    /// The pool has as many tenants as it was built for.
    Full {
        /// That many, without the root.
        max: u32,
    },
    /// The parent already stands at the deepest level.
    TooDeep {
        /// Levels below the root.
        max: u32,
    },
    /// No such tenant.
    Unknown {
        /// Who.
        tenant: TenantId,
    },
    /// The root has a capacity and no policy.
    Root,
    /// A weight of 0: its holder would give back everything first and always.
    Weight,
    /// A priority above 100.
    Priority {
        /// What was given.
        given: u8,
    },
    /// A limit below the tenant's own reserve.
    LimitBelowReserve {
        /// Where.
        tier: Tier,
        /// The limit.
        limit: Units,
        /// The reserve.
        reserve: Units,
    },
    /// A limit (for the root: a capacity) below what the children have reserved.
    LimitBelowReserves {
        /// Where.
        tier: Tier,
        /// The limit.
        limit: Units,
        /// The sum of the children's reserves.
        reserves: Units,
    },
    /// A reserve that does not fit beside what others hold or have reserved.
    Reserve {
        /// Where.
        tier: Tier,
        /// The reserve that was asked.
        asked: Units,
        /// The level where it does not fit.
        level: TenantId,
        /// By how much.
        short: Units,
    },
    /// A scope to publish into that is not above the tenant.
    Scope {
        /// The scope.
        scope: TenantId,
    },
    /// A tenant with children can't be removed.
    HasChildren {
        /// How many.
        children: u32,
    },
    /// A tenant with charges can't be removed.
    NotEmpty {
        /// Where.
        tier: Tier,
        /// What is charged to it.
        charged: Units,
    },
    /// More units or tenants than the words can count.
    TooLarge {
        /// What was asked.
        asked: u32,
        /// The most there can be.
        most: u32,
    },
}

impl fmt::Display for LedgerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { name, rule } => write!(f, "{name:?} can't name a tenant: {rule}"),
            Self::Exists { name, tenant } => write!(f, "there is a tenant {name:?} already ({tenant})"),
            Self::Full { max } => write!(f, "the pool was built for {max} tenants and has them all"),
            Self::TooDeep { max } => write!(f, "a tenant tree has at most {max} levels"),
            Self::Unknown { tenant } => write!(f, "there is no tenant {tenant}"),
            Self::Root => f.write_str("the root has a capacity, and no policy"),
            Self::Weight => f.write_str("a weight is at least 1"),
            Self::Priority { given } => write!(f, "a priority lies between 0 and 100, not {given}"),
            Self::LimitBelowReserve { tier, limit, reserve } => write!(
                f,
                "on {tier:?} a limit of {} units is below the tenant's own reserve of {}",
                limit.0, reserve.0
            ),
            Self::LimitBelowReserves { tier, limit, reserves } => write!(
                f,
                "on {tier:?} a limit of {} units is below the {} that its children have reserved",
                limit.0, reserves.0
            ),
            Self::Reserve { tier, asked, level, short } => write!(
                f,
                "a reserve of {} units on {tier:?} does not fit at {level}: {} too many are held or reserved there",
                asked.0, short.0
            ),
            Self::Scope { scope } => {
                write!(f, "a tenant publishes into itself and the nodes above it; {scope} is neither")
            }
            Self::HasChildren { children } => write!(f, "the tenant has {children} children"),
            Self::NotEmpty { tier, charged } => {
                write!(f, "the tenant has {} units charged on {tier:?}", charged.0)
            }
            Self::TooLarge { asked, most } => write!(f, "{asked} is more than the ledger can count ({most})"),
        }
    }
}

impl Error for LedgerError {}

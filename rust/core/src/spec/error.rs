//! What is wrong with a geometry, with its numbers.

use std::fmt;

use super::Dtype;

/// A geometry that can't be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SpecError {
    /// The number of tokens of a page.
    PageTokens {
        /// What was asked for.
        given: u32,
        /// The most.
        max: u32,
    },
    /// The number of layer groups.
    Groups {
        /// What was asked for.
        given: usize,
        /// The most.
        max: usize,
    },
    /// A group's name.
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A number of a group.
    Group {
        /// Its name.
        group: String,
        /// Which number.
        field: &'static str,
        /// What was asked for.
        given: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// A page of this group is larger than any device can mean.
    PageTooLarge {
        /// Its name.
        group: String,
        /// Bytes of its page.
        bytes: u128,
        /// The most.
        max: u64,
    },
    /// The second class has no fewer bytes than the first.
    SmallNotSmaller {
        /// Whose.
        group: String,
        /// The group's dtype.
        dtype: Dtype,
        /// The second one.
        small: Dtype,
    },
    /// Layer-major with groups of unequal layers.
    LayerMajor {
        /// Two of them.
        groups: (String, String),
        /// Their layers.
        layers: (u32, u32),
    },
    /// No common multiple of the page sizes is small enough, or rounding loses too much.
    Sizes {
        /// Bytes of the pages.
        sizes: Vec<u64>,
        /// The most, in pages of the largest size.
        granule: u64,
    },
    /// Too few bytes for anything.
    ArenaTooSmall {
        /// What was asked for.
        bytes: u64,
        /// The least.
        needed: u64,
    },
    /// More frames or units than can be counted.
    ArenaTooLarge {
        /// What was asked for.
        bytes: u64,
        /// The most.
        most: u64,
    },
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PageTokens { given, max } => write!(f, "page_tokens is {given}: must be 1 to {max}"),
            Self::Groups { given, max } => write!(f, "{given} layer groups: must be 1 to {max}"),
            Self::Name { name, why } => write!(f, "group name {name:?} {why}"),
            Self::Group { group, field, given, rule } => {
                write!(f, "group {group:?}: {field} is {given}: {rule}")
            }
            Self::PageTooLarge { group, bytes, max } => {
                write!(f, "group {group:?}: a page has {bytes} bytes, the most is {max}")
            }
            Self::SmallNotSmaller { group, dtype, small } => {
                write!(f, "group {group:?}: a page in {small} is no smaller than one in {dtype}")
            }
            Self::LayerMajor { groups: (a, b), layers: (m, n) } => write!(
                f,
                "layer-major needs the same number of layers in every group: {a:?} has {m}, {b:?} has {n}"
            ),
            Self::Sizes { sizes, granule } => write!(
                f,
                "page sizes {sizes:?} have no common multiple of at most {granule} largest pages without losing \
                 more than a quarter of one"
            ),
            Self::ArenaTooSmall { bytes, needed } => {
                write!(f, "{bytes} bytes are too few: this geometry needs at least {needed}")
            }
            Self::ArenaTooLarge { bytes, most } => {
                write!(f, "{bytes} bytes are too many: this geometry can count {most}")
            }
        }
    }
}

impl std::error::Error for SpecError {}

//! Geometry: layer groups, page classes, bytes. Immutable; every other room takes its sizes from here.
//!
//! A *layer group* is a set of layers with one lifetime and one shape. Its page holds `page_tokens` tokens of all its
//! layers. A *page class* is (group, storage dtype) and has ONE number of bytes, [`ClassSpec::page_bytes`], padding
//! included: arena, ledger, admission and planner all use that number and no other.
//!
//! # What a page holds
//!
//! Per layer: `K [page_tokens, kv_heads, k_dim] | V [page_tokens, kv_heads, v_dim] | K scales | V scales`, the scales
//! (one f16 per token and KV head) for int8 only; then up to a multiple of 16 bytes, so that every layer of a page can be
//! read in 16-byte pieces. An MLA group ([`GroupKind::Latent`]) stores its latent with the rope part once, as K, and has
//! no V. A page of a [`GroupKind::State`] group is the whole fixed state of one sequence.
//!
//! | number of a class | is |
//! | --- | --- |
//! | `raw_bytes` | what is stored, no padding: bytes a token = sum of raw bytes / page_tokens |
//! | `layer_bytes` | from one layer of a page to the next (page-major), or one layer's part of a page (layer-major) |
//! | `page_bytes` | from one frame to the next: the number that is charged |
//!
//! # Sizes
//!
//! Page bytes are a multiple of 256. Classes with equal page bytes share a frame size (and so the extents). With several
//! sizes the extent must be a common multiple of all of them (the *granule*). Where the exact one is large, sizes are
//! rounded up, weighing what is lost against the size of the granule (`fit.rs`); it is never more than 64 times the
//! largest page, and a spec that would lose more than a quarter of a class is refused. Layer-major cuts the arena into
//! one equal region per layer, so all groups must have the same number of layers.
//!
//! # What a sequence holds
//!
//! Token `i` (counted from 0) attends to all tokens up to itself (full, latent), to the last `w` tokens with itself among
//! them (window), or to those from `i / c * c` on (chunked). A sequence of `n` tokens holds the pages that token `n`,
//! its next one, needs ([`Spec::pages_of`]); earlier ones have been given back. While a step of `b` tokens is written,
//! a window group holds up to `w - 1 + b` tokens, wherever they begin in a page ([`Spec::peak_pages`]).
//!
//! # Invariant
//!
//! Nothing overflows after construction: a page is at most 2^40 bytes, a spec at most 32 groups; sums over tokens are made
//! in 128 bits and end at `u64::MAX`. An arena has at most 2^31 - 1 frames (block tables are int32) and 2^32 - 1 units.
//!
//! Callers: everybody; nothing is called from here.

use std::{fmt, ops::Range};

use crate::word::{ClassId, GroupId, SizeId, Units};

mod arena;
mod error;
mod fit;
#[cfg(test)]
mod tests;

pub use arena::ArenaLayout;
pub use error::SpecError;

/// Page bytes are a multiple of this.
pub const PAGE_ALIGN: u64 = 256;
/// The part of a layer within a page is a multiple of this.
pub const LAYER_ALIGN: u64 = 16;
/// The most layer groups of a spec.
pub const MAX_GROUPS: usize = 32;
/// The most tokens of a page.
pub const MAX_PAGE_TOKENS: u32 = 1 << 16;
/// The most bytes of a page.
pub const MAX_PAGE_BYTES: u64 = 1 << 40;
/// The most frames of an arena: block tables are int32.
pub const MAX_FRAMES: u64 = i32::MAX as u64;

/// How a value is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float (e4m3), no scales.
    Fp8,
    /// 8-bit integer with one f16 scale per token and KV head, for K and V each.
    Int8,
}

impl Dtype {
    /// Bytes of one value.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 | Self::Int8 => 1,
        }
    }
    /// Bytes of the scale of one token and KV head.
    pub const fn scale_bytes(self) -> u64 {
        match self {
            Self::Int8 => 2,
            _ => 0,
        }
    }
    /// The usual name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Fp8 => "float8_e4m3fn",
            Self::Int8 => "int8",
        }
    }
}

/// Which tokens the layers of a group need, and so how long their pages live.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GroupKind {
    /// All of them.
    Full,
    /// The last `tokens`, the present one among them.
    Window {
        /// The width of the window.
        tokens: u32,
    },
    /// Those of the present chunk: chunks begin at multiples of `tokens`.
    Chunked {
        /// The length of a chunk.
        tokens: u32,
    },
    /// All of them, stored as one latent (MLA).
    Latent,
    /// None: a state of fixed size per sequence.
    State,
}

impl GroupKind {
    /// Pages are needed to the end of the sequence.
    pub const fn grows(self) -> bool {
        matches!(self, Self::Full | Self::Latent)
    }
}

/// A layer group, as it is asked for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GroupSpec {
    /// Unique in the spec.
    pub name: String,
    /// Lifetime.
    pub kind: GroupKind,
    /// Layers that store KV (or state).
    pub layers: u32,
    /// KV heads of each layer, on this rank. 1 for a latent, 0 for a state.
    pub kv_heads: u32,
    /// Values of one K head; for a latent its rank with the rope part. 0 for a state.
    pub k_dim: u32,
    /// Values of one V head. 0 for a latent or a state.
    pub v_dim: u32,
    /// Storage.
    pub dtype: Dtype,
    /// State groups: bytes of the state of one sequence, all layers. Else 0.
    pub state_bytes: u64,
}

impl GroupSpec {
    /// Bytes of one token in one layer with this storage, no padding. 0 for a state.
    fn layer_token_bytes(&self, dtype: Dtype) -> u128 {
        let dims = u128::from(self.k_dim) + u128::from(self.v_dim);
        let sides = u128::from(self.k_dim > 0) + u128::from(self.v_dim > 0);
        u128::from(self.kv_heads)
            * (dims * u128::from(dtype.bytes()) + sides * u128::from(dtype.scale_bytes()))
    }

    fn check(&self) -> Result<(), SpecError> {
        let bad = |field: &'static str, given: u64, rule: &'static str| {
            Err(SpecError::Group { group: self.name.clone(), field, given, rule })
        };
        if self.name.is_empty() || self.name.len() > 64 {
            return Err(SpecError::Name { name: self.name.clone(), why: "must have 1 to 64 bytes" });
        }
        if self.layers == 0 {
            return bad("layers", 0, "must be at least 1");
        }
        match self.kind {
            GroupKind::Window { tokens: 0 } => return bad("window", 0, "must be at least 1 token"),
            GroupKind::Chunked { tokens: 0 } => return bad("chunk", 0, "must be at least 1 token"),
            _ => {}
        }
        if self.kind == GroupKind::State {
            return match self {
                Self { state_bytes: 0, .. } => bad("state_bytes", 0, "must be at least 1 for a state"),
                Self { kv_heads: 1.., .. } => bad("kv_heads", self.kv_heads.into(), "must be 0 for a state"),
                Self { k_dim: 1.., .. } => bad("k_dim", self.k_dim.into(), "must be 0 for a state"),
                Self { v_dim: 1.., .. } => bad("v_dim", self.v_dim.into(), "must be 0 for a state"),
                _ => Ok(()),
            };
        }
        if self.state_bytes > 0 {
            return bad("state_bytes", self.state_bytes, "must be 0 unless the group is a state");
        }
        if self.kv_heads == 0 {
            return bad("kv_heads", 0, "must be at least 1");
        }
        if self.k_dim == 0 {
            return bad("k_dim", 0, "must be at least 1");
        }
        if self.kind == GroupKind::Latent {
            if self.kv_heads != 1 {
                return bad("kv_heads", self.kv_heads.into(), "must be 1 for a latent: it is stored once");
            }
            if self.v_dim != 0 {
                return bad("v_dim", self.v_dim.into(), "must be 0 for a latent: it is stored once");
            }
        } else if self.v_dim == 0 {
            return bad("v_dim", 0, "must be at least 1");
        }
        Ok(())
    }
}

/// How the arena is cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Layout {
    /// `[frame, layer, ..]`: one frame is one run of bytes.
    #[default]
    PageMajor,
    /// `[layer, frame, ..]`: one equal region per layer; `frame * layer_bytes` counts within a region.
    LayerMajor,
}

/// A page class: a group with a storage dtype.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ClassSpec {
    /// Whose pages.
    pub group: GroupId,
    /// Storage.
    pub dtype: Dtype,
    /// THE bytes of a page, padding included.
    pub page_bytes: u64,
    /// Without padding.
    pub raw_bytes: u64,
    /// From one layer to the next; 0 for a state.
    pub layer_bytes: u64,
    /// Its frame size.
    pub size: SizeId,
}

impl ClassSpec {
    /// Bytes of a page that hold nothing.
    pub const fn padding(&self) -> u64 {
        self.page_bytes - self.raw_bytes
    }
}

/// The geometry of a model's KV cache.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Spec {
    page_tokens: u32,
    layout: Layout,
    groups: Vec<GroupSpec>,
    classes: Vec<ClassSpec>,
    small: Vec<Option<ClassId>>,
    sizes: Vec<u64>,
    granule: u64,
    unit: u64,
}

impl Spec {
    /// Checks the groups and fixes all sizes. `small` gives every group but the states a second class with fewer bytes.
    pub fn new(
        page_tokens: u32,
        groups: Vec<GroupSpec>,
        layout: Layout,
        small: Option<Dtype>,
    ) -> Result<Self, SpecError> {
        if page_tokens == 0 || page_tokens > MAX_PAGE_TOKENS {
            return Err(SpecError::PageTokens { given: page_tokens, max: MAX_PAGE_TOKENS });
        }
        if groups.is_empty() || groups.len() > MAX_GROUPS {
            return Err(SpecError::Groups { given: groups.len(), max: MAX_GROUPS });
        }
        for (i, group) in groups.iter().enumerate() {
            group.check()?;
            if groups[..i].iter().any(|g| g.name == group.name) {
                return Err(SpecError::Name { name: group.name.clone(), why: "is given twice" });
            }
            if layout == Layout::LayerMajor && group.layers != groups[0].layers {
                return Err(SpecError::LayerMajor {
                    groups: (groups[0].name.clone(), group.name.clone()),
                    layers: (groups[0].layers, group.layers),
                });
            }
        }
        let mut classes = Vec::with_capacity(2 * groups.len());
        for (i, group) in groups.iter().enumerate() {
            classes.push(class(page_tokens, GroupId(i as u8), group, group.dtype)?);
        }
        let mut small_of = vec![None; groups.len()];
        if let Some(dtype) = small {
            for (i, group) in groups.iter().enumerate().filter(|(_, g)| g.kind != GroupKind::State) {
                let second = class(page_tokens, GroupId(i as u8), group, dtype)?;
                if second.raw_bytes >= classes[i].raw_bytes {
                    return Err(SpecError::SmallNotSmaller {
                        group: group.name.clone(),
                        dtype: group.dtype,
                        small: dtype,
                    });
                }
                small_of[i] = Some(ClassId(classes.len() as u8));
                classes.push(second);
            }
        }
        // Layer-major: every layer's part must itself be aligned, so pages grow in steps of all layers.
        let step = match layout {
            Layout::PageMajor => PAGE_ALIGN,
            Layout::LayerMajor => PAGE_ALIGN * u64::from(groups[0].layers),
        };
        let needed: Vec<u64> = classes.iter().map(|c| c.page_bytes.div_ceil(step)).collect();
        let fit = fit::fit(&needed, step).ok_or_else(|| SpecError::Sizes {
            sizes: needed.iter().map(|n| n * step).collect(),
            granule: fit::MAX_MULTIPLE,
        })?;
        for (class, units) in classes.iter_mut().zip(&fit.sizes) {
            class.page_bytes = units * step;
            if class.page_bytes > MAX_PAGE_BYTES {
                return Err(too_large(&groups[class.group.as_usize()], class.page_bytes.into()));
            }
            if layout == Layout::LayerMajor {
                class.layer_bytes = class.page_bytes / u64::from(groups[0].layers);
            }
        }
        let mut sizes: Vec<u64> = classes.iter().map(|c| c.page_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for class in &mut classes {
            class.size = SizeId(sizes.partition_point(|&s| s < class.page_bytes) as u8);
        }
        let unit = sizes.iter().copied().fold(0, fit::gcd);
        if let Some(class) = classes.iter().find(|c| c.page_bytes / unit > u64::from(u32::MAX)) {
            return Err(too_large(&groups[class.group.as_usize()], class.page_bytes.into()));
        }
        Ok(Self {
            page_tokens,
            layout,
            groups,
            classes,
            small: small_of,
            sizes,
            granule: fit.granule * step,
            unit,
        })
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }
    /// The layer groups, in [`GroupId`] order.
    pub fn groups(&self) -> &[GroupSpec] {
        &self.groups
    }
    /// How the arena is cut.
    pub fn layout(&self) -> Layout {
        self.layout
    }
    /// The page classes, in [`ClassId`] order: first one of each group, then the small ones.
    pub fn classes(&self) -> &[ClassSpec] {
        &self.classes
    }
    /// The class in which pages of a group are born.
    pub fn class_of(&self, group: GroupId) -> ClassId {
        debug_assert!(group.as_usize() < self.groups.len());
        ClassId(group.0)
    }
    /// The class into which pages of a group can be compressed.
    pub fn small_class_of(&self, group: GroupId) -> Option<ClassId> {
        self.small[group.as_usize()]
    }
    /// THE bytes of a page of this group, padding included.
    pub fn page_bytes(&self, group: GroupId) -> u64 {
        self.classes[group.as_usize()].page_bytes
    }
    /// The distinct page bytes, in [`SizeId`] order (ascending).
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }
    /// The least common multiple of the sizes: extents are multiples of it.
    pub fn granule(&self) -> u64 {
        self.granule
    }
    /// Bytes of a ledger unit: the greatest common divisor of the sizes.
    pub fn unit(&self) -> u64 {
        self.unit
    }
    /// Ledger units of a page.
    pub fn units(&self, class: ClassId) -> u32 {
        (self.classes[class.as_usize()].page_bytes / self.unit) as u32
    }
    /// The ledger units of so many bytes, rounded up; `None` if there are too many.
    pub fn units_in(&self, bytes: u64) -> Option<Units> {
        u32::try_from(bytes.div_ceil(self.unit)).ok().map(Units)
    }
    /// The first group whose pages live as long as the sequence.
    pub fn anchor(&self) -> Option<GroupId> {
        self.groups.iter().position(|g| g.kind.grows()).map(|i| GroupId(i as u8))
    }

    /// Stored bytes of one token while every window holds it, no padding.
    pub fn bytes_per_token(&self) -> u64 {
        self.sum_token_bytes(|_| true)
    }
    /// Stored bytes of one more token once all windows are full, no padding.
    pub fn grow_bytes_per_token(&self) -> u64 {
        self.sum_token_bytes(|g| g.kind.grows())
    }
    /// Stored bytes per sequence of full windows and chunks, no padding.
    pub fn window_cap_bytes(&self) -> u64 {
        saturated(
            self.groups
                .iter()
                .map(|g| match g.kind {
                    GroupKind::Window { tokens } | GroupKind::Chunked { tokens } => {
                        token_bytes(g) * u128::from(tokens)
                    }
                    _ => 0,
                })
                .sum(),
        )
    }
    /// Stored bytes of the fixed states of one sequence, no padding.
    pub fn state_bytes(&self) -> u64 {
        self.groups.iter().map(|g| g.state_bytes).sum()
    }

    fn sum_token_bytes(&self, which: impl Fn(&GroupSpec) -> bool) -> u64 {
        saturated(self.groups.iter().filter(|g| which(g)).map(token_bytes).sum())
    }

    /// The first page that a group still needs when the next token is number `len` (counted from 0). 0 for a state.
    pub fn first_needed(&self, group: GroupId, len: u32) -> u32 {
        match self.groups[group.as_usize()].kind {
            GroupKind::Full | GroupKind::Latent | GroupKind::State => 0,
            GroupKind::Window { tokens } => len.saturating_sub(tokens - 1) / self.page_tokens,
            GroupKind::Chunked { tokens } => len / tokens * tokens / self.page_tokens,
        }
    }

    /// The pages of a group that a sequence of `tokens` tokens holds. A state is page 0.
    pub fn pages_of(&self, group: GroupId, tokens: u32) -> Range<u32> {
        if self.groups[group.as_usize()].kind == GroupKind::State {
            return 0..u32::from(tokens > 0);
        }
        let end = tokens.div_ceil(self.page_tokens);
        self.first_needed(group, tokens).min(end)..end
    }

    /// The most pages of a group that a sequence holds on its way to `tokens` tokens, with at most `step` new ones a step.
    pub fn peak_pages(&self, group: GroupId, tokens: u32, step: u32) -> u32 {
        let page = u64::from(self.page_tokens);
        let span = |tokens: u32| u64::from(tokens) - 1 + u64::from(step.max(1));
        let held = match self.groups[group.as_usize()].kind {
            GroupKind::State => return u32::from(tokens > 0),
            GroupKind::Full | GroupKind::Latent => u64::MAX,
            // A run of s tokens that may begin anywhere touches at most (s - 2) / p + 2 pages.
            GroupKind::Window { tokens } => (span(tokens) + page).saturating_sub(2) / page + 1,
            GroupKind::Chunked { tokens } if u64::from(tokens) % page == 0 => span(tokens).div_ceil(page),
            GroupKind::Chunked { tokens } => (span(tokens) + page).saturating_sub(2) / page + 1,
        };
        // Both fit: the minimum is at most 2^32 - 1.
        held.min(u64::from(tokens).div_ceil(page)) as u32
    }

    /// Bytes that one sequence of so many tokens holds: whole pages, without those its windows have left behind.
    pub fn bytes_for(&self, tokens: u32) -> u64 {
        self.sum_pages(|g| self.pages_of(g, tokens).len() as u64)
    }

    /// The most bytes that one sequence holds on its way to `tokens` tokens, with at most `step` new ones a step: the sum
    /// over groups of their peaks. Never falls as `tokens` grows, so it is what to reserve.
    pub fn peak_for(&self, tokens: u32, step: u32) -> u64 {
        self.sum_pages(|g| self.peak_pages(g, tokens, step).into())
    }

    fn sum_pages(&self, pages: impl Fn(GroupId) -> u64) -> u64 {
        let all = (0..self.groups.len()).map(|i| {
            let group = GroupId(i as u8);
            u128::from(pages(group)) * u128::from(self.page_bytes(group))
        });
        saturated(all.sum())
    }

    /// The longest length to which `sequences` sequences can grow at the same time in so many bytes of pages. `None`: any.
    pub fn tokens_in(&self, bytes: u64, sequences: u32, step: u32) -> Option<u32> {
        let each = bytes / u64::from(sequences.max(1));
        if self.peak_for(u32::MAX, step) <= each {
            return None;
        }
        // The least length that doesn't fit lies in (fits, fails].
        let (mut fits, mut fails) = (0, u32::MAX);
        while fails - fits > 1 {
            let middle = fits + (fails - fits) / 2;
            if self.peak_for(middle, step) <= each { fits = middle } else { fails = middle }
        }
        Some(fits)
    }

    /// How many sequences of `tokens` tokens fit at the same time in so many bytes of pages.
    pub fn sequences_in(&self, bytes: u64, tokens: u32, step: u32) -> u64 {
        bytes / self.peak_for(tokens.max(1), step).max(1)
    }

    /// The same geometry with every window and chunk kept in full: what an engine without window discount needs.
    pub fn unwindowed(&self) -> Self {
        let mut full = self.clone();
        for group in &mut full.groups {
            if matches!(group.kind, GroupKind::Window { .. } | GroupKind::Chunked { .. }) {
                group.kind = GroupKind::Full;
            }
        }
        full
    }
}

/// Bytes of one token in all layers of a group.
fn token_bytes(group: &GroupSpec) -> u128 {
    u128::from(group.layers) * group.layer_token_bytes(group.dtype)
}

fn too_large(group: &GroupSpec, bytes: u128) -> SpecError {
    SpecError::PageTooLarge { group: group.name.clone(), bytes, max: MAX_PAGE_BYTES }
}

/// A class before sizes are made to fit: page bytes are those of its layers.
fn class(page_tokens: u32, id: GroupId, group: &GroupSpec, dtype: Dtype) -> Result<ClassSpec, SpecError> {
    let layers = u128::from(group.layers);
    // At most 2^16 * 2^32 * 2^36 and 2^32 layers more would be 2^116: no overflow in 128 bits.
    let layer = u128::from(page_tokens) * group.layer_token_bytes(dtype);
    let aligned = layer.next_multiple_of(LAYER_ALIGN.into());
    let (raw, page) = match group.kind {
        GroupKind::State => (group.state_bytes.into(), group.state_bytes.into()),
        _ => (layer * layers, aligned * layers),
    };
    if page > u128::from(MAX_PAGE_BYTES) {
        return Err(too_large(group, page));
    }
    Ok(ClassSpec {
        group: id,
        dtype,
        page_bytes: page as u64,
        raw_bytes: raw as u64,
        layer_bytes: aligned as u64,
        size: SizeId(0),
    })
}

fn saturated(n: u128) -> u64 {
    n.try_into().unwrap_or(u64::MAX)
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Window { tokens } => write!(f, "window {tokens}"),
            Self::Chunked { tokens } => write!(f, "chunked {tokens}"),
            Self::Latent => f.write_str("latent"),
            Self::State => f.write_str("state"),
        }
    }
}

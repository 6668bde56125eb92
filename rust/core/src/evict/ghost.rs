//! Ghosts: the keys of pages that left not long ago, without the pages.
//!
//! A word holds six entries of ten bits, the youngest in the lowest bits; a new one pushes the oldest out. Each key has
//! one word. With 3 words for 4 pages (6 bytes a page) the last 4.5 pools of evicted pages are remembered, more or
//! less sharply.
//!
//! | bits of an entry | field |
//! | --- | --- |
//! | 0 | the page was proven when it left |
//! | 1-9 | fingerprint of tenant and key, never 0; 0: no entry |
//!
//! A fingerprint of nine bits is wrong once in a hundred: [`super::Orders::recall`] believes runs, not single pages. So a
//! page is remembered with a plain store: of two that are written into one word at the same moment one may be lost.

use crate::{
    sync::{Atom, Words},
    word::TenantId,
};

const ENTRY_BITS: u32 = 10;
const ENTRY: u64 = (1 << ENTRY_BITS) - 1;
const ENTRIES: u32 = 6;
const USED: u64 = (1 << (ENTRIES * ENTRY_BITS)) - 1;
/// The lowest bit of each entry.
const ONES: u64 = USED / ENTRY;
const FINGERPRINTS: u64 = ENTRY >> 1;
const SPREAD: u64 = 0xa076_1d64_78bd_642f;

/// The keys that one pool remembers.
#[derive(Debug)]
pub(super) struct Ghosts {
    words: Words,
    len: u64,
}

impl Ghosts {
    pub(super) fn new(pages: u32) -> Self {
        let len = u64::from(pages) * 3 / 4 + 1;
        Self { words: Words::zeroed(len as usize), len }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.len * 8
    }

    /// The word of a key and its fingerprint, shifted into place.
    fn place(&self, tenant: TenantId, key: u64) -> (usize, u64) {
        let hash = (key ^ (u64::from(tenant.0) + 1).wrapping_mul(SPREAD)).wrapping_mul(SPREAD);
        let hash = hash ^ hash >> 32;
        let at = (u128::from(hash.wrapping_mul(SPREAD)) * u128::from(self.len)) >> 64;
        (at as usize, (1 + (hash >> 8) % FINGERPRINTS) << 1)
    }

    /// Remember a page that leaves.
    pub(super) fn remember(&self, tenant: TenantId, key: u64, proven: bool) {
        let (at, entry) = self.place(tenant, key);
        let word = &self.words[at];
        word.put(word.peek() << ENTRY_BITS & USED | entry | u64::from(proven));
    }

    /// Whether a key is remembered, and whether its page was proven; it is forgotten with this.
    pub(super) fn recall(&self, tenant: TenantId, key: u64) -> Option<bool> {
        let (at, entry) = self.place(tenant, key);
        let find = |word: u64| {
            // The lowest entry that is 0 where it differs from the wanted one shows, all six looked at at once.
            let diff = (word ^ (entry * ONES)) & !ONES;
            let zero = diff.wrapping_sub(ONES << 1) & !diff & ONES << (ENTRY_BITS - 1);
            (zero != 0).then(|| zero.trailing_zeros() + 1 - ENTRY_BITS)
        };
        let before = self.words[at].transit(|word| {
            let shift = find(word)?;
            let younger = word & ((1 << shift) - 1);
            Some(word >> (shift + ENTRY_BITS) << shift | younger)
        });
        let shift = find(before.ok()?)?;
        before.ok().map(|word| word >> shift & 1 == 1)
    }
}

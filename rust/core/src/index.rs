//! Content -> page: the prefix index, a fixed table without locks.
//!
//! # Words
//!
//! A bucket is one cache line: eight words of two entries of 32 bits each. An entry is
//!
//! | bits | field |
//! | --- | --- |
//! | 0 .. `id_bits` | page id + 1; 0: the entry is empty |
//! | `id_bits` .. 32 | tag: some more bits of the key, never 0 |
//!
//! `id_bits` is what the pool's number of pages needs (21 for a million pages, which leaves a tag of 11 bits). A key has
//! two buckets; an entry stands in either, and never moves. There are 5 entries for 4 pages (5 bytes a page): a table
//! that lists every page, replaced over and over, then refuses one insert in 12,000 (measured; with buckets of eight
//! 64-bit entries it would be one in 40, in twice the memory). A refused insert costs a later miss, and is counted.
//!
//! # Why a wrong hit can't be
//!
//! An entry proves nothing: it names a page that may have the key. [`Wanted::check`] reads the page's word, then its key,
//! payer, link and tokens, then the word again. They belong together when both reads show the same life of the page,
//! INDEXED, not LEAVING and not AWAY: names and tokens are written by whoever holds the page in one life, before INDEXED, and the
//! generation moves before anybody can write them again. A hit that also takes a reference does so with the generation
//! that was checked, so a page that was given out anew in between is a miss.
//!
//! A page continues the very page that its link names, or one with the same content (equal `prefix`), so a chain is
//! exact from its root on, by induction: the first page is linked to a digest of the sequence's context.
//!
//! # Invariant
//!
//! A page is listed under its key while it is INDEXED, and from just before: one that is refused is never INDEXED, so
//! whoever guesses an id instead of looking it up ([`Hints::onward`]) finds listed pages only. It is removed by whoever
//! owns it LEAVING, or by its holder, before its names change. Callers: pool.rs; audit.rs and evict.rs read.

use crate::{
    page::{Link, Pages},
    sync::{Atom, AtomicU64, Words},
    word::{Generation, PageId, PageRef, TenantId, page::PageWord},
};

/// Words of one bucket: a cache line.
const BUCKET: usize = 8;
/// Entries of one bucket.
const ENTRIES: usize = 2 * BUCKET;
/// Shortest tag.
const MIN_TAG_BITS: u32 = 4;
/// The most pages an index can list.
pub(crate) const MAX_PAGES: u32 = (1 << (u32::BITS - MIN_TAG_BITS)) - 1;
/// How many keys one [`Index::probe`] looks up ahead.
pub(crate) const AHEAD: usize = 16;

const SPREAD: u64 = 0xd6e8_feb8_6659_fd93;

/// What a wanted page has to continue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parent {
    /// A page that was found before it, and is held since.
    Page { at: PageRef, prefix: u64 },
    /// Nothing in the index: 63 bits that stand for all that came before.
    Digest(u64),
}

/// Everything that a page must have to be the one that is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// The index key.
    pub(crate) key: u64,
    /// Who pays for it: the scope it is shared under.
    pub(crate) scope: TenantId,
    /// What it continues.
    pub(crate) parent: Parent,
    /// Its tokens; `None`: they are not compared.
    pub(crate) tokens: Option<&'a [u32]>,
}

/// A page that was found and checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// Which life of which page.
    pub(crate) page: PageRef,
    /// The identity of its content.
    pub(crate) prefix: u64,
    /// It continues the very page it had to, and not a copy of it.
    pub(crate) exact: bool,
}

/// The same page, however it was found.
impl PartialEq for Seen {
    fn eq(&self, other: &Self) -> bool {
        (self.page, self.prefix) == (other.page, other.prefix)
    }
}

impl Seen {
    /// What the next page of the chain has to continue.
    #[inline]
    pub(crate) fn as_parent(self) -> Parent {
        Parent::Page { at: self.page, prefix: self.prefix }
    }
}

impl Wanted<'_> {
    /// Whether page `id` is the wanted one (see the head of this file).
    #[inline]
    pub(crate) fn check(&self, pages: &Pages, id: PageId) -> Option<Seen> {
        let line = pages.line(id);
        let word = line.read();
        if !can_hit(word) || line.key() != self.key || line.payer() != self.scope {
            return None;
        }
        let exact = self.continues(pages, line.link())?;
        if self.tokens.is_some_and(|tokens| !pages.has_tokens(id, tokens)) {
            return None;
        }
        let page = PageRef { id, generation: word.generation() };
        let seen = Seen { page, prefix: line.prefix(), exact };
        is_life(line.read(), page).then_some(seen)
    }

    /// Whether a page with this link continues the wanted parent: `Some(true)` if that itself, `Some(false)` if a copy of it.
    #[inline]
    fn continues(&self, pages: &Pages, link: Link) -> Option<bool> {
        match (self.parent, link) {
            (Parent::Digest(wanted), Link::Digest(found)) if wanted == found => Some(true),
            (Parent::Page { at, .. }, Link::Page(page)) if is_link_to(page, at) => Some(true),
            (Parent::Page { prefix, .. }, Link::Page(page)) => {
                (current_prefix(pages, page) == Some(prefix)).then_some(false)
            }
            _ => None,
        }
    }
}

#[inline]
pub(crate) fn can_hit(word: PageWord) -> bool {
    has_names(word) && !word.is_away()
}

/// The names are those of this life, wherever the page is.
#[inline]
fn has_names(word: PageWord) -> bool {
    word.is_indexed() && !word.is_leaving()
}

#[inline]
fn is_life(word: PageWord, page: PageRef) -> bool {
    can_hit(word) && word.generation() == page.generation
}

/// A generation as a link keeps it: without its top bit.
const LINKED: u32 = u32::MAX >> 1;

#[inline]
fn is_link_to(link: PageRef, page: PageRef) -> bool {
    link.id == page.id && is_linked_life(link.generation, page.generation)
}

#[inline]
pub(crate) fn is_linked_life(linked: Generation, now: Generation) -> bool {
    (linked.0 ^ now.0) & LINKED == 0
}

/// The page that this one, which was found, continues, if both still live. (What stands there by now may belong to a later life,
/// and name any page.)
pub(crate) fn page_before(pages: &Pages, page: PageRef) -> Option<PageRef> {
    let link = pages.link(page.id);
    let word = pages.read(page.id);
    let Link::Page(link) = link else { return None };
    if word.generation() != page.generation || !has_names(word) {
        return None;
    }
    let generation = pages.read(link.id).generation();
    is_linked_life(link.generation, generation).then_some(PageRef { id: link.id, generation })
}

/// The prefix of the page that a link names, if it still lives.
fn current_prefix(pages: &Pages, link: PageRef) -> Option<u64> {
    let lives = || {
        let word = pages.read(link.id);
        has_names(word) && is_linked_life(link.generation, word.generation())
    };
    if link.id.0 >= pages.len() || !lives() {
        return None;
    }
    let prefix = pages.prefix(link.id);
    lives().then_some(prefix)
}

/// First candidates of a few keys, from [`Index::probe`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hints([u32; AHEAD]);

/// The prefix index of a pool.
#[derive(Debug)]
pub(crate) struct Index {
    words: Words,
    buckets: u64,
    id_bits: u32,
    refused: AtomicU64,
}

/// Where there is room for an entry: a bucket, and one of its slots if there is any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gap {
    bucket: usize,
    slot: Option<u32>,
    tag: u32,
}

/// The top bits of those halves of a word that are 0. (A half of 1 above one of 0 would look like one as well: an entry
/// has bits of its tag, so there is none.)
#[inline]
fn zero_halves(word: u64) -> u64 {
    const ONES: u64 = 1 << 32 | 1;
    word.wrapping_sub(ONES) & !word & ONES << 31
}

/// The slots whose bits are set: the low halves of a bucket's words have the bits from 0 on, the high ones those from 32 on.
#[inline]
fn slots(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let slot = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (slot < u64::BITS).then_some(slot)
    })
}

/// Where a key may stand, and how its entries look.
#[derive(Clone, Copy)]
struct Place {
    buckets: [usize; 2],
    tag: u32,
}

impl Place {
    /// The bucket with more room, and its first free slot.
    #[inline]
    fn roomier(self, free: [u64; 2]) -> Gap {
        let nth = usize::from(free[1].count_ones() > free[0].count_ones());
        Gap { bucket: self.buckets[nth], slot: slots(free[nth]).next(), tag: self.tag }
    }
}

impl Hints {
    /// The pages that come after `last` if a chain goes on as it came there from `before`: pages that were taken together
    /// have ids in a row, up or down, and often stay together. Only a guess, which a lookup checks like any other.
    pub(crate) fn onward(pages: &Pages, before: PageId, last: PageId) -> Option<Self> {
        let step = i64::from(last.0) - i64::from(before.0);
        let end = i64::from(last.0) + step * AHEAD as i64;
        let fits = step.abs() == 1 && (0..i64::from(pages.len())).contains(&end);
        fits.then(|| {
            Self(std::array::from_fn(|nth| (i64::from(last.0) + step * (nth as i64 + 1)) as u32 + 1))
        })
    }
}

impl Index {
    /// An empty index for `pages` pages, at most [`MAX_PAGES`].
    pub(crate) fn new(pages: u32) -> Self {
        debug_assert!(pages <= MAX_PAGES);
        // Five entries for four pages; two buckets more, so that a tiny pool has room as well.
        let buckets = (u64::from(pages) * 5).div_ceil(4 * ENTRIES as u64) + 2;
        Self {
            words: Words::zeroed(buckets as usize * BUCKET),
            buckets,
            id_bits: (u32::BITS - pages.leading_zeros()).max(1),
            refused: AtomicU64::new(0),
        }
    }

    /// How many inserts found both buckets full.
    #[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
    pub(crate) fn refused(&self) -> u64 {
        self.refused.peek()
    }

    /// Bytes of the table.
    pub(crate) fn bytes(&self) -> u64 {
        self.buckets * 8 * BUCKET as u64
    }

    #[inline]
    fn place(&self, key: u64) -> Place {
        let scale = |hash: u64, n: u64| ((u128::from(hash) * u128::from(n)) >> 64) as usize;
        let first = scale(key, self.buckets);
        let second = scale(key.rotate_left(32), self.buckets);
        let tags = (1 << (u32::BITS - self.id_bits)) - 1;
        let tag = 1 + scale(key.wrapping_mul(SPREAD), tags) as u32;
        Place { buckets: [first, second], tag: tag << self.id_bits }
    }

    #[inline]
    fn bucket(&self, bucket: usize) -> &[AtomicU64; BUCKET] {
        &self.words.as_chunks().0[bucket]
    }

    /// The slots of a bucket with this tag. Two entries at a time and without a branch for each: most of them are others'.
    #[inline]
    fn same(&self, bucket: usize, tag: u32) -> u64 {
        let both = |half: u32| u64::from(half) << 32 | u64::from(half);
        let (tag, tags) = (both(tag), both(u32::MAX << self.id_bits));
        let same = |word: &AtomicU64| zero_halves((word.get() ^ tag) & tags);
        self.bucket(bucket).iter().enumerate().fold(0, |bits, (nth, word)| bits | same(word) >> (31 - nth))
    }

    /// The slots of a bucket without an entry.
    #[inline]
    fn free(&self, bucket: usize) -> u64 {
        let free = |word: &AtomicU64| zero_halves(word.get());
        self.bucket(bucket).iter().enumerate().fold(0, |bits, (nth, word)| bits | free(word) >> (31 - nth))
    }

    /// [`Self::same`] and [`Self::free`] in one pass.
    #[inline]
    fn same_and_free(&self, bucket: usize, tag: u32) -> (u64, u64) {
        let both = |half: u32| u64::from(half) << 32 | u64::from(half);
        let (tag, tags) = (both(tag), both(u32::MAX << self.id_bits));
        self.bucket(bucket).iter().enumerate().fold((0, 0), |(same, free), (nth, word)| {
            let word = word.get();
            let shift = 31 - nth;
            (same | zero_halves((word ^ tag) & tags) >> shift, free | zero_halves(word) >> shift)
        })
    }

    /// The page of an entry that a scan found, if the entry is still the tag's.
    #[inline]
    fn page_at(&self, bucket: usize, slot: u32, tag: u32) -> Option<PageId> {
        let entry = self.bucket(bucket)[slot as usize % 32].get() >> (slot & 32);
        // With its tag taken off, an entry has only its page's bits left.
        let page = entry as u32 ^ tag;
        if page >> self.id_bits == 0 { page.checked_sub(1).map(PageId) } else { None }
    }

    /// The first answer of `f` for a page that may have this key.
    #[inline]
    pub(crate) fn find<R>(&self, key: u64, mut f: impl FnMut(PageId) -> Option<R>) -> Option<R> {
        let place = self.place(key);
        for (nth, &bucket) in place.buckets.iter().enumerate() {
            if nth == 1 && bucket == place.buckets[0] {
                break;
            }
            for slot in slots(self.same(bucket, place.tag)) {
                if let Some(answer) = self.page_at(bucket, slot, place.tag).and_then(&mut f) {
                    return Some(answer);
                }
            }
        }
        None
    }

    /// Find the wanted page. `take` makes it the caller's (takes the reference, say); when it answers `None`, another
    /// page with the same content is tried. The one that continues the very page it has to comes before its copies.
    #[inline]
    pub(crate) fn lookup<R>(
        &self,
        pages: &Pages,
        wanted: &Wanted<'_>,
        mut take: impl FnMut(Seen) -> Option<R>,
    ) -> Option<R> {
        let mut copy = None;
        let exact = self.find(wanted.key, |id| {
            let seen = wanted.check(pages, id)?;
            if seen.exact {
                return take(seen);
            }
            copy = copy.or(Some(seen));
            None
        });
        exact.or_else(|| match copy {
            None => None,
            Some(seen) => {
                take(seen).or_else(|| self.find(wanted.key, |id| wanted.check(pages, id).and_then(&mut take)))
            }
        })
    }

    /// Fetch what looking up these keys (at most [`AHEAD`]) will read, all at once instead of one after the other.
    pub(crate) fn probe(&self, pages: &Pages, keys: &[u64]) -> Hints {
        let mut hints = Hints([0; AHEAD]);
        let mut touched = 0;
        for &key in keys.iter().take(AHEAD) {
            let place = self.place(key);
            touched ^= self.bucket(place.buckets[0])[0].peek() ^ self.bucket(place.buckets[1])[0].peek();
        }
        for (hint, &key) in hints.0.iter_mut().zip(keys) {
            *hint = self.find(key, |id| Some(id.0 + 1)).unwrap_or(0);
        }
        for &hint in hints.0.iter().filter(|&&hint| hint != 0) {
            touched ^= pages.touch(PageId(hint - 1));
        }
        // The reads must not be left out because nobody uses them.
        std::hint::black_box(touched);
        hints
    }

    /// [`Self::lookup`] of the `nth` key of a probe.
    #[inline]
    pub(crate) fn lookup_probed<R>(
        &self,
        pages: &Pages,
        hints: &Hints,
        nth: usize,
        wanted: &Wanted<'_>,
        mut take: impl FnMut(Seen) -> Option<R>,
    ) -> Option<R> {
        let hint = hints.0[nth].checked_sub(1)?;
        let first = wanted.check(pages, PageId(hint)).filter(|seen| seen.exact).and_then(&mut take);
        first.or_else(|| self.lookup(pages, wanted, take))
    }

    /// [`Self::lookup`] by somebody who is about to insert a page with the same names: also where to insert it. One pass over
    /// both buckets does for both.
    pub(crate) fn lookup_to_insert(&self, pages: &Pages, wanted: &Wanted<'_>) -> (Option<Seen>, Gap) {
        let place = self.place(wanted.key);
        let scans = place.buckets.map(|bucket| self.same_and_free(bucket, place.tag));
        let seen = place.buckets.iter().zip(scans).find_map(|(&bucket, (same, _))| {
            slots(same)
                .find_map(|slot| self.page_at(bucket, slot, place.tag).and_then(|id| wanted.check(pages, id)))
        });
        (seen, place.roomier(scans.map(|(_, free)| free)))
    }

    /// List page `id` under `key`, in this gap if it is still one; `false`: there is no room in either bucket.
    pub(crate) fn insert_into_gap(&self, key: u64, id: PageId, gap: Gap) -> bool {
        self.fill(gap, id) || self.insert(key, id)
    }

    /// List page `id` under `key`; `false`: there is no room.
    pub(crate) fn insert(&self, key: u64, id: PageId) -> bool {
        let place = self.place(key);
        loop {
            let gap = place.roomier(place.buckets.map(|bucket| self.free(bucket)));
            if gap.slot.is_none() {
                self.refused.tally(1);
                return false;
            }
            if self.fill(gap, id) {
                return true;
            }
        }
    }

    fn fill(&self, Gap { bucket, slot, tag }: Gap, id: PageId) -> bool {
        let entry = tag | (id.0 + 1);
        slot.is_some_and(|slot| {
            let shift = slot & 32;
            self.bucket(bucket)[slot as usize % 32]
                .transit(|now| ((now >> shift) as u32 == 0).then_some(now | u64::from(entry) << shift))
                .is_ok()
        })
    }

    /// Take page `id` out of the list of `key`; `false`: it isn't there (its insert was refused).
    pub(crate) fn remove(&self, key: u64, id: PageId) -> bool {
        let place = self.place(key);
        let entry = place.tag | (id.0 + 1);
        place.buckets.iter().any(|&bucket| {
            // It stands there once, so the first that is equal ends the scan.
            self.bucket(bucket).iter().any(|word| {
                let now = word.get();
                let shift = if now as u32 == entry { 0 } else { 32 };
                let is_it = |now: u64| (now >> shift) as u32 == entry;
                is_it(now)
                    && word.transit(|now| is_it(now).then_some(now & !(u64::from(u32::MAX) << shift))).is_ok()
            })
        })
    }

    /// Whether page `id`, which the caller owns, is listed (for the audit).
    pub(crate) fn lists(&self, key: u64, id: PageId) -> bool {
        self.find(key, |found| (found == id).then_some(())).is_some()
    }

    /// Whether another page with the content of `id` can be hit. The caller owns `id` (it is LEAVING, or held), so its
    /// names stand still.
    pub(crate) fn has_copy(&self, pages: &Pages, id: PageId) -> bool {
        let (key, payer, link, prefix) = (pages.key(id), pages.payer(id), pages.link(id), pages.prefix(id));
        self.find(key, |other| {
            let word = pages.read(other);
            let same = other != id
                && can_hit(word)
                && pages.key(other) == key
                && pages.payer(other) == payer
                // Two that were published at the same moment don't know of each other, and have their own prefixes.
                && (pages.prefix(other) == prefix
                    || same_link(pages, link, pages.link(other)) && pages.same_tokens(id, other));
            let page = PageRef { id: other, generation: word.generation() };
            (same && is_life(pages.read(other), page)).then_some(())
        })
        .is_some()
    }
}

fn same_link(pages: &Pages, a: Link, b: Link) -> bool {
    match (a, b) {
        (Link::Digest(a), Link::Digest(b)) => a == b,
        (Link::Page(a), Link::Page(b)) => {
            let prefix = current_prefix(pages, a);
            a == b || (prefix.is_some() && prefix == current_prefix(pages, b))
        }
        _ => false,
    }
}

#[cfg(all(test, any(kvalloc_loom, kvalloc_shuttle)))]
mod models;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

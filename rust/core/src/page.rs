//! WHAT lives: one cache line per page.
//!
//! A page is a logical block of KV; where its bytes are is its [`Location`]. The table is a flat array of eight words a
//! page, all 0 at first, so a new pool touches no memory:
//!
//! | word | content | written by |
//! | --- | --- | --- |
//! | 0 | [`PageWord`]: generation, references, pins, state | every transition, by compare-exchange |
//! | 1 | [`Location`] | whoever took the page; later a move |
//! | 2 | key: the hash under which the index lists it | the publisher, before INDEXED |
//! | 3 | link: what this page continues ([`Link`]) | the publisher, before INDEXED |
//! | 4 | prefix: the identity of the content from the root to here ([`PageRef`] bits of the first page that had it) | the publisher |
//! | 5 | payer (bits 0-23), protection (24-27), its expiry (28-39), children in the index (40-63) | taker; children by whoever publishes or evicts a child |
//! | 6 | order node: next (evict.rs) | evict.rs |
//! | 7 | order node: value, XORed with the page's own index so that 0 is the start | evict.rs |
//!
//! Beside them the tokens of every published page, for the exact comparison on a hit: `page_tokens` ids of 32 bits, two
//! to a word.
//!
//! # Invariant
//!
//! Words 2-4 and the tokens are written only by the one thread that publishes the page (it holds it and it is not
//! INDEXED), or by the taker; they are read by anybody, who checks the page word before and after. `children` counts
//! pages in the index whose link names this page; only a held page gains children, so a leaf that is cached stays a leaf.
//!
//! Callers: pool.rs, sequence.rs, index.rs (reads), evict.rs (words 6, 7 and the page word), audit.rs (reads).

use crate::{
    sync::{Atom, AtomicU64, Words},
    word::{
        ClassId, Generation, PageId, PageRef, TenantId,
        page::{Location, OPEN, OUTSIDE, PageWord},
    },
};

/// Words of one page.
pub(crate) const STRIDE: usize = 8;
const _: () = assert!(STRIDE * 8 == 64, "a page is a cache line");

const WORD: usize = 0;
const LOCATION: usize = 1;
const KEY: usize = 2;
const LINK: usize = 3;
const PREFIX: usize = 4;
const PAYER: usize = 5;
const NODE_NEXT: usize = 6;
const NODE_VALUE: usize = 7;

const PAYER_BITS: u32 = 24;
const PAYER_MASK: u64 = (1 << PAYER_BITS) - 1;
const PROTECT_SHIFT: u32 = 24;
const PROTECT_MASK: u64 = ((1 << 16) - 1) << PROTECT_SHIFT;
const CHILD_SHIFT: u32 = 40;
const CHILD: u64 = 1 << CHILD_SHIFT;

/// The most tenants a pool can have.
pub const MAX_TENANTS: u32 = PAYER_MASK as u32 + 1;

/// What a page continues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// It continues this very page: the previous one of its sequence, or for a page of another group the page of the
    /// first full group at the same place.
    Page(PageRef),
    /// It continues nothing that is in the index: a keyed digest of all that came before it (63 bits). At a sequence's
    /// start that is the adapter and the caller's key; in a model without a full group, also all tokens before.
    Digest(u64),
}

impl Link {
    const DIGEST: u64 = 1 << 63;

    fn to_words(self) -> u64 {
        match self {
            // A generation's top bit is given up to tell the two apart.
            Self::Page(page) => page.to_bits() & !Self::DIGEST,
            Self::Digest(digest) => digest | Self::DIGEST,
        }
    }
    fn from_words(bits: u64) -> Self {
        if bits & Self::DIGEST != 0 {
            Self::Digest(bits & !Self::DIGEST)
        } else {
            Self::Page(PageRef::from_bits(bits))
        }
    }
}

/// The page table of a pool.
#[derive(Debug)]
pub(crate) struct Pages {
    words: Words,
    tokens: Words,
    pages: u32,
    nodes: u32,
    token_words: usize,
    page_tokens: usize,
}

impl Pages {
    /// A table of `pages` pages and `nodes` further order nodes (evict.rs needs one for each order's start).
    pub(crate) fn new(pages: u32, nodes: u32, page_tokens: u32) -> Self {
        let token_words = (page_tokens as usize).div_ceil(2);
        let table = Self {
            // One more, in which no page ever lives.
            words: Words::zeroed((pages as usize + nodes as usize + 1) * STRIDE),
            tokens: Words::zeroed(pages as usize * token_words),
            pages,
            nodes,
            token_words,
            page_tokens: page_tokens as usize,
        };
        table.set_location(table.gone().id, Location::gone(ClassId(0)));
        table
    }

    /// What stands in a table for a page that was cut, and whose number has gone back: held by nobody, and nowhere.
    #[inline]
    pub(crate) fn gone(&self) -> PageRef {
        PageRef { id: PageId(self.pages + self.nodes), generation: Generation(0) }
    }

    /// How many pages there are.
    pub(crate) fn len(&self) -> u32 {
        self.pages
    }

    /// The words of a page, looked up once for all that is to be done with them.
    #[inline]
    pub(crate) fn line(&self, id: PageId) -> Line<'_> {
        self.node(id.0)
    }

    #[inline]
    fn node(&self, node: u32) -> Line<'_> {
        Line(&self.words.as_chunks().0[node as usize])
    }

    #[inline]
    pub(crate) fn word(&self, id: PageId) -> &AtomicU64 {
        &self.line(id).0[WORD]
    }

    #[inline]
    pub(crate) fn read(&self, id: PageId) -> PageWord {
        self.line(id).read()
    }

    /// Apply a transition: the word after it, or the word that has no such transition.
    #[inline]
    pub(crate) fn transit(
        &self,
        id: PageId,
        f: impl Fn(PageWord) -> Option<PageWord>,
    ) -> Result<PageWord, PageWord> {
        self.line(id).transit(f)
    }

    /// Apply a transition to a page that the caller owns alone (its id is claimed, or it is LEAVING): no transition of
    /// anybody else starts from such a word, so a store does.
    #[inline]
    pub(crate) fn step(&self, id: PageId, f: impl Fn(PageWord) -> Option<PageWord>) -> PageWord {
        let now = self.read(id);
        let next = f(now);
        debug_assert!(next.is_some(), "{id} is the caller's alone, and yet {now:?}");
        let next = next.unwrap_or(now);
        self.word(id).put(next.0);
        next
    }

    /// Apply a transition that also answers something.
    #[inline]
    pub(crate) fn transit_with<R>(
        &self,
        id: PageId,
        f: impl Fn(PageWord) -> Option<(PageWord, R)>,
    ) -> Result<R, PageWord> {
        self.line(id).transit_with(f)
    }

    #[inline]
    pub(crate) fn location(&self, id: PageId) -> Location {
        self.line(id).location()
    }
    #[inline]
    pub(crate) fn set_location(&self, id: PageId, location: Location) {
        self.line(id).0[LOCATION].put(location.0);
    }
    /// Move: the new location, if the old one still holds.
    pub(crate) fn swap_location(&self, id: PageId, from: Location, to: Location) -> Result<(), Location> {
        self.line(id).0[LOCATION].cas(from.0, to.0).map(drop).map_err(Location)
    }

    /// Steps write to where it lies, so nobody else moves it.
    pub(crate) fn set_open(&self, id: PageId) {
        self.line(id).0[LOCATION].set(OPEN);
    }
    /// They don't any more. (A page that has gone meanwhile lies nowhere, and that stays so.)
    #[inline]
    pub(crate) fn clear_open(&self, id: PageId) {
        if self.location(id).is_open() {
            self.line(id).0[LOCATION].clear(OPEN);
        }
    }
    /// An engine with tables of its own is told where it lies.
    pub(crate) fn set_outside(&self, id: PageId) {
        self.line(id).0[LOCATION].set(OUTSIDE);
    }

    #[inline]
    pub(crate) fn key(&self, id: PageId) -> u64 {
        self.line(id).key()
    }
    #[inline]
    pub(crate) fn link(&self, id: PageId) -> Link {
        self.line(id).link()
    }
    /// The identity of the content from the root to this page's end.
    #[inline]
    pub(crate) fn prefix(&self, id: PageId) -> u64 {
        self.line(id).prefix()
    }
    /// Give a page its content's names, before it is INDEXED.
    #[inline]
    pub(crate) fn set_names(&self, id: PageId, key: u64, link: Link, prefix: u64) {
        let line = self.line(id);
        line.0[KEY].put(key);
        line.0[LINK].put(link.to_words());
        line.0[PREFIX].put(prefix);
    }

    #[inline]
    pub(crate) fn payer(&self, id: PageId) -> TenantId {
        self.line(id).payer()
    }
    /// The taker's first word: who pays; no children, no protection.
    #[inline]
    pub(crate) fn set_payer(&self, id: PageId, payer: TenantId) {
        self.line(id).0[PAYER].put(u64::from(payer.0));
    }
    #[inline]
    pub(crate) fn children(&self, id: PageId) -> u32 {
        (self.line(id).0[PAYER].get() >> CHILD_SHIFT) as u32
    }
    /// The same, for whoever has just changed the page's word and has to know of every child that left before: either this
    /// sees it, or who takes the child away sees the word.
    #[inline]
    pub(crate) fn children_now(&self, id: PageId) -> u32 {
        (self.line(id).0[PAYER].plus(0) >> CHILD_SHIFT) as u32
    }
    /// One more indexed child; `false` when the count is full (the child then stays out of the index).
    #[inline]
    pub(crate) fn add_child(&self, id: PageId) -> bool {
        self.line(id).0[PAYER]
            .transit(|w| if w >> CHILD_SHIFT == PAYER_MASK { None } else { Some(w + CHILD) })
            .is_ok()
    }
    /// The first indexed child, of a page that nobody but the caller can find yet: so nobody else counts children here. (What
    /// a hand that still has the page from before takes of its protection at that moment may be lost.)
    #[inline]
    pub(crate) fn expect_child(&self, id: PageId) {
        let word = &self.line(id).0[PAYER];
        word.put(word.get() + CHILD);
    }
    /// One indexed child less; whether it was the last one.
    #[inline]
    pub(crate) fn remove_child(&self, id: PageId) -> bool {
        self.line(id).0[PAYER].minus(CHILD) >> CHILD_SHIFT == 1
    }
    /// Protection of 16 bits: level (4) and expiry (12), as evict.rs reads them.
    #[inline]
    pub(crate) fn protection(&self, id: PageId) -> u16 {
        ((self.line(id).0[PAYER].get() & PROTECT_MASK) >> PROTECT_SHIFT) as u16
    }
    #[inline]
    pub(crate) fn set_protection(&self, id: PageId, protection: u16) {
        let bits = u64::from(protection) << PROTECT_SHIFT;
        // Never refused: the closure always answers.
        let _ = self.line(id).0[PAYER].transit(|w| Some(w & !PROTECT_MASK | bits));
    }

    /// The order's link word of node `node` (a page id, or above them an order's first node).
    #[inline]
    pub(crate) fn node_next(&self, node: u32) -> &AtomicU64 {
        &self.node(node).0[NODE_NEXT]
    }
    /// The order's value word of node `node`.
    #[inline]
    pub(crate) fn node_value(&self, node: u32) -> &AtomicU64 {
        &self.node(node).0[NODE_VALUE]
    }

    #[inline]
    fn tokens(&self, id: PageId) -> &[AtomicU64] {
        &self.tokens[id.as_usize() * self.token_words..][..self.token_words]
    }

    /// Store the tokens of a page; `tokens.len() == page_tokens`.
    #[inline]
    pub(crate) fn set_tokens(&self, id: PageId, tokens: &[u32]) {
        debug_assert_eq!(tokens.len(), self.page_tokens);
        match (self.tokens(id).as_array(), tokens.as_array()) {
            // The same code, unrolled.
            (Some::<&[_; USUAL_WORDS]>(words), Some::<&[_; 2 * USUAL_WORDS]>(tokens)) => store(words, tokens),
            _ => store(self.tokens(id), tokens),
        }
    }
    /// Whether the page's stored tokens are exactly these.
    #[inline]
    pub(crate) fn has_tokens(&self, id: PageId, tokens: &[u32]) -> bool {
        if tokens.len() != self.page_tokens {
            return false;
        }
        match (self.tokens(id).as_array(), tokens.as_array()) {
            (Some::<&[_; USUAL_WORDS]>(words), Some::<&[_; 2 * USUAL_WORDS]>(tokens)) => equal(words, tokens),
            _ => equal(self.tokens(id), tokens),
        }
    }
    /// Whether two pages store the same tokens.
    pub(crate) fn same_tokens(&self, a: PageId, b: PageId) -> bool {
        self.tokens(a).iter().zip(self.tokens(b)).all(|(a, b)| a.get() == b.get())
    }
    /// Read something of a page's line and of its tokens, so that they are near when they are needed.
    #[inline]
    pub(crate) fn touch(&self, id: PageId) -> u64 {
        self.word(id).peek() ^ self.tokens[id.as_usize() * self.token_words].peek()
    }
}

/// Words of the tokens of a page of the default size.
const USUAL_WORDS: usize = 8;

/// Tokens as they are stored, two to a word.
#[inline(always)]
fn packed(tokens: &[u32]) -> impl Iterator<Item = u64> {
    let (pairs, rest) = tokens.as_chunks::<2>();
    let pairs = pairs.iter().map(|&[first, second]| u64::from(first) | u64::from(second) << 32);
    pairs.chain(rest.iter().map(|&last| u64::from(last)))
}

#[inline(always)]
fn store(words: &[AtomicU64], tokens: &[u32]) {
    words.iter().zip(packed(tokens)).for_each(|(word, pair)| word.put(pair));
}

#[inline(always)]
fn equal(words: &[AtomicU64], tokens: &[u32]) -> bool {
    words.iter().zip(packed(tokens)).fold(0, |diff, (word, pair)| diff | word.get() ^ pair) == 0
}

/// The words of one page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line<'a>(&'a [AtomicU64; STRIDE]);

impl Line<'_> {
    #[inline]
    pub(crate) fn read(self) -> PageWord {
        PageWord(self.0[WORD].get())
    }
    #[inline]
    pub(crate) fn transit(self, f: impl Fn(PageWord) -> Option<PageWord>) -> Result<PageWord, PageWord> {
        self.transit_with(|word| f(word).map(|next| (next, next)))
    }
    #[inline]
    pub(crate) fn transit_with<R>(
        self,
        f: impl Fn(PageWord) -> Option<(PageWord, R)>,
    ) -> Result<R, PageWord> {
        let word = &self.0[WORD];
        let mut now = word.first();
        loop {
            let Some((next, answer)) = f(PageWord(now)) else { return Err(PageWord(now)) };
            match word.cas(now, next.0) {
                Ok(_) => return Ok(answer),
                Err(found) => now = found,
            }
        }
    }
    #[inline]
    pub(crate) fn location(self) -> Location {
        Location(self.0[LOCATION].get())
    }
    #[inline]
    pub(crate) fn key(self) -> u64 {
        self.0[KEY].get()
    }
    #[inline]
    pub(crate) fn link(self) -> Link {
        Link::from_words(self.0[LINK].get())
    }
    #[inline]
    pub(crate) fn prefix(self) -> u64 {
        self.0[PREFIX].get()
    }
    #[inline]
    pub(crate) fn payer(self) -> TenantId {
        TenantId((self.0[PAYER].get() & PAYER_MASK) as u32)
    }
}

//! Which cached page goes first: an order per tenant that adapts to its traffic and that scans don't empty.
//!
//! # Policy
//!
//! CAR (clock with adaptive replacement), with two changes for prefixes. A tenant's cached pages stand in two queues: new
//! ones, and proven ones, which were hit again or came back soon after they had left. A page stands in the order once,
//! from the moment nobody holds it; a hit only sets its VISITED bit. The hand takes the first page of the queue that is
//! above its share and
//!
//! | finds | does |
//! | --- | --- |
//! | held or pinned | takes it out of the order: it comes back when it is released |
//! | visited | clears the bit, puts it last among the proven |
//! | others in the index continue it | sets it aside: it comes back, ahead of all others, when the last of them has left |
//! | a copy uses its frame | the same, until the copy has ended |
//! | protected, not expired | spends one level of its protection, puts it last in the longer queue |
//! | none of these | evicts it: LEAVING, and its key becomes a ghost |
//!
//! So what can't leave is met once, and not again and again. As a rule it is not even met: sequences let go of children before
//! parents, so a prompt stands in the order as it leaves, and the hand that took a child knows that it does not count any more.
//! Visits come first in the table, for the same reason: the pages of a prompt that was hit stay together. If they were set aside
//! with a visit to be used up, each would come back alone, when the one behind it has left, and stay for a round of its own.
//!
//! When ghosts come back the share of the queue that lost them grows ([`Orders::recall`]), by more if that queue's
//! ghosts are the fewer, as in ARC. The first change: a sequence comes back with a whole run of pages, so the run is
//! judged as one, up to where most of its pages are ghosts. Single false or lost ghosts then don't matter, and
//! fingerprints of nine bits do as well as whole keys. The second: children before parents.
//!
//! Hit rates on a public trace, and how to measure them again: `benches/eviction_trace.rs`.
//!
//! # Words of a tenant, one cache line
//!
//! | word | content |
//! | --- | --- |
//! | 0, 1 | new: head and tail (`evict/queue.rs`) |
//! | 2, 3 | proven: head and tail |
//! | 4 | how many stand in them: new (0-31), proven (32-63); counted before a page is linked, until after it is taken |
//! | 5 | the share of the new (0-23, of 2^24, XOR [`START_SHARE`]); ghosts made of new (24-43) and of proven pages (44-63), halved together |
//! | 6 | ahead: the pages that were set aside and can leave now, the last one on top (`evict/queue.rs`); not counted in word 4 |
//!
//! # Invariant
//!
//! A QUEUED page stands in one queue of its payer or ahead of them, or in the hand of one thread inside [`Orders::victims`],
//! [`Orders::enqueue`] or [`Orders::relist`]. A thread that stops with some pages in its hand keeps these few from being evicted,
//! and stops nobody: hits, releases and the other pages go on. Two hands in one order share its pages; who meets a page whose
//! child the other has sets it aside. Who gets a page from `victims` owns it LEAVING.
//!
//! A cached page that is not QUEUED was set aside: it has a child in the index, or is LEASED, or the thread that has just changed
//! that is about to put it back. Whoever sets a page aside, takes its last child away or ends its lease looks at both words
//! afterwards ([`Orders::relist`]), at the one that it did not change by adding to it or exchanging it. So of two who change one
//! word each at the same time, one sees what the other did, and who sees that nothing keeps the page sets QUEUED, once.
//!
//! A page with children is never evicted: only a held page gains a child, a hold sets VISITED, and nobody but the hand
//! clears it; so "no children" still holds if the page's word did not change. A child that the same hand has just taken
//! does not count: it can't be hit any more.
//!
//! Callers: pool.rs, life.rs, keep.rs; sequence/body.rs and face.rs ask the ghosts. Which tenant has to give is not decided here.

mod ghost;
mod queue;

#[cfg(all(test, any(kvalloc_loom, kvalloc_shuttle)))]
mod models;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use crate::{
    index::{is_linked_life, page_before},
    page::Pages,
    sync::{Atom, AtomicU64, Words},
    word::{PageId, PageRef, TenantId, page::PageWord},
};
use ghost::Ghosts;
use queue::{Hand, Node, Queue, Spares, Stack};

/// Order nodes that [`Pages::new`] must have beyond its pages, for each tenant.
pub(crate) const NODES_PER_TENANT: u32 = 2;

const STRIDE: usize = 8;
const COUNTS: usize = 4;
const SHARE: usize = 5;
const AHEAD: usize = 6;

const ONE_SHARE: u64 = 1 << 24;
/// A tenant starts close to least-recently-used: seven tenths for the new.
const START_SHARE: u64 = ONE_SHARE / 10 * 7;
const LOST_BITS: u32 = 20;
const LOST_MAX: u64 = (1 << LOST_BITS) - 1;

/// How many protected pages one call spares.
const SPARED: u32 = 16;
/// Changes of the share are never bigger than in an order of so many pages.
const LEAST_ORDER: u64 = 64;

/// The two halves of an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Half {
    New = 0,
    Proven = 1,
}

impl Half {
    const fn count(self) -> u64 {
        match self {
            Self::New => 1,
            Self::Proven => 1 << 32,
        }
    }
    const fn other(self) -> Self {
        match self {
            Self::New => Self::Proven,
            Self::Proven => Self::New,
        }
    }
}

/// How many pages stand in a tenant's order; a page that is just moving may be counted already or still.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Queued {
    /// New pages.
    pub(crate) new: u32,
    /// Pages that were hit again, or came back.
    pub(crate) proven: u32,
}

impl Queued {
    fn all(self) -> u64 {
        u64::from(self.new) + u64::from(self.proven)
    }
}

/// A bias of a page against eviction, in 16 bits: level (0-3) and, from bit 4, when it ends: 0 never, else 1 + tick
/// modulo 4095. Ticks are the pool's coarse clock; an end more than 2,047 ticks away is not told from one in the past.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Protection(pub(crate) u16);

impl Protection {
    /// The strongest level: so many times the hand passes.
    pub(crate) const MAX_LEVEL: u16 = 15;
    const TICKS: u64 = 4095;

    pub(crate) fn new(level: u16, until: Option<u64>) -> Self {
        let end = until.map_or(0, |tick| 1 + (tick % Self::TICKS) as u16);
        Self(level.min(Self::MAX_LEVEL) | end << 4)
    }
    /// What is left of it when the hand passes at tick `now`; `None`: nothing protects the page.
    fn spend(self, now: u64) -> Option<Self> {
        let level = self.0 & Self::MAX_LEVEL;
        let over = match u64::from(self.0 >> 4) {
            0 => false,
            end => (now % Self::TICKS + Self::TICKS - (end - 1)) % Self::TICKS <= Self::TICKS / 2,
        };
        if level == 0 || over { None } else { Some(Self(self.0 - 1)) }
    }
}

/// What the hand does with a page it holds.
enum Verdict {
    /// It has been evicted.
    Out,
    /// It is not in the order any more.
    Dropped,
    /// It is not in the order any more, until nothing keeps it: to be asked again at once, for that may be so already.
    Aside,
    /// To the end of this half; `stuck`: it can't leave, and can't be set aside either.
    Back { to: Half, stuck: bool },
}

/// The eviction orders of all tenants, and the ghosts.
#[derive(Debug)]
pub(crate) struct Orders {
    words: Words,
    spares: Spares,
    ghosts: Ghosts,
    pages: u32,
    tenants: u32,
}

impl Orders {
    /// Empty orders for tenants 0 .. `tenants`, over a page table with `pages` pages and
    /// `NODES_PER_TENANT * tenants` further nodes.
    pub(crate) fn new(tenants: u32, pages: u32) -> Self {
        Self {
            words: Words::zeroed(tenants as usize * STRIDE),
            spares: Spares::new(pages),
            ghosts: Ghosts::new(pages),
            pages,
            tenants,
        }
    }

    /// Bytes of the orders, spare nodes and ghosts.
    pub(crate) fn bytes(&self) -> u64 {
        self.spares.bytes() + self.ghosts.bytes() + u64::from(self.tenants) * 8 * STRIDE as u64
    }

    fn word(&self, tenant: TenantId, word: usize) -> &AtomicU64 {
        debug_assert!(tenant.0 < self.tenants);
        &self.words[tenant.as_usize() * STRIDE + word]
    }

    fn queue(&self, tenant: TenantId, half: Half) -> Queue<'_> {
        let nth = half as usize;
        Queue {
            head: self.word(tenant, 2 * nth),
            tail: self.word(tenant, 2 * nth + 1),
            first: self.pages + NODES_PER_TENANT * tenant.0 + nth as u32,
        }
    }

    fn ahead(&self, tenant: TenantId) -> Stack<'_> {
        Stack(self.word(tenant, AHEAD))
    }

    /// How many pages stand in a tenant's queues.
    pub(crate) fn queued(&self, tenant: TenantId) -> Queued {
        let counts = self.word(tenant, COUNTS).get();
        Queued { new: counts as u32, proven: (counts >> 32) as u32 }
    }

    /// Put a page into its payer's order. The caller's transition has just set QUEUED.
    pub(crate) fn enqueue(&self, pages: &Pages, tenant: TenantId, id: PageId) {
        self.enqueue_all(pages, tenant, &[id]);
    }

    /// Put pages into their payer's order, one behind the other.
    pub(crate) fn enqueue_all(&self, pages: &Pages, tenant: TenantId, ids: &[PageId]) {
        for ids in ids.chunks(u64::BITS as usize) {
            // Looked at once: a page may be hit, made private and published anew before it is linked, which changes its half.
            let proven =
                (0..).zip(ids).fold(0, |set, (n, &id)| set | u64::from(pages.read(id).is_proven()) << n);
            let new = !proven & u64::MAX >> (u64::BITS as usize - ids.len());
            let halves = [(Half::New, new), (Half::Proven, proven)];
            let counts = halves.map(|(half, set)| half.count() * u64::from(set.count_ones()));
            self.word(tenant, COUNTS).plus(counts.iter().sum());
            for (half, set) in halves.into_iter().filter(|&(_, set)| set != 0) {
                let items = (0..).zip(ids).filter(|&(n, _)| set >> n & 1 == 1);
                self.queue(tenant, half).push(pages, items.map(|(_, &id)| (id, self.spares.of(id))));
            }
        }
    }

    /// One child of a page has left the index; with the last one the page itself can leave. (The link tells its life but for
    /// the generation's top bit: `parent` as it says.)
    pub(crate) fn lose_child(&self, pages: &Pages, parent: PageRef) {
        if pages.remove_child(parent.id) {
            self.put_ahead(pages, parent);
        }
    }

    /// A page was set aside, or a copy of one that was has ended: it goes back, if nothing keeps it.
    pub(crate) fn relist(&self, pages: &Pages, page: PageRef) {
        if pages.children_now(page.id) == 0 {
            self.put_ahead(pages, page);
        }
    }

    /// A page without children goes ahead of its order, if it stands nowhere and nothing else keeps it.
    fn put_ahead(&self, pages: &Pages, page: PageRef) {
        let listed = pages.transit_with(page.id, |word| {
            let next = word.relist().filter(|_| is_linked_life(page.generation, word.generation()))?;
            // That of this life, if the word is the same afterwards.
            Some((next, pages.payer(page.id)))
        });
        if let Ok(payer) = listed {
            self.ahead(payer).push(pages, &self.spares, page.id);
        }
    }

    /// Ask the ghosts about a run of pages that a tenant misses, in the order of the sequence: how many of them, from
    /// the first on, are proven. Counts as their return: the tenant's order adapts, the ghosts are forgotten.
    pub(crate) fn recall(&self, tenant: TenantId, keys: impl IntoIterator<Item = u64>) -> usize {
        let mut run = Run::default();
        let mut best = Run::default();
        for key in keys {
            run.meet(self.ghosts.recall(tenant, key));
            if run.balance >= best.balance && run.balance > 0 {
                best = run;
            }
        }
        if best.new + best.proven > 0 {
            let order = self.queued(tenant).all().max(LEAST_ORDER);
            // Never refused: the closure always answers.
            let _ = self.word(tenant, SHARE).transit(|word| Some(adapt(word, best.new, best.proven, order)));
        }
        best.len
    }

    /// A tenant's order forgets what it has learnt (its id gets another owner).
    pub(crate) fn reset(&self, tenant: TenantId) {
        self.word(tenant, SHARE).put(0);
    }

    /// Take the pages that go first out of a tenant's order, `n` at most: how many. `out` gets each, LEAVING, one after the
    /// other: it takes the page out of the index, and answers with the page that it continues, whose child count it has
    /// not lowered. Fewer than `n`: no more pages of the tenant can leave now.
    ///
    /// `now` is the tick for [`Protection`]. Without it neither hits nor protection count, and nothing is remembered: for
    /// emptying an order, and as the last resort before an allocation is refused.
    ///
    /// A page costs one step as a rule, and never more than two rounds over the order.
    pub(crate) fn victims(
        &self,
        pages: &Pages,
        tenant: TenantId,
        now: Option<u64>,
        n: usize,
        mut out: impl FnMut(PageId, PageWord) -> Option<PageRef>,
    ) -> usize {
        let mut queued = self.queued(tenant);
        let mut search = Search::new(queued);
        let (mut taken, mut lost) = (0, Queued::default());
        // What the page taken last continues. Most often that is the page that comes next, and leaves too.
        let mut orphaned: Option<PageRef> = None;
        while taken < n && search.steps > 0 {
            if let Some(parent) = orphaned.take_if(|parent| pages.read(parent.id).is_aside()) {
                self.lose_child(pages, parent);
            }
            let (from, hand) = match self.ahead(tenant).pop(pages, &self.spares) {
                Some(first) => (None, Hand::from(first)),
                None => {
                    let (half, most) = match search.instead.take() {
                        Some(half) => (half, 1),
                        None => self.above_share(tenant, queued),
                    };
                    let most = most.min(n - taken).min(search.steps as usize);
                    let (half, hand) = self.pop(pages, tenant, half, most);
                    (Some(half), hand)
                }
            };
            if hand.is_empty() {
                break;
            }
            let counted = from.map_or(0, Half::count);
            let longer = if queued.new > queued.proven { Half::New } else { Half::Proven };
            let mut gone = 0;
            for (id, node) in hand {
                // (Nothing gets ahead but by what leaves, so that ends by itself.)
                search.steps -= u64::from(from.is_some());
                if let Some(parent) = orphaned.take_if(|parent| parent.id != id) {
                    self.lose_child(pages, parent);
                }
                let terms = Terms {
                    visits: now.is_some(),
                    protect: now.filter(|_| search.spared < SPARED),
                    longer,
                    children: u32::from(orphaned.is_some()),
                };
                let (verdict, word) = self.judge(pages, id, &node, terms, &mut search.spared);
                match verdict {
                    Verdict::Out => {
                        gone += counted;
                        taken += 1;
                        if now.is_some() && word.is_indexed() {
                            self.ghosts.remember(tenant, pages.key(id), word.is_proven());
                            lost.new += u32::from(!word.is_proven());
                            lost.proven += u32::from(word.is_proven());
                        }
                        // Its own child count, with what was left to lower it by, ends with it.
                        orphaned = out(id, word);
                        search = Search::new(queued);
                    }
                    Verdict::Dropped => gone += counted,
                    Verdict::Aside => {
                        gone += counted;
                        self.relist(pages, PageRef { id, generation: word.generation() });
                    }
                    Verdict::Back { to, stuck } => {
                        search.instead = from.filter(|_| stuck).map(Half::other);
                        if to.count() != counted {
                            self.word(tenant, COUNTS).plus(to.count().wrapping_sub(counted));
                        }
                        self.queue(tenant, to).push(pages, std::iter::once((id, node)));
                    }
                }
            }
            if gone > 0 {
                self.word(tenant, COUNTS).minus(gone);
            }
            queued = self.queued(tenant);
        }
        if let Some(parent) = orphaned {
            self.lose_child(pages, parent);
        }
        if lost != Queued::default() {
            // Never refused: the closure always answers.
            let _ = self.word(tenant, SHARE).transit(|word| Some(count_lost(word, lost, queued.all())));
        }
        taken
    }

    /// Take the pages that are off the device, held by nobody and continued by nothing out of a tenant's order, wherever
    /// they stand, and those on the device that continue one of them, which nobody can reach either: `out` gets each as from
    /// [`Self::victims`]. The others keep their places, but for those that were ahead. One round.
    pub(crate) fn drain_away(
        &self,
        pages: &Pages,
        tenant: TenantId,
        mut out: impl FnMut(PageId, PageWord) -> Option<PageRef>,
    ) {
        let mut take = |id: PageId, node: &Node| {
            let word = pages.read(id);
            let lost = word.is_cached()
                && pages.children(id) == 0
                && (word.is_away() || continues_lost(pages, id, word));
            let Some(word) = lost.then(|| take_leaf(pages, id, word)).flatten() else { return false };
            self.spares.set(id, node);
            if let Some(parent) = out(id, word) {
                self.lose_child(pages, parent);
            }
            true
        };
        let take_ahead = |take: &mut dyn FnMut(PageId, &Node) -> bool| {
            while let Some((id, node)) = self.ahead(tenant).pop(pages, &self.spares) {
                if !take(id, &node) {
                    self.word(tenant, COUNTS).plus(Half::Proven.count());
                    self.queue(tenant, Half::Proven).push(pages, std::iter::once((id, node)));
                }
            }
        };
        let Queued { new, proven } = self.queued(tenant);
        take_ahead(&mut take);
        for (half, n) in [(Half::New, new), (Half::Proven, proven)] {
            for _ in 0..n {
                let Some((id, node)) = self.queue(tenant, half).pop(pages, 1).next() else { break };
                if take(id, &node) {
                    self.word(tenant, COUNTS).minus(half.count());
                    take_ahead(&mut take);
                } else {
                    self.queue(tenant, half).push(pages, std::iter::once((id, node)));
                }
            }
        }
    }

    /// The half that has to give: the new ones if they are at or above their share. And how many pages may be taken from it,
    /// whatever becomes of them, before it may be the other one's turn.
    fn above_share(&self, tenant: TenantId, queued: Queued) -> (Half, usize) {
        let share = share_of(self.word(tenant, SHARE).peek());
        let (new, wanted) = (u64::from(queued.new) * ONE_SHARE, share * queued.all());
        let half = if new > 0 && new >= wanted { Half::New } else { Half::Proven };
        // A page that leaves a half changes the difference by one page at most.
        (half, 1 + (new.abs_diff(wanted) / ONE_SHARE) as usize)
    }

    /// The first pages of this half, or of the other one if it is empty.
    fn pop(&self, pages: &Pages, tenant: TenantId, half: Half, most: usize) -> (Half, Hand) {
        let hand = self.queue(tenant, half).pop(pages, most);
        if !hand.is_empty() {
            return (half, hand);
        }
        let other = half.other();
        (other, self.queue(tenant, other).pop(pages, most))
    }

    /// Decide about a page that was just popped (see the table at the head of this file): the word that it has then.
    fn judge(
        &self,
        pages: &Pages,
        id: PageId,
        node: &Node,
        terms: Terms,
        spared: &mut u32,
    ) -> (Verdict, PageWord) {
        let word = pages.word(id);
        let mut now = word.first();
        loop {
            let page = PageWord(now);
            debug_assert!(page.is_queued() && !page.is_leaving(), "{page:?} stands in the order");
            if !terms.visits && page.is_visited() {
                // Where hits don't count the bit still has to go first: that it is unset is what makes "no children" hold.
                let unvisited = page.pass(page.is_proven()).0;
                now = word.cas(now, unvisited).map_or_else(|found| found, |_| unvisited);
                continue;
            }
            let (next, verdict) = if let Some(next) = page.dequeue() {
                (next, Verdict::Dropped)
            } else if terms.visits && page.is_visited() {
                (page.pass(true), Verdict::Back { to: Half::Proven, stuck: false })
            } else if (page.is_leased() || pages.children(id) > terms.children)
                && let Some(next) = page.set_aside()
            {
                (next, Verdict::Aside)
            } else if let Some(left) =
                terms.protect.and_then(|tick| Protection(pages.protection(id)).spend(tick))
            {
                *spared += 1;
                pages.set_protection(id, left.0);
                let to = terms.longer;
                (page.pass(to == Half::Proven), Verdict::Back { to, stuck: false })
            } else if let Some(next) = page.evict() {
                (next, Verdict::Out)
            } else {
                // A copy uses its frame, and nobody finds it: it has no key.
                (page.pass(true), Verdict::Back { to: Half::Proven, stuck: true })
            };
            // The spare goes back before the bit that it hangs on.
            if !matches!(verdict, Verdict::Back { .. }) {
                self.spares.set(id, node);
            }
            match word.cas(now, next.0) {
                Ok(_) => return (verdict, next),
                Err(found) => now = found,
            }
        }
    }
}

/// What counts for a page in the hand.
#[derive(Clone, Copy)]
struct Terms {
    /// Hits count.
    visits: bool,
    /// Protection counts, at this tick.
    protect: Option<u64>,
    /// The longer half.
    longer: Half,
    /// So many of its children are leaving already, by the same hand.
    children: u32,
}

/// The search for one page that can leave.
struct Search {
    /// Pages of the queues that may still be looked at.
    steps: u64,
    /// Protected pages that were spared.
    spared: u32,
    /// From where the next page comes, for what came last is stuck.
    instead: Option<Half>,
}

impl Search {
    fn new(queued: Queued) -> Self {
        Self { steps: 2 * queued.all() + u64::from(SPARED), spared: 0, instead: None }
    }
}

/// A run of missed pages, as the ghosts know it.
#[derive(Clone, Copy, Default)]
struct Run {
    len: usize,
    /// Ghosts less others.
    balance: i64,
    new: u64,
    proven: u64,
}

impl Run {
    fn meet(&mut self, ghost: Option<bool>) {
        self.len += 1;
        match ghost {
            None => self.balance -= 1,
            Some(proven) => {
                self.balance += 1;
                self.new += u64::from(!proven);
                self.proven += u64::from(proven);
            }
        }
    }
}

/// Take a cached page that nothing continues out of the order, if it is as it was `seen` all the time: LEAVING. The caller has
/// its place in the order, so no hand is at it.
///
/// A hit and a release bring the word back to what it was, with a child more, but for the VISITED bit: so that goes before the
/// children are looked at.
pub(crate) fn take_leaf(pages: &Pages, id: PageId, seen: PageWord) -> Option<PageWord> {
    let unvisited = seen.pass(seen.is_proven());
    if seen.is_visited() {
        pages.transit(id, |w| if w == seen { Some(unvisited) } else { None }).ok()?;
    }
    if pages.children(id) > 0 {
        return None;
    }
    pages.transit(id, |w| if w == unvisited { w.evict() } else { None }).ok()
}

/// Whether a page continues one that is off the device and held by nobody, by way of others that are cached too: then
/// nobody finds it, but by a copy of that one.
fn continues_lost(pages: &Pages, mut id: PageId, mut word: PageWord) -> bool {
    // (No chain is longer: one that changes under the eyes may lead in a circle.)
    for _ in 0..pages.len() {
        if !word.is_indexed() {
            return false;
        }
        let page = PageRef { id, generation: word.generation() };
        let Some(parent) = page_before(pages, page) else { return false };
        (id, word) = (parent.id, pages.read(parent.id));
        if word.generation() != parent.generation || !word.is_cached() {
            return false;
        }
        if word.is_away() {
            return true;
        }
    }
    false
}

fn share_of(word: u64) -> u64 {
    word & (ONE_SHARE - 1) ^ START_SHARE
}

fn lost_of(word: u64) -> (u64, u64) {
    (word >> 24 & LOST_MAX, word >> (24 + LOST_BITS))
}

fn pack(share: u64, (new, proven): (u64, u64)) -> u64 {
    share ^ START_SHARE | new << 24 | proven << (24 + LOST_BITS)
}

/// Move the share for `new` and `proven` ghosts that came back, in an order of `order` pages: half a page each, times
/// how many more ghosts the other queue has.
fn adapt(word: u64, new: u64, proven: u64, order: u64) -> u64 {
    let (lost_new, lost_proven) = lost_of(word);
    let by = |hits: u64, own: u64, other: u64| {
        let (own, other) = (own + 1, other + 1);
        hits * ONE_SHARE / (2 * order) * other.max(own) / own
    };
    let up = share_of(word) + by(new, lost_new, lost_proven);
    let share = up.saturating_sub(by(proven, lost_proven, lost_new));
    pack(share.min(ONE_SHARE - 1), (lost_new, lost_proven))
}

/// Count ghosts; the counts tell of the last few rounds over an order of `order` pages.
fn count_lost(word: u64, more: Queued, order: u64) -> u64 {
    let (new, proven) = lost_of(word);
    let (mut new, mut proven) = (new + u64::from(more.new), proven + u64::from(more.proven));
    let most = (order * 4).clamp(LEAST_ORDER, LOST_MAX);
    while new + proven > most {
        (new, proven) = (new / 2, proven / 2);
    }
    pack(share_of(word), (new, proven))
}

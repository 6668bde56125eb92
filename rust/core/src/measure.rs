//! What the rooms cost and how well eviction does, for `benches/`: only with the feature `measure`.
//!
//! [`Cache`] is the smallest owner of pages, index and orders: one tenant, one layer group, one thread, no frames and
//! no ledger. It is what pool.rs does with them, without the rest, and so also an example.

use std::{hint::black_box, time::Instant};

use crate::{
    evict::{NODES_PER_TENANT, Orders},
    hash::{ChainKey, Context, Hasher, Secret},
    index::{AHEAD, Index, Parent, Seen, Wanted},
    page::{Link, Pages},
    word::{GroupId, PageId, PageRef, TenantId, page::Dropped},
};

const TENANT: TenantId = TenantId(0);
const GROUP: GroupId = GroupId(0);

/// A prefix cache over real books.
#[derive(Debug)]
pub struct Cache {
    pages: Pages,
    index: Index,
    orders: Orders,
    hasher: Hasher,
    page_tokens: usize,
    free: Vec<PageId>,
}

impl Cache {
    /// A cache of `pages` pages.
    pub fn new(pages: u32, page_tokens: u32) -> Self {
        Self {
            pages: Pages::new(pages, NODES_PER_TENANT, page_tokens),
            index: Index::new(pages),
            orders: Orders::new(1, pages),
            hasher: Hasher::new(Secret::from_bytes([5; 16]), false),
            page_tokens: page_tokens as usize,
            free: (0..pages).rev().map(PageId).collect(),
        }
    }

    fn chain(&self, tokens: &[u32], keys: &mut Vec<ChainKey>) -> Parent {
        keys.clear();
        let root = self.hasher.root(&Context::default());
        self.hasher.pages(TENANT, root, self.page_tokens, tokens, keys);
        Parent::Digest(self.hasher.digest(root))
    }

    /// Reference the longest cached prefix of a chain.
    fn hit(&self, parent: Parent, keys: &[ChainKey], tokens: &[u32], held: &mut Vec<Seen>) {
        let mut parent = parent;
        let mut ahead = [0; AHEAD];
        for (chunk, text) in keys.chunks(AHEAD).zip(tokens.chunks(AHEAD * self.page_tokens)) {
            for (ahead, &key) in ahead.iter_mut().zip(chunk) {
                *ahead = self.hasher.index_key(key, GROUP);
            }
            let ahead = &ahead[..chunk.len()];
            let hints = self.index.probe(&self.pages, ahead);
            for (nth, (&key, tokens)) in ahead.iter().zip(text.chunks_exact(self.page_tokens)).enumerate() {
                let wanted = Wanted { key, scope: TENANT, parent, tokens: Some(tokens) };
                let share = |seen: Seen| {
                    let word = self.pages.transit_with(seen.page.id, |w| w.share(seen.page.generation));
                    word.ok().map(|_| seen)
                };
                let Some(seen) = self.index.lookup_probed(&self.pages, &hints, nth, &wanted, share) else {
                    return;
                };
                parent = seen.as_parent();
                held.push(seen);
            }
        }
    }

    /// A free page.
    fn take(&mut self) -> Option<PageRef> {
        let id = self.free.pop()?;
        let word = self.pages.transit(id, |w| w.take()).ok()?;
        self.pages.set_payer(id, TENANT);
        Some(PageRef { id, generation: word.generation() })
    }

    /// Evict until `n` pages are free, if they can be.
    fn evict(&mut self, n: usize) {
        let Self { pages, index, orders, free, .. } = self;
        let missing = n.saturating_sub(free.len());
        orders.victims(pages, TENANT, Some(0), missing, |id, word| {
            if word.is_indexed() {
                index.remove(pages.key(id), id);
            }
            let _ = pages.transit(id, |w| w.retire());
            free.push(id);
            parent(pages, id)
        });
    }

    fn publish(&self, page: PageRef, parent: Parent, key: ChainKey, tokens: &[u32], proven: bool) -> Seen {
        let key = self.hasher.index_key(key, GROUP);
        let link = match parent {
            Parent::Page { at, .. } => {
                self.pages.add_child(at.id);
                Link::Page(at)
            }
            Parent::Digest(digest) => Link::Digest(digest),
        };
        self.pages.set_names(page.id, key, link, page.to_bits());
        self.pages.set_tokens(page.id, tokens);
        let _ = self.pages.transit(page.id, |w| w.publish(proven));
        self.index.insert(key, page.id);
        Seen { page, prefix: page.to_bits(), exact: true }
    }

    /// Let a sequence's pages go, the last first.
    fn release(&self, held: &[Seen]) {
        let cached = |page: PageRef| {
            let dropped = self.pages.transit_with(page.id, |w| w.drop_ref(page.generation));
            (dropped == Ok(Dropped::Cached { enqueue: true })).then_some(page.id)
        };
        let ids: Vec<_> = held.iter().rev().filter_map(|seen| cached(seen.page)).collect();
        self.orders.enqueue_all(&self.pages, TENANT, &ids);
    }

    /// One request from start to end: how many of its pages hit. `None`: more pages than the cache has.
    pub fn request(&mut self, tokens: &[u32], keys: &mut Vec<ChainKey>) -> Option<usize> {
        let mut held = vec![];
        let root = self.chain(tokens, keys);
        self.hit(root, keys, tokens, &mut held);
        let hits = held.len();
        let missed = keys[hits..].iter().map(|&key| self.hasher.index_key(key, GROUP));
        let proven = hits + self.orders.recall(TENANT, missed);
        self.evict(keys.len() - hits);
        for _ in hits..keys.len() {
            let page = self.take()?;
            let nth = held.len();
            let parent = held.last().map_or(root, |seen| seen.as_parent());
            let tokens = &tokens[nth * self.page_tokens..(nth + 1) * self.page_tokens];
            held.push(self.publish(page, parent, keys[nth], tokens, nth < proven));
        }
        self.release(&held);
        Some(hits)
    }
}

/// The page that a page continues.
fn parent(pages: &Pages, id: PageId) -> Option<PageRef> {
    match pages.link(id) {
        Link::Page(parent) => Some(parent),
        Link::Digest(_) => None,
    }
}

/// Replay requests, each a list of page contents, one at a time through a cache of `pages` pages: the share of
/// references that hit as a prefix, and nanoseconds a reference.
pub fn replay(requests: &[Vec<u32>], pages: u32) -> (f64, f64) {
    let mut cache = Cache::new(pages, 1);
    let (mut hits, mut references) = (0, 0);
    let start = Instant::now();
    let mut keys = vec![];
    for request in requests {
        hits += cache.request(request, &mut keys).unwrap_or(0);
        references += request.len();
    }
    (hits as f64 / references as f64, start.elapsed().as_nanos() as f64 / references as f64)
}

/// Nanoseconds of `work`, best of a few runs, divided by `items`.
fn best(runs: u32, items: usize, mut work: impl FnMut()) -> f64 {
    let time = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed().as_nanos()
    };
    let fastest = (0..runs).map(|_| time(&mut work)).min().unwrap_or(0);
    fastest as f64 / items as f64
}

/// What each room costs, in nanoseconds a page, for a pool of `pages` pages.
pub fn rooms(pages: u32) -> Vec<(&'static str, f64)> {
    const PAGE: usize = 16;
    let mut rows = vec![];
    let chain = 2048.min(pages as usize / 2);
    let tokens: Vec<u32> = (0..(chain * PAGE) as u32).map(|t| t.wrapping_mul(2_654_435_761) >> 15).collect();
    let mut cache = Cache::new(pages, PAGE as u32);
    let mut keys = vec![];
    rows.push((
        "hash a page",
        best(20, chain, || {
            black_box(cache.chain(&tokens, &mut keys));
        }),
    ));

    // Fill the pool with other chains, then the one that is measured.
    for seed in 1..pages / chain as u32 + 2 {
        let other: Vec<u32> = tokens.iter().map(|t| t ^ seed << 18).collect();
        cache.request(&other, &mut keys);
    }
    cache.request(&tokens, &mut keys);
    let root = cache.chain(&tokens, &mut keys);
    let mut held = Vec::with_capacity(chain);
    rows.push((
        "look up, compare, share, release",
        best(20, chain, || {
            held.clear();
            cache.hit(root, &keys, &tokens, &mut held);
            assert_eq!(held.len(), chain, "all of it is cached");
            cache.release(&held);
        }),
    ));
    rows.push((
        "hash, look up, compare, share, release",
        best(20, chain, || {
            held.clear();
            let root = cache.chain(&tokens, &mut keys);
            cache.hit(root, &keys, &tokens, &mut held);
            cache.release(&held);
        }),
    ));

    let index = Index::new(pages);
    let key = |nth: u32| u64::from(nth + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    rows.push((
        "index insert, filling",
        best(1, pages as usize, || {
            (0..pages).for_each(|nth| {
                index.insert(key(nth), PageId(nth));
            });
        }),
    ));
    rows.push((
        "index lookup, hit",
        best(5, pages as usize, || {
            let found = (0..pages).filter(|&nth| index.find(key(nth), Some) == Some(PageId(nth))).count();
            black_box(found);
        }),
    ));
    rows.push((
        "index lookup, miss",
        best(5, pages as usize, || {
            black_box((0..pages).filter(|&nth| index.find(!key(nth), Some).is_some()).count());
        }),
    ));
    rows.push((
        "index remove + insert, full",
        best(5, pages as usize, || {
            (0..pages).for_each(|nth| {
                index.remove(key(nth), PageId(nth));
                index.insert(key(nth), PageId(nth));
            });
        }),
    ));

    // Churn first, so that spare nodes are where they will be after hours.
    let batch = (pages / 4).clamp(1, 128) as usize;
    let mut churn = |rounds: usize| {
        for _ in 0..rounds {
            cache.evict(batch);
            held.clear();
            for _ in 0..batch {
                let Some(page) = cache.take() else { continue };
                cache.pages.set_names(page.id, u64::from(page.id.0), Link::Digest(1), 0);
                let _ = cache.pages.transit(page.id, |w| w.publish(false));
                held.push(Seen { page, prefix: 0, exact: true });
            }
            cache.release(&held);
        }
    };
    let rounds = 2 * pages as usize / batch;
    churn(rounds);
    rows.push(("evict (with index), take, publish, enqueue", best(5, rounds * batch, || churn(rounds))));

    let mut left = vec![];
    let order = cache.orders.queued(TENANT);
    let all = (order.new + order.proven) as usize;
    rows.push((
        "victim alone",
        best(1, all, || {
            cache.orders.victims(&cache.pages, TENANT, Some(0), all, |id, _| {
                left.push(id);
                parent(&cache.pages, id)
            });
        }),
    ));
    assert_eq!(left.len(), all, "everything left");
    for &id in &left {
        let _ = cache.pages.transit(id, |w| w.retire());
    }
    rows.push(("enqueue alone", best(1, all, || cache.orders.enqueue_all(&cache.pages, TENANT, &left))));
    let bytes = cache.index.bytes() + cache.orders.bytes() + u64::from(pages) * 64;
    rows.push(("bytes a page: table, index, ghosts", bytes as f64 / f64::from(pages)));
    rows
}

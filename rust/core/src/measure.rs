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

    /// A free page, evicting one if need be.
    fn take(&mut self) -> Option<PageRef> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => self.evict()?,
        };
        let word = self.pages.transit(id, |w| w.take()).ok()?;
        self.pages.set_payer(id, TENANT);
        Some(PageRef { id, generation: word.generation() })
    }

    fn evict(&self) -> Option<PageId> {
        let id = self.orders.victim(&self.pages, TENANT, 0)?;
        self.index.remove(self.pages.key(id), id);
        if let Link::Page(parent) = self.pages.link(id)
            && self.pages.remove_child(parent.id)
        {
            self.orders.unstick(TENANT);
        }
        self.pages.transit(id, |w| w.retire()).ok().map(|_| id)
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
        Seen { page, prefix: page.to_bits() }
    }

    fn release(&self, page: PageRef) {
        let dropped = self.pages.transit_with(page.id, |w| w.drop_ref(page.generation));
        if dropped == Ok(Dropped::Cached { enqueue: true }) {
            self.orders.enqueue(&self.pages, TENANT, page.id);
        }
    }

    /// One request from start to end: how many of its pages hit. `None`: more pages than the cache has.
    pub fn request(&mut self, tokens: &[u32], keys: &mut Vec<ChainKey>) -> Option<usize> {
        let mut held = vec![];
        let root = self.chain(tokens, keys);
        self.hit(root, keys, tokens, &mut held);
        let hits = held.len();
        let missed = keys[hits..].iter().map(|&key| self.hasher.index_key(key, GROUP));
        let proven = hits + self.orders.recall(TENANT, missed);
        let mut taken = vec![];
        while hits + taken.len() < keys.len() {
            taken.push(self.take()?);
        }
        for page in taken {
            let nth = held.len();
            let parent = held.last().map_or(root, |seen| seen.as_parent());
            let tokens = &tokens[nth * self.page_tokens..(nth + 1) * self.page_tokens];
            held.push(self.publish(page, parent, keys[nth], tokens, nth < proven));
        }
        for seen in held.iter().rev() {
            self.release(seen.page);
        }
        Some(hits)
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
            held.iter().rev().for_each(|seen| cache.release(seen.page));
        }),
    ));
    rows.push((
        "hash, look up, compare, share, release",
        best(20, chain, || {
            held.clear();
            let root = cache.chain(&tokens, &mut keys);
            cache.hit(root, &keys, &tokens, &mut held);
            held.iter().rev().for_each(|seen| cache.release(seen.page));
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
    let batch = (pages / 4).clamp(1, 1024);
    let churn = |rounds: u32| {
        for _ in 0..rounds * batch {
            let Some(id) = cache.evict() else { continue };
            let Ok(page) = cache.pages.transit(id, |w| w.take()) else { continue };
            cache.pages.set_payer(id, TENANT);
            cache.pages.set_names(id, u64::from(id.0), Link::Digest(1), 0);
            let _ = cache.pages.transit(id, |w| w.publish(false));
            cache.release(PageRef { id, generation: page.generation() });
        }
    };
    let rounds = 2 * pages / batch;
    churn(rounds);
    rows.push((
        "evict (with index), take, publish, enqueue",
        best(5, (rounds * batch) as usize, || churn(rounds)),
    ));

    let mut left = vec![];
    let order = cache.orders.queued(TENANT);
    let all = (order.new + order.proven) as usize;
    rows.push((
        "victim alone",
        best(1, all, || {
            while let Some(id) = cache.orders.victim(&cache.pages, TENANT, 0) {
                if let Link::Page(parent) = cache.pages.link(id) {
                    cache.pages.remove_child(parent.id);
                }
                left.push(id);
            }
        }),
    ));
    assert_eq!(left.len(), all, "everything left");
    for &id in &left {
        let _ = cache.pages.transit(id, |w| w.retire());
    }
    rows.push((
        "enqueue alone",
        best(1, all, || {
            left.iter().for_each(|&id| cache.orders.enqueue(&cache.pages, TENANT, id));
        }),
    ));
    let bytes = cache.index.bytes() + cache.orders.bytes() + u64::from(pages) * 64;
    rows.push(("bytes a page: table, index, ghosts", bytes as f64 / f64::from(pages)));
    rows
}

//! The orders over a real page table.

use std::{collections::VecDeque, sync::Arc, thread};

use proptest::prelude::*;

use super::*;
use crate::{
    page::Link,
    word::{
        Generation,
        page::{Dropped, Ended},
    },
};

const A: TenantId = TenantId(0);
const B: TenantId = TenantId(1);

struct Books {
    pages: Pages,
    orders: Orders,
}

impl Books {
    fn new(pages: u32) -> Self {
        Self { pages: Pages::new(pages, 2 * NODES_PER_TENANT, 2), orders: Orders::new(2, pages) }
    }

    /// A held and published page, its id its key.
    fn publish(&self, tenant: TenantId, id: u32, proven: bool) -> PageRef {
        let word = self.pages.transit(PageId(id), |w| w.take()).expect("it is free");
        self.pages.set_payer(PageId(id), tenant);
        self.pages.set_names(PageId(id), u64::from(id), Link::Digest(0), 0);
        self.pages.transit(PageId(id), |w| w.publish(proven)).expect("it is held");
        PageRef { id: PageId(id), generation: word.generation() }
    }

    /// A chain of held pages: each continues the one before it.
    fn chain(&self, tenant: TenantId, ids: std::ops::Range<u32>) -> Vec<PageRef> {
        let pages: Vec<_> = ids.map(|id| self.publish(tenant, id, false)).collect();
        for pair in pages.windows(2) {
            self.pages.set_names(pair[1].id, u64::from(pair[1].id.0), Link::Page(pair[0]), 0);
            assert!(self.pages.add_child(pair[0].id));
        }
        pages
    }

    fn release(&self, page: PageRef) {
        let dropped = self.pages.transit_with(page.id, |w| w.drop_ref(page.generation));
        if dropped.expect("it is held") == (Dropped::Cached { enqueue: true }) {
            self.orders.enqueue(&self.pages, self.pages.payer(page.id), page.id);
        }
    }

    fn hit(&self, page: PageRef) -> bool {
        self.pages.transit_with(page.id, |w| w.share(page.generation)).is_ok()
    }

    fn touch(&self, page: PageRef) {
        assert!(self.hit(page));
        self.release(page);
    }

    fn cache(&self, tenant: TenantId, ids: std::ops::Range<u32>) -> Vec<PageRef> {
        let pages: Vec<_> = ids.map(|id| self.publish(tenant, id, false)).collect();
        pages.iter().for_each(|&page| self.release(page));
        pages
    }

    fn victim(&self, tenant: TenantId) -> Option<u32> {
        self.victims(tenant, Some(0), 1).pop()
    }

    /// Up to `n` pages that leave, and what they continue counts them no more.
    fn victims(&self, tenant: TenantId, now: Option<u64>, n: usize) -> Vec<u32> {
        let mut left = vec![];
        let count = self.orders.victims(&self.pages, tenant, now, n, |id, word| {
            assert!(word.is_leaving() && self.pages.read(id) == word);
            left.push(id.0);
            match self.pages.link(id) {
                Link::Page(parent) => Some(parent),
                Link::Digest(_) => None,
            }
        });
        assert_eq!(count, left.len());
        left
    }

    fn retire(&self, id: u32) {
        self.pages.transit(PageId(id), |w| w.retire()).expect("it is leaving");
    }
}

#[test]
fn untouched_pages_leave_as_they_came() {
    let books = Books::new(8);
    books.cache(A, 0..8);
    assert_eq!(books.orders.queued(A), Queued { new: 8, proven: 0 });
    let left: Vec<_> = std::iter::from_fn(|| books.victim(A)).collect();
    assert_eq!(left, (0..8).collect::<Vec<_>>());
    assert_eq!(books.orders.queued(A), Queued::default());
}

#[test]
fn a_hit_page_stays_and_is_proven() {
    let books = Books::new(4);
    let pages = books.cache(A, 0..4);
    books.touch(pages[0]);
    assert_eq!(books.victim(A), Some(1));
    assert!(books.pages.read(PageId(0)).is_proven());
    assert_eq!(books.orders.queued(A), Queued { new: 2, proven: 1 });
}

/// Case 9: pinned and unpinned, hit and released, it stands in the order once.
#[test]
fn case_09_a_page_stands_in_the_order_once() {
    let books = Books::new(2);
    let pages = books.cache(A, 0..2);
    for _ in 0..3 {
        books.pages.transit_with(pages[0].id, |w| w.pin(pages[0].generation)).expect("it is cached");
        let (_, dropped) = books.pages.read(pages[0].id).unpin(pages[0].generation).expect("it is pinned");
        assert_eq!(dropped, Dropped::Cached { enqueue: false });
        books.pages.transit_with(pages[0].id, |w| w.unpin(pages[0].generation)).expect("it is pinned");
        books.touch(pages[1]);
    }
    let mut left: Vec<_> = std::iter::from_fn(|| books.victim(A)).collect();
    left.sort_unstable();
    assert_eq!(left, [0, 1]);
}

/// Cases 10 and 13: what a sequence or a pin holds is not handed out, and comes back when it is let go.
#[test]
fn case_10_a_held_page_is_not_handed_out() {
    let books = Books::new(3);
    let pages = books.cache(A, 0..3);
    assert!(books.hit(pages[0]));
    books.pages.transit_with(pages[1].id, |w| w.pin(pages[1].generation)).expect("it is cached");
    assert_eq!(books.victim(A), Some(2));
    assert_eq!(books.victim(A), None);
    books.release(pages[0]);
    assert_eq!(books.victim(A), Some(0));
}

/// Case 17: 1-2-3 was released, from either end: 3 goes first.
#[test]
fn case_17_children_leave_before_parents() {
    for backwards in [true, false] {
        let books = Books::new(3);
        let mut chain = books.chain(A, 0..3);
        if backwards {
            chain.reverse();
        }
        chain.iter().for_each(|&page| books.release(page));
        let left: Vec<_> = std::iter::from_fn(|| books.victim(A)).collect();
        assert_eq!(left, [2, 1, 0]);
    }
}

/// A run that leaves at once leaves as its pages would one by one: children first, and what stays counts who has gone.
#[test]
fn a_run_leaves_as_its_pages_would() {
    let books = Books::new(60);
    let chains: Vec<_> = (0..3).map(|n| books.chain(A, n * 20..n * 20 + 20)).collect();
    for chain in &chains {
        chain.iter().rev().for_each(|&page| books.release(page));
    }
    books.touch(chains[0][5]);
    let first: Vec<_> = (6..20).rev().chain((50..60).rev()).collect();
    assert_eq!(books.victims(A, Some(0), 14), first[..14]);
    assert_eq!(books.pages.children(PageId(5)), 0);
    // Pages 0 to 4 are kept by page 5, which was hit.
    assert_eq!(books.victims(A, Some(0), 100).len(), 46);
    assert_eq!(books.orders.queued(A), Queued::default());
    assert_eq!(books.victims(A, None, 100), []);
}

/// Pages from both halves, in the order in which single victims would come, whatever the size of the runs.
#[test]
fn runs_take_from_the_halves_as_single_victims_do() {
    let orders = [1, 3, 100].map(|n| {
        let books = Books::new(200);
        let pages = books.cache(A, 0..200);
        (0..200).filter(|id| id % 3 == 0).for_each(|id| books.touch(pages[id]));
        let mut left = vec![];
        while left.len() < 120 {
            left.extend(books.victims(A, Some(0), n.min(120 - left.len())));
        }
        left
    });
    assert_eq!(orders[0], orders[1]);
    assert_eq!(orders[0], orders[2]);
}

/// A scan of pages that nobody asks for again leaves the proven ones where they are.
#[test]
fn a_scan_does_not_empty_the_order() {
    let books = Books::new(64);
    let hot = books.cache(A, 0..16);
    hot.iter().for_each(|&page| books.touch(page));
    let mut free: VecDeque<u32> = (16..64).collect();
    for _ in 0..2_000 {
        if free.is_empty() {
            let id = books.victim(A).expect("there are cached pages");
            books.retire(id);
            free.push_back(id);
        }
        let id = free.pop_front().expect("a free page");
        let page = books.publish(A, id, false);
        books.release(page);
    }
    assert!(hot.iter().all(|&page| books.hit(page)), "all hot pages are still there");
}

/// A page whose key was taken away while it was held and queued leaves through the order.
#[test]
fn a_page_without_a_key_leaves() {
    let books = Books::new(1);
    let page = books.cache(A, 0..1)[0];
    assert!(books.hit(page));
    books.pages.transit(page.id, |w| w.unpublish()).expect("it is held");
    books.release(page);
    assert!(books.pages.read(page.id).is_cached());
    assert_eq!(books.victim(A), Some(0));
    assert_eq!(books.orders.recall(A, [0]), 0, "no key, no ghost");
}

/// A frame in use by a copy stays; the others go. What has no key and is let go of meanwhile waits in the order.
#[test]
fn a_leased_page_stays() {
    let books = Books::new(3);
    let pages = books.cache(A, 0..3);
    let end = |page: PageRef| {
        let ended = books.pages.transit_with(page.id, |w| w.unlease(page.generation, false));
        ended.expect("it is leased")
    };
    for &page in &pages[..2] {
        books.pages.transit(page.id, |w| w.lease(page.generation)).expect("it lives");
    }
    assert!(books.hit(pages[1]));
    books.pages.transit(pages[1].id, |w| w.unpublish()).expect("it is held");
    books.release(pages[1]);
    assert_eq!(books.victims(A, Some(0), 3), [2]);
    assert_eq!(books.orders.queued(A), Queued { new: 0, proven: 1 });
    assert_eq!((end(pages[0]), end(pages[1])), (Ended::Aside, Ended::Kept));
    assert_eq!(books.victims(A, Some(0), 3), [1], "somebody is about to put page 0 back");
    books.orders.relist(&books.pages, pages[0]);
    books.orders.relist(&books.pages, pages[0]);
    assert_eq!(books.victims(A, Some(0), 3), [0]);
}

/// A page that was set aside for two reasons comes back with the end of the second, whichever that is.
#[test]
fn two_reasons_to_stay() {
    for lease_first in [true, false] {
        let books = Books::new(1);
        let page = books.cache(A, 0..1)[0];
        books.pages.transit(page.id, |w| w.lease(page.generation)).expect("it lives");
        assert!(books.pages.add_child(page.id));
        assert_eq!(books.victim(A), None);
        let mut ends: [&dyn Fn(); 2] = [
            &|| {
                let ended = books.pages.transit_with(page.id, |w| w.unlease(page.generation, false));
                assert_eq!(ended, Ok(Ended::Aside));
                books.orders.relist(&books.pages, page);
            },
            &|| books.orders.lose_child(&books.pages, page),
        ];
        if !lease_first {
            ends.reverse();
        }
        ends[0]();
        assert_eq!(books.victim(A), None);
        ends[1]();
        assert_eq!(books.victim(A), Some(0));
    }
}

/// Protection is a bias: it holds for so many rounds, until its end, and not when everything is protected.
#[test]
fn protection_is_a_bias() {
    let books = Books::new(4);
    let pages = books.cache(A, 0..4);
    books.pages.set_protection(pages[0].id, Protection::new(2, None).0);
    assert_eq!(books.victim(A), Some(1));
    assert_eq!(books.pages.protection(pages[0].id), Protection::new(1, None).0);
    books.pages.set_protection(pages[2].id, Protection::new(2, Some(100)).0);
    assert_eq!(books.victims(A, Some(101), 1), [2], "its time is over");
    let books = Books::new(40);
    for page in books.cache(A, 0..40) {
        books.pages.set_protection(page.id, Protection::new(15, None).0);
    }
    assert_eq!(std::iter::from_fn(|| books.victim(A)).count(), 40);
}

#[test]
fn protection_ends() {
    let until = |tick| Protection::new(3, Some(tick));
    for tick in [0, 1, 4_094, 4_095, 1 << 40] {
        assert!(until(tick + 10).spend(tick).is_some());
        assert_eq!(until(tick).spend(tick), None);
        assert_eq!(until(tick).spend(tick + 2_000), None);
    }
    assert_eq!(Protection::new(0, None).spend(0), None);
    assert_eq!(Protection::new(99, None).0, 15);
}

/// What others' pages continue can't leave: it is met once, and comes back ahead of all others when the last of them has left.
#[test]
fn what_is_kept_is_set_aside() {
    let books = Books::new(1_000);
    let kept = books.cache(A, 0..900);
    kept.iter().for_each(|page| assert!(books.pages.add_child(page.id)));
    books.cache(A, 900..1_000);
    assert_eq!(books.victim(A), Some(900));
    assert_eq!(books.orders.queued(A), Queued { new: 99, proven: 0 }, "nobody passes the others again");
    assert!(kept.iter().all(|page| books.pages.read(page.id).is_aside()));
    // One is hit and let go, which lists it, and set aside again; one is taken up and kept.
    books.touch(kept[5]);
    assert!(books.hit(kept[6]));
    assert_eq!(books.victims(A, None, 3), [901, 902, 903]);
    for id in [700, 6, 5] {
        books.orders.lose_child(&books.pages, kept[id]);
    }
    assert_eq!(books.victims(A, Some(0), 3), [700, 904, 905], "5 was hit, and 6 is held");
    books.release(kept[6]);
    assert_eq!(books.victims(A, None, 200).len(), 94 + 2);
    assert_eq!(books.orders.queued(A), Queued::default());
}

/// A prompt whose pages stand in any order leaves from its end, without a round for each page.
#[test]
fn a_prompt_in_disorder_leaves_from_its_end() {
    let books = Books::new(40);
    let chain = books.chain(A, 0..20);
    chain.iter().for_each(|&page| books.release(page));
    books.cache(A, 20..40);
    assert_eq!(books.victim(A), Some(19));
    assert_eq!(books.orders.queued(A), Queued { new: 20, proven: 0 });
    let left: Vec<_> = std::iter::from_fn(|| books.victim(A)).collect();
    assert_eq!(left, (0..19).rev().chain(20..40).collect::<Vec<_>>());
}

/// Ghosts come back: the run counts to where most of it is known, and only for its own tenant.
#[test]
fn a_run_that_comes_back_is_proven() {
    let books = Books::new(64);
    books.cache(A, 0..20);
    while books.victim(A).is_some() {}
    let keys = |ids: std::ops::Range<u64>| ids.collect::<Vec<_>>();
    assert_eq!(books.orders.recall(B, keys(0..20)), 0, "another tenant's ghosts");
    assert_eq!(books.orders.recall(A, [keys(0..10), keys(100..130)].concat()), 10);
    assert_eq!(books.orders.recall(A, keys(0..10)), 0, "a ghost comes back once");
    assert_eq!(books.orders.recall(A, [vec![200], keys(10..20)].concat()), 11, "a gap doesn't matter");
    assert_eq!(books.orders.recall(A, []), 0);
}

#[test]
fn the_share_follows_what_comes_back() {
    let start = pack(START_SHARE, (0, 0));
    assert_eq!(start, 0, "a new tenant's words are 0");
    let more = adapt(0, 10, 0, 100);
    assert!(share_of(more) > START_SHARE);
    let less = adapt(0, 0, 10, 100);
    assert!(share_of(less) < START_SHARE);
    // Rarer ghosts count for more.
    let one = |proven| if proven { Queued { new: 0, proven: 1 } } else { Queued { new: 1, proven: 0 } };
    let many_new = (0..300).fold(0, |word, n| count_lost(word, one(n % 10 == 0), 1_000));
    assert!(
        START_SHARE - share_of(adapt(many_new, 0, 10, 1_000))
            > START_SHARE - share_of(adapt(0, 0, 10, 1_000))
    );
    // The ends hold.
    let full = (0..10_000).fold(0, |word, _| adapt(word, 1 << 30, 0, LEAST_ORDER));
    assert_eq!(share_of(full), ONE_SHARE - 1);
    let none = (0..10_000).fold(0, |word, _| adapt(word, 0, 1 << 30, LEAST_ORDER));
    assert_eq!(share_of(none), 0);
    let counted = (0..LOST_MAX * 4).fold(0, |word, n| count_lost(word, one(n % 3 == 0), u64::from(u32::MAX)));
    let (new, proven) = lost_of(counted);
    assert!(new + proven <= LOST_MAX && new > proven);
}

#[test]
fn ghosts_are_forgotten_in_order() {
    let ghosts = Ghosts::new(1_000);
    (0..20_000).for_each(|key| ghosts.remember(A, key, false));
    let known = |keys: std::ops::Range<u64>| keys.filter(|&key| ghosts.recall(A, key).is_some()).count();
    let (old, young) = (known(0..2_000), known(18_000..20_000));
    assert!(old < 100, "{old} of the oldest are still known");
    assert!(young > 1_800, "{young} of 2,000 of the youngest are known");
}

#[test]
fn a_page_costs_at_most_eleven_bytes_of_orders() {
    let pages = 1 << 20;
    let orders = Orders::new(4_096, pages);
    assert!(orders.bytes() <= 11 * u64::from(pages));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever happens to the pages: each stands in the order once or not at all, no held page is handed out, nothing
    /// is lost.
    #[test]
    fn nothing_is_lost_and_nothing_comes_twice(
        steps in proptest::collection::vec((0u8..6, 0usize..12), 1..200),
    ) {
        let books = Books::new(12);
        // What we think: the life of each page we know, and how often we hold it.
        let mut known: Vec<Option<(PageRef, u32)>> = vec![None; 12];
        for (op, nth) in steps {
            match (op, known[nth]) {
                (0 | 1, None) => {
                    let tenant = if nth % 2 == 0 { A } else { B };
                    known[nth] = Some((books.publish(tenant, nth as u32, op == 1), 1));
                }
                (0 | 1, Some((page, holds))) => {
                    prop_assert!(books.hit(page));
                    known[nth] = Some((page, holds + 1));
                }
                (2 | 3, Some((page, holds))) if holds > 0 => {
                    books.release(page);
                    known[nth] = Some((page, holds - 1));
                }
                (4 | 5, _) => {
                    let tenant = if op == 4 { A } else { B };
                    let reclaimable = |(n, page): (usize, &Option<(PageRef, u32)>)| {
                        (if n % 2 == 0 { A } else { B }) == tenant && page.is_some_and(|(_, holds)| holds == 0)
                    };
                    let some = known.iter().enumerate().any(reclaimable);
                    let got = books.victim(tenant);
                    prop_assert_eq!(got.is_some(), some);
                    if let Some(id) = got {
                        let (_, holds) = known[id as usize].take().expect("we know it");
                        prop_assert_eq!(holds, 0);
                        books.retire(id);
                    }
                }
                _ => {}
            }
        }
        for (page, holds) in known.iter().flatten() {
            (0..*holds).for_each(|_| books.release(*page));
        }
        let mut left: Vec<u32> = [A, B].into_iter().flat_map(|t| std::iter::from_fn(|| books.victim(t)).collect::<Vec<_>>()).collect();
        left.sort_unstable();
        let all: Vec<u32> = (0..12u32).filter(|&n| known[n as usize].is_some()).collect();
        prop_assert_eq!(left, all);
        prop_assert_eq!(books.orders.queued(A), Queued::default());
    }
}

/// Four threads hit, release, evict and publish at once; afterwards every page is there once.
#[test]
fn threads_lose_no_page() {
    const PAGES: u32 = 64;
    let books = Arc::new(Books::new(PAGES));
    books.cache(A, 0..PAGES);
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            let books = Arc::clone(&books);
            thread::spawn(move || {
                let mut random = seed + 1;
                for _ in 0..20_000 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let id = PageId((random >> 40) as u32 % PAGES);
                    if random >> 33 & 1 == 0 {
                        let page = PageRef { id, generation: books.pages.read(id).generation() };
                        if books.hit(page) {
                            books.release(page);
                        }
                    } else if let Some(id) = books.victim(A) {
                        books.retire(id);
                        let page = books.publish(A, id, random >> 34 & 1 == 0);
                        books.release(page);
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let mut left: Vec<_> = std::iter::from_fn(|| books.victim(A)).collect();
    left.sort_unstable();
    assert_eq!(left, (0..PAGES).collect::<Vec<_>>());
    assert_ne!(books.pages.read(PageId(0)).generation(), Generation(0));
}

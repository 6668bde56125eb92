//! Loom and shuttle: the orders' queues, and the hand beside hits and releases.

#[cfg(kvalloc_loom)]
use loom::{model, thread};
#[cfg(kvalloc_shuttle)]
use shuttle::thread;

use super::*;
use crate::{
    sync::Arc,
    word::{
        Generation,
        page::{Dropped, Ended},
    },
};

/// Schedules with two or three switches at random places: they reach some that loom's reduction leaves out, because it
/// keeps only the last access to a word. (Plain random ones hardly ever do.)
#[cfg(kvalloc_shuttle)]
fn model(f: impl Fn() + Send + Sync + 'static) {
    shuttle::check_pct(f, 20_000, 3);
}

const TENANT: TenantId = TenantId(0);
/// The first page, in its first life.
const PAGE: PageRef = PageRef { id: PageId(0), generation: Generation(0) };

struct Books {
    pages: Pages,
    orders: Orders,
}

impl Books {
    /// Pages 0 .. `pages`, all held once and published.
    fn held(pages: u32) -> Arc<Self> {
        let books = Self { pages: Pages::new(pages, NODES_PER_TENANT, 2), orders: Orders::new(1, pages) };
        for id in (0..pages).map(PageId) {
            books.pages.transit(id, |w| w.take()).expect("it is free");
            books.pages.transit(id, |w| w.publish(false)).expect("it is held");
        }
        Arc::new(books)
    }

    fn cached(pages: u32) -> Arc<Self> {
        let books = Self::held(pages);
        (0..pages).for_each(|id| books.release(id));
        books
    }

    fn release(&self, id: u32) {
        let dropped = self.pages.transit_with(PageId(id), |w| w.drop_ref(Generation(0)));
        if dropped.expect("it is held") == (Dropped::Cached { enqueue: true }) {
            self.orders.enqueue(&self.pages, TENANT, PageId(id));
        }
    }

    fn hit(&self, id: u32) -> bool {
        self.pages.transit_with(PageId(id), |w| w.share(Generation(0))).is_ok()
    }

    fn victim(&self) -> Option<u32> {
        self.victims(Some(0), 1).pop()
    }

    /// Up to `n` pages, taken at once.
    fn victims(&self, now: Option<u64>, n: usize) -> Vec<u32> {
        let mut left = vec![];
        self.orders.victims(&self.pages, TENANT, now, n, |id, _| {
            left.push(id.0);
            None
        });
        left
    }

    /// Take a page, and put it back in its next life.
    fn recycle(&self, proven: bool) -> Option<u32> {
        let id = PageId(self.victim()?);
        self.pages.transit(id, |w| w.retire()).expect("it is leaving");
        let word = self.pages.transit(id, |w| w.take()).expect("it is free");
        self.pages.transit(id, |w| w.publish(proven)).expect("it is held");
        let dropped = self.pages.transit_with(id, |w| w.drop_ref(word.generation()));
        assert_eq!(dropped, Ok(Dropped::Cached { enqueue: true }));
        self.orders.enqueue(&self.pages, TENANT, id);
        Some(id.0)
    }

    /// All that can still leave, in order.
    fn rest(&self) -> Vec<u32> {
        self.victims(None, usize::MAX)
    }

    fn spawn<R: Send + 'static>(
        books: &Arc<Self>,
        f: impl FnOnce(&Self) -> R + Send + 'static,
    ) -> thread::JoinHandle<R> {
        let books = Arc::clone(books);
        thread::spawn(move || f(&books))
    }
}

fn sorted(mut ids: Vec<u32>) -> Vec<u32> {
    ids.sort_unstable();
    ids
}

#[test]
fn two_releases_lose_nothing() {
    model(|| {
        let books = Books::held(2);
        let other = Books::spawn(&books, |books| books.release(0));
        books.release(1);
        other.join().expect("no panic");
        assert_eq!(books.orders.queued(TENANT).new, 2);
        assert_eq!(sorted(books.rest()), [0, 1]);
    });
}

#[test]
fn two_hands_never_take_the_same_page() {
    model(|| {
        let books = Books::cached(2);
        let other = Books::spawn(&books, Books::victim);
        let mine = books.victim();
        let theirs = other.join().expect("no panic");
        assert_eq!(sorted([mine, theirs].into_iter().flatten().chain(books.rest()).collect()), [0, 1]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

#[test]
fn a_release_beside_the_hand() {
    model(|| {
        let books = Books::held(2);
        books.release(0);
        let other = Books::spawn(&books, |books| books.release(1));
        let mine = books.victim();
        other.join().expect("no panic");
        assert!(mine.is_some(), "page 0 stood in the order all the time");
        assert_eq!(sorted(mine.into_iter().chain(books.rest()).collect()), [0, 1]);
    });
}

/// Either the hit holds the page, or the page leaves; a page that was held comes back with its release.
#[test]
fn a_hit_beside_the_hand() {
    model(|| {
        let books = Books::cached(1);
        let other = Books::spawn(&books, |books| books.hit(0));
        let mine = books.victim();
        let hit = other.join().expect("no panic");
        assert_ne!(hit, mine.is_some());
        if hit {
            books.release(0);
            assert_eq!(books.rest(), [0]);
        }
    });
}

/// The page is hit and released while the hand has it: it stands in the order once afterwards, or has left.
#[test]
fn a_hit_and_its_release_beside_the_hand() {
    model(|| {
        let books = Books::cached(1);
        let other = Books::spawn(&books, |books| {
            if books.hit(0) {
                books.release(0);
            }
        });
        let mine = books.victim();
        other.join().expect("no panic");
        assert_eq!(mine.into_iter().chain(books.rest()).collect::<Vec<_>>(), [0]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// A page leaves and comes back with another node while somebody else is about to link behind its old one.
#[test]
fn nodes_are_used_again_at_once() {
    model(|| {
        let books = Books::held(2);
        books.release(0);
        let other = Books::spawn(&books, |books| books.recycle(true));
        books.release(1);
        assert!(other.join().expect("no panic").is_some());
        assert_eq!(sorted(books.rest()), [0, 1]);
    });
}

/// The hand takes a page that is linked while the tail doesn't know of it yet, and its node is used again.
#[test]
fn the_hand_overtakes_a_release() {
    model(|| {
        let books = Books::held(1);
        let other = Books::spawn(&books, |books| books.release(0));
        books.recycle(false);
        other.join().expect("no panic");
        books.recycle(false);
        assert_eq!(books.rest(), [0]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// Two rounds bring the same node back to the head: whoever saw it there first must notice.
#[test]
fn an_old_head_is_not_taken_for_the_new_one() {
    model(|| {
        let books = Books::cached(1);
        let other = Books::spawn(&books, |books| {
            let first = books.recycle(false);
            first.and_then(|_| books.victim())
        });
        let mine = books.victim();
        let theirs = other.join().expect("no panic");
        let all: Vec<_> = mine.into_iter().chain(theirs).chain(books.rest()).collect();
        assert_eq!(all, [0]);
    });
}

/// There is always a page in the order, so the hand finds one.
#[test]
fn an_order_that_moves_is_not_empty() {
    model(|| {
        let books = Books::cached(2);
        let other = Books::spawn(&books, |books| books.recycle(false));
        assert!(books.victim().is_some());
        other.join().expect("no panic");
    });
}

/// The last node of one queue becomes the last of another while somebody is about to link behind it.
#[test]
fn a_release_stays_in_its_queue() {
    model(|| {
        let books = Books::held(3);
        books.release(0);
        let other = Books::spawn(&books, |books| {
            books.release(2);
            books.victim();
            books.recycle(true);
        });
        books.release(1);
        other.join().expect("no panic");
        assert_eq!(books.orders.queued(TENANT), Queued { new: 1, proven: 1 });
        assert_eq!(books.rest().len(), 2);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// Between its release and its link a page is hit, loses its key and is published anew, among the proven ones: it stands in
/// the order once.
#[test]
fn a_page_changes_its_half_before_it_is_linked() {
    model(|| {
        let books = Books::held(1);
        let page = PageId(0);
        let release = move |books: &Books| books.pages.transit_with(page, |w| w.drop_ref(Generation(0)));
        assert_eq!(release(&books), Ok(Dropped::Cached { enqueue: true }));
        let other = Books::spawn(&books, move |books| {
            assert!(books.hit(0), "nobody takes it");
            books.pages.transit(page, |w| w.unpublish()).expect("it is held");
            books.pages.transit(page, |w| w.publish(true)).expect("it is held");
            assert_eq!(release(books), Ok(Dropped::Cached { enqueue: false }));
        });
        books.orders.enqueue_all(&books.pages, TENANT, &[page]);
        other.join().expect("no panic");
        assert_eq!(books.rest(), [0]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// Whoever has a page's place in the order looks at it, while others hit it, continue it and let it go, which leaves its word
/// as it was: it does not leave with a child.
#[test]
fn a_leaf_that_gains_a_child_stays() {
    model(|| {
        let books = Books::held(1);
        let page = PageId(0);
        assert!(books.hit(0));
        let release = move |books: &Books| books.pages.transit_with(page, |w| w.drop_ref(Generation(0)));
        release(&books).expect("it is held twice");
        assert_eq!(release(&books), Ok(Dropped::Cached { enqueue: true }));
        let seen = books.pages.read(page);
        assert!(seen.is_visited());
        let other = Books::spawn(&books, move |books| {
            let hit = books.hit(0);
            if hit {
                assert!(books.pages.add_child(page), "there is room");
                assert_eq!(release(books), Ok(Dropped::Cached { enqueue: false }));
            }
            hit
        });
        let taken = take_leaf(&books.pages, page, seen).is_some();
        let hit = other.join().expect("no panic");
        assert!(!(hit && taken), "a page that another one continues has left");
        assert_eq!(books.pages.children(page), u32::from(hit));
    });
}

/// The hand sets a page aside while the last that continues it leaves: it is in the order afterwards, or has left.
#[test]
fn a_page_is_set_aside_while_its_child_leaves() {
    model(|| {
        let books = Books::cached(1);
        assert!(books.pages.add_child(PageId(0)));
        let other = Books::spawn(&books, |books| books.orders.lose_child(&books.pages, PAGE));
        let mine = books.victim();
        other.join().expect("no panic");
        assert_eq!(mine.into_iter().chain(books.rest()).collect::<Vec<_>>(), [0]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// Two children of a page that was set aside leave at once: it comes back once.
#[test]
fn two_children_leave() {
    model(|| {
        let books = Books::cached(1);
        assert!(books.pages.add_child(PageId(0)) && books.pages.add_child(PageId(0)));
        assert_eq!(books.victim(), None);
        let other = Books::spawn(&books, |books| books.orders.lose_child(&books.pages, PAGE));
        books.orders.lose_child(&books.pages, PAGE);
        other.join().expect("no panic");
        assert_eq!(books.rest(), [0]);
    });
}

/// The copy that uses a page's frame ends while the hand sets the page aside, and while its last child leaves.
#[test]
fn a_lease_ends_beside_the_hand_and_the_last_child() {
    for aside in [false, true] {
        model(move || {
            let books = Books::cached(1);
            books.pages.transit(PAGE.id, |w| w.lease(PAGE.generation)).expect("it lives");
            assert!(books.pages.add_child(PAGE.id));
            if aside {
                assert_eq!(books.victim(), None);
            }
            let other = Books::spawn(&books, |books| {
                let ended = books.pages.transit_with(PAGE.id, |w| w.unlease(PAGE.generation, false));
                if ended == Ok(Ended::Aside) {
                    books.orders.relist(&books.pages, PAGE);
                }
            });
            let third = Books::spawn(&books, |books| books.orders.lose_child(&books.pages, PAGE));
            let mine = if aside { None } else { books.victim() };
            other.join().expect("no panic");
            third.join().expect("no panic");
            assert_eq!(mine.into_iter().chain(books.rest()).collect::<Vec<_>>(), [0]);
            assert_eq!(books.orders.queued(TENANT), Queued::default());
        });
    }
}

/// A page that was set aside is hit and let go, which lists it, while its last child leaves: it stands in the order once.
#[test]
fn a_page_that_was_set_aside_is_hit() {
    model(|| {
        let books = Books::cached(1);
        assert!(books.pages.add_child(PageId(0)));
        assert_eq!(books.victim(), None);
        let other = Books::spawn(&books, |books| books.orders.lose_child(&books.pages, PAGE));
        assert!(books.hit(0), "nobody takes it");
        books.release(0);
        other.join().expect("no panic");
        assert_eq!(books.rest(), [0]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// What is ahead is taken by two hands while more is put there, also what has just been taken, in its next life.
#[test]
fn hands_at_what_is_ahead() {
    model(|| {
        let books = Books::cached(2);
        for id in [0, 1].map(PageId) {
            assert!(books.pages.add_child(id));
        }
        assert_eq!(books.victim(), None);
        books.orders.lose_child(&books.pages, PAGE);
        let other = Books::spawn(&books, |books| {
            books.orders.lose_child(&books.pages, PageRef { id: PageId(1), generation: Generation(0) });
            books.recycle(false)
        });
        let mine = books.victims(Some(0), 2);
        let theirs = other.join().expect("no panic");
        // What they put back is taken again by me, or left.
        let times = |id| mine.iter().chain(&theirs).filter(|&&other| other == id).count();
        assert!(mine.len() <= 2 && times(0) + times(1) == mine.len() + usize::from(theirs.is_some()));
        let left = books.rest().len();
        assert_eq!(mine.len() + left, 2);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// Two hands at one prompt, whose pages each wait for the one behind them, while it is hit and let go: each page leaves
/// once, and what both hands have left is still in the order. (Too many steps for loom.)
#[cfg(kvalloc_shuttle)]
#[test]
fn two_hands_at_a_prompt() {
    model(|| {
        let books = Books::held(4);
        let parent = |id: PageId| {
            let before = id.0.checked_sub(1)?;
            Some(PageRef { id: PageId(before), generation: Generation(0) })
        };
        (0..3).for_each(|id| assert!(books.pages.add_child(PageId(id))));
        // As sequences let go of them.
        (0..4).rev().for_each(|id| books.release(id));
        let take = move |books: &Books, now, n| {
            let mut left = vec![];
            books.orders.victims(&books.pages, TENANT, now, n, |id, word| {
                assert!(word.is_leaving());
                left.push(id.0);
                books.pages.transit(id, |w| w.retire()).expect("it is leaving");
                parent(id)
            });
            left
        };
        let other = Books::spawn(&books, move |books| take(books, Some(0), 2));
        let third = Books::spawn(&books, |books| {
            if books.hit(0) && books.hit(1) {
                books.release(1);
                books.release(0);
            } else if books.pages.read(PageId(0)).is_held() {
                books.release(0);
            }
        });
        let mine = take(&books, Some(0), 2);
        let theirs = other.join().expect("no panic");
        third.join().expect("no panic");
        // Whoever was in the other's hand, or was hit, may stay for now.
        let rest = take(&books, None, usize::MAX);
        assert_eq!(sorted([mine, theirs, rest].concat()), [0, 1, 2, 3]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// Two hands that take all at once, while a run is put in.
#[test]
fn runs_beside_runs() {
    model(|| {
        let books = Books::held(4);
        books.release(0);
        books.release(1);
        let other = Books::spawn(&books, |books| books.victims(Some(0), 2));
        for id in [2, 3] {
            books.pages.transit_with(PageId(id), |w| w.drop_ref(Generation(0))).expect("it is held");
        }
        books.orders.enqueue_all(&books.pages, TENANT, &[PageId(2), PageId(3)]);
        let mine = books.victims(Some(0), 2);
        let theirs = other.join().expect("no panic");
        assert_eq!((mine.len(), theirs.len()), (2, 2), "there were four");
        assert_eq!(sorted([mine, theirs].concat()), [0, 1, 2, 3]);
        assert_eq!(books.orders.queued(TENANT), Queued::default());
    });
}

/// A run goes in while another is going in: the order between them is either's, within each it is its own.
#[test]
fn runs_are_not_mixed() {
    model(|| {
        let books = Books::held(4);
        let enqueue = |books: &Books, ids: [u32; 2]| {
            let ids = ids.map(PageId);
            for id in ids {
                books.pages.transit_with(id, |w| w.drop_ref(Generation(0))).expect("it is held");
            }
            books.orders.enqueue_all(&books.pages, TENANT, &ids);
        };
        let other = Books::spawn(&books, move |books| enqueue(books, [0, 1]));
        enqueue(&books, [2, 3]);
        other.join().expect("no panic");
        assert!([[0, 1, 2, 3], [2, 3, 0, 1]].contains(&books.rest()[..].try_into().expect("all four")));
    });
}

/// Of two that are remembered in one word at once, one may be lost, and the word is whole.
#[test]
fn ghosts_of_two_threads() {
    model(|| {
        let ghosts = Arc::new(Ghosts::new(1));
        let other = {
            let ghosts = Arc::clone(&ghosts);
            thread::spawn(move || ghosts.remember(TENANT, 1, true))
        };
        ghosts.remember(TENANT, 2, false);
        other.join().expect("no panic");
        let known = [ghosts.recall(TENANT, 1), ghosts.recall(TENANT, 2)];
        assert!(
            matches!(known, [Some(true), Some(false)] | [Some(true), None] | [None, Some(false)]),
            "{known:?}"
        );
        assert_eq!((ghosts.recall(TENANT, 1), ghosts.recall(TENANT, 2)), (None, None));
    });
}

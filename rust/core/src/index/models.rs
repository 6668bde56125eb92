//! Loom and shuttle: a lookup beside the page's eviction and its next life.

#[cfg(kvalloc_loom)]
use loom::{model, thread};
#[cfg(kvalloc_shuttle)]
use shuttle::thread;

use super::*;
use crate::{sync::Arc, word::page::Shared};

/// Schedules with two or three switches at random places: they reach some that loom's reduction leaves out, because it
/// keeps only the last access to a word. (Plain random ones hardly ever do.)
#[cfg(kvalloc_shuttle)]
fn model(f: impl Fn() + Send + Sync + 'static) {
    shuttle::check_pct(f, 20_000, 3);
}

const SCOPE: TenantId = TenantId(1);
const PAGE: PageId = PageId(0);

struct Books {
    pages: Pages,
    index: Index,
}

impl Books {
    fn new() -> Self {
        Self { pages: Pages::new(1, 0, 2), index: Index::new(1) }
    }

    /// Take the free page and publish content number `n` under `key`.
    fn publish(&self, key: u64, n: u32) -> PageRef {
        let word = self.pages.transit(PAGE, |w| w.take()).expect("it is free");
        let page = PageRef { id: PAGE, generation: word.generation() };
        self.pages.set_payer(PAGE, SCOPE);
        self.pages.set_names(PAGE, key, Link::Digest(u64::from(n)), page.to_bits());
        self.pages.set_tokens(PAGE, &[n, n]);
        self.pages.transit(PAGE, |w| w.publish(false)).expect("it is held");
        assert!(self.index.insert(key, PAGE));
        page
    }

    /// What a lookup of content `n` finds and references.
    fn hit(&self, key: u64, n: u32) -> Option<Seen> {
        let tokens = [n, n];
        let wanted =
            Wanted { key, scope: SCOPE, parent: Parent::Digest(u64::from(n)), tokens: Some(&tokens) };
        self.index.lookup(&self.pages, &wanted, |seen| {
            let taken = self.pages.transit_with(seen.page.id, |w| w.share(seen.page.generation));
            taken.ok().map(|_: Shared| seen)
        })
    }
}

/// Case 14: content 1 leaves while it is looked up, and content 2 takes its page, under the same key: whoever hits 1
/// holds the first life, which then is not taken out; nobody hits 2 with 1's tokens.
#[test]
fn a_lookup_never_hits_the_next_life() {
    for keys in [[5, 5], [5, 9]] {
        model(move || {
            let books = Arc::new(Books::new());
            let first = books.publish(keys[0], 1);
            books.pages.transit_with(PAGE, |w| w.drop_ref(first.generation)).expect("it was held");
            let other = {
                let books = Arc::clone(&books);
                thread::spawn(move || {
                    if books.pages.transit(PAGE, |w| w.evict()).is_err() {
                        return false;
                    }
                    assert!(books.index.remove(keys[0], PAGE));
                    books.pages.transit(PAGE, |w| w.retire()).expect("it is leaving");
                    books.publish(keys[1], 2);
                    true
                })
            };
            let hit = books.hit(keys[0], 1);
            let evicted = other.join().expect("no panic");
            assert!(hit.is_none_or(|seen| seen.page == first), "{hit:?}");
            assert_eq!(hit.is_some(), !evicted, "either it was hit, or it left");
            if evicted {
                assert!(books.hit(keys[0], 1).is_none());
                assert!(books.hit(keys[1], 2).is_some());
            }
        });
    }
}

/// A find without a reference answers with a life that really had the wanted content.
#[test]
fn a_find_names_a_life_with_the_content() {
    model(|| {
        let books = Arc::new(Books::new());
        let first = books.publish(5, 1);
        books.pages.transit_with(PAGE, |w| w.drop_ref(first.generation)).expect("it was held");
        let other = {
            let books = Arc::clone(&books);
            thread::spawn(move || {
                books.pages.transit(PAGE, |w| w.evict()).expect("nobody refers to it");
                books.index.remove(5, PAGE);
                books.pages.transit(PAGE, |w| w.retire()).expect("it is leaving");
                books.publish(5, 2);
            })
        };
        let wanted = Wanted { key: 5, scope: SCOPE, parent: Parent::Digest(1), tokens: Some(&[1, 1]) };
        let found = books.index.lookup(&books.pages, &wanted, Some);
        assert!(found.is_none_or(|seen| seen.page == first && seen.prefix == first.to_bits()));
        other.join().expect("no panic");
    });
}

/// Two inserts and a remove in one word of a bucket: nothing is lost, nothing stays.
#[test]
fn entries_of_one_word_dont_disturb_each_other() {
    model(|| {
        let index = Arc::new(Index::new(3));
        assert!(index.insert(5, PageId(0)));
        let threads: Vec<_> = [1, 2]
            .map(|id| {
                let index = Arc::clone(&index);
                thread::spawn(move || assert!(index.insert(5, PageId(id))))
            })
            .into();
        assert!(index.remove(5, PageId(0)));
        threads.into_iter().for_each(|t| t.join().expect("no panic"));
        assert!(!index.lists(5, PageId(0)));
        assert!(index.lists(5, PageId(1)) && index.lists(5, PageId(2)));
    });
}

/// A page that was found leaves, and continues another one in its next life: what it is said to continue is what it did when it
/// was found, or nothing.
#[test]
fn what_comes_before_a_page_that_was_found() {
    model(|| {
        let books = Arc::new(Books { pages: Pages::new(3, 0, 2), index: Index::new(3) });
        let publish = |books: &Books, id: PageId, link: Link| {
            let word = books.pages.transit(id, |w| w.take()).expect("it is free");
            let page = PageRef { id, generation: word.generation() };
            books.pages.set_names(id, 5, link, page.to_bits());
            books.pages.transit(id, |w| w.publish(false)).expect("it is held");
            page
        };
        let before = [0, 1].map(|id| publish(&books, PageId(id), Link::Digest(1)));
        let found = publish(&books, PageId(2), Link::Page(before[0]));
        books.pages.transit_with(found.id, |w| w.drop_ref(found.generation)).expect("it is held");
        let other = {
            let books = Arc::clone(&books);
            thread::spawn(move || {
                books.pages.transit(found.id, |w| w.evict()).expect("nobody refers to it");
                books.pages.transit(found.id, |w| w.retire()).expect("it is leaving");
                publish(&books, found.id, Link::Page(before[1]))
            })
        };
        let said = page_before(&books.pages, found);
        assert!(said.is_none_or(|page| page == before[0]), "{said:?}");
        let next = other.join().expect("no panic");
        assert_eq!(page_before(&books.pages, next), Some(before[1]));
    });
}

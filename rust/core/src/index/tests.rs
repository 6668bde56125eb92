//! The index over a real page table, one thread.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::{
    hash::{ChainKey, Context, Hasher, Secret},
    word::GroupId,
};

const SCOPE: TenantId = TenantId(3);
const PAGE_TOKENS: usize = 4;

/// Pages, index and hash as the pool uses them, with free pages handed out lowest first.
struct Books {
    pages: Pages,
    index: Index,
    hasher: Hasher,
    free: Vec<PageId>,
}

impl Books {
    fn new(pages: u32, collide: bool) -> Self {
        Self {
            pages: Pages::new(pages, 0, PAGE_TOKENS as u32),
            index: Index::new(pages),
            hasher: Hasher::new(Secret::from_bytes([7; 16]), collide),
            free: (0..pages).rev().map(PageId).collect(),
        }
    }

    fn root(&self) -> ChainKey {
        self.hasher.root(&Context::default())
    }

    /// Publish one page that continues `parent`; what a lookup of it would see.
    fn publish(&mut self, scope: TenantId, parent: Parent, key: ChainKey, tokens: &[u32]) -> Seen {
        let id = self.free.pop().expect("a free page");
        let word = self.pages.transit(id, |w| w.take()).expect("a free page is taken");
        self.pages.set_payer(id, scope);
        let page = PageRef { id, generation: word.generation() };
        let key = self.hasher.index_key(key, GroupId(0));
        let wanted = Wanted { key, scope, parent, tokens: Some(tokens) };
        let prefix = self.index.lookup(&self.pages, &wanted, |seen| Some(seen.prefix));
        let prefix = prefix.unwrap_or(page.to_bits());
        let link = match parent {
            Parent::Page { at, .. } => Link::Page(at),
            Parent::Digest(digest) => Link::Digest(digest),
        };
        self.pages.set_names(id, key, link, prefix);
        self.pages.set_tokens(id, tokens);
        self.pages.transit(id, |w| w.publish(false)).expect("a held page is published");
        self.index.insert(key, id);
        Seen { page, prefix, exact: true }
    }

    /// The pages of a chain under one scope.
    fn publish_chain(&mut self, tokens: &[u32]) -> Vec<Seen> {
        let mut keys = vec![];
        self.hasher.pages(SCOPE, self.root(), PAGE_TOKENS, tokens, &mut keys);
        let mut parent = Parent::Digest(self.hasher.digest(self.root()));
        keys.iter()
            .zip(tokens.chunks_exact(PAGE_TOKENS))
            .map(|(&key, page)| {
                let seen = self.publish(SCOPE, parent, key, page);
                parent = seen.as_parent();
                seen
            })
            .collect()
    }

    /// Release, evict, retire: the page's next life begins.
    fn evict(&mut self, page: PageRef) {
        self.leave(page);
        self.retire(page.id);
    }

    fn leave(&self, page: PageRef) {
        self.pages.transit_with(page.id, |w| w.drop_ref(page.generation)).expect("it was held once");
        self.pages.transit(page.id, |w| w.evict()).expect("nobody holds it");
        self.index.remove(self.pages.key(page.id), page.id);
    }

    fn retire(&mut self, id: PageId) {
        self.pages.transit(id, |w| w.retire()).expect("it is leaving");
        self.free.push(id);
    }

    fn lookup_chain(&self, scope: TenantId, tokens: &[u32]) -> Vec<Seen> {
        let mut keys = vec![];
        self.hasher.pages(scope, self.root(), PAGE_TOKENS, tokens, &mut keys);
        let keys: Vec<_> = keys.iter().map(|&key| self.hasher.index_key(key, GroupId(0))).collect();
        let mut parent = Parent::Digest(self.hasher.digest(self.root()));
        let mut found = vec![];
        for (keys, pages) in keys.chunks(AHEAD).zip(tokens.chunks(AHEAD * PAGE_TOKENS)) {
            let hints = self.index.probe(&self.pages, keys);
            for (nth, (&key, tokens)) in keys.iter().zip(pages.chunks_exact(PAGE_TOKENS)).enumerate() {
                let wanted = Wanted { key, scope, parent, tokens: Some(tokens) };
                let direct = self.index.lookup(&self.pages, &wanted, Some);
                assert_eq!(self.index.lookup_probed(&self.pages, &hints, nth, &wanted, Some), direct);
                // A guess finds the same content, right or wrong; of two copies it may be the other.
                if let [.., Seen { page: before, .. }, Seen { page: last, .. }] = found[..]
                    && let Some(guess) = Hints::onward(&self.pages, before.id, last.id)
                {
                    let guessed = self.index.lookup_probed(&self.pages, &guess, 0, &wanted, Some);
                    assert_eq!(guessed.map(|seen| seen.prefix), direct.map(|seen| seen.prefix));
                }
                let Some(seen) = direct else { return found };
                parent = seen.as_parent();
                found.push(seen);
            }
        }
        found
    }
}

fn tokens(pages: usize, seed: u32) -> Vec<u32> {
    (0..pages * PAGE_TOKENS).map(|i| (i as u32).wrapping_mul(31).wrapping_add(seed * 1_000)).collect()
}

#[test]
fn a_published_chain_is_found_to_its_end() {
    let mut books = Books::new(64, false);
    let chain = books.publish_chain(&tokens(40, 1));
    assert_eq!(books.lookup_chain(SCOPE, &tokens(40, 1)), chain);
    assert!(books.lookup_chain(SCOPE, &tokens(40, 2)).is_empty());
}

/// Case 14: the page of an evicted prefix now holds another one.
#[test]
fn case_14_a_reused_page_is_a_miss() {
    let mut books = Books::new(1, false);
    let first = books.publish_chain(&tokens(1, 1));
    books.evict(first[0].page);
    let second = books.publish_chain(&tokens(1, 2));
    assert_eq!(first[0].page.id, second[0].page.id);
    assert!(books.lookup_chain(SCOPE, &tokens(1, 1)).is_empty());
    assert_eq!(books.lookup_chain(SCOPE, &tokens(1, 2)), second);
}

/// A page that is on its way out misses, though it is listed still.
#[test]
fn a_leaving_page_is_a_miss() {
    let mut books = Books::new(2, false);
    let page = books.publish_chain(&tokens(1, 1))[0].page;
    books.pages.transit_with(page.id, |w| w.drop_ref(page.generation)).expect("it was held once");
    assert_eq!(books.lookup_chain(SCOPE, &tokens(1, 1)).len(), 1);
    books.pages.transit(page.id, |w| w.evict()).expect("nobody holds it");
    assert!(books.index.lists(books.pages.key(page.id), page.id));
    assert!(books.lookup_chain(SCOPE, &tokens(1, 1)).is_empty());
}

/// Case 15: two copies of a prefix; one goes, the other is still hit, and only the last one has no copy.
#[test]
fn case_15_the_other_copy_is_hit() {
    let mut books = Books::new(8, false);
    let one = books.publish_chain(&tokens(3, 1));
    let two = books.publish_chain(&tokens(3, 1));
    assert!(one.iter().zip(&two).all(|(a, b)| a.prefix == b.prefix && a.page != b.page));
    books.leave(one[2].page);
    assert!(books.index.has_copy(&books.pages, one[2].page.id));
    let found = books.lookup_chain(SCOPE, &tokens(3, 1));
    assert_eq!(found.len(), 3);
    assert_eq!(found[2], two[2]);
    books.leave(two[2].page);
    assert!(!books.index.has_copy(&books.pages, two[2].page.id));
    assert_eq!(books.lookup_chain(SCOPE, &tokens(3, 1)).len(), 2);
}

/// Two that published the same page at the same moment have prefixes of their own, and still count as copies.
#[test]
fn copies_with_different_prefixes_are_copies() {
    let mut books = Books::new(4, false);
    let one = books.publish_chain(&tokens(1, 1))[0];
    let two = books.publish_chain(&tokens(1, 1))[0];
    let (key, link) = (books.pages.key(two.page.id), books.pages.link(two.page.id));
    books.pages.set_names(two.page.id, key, link, two.page.to_bits());
    books.leave(one.page);
    assert!(books.index.has_copy(&books.pages, one.page.id));
}

/// Case 16: 1-2-3, 2 is gone: one page hits.
#[test]
fn case_16_a_hit_ends_at_the_first_gap() {
    let mut books = Books::new(8, false);
    let chain = books.publish_chain(&tokens(3, 1));
    books.evict(chain[1].page);
    assert_eq!(books.lookup_chain(SCOPE, &tokens(3, 1)), chain[..1]);
}

/// The middle of a chain comes back in another page: what continued the old one is linked to a life that is over.
#[test]
fn a_rebuilt_middle_does_not_adopt_old_children() {
    let mut books = Books::new(8, false);
    let chain = books.publish_chain(&tokens(3, 1));
    books.evict(chain[1].page);
    books.publish_chain(&tokens(2, 1));
    assert_eq!(books.lookup_chain(SCOPE, &tokens(3, 1)).len(), 2);
}

/// Children of one copy are hit by who follows the other copy.
#[test]
fn a_child_continues_every_copy_of_its_parent() {
    let mut books = Books::new(8, false);
    let one = books.publish_chain(&tokens(2, 1));
    let two = books.publish_chain(&tokens(1, 1));
    let child = Wanted {
        key: books.pages.key(one[1].page.id),
        scope: SCOPE,
        parent: two[0].as_parent(),
        tokens: Some(&tokens(2, 1)[PAGE_TOKENS..]),
    };
    assert_eq!(books.index.lookup(&books.pages, &child, Some), Some(one[1]));
}

/// Case 20: a key that was taken back is offered again.
#[test]
fn case_20_an_unpublished_key_misses() {
    let mut books = Books::new(4, false);
    let page = books.publish_chain(&tokens(1, 1))[0].page;
    let key = books.pages.key(page.id);
    // The holder takes the key away: first the word, then the entry; between the two it is a miss already.
    books.pages.transit(page.id, |w| w.unpublish()).expect("it is held");
    assert!(books.lookup_chain(SCOPE, &tokens(1, 1)).is_empty());
    assert!(books.index.remove(key, page.id));
    assert!(!books.index.remove(key, page.id));
    assert!(books.lookup_chain(SCOPE, &tokens(1, 1)).is_empty());
}

/// Case 24: another scope misses, the same scope hits; even if another scope's key were forged, the payer differs.
#[test]
fn case_24_another_scope_misses() {
    let mut books = Books::new(8, false);
    let chain = books.publish_chain(&tokens(2, 1));
    assert_eq!(books.lookup_chain(SCOPE, &tokens(2, 1)), chain);
    assert!(books.lookup_chain(TenantId(4), &tokens(2, 1)).is_empty());
    let forged = Wanted {
        key: books.pages.key(chain[0].page.id),
        scope: TenantId(4),
        parent: Parent::Digest(books.hasher.digest(books.root())),
        tokens: Some(&tokens(1, 1)),
    };
    assert_eq!(books.index.lookup(&books.pages, &forged, Some), None);
}

/// Case 25: every key collides; only what is exactly the same hits.
#[test]
fn case_25_forced_collisions_never_give_wrong_pages() {
    let mut books = Books::new(16, true);
    let one = books.publish_chain(&tokens(3, 1));
    let two = books.publish_chain(&tokens(3, 2));
    // The same tokens at another place: the same page content, another prefix.
    let twice = [tokens(1, 1), tokens(1, 1)].concat();
    assert_eq!(books.lookup_chain(SCOPE, &twice).len(), 1);
    let moved = books.publish_chain(&twice);
    assert_eq!(books.lookup_chain(SCOPE, &tokens(3, 1)), one);
    assert_eq!(books.lookup_chain(SCOPE, &tokens(3, 2)), two);
    assert_eq!(books.lookup_chain(SCOPE, &twice)[1], moved[1]);
    assert!(books.lookup_chain(SCOPE, &tokens(3, 3)).is_empty());
}

/// A link loses the top bit of its generation; lives beyond 2^31 are compared without it.
#[test]
fn a_link_to_a_late_life_still_holds() {
    let page = |generation| PageRef { id: PageId(1), generation: Generation(generation) };
    assert!(is_link_to(page(5), page(5 | 1 << 31)));
    assert!(!is_link_to(page(5), page(6 | 1 << 31)));
}

/// The table lists (nearly) every page of a full pool, also after its pages were replaced many times.
#[test]
fn a_full_pool_is_nearly_all_listed() {
    for pages in [3, 16, 100, 5_000, 60_000] {
        let index = Index::new(pages);
        let key = |life: u64, id: u32| {
            let mix = |x: u64| (x ^ x >> 31).wrapping_mul(SPREAD);
            mix(mix(mix(life << 32 | u64::from(id) | 1 << 60)))
        };
        let mut unlisted = 0;
        for life in 0..6 {
            for id in 0..pages {
                // A different order of leaving in each life.
                let id = (u64::from(id) * 7_919 % u64::from(pages)) as u32;
                if life > 0 && pages % 7_919 != 0 {
                    index.remove(key(life - 1, id), PageId(id));
                }
                unlisted += u64::from(!index.insert(key(life, id), PageId(id)));
            }
        }
        assert_eq!(index.refused(), unlisted);
        let share = unlisted as f64 / f64::from(pages) / 6.0;
        assert!(share < 0.000_3, "{pages} pages: {share} of the inserts were refused");
    }
}

#[test]
fn a_full_bucket_refuses_and_recovers() {
    let index = Index::new(100);
    let key = SPREAD;
    let mut listed = vec![];
    let id = (0..100).map(PageId).find(|&id| {
        let full = !index.insert(key, id);
        listed.push(id);
        full
    });
    assert_eq!(id, Some(PageId(2 * ENTRIES as u32)), "one key fills its two buckets");
    assert_eq!(index.refused(), 1);
    assert!(index.remove(key, listed[3]));
    assert!(index.insert(key, PageId(99)));
    assert!(index.lists(key, PageId(99)) && !index.lists(key, listed[3]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any sequence of publishing and evicting chains of small pages gives exactly what a map from content gives.
    #[test]
    fn finds_what_a_map_would_find(
        steps in proptest::collection::vec((0u32..5, 1usize..6, any::<bool>(), any::<u16>()), 1..60),
        collide in any::<bool>(),
    ) {
        let mut books = Books::new(24, collide);
        // Content -> the pages that have it; leaves leave first, as the order does it.
        let mut model: HashMap<Vec<u32>, Vec<Seen>> = HashMap::new();
        for (seed, len, publish, pick) in steps {
            let chain = tokens(len, seed);
            if publish && books.free.len() >= len {
                // Chains share their pages: only what is missing is published.
                let mut parent = Parent::Digest(books.hasher.digest(books.root()));
                let mut keys = vec![];
                books.hasher.pages(SCOPE, books.root(), PAGE_TOKENS, &chain, &mut keys);
                for (n, &key) in keys.iter().enumerate() {
                    let content = chain[..(n + 1) * PAGE_TOKENS].to_vec();
                    let copies = model.entry(content).or_default();
                    if copies.is_empty() || pick % 4 == 0 {
                        let page = &chain[n * PAGE_TOKENS..(n + 1) * PAGE_TOKENS];
                        let seen = books.publish(SCOPE, parent, key, page);
                        copies.push(seen);
                    }
                    parent = copies[usize::from(pick) % copies.len()].as_parent();
                }
            } else {
                let leaf = model
                    .iter()
                    .filter(|(content, copies)| {
                        !copies.is_empty()
                            && !model.iter().any(|(c, s)| c.len() > content.len() && c.starts_with(content) && !s.is_empty())
                    })
                    .map(|(content, _)| content.clone())
                    .min();
                if let Some(copies) = leaf.and_then(|leaf| model.get_mut(&leaf)) {
                    let gone = copies.swap_remove(usize::from(pick) % copies.len());
                    books.leave(gone.page);
                    prop_assert_eq!(books.index.has_copy(&books.pages, gone.page.id), !copies.is_empty());
                    books.retire(gone.page.id);
                }
            }
            let known = (1..=len).take_while(|n| model.get(&chain[..n * PAGE_TOKENS]).is_some_and(|c| !c.is_empty())).count();
            let found = books.lookup_chain(SCOPE, &chain);
            prop_assert_eq!(found.len(), known);
            for (n, seen) in found.iter().enumerate() {
                prop_assert!(model[&chain[..(n + 1) * PAGE_TOKENS]].contains(seen));
            }
        }
    }
}

//! Loom and shuttle: one page of a whole pool between a hit, a release, an eviction and a move to the host tier, to a smaller
//! class or to nowhere. Whatever the order of their accesses, it is in one hand, and the ledger knows in which.

use std::sync::Arc;

#[cfg(kvalloc_loom)]
use loom::thread;
#[cfg(kvalloc_shuttle)]
use shuttle::thread;

use super::*;
use crate::{
    hash::Secret,
    ledger::{Policy, ROOT},
    plan::Move,
    pool::Options,
    spec::{Dtype, GroupKind, GroupSpec, Layout, Spec},
    word::{Generation, Units},
};

const G: GroupId = GroupId(0);
const LANE: Lane = Lane(0);

/// A pool makes more accesses than loom expects of a model.
#[cfg(kvalloc_loom)]
fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 10_000;
    builder.check(f);
}

/// Of two accesses to a word by one thread loom sees the last alone, so what another thread reads and then writes escapes it.
#[cfg(kvalloc_shuttle)]
fn model(f: impl Fn() + Sync + Send + 'static) {
    shuttle::check_pct(f, 5_000, 3);
}

/// A pool of one page, which is published and held.
fn pool() -> (Arc<Pool>, TenantId, PageRef) {
    let (pool, [tenant], page) = shared_pool(["t"]);
    (pool, tenant, page)
}

/// The same, with so many tenants; the page is the first one's.
fn shared_pool<const N: usize>(names: [&str; N]) -> (Arc<Pool>, [TenantId; N], PageRef) {
    let group = group(1);
    let spec = Spec::new(2, vec![group], Layout::PageMajor, None).expect("a sound spec");
    let bytes = spec.sizes()[0] * 2;
    pool_of(spec, bytes, names)
}

fn group(layers: u32) -> GroupSpec {
    GroupSpec {
        name: "full".into(),
        kind: GroupKind::Full,
        layers,
        kv_heads: 1,
        k_dim: 32,
        v_dim: 32,
        dtype: Dtype::F16,
        state_bytes: 0,
    }
}

fn pool_of<const N: usize>(spec: Spec, bytes: u64, names: [&str; N]) -> (Arc<Pool>, [TenantId; N], PageRef) {
    let options = Options {
        device_bytes: bytes,
        host_bytes: bytes,
        secret: Some(Secret::from_bytes([1; 16])),
        max_tenants: N as u32,
        compare_tokens: true,
        manual_clock: true,
        events: 0,
        force_collisions: false,
    };
    let pool = Pool::new(spec, &options).expect("a pool");
    let tenants = names.map(|name| pool.ledger().create(ROOT, name, &Policy::default()).expect("a tenant"));
    let page = take(&pool, tenants[0]).expect("it is free");
    (Arc::new(pool), tenants, page)
}

/// The page, published and held.
fn take(pool: &Pool, tenant: TenantId) -> Option<PageRef> {
    let mut pages = Vec::new();
    pool.take(LANE, tenant, G, 1, &mut 0, &mut pages, &mut Scratch::default()).ok()?;
    let names =
        Names { key: 7, parent: Parent::Digest(1), tokens: Some(&[1, 2]), counted: false, continued: false };
    pool.publish(LANE, pages[0], G, &names, false, &mut News::default()).expect("there is room");
    Some(pages[0])
}

/// The page is free, cached or held so often, and the books of both tiers say the same.
fn check(pool: &Pool, tenant: TenantId, page: PageRef, refs: u32) {
    let word = pool.pages.read(page.id);
    assert_eq!(word.refs(), refs);
    for tier in Tier::ALL {
        let here = pool.pages.location(page.id).tier() == Some(tier);
        let usage = pool.ledger.usage(tier, tenant);
        let expected = (u32::from(here && word.is_held()), u32::from(here && word.is_cached()));
        assert_eq!((usage.held, usage.cached), (Units(expected.0), Units(expected.1)), "{tier:?} {word:?}");
        assert_eq!(here, pool.arena(tier).free_bytes() == 0, "{tier:?} {word:?}");
        assert_eq!(pool.arena(tier).faults(), 0);
    }
    assert_eq!(word.is_free(), !pool.slots.is_allocated(page.id));
    assert_eq!(word.is_indexed(), pool.index.lists(7, page.id));
    assert_eq!(pool.ledger.faults() + pool.slots.faults(), 0);
}

/// What a plan has prepared for moving the page to the host tier: where from and where to. `None`: it can't be moved.
fn depart(pool: &Pool, tenant: TenantId, page: PageRef) -> Option<(Location, Location)> {
    let from = pool.lease_out(page)?;
    let mut frames = Vec::new();
    pool.take_frames(LANE, Tier::Host, tenant, from.class(), 1, &mut frames).expect("it is free");
    Some((from, Location::new(Tier::Host, from.class(), frames[0])))
}

/// The end of the move, as a plan's; no batch shows the place that the page has left.
fn end(pool: &Pool, tenant: TenantId, page: PageRef, (from, to): (Location, Location), done: bool) {
    pool.end_move(LANE, &Move { page, from, to, payer: tenant }, done);
    pool.quiescence.drain(&pool.arenas);
}

fn release(pool: &Pool, page: PageRef) -> usize {
    pool.let_go(LANE, &[page], &mut Scratch::default())
}

/// Evict the page, if it can be.
fn evict(pool: &Pool, tenant: TenantId) -> bool {
    pool.orders.victims(&pool.pages, tenant, Some(0), 1, |id, word| pool.expel(id, word)) == 1
}

#[test]
fn a_hit_beside_an_eviction() {
    model(|| {
        let (pool, tenant, page) = pool();
        release(&pool, page);
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || evict(&pool, tenant))
        };
        let hit = pool.hold(Lane(1), &[page]).0 == 1;
        let evicted = other.join().expect("no panic");
        assert!(!(hit && evicted), "in two hands");
        check(&pool, tenant, page, hit.into());
    });
}

#[test]
fn a_release_beside_a_hit() {
    model(|| {
        let (pool, tenant, page) = pool();
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.hold(Lane(1), &[page]).0 == 1)
        };
        assert_eq!(release(&pool, page), 0);
        // Between two bookings of the release the page counts as held, and its unit is all there is: then it is no hit.
        let hit = other.join().expect("no panic");
        check(&pool, tenant, page, hit.into());
    });
}

#[test]
fn a_release_beside_an_eviction() {
    model(|| {
        let (pool, tenant, page) = pool();
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || evict(&pool, tenant))
        };
        assert_eq!(release(&pool, page), 0);
        let evicted = other.join().expect("no panic");
        check(&pool, tenant, page, 0);
        assert_eq!(evicted, pool.pages.read(page.id).is_free());
    });
}

#[test]
fn two_releases_of_one_reference() {
    model(|| {
        let (pool, tenant, page) = pool();
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || release(&pool, page))
        };
        let stale = release(&pool, page);
        assert_eq!(stale + other.join().expect("no panic"), 1);
        check(&pool, tenant, page, 0);
    });
}

#[test]
fn a_hit_beside_a_departure() {
    model(|| {
        let (pool, tenant, page) = pool();
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.hold(Lane(1), &[page]).0 == 1)
        };
        let way = depart(&pool, tenant, page);
        if let Some(way) = way {
            end(&pool, tenant, page, way, true);
        }
        let hit = other.join().expect("no panic");
        assert!(!(hit && way.is_some()), "off the device, and hit");
        assert!(hit || way.is_some(), "nothing else keeps it");
        check(&pool, tenant, page, 1 + u32::from(hit));
    });
}

#[test]
fn a_release_beside_the_end_of_a_departure() {
    for done in [true, false] {
        model(move || {
            let (pool, tenant, page) = pool();
            let way = depart(&pool, tenant, page).expect("held once");
            let other = {
                let pool = Arc::clone(&pool);
                thread::spawn(move || release(&pool, page))
            };
            end(&pool, tenant, page, way, done);
            assert_eq!(other.join().expect("no panic"), 0);
            check(&pool, tenant, page, 0);
            // Off the device it is no use to anybody; on it, it can be hit.
            let word = pool.pages.read(page.id);
            let kept = pool.pages.location(page.id).tier() == Some(Tier::Device);
            assert_eq!((word.is_cached(), word.is_free(), word.is_away()), (kept, !kept, false));
        });
    }
}

#[test]
fn a_release_beside_a_return() {
    model(|| {
        let (pool, tenant, page) = pool();
        let out = depart(&pool, tenant, page).expect("held once");
        end(&pool, tenant, page, out, true);
        let from = pool.lease_out(page).expect("held once");
        let mut frames = Vec::new();
        pool.take_frames(LANE, Tier::Device, tenant, from.class(), 1, &mut frames).expect("it is free");
        let to = Location::new(Tier::Device, from.class(), frames[0]);
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || release(&pool, page))
        };
        end(&pool, tenant, page, (from, to), true);
        assert_eq!(other.join().expect("no panic"), 0);
        check(&pool, tenant, page, 0);
        assert!(pool.pages.read(page.id).is_cached(), "it has come back, and can be hit");
    });
}

/// A page off the device that an order lists still is let go while the hand takes it, and its frame and its id become
/// another tenant's: each is charged for his own.
#[test]
fn a_release_beside_the_eviction_of_what_is_away() {
    model(|| {
        let (pool, [tenant, next], page) = shared_pool(["t", "u"]);
        assert_eq!(release(&pool, page), 0);
        assert_eq!(pool.hold(LANE, &[page]).0, 1);
        let way = depart(&pool, tenant, page).expect("held once");
        end(&pool, tenant, page, way, true);
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || evict(&pool, tenant).then(|| take(&pool, next).expect("it is free")))
        };
        assert_eq!(release(&pool, page), 0);
        match other.join().expect("no panic") {
            None => check(&pool, tenant, page, 0),
            Some(page) => {
                check(&pool, next, page, 1);
                for tier in Tier::ALL {
                    let left = pool.ledger.usage(tier, tenant);
                    assert_eq!((left.held, left.cached), (Units(0), Units(0)), "{tier:?}");
                }
            }
        }
    });
}

/// Somebody guesses the next life of a page, which becomes another tenant's at that moment: whose books move is his.
#[test]
fn a_guessed_reference_beside_the_next_life() {
    model(|| {
        let (pool, [tenant, next], page) = shared_pool(["t", "u"]);
        assert_eq!(release(&pool, page), 0);
        assert!(evict(&pool, tenant));
        let guess = PageRef { generation: Generation(page.generation.0 + 1), ..page };
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                let page = take(&pool, next).expect("it is free");
                assert_eq!(release(&pool, page), 0);
            })
        };
        let held = pool.hold(Lane(1), &[guess]).0 as u32;
        other.join().expect("no panic");
        check(&pool, next, guess, held);
        let left = pool.ledger.usage(Tier::Device, tenant);
        assert_eq!((left.held, left.cached), (Units(0), Units(0)));
    });
}

/// A page is let go while its compression ends, one way or the other: it is as it was, and can be hit, or free; nothing is left of
/// the place that it did not get.
#[test]
fn a_release_beside_the_end_of_a_compression() {
    for done in [true, false] {
        model(move || {
            let spec =
                Spec::new(2, vec![group(2)], Layout::PageMajor, Some(Dtype::Fp8)).expect("a sound spec");
            let bytes = 3 * spec.granule();
            let (pool, [tenant], page) = pool_of(spec, bytes, ["t"]);
            let small = pool.spec.small_class_of(G).expect("it has one");
            let from = pool.lease_out(page).expect("held once");
            let mut frames = Vec::new();
            pool.take_frames(LANE, Tier::Device, tenant, small, 1, &mut frames).expect("it is free");
            let to = Location::new(Tier::Device, small, frames[0]);
            let other = {
                let pool = Arc::clone(&pool);
                thread::spawn(move || release(&pool, page))
            };
            end(&pool, tenant, page, (from, to), done);
            assert_eq!(other.join().expect("no panic"), 0);
            let (word, at) = (pool.pages.read(page.id), pool.pages.location(page.id));
            let usage = pool.ledger.usage(Tier::Device, tenant);
            let units = if word.is_cached() { pool.groups[0].units } else { 0 };
            assert_eq!((usage.held, usage.cached), (Units(0), Units(units)), "{word:?}");
            assert_eq!((word.is_away(), word.is_free()), (false, at == Location::NOWHERE));
            let arena = pool.arena(Tier::Device);
            let used = arena.capacity_bytes() - arena.free_bytes();
            assert_eq!((used, arena.faults()), (pool.bytes(units), 0));
            assert!(word.is_cached() || done, "what came to nothing can be hit");
        });
    }
}

/// A plan that cuts the page has leased it. `None`: it can't be cut.
fn cut(pool: &Pool, tenant: TenantId, page: PageRef) -> Option<Move> {
    let from = pool.lease_out(page)?;
    Some(Move { page, from, to: Location::gone(from.class()), payer: tenant })
}

/// The page holds its frame and is charged, or neither.
fn check_cut(pool: &Pool, tenant: TenantId, page: PageRef) {
    pool.quiescence.drain(&pool.arenas);
    let (word, at) = (pool.pages.read(page.id), pool.pages.location(page.id));
    let there = !word.is_free() && !at.is_gone();
    let usage = pool.ledger.usage(Tier::Device, tenant);
    let expected = (u32::from(there && word.is_held()), u32::from(there && word.is_cached()));
    assert_eq!((usage.held, usage.cached), (Units(expected.0), Units(expected.1)), "{word:?} {at:?}");
    assert_eq!(there, pool.arena(Tier::Device).free_bytes() == 0, "{word:?} {at:?}");
    assert_eq!(word.is_free(), !pool.slots.is_allocated(page.id));
    assert_eq!(word.is_indexed(), pool.index.lists(7, page.id));
    assert_eq!(at.is_gone(), !word.is_free() && word.is_away(), "{word:?} {at:?}");
    assert_eq!(pool.arena(Tier::Device).faults() + pool.ledger.faults() + pool.slots.faults(), 0);
}

#[test]
fn a_release_beside_the_end_of_a_cut() {
    for done in [true, false] {
        model(move || {
            let (pool, tenant, page) = pool();
            let way = cut(&pool, tenant, page).expect("held once");
            let other = {
                let pool = Arc::clone(&pool);
                thread::spawn(move || release(&pool, page))
            };
            let moved = pool.end_move(LANE, &way, done);
            assert_eq!(other.join().expect("no panic"), 0);
            check_cut(&pool, tenant, page);
            // Let go before the end, it is as before and can be hit; after it nothing is left.
            let word = pool.pages.read(page.id);
            assert_eq!((word.is_free(), word.is_cached()), (moved, !moved));
        });
    }
}

#[test]
fn a_hit_beside_a_cut() {
    model(|| {
        let (pool, tenant, page) = pool();
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.hold(Lane(1), &[page]).0 == 1)
        };
        let way = cut(&pool, tenant, page);
        let moved = way.is_some_and(|way| pool.end_move(LANE, &way, true));
        let hit = other.join().expect("no panic");
        assert!(hit != moved, "one of the two");
        check_cut(&pool, tenant, page);
    });
}

/// A fork, by whoever holds the page.
#[test]
fn a_second_reference_beside_the_end_of_a_cut() {
    model(|| {
        let (pool, tenant, page) = pool();
        let way = cut(&pool, tenant, page).expect("held once");
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.hold_again(std::iter::once(page)) == 1)
        };
        assert!(pool.end_move(LANE, &way, true));
        // It shares the page when that has gone, and is refused before.
        let shared = other.join().expect("no panic");
        check_cut(&pool, tenant, page);
        assert_eq!(pool.pages.read(page.id).refs(), 1 + u32::from(shared));
        (0..=u32::from(shared)).for_each(|_| assert_eq!(release(&pool, page), 0));
        check_cut(&pool, tenant, page);
    });
}

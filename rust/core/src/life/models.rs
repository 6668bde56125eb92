//! Loom: one page of a whole pool between a hit, a release and an eviction. Whatever the order of their accesses, it is in
//! one hand, and the ledger knows in which.

use std::sync::Arc;

use loom::thread;

use super::*;
use crate::{
    hash::Secret,
    ledger::{Policy, ROOT},
    pool::Options,
    spec::{Dtype, GroupKind, GroupSpec, Layout, Spec},
    word::Units,
};

const G: GroupId = GroupId(0);
const LANE: Lane = Lane(0);

/// A pool of one page, which is published and held.
fn pool() -> (Arc<Pool>, TenantId, PageRef) {
    let group = GroupSpec {
        name: "full".into(),
        kind: GroupKind::Full,
        layers: 1,
        kv_heads: 1,
        k_dim: 32,
        v_dim: 32,
        dtype: Dtype::F16,
        state_bytes: 0,
    };
    let spec = Spec::new(2, vec![group], Layout::PageMajor, None).expect("a sound spec");
    let options = Options {
        device_bytes: spec.sizes()[0] * 2,
        host_bytes: 0,
        secret: Some(Secret::from_bytes([1; 16])),
        max_tenants: 1,
        compare_tokens: true,
        manual_clock: true,
        events: 0,
        force_collisions: false,
    };
    let pool = Pool::new(spec, &options).expect("a pool");
    let tenant = pool.ledger().create(ROOT, "t", &Policy::default()).expect("a tenant");
    let mut pages = Vec::new();
    let taken = pool.take(LANE, tenant, G, 1, &mut 0, &mut pages, &mut Scratch::default());
    taken.expect("it is free");
    let names = Names {
        key: 7,
        parent: Parent::Digest(1),
        tokens: Some(&[1, 2]),
        counted: false,
        continued: false,
    };
    pool.publish(LANE, pages[0], G, &names, false, &mut News::default()).expect("there is room");
    (Arc::new(pool), tenant, pages[0])
}

/// The page is free, cached or held so often, and the ledger says the same.
fn check(pool: &Pool, tenant: TenantId, page: PageRef, refs: u32) {
    let word = pool.pages.read(page.id);
    assert_eq!(word.refs(), refs);
    let usage = pool.ledger.usage(Tier::Device, tenant);
    let expected = (u32::from(word.is_held()), u32::from(word.is_cached()));
    assert_eq!((usage.held, usage.cached), (Units(expected.0), Units(expected.1)), "{word:?}");
    let free = pool.arena(Tier::Device).free_bytes() > 0;
    assert_eq!((word.is_free(), word.is_free()), (free, !pool.slots.is_allocated(page.id)));
    assert_eq!(word.is_indexed(), pool.index.lists(7, page.id));
    assert_eq!(pool.ledger.faults() + pool.slots.faults() + pool.arena(Tier::Device).faults(), 0);
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
    loom::model(|| {
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
    loom::model(|| {
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
    loom::model(|| {
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
    loom::model(|| {
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

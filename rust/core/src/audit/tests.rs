//! Books that are broken by hand, one word at a time: the audit names the page, and changes nothing.

use std::sync::Arc;

use crate::{
    arrays::{Owned, Shape},
    audit::Report,
    batch::Batch,
    ledger::{Policy, ROOT},
    pool::{Options, Pool},
    sequence::{Open, Sequence},
    spec::{Dtype, GroupKind, GroupSpec, Layout, Spec},
    sync::Atom,
    word::{ClassId, FrameId, GroupId, Lane, PageId, TenantId, Tier, Units, page::Location},
};

fn pool(pages: u64) -> Arc<Pool> {
    let group = GroupSpec {
        name: "full".into(),
        kind: GroupKind::Full,
        layers: 2,
        kv_heads: 2,
        k_dim: 64,
        v_dim: 64,
        dtype: Dtype::F16,
        state_bytes: 0,
    };
    let spec = Spec::new(16, vec![group], Layout::PageMajor, None).expect("a spec");
    let options = Options {
        device_bytes: spec.sizes()[0] * (pages + 1),
        host_bytes: 0,
        secret: None,
        max_tenants: 64,
        compare_tokens: true,
        manual_clock: true,
        events: 0,
        force_collisions: false,
    };
    Arc::new(Pool::new(spec, &options).expect("a pool"))
}

fn batch(pool: &Arc<Pool>, rows: usize, tokens: u32) -> Batch {
    let shape = Shape { rows, tokens, pages: tokens.div_ceil(16) as usize, step: tokens + rows as u32 };
    Batch::new(pool, shape, Box::new(Owned::new(shape, pool.groups.len()))).expect("a batch")
}

fn green(pool: &Pool) {
    let report = pool.audit();
    assert!(report.exact && report.findings.is_empty(), "{report:#?}");
}

/// Two prompts, one of them cached: pages of both kinds, with parents and children.
struct Scene {
    pool: Arc<Pool>,
    tenant: TenantId,
    running: Arc<Sequence>,
    /// Pages of the running one, in order.
    held: Vec<PageId>,
    cached: Vec<PageId>,
}

fn scene() -> Scene {
    let pool = pool(20);
    let tenant = pool.ledger().create(ROOT, "acme", &Policy::default()).expect("a tenant");
    let serve = |from: u32| {
        let tokens = (from..from + 64).collect();
        let seq = pool.open(tenant, Open { tokens, ..Open::default() }).expect("opened");
        let rows = batch(&pool, 1, 100);
        rows.add(&seq).expect("a row");
        rows.step(None, None, |_| ()).expect("a step");
        rows.commit(None).expect("committed");
        rows.remove(&seq).expect("removed");
        let (_, pages) = seq.pages(GroupId(0)).expect("pages");
        (seq, pages.into_iter().map(|(page, _)| page.id).collect::<Vec<_>>())
    };
    let (done, cached) = serve(1000);
    let (running, held) = serve(2000);
    done.close().expect("closed");
    green(&pool);
    Scene { pool, tenant, running, held, cached }
}

/// What the audit says, which has to be the same when it is asked again: it repairs nothing.
fn findings(pool: &Pool) -> Report {
    let report = pool.audit();
    assert_eq!(report, pool.audit(), "an audit changes nothing");
    report
}

#[track_caller]
fn names(pool: &Pool, page: PageId, text: &str) {
    let Report { findings, .. } = findings(pool);
    let named = findings.iter().any(|f| f.page == Some(page) && f.text.contains(text));
    assert!(named, "no finding of {page} says {text:?}: {findings:#?}");
}

#[track_caller]
fn says(pool: &Pool, text: &str) {
    let Report { findings, .. } = findings(pool);
    assert!(findings.iter().any(|f| f.text.contains(text)), "no finding says {text:?}: {findings:#?}");
}

const REF: u64 = 1;
const LIVE: u64 = 1 << 24;
const INDEXED: u64 = 1 << 25;
const QUEUED: u64 = 1 << 26;
const LEAVING: u64 = 1 << 29;

#[test]
fn a_page_word_with_a_bit_too_many_or_too_few() {
    let Scene { pool, held, cached, running: _running, .. } = scene();
    let flips = [
        (held[1], LIVE, "free, and yet"),
        (held[1], LEAVING, "leaving, and yet held"),
        (cached[1], LEAVING, "leaving, and nobody"),
        (cached[3], QUEUED, "in no eviction order"),
        (cached[3], LIVE, "free, and yet"),
        (cached[3], INDEXED, "neither held nor findable"),
    ];
    for (page, bit, text) in flips {
        let word = pool.pages.word(page);
        let before = word.exchange(word.get() ^ bit);
        if bit == INDEXED && pool.pages.read(page).is_queued() {
            // Unfindable and cached: its parent still counts it.
            says(&pool, "children in the index");
        } else {
            names(&pool, page, text);
        }
        assert_eq!(word.exchange(before), before ^ bit, "the word is as it was broken");
        green(&pool);
    }
}

#[test]
fn references_that_the_ledger_does_not_know() {
    let Scene { pool, held, cached, running: _running, .. } = scene();
    // A cached page that got a reference from nowhere, and a held one that lost its own.
    for (page, text) in [(cached[2], "the ledger says held"), (held[2], "the ledger says held")] {
        let word = pool.pages.word(page);
        word.put(word.get() ^ REF);
        says(&pool, text);
        word.put(word.get() ^ REF);
        green(&pool);
    }
}

#[test]
fn a_child_count() {
    let Scene { pool, held, cached, running: _running, .. } = scene();
    for page in [held[0], held[3], cached[0], cached[3]] {
        assert!(pool.pages.add_child(page));
        names(&pool, page, "children in the index, and has");
        let _ = pool.pages.remove_child(page);
        green(&pool);
    }
}

#[test]
fn an_index_entry() {
    let Scene { pool, held, cached, running: _running, .. } = scene();
    for page in [held[0], cached[3]] {
        let key = pool.pages.key(page);
        assert!(pool.index.remove(key, page));
        names(&pool, page, "the index does not list it");
        assert!(pool.index.insert(key, page));
        green(&pool);
    }
}

#[test]
fn a_pin() {
    let Scene { pool, held, cached, running: _running, .. } = scene();
    for page in [held[0], cached[3]] {
        let word = pool.pages.word(page);
        let before = word.get();
        pool.pages.transit_with(page, |w| w.pin(w.generation())).expect("a live page");
        names(&pool, page, "the list says 0");
        word.put(before);
        green(&pool);
    }
}

#[test]
fn a_charge() {
    let Scene { pool, tenant, running: _running, .. } = scene();
    pool.ledger.charge(Tier::Device, tenant, Lane(0), Units(1)).expect("room");
    says(&pool, "the ledger says held");
    pool.ledger.discharge(Tier::Device, tenant, Lane(0), Units(1));
    green(&pool);
    pool.ledger.park(Tier::Device, tenant, Units(1));
    says(&pool, "the ledger says held");
    pool.ledger.revive(Tier::Device, tenant, Units(1)).expect("room");
    green(&pool);
}

#[test]
fn a_location() {
    let Scene { pool, held, running: _running, .. } = scene();
    let size = pool.spec.classes()[0].size;
    let free = (1..20)
        .map(FrameId)
        .find(|&f| !pool.arena(Tier::Device).is_allocated(size, f))
        .expect("a free frame");
    let places = [
        (Location::NOWHERE, "lies nowhere"),
        (pool.pages.location(held[1]), "another page lies too"),
        (Location::new(Tier::Device, ClassId(0), free), "that frame is free"),
        (Location::new(Tier::Device, ClassId(7), FrameId(1)), "class does not exist"),
    ];
    for (place, text) in places {
        let before = pool.pages.location(held[2]);
        pool.pages.set_location(held[2], place);
        names(&pool, held[2], text);
        pool.pages.set_location(held[2], before);
        green(&pool);
    }
}

#[test]
fn a_payer() {
    let Scene { pool, tenant, held, running: _running, .. } = scene();
    // One without children: setting a payer sets their count too.
    for (payer, text) in [(TenantId(40), "is no tenant"), (ROOT, "")] {
        pool.pages.set_payer(held[3], payer);
        if text.is_empty() {
            says(&pool, "the ledger says held");
        } else {
            names(&pool, held[3], text);
        }
        pool.pages.set_payer(held[3], tenant);
        green(&pool);
    }
}

#[test]
fn a_frame_and_an_id_that_were_freed_under_a_page() {
    let Scene { pool, held, running, .. } = scene();
    let place = pool.pages.location(held[1]);
    let size = pool.spec.classes()[0].size;
    pool.arena(Tier::Device).release(size, place.frame()).expect("allocated");
    names(&pool, held[1], "that frame is free");
    pool.slots.release(held[2]).expect("allocated");
    names(&pool, held[2], "its id is in the free set");
    says(&pool, "the parts differ from the capacity by");
    // The second release is refused, counted, and told for ever after: that is no state to be proud of.
    running.close().expect("closed");
    pool.reset_prefix_cache().expect("nothing is held");
    says(&pool, "frames were released twice");
    says(&pool, "page ids were released twice");
}

#[test]
fn what_is_broken_under_load_is_still_found() {
    let Scene { pool, held, running: _running, .. } = scene();
    let word = pool.pages.word(held[1]);
    word.put(word.get() ^ LEAVING);
    // An operation that never leaves: the sums mean nothing, and the page is named all the same.
    let op = pool.enter(Lane(3));
    let report = pool.audit();
    assert!(!report.exact);
    assert!(report.findings.iter().any(|f| f.page == Some(held[1])), "{report:#?}");
    word.put(word.get() ^ LEAVING);
    assert!(pool.audit().findings.is_empty());
    drop(op);
    green(&pool);
}

#[test]
fn the_last_handle_of_a_batch_dropped_inside_a_call_on_its_sequence() {
    let pool = pool(10);
    let tenant = pool.ledger().create(ROOT, "acme", &Policy::default()).expect("a tenant");
    let seq = pool.open(tenant, Open { tokens: vec![1; 20], ..Open::default() }).expect("opened");
    let rows = batch(&pool, 1, 100);
    rows.add(&seq).expect("a row");
    rows.step(None, None, |_| ()).expect("a step");
    // The batch's end takes the lock of its sequence, which this call holds while it works.
    seq.visit(|_, _, _| drop(rows)).expect("free");
    assert_eq!(seq.counts().expect("free").slots, 0);
    green(&pool);
    assert_eq!(pool.audit().balance[0].held, 0);
}

//! One thread, one thing at a time: what a scheduler does.

use super::build::{batch, empty, green, plain_tenant, pool, relocate, spec, specs, tenant};
use crate::{
    face::Pages,
    ledger::Policy,
    sequence::Open,
    spec::GroupKind,
    word::{GroupId, Tier, Units},
};

#[test]
fn a_scheduler_goes_about_its_work() {
    let pool = pool(spec(&[(GroupKind::Full, 1)]), 400);
    let t = plain_tenant(&pool, "acme");
    let tokens: Vec<u32> = (0..100).collect();
    green(&pool);
    let seq = pool.open(t, Open { tokens: tokens.clone(), ..Open::default() }).expect("open");
    assert_eq!(seq.counts().expect("counts").cached, 0);
    let b = batch(&pool, 8, 1024);
    b.add(&seq).expect("row");
    b.step(None, None, |s| {
        assert_eq!(s.num_tokens, 100);
        assert!(s.refused.is_empty());
    })
    .expect("step");
    b.commit(Some(&[5])).expect("commit");
    for i in 0..50 {
        b.step(None, None, |s| assert_eq!(s.num_tokens, 1)).expect("step");
        b.commit(Some(&[i])).expect("commit");
        green(&pool);
    }
    assert_eq!(seq.counts().expect("c").written, 150);
    let again = pool.open(t, Open { tokens: tokens.clone(), ..Open::default() }).expect("open");
    assert_eq!(again.counts().expect("c").cached, 96);
    green(&pool);
    b.remove(&seq).expect("removed");
    drop(seq);
    drop(again);
    green(&pool);
    assert_eq!(pool.audit().balance[0].held, 0);
    // fill so that everything is evicted
    for n in 0..40u32 {
        let tokens: Vec<u32> = (0..200).map(|i| n * 1000 + i).collect();
        let seq = pool
            .open(t, Open { tokens: tokens.clone(), max_new_tokens: 10, admit: true, ..Open::default() })
            .expect("open");
        b.add(&seq).expect("row");
        b.step(None, None, |s| assert!(s.refused.is_empty(), "{s:?}")).expect("step");
        b.commit(Some(&[1])).expect("commit");
        seq.close().expect("close");
        green(&pool);
    }
}

#[test]
fn a_moved_page_is_shown_by_the_next_step_and_its_old_frame_waits() {
    let pool = pool(spec(&[(GroupKind::Full, 1)]), 10);
    let t = plain_tenant(&pool, "acme");
    let seq = pool.open(t, Open { tokens: (0..9).collect(), ..Open::default() }).expect("open");
    let b = batch(&pool, 2, 40);
    b.add(&seq).expect("row");
    b.step(None, None, |_| ()).expect("step");
    let (_, pages) = seq.pages(GroupId(0)).expect("pages");
    let (page, from) = pages[1];
    assert_eq!(relocate(&pool, page, |_, _| ()), None, "the step may write to it");
    b.commit(Some(&[1])).expect("commit");
    b.step(None, None, |_| ()).expect("step");
    let mut copied = None;
    let to = relocate(&pool, page, |from, to| copied = Some((from, to))).expect("a frame is free");
    assert_eq!(copied, Some((from, to)));
    // The step that is outstanding still shows the old frame, so it is neither free nor a page's.
    assert_eq!(pool.audit().balance[0].in_flight, pool.spec().sizes()[0]);
    green(&pool);
    b.commit(Some(&[1])).expect("commit");
    b.step(None, None, |_| ()).expect("step");
    assert_eq!(seq.pages(GroupId(0)).expect("pages").1[1], (page, to));
    b.commit(Some(&[1])).expect("commit");
    assert_eq!(pool.quiescence.drain(&pool.arenas), 1);
    green(&pool);
    // Let go while a copy uses it: the end of the lease frees it.
    let page = seq.pages(GroupId(0)).expect("pages").1[2].0;
    assert_eq!(relocate(&pool, page, |_, _| ()), None, "the next step writes to it");
    b.remove(&seq).expect("it has a row");
    let moved = relocate(&pool, page, |_, _| seq.close().expect("closes"));
    assert!(moved.is_some());
    pool.quiescence.drain(&pool.arenas);
    green(&pool);
    assert_eq!(pool.audit().balance[0].held, 0);
}

/// An order that is emptied while a copy uses one of its pages sets that page aside, and what it continues; afterwards they leave.
#[test]
fn a_cached_page_is_moved_while_its_order_is_emptied() {
    let pool = pool(spec(&[(GroupKind::Full, 1)]), 8);
    let t = plain_tenant(&pool, "t");
    let b = batch(&pool, 1, 40);
    let seq = pool.open(t, Open { tokens: (0..17).collect(), ..Open::default() }).expect("open");
    b.add(&seq).expect("row");
    b.step(None, None, |_| ()).expect("step");
    b.commit(None).expect("commit");
    let table = seq.pages(GroupId(0)).expect("pages").1;
    drop((b, seq));
    assert_eq!(pool.ledger().usage(Tier::Device, t).cached, Units(4));
    relocate(&pool, table[2].0, |_, _| {
        assert_eq!(
            pool.reset_prefix_cache(),
            Ok(1),
            "page 3 leaves, page 2 is copied, 1 and 0 come before it"
        );
        green(&pool);
    })
    .expect("a frame is free");
    assert_eq!(pool.reset_prefix_cache(), Ok(3));
    empty(&pool);
}

/// Of every spec: what was computed is hit, again and again. (The model of machine.rs allows every miss.)
#[test]
fn what_was_computed_is_hit() {
    for (name, spec) in specs() {
        let states = spec.groups().iter().any(|g| g.kind == GroupKind::State);
        let pool = pool(spec, 40);
        let t = plain_tenant(&pool, "t");
        let b = batch(&pool, 2, 40);
        let first = pool.open(t, Open { tokens: (0..8).collect(), ..Open::default() }).expect("open");
        b.add(&first).expect("row");
        b.step(None, None, |_| ()).expect("step");
        assert!(!first.keep_state().expect("free"), "{name}: what a step moves on is no snapshot");
        b.commit(None).expect("commit");
        assert_eq!(first.keep_state(), Ok(states), "{name}");
        first.close().expect("close");
        for round in 0..3 {
            let again = pool.open(t, Open { tokens: (0..13).collect(), ..Open::default() }).expect("open");
            // From the second time on the last whole page is there as well, but for a state, of which nobody kept it.
            let cached = if round > 0 && !states { 12 } else { 8 };
            assert_eq!(again.counts().expect("free").cached, cached, "{name}, round {round}");
            b.add(&again).expect("row");
            b.step(None, None, |s| assert!(s.refused.is_empty())).expect("step");
            b.commit(None).expect("commit");
            again.close().expect("close");
            green(&pool);
        }
        drop(b);
        empty(&pool);
    }
}

/// Children in the order of one tenant, their parents in that of another: a limit that is in the way, and a reset.
#[test]
fn parents_of_another_tenants_pages_go_after_them() {
    let pool = pool(spec(&[(GroupKind::Full, 1)]), 4);
    let org = plain_tenant(&pool, "org");
    let publish = Policy { publish: vec![(org, None)], ..Policy::default() };
    let a = tenant(&pool, org, "a", &publish);
    let b = batch(&pool, 1, 40);
    let serve = || {
        let open = Open { tokens: (0..16).collect(), share: &[(org, 8)], ..Open::default() };
        let seq = pool.open(a, open).expect("open");
        b.add(&seq).expect("row");
        b.step(None, None, |s| assert!(s.refused.is_empty())).expect("step");
        b.commit(None).expect("commit");
        seq.close().expect("close");
    };
    serve();
    let cached = |t| pool.ledger().usage(Tier::Device, t).cached;
    assert_eq!((cached(org), cached(a)), (Units(2), Units(2)));
    let face = Pages::new(&pool);
    let pages = face.allocate(org, GroupId(0), 4).expect("nothing is held");
    face.release(&pages).expect("they are held");
    serve();
    empty(&pool);
}

/// A draft that is refused in a page that a fork shares without a key.
#[test]
fn a_draft_is_taken_back_beside_a_fork() {
    let pool = pool(spec(&[(GroupKind::Full, 1)]), 20);
    let t = plain_tenant(&pool, "t");
    let b = batch(&pool, 2, 40);
    let parent = pool.open(t, Open { tokens: (0..4).collect(), ..Open::default() }).expect("open");
    b.add(&parent).expect("row");
    // Nobody says what was sampled, so nothing behind the prompt is published.
    for _ in 0..7 {
        b.step(None, None, |_| ()).expect("step");
        b.commit(None).expect("commit");
    }
    let child = parent.fork().expect("few references");
    b.step(None, None, |s| assert_eq!(s.copies.len(), 1, "the page of the next token is shared"))
        .expect("step");
    b.commit(None).expect("commit");
    parent.truncate(6).expect("there are more");
    b.step(None, None, |s| assert_eq!(s.copies.len(), 1, "so is the page before it")).expect("step");
    b.commit(None).expect("commit");
    drop((b, parent, child));
    empty(&pool);
}

//! One thread, one thing at a time: what a scheduler does.

use super::build::{batch, green, plain_tenant, pool, spec};
use crate::{sequence::Open, spec::GroupKind, word::GroupId};

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
    let seq = pool.open(t, Open { tokens: (0..10).collect(), ..Open::default() }).expect("open");
    let b = batch(&pool, 2, 40);
    b.add(&seq).expect("row");
    b.step(None, None, |_| ()).expect("step");
    let (_, pages) = seq.pages(GroupId(0)).expect("pages");
    let (page, from) = pages[1];
    let mut copied = None;
    let to = pool.relocate(page, |from, to| copied = Some((from, to))).expect("a frame is free");
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
    let moved = pool.relocate(page, |_, _| seq.close().expect("closes"));
    assert!(moved.is_some());
    pool.quiescence.drain(&pool.arenas);
    green(&pool);
    assert_eq!(pool.audit().balance[0].held, 0);
}

//! One thread, one thing at a time: what a scheduler does.

use super::build::{batch, green, plain_tenant, pool, spec};
use crate::{sequence::Open, spec::GroupKind};

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

//! Corners of the books in which something went wrong once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::build::{PAGE, batch, green, options, plain_tenant, pool, spec, tenant};
use crate::{
    admit::Verdict,
    error::Error,
    ledger::Policy,
    pool::{Options, Pool},
    sequence::Open,
    spec::{GroupKind, Layout, Spec},
    word::{GroupId, Units},
};

fn prompt<'a>(tokens: u32) -> Open<'a> {
    Open { tokens: (0..tokens).collect(), admit: true, ..Open::default() }
}

#[test]
fn what_children_have_reserved_their_parent_never_gets_itself() {
    let pool = pool(spec(&[(GroupKind::Full, 1)]), 8);
    let org = plain_tenant(&pool, "org");
    let team = tenant(
        &pool,
        org,
        "team",
        &Policy { reserve: [Units(3), Units(0)], publish: vec![(org, None)], ..Policy::default() },
    );
    let answer = |who, pages: u32| pool.admit(who, &Open::default(), pages * PAGE).expect("asked").verdict;
    assert_eq!((answer(org, 5), answer(org, 6)), (Verdict::Now, Verdict::Never));
    assert_eq!((answer(team, 8), answer(team, 9)), (Verdict::Now, Verdict::Never));
    let refused = pool.open(org, prompt(6 * PAGE)).expect_err("beside the reserve");
    assert!(matches!(refused, Error::Never(refusal) if refusal.level == org), "{refused:?}");
    // What an organisation and its team pay together may use the team's reserve.
    let share = [(org, 5 * PAGE)];
    let both = Open { share: &share, ..prompt(8 * PAGE) };
    let both = pool.open(team, both).expect("fits");
    both.close().expect("closes");
    green(&pool);
}

#[test]
fn tenants_that_come_up_beside_an_audit() {
    let spec = spec(&[(GroupKind::Full, 1)]);
    let options = Options { max_tenants: 2000, ..options(&spec, 8) };
    let pool = Arc::new(Pool::new(spec, &options).expect("a pool"));
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for nth in 0..2000 {
                plain_tenant(&pool, &format!("t{nth}"));
            }
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            green(&pool);
        }
    });
    green(&pool);
}

#[test]
fn a_kept_state_does_not_keep_its_continuation_out() {
    let pool = pool(spec(&[(GroupKind::Full, 1), (GroupKind::State, 1)]), 20);
    let org = plain_tenant(&pool, "org");
    let limit = [Some(Units(4)), None];
    let t = tenant(&pool, org, "t", &Policy { limit, ..Policy::default() });
    let rows = batch(&pool, 1, 100);
    let seq = pool.open(t, Open { admit: false, ..prompt(2 * PAGE) }).expect("opened");
    rows.add(&seq).expect("a row");
    rows.step(None, None, |_| ()).expect("a step");
    rows.commit(None).expect("committed");
    assert!(seq.keep_state().expect("not busy"));
    rows.remove(&seq).expect("removed");
    seq.close().expect("closes");
    // Three pages and a state are all it may have, so the snapshot that is hit can't be held beside them.
    let again = pool.open(t, prompt(3 * PAGE)).expect("fits");
    assert_eq!(again.counts().expect("counts").cached, 0);
    rows.add(&again).expect("a row");
    rows.step(None, None, |step| assert!(step.refused.is_empty())).expect("a step");
    rows.commit(None).expect("committed");
    drop(rows);
    again.close().expect("closes");
    green(&pool);
}

#[test]
fn what_comes_behind_a_cut_in_a_shared_range_is_the_tenants_own() {
    for cut in [PAGE, PAGE + 1] {
        let pool = pool(spec(&[(GroupKind::Full, 1)]), 40);
        let org = plain_tenant(&pool, "org");
        let team =
            |name| tenant(&pool, org, name, &Policy { publish: vec![(org, None)], ..Policy::default() });
        let (a, b) = (team("a"), team("b"));
        let rows = batch(&pool, 1, 100);
        let share = [(org, 2 * PAGE)];
        let mut tokens: Vec<u32> = (0..2 * PAGE + 1).collect();
        let open = |tokens: &[u32]| Open { tokens: tokens.to_vec(), share: &share, ..Open::default() };
        let seq = pool.open(a, open(&tokens)).expect("opened");
        let step = || {
            rows.step(None, None, |step| assert!(step.refused.is_empty())).expect("a step");
            rows.commit(None).expect("committed");
        };
        rows.add(&seq).expect("a row");
        step();
        seq.truncate(cut).expect("it was longer");
        tokens.truncate(cut as usize);
        let turn: Vec<u32> = (1000..1000 + 2 * PAGE).collect();
        seq.extend(&turn).expect("known");
        tokens.extend(turn);
        step();
        let (_, pages) = seq.pages(GroupId(0)).expect("pages");
        let payers: Vec<_> = pages.iter().map(|(page, _)| pool.pages.payer(page.id)).collect();
        assert_eq!((payers[0], &payers[1..]), (org, &vec![a; payers.len() - 1][..]), "cut at {cut}");
        let hit = |who| pool.open(who, open(&tokens)).expect("opened").counts().expect("counts").cached;
        assert_eq!(hit(b), PAGE, "nobody else sees the turn");
        drop(rows);
        drop(seq);
        green(&pool);
    }
}

#[test]
fn books_beyond_all_memory_are_refused() {
    let spec = || spec(&[(GroupKind::Full, 1)]);
    let page = spec().sizes()[0];
    let refused = |options: Options| match Pool::new(spec(), &options) {
        Err(Error::Argument(text)) => text,
        other => panic!("{other:?}"),
    };
    for pages in [1 << 28, (1 << 31) - 2] {
        let text = refused(Options { device_bytes: page * pages, ..options(&spec(), 8) });
        assert!(text.contains("use larger pages"), "{text}");
    }
    // So many tokens that few systems could store them: an answer, and no panic.
    let mut group = spec().groups()[0].clone();
    (group.k_dim, group.v_dim) = (1, 1);
    let long = Spec::new(1 << 16, vec![group], Layout::PageMajor, None).expect("a spec");
    let bytes = long.sizes()[0] * ((1 << 28) - 1);
    if let Err(error) = Pool::new(long, &Options { device_bytes: bytes, ..options(&spec(), 8) }) {
        assert!(matches!(&error, Error::Argument(text) if text.contains("memory")), "{error:?}");
    }
}

#[test]
fn a_cleared_batch_is_none_of_those_that_a_pool_can_have() {
    let pool = pool(spec(&[(GroupKind::Full, 1)]), 8);
    let t = plain_tenant(&pool, "t");
    // More than can be open at once.
    let mut cleared = Vec::new();
    for _ in 0..1030 {
        let batch = batch(&pool, 1, 16);
        batch.clear().expect("nobody uses it");
        cleared.push(batch);
    }
    // One of them is used again, and cleared, and used again.
    for _ in 0..2 {
        let sequence = pool.open(t, prompt(5)).expect("there is room");
        cleared[7].add(&sequence).expect("a row");
        cleared[7].step(None, None, |step| assert_eq!(step.num_tokens, 5)).expect("nobody uses it");
        green(&pool);
        cleared[7].clear().expect("nobody uses it");
        sequence.close().expect("nobody uses it");
    }
    cleared[8].step(None, None, |step| assert_eq!(step.num_rows, 0)).expect("a step of no rows");
    drop(cleared);
    green(&pool);
}

#[test]
fn a_tenant_inherits_nothing_from_who_had_its_id() {
    let spec = spec(&[(GroupKind::Full, 1)]);
    let options = Options { max_tenants: 1, ..options(&spec, 8) };
    let pool = Arc::new(Pool::new(spec, &options).expect("a pool"));
    let first = plain_tenant(&pool, "first");
    let page = pool.spec().sizes()[0];
    pool.set_frozen(first, true).expect("it is a tenant");
    pool.set_watermarks(first, Some((page, 2 * page))).expect("in order");
    pool.remove_tenant(first).expect("it has nothing");
    let second = plain_tenant(&pool, "second");
    assert_eq!(first, second, "there is no other id");
    assert_eq!((pool.is_frozen(second), pool.watermarks(second)), (false, None));
    pool.open(second, prompt(5)).expect("there is room").close().expect("nobody uses it");
    green(&pool);
}

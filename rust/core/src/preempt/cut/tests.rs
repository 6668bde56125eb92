//! What is cut, who allows it, and that what has gone stays gone.

use std::num::NonZeroU32;

use super::*;
use crate::{
    batch::Batch,
    ledger::{Policy, ROOT},
    preempt::{For, Wish},
    reclaim::Live,
    sequence::Open,
    spec::{
        GroupKind::{Full, Window},
        Spec,
    },
    tests::build::{
        PAGE, batch, empty, green, held, host_pool, plain_tenant, run, running, small_spec, spec, table,
        tenant,
    },
    word::{GroupId, Units},
};

const G: GroupId = GroupId(0);
const TTL: u64 = 1000;
const ALL: u64 = 1 << 40;
/// Bytes of a page of two layers.
const BYTES: u64 = 512;

fn keeps(tokens: u32) -> Policy {
    Policy { cut: NonZeroU32::new(tokens), ..Policy::default() }
}

fn world(spec: Spec, pages: u64, host: u64, policy: &Policy) -> (Arc<Pool>, TenantId, Batch) {
    let pool = host_pool(spec, pages, host);
    let t = tenant(&pool, ROOT, "t", policy);
    let rows = batch(&pool, 3, 96);
    (pool, t, rows)
}

/// A plan, which a dry run foretold.
fn cut(pool: &Arc<Pool>, tenant: TenantId, bytes: u64, batch: &Batch) -> Plan {
    let from = From { batches: &[batch], sessions: &[], who: For::Anybody };
    let dry = pool.cut(tenant, bytes, from, TTL, true).expect("allowed").0;
    green(pool);
    let plan = pool.cut(tenant, bytes, from, TTL, false).expect("allowed").0;
    assert!(dry.is_dry() && dry.moves.is_empty());
    assert_eq!((dry.rungs, dry.shortfall, &dry.victims), (plan.rungs, plan.shortfall, &plan.victims));
    green(pool);
    plan
}

/// Which of its pages have gone.
fn gone(sequence: &Sequence) -> Vec<usize> {
    table(sequence).iter().enumerate().filter(|(_, frame)| **frame == 0).map(|(at, _)| at).collect()
}

fn cached(pool: &Arc<Pool>, tenant: TenantId, tokens: &[u32]) -> u32 {
    let open = Open { tokens: tokens.to_vec(), ..Open::default() };
    pool.open(tenant, open).expect("nothing is admitted").counts().expect("idle").cached
}

#[test]
fn the_middle_goes_and_the_row_goes_on_with_the_first_page_and_the_last_tokens() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 40, 0, &keeps(6));
    let sequence = running(&pool, &rows, t, 0, 8 * PAGE + 2);
    let (before, shown) = (held(&pool, Tier::Device, t), table(&sequence));
    let plan = cut(&pool, t, ALL, &rows);
    // 34 tokens, of which the last 6 lie in pages 7 and 8.
    assert_eq!((plan.kind, plan.moves.len(), plan.copied), (Kind::Cut, 6, [0, 0]));
    assert_eq!((plan.rungs.evict, plan.rungs.sum()), (6 * BYTES, 6 * BYTES));
    let [Victim { sequence: number, fate, bytes, tokens, row, .. }] = plan.victims[..] else {
        panic!("{:?}", plan.victims)
    };
    assert_eq!((number, fate, bytes), (sequence.number(), Fate::Trimmed, 6 * BYTES));
    assert_eq!((tokens, row), (6 * PAGE, None));
    assert_eq!(
        (held(&pool, Tier::Device, t), table(&sequence)),
        (before, shown.clone()),
        "not before the commit"
    );
    let progress = pool.commit_plan(&plan).expect("open");
    assert_eq!((progress.moved, progress.dropped), (6, 0));
    green(&pool);
    assert_eq!(held(&pool, Tier::Device, t), before - 6 * BYTES);
    assert_eq!(gone(&sequence), [1, 2, 3, 4, 5, 6]);
    assert_eq!((table(&sequence)[0], &table(&sequence)[7..]), (shown[0], &shown[7..]));
    let count = |counter| pool.stats().get(counter);
    assert_eq!((count(crate::stats::Counter::PagesCut), count(crate::stats::Counter::PagesMoved)), (6, 0));
    // It goes on, and the row shows it.
    for _ in 0..2 * PAGE {
        run(&rows, 1);
    }
    let shown = rows.shown().0.swap_remove(0).0;
    assert_eq!(shown[..table(&sequence).len()], table(&sequence));
    // What has come since is old now.
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!(plan.moves.len(), 2);
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    assert_eq!(gone(&sequence), (1..9).collect::<Vec<_>>());
    assert!(cut(&pool, t, ALL, &rows).moves.is_empty());
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn a_context_without_end_needs_no_more_pages_than_it_keeps() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 8, 0, &keeps(8));
    let sequence = running(&pool, &rows, t, 0, 10);
    for _ in 0..80 {
        let plan = cut(&pool, t, ALL, &rows);
        pool.commit_plan(&plan).expect("open");
        run(&rows, 1);
    }
    green(&pool);
    // The last page to go gives its number back with a step that looks at its place.
    let kept = table(&sequence).iter().filter(|&&frame| frame != 0).count();
    let numbers = pool.slots.allocated() as usize;
    assert!(numbers <= kept + 1, "{numbers} for {kept}");
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn bytes_that_come_back_can_be_had_at_once() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 10, 0, &keeps(4));
    let first = running(&pool, &rows, t, 0, 9 * PAGE + 2);
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!(plan.moves.len(), 7);
    pool.commit_plan(&plan).expect("open");
    run(&rows, 1);
    let second = running(&pool, &rows, t, 500, 7 * PAGE);
    green(&pool);
    assert_eq!(table(&second).len(), 7);
    for sequence in [&first, &second] {
        sequence.close().expect("free");
    }
    empty(&pool);
}

#[test]
fn only_the_tenant_of_the_sequence_can_allow_it() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 40, 0, &Policy::default());
    let sequence = running(&pool, &rows, t, 0, 20);
    let from = From { batches: &[&rows], sessions: &[], who: For::Anybody };
    let error = pool.cut(t, 1, from, TTL, false).expect_err("not allowed");
    assert!(
        error.to_string().contains("\"t\" does not allow it") && error.to_string().contains("cut="),
        "{error}"
    );
    // A tenant below that does changes nothing for sequences that are not its own.
    tenant(&pool, t, "below", &keeps(4));
    let plan = pool.cut(t, 100, from, TTL, false).expect("somebody allows it").0;
    assert_eq!((plan.moves.len(), plan.shortfall), (0, 100));
    // Nor does whoever pays.
    let org = tenant(&pool, ROOT, "org", &keeps(1));
    let publish = Policy { publish: vec![(org, None)], ..Policy::default() };
    let member = tenant(&pool, org, "member", &publish);
    let open = Open { tokens: (100..130).collect(), share: &[(org, 30)], ..Open::default() };
    let shared = pool.open(member, open).expect("nothing is admitted");
    rows.add(&shared).expect("a row");
    run(&rows, 1);
    assert!(pool.cut(org, ALL, from, TTL, false).expect("org allows it").0.moves.is_empty());
    assert!(pool.cut(TenantId(77), 1, from, TTL, false).is_err(), "no such tenant");
    let (other, t, _) = world(spec(&[(Full, 2)]), 40, 0, &keeps(4));
    assert!(matches!(other.cut(t, 1, from, TTL, false), Err(Error::WrongPool("the batch"))));
    let (windows, t, _) = world(spec(&[(Window { tokens: 6 }, 2)]), 40, 0, &keeps(4));
    let nobody = From { batches: &[], sessions: &[], who: For::Anybody };
    assert!(windows.cut(t, 1, nobody, TTL, false).is_err());
    for sequence in [&sequence, &shared] {
        sequence.close().expect("free");
    }
    empty(&pool);
}

#[test]
fn what_others_hold_pins_keep_or_windows_drop_is_let_be() {
    let allowed = Policy { pin_budget: Units(1000), ..keeps(4) };
    let (pool, t, rows) = world(spec(&[(Full, 2), (Window { tokens: 6 }, 2)]), 60, 0, &allowed);
    let sequence = running(&pool, &rows, t, 0, 6 * PAGE + 1);
    let twin = running(&pool, &rows, t, 0, 2 * PAGE + 1);
    let pin = pool.pin(&sequence, 3 * PAGE, t, None, "kept").expect("in the budget");
    let place = |page: PageRef| {
        let pages = sequence.pages(G).expect("free").1;
        pages.iter().position(|(mine, _)| *mine == page)
    };
    let places = |plan: &Plan| plan.moves.iter().map(|m| place(m.page)).collect::<Vec<_>>();
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!(places(&plan), [Some(3), Some(4)]);
    pool.abort_plan(&plan).expect("open");
    pool.unpin(pin).expect("listed");
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!(places(&plan), [Some(2), Some(3), Some(4)]);
    // Its time is over.
    pool.advance(2 * TTL).expect("a manual clock");
    pool.expire_plans();
    green(&pool);
    assert_eq!(gone(&sequence), [0; 0]);
    for sequence in [&sequence, &twin] {
        sequence.close().expect("free");
    }
    empty(&pool);
}

#[test]
fn nothing_that_a_cut_sequence_computes_is_ever_hit() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 80, 0, &keeps(4));
    let long = 20 * PAGE;
    let sequence = running(&pool, &rows, t, 0, long);
    // Another copy of the pages from the 18th on, so that the chain does not end where it is cut.
    let fork = sequence.fork().expect("it runs");
    fork.truncate(18 * PAGE).expect("at an edge");
    fork.extend(&(18 * PAGE..long).collect::<Vec<_>>()).expect("known");
    rows.add(&fork).expect("a row");
    run(&rows, 1);
    rows.remove(&fork).expect("a row");
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!(plan.moves.len(), 1, "all others are shared, or the last");
    pool.commit_plan(&plan).expect("open");
    for _ in 0..2 * PAGE {
        run(&rows, 1);
    }
    let all = sequence.tokens(0).expect("free");
    assert_eq!(cached(&pool, t, &all), long, "exact ones, by way of the copy");
    fork.close().expect("free");
    green(&pool);
    // Truncated to where nothing has gone, all it computes is exact.
    sequence.truncate(17 * PAGE).expect("at an edge");
    sequence.extend(&all[17 * PAGE as usize..]).expect("known");
    run(&rows, 1);
    assert_eq!(cached(&pool, t, &all), (all.len() as u32 - 1) / PAGE * PAGE);
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn what_is_gone_stays_gone_through_forks_truncation_and_the_host_tier() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 40, 40, &keeps(4));
    let sequence = running(&pool, &rows, t, 0, 6 * PAGE + 1);
    let plan = cut(&pool, t, 2 * BYTES, &rows);
    assert!(sequence.truncate(PAGE + 1).is_err() && sequence.fork().is_err(), "from its lease on");
    assert_eq!(cached(&pool, t, &(0..40).collect::<Vec<_>>()), PAGE, "from its lease on");
    pool.abort_plan(&plan).expect("open");
    assert_eq!(cached(&pool, t, &(0..40).collect::<Vec<_>>()), 6 * PAGE, "as before");
    let plan = cut(&pool, t, 2 * BYTES, &rows);
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    assert_eq!((gone(&sequence), cached(&pool, t, &(0..40).collect::<Vec<_>>())), (vec![1, 2], PAGE));
    let error = sequence.truncate(2 * PAGE + 1).expect_err("it would be written on");
    assert!(error.to_string().contains("truncate to 8 tokens"), "{error}");
    // A fork has not more than it; each goes its way.
    let fork = sequence.fork().expect("its lease has ended");
    assert_eq!((gone(&fork), table(&fork)[3..6] == table(&sequence)[3..6]), (vec![1, 2], true));
    fork.truncate(2 * PAGE).expect("at an edge");
    rows.add(&fork).expect("a row");
    fork.extend(&[7; 6]).expect("known");
    run(&rows, 1);
    assert_eq!((gone(&fork), table(&fork).len()), (vec![1], 4));
    green(&pool);
    fork.close().expect("free");
    rows.remove(&sequence).expect("a row");
    // To the host tier and back.
    let (out, _) = pool.suspend(&sequence, Wish::Swap, None, TTL, false).expect("it runs");
    assert_eq!(out.moves.len(), 5, "what is left");
    pool.commit_plan(&out).expect("open");
    green(&pool);
    assert_eq!((held(&pool, Tier::Device, t), held(&pool, Tier::Host, t)), (0, 5 * BYTES));
    let (back, _) = pool.resume(&sequence, TTL, false).expect("there is room");
    pool.commit_plan(&back).expect("open");
    green(&pool);
    assert_eq!((gone(&sequence), held(&pool, Tier::Device, t)), (vec![1, 2], 5 * BYTES));
    rows.add(&sequence).expect("it runs");
    run(&rows, 1);
    rows.remove(&sequence).expect("a row");
    // Computed again it is whole again.
    let (out, _) = pool.suspend(&sequence, Wish::Recompute, None, TTL, false).expect("it runs");
    pool.commit_plan(&out).expect("open");
    let (back, _) = pool.resume(&sequence, TTL, false).expect("there is room");
    pool.commit_plan(&back).expect("open");
    rows.add(&sequence).expect("it runs");
    run(&rows, 1);
    green(&pool);
    assert_eq!((gone(&sequence), table(&sequence).len()), (vec![], 7));
    assert_eq!(cached(&pool, t, &(0..25).collect::<Vec<_>>()), 6 * PAGE, "and is hit");
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn a_page_that_another_sequence_continues_keeps_its_number_until_that_has_gone() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 40, 0, &keeps(4));
    let sequence = running(&pool, &rows, t, 0, 4 * PAGE + 1);
    let tokens: Vec<_> = (0..4 * PAGE).chain(900..900 + PAGE).collect();
    let other =
        pool.open(t, Open { tokens: tokens.clone(), ..Open::default() }).expect("nothing is admitted");
    rows.add(&other).expect("a row");
    run(&rows, 1);
    assert_eq!(other.counts().expect("free").cached, 4 * PAGE);
    other.close().expect("free");
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!(plan.moves.len(), 2);
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    assert_eq!((gone(&sequence), cached(&pool, t, &tokens)), (vec![1, 2], PAGE));
    let report = pool.audit();
    assert_eq!(report.pages, 6, "the two that have gone, three that are held, one that is cached");
    sequence.close().expect("free");
    green(&pool);
    empty(&pool);
}

#[test]
fn pages_let_go_on_their_way_stay_as_they_were() {
    for commit in [false, true] {
        let (pool, t, rows) = world(spec(&[(Full, 2)]), 40, 0, &keeps(4));
        let sequence = running(&pool, &rows, t, 0, 4 * PAGE + 1);
        let plan = cut(&pool, t, ALL, &rows);
        sequence.close().expect("free");
        green(&pool);
        if commit {
            assert_eq!(pool.commit_plan(&plan).expect("open").dropped, 2);
        } else {
            pool.abort_plan(&plan).expect("open");
        }
        green(&pool);
        assert_eq!(cached(&pool, t, &(0..30).collect::<Vec<_>>()), 4 * PAGE, "exact, so it can be hit");
        empty(&pool);
    }
}

#[test]
fn in_pieces_what_was_committed_is_gone_and_the_rest_as_before() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 40, 0, &keeps(4));
    let sequence = running(&pool, &rows, t, 0, 6 * PAGE + 1);
    let before = held(&pool, Tier::Device, t);
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!(pool.commit_some(&plan, 1).expect("open").left, 3);
    green(&pool);
    let (there, _) = Plan::from_bytes(&plan.to_bytes([0; 16])).expect("as it was written");
    pool.abort_plan(&there).expect("open");
    green(&pool);
    assert_eq!((gone(&sequence), held(&pool, Tier::Device, t)), (vec![1], before - BYTES));
    run(&rows, 1);
    green(&pool);
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn compressed_pages_can_be_cut_and_in_one_plan_no_page_is_taken_twice() {
    let both = Policy { compress: true, ..keeps(4) };
    let (pool, t, rows) = world(small_spec(&[(Full, 2)]), 40, 0, &both);
    let sequence = running(&pool, &rows, t, 0, 6 * PAGE + 1);
    let batches = [&rows];
    let live = || Live::Preempt(From { batches: &batches, sessions: &[], who: For::Anybody }, Wish::Auto);
    let dry = pool.reclaim(t, 4 * BYTES, live(), TTL, true).expect("a tenant").0;
    let plan = pool.reclaim(t, 4 * BYTES, live(), TTL, false).expect("a tenant").0;
    // Six are compressed, which is not enough, and none of them is cut.
    assert_eq!((plan.rungs.compress, plan.rungs.evict), (6 * 256, 0));
    assert_eq!((dry.rungs, dry.shortfall), (plan.rungs, plan.shortfall));
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    let before = held(&pool, Tier::Device, t);
    let plan = cut(&pool, t, ALL, &rows);
    assert_eq!((plan.moves.len(), plan.rungs.evict), (4, 4 * 256));
    pool.abort_plan(&plan).expect("open");
    green(&pool);
    assert!(table(&sequence)[..6].iter().all(|&frame| frame < 0), "still compressed");
    let plan = cut(&pool, t, ALL, &rows);
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    assert_eq!((gone(&sequence), held(&pool, Tier::Device, t)), (vec![1, 2, 3, 4], before - 4 * 256));
    run(&rows, 1);
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn the_ladder_cuts_before_anybody_stops_where_the_host_tier_is_full_and_it_is_allowed() {
    for (host, allowed) in [(0, true), (0, false), (40, true)] {
        let pool = host_pool(spec(&[(Full, 2)]), 40, host);
        let t = if allowed { tenant(&pool, ROOT, "t", &keeps(4)) } else { plain_tenant(&pool, "t") };
        let rows = batch(&pool, 3, 64);
        let _first = running(&pool, &rows, t, 0, 5 * PAGE + 1);
        let _second = running(&pool, &rows, t, 100, 5 * PAGE + 1);
        let live = Live::Preempt(From { batches: &[&rows], sessions: &[], who: For::Anybody }, Wish::Auto);
        let (plan, _) = pool.reclaim(t, 3 * BYTES, live, TTL, false).expect("a tenant");
        let cuts = host == 0 && allowed;
        assert_eq!(plan.rungs.evict, if cuts { 3 * BYTES } else { 0 });
        assert_eq!(plan.victims.iter().all(|v| v.fate == Fate::Trimmed && v.row.is_none()), cuts);
        assert_eq!((plan.shortfall, rows.rows().expect("free")), (0, if cuts { 2 } else { 1 }));
        pool.commit_plan(&plan).expect("open");
        green(&pool);
    }
}

#[test]
fn a_top_up_and_a_recall_cut_before_they_stop_anybody() {
    for lends in [false, true] {
        let (pool, t, rows) = world(spec(&[(Full, 2)]), 12, 0, &keeps(4));
        let units = |pages: u32| Units(pages * (BYTES / pool.spec().unit()) as u32);
        let owner = if lends {
            let policy = Policy { reserve: [units(4), Units(0)], lend: true, ..Policy::default() };
            tenant(&pool, ROOT, "owner", &policy)
        } else {
            plain_tenant(&pool, "owner")
        };
        let sequence = running(&pool, &rows, t, 0, 10 * PAGE + 1);
        let from = From { batches: &[&rows], sessions: &[], who: For::Anybody };
        let ask = |dry| match lends {
            true => pool.give_back(owner, 4 * BYTES, from, Wish::Auto, TTL, dry),
            false => pool.top_up(owner, 4 * BYTES, Live::Preempt(from, Wish::Auto), 0, TTL, dry),
        };
        let dry = ask(true).expect("enough can be cut").0;
        green(&pool);
        let plan = ask(false).expect("enough can be cut").0;
        assert_eq!((dry.rungs, plan.rungs.evict, plan.victims.len()), (plan.rungs, 3 * BYTES, 1));
        pool.abort_plan(&plan).expect("it waits for its commit");
        green(&pool);
        assert_eq!(gone(&sequence), [0; 0]);
        let plan = ask(false).expect("enough can be cut").0;
        pool.commit_plan(&plan).expect("open");
        green(&pool);
        assert_eq!((gone(&sequence), rows.rows().expect("free")), (vec![1, 2, 3], 1));
        run(&rows, 1);
        let face = crate::face::Pages::new(&pool);
        let pages = face.allocate(owner, G, 4).expect("it was given");
        face.release(&pages).expect("they are held");
        sequence.close().expect("free");
    }
}

#[test]
fn where_numbers_of_pages_are_short_nothing_breaks_and_they_come_back() {
    let (pool, t, rows) = world(spec(&[(Full, 2)]), 6, 0, &keeps(4));
    let sequence = running(&pool, &rows, t, 0, 4 * PAGE + 1);
    let tokens: Vec<_> = (0..4 * PAGE).chain(900..900 + PAGE).collect();
    let other = pool.open(t, Open { tokens, ..Open::default() }).expect("nothing is admitted");
    rows.add(&other).expect("a row");
    run(&rows, 1);
    other.close().expect("free");
    let plan = cut(&pool, t, ALL, &rows);
    pool.commit_plan(&plan).expect("open");
    run(&rows, 1);
    pool.reclaim_some(0);
    // Three frames are held and one is cached, but six of seven numbers are taken: that one continues what has gone.
    assert_eq!((pool.slots.allocated(), pool.audit().balance[0].free), (6, 2 * BYTES));
    let face = crate::face::Pages::new(&pool);
    let mut pages = face.allocate(t, G, 2).expect("the cached one goes for it");
    green(&pool);
    let refusal = face.allocate(t, G, 1).expect_err("there is a frame, and no number");
    assert!(matches!(refusal, Error::Refused(_)), "{refusal}");
    green(&pool);
    // Its next full page is settled.
    run(&rows, 1);
    assert!(sequence.counts().expect("free").written.is_multiple_of(PAGE));
    pages.extend(face.allocate(t, G, 1).expect("nothing continues them any more"));
    face.release(&pages).expect("they are held");
    sequence.close().expect("free");
    empty(&pool);
}

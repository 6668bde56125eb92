//! What is compressed, who allows it, and what the books say at every hand-over.

use super::*;
use crate::{
    batch::Batch,
    ledger::{Policy, ROOT},
    preempt::{For, Wish},
    reclaim::Live,
    sequence::Open,
    spec::GroupKind::{Full, Window},
    tests::build::{
        PAGE, batch, empty, green, held, host_pool, plain_tenant, run, running, small_spec, spec, table,
        tenant,
    },
    word::{Tier, Units},
};

const G: GroupId = GroupId(0);
const TTL: u64 = 1000;
const ALL: u64 = 1 << 40;

fn allows(pool: &Pool, name: &str) -> TenantId {
    tenant(pool, ROOT, name, &Policy { compress: true, ..Policy::default() })
}

fn compress(pool: &Arc<Pool>, tenant: TenantId, bytes: u64, batch: &Batch) -> Plan {
    let from = From { batches: &[batch], sessions: &[], who: For::Anybody };
    let dry = pool.compress(tenant, bytes, from, TTL, true).expect("allowed").0;
    green(pool);
    let plan = pool.compress(tenant, bytes, from, TTL, false).expect("allowed").0;
    assert!(dry.is_dry() && dry.moves.is_empty());
    green(pool);
    plan
}

#[test]
fn full_pages_go_on_in_half_the_bytes_and_the_row_with_them() {
    let pool = host_pool(small_spec(&[(Full, 2)]), 40, 0);
    let (t, rows) = (allows(&pool, "t"), batch(&pool, 2, 64));
    let sequence = running(&pool, &rows, t, 0, 4 * PAGE + 2);
    let before = held(&pool, Tier::Device, t);
    let plan = compress(&pool, t, ALL, &rows);
    // Both places are charged until it is decided.
    assert_eq!(plan.moves.len(), 4);
    assert_eq!(held(&pool, Tier::Device, t), before + 4 * 256);
    assert_eq!((plan.rungs.compress, plan.copied), (4 * 256, [4 * 512, 0]));
    assert!(table(&sequence).iter().all(|&frame| frame > 0));
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    assert_eq!(held(&pool, Tier::Device, t), before - plan.rungs.compress);
    assert_eq!(table(&sequence).iter().map(|&f| f < 0).collect::<Vec<_>>(), [true, true, true, true, false]);
    // It goes on, and the row shows it.
    for _ in 0..2 * PAGE {
        run(&rows, 1);
    }
    let shown = rows.shown().0.swap_remove(0).0;
    assert_eq!(shown[..table(&sequence).len()], table(&sequence));
    assert!(rows.csr(G, &mut vec![], &mut vec![], &mut vec![]).is_err());
    // What came since is cold now.
    let plan = compress(&pool, t, 1, &rows);
    assert_eq!((plan.moves.len(), plan.shortfall), (1, 0));
    pool.abort_plan(&plan).expect("open");
    green(&pool);
    assert_eq!(table(&sequence)[4..].iter().filter(|&&f| f < 0).count(), 0);
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn only_who_pays_can_allow_it() {
    let pool = host_pool(small_spec(&[(Full, 2)]), 40, 0);
    let (t, rows) = (plain_tenant(&pool, "t"), batch(&pool, 2, 64));
    let _sequence = running(&pool, &rows, t, 0, 20);
    let from = From { batches: &[&rows], sessions: &[], who: For::Anybody };
    let error = pool.compress(t, 1, from, TTL, false).expect_err("not allowed");
    assert!(error.to_string().contains("compress=True"), "{error}");
    // A tenant below that does allow it changes nothing for pages that are not its own.
    tenant(&pool, t, "below", &Policy { compress: true, ..Policy::default() });
    let plan = pool.compress(t, 100, from, TTL, false).expect("somebody allows it").0;
    assert_eq!((plan.moves.len(), plan.shortfall), (0, 100));
    assert!(pool.compress(TenantId(7), 1, from, TTL, false).is_err(), "no such tenant");
    let other = host_pool(small_spec(&[(Full, 2)]), 40, 0);
    let t = allows(&other, "t");
    assert!(matches!(other.compress(t, 1, from, TTL, false), Err(Error::WrongPool("the batch"))));
    let plain = host_pool(spec(&[(Full, 2)]), 40, 0);
    let t = allows(&plain, "t");
    let nobody = From { batches: &[], sessions: &[], who: For::Anybody };
    let error = plain.compress(t, 1, nobody, TTL, false).expect_err("no class");
    assert!(error.to_string().contains("small_dtype"), "{error}");
}

#[test]
fn what_others_hold_pins_keep_or_windows_drop_is_let_be() {
    let pool = host_pool(small_spec(&[(Full, 2), (Window { tokens: 6 }, 2)]), 60, 0);
    let allowed = Policy { compress: true, pin_budget: Units(1000), ..Policy::default() };
    let (t, rows) = (tenant(&pool, ROOT, "t", &allowed), batch(&pool, 3, 64));
    let sequence = running(&pool, &rows, t, 0, 4 * PAGE + 1);
    let twin = running(&pool, &rows, t, 0, 2 * PAGE + 1);
    let pin = pool.pin(&sequence, 3 * PAGE, t, None, "kept").expect("in the budget");
    let plan = compress(&pool, t, ALL, &rows);
    let (third, fourth) = (sequence.pages(G).expect("free").1[2].0, sequence.pages(G).expect("free").1[3].0);
    assert_eq!(plan.moves.iter().map(|m| m.page).collect::<Vec<_>>(), [fourth]);
    pool.commit_plan(&plan).expect("open");
    pool.unpin(pin).expect("listed");
    assert_eq!(compress(&pool, t, ALL, &rows).moves.iter().map(|m| m.page).collect::<Vec<_>>(), [third]);
    // Its time is over.
    pool.advance(2 * TTL).expect("a manual clock");
    pool.expire_plans();
    green(&pool);
    for sequence in [&sequence, &twin] {
        sequence.close().expect("free");
    }
    empty(&pool);
}

#[test]
fn a_compressed_page_is_never_hit_and_never_written_to() {
    let pool = host_pool(small_spec(&[(Full, 2)]), 40, 40);
    let (t, rows) = (allows(&pool, "t"), batch(&pool, 3, 64));
    let sequence = running(&pool, &rows, t, 0, 4 * PAGE + 1);
    let cached = |n| {
        let open = Open { tokens: (0..n).collect(), ..Open::default() };
        pool.open(t, open).expect("nothing is admitted").counts().expect("idle").cached
    };
    assert_eq!(cached(40), 4 * PAGE);
    let plan = compress(&pool, t, 2 * 256, &rows);
    assert_eq!(cached(40), 0, "from its lease on");
    assert!(sequence.truncate(PAGE + 1).is_err() && sequence.fork().is_err());
    pool.abort_plan(&plan).expect("open");
    assert_eq!(cached(40), 4 * PAGE, "as before");
    let plan = compress(&pool, t, 2 * 256, &rows);
    pool.commit_plan(&plan).expect("open");
    assert_eq!(cached(40), 0);
    let error = sequence.truncate(PAGE + 1).expect_err("it would be written on");
    assert!(error.to_string().contains("truncate to 4 tokens"), "{error}");
    // A fork has it too; both go their ways, to the host tier and back.
    let fork = sequence.fork().expect("its lease has ended");
    assert_eq!(table(&fork)[..2], table(&sequence)[..2]);
    fork.close().expect("free");
    rows.remove(&sequence).expect("a row");
    let (out, _) = pool.suspend(&sequence, Wish::Swap, None, TTL, false).expect("it runs");
    assert!(out.moves.iter().all(|m| m.from.class() == m.to.class()));
    pool.abort_plan(&out).expect("open");
    assert_eq!(cached(40), 0, "still compressed");
    let (out, _) = pool.suspend(&sequence, Wish::Swap, None, TTL, false).expect("it runs");
    pool.commit_plan(&out).expect("open");
    green(&pool);
    assert_eq!(held(&pool, Tier::Device, t), 0);
    let (back, _) = pool.resume(&sequence, TTL, false).expect("there is room");
    pool.commit_plan(&back).expect("open");
    green(&pool);
    assert_eq!((cached(40), table(&sequence)[0] < 0, table(&sequence)[2] > 0), (0, true, true));
    sequence.truncate(PAGE).expect("at an edge");
    rows.add(&sequence).expect("it runs");
    run(&rows, 1);
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn pages_let_go_on_their_way_stay_as_they_were() {
    for commit in [false, true] {
        let pool = host_pool(small_spec(&[(Full, 2)]), 40, 0);
        let (t, rows) = (allows(&pool, "t"), batch(&pool, 2, 64));
        let sequence = running(&pool, &rows, t, 0, 4 * PAGE + 1);
        let plan = compress(&pool, t, ALL, &rows);
        sequence.close().expect("free");
        green(&pool);
        if commit {
            assert_eq!(pool.commit_plan(&plan).expect("open").dropped, 4);
        } else {
            pool.abort_plan(&plan).expect("open");
        }
        green(&pool);
        let open = Open { tokens: (0..30).collect(), ..Open::default() };
        let again = pool.open(t, open).expect("nothing is admitted");
        assert_eq!(again.counts().expect("idle").cached, 4 * PAGE, "exact, so it can be hit");
        again.close().expect("free");
        empty(&pool);
    }
}

#[test]
fn where_there_is_little_room_fewer_pages_go() {
    let pool = host_pool(small_spec(&[(Full, 2)]), 8, 0);
    let (t, rows) = (allows(&pool, "t"), batch(&pool, 2, 64));
    let sequence = running(&pool, &rows, t, 0, 6 * PAGE + 1);
    for round in 0..6 {
        let before = held(&pool, Tier::Device, t);
        let plan = compress(&pool, t, ALL, &rows);
        pool.commit_plan(&plan).expect("open");
        green(&pool);
        assert_eq!(held(&pool, Tier::Device, t), before - plan.rungs.compress);
        assert!(round > 0 || plan.moves.len() < 6, "there is no room for all at once");
        run(&rows, 1);
    }
    assert!(table(&sequence).iter().filter(|&&f| f < 0).count() >= 6);
    sequence.close().expect("free");
    empty(&pool);
}

#[test]
fn the_ladder_compresses_where_the_host_tier_is_full_and_it_is_allowed() {
    for (host, allowed) in [(0, true), (0, false), (40, true)] {
        let pool = host_pool(small_spec(&[(Full, 2)]), 40, host);
        let t = if allowed { allows(&pool, "t") } else { plain_tenant(&pool, "t") };
        let rows = batch(&pool, 3, 64);
        let _first = running(&pool, &rows, t, 0, 4 * PAGE + 1);
        let _second = running(&pool, &rows, t, 100, 4 * PAGE + 1);
        let live = Live::Preempt(From { batches: &[&rows], sessions: &[], who: For::Anybody }, Wish::Auto);
        let (plan, stopped) = pool.reclaim(t, 3 * 256, live, TTL, false).expect("a tenant");
        let compresses = host == 0 && allowed;
        assert_eq!((plan.rungs.compress > 0, stopped.is_empty()), (compresses, compresses));
        assert_eq!(plan.shortfall, 0);
        pool.commit_plan(&plan).expect("open");
        green(&pool);
    }
}

/// What counts is the limit of who pays: a tenant may not take anything to the host tier, and its sequence has nothing but pages of
/// the scope above it.
#[test]
fn the_ladder_asks_who_pays_for_what_would_go_to_the_host_tier() {
    for own in [false, true] {
        let pool = host_pool(small_spec(&[(Full, 2)]), 60, 60);
        let org = allows(&pool, "org");
        let publish = vec![(org, None)];
        let a = Policy { compress: true, limit: [None, Some(Units(0))], publish, ..Policy::default() };
        let a = tenant(&pool, org, "a", &a);
        let rows = batch(&pool, 2, 64);
        // The oldest one goes on whatever is asked.
        let _oldest = running(&pool, &rows, a, 1000, 1);
        let tokens = (0..4 * PAGE + if own { 1 } else { 0 }).collect();
        let open = Open { tokens, share: &[(org, 4 * PAGE)], ..Open::default() };
        let sequence = pool.open(a, open).expect("it may publish there");
        rows.add(&sequence).expect("a row");
        run(&rows, 1);
        let live = Live::Preempt(From { batches: &[&rows], sessions: &[], who: For::Anybody }, Wish::Swap);
        let (plan, stopped) = pool.reclaim(org, 256, live, TTL, false).expect("a tenant");
        assert_eq!((plan.rungs.compress > 0, plan.rungs.offload > 0, stopped.is_empty()), (own, !own, own));
        assert_eq!(plan.host_full, if own { vec![a] } else { vec![] });
        pool.commit_plan(&plan).expect("open");
        green(&pool);
    }
}

/// Below one level somebody is at a limit of the host tier: its pages are compressed, and the other one's are not.
#[test]
fn the_ladder_compresses_for_those_at_their_limit_of_the_host_tier() {
    for allowed in [true, false] {
        let pool = host_pool(small_spec(&[(Full, 2)]), 60, 60);
        let at_limit = Policy { compress: allowed, limit: [None, Some(Units(0))], ..Policy::default() };
        let (a, b) = (tenant(&pool, ROOT, "a", &at_limit), allows(&pool, "b"));
        let rows = batch(&pool, 6, 64);
        let [mine, others] = [(a, 0), (b, 100)]
            .map(|(t, first)| [0, 1000].map(|more| running(&pool, &rows, t, first + more, 4 * PAGE + 1)));
        let live = Live::Preempt(From { batches: &[&rows], sessions: &[], who: For::Anybody }, Wish::Auto);
        let (plan, stopped) = pool.reclaim(ROOT, 3 * 256, live, TTL, false).expect("the root");
        assert_eq!((plan.rungs.compress > 0, stopped.is_empty(), plan.shortfall), (allowed, allowed, 0));
        assert!(plan.moves.iter().all(|m| m.payer == if allowed { a } else { m.payer }));
        assert_eq!(plan.host_full.is_empty(), !allowed && stopped[0].tenant() == b);
        pool.commit_plan(&plan).expect("open");
        green(&pool);
        let small = |sequences: &[Arc<Sequence>]| {
            sequences.iter().flat_map(|s| table(s)).filter(|&frame| frame < 0).count()
        };
        assert_eq!((small(&mine) > 0, small(&others)), (allowed, 0));
    }
}

/// The content of a page depends on all before it: what comes behind a compressed page is no more exact than that.
#[test]
fn what_is_computed_behind_a_compressed_page_is_never_hit() {
    let pool = host_pool(small_spec(&[(Full, 2)]), 80, 0);
    let (t, rows) = (allows(&pool, "t"), batch(&pool, 3, 96));
    let long = 16 * PAGE;
    let sequence = running(&pool, &rows, t, 0, long);
    // A second copy of the last page, which both continue from the same one.
    let fork = sequence.fork().expect("it runs");
    fork.truncate(long - PAGE).expect("at an edge");
    fork.extend(&(long - PAGE..long).collect::<Vec<_>>()).expect("known");
    rows.add(&fork).expect("a row");
    run(&rows, 1);
    rows.remove(&fork).expect("a row");
    let plan = compress(&pool, t, 1, &rows);
    assert_eq!(plan.moves.len(), 1, "all others are shared");
    pool.commit_plan(&plan).expect("open");
    for _ in 0..2 * PAGE {
        run(&rows, 1);
    }
    let all = sequence.tokens(0).expect("free");
    let hit = |n: u32| {
        let open = Open { tokens: all[..n as usize].to_vec(), ..Open::default() };
        pool.open(t, open).expect("nothing is admitted").counts().expect("idle").cached
    };
    assert_eq!(hit(long + PAGE + 1), long, "exact ones, by way of the copy");
    green(&pool);
    // Back before it, all is exact again.
    sequence.truncate(long - PAGE).expect("at an edge");
    sequence.extend(&all[(long - PAGE) as usize..]).expect("known");
    run(&rows, 1);
    assert_eq!(hit(long + PAGE + 1), long + PAGE);
    for sequence in [&sequence, &fork] {
        sequence.close().expect("free");
    }
    empty(&pool);
}

#[test]
fn what_an_aborted_plan_held_back_is_published_after_it() {
    let pool = host_pool(small_spec(&[(Full, 2)]), 40, 0);
    let (t, rows) = (allows(&pool, "t"), batch(&pool, 3, 64));
    let sequence = running(&pool, &rows, t, 0, 4 * PAGE);
    let plan = compress(&pool, t, 1, &rows);
    for _ in 0..PAGE {
        run(&rows, 1);
    }
    let all = sequence.tokens(0).expect("free");
    let cached = || {
        let open = Open { tokens: all.clone(), ..Open::default() };
        pool.open(t, open).expect("nothing is admitted").counts().expect("idle").cached
    };
    assert_eq!(cached(), 0, "the first page is in its hands");
    pool.abort_plan(&plan).expect("open");
    run(&rows, 1);
    assert_eq!(cached(), 5 * PAGE);
    sequence.close().expect("free");
    empty(&pool);
}

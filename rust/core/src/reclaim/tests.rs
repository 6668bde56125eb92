//! One thread, one thing at a time: what comes back, what stays, and who gets it.

use super::*;
use crate::{
    admit::Verdict,
    batch::Batch,
    error::{Refusal, Why},
    face::Pages,
    ledger::Policy,
    pool::Options,
    preempt::For,
    sequence::{Open, Sequence},
    spec::{
        GroupKind::{Full, Window},
        Spec,
    },
    tests::build::{batch, empty, green, options, plain_tenant, pool, relocate, spec, tenant},
    word::{GroupId, PageRef},
};

const G: GroupId = GroupId(0);
const TTL: u64 = 1000;

fn run(b: &Batch) -> Vec<Why> {
    let refused = b.step(None, None, |s| s.refused.iter().map(|r| r.refusal.why).collect()).expect("step");
    b.commit(Some(&vec![1; b.rows().expect("free")])).expect("commit");
    refused
}

/// Compute a prompt of whole pages and let it go: so many cached pages.
fn cache(pool: &Arc<Pool>, b: &Batch, t: TenantId, text: u32, pages: u32) {
    let seq =
        pool.open(t, Open { tokens: (text..text + 4 * pages).collect(), ..Open::default() }).expect("open");
    b.add(&seq).expect("row");
    assert!(run(b).is_empty());
    seq.close().expect("free");
}

fn hold(pool: &Arc<Pool>, b: &Batch, t: TenantId, text: u32, pages: u32) -> Arc<Sequence> {
    let seq =
        pool.open(t, Open { tokens: (text..text + 4 * pages).collect(), ..Open::default() }).expect("open");
    b.add(&seq).expect("row");
    assert!(run(b).is_empty());
    b.remove(&seq).expect("row");
    seq
}

/// Sequences all over the place: pages of the window in every extent.
fn scatter(pool: &Arc<Pool>, t: TenantId) -> (Pages, Vec<PageRef>) {
    let face = Pages::new(pool);
    let small = pool.classes[pool.groups[1].class.as_usize()].size;
    let available = pool.arena(Tier::Device).available(small) as usize;
    let pages = face.allocate(t, GroupId(1), available).expect("room");
    let (freed, kept): (Vec<_>, Vec<_>) = pages.iter().enumerate().partition(|(n, _)| n % 16 != 3);
    face.release(&freed.into_iter().map(|(_, page)| *page).collect::<Vec<_>>()).expect("held");
    let kept: Vec<_> = kept.into_iter().map(|(_, page)| *page).collect();
    for page in &kept {
        let at = pool.pages.location(page.id);
        pool.pages
            .set_location(page.id, crate::word::page::Location::new(Tier::Device, at.class(), at.frame()));
    }
    (face, kept)
}

fn cached(pool: &Pool, t: TenantId) -> u32 {
    pool.ledger().cached(Tier::Device, t).0
}

fn reserve(pool: &Pool, t: TenantId) -> u32 {
    pool.ledger().usage(Tier::Device, t).reserve.0
}

#[test]
fn what_is_cached_comes_back_and_the_plan_says_what_does_not() {
    let pool = pool(spec(&[(Full, 1)]), 40);
    let t = tenant(&pool, ROOT, "t", &Policy { pin_budget: Units(99), ..Policy::default() });
    let b = batch(&pool, 2, 40);
    cache(&pool, &b, t, 0, 5);
    let kept = hold(&pool, &b, t, 100, 3);
    let pinned = hold(&pool, &b, t, 200, 2);
    pool.pin(&pinned, 8, t, None, "").expect("published");
    pinned.close().expect("free");
    let before = pool.audit();
    let page = pool.spec().sizes()[0];
    let (dry, _) = pool.reclaim(t, 9 * page, Live::Stay, TTL, true).expect("a plan");
    assert!(dry.is_dry());
    assert_eq!((dry.rungs.free, dry.shortfall, dry.pinned), (5 * page, 4 * page, 2 * page));
    assert_eq!(pool.audit(), before);
    let (plan, _) = pool.reclaim(t, 9 * page, Live::Stay, TTL, false).expect("a plan");
    pool.abort_plan(&plan).expect("open");
    assert_eq!(pool.audit(), before);
    // Part of it, coldest and leaf first: the prompt's beginning stays.
    let (plan, _) = pool.reclaim(t, 2 * page, Live::Stay, TTL, false).expect("a plan");
    assert_eq!((plan.rungs.free, plan.shortfall), (2 * page, 0));
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    assert_eq!(cached(&pool, t), 3);
    let again = pool.open(t, Open { tokens: (0..20).collect(), ..Open::default() }).expect("open");
    assert_eq!(again.counts().expect("free").cached, 12);
    // Held by then: it stays.
    let (plan, _) = pool.reclaim(t, page, Live::Stay, TTL, false).expect("a plan");
    assert_eq!((plan.rungs.free, plan.shortfall), (0, page));
    pool.commit_plan(&plan).expect("open");
    drop((again, kept, b));
    for pin in pool.pins(None) {
        pool.unpin(pin.id).expect("listed");
    }
    empty(&pool);
}

#[test]
fn whoever_does_nothing_gives_first() {
    let pool = pool(spec(&[(Full, 1)]), 60);
    let org = plain_tenant(&pool, "org");
    let busy = tenant(&pool, org, "busy", &Policy::default());
    let idle = tenant(&pool, org, "idle", &Policy::default());
    let other = plain_tenant(&pool, "other");
    let b = batch(&pool, 2, 60);
    cache(&pool, &b, busy, 0, 12);
    cache(&pool, &b, idle, 0, 4);
    cache(&pool, &b, other, 0, 12);
    let running = hold(&pool, &b, busy, 500, 1);
    let page = pool.spec().sizes()[0];
    let take = |pages| {
        let (plan, _) = pool.reclaim(org, pages * page, Live::Stay, TTL, false).expect("a plan");
        pool.commit_plan(&plan).expect("open");
        (cached(&pool, busy), cached(&pool, idle))
    };
    assert_eq!(take(3), (12, 1));
    assert_eq!(take(5), (8, 0));
    assert_eq!(cached(&pool, other), 12, "it stands elsewhere");
    drop((running, b));
    empty(&pool);
}

/// Bad input: more than the tenant has, a tenant that is none.
#[test]
fn a_reclaim_of_what_is_not_there() {
    let pool = pool(spec(&[(Full, 1)]), 10);
    let t = plain_tenant(&pool, "t");
    let (plan, _) = pool.reclaim(t, u64::MAX, Live::Stay, TTL, false).expect("a plan");
    assert_eq!((plan.rungs.free, plan.shortfall), (0, u64::MAX));
    pool.commit_plan(&plan).expect("open");
    assert!(matches!(pool.reclaim(TenantId(7), 1, Live::Stay, TTL, false), Err(Error::UnknownTenant(_))));
    assert!(matches!(pool.top_up(TenantId(7), 1, Live::Stay, 9, TTL, false), Err(Error::UnknownTenant(_))));
    let all = pool.ledger().capacity(Tier::Device).0;
    let error = pool.top_up(t, u64::MAX, Live::Stay, 9, TTL, false).expect_err("the pool is smaller");
    let Error::Plan(Fault::Short { short, .. }) = error else { panic!("{error}") };
    assert_eq!(short, u64::MAX - pool.bytes(all));
    empty(&pool);
}

#[test]
fn a_frozen_tenant_finishes_what_it_has_begun() {
    let pool = pool(spec(&[(Full, 1)]), 40);
    let org = plain_tenant(&pool, "org");
    let t = tenant(&pool, org, "t", &Policy::default());
    let b = batch(&pool, 3, 40);
    let ask = |max_new_tokens, admit| Open { tokens: vec![7; 4], max_new_tokens, admit, ..Open::default() };
    let admitted = pool.open(t, ask(6, true)).expect("open");
    let unbound = pool.open(t, ask(0, false)).expect("open");
    b.add(&admitted).expect("row");
    b.add(&unbound).expect("row");
    assert!(run(&b).is_empty());
    let (plan, _) = pool.reclaim(org, 0, Live::Freeze, TTL, false).expect("a plan");
    let refused = |answer: Result<Arc<Sequence>, Error>| match answer {
        Err(Error::Refused(refusal)) => refusal.why,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(pool.open(t, ask(0, false))), Why::Frozen);
    let verdict = pool.admit(t, &Open::default(), 4).expect("a sound prompt");
    assert_eq!((verdict.verdict, verdict.why), (Verdict::Wait, Some(Why::Frozen)));
    assert_eq!(run(&b), [Why::Frozen], "nobody admitted it for more");
    for _ in 0..5 {
        assert_eq!(run(&b), [Why::Frozen]);
    }
    assert_eq!(admitted.counts().expect("free").written, 10);
    assert_eq!(run(&b).len(), 1, "what is left of its last page");
    // The plan comes to nothing: so does the freeze.
    pool.abort_plan(&plan).expect("open");
    assert!(run(&b).is_empty() && pool.open(t, ask(0, false)).is_ok());
    // Committed, it stays until somebody thaws it.
    let (plan, _) = pool.reclaim(org, 0, Live::Freeze, TTL, false).expect("a plan");
    pool.commit_plan(&plan).expect("open");
    assert!(pool.is_frozen(t));
    pool.set_frozen(org, false).expect("it lives");
    assert!(!pool.is_frozen(t));
    // Thawed by hand, then the plan that froze it ends: nobody is left frozen, or freed twice.
    let (plan, _) = pool.reclaim(org, 0, Live::Freeze, TTL, false).expect("a plan");
    pool.set_frozen(org, false).expect("it lives");
    pool.abort_plan(&plan).expect("open");
    assert!(!pool.is_frozen(t));
    drop((admitted, unbound, b));
    empty(&pool);
}

/// Nobody's end undoes the freeze of another one.
#[test]
fn a_freeze_is_undone_by_whoever_made_it() {
    let pool = pool(spec(&[(Full, 1)]), 40);
    let t = plain_tenant(&pool, "t");
    let freeze = || pool.reclaim(t, 0, Live::Freeze, TTL, false).expect("a plan").0;
    let abort = |plan: &Plan| pool.abort_plan(plan).expect("open");
    let thaw = || pool.set_frozen(t, false).expect("it lives");
    // Thawed and frozen again by hand while the plan is open.
    for commit in [false, true] {
        let plan = freeze();
        thaw();
        pool.set_frozen(t, true).expect("it lives");
        if commit {
            pool.commit_plan(&plan).expect("open");
        } else {
            abort(&plan);
        }
        assert!(pool.is_frozen(t));
        thaw();
        assert!(!pool.is_frozen(t));
    }
    // Two plans, one of which is committed; and one after a thaw.
    let [one, two] = [freeze(), freeze()];
    abort(&one);
    assert!(pool.is_frozen(t));
    pool.commit_plan(&two).expect("open");
    assert!(pool.is_frozen(t), "until it is thawed");
    let one = freeze();
    thaw();
    let two = freeze();
    abort(&one);
    assert!(pool.is_frozen(t));
    abort(&two);
    assert!(!pool.is_frozen(t));
    // All of them at once, for as long as the plan is open: nobody can thaw the root.
    for commit in [false, true] {
        let (all, _) = pool.reclaim(ROOT, 0, Live::Freeze, TTL, false).expect("a plan");
        assert!(pool.is_frozen(t));
        if commit {
            pool.commit_plan(&all).expect("open");
        } else {
            abort(&all);
        }
        assert!(!pool.is_frozen(t));
    }
    // Frozen by hand before, and meanwhile: one thaw is enough.
    pool.set_frozen(t, true).expect("it lives");
    let plan = freeze();
    pool.set_frozen(t, true).expect("it lives");
    abort(&plan);
    assert!(pool.is_frozen(t));
    thaw();
    assert!(!pool.is_frozen(t));
}

/// Build a plan for a tenant, remove that, give its id to another one, and end the plan: that one has what it had.
fn outlive(
    make: impl Fn() -> Arc<Pool>,
    policy: &Policy,
    pages: u32,
    build: impl Fn(&Arc<Pool>, TenantId, &Batch) -> Result<Built, Error>,
) {
    for commit in [false, true] {
        let pool = make();
        let b = batch(&pool, 2, 400);
        let old = tenant(&pool, ROOT, "old", policy);
        let (plan, _) = build(&pool, old, &b).expect("a plan");
        assert_eq!(pool.plan_state(&plan), Ok(State::Open));
        pool.remove_tenant(old).expect("it has nothing");
        let reserve = [Units(2), Units(0)];
        let new = tenant(&pool, ROOT, "new", &Policy { reserve, ..policy.clone() });
        assert_eq!(new, old, "there is no other id");
        if pages > 0 {
            cache(&pool, &b, new, 7000, pages);
        }
        pool.set_frozen(new, true).expect("it lives");
        let kept = || pool.ledger().kept(Tier::Device, new);
        let look = || (pool.ledger().policy(new), kept(), cached(&pool, new), pool.is_frozen(new));
        let before = look();
        if commit {
            pool.commit_plan(&plan).expect("open");
        } else {
            pool.abort_plan(&plan).expect("open");
        }
        assert_eq!(look(), before, "{:?}, committed: {commit}", plan.kind);
        green(&pool);
    }
}

#[test]
fn the_end_of_a_plan_is_nothing_to_who_has_the_id_now() {
    let two = |spec: Spec, pages| {
        let options = Options { max_tenants: 2, ..options(&spec, pages) };
        let pool = Arc::new(Pool::new(spec, &options).expect("a pool"));
        plain_tenant(&pool, "other");
        pool
    };
    let other = |pool: &Pool| pool.ledger().find("other").expect("it lives");
    let one_size = || two(spec(&[(Full, 1)]), 40);
    let plain = Policy::default();
    outlive(one_size, &plain, 4, |pool, old, b| {
        cache(pool, b, old, 0, 4);
        pool.reclaim(old, 4 * pool.spec().sizes()[0], Live::Stay, TTL, false)
    });
    outlive(one_size, &plain, 0, |pool, old, _| pool.reclaim(old, 0, Live::Freeze, TTL, false));
    // Somebody else has to stop for it.
    let wide = |pool: &Arc<Pool>, b: &Batch| [hold(pool, b, other(pool), 0, 36)];
    fn from(sessions: &[Arc<Sequence>]) -> From<'_> {
        From { batches: &[], sessions, who: For::Anybody }
    }
    let lends = Policy { reserve: [Units(30), Units(0)], lend: true, ..Policy::default() };
    outlive(one_size, &lends, 0, |pool, old, b| {
        let sessions = wide(pool, b);
        let bytes = 20 * pool.spec().sizes()[0];
        pool.give_back(old, bytes, from(&sessions), Wish::Recompute, TTL, false)
    });
    outlive(one_size, &plain, 0, |pool, old, b| {
        let sessions = wide(pool, b);
        let live = Live::Preempt(from(&sessions), Wish::Recompute);
        pool.top_up(old, 20 * pool.spec().sizes()[0], live, 9, TTL, false)
    });
    // Its reserve has grown already, and extents are emptied for it.
    let two_sizes = || two(spec(&[(Full, 2), (Window { tokens: 6 }, 1)]), 1030);
    outlive(two_sizes, &plain, 0, |pool, old, _| {
        scatter(pool, other(pool));
        let bytes = pool.arena(Tier::Device).capacity_bytes() / 2;
        pool.top_up(old, bytes, Live::Stay, 1000, TTL, false)
    });
}

#[test]
fn marks_bring_the_cache_down_in_small_steps() {
    let pool = pool(spec(&[(Full, 1)]), 40);
    let (t, other) = (plain_tenant(&pool, "t"), plain_tenant(&pool, "other"));
    let b = batch(&pool, 2, 60);
    let page = pool.spec().sizes()[0];
    pool.set_watermarks(t, Some((3 * page, 6 * page))).expect("in order");
    assert_eq!(pool.watermarks(t), Some((3 * page, 6 * page)));
    assert!(pool.set_watermarks(t, Some((2, 1))).is_err() && pool.set_watermarks(t, Some((0, 0))).is_err());
    cache(&pool, &b, other, 0, 8);
    cache(&pool, &b, t, 0, 6);
    pool.ledger().drain(Tier::Device);
    assert_eq!((pool.reclaim_some(2), cached(&pool, t)), (0, 6), "not above the mark");
    cache(&pool, &b, t, 500, 2);
    pool.ledger().drain(Tier::Device);
    let steps: Vec<_> = (0..4).map(|_| pool.reclaim_some(2) / page).collect();
    assert_eq!((steps, cached(&pool, t)), (vec![2, 2, 1, 0], 3), "down to the low one");
    assert_eq!(cached(&pool, other), 8);
    pool.set_watermarks(ROOT, Some((4 * page, 10 * page))).expect("in order");
    assert_eq!((0..9).map(|_| pool.reclaim_some(3) / page).sum::<u64>(), 7, "of the pool");
    pool.set_watermarks(ROOT, None).expect("the pool");
    drop(b);
    empty(&pool);
}

#[test]
fn a_top_up_is_there_at_once() {
    let pool = pool(spec(&[(Full, 1)]), 20);
    let (a, b) = (plain_tenant(&pool, "a"), plain_tenant(&pool, "b"));
    let rows = batch(&pool, 2, 100);
    cache(&pool, &rows, a, 0, 20);
    let page = pool.spec().sizes()[0];
    let (dry, _) = pool.top_up(b, 8 * page, Live::Stay, 0, TTL, true).expect("it fits");
    assert_eq!((dry.rungs.free, reserve(&pool, b), cached(&pool, a)), (8 * page, 0, 20));
    let (plan, _) = pool.top_up(b, 8 * page, Live::Stay, 0, TTL, false).expect("it fits");
    assert_eq!(pool.plan_state(&plan), Ok(State::Committed));
    assert_eq!((plan.rungs.free, reserve(&pool, b), cached(&pool, a)), (8 * page, 8, 12));
    assert_eq!(pool.arena(Tier::Device).free_bytes(), 8 * page);
    green(&pool);
    let face = Pages::new(&pool);
    let evicted = pool.stats().get(crate::stats::Counter::EvictedForeign);
    let pages = face.allocate(b, G, 8).expect("it is reserved");
    assert_eq!(pool.stats().get(crate::stats::Counter::EvictedForeign), evicted, "nobody evicts on the way");
    face.release(&pages).expect("they are held");
    // Grow, shrink, grow.
    for _ in 0..3 {
        pool.ledger().shift_reserve(Tier::Device, pool.ledger().now(b), -5).expect("shrinking");
        assert_eq!(reserve(&pool, b), 3);
        pool.top_up(b, 5 * page, Live::Stay, 0, TTL, false).expect("it fits");
        assert_eq!(reserve(&pool, b), 8);
        green(&pool);
    }
    drop(rows);
    empty(&pool);
}

#[test]
fn what_can_not_be_had_is_told_to_the_byte_and_changes_nothing() {
    let pool = pool(spec(&[(Full, 1)]), 20);
    let (a, b) = (plain_tenant(&pool, "a"), plain_tenant(&pool, "b"));
    let rows = batch(&pool, 2, 100);
    let held: Vec<_> = (0..4).map(|n| hold(&pool, &rows, a, 100 * n, 3)).collect();
    cache(&pool, &rows, a, 1000, 8);
    let page = pool.spec().sizes()[0];
    pool.ledger().drain(Tier::Device);
    let before = pool.audit();
    let ask = |pages: u64, live: Live<'_>| pool.top_up(b, pages * page, live, 0, TTL, false);
    let short = |answer: Result<Built, Error>| match answer {
        Err(Error::Plan(Fault::Short { short, .. })) => short / page,
        other => panic!("{:?}", other.map(|built| built.0)),
    };
    assert_eq!(short(ask(10, Live::Stay)), 2);
    assert_eq!((pool.audit(), reserve(&pool, b)), (before, 0));
    // Sequences that nobody runs leave for it; more than they are is missing all the same.
    let from = |sessions| From { batches: &[], sessions, who: For::Anybody };
    assert_eq!(short(ask(20, Live::Preempt(from(&held[..2]), Wish::Recompute))), 6);
    assert_eq!(reserve(&pool, b), 0);
    let (plan, stopped) = ask(10, Live::Preempt(from(&held[..2]), Wish::Recompute)).expect("one is enough");
    assert_eq!((stopped.len(), reserve(&pool, b)), (1, 0), "not before they have left");
    pool.commit_plan(&plan).expect("open");
    assert_eq!(reserve(&pool, b), 10);
    green(&pool);
    // Given up: they stay, and nothing is reserved.
    let (plan, _) = ask(3, Live::Preempt(from(&held[..]), Wish::Recompute)).expect("another one");
    pool.abort_plan(&plan).expect("open");
    assert_eq!(reserve(&pool, b), 10);
    drop((held, rows));
    empty(&pool);
}

/// Free bytes in extents of another size: the top-up empties some, and the reserve can be used at once.
#[test]
fn case_35_a_top_up_over_two_sizes() {
    let pool = pool(spec(&[(Full, 2), (Window { tokens: 6 }, 1)]), 1030);
    let (a, b) = (plain_tenant(&pool, "a"), plain_tenant(&pool, "b"));
    let rows = batch(&pool, 40, 40);
    let (face, kept) = scatter(&pool, a);
    let bytes = pool.arena(Tier::Device).capacity_bytes() / 2;
    let error = face.allocate(b, G, 1).expect_err("no extent is free");
    assert!(matches!(error, Error::Refused(Refusal { why: Why::Fragmented, .. })), "{error}");
    let error = pool.top_up(b, bytes, Live::Stay, 3, TTL, false).expect_err("too few moves");
    assert!(matches!(error, Error::Plan(Fault::Short { .. })), "{error}");
    assert_eq!(reserve(&pool, b), 0);
    green(&pool);
    let (plan, _) = pool.top_up(b, bytes, Live::Stay, 1000, TTL, false).expect("it fits");
    assert!(!plan.moves.is_empty());
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    let n = bytes / 512;
    let mine = face.allocate(b, G, n as usize).expect("all that was reserved, at once");
    face.release(&mine).expect("held");
    face.release(&kept).expect("held");
    assert_eq!(relocate(&pool, kept[0], |_, _| ()), None, "it has gone");
    drop(rows);
    empty(&pool);
}

/// A pool of 40 pages; the lender has reserved 30 of them.
fn lent() -> (Arc<Pool>, TenantId, TenantId, u64) {
    let pool = pool(spec(&[(Full, 1)]), 40);
    let reserve = Policy { reserve: [Units(30), Units(0)], lend: true, ..Policy::default() };
    let (lender, other) = (tenant(&pool, ROOT, "lender", &reserve), plain_tenant(&pool, "other"));
    let page = pool.spec().sizes()[0];
    (pool, lender, other, page)
}

fn borrowers(pool: &Arc<Pool>, b: &Batch, t: TenantId, n: u32, pages: u32) -> Vec<Arc<Sequence>> {
    let open = |i| {
        let tokens = (1000 * i..1000 * i + 4 * pages).collect();
        let seq = pool.open(t, Open { tokens, ..Open::default() }).expect("open");
        b.add(&seq).expect("row");
        seq
    };
    let all = (1..=n).map(open).collect();
    assert!(run(b).is_empty());
    all
}

#[test]
fn a_lent_reserve_is_there_after_one_plan() {
    let (pool, lender, other, page) = lent();
    let b = batch(&pool, 8, 200);
    let all = borrowers(&pool, &b, other, 4, 9);
    assert_eq!(pool.lent(lender), 30 * page);
    let prompt = |pages: u32| Open { tokens: (0..4 * pages).collect(), admit: true, ..Open::default() };
    assert!(pool.open(lender, prompt(20)).is_err());
    let from = From { batches: &[&b], sessions: &[], who: For::Anybody };
    let before = pool.audit();
    // Only asked, and given up: as it was.
    let (dry, _) = pool.give_back(lender, 20 * page, from, Wish::Recompute, TTL, true).expect("a plan");
    assert_eq!((dry.victims.len(), pool.audit() == before), (2, true));
    assert_eq!(pool.lent(lender), 30 * page);
    let (plan, _) = pool.give_back(lender, 20 * page, from, Wish::Recompute, TTL, false).expect("a plan");
    let gone: Vec<u64> = plan.victims.iter().map(|v| v.sequence).collect();
    // What fits is kept from here on: nobody comes in between.
    let more = Open { tokens: (9000..9012).collect(), admit: true, ..Open::default() };
    assert!(pool.open(other, more.clone()).is_err());
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    assert_eq!((gone.len(), pool.lent(lender)), (2, 10 * page));
    assert!(pool.open(other, more.clone()).is_err(), "kept until it is lent again");
    let seq = pool.open(lender, prompt(20)).expect("there at once");
    pool.lend_unused(lender).expect("open");
    assert_eq!((pool.lent(lender), pool.ledger().kept(Tier::Device, lender)), (10 * page, Units(0)));
    b.add(&seq).expect("row");
    assert!(run(&b).is_empty());
    // The two that are left, the oldest too: for a lender nobody is spared.
    let (plan, _) = pool.give_back(lender, 10 * page, from, Wish::Recompute, TTL, false).expect("a plan");
    pool.commit_plan(&plan).expect("open");
    assert_eq!(plan.victims.len(), 1);
    assert_eq!(pool.ledger().usage(Tier::Device, other).held, Units(10));
    // Now its reserve is its own again.
    pool.ledger()
        .set_policy(lender, &Policy { reserve: [Units(30), Units(0)], ..Policy::default() })
        .expect("kept");
    green(&pool);
    drop(all);
}

#[test]
fn what_was_lent_and_does_not_come_back_is_told() {
    let (pool, lender, other, page) = lent();
    let b = batch(&pool, 8, 200);
    let safe = Policy { reserve: [Units(10), Units(0)], ..Policy::default() };
    let quiet = tenant(&pool, ROOT, "quiet", &safe);
    let inside = borrowers(&pool, &b, quiet, 1, 9);
    let all = borrowers(&pool, &b, other, 3, 9);
    let from = From { batches: &[&b], sessions: &[], who: For::Anybody };
    let ask = |bytes, from| pool.give_back(lender, bytes, from, Wish::Recompute, TTL, false).map(drop);
    let missing = |answer| match answer {
        Err(Error::Plan(Fault::Short { short, .. })) => short,
        other => panic!("{other:?}"),
    };
    let before = pool.audit();
    assert_eq!(missing(ask(31 * page, from)), page);
    let nobody = From { batches: &[], sessions: &[], who: For::Anybody };
    assert_eq!(missing(ask(30 * page, nobody)), 27 * page);
    let error = pool
        .ledger()
        .set_policy(lender, &Policy { lend: false, ..pool.ledger().policy(lender).expect("there") });
    assert!(matches!(error, Err(LedgerError::Reserve { short: Units(27), .. })), "{error:?}");
    assert_eq!((pool.audit(), pool.lent(lender)), (before, 30 * page));
    // All of it, and none of what lies inside a reserve.
    let (plan, _) = pool.give_back(lender, 30 * page, from, Wish::Recompute, TTL, false).expect("a plan");
    pool.abort_plan(&plan).expect("open");
    assert_eq!(pool.lent(lender), 30 * page);
    green(&pool);
    // Those have no row now.
    let sessions: Vec<_> = all.clone();
    let from = From { sessions: &sessions, ..from };
    let (plan, _) = pool.give_back(lender, 30 * page, from, Wish::Recompute, TTL, false).expect("a plan");
    pool.commit_plan(&plan).expect("open");
    assert_eq!((plan.victims.len(), pool.lent(lender)), (3, 0));
    assert_eq!(pool.ledger().usage(Tier::Device, quiet).held, Units(10));
    green(&pool);
    drop(inside);
}

#[test]
fn a_reserve_below_a_reserve_is_nobodys_to_take() {
    let (pool, lender, _, page) = lent();
    let reserve = Policy { reserve: [Units(8), Units(0)], ..Policy::default() };
    let org = tenant(&pool, ROOT, "org", &reserve);
    let user = tenant(&pool, org, "user", &Policy::default());
    let b = batch(&pool, 8, 200);
    let all = borrowers(&pool, &b, user, 4, 9);
    let from = From { batches: &[&b], sessions: &[], who: For::Anybody };
    // 36 are held, 8 of them inside the org's reserve: with two victims 18 of 28 come back.
    let (plan, _) = pool.give_back(lender, 22 * page, from, Wish::Recompute, TTL, false).expect("a plan");
    pool.commit_plan(&plan).expect("open");
    assert_eq!((plan.victims.len(), pool.lent(lender)), (2, 8 * page));
    let (plan, _) = pool.give_back(lender, 30 * page, from, Wish::Recompute, TTL, false).expect("a plan");
    pool.commit_plan(&plan).expect("open");
    assert_eq!(pool.lent(lender), 0);
    green(&pool);
    drop(all);
}

//! Two or three threads on one tiny pool, under random schedules: whatever the order, the books are exact at the end, and
//! nobody ever sees another one's tokens.
//!
//! shuttle runs the threads one at a time and switches at every access to a shared word, so these models find what goes
//! wrong between two rooms; what goes wrong between two memory orderings is for loom, room by room.

mod plans;

use std::sync::Arc;

use shuttle::thread;

use super::build::{PAGE, batch, empty, host_pool, options, plain_tenant, pool, spec, tenant};
use crate::{
    batch::Batch,
    error::Error,
    face::Pages,
    hash::CallerKey,
    ledger::{Policy, ROOT},
    plan::Plan,
    pool::{Options, Pool},
    preempt::{For, From, Wish},
    sequence::{Open, Sequence},
    spec::GroupKind::{Full, State, Window},
    word::{GroupId, PageRef, TenantId, Tier, Units},
};

const G: GroupId = GroupId(0);

/// Random schedules, and some with few switches at odd places. More with `KVALLOC_SCHEDULES`.
fn check(f: impl Fn() + Send + Sync + Copy + 'static) {
    let n = std::env::var("KVALLOC_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(150);
    shuttle::check_random(f, n);
    shuttle::check_pct(f, n, 3);
}

fn spawn<R: Send + 'static>(
    pool: &Arc<Pool>,
    f: impl FnOnce(&Arc<Pool>) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let pool = Arc::clone(pool);
    thread::spawn(move || f(&pool))
}

fn done<R>(thread: thread::JoinHandle<R>) -> R {
    thread.join().expect("no panic")
}

fn open(pool: &Arc<Pool>, tenant: TenantId, tokens: impl IntoIterator<Item = u32>) -> Arc<Sequence> {
    pool.open(tenant, Open { tokens: tokens.into_iter().collect(), ..Open::default() })
        .expect("no admission asked")
}

/// One step and its commit: how many tokens, and whether the row was refused.
fn run(batch: &Batch, sampled: i32) -> (u32, bool) {
    let seen =
        batch.step(None, None, |s| (s.num_tokens, !s.refused.is_empty())).expect("nobody else uses it");
    batch.commit(Some(&vec![sampled; batch.rows().expect("free")])).expect("a step waits");
    seen
}

/// Open, compute, close. `false`: there was no room.
fn serve(pool: &Arc<Pool>, batch: &Batch, tenant: TenantId, tokens: impl IntoIterator<Item = u32>) -> bool {
    let sequence = open(pool, tenant, tokens);
    batch.add(&sequence).expect("a row");
    let (_, refused) = run(batch, 1);
    sequence.close().expect("nobody else uses it");
    !refused
}

/// The pages a sequence hit say what its prompt says.
fn assert_true(sequence: &Sequence, tokens: &[u32]) {
    let cached = sequence.counts().expect("free").cached as usize;
    let (_, pages) = sequence.pages(G).expect("free");
    for (&(page, _), said) in pages.iter().zip(tokens[..cached].chunks(PAGE as usize)) {
        assert!(sequence.pool().pages.has_tokens(page.id, said), "{page:?} does not hold {said:?}");
    }
}

#[test]
fn two_sequences_with_one_prompt() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 6);
        let t = plain_tenant(&pool, "t");
        let work = move |pool: &Arc<Pool>| {
            let batch = batch(pool, 1, 16);
            for _ in 0..2 {
                let sequence = open(pool, t, 0..9);
                assert_true(&sequence, &(0..9).collect::<Vec<_>>());
                batch.add(&sequence).expect("a row");
                let (_, refused) = run(&batch, 1);
                assert!(!refused, "there is room for two");
                sequence.close().expect("nobody else uses it");
            }
        };
        let other = spawn(&pool, work);
        work(&pool);
        done(other);
        empty(&pool);
    });
}

#[test]
fn a_hit_beside_eviction() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 3);
        let t = plain_tenant(&pool, "t");
        let warm = batch(&pool, 1, 16);
        assert!(serve(&pool, &warm, t, 0..9));
        let other = spawn(&pool, move |pool| {
            let batch = batch(pool, 1, 16);
            serve(pool, &batch, t, 100..109);
        });
        let sequence = open(&pool, t, 0..9);
        assert_true(&sequence, &(0..9).collect::<Vec<_>>());
        warm.add(&sequence).expect("a row");
        run(&warm, 1);
        assert_true(&sequence, &(0..9).collect::<Vec<_>>());
        done(other);
        sequence.close().expect("nobody else uses it");
        drop(warm);
        empty(&pool);
    });
}

/// A page that loses its key, is written anew and published again is not taken for what it was.
#[test]
fn a_hit_beside_a_rejected_draft() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 6);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 1, 16);
        let draft = open(&pool, t, 0..9);
        mine.add(&draft).expect("a row");
        run(&mine, -1);
        let reader = spawn(&pool, move |pool| {
            let sequence = open(pool, t, 0..9);
            assert_true(&sequence, &(0..9).collect::<Vec<_>>());
            // What is held does not change.
            for _ in 0..3 {
                thread::yield_now();
                assert_true(&sequence, &(0..9).collect::<Vec<_>>());
            }
            sequence.close().expect("nobody else uses it");
        });
        draft.truncate(6).expect("there are more");
        draft.extend(&[70, 80, 90]).expect("all slots are known");
        run(&mine, -1);
        done(reader);
        drop((mine, draft));
        empty(&pool);
    });
}

#[test]
fn forks_close_in_any_order() {
    check(|| {
        let pool = pool(spec(&[(Full, 1), (Window { tokens: 5 }, 1)]), 12);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 1, 16);
        let parent = open(&pool, t, 0..6);
        mine.add(&parent).expect("a row");
        run(&mine, 1);
        let child = parent.fork().expect("few references");
        let other = spawn(&pool, move |pool| {
            let batch = batch(pool, 1, 16);
            batch.add(&child).expect("a row");
            run(&batch, 2);
            let grandchild = child.fork().expect("few references");
            child.close().expect("nobody else uses it");
            drop(grandchild);
        });
        run(&mine, 3);
        parent.close().expect("nobody else uses it");
        done(other);
        drop(mine);
        empty(&pool);
    });
}

#[test]
fn a_limit_is_never_passed() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 8);
        let limit = Policy { limit: [Some(Units(3)), None], ..Policy::default() };
        let org = tenant(&pool, ROOT, "org", &limit);
        let a = tenant(&pool, org, "a", &Policy::default());
        let b = tenant(&pool, org, "b", &Policy::default());
        let work = |t| {
            move |pool: &Arc<Pool>| {
                let batch = batch(pool, 1, 16);
                for n in 0..2 {
                    serve(pool, &batch, t, (0..6).map(|i| i + 10 * n));
                    assert!(pool.ledger().usage(Tier::Device, org).subtree <= Units(3));
                }
            }
        };
        let other = spawn(&pool, work(a));
        work(b)(&pool);
        done(other);
        empty(&pool);
    });
}

/// Whatever others do, what lies in a reserve is there at once: nothing is refused in it.
#[test]
fn a_reserve_is_there_at_once() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 4);
        let reserve = Policy { reserve: [Units(2), Units(0)], ..Policy::default() };
        let a = tenant(&pool, ROOT, "a", &reserve);
        let b = plain_tenant(&pool, "b");
        let other = spawn(&pool, move |pool| {
            let batch = batch(pool, 1, 16);
            serve(pool, &batch, b, 0..7);
            serve(pool, &batch, b, 20..27);
        });
        let mine = batch(&pool, 1, 16);
        assert!(serve(&pool, &mine, a, 0..7), "two pages are reserved");
        done(other);
        drop(mine);
        empty(&pool);
    });
}

/// Two rows of one batch cross a page edge while another thread takes what its tenant may have.
#[test]
fn rows_that_cross_an_edge_take_nothing_from_others() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 5);
        let limit = Policy { limit: [Some(Units(3)), None], ..Policy::default() };
        let a = tenant(&pool, ROOT, "a", &limit);
        let b = plain_tenant(&pool, "b");
        let mine = batch(&pool, 2, 16);
        let sequences: Vec<_> = (0..2).map(|n| open(&pool, a, 10 * n..10 * n + 4)).collect();
        for s in &sequences {
            mine.add(s).expect("a row");
        }
        run(&mine, 1);
        let other = spawn(&pool, move |pool| {
            let face = Pages::new(pool);
            let pages = face.allocate(b, G, 2).expect("five pages, three of them for a at most");
            face.release(&pages).expect("they are held");
        });
        run(&mine, 1);
        done(other);
        drop((mine, sequences));
        empty(&pool);
    });
}

#[test]
fn a_step_beside_a_close_by_handle() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 8);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 2, 16);
        let sequences: Vec<_> = (0..2).map(|n| open(&pool, t, 10 * n..10 * n + 5)).collect();
        for s in &sequences {
            mine.add(s).expect("a row");
        }
        let victim = Arc::clone(&sequences[0]);
        let other = thread::spawn(move || match victim.close() {
            Ok(()) | Err(Error::Busy(_)) => {}
            Err(e) => panic!("{e}"),
        });
        for _ in 0..2 {
            match mine.step(None, None, |_| ()) {
                Ok(()) => match mine.commit(None) {
                    Ok(()) | Err(Error::Busy(_)) => {}
                    Err(e) => panic!("{e}"),
                },
                Err(Error::Busy(_)) => {}
                Err(e) => panic!("{e}"),
            }
        }
        done(other);
        drop((mine, sequences));
        empty(&pool);
    });
}

/// The batch goes while a handle of one of its sequences is in use: nobody waits for himself.
#[test]
fn a_batch_that_goes_beside_a_handle_in_use() {
    check(|| {
        let pool = pool(spec(&[(Full, 1), (State, 1)]), 8);
        let t = plain_tenant(&pool, "t");
        let mine = batch(&pool, 1, 16);
        let sequence = open(&pool, t, 0..5);
        mine.add(&sequence).expect("a row");
        mine.step(None, None, |_| ()).expect("nobody else uses it");
        let handle = Arc::clone(&sequence);
        let other = thread::spawn(move || match handle.counts() {
            Ok(_) | Err(Error::Busy(_)) => {}
            Err(e) => panic!("{e}"),
        });
        drop(mine);
        done(other);
        assert_eq!(sequence.counts().expect("free").written, 0);
        drop(sequence);
        empty(&pool);
    });
}

#[test]
fn a_share_beside_a_release_and_an_eviction() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 1);
        let t = plain_tenant(&pool, "t");
        let face = Pages::new(&pool);
        let page = face.allocate(t, G, 1).expect("it is free");
        assert_eq!(face.publish(t, G, &page, &[CallerKey::Int(7)]), Ok(vec![true]));
        let found: PageRef = page[0];
        let sharing = spawn(&pool, move |pool| {
            let face = Pages::new(pool);
            if face.share(&[found]) == Ok(vec![true]) {
                assert_eq!(face.find_all(t, G, &[CallerKey::Int(7)]), Ok(vec![Some(found)]), "it is held");
                face.release(&[found]).expect("it is held");
            }
        });
        let taking = spawn(&pool, move |pool| {
            let face = Pages::new(pool);
            if let Ok(pages) = face.allocate(t, G, 1) {
                face.release(&pages).expect("it is held");
                assert!(face.release(&pages).is_err(), "nobody can find it");
            }
        });
        face.release(&page).expect("it is held");
        done(sharing);
        done(taking);
        empty(&pool);
    });
}

/// Two holders publish one page at the same moment: it gets one key.
#[test]
fn a_page_that_two_publish() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 2);
        let t = plain_tenant(&pool, "t");
        let face = Pages::new(&pool);
        let page = face.allocate(t, G, 1).expect("it is free");
        let theirs = page.clone();
        let other = spawn(&pool, move |pool| {
            Pages::new(pool).publish(t, G, &theirs, &[CallerKey::Int(1)]).expect("it is held")
        });
        let mine = face.publish(t, G, &page, &[CallerKey::Int(2)]).expect("it is held");
        assert_ne!(mine, done(other));
        let found = face.find_all(t, G, &[CallerKey::Int(1), CallerKey::Int(2)]).expect("sound keys");
        assert_eq!(found.iter().flatten().count(), 1);
        face.release(&page).expect("it is held");
        empty(&pool);
    });
}

/// An audit beside others says what it saw; it never cries wolf.
#[test]
fn an_audit_beside_others() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 4);
        let t = plain_tenant(&pool, "t");
        let other = spawn(&pool, move |pool| {
            let batch = batch(pool, 1, 16);
            serve(pool, &batch, t, 0..7);
            serve(pool, &batch, t, 20..27);
        });
        let changing = spawn(&pool, move |pool| {
            let policy = Policy { reserve: [Units(1), Units(0)], ..Policy::default() };
            pool.ledger().set_policy(t, &policy).expect("it fits");
        });
        let report = pool.audit();
        assert!(report.findings.is_empty(), "{report:#?}");
        done(other);
        done(changing);
        empty(&pool);
    });
}

#[test]
fn a_pin_ends_beside_its_expiry() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 4);
        let budget = Policy { pin_budget: Units(4), ..Policy::default() };
        let t = tenant(&pool, ROOT, "t", &budget);
        let mine = batch(&pool, 1, 16);
        let sequence = open(&pool, t, 0..5);
        mine.add(&sequence).expect("a row");
        run(&mine, 1);
        let pin = pool.pin(&sequence, 4, t, Some(5), "").expect("within the budget");
        let other = spawn(&pool, move |pool| {
            pool.advance(10).expect("a manual clock");
        });
        let closing = thread::spawn(move || sequence.close().expect("nobody else uses it"));
        // Whoever comes first.
        let _ = pool.unpin(pin);
        done(other);
        done(closing);
        assert!(pool.pins(None).is_empty());
        drop(mine);
        empty(&pool);
    });
}

#[test]
fn a_policy_changes_beside_charges() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 4);
        let a = plain_tenant(&pool, "a");
        let b = plain_tenant(&pool, "b");
        let other = spawn(&pool, move |pool| {
            let batch = batch(pool, 1, 16);
            serve(pool, &batch, a, 0..7);
        });
        let reserve = Policy { reserve: [Units(3), Units(0)], ..Policy::default() };
        let reserved = pool.ledger().set_policy(b, &reserve).is_ok();
        let face = Pages::new(&pool);
        if reserved {
            let pages = face.allocate(b, G, 3).expect("it is reserved");
            face.release(&pages).expect("they are held");
        }
        let limit = Policy { limit: [Some(Units(1)), None], ..Policy::default() };
        pool.ledger().set_policy(a, &limit).expect("a limit may lie below use");
        done(other);
        empty(&pool);
    });
}

fn host_pool_of(pages: u64) -> (Arc<Pool>, TenantId, Batch) {
    let pool = host_pool(spec(&[(Full, 1)]), pages, pages);
    let t = plain_tenant(&pool, "t");
    let batch = batch(&pool, 1, 16);
    (pool, t, batch)
}

/// Computed up to its last token, in no batch.
fn computed(pool: &Arc<Pool>, batch: &Batch, t: TenantId, tokens: std::ops::Range<u32>) -> Arc<Sequence> {
    let sequence = open(pool, t, tokens);
    batch.add(&sequence).expect("a row");
    run(batch, 1);
    batch.remove(&sequence).expect("it has a row");
    sequence
}

/// A plan ends while its sequence is closed: whoever comes first, every page ends once, in the tier it lies in.
#[test]
fn a_close_beside_the_end_of_a_plan() {
    for (back, commit) in [(false, true), (false, false), (true, true), (true, false)] {
        let end = move |pool: &Pool, plan: &Plan| match commit {
            true => drop(pool.commit_plan(plan).expect("open")),
            false => pool.abort_plan(plan).expect("open"),
        };
        check(move || {
            let (pool, t, mine) = host_pool_of(6);
            let sequence = computed(&pool, &mine, t, 0..9);
            let mut built = pool.suspend(&sequence, Wish::Swap, None, 1000, false).expect("it runs");
            if back {
                pool.commit_plan(&built.0).expect("open");
                built = pool.resume(&sequence, 1000, false).expect("there is room");
            }
            let closing = thread::spawn(move || match sequence.close() {
                Ok(()) => {}
                // It is dropped then, with the plan's own handle at the latest.
                Err(Error::Busy(_)) => {}
                Err(e) => panic!("{e}"),
            });
            end(&pool, &built.0);
            drop(built);
            done(closing);
            drop(mine);
            empty(&pool);
        });
    }
}

/// Another sequence hits what one that is being swapped held alone, or does not; never both, and never what is away.
#[test]
fn a_hit_beside_a_swap() {
    check(|| {
        let (pool, t, mine) = host_pool_of(8);
        let sequence = computed(&pool, &mine, t, 0..9);
        let reader = spawn(&pool, move |pool| {
            let other = open(pool, t, 0..9);
            assert_true(&other, &(0..9).collect::<Vec<_>>());
            let (_, pages) = other.pages(G).expect("free");
            assert!(pages.iter().all(|(page, _)| pool.tier_of(page.id) == Tier::Device));
            other.close().expect("nobody else uses it");
        });
        let out = pool.suspend(&sequence, Wish::Swap, None, 1000, false).expect("it runs");
        pool.commit_plan(&out.0).expect("open");
        let back = pool.resume(&sequence, 1000, false).expect("there is room");
        pool.commit_plan(&back.0).expect("open");
        done(reader);
        assert_true(&sequence, &(0..9).collect::<Vec<_>>());
        sequence.close().expect("nobody else uses it");
        drop(mine);
        empty(&pool);
    });
}

/// Two threads want the same sequence away, and a third one ends what is over: one plan, and it ends once.
#[test]
fn two_who_suspend_and_an_expiry() {
    check(|| {
        let (pool, t, mine) = host_pool_of(6);
        let sequence = computed(&pool, &mine, t, 0..5);
        let theirs = Arc::clone(&sequence);
        let other = spawn(&pool, move |pool| {
            let from = From { batches: &[], sessions: &[theirs], who: For::Anybody };
            pool.preempt(t, 1, from, Wish::Recompute, 5, false).expect("sound").0
        });
        let expiring = spawn(&pool, |pool| drop(pool.advance(10)));
        let mine_built = pool.suspend(&sequence, Wish::Swap, None, 5, false);
        let their_plan = done(other);
        done(expiring);
        let plans = [mine_built.ok().map(|built| built.0), Some(their_plan)];
        for plan in plans.into_iter().flatten() {
            // In time or late.
            let _ = pool.commit_plan(&plan);
        }
        pool.advance(10).expect("a manual clock");
        sequence.close().expect("nobody else uses it");
        drop(mine);
        empty(&pool);
    });
}

/// An audit beside a policy that changes, which takes what lies in stock back: it finds nothing.
#[test]
fn an_audit_beside_a_policy() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 80);
        let t = plain_tenant(&pool, "t");
        // What was given back lies in stock.
        let face = crate::face::Pages::new(&pool);
        let pages = face.allocate(t, GroupId(0), 3).expect("there are more");
        face.release(&pages).expect("they are held");
        assert!(pool.ledger().usage(Tier::Device, t).stock > Units(0));
        let limit = Policy { limit: [Some(Units(1)), None], ..Policy::default() };
        let other = spawn(&pool, move |pool| pool.ledger().set_policy(t, &limit));
        let report = pool.audit();
        assert!(report.findings.is_empty(), "{report:?}");
        assert_eq!(done(other), Ok(()));
    });
}

/// A pool with an id for one tenant, who has it.
fn one_tenant() -> (Arc<Pool>, TenantId) {
    let spec = spec(&[(Full, 1)]);
    let options = Options { max_tenants: 1, ..options(&spec, 8) };
    let pool = Arc::new(Pool::new(spec, &options).expect("a pool"));
    let old = plain_tenant(&pool, "old");
    (pool, old)
}

/// A tenant goes while it is frozen and gets watermarks: who has its id afterwards has neither.
#[test]
fn what_is_said_of_a_tenant_that_goes_is_forgotten() {
    check(|| {
        let (pool, old) = one_tenant();
        let page = pool.spec().sizes()[0];
        let other = spawn(&pool, move |pool| {
            let frozen = pool.set_frozen(old, true).is_ok();
            let marked = pool.set_watermarks(old, Some((page, 2 * page))).is_ok();
            assert!(frozen || !marked, "who has gone does not come back");
        });
        pool.remove_tenant(old).expect("nothing is held");
        done(other);
        assert_eq!((pool.is_frozen(old), pool.watermarks(old)), (false, None));
        assert_eq!(plain_tenant(&pool, "new"), old);
        assert!(!pool.is_frozen(old));
    });
}

/// A tenant is removed twice while another one comes, which gets its id: that one keeps what it was given.
#[test]
fn a_tenant_goes_and_another_gets_its_id() {
    check(|| {
        let (pool, old) = one_tenant();
        let page = pool.spec().sizes()[0];
        let first = spawn(&pool, move |pool| pool.remove_tenant(old).is_ok());
        let second = spawn(&pool, move |pool| pool.remove_tenant(old).is_ok());
        let new = pool.ledger().create(ROOT, "new", &Policy::default()).ok();
        if let Some(new) = new {
            let _ = pool.set_frozen(new, true);
            let _ = pool.set_watermarks(new, Some((page, 2 * page)));
        }
        let removed = usize::from(done(first)) + usize::from(done(second));
        let there = new.is_some_and(|new| pool.ledger().is_live(new));
        // (A call that began when the new one was there has removed that.)
        assert_eq!(removed, 1 + usize::from(new.is_some() && !there));
        if there {
            assert_eq!((pool.is_frozen(old), pool.watermarks(old)), (true, Some((page, 2 * page))));
        }
    });
}

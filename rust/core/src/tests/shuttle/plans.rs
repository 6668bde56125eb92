//! Plans beside others on the whole pool: whatever is moved, evicted, topped up or brought back, every row that decodes finds
//! its pages, nobody is refused what is there, and the end of each plan is one.

use std::num::NonZeroU32;

use super::*;
use crate::{
    plan::Fault,
    reclaim::Live,
    tests::build::small_spec,
    word::{ClassId, FrameId, PageId},
};

/// Two sizes of pages, the one twice the other: an extent holds one large page or two small ones.
fn two_sizes(pages: u64) -> (Arc<Pool>, TenantId) {
    let pool = pool(spec(&[(Full, 2), (Window { tokens: 6 }, 1)]), pages);
    let tenant = plain_tenant(&pool, "t");
    (pool, tenant)
}

const LARGE: GroupId = GroupId(0);

fn class(pool: &Pool, group: GroupId) -> Option<ClassId> {
    Some(pool.groups[group.as_usize()].class)
}

/// What the last step shows of a row is where its pages lie, or where they lay: then nobody else has these places yet.
fn assert_shown(batch: &Batch, row: usize, sequence: &Sequence) {
    let pool = sequence.pool();
    let (groups, _) = batch.shown();
    for (group, (block_table, _)) in (0..).map(GroupId).zip(&groups) {
        let class = pool.groups[group.as_usize()].class;
        let (start, pages) = sequence.pages(group).expect("free");
        let width = batch.shape().pages;
        let shown = &block_table[row * width..][..width][start as usize..];
        for (&shown, (page, _)) in shown.iter().zip(pages) {
            let at = FrameId(shown as u32);
            assert!(pool.arena(Tier::Device).is_allocated(pool.classes[class.as_usize()].size, at), "{at}");
            let lies = |id: PageId| {
                let place = pool.pages.location(id);
                !pool.pages.read(id).is_free()
                    && (place.tier(), place.class(), place.frame()) == (Some(Tier::Device), class, at)
            };
            let others = (0..pool.max_pages()).map(PageId).filter(|&id| id != page.id);
            assert_eq!(others.filter(|&id| lies(id)).count(), 0, "{at} is shown, and somebody else's");
        }
    }
}

/// How a plan is ended: all at once, in pieces, or not at all.
fn end(pool: &Pool, plan: &Plan, how: u8) {
    let ended = match how {
        0 => pool.commit_plan(plan).map(drop),
        1 => pool.commit_some(plan, 1).and_then(|_| pool.abort_plan(plan)),
        _ => pool.abort_plan(plan),
    };
    match ended {
        // The first piece was the last, or the clock came first.
        Ok(()) | Err(Error::Plan(Fault::Ended(..))) => {}
        Err(e) => panic!("{e}"),
    }
}

/// Extents change their size under a sequence that decodes all the while.
#[test]
fn a_rebalance_beside_decode() {
    for how in 0..3 {
        check(move || {
            let (pool, t) = two_sizes(10);
            let mine = batch(&pool, 2, 16);
            let sequences: Vec<_> = (0..2).map(|n| open(&pool, t, 50 * n..50 * n + 5)).collect();
            sequences.iter().for_each(|s| _ = mine.add(s).expect("a row"));
            assert!(!run(&mine, 1).1);
            let other = spawn(&pool, move |pool| {
                let goal = class(pool, LARGE);
                let plan = pool.rebalance(goal, u64::MAX >> 1, 4, 1000, false).expect("a class");
                end(pool, &plan, how);
            });
            for _ in 0..3 {
                assert_eq!(run(&mine, 1), (2, false), "there is room for all they need");
                sequences.iter().enumerate().for_each(|(row, s)| assert_shown(&mine, row, s));
            }
            done(other);
            drop((mine, sequences));
            pool.advance(2000).expect("a manual clock");
            empty(&pool);
        });
    }
}

/// What drains keeps nothing from anybody: allocations that fit are not refused.
#[test]
fn an_allocation_beside_a_rebalance() {
    check(|| {
        let (pool, t) = two_sizes(6);
        let small = GroupId(1);
        let face = Pages::new(&pool);
        let kept = face.allocate(t, small, 3).expect("it is empty");
        let other = spawn(&pool, move |pool| {
            let goal = class(pool, LARGE);
            let plan = pool.rebalance(goal, u64::MAX >> 1, 4, 1000, false).expect("a class");
            end(pool, &plan, 2);
        });
        let more = face.allocate(t, small, 2).expect("there are three extents in nobody's use");
        done(other);
        face.release(&more).expect("they are held");
        face.release(&kept).expect("they are held");
        empty(&pool);
    });
}

/// Pages of one tenant go while others hit them and decode.
#[test]
fn a_reclaim_beside_hits() {
    for how in [0, 2] {
        check(move || {
            let pool = pool(spec(&[(Full, 1)]), 8);
            let t = plain_tenant(&pool, "t");
            let warm = batch(&pool, 1, 16);
            assert!(serve(&pool, &warm, t, 0..9));
            let other = spawn(&pool, move |pool| {
                let bytes = pool.spec().sizes()[0] * 2;
                let built = pool.reclaim(t, bytes, Live::Stay, 1000, false).expect("a tenant");
                end(pool, &built.0, how);
            });
            let sequence = open(&pool, t, 0..9);
            assert_true(&sequence, &(0..9).collect::<Vec<_>>());
            warm.add(&sequence).expect("a row");
            assert!(!run(&warm, 1).1 && !run(&warm, 1).1, "there is room");
            assert_true(&sequence, &(0..9).collect::<Vec<_>>());
            assert_shown(&warm, 0, &sequence);
            done(other);
            sequence.close().expect("nobody else uses it");
            drop(warm);
            empty(&pool);
        });
    }
}

/// One tenant gets more in one act, another one computes: what was topped up is there at once, whatever the other one does.
#[test]
fn a_top_up_beside_decode() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 6);
        let (a, b) = (plain_tenant(&pool, "a"), plain_tenant(&pool, "b"));
        let warm = batch(&pool, 1, 16);
        assert!(serve(&pool, &warm, b, 0..9));
        let other = spawn(&pool, move |pool| {
            let batch = batch(pool, 1, 16);
            serve(pool, &batch, b, 50..59);
            serve(pool, &batch, b, 0..9);
        });
        let bytes = pool.spec().sizes()[0] * 3;
        match pool.top_up(a, bytes, Live::Stay, 0, 1000, false) {
            Ok(_) => {
                let face = Pages::new(&pool);
                let pages = face.allocate(a, G, 3).expect("it was given");
                face.release(&pages).expect("they are held");
            }
            // The other one holds too much just now.
            Err(Error::Plan(Fault::Short { .. })) => {}
            Err(e) => panic!("{e}"),
        }
        done(other);
        drop(warm);
        empty(&pool);
    });
}

/// A reserve that is topped up and given up again, beside one that grows: neither takes the other's.
#[test]
fn two_top_ups() {
    check(|| {
        let pool = pool(spec(&[(Full, 1)]), 4);
        let (a, b) = (plain_tenant(&pool, "a"), plain_tenant(&pool, "b"));
        let page = pool.spec().sizes()[0];
        let work = move |t: TenantId| {
            move |pool: &Arc<Pool>| match pool.top_up(t, 3 * page, Live::Stay, 0, 1000, false) {
                Ok(_) => true,
                Err(Error::Plan(Fault::Short { .. })) => false,
                Err(e) => panic!("{e}"),
            }
        };
        let other = spawn(&pool, work(a));
        let mine = work(b)(&pool);
        assert!(mine != done(other), "four pages: one of the two");
        let reserved = [a, b].map(|t| pool.ledger().usage(Tier::Device, t).reserve.0);
        assert_eq!(reserved.iter().sum::<u32>(), 3 * (page / pool.spec().unit()) as u32);
        empty(&pool);
    });
}

/// One sequence leaves and comes back while another one decodes and takes what it left.
#[test]
fn a_swap_beside_decode() {
    for how in 0..3 {
        check(move || {
            let (pool, t, mine) = host_pool_of(7);
            let sequence = computed(&pool, &mine, t, 0..9);
            let other = spawn(&pool, move |pool| {
                let batch = batch(pool, 1, 16);
                serve(pool, &batch, t, 50..59);
                serve(pool, &batch, t, 70..83);
            });
            let out = pool.suspend(&sequence, Wish::Swap, None, 1000, false).expect("it runs");
            end(&pool, &out.0, how);
            drop(out);
            match pool.resume(&sequence, 1000, false) {
                Ok(back) => end(&pool, &back.0, how),
                // It never left, or the other one has its room.
                Err(Error::Argument(_) | Error::Refused(_)) => {}
                Err(e) => panic!("{e}"),
            }
            done(other);
            sequence.close().expect("nobody else uses it");
            drop((mine, sequence));
            empty(&pool);
        });
    }
}

/// Whoever builds the plan looks at the sequence, and at the batch it stands in, for a moment.
fn patient<R>(mut f: impl FnMut() -> Result<R, Error>) -> R {
    loop {
        match f() {
            Err(Error::Busy(_)) => thread::yield_now(),
            done => return done.expect("nothing else is in its way"),
        }
    }
}

/// What the holder of pages does while a plan compresses or cuts them.
#[derive(Clone, Copy, Debug)]
enum Act {
    Decode,
    Fork,
    Truncate,
    Close,
}

/// Pages of a sequence go on in a smaller class, or go, while its holder does something and others look for what it has.
fn lose_pages_beside(act: Act, cut: bool, how: u8) {
    check(move || {
        // (Of one layer both classes take as much.)
        let spec = if cut { spec(&[(Full, 1)]) } else { small_spec(&[(Full, 2)]) };
        let pool = pool(spec, 12);
        let policy = Policy { compress: true, cut: NonZeroU32::new(2), ..Policy::default() };
        let t = tenant(&pool, ROOT, "t", &policy);
        let (mine, long) = (batch(&pool, 2, 32), 4 * PAGE + 1);
        let sequence = open(&pool, t, 0..long);
        mine.add(&sequence).expect("a row");
        assert!(!run(&mine, 1).1);
        let session = Arc::clone(&sequence);
        mine.remove(&sequence).expect("a row");
        let other = spawn(&pool, move |pool| {
            let from = From { batches: &[], sessions: &[session], who: For::Anybody };
            let built = match cut {
                true => pool.cut(t, u64::MAX >> 1, from, 1000, false),
                false => pool.compress(t, u64::MAX >> 1, from, 1000, false),
            };
            end(pool, &built.expect("allowed").0, how);
            // Whoever finds something finds what was computed from all before it.
            let twin = open(pool, t, 0..long);
            assert_true(&twin, &(0..long).collect::<Vec<_>>());
            twin.close().expect("nobody else uses it");
        });
        let busy = |e: &Error| matches!(e, Error::Busy(_) | Error::Argument(_));
        match act {
            Act::Decode => {
                patient(|| mine.add(&sequence));
                for _ in 0..PAGE {
                    let refused = patient(|| mine.step(None, None, |s| s.refused.len()));
                    assert_eq!(refused, 0, "there is room");
                    patient(|| mine.commit(Some(&[1])));
                }
                patient(|| mine.remove(&sequence));
            }
            Act::Fork => match sequence.fork() {
                Ok(fork) => fork.close().expect("nobody else uses it"),
                Err(e) => assert!(busy(&e), "{e}"),
            },
            Act::Truncate => match sequence.truncate(2 * PAGE) {
                Ok(()) => {}
                Err(e) => assert!(busy(&e), "{e}"),
            },
            Act::Close => match sequence.close() {
                Ok(()) => {}
                Err(e) => assert!(busy(&e), "{e}"),
            },
        }
        done(other);
        drop((mine, sequence));
        pool.advance(2000).expect("a manual clock");
        empty(&pool);
    });
}

#[test]
fn a_cut_beside_what_its_holder_does() {
    for act in [Act::Decode, Act::Fork, Act::Truncate, Act::Close] {
        (0..3).for_each(|how| lose_pages_beside(act, true, how));
    }
}

#[test]
fn a_compression_beside_what_its_holder_does() {
    for act in [Act::Decode, Act::Fork, Act::Truncate, Act::Close] {
        (0..3).for_each(|how| lose_pages_beside(act, false, how));
    }
}

/// Three ways to end one plan at the same moment: it ends once, and the books know how.
#[test]
fn a_plan_that_three_end() {
    check(|| {
        let (pool, t) = two_sizes(10);
        let mine = batch(&pool, 2, 16);
        let sequences: Vec<_> = (0..2).map(|n| computed(&pool, &mine, t, 50 * n..50 * n + 6)).collect();
        let goal = class(&pool, LARGE);
        let plan = pool.rebalance(goal, u64::MAX >> 1, 4, 5, false).expect("a class");
        let (theirs, clock) = (plan.clone(), spawn(&pool, |pool| pool.advance(10).map(drop)));
        let other = spawn(&pool, move |pool| pool.abort_plan(&theirs).is_ok());
        let piece = pool.commit_some(&plan, 1).is_ok_and(|done| done.left == 0);
        let rest = pool.commit_plan(&plan).is_ok();
        let (aborted, ticked) = (done(other), done(clock));
        ticked.expect("a manual clock");
        let ways = u32::from(piece) + u32::from(rest) + u32::from(aborted);
        assert!(ways <= 1, "it ends once");
        let state = pool.plan_state(&plan).expect("remembered");
        assert_ne!(state, crate::word::plan::State::Open);
        assert_eq!(ways == 0, state == crate::word::plan::State::Expired);
        drop((mine, sequences));
        pool.advance(2000).expect("a manual clock");
        empty(&pool);
    });
}

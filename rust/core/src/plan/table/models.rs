//! The races about the end of a plan: whoever comes first with each move, and with the end of them all.

use std::ops::Range;

#[cfg(kvalloc_loom)]
use loom::{model, thread};
#[cfg(kvalloc_shuttle)]
use shuttle::thread;

use super::*;
use crate::{
    plan::Kind,
    sync::Arc,
    word::{ClassId, FrameId, Generation, PageId, PageRef, TenantId, page::Location},
};

#[cfg(kvalloc_shuttle)]
fn model(f: impl Fn() + Send + Sync + 'static) {
    shuttle::check_pct(f, 20_000, 3);
}

/// A plan of `moves` moves, and what has come of each.
struct World {
    plans: Plans,
    /// Per move: 1 for a commit, 0x100 for an undoing.
    ends: Vec<AtomicU64>,
    /// Ends of the whole plan.
    settled: AtomicU64,
}

fn plan(moves: u32, deadline_ms: u64) -> Plan {
    let at = |n| Location::new(Tier::Device, ClassId(0), FrameId(n));
    let one = |n| Move {
        page: PageRef { id: PageId(n), generation: Generation(1) },
        from: at(n),
        to: at(n + moves),
        payer: TenantId(1),
    };
    Plan { deadline_ms, moves: (0..moves).map(one).collect(), ..Plan::new(Kind::Rebalance, TenantId(0), 0) }
}

impl World {
    fn new(moves: u32, deadline_ms: u64) -> (Arc<Self>, PlanId) {
        let plans = Plans::new().expect("entropy");
        let id = plans.add(plan(moves, deadline_ms), Vec::new()).plan().id;
        let ends = (0..moves).map(|_| AtomicU64::new(0)).collect();
        (Arc::new(Self { plans, ends, settled: AtomicU64::new(0) }), id)
    }

    /// As `Pool::commit_some`: how many moves.
    fn commit(&self, id: PlanId, n: usize) -> Option<usize> {
        let entry = self.plans.get(id)?;
        let taken = entry.take(n)?;
        Some(self.end(&entry, taken, 1))
    }

    /// As `Pool::abort_plan`.
    fn abort(&self, id: PlanId) -> Option<usize> {
        self.give_up(&self.plans.get(id)?, State::Aborted)
    }

    /// As `Pool::expire_plans`.
    fn expire(&self, now: u64) -> Option<usize> {
        if !self.plans.are_due(now) {
            return None;
        }
        let (due, _) = self.plans.due(now, true);
        due.iter().filter_map(|entry| self.give_up(entry, State::Expired)).next()
    }

    fn give_up(&self, entry: &Entry, state: State) -> Option<usize> {
        let left = entry.give_up(state)?;
        Some(self.end(entry, left, 0x100))
    }

    fn end(&self, entry: &Entry, moves: Range<usize>, how: u64) -> usize {
        for n in moves.clone() {
            assert_eq!(self.ends[n].plus(how), 0, "a move ends once");
        }
        if let Some(state) = entry.end(moves.len()) {
            // Whoever ends it sees what all others have done.
            assert!(self.ends.iter().all(|end| matches!(end.get(), 1 | 0x100)));
            assert_eq!(self.settled.plus(1), 0, "a plan ends once");
            self.plans.remove(entry.plan().id, state);
        }
        moves.len()
    }

    /// When all is over: `committed` moves and an end that says so.
    fn check(&self, id: PlanId, committed: usize) -> State {
        let made = self.ends.iter().filter(|end| end.get() == 1).count();
        assert_eq!(made, committed);
        assert_eq!(self.settled.get(), 1);
        assert!(self.plans.get(id).is_none());
        assert_eq!(self.plans.next_deadline.get(), NEVER);
        self.plans.state(id).expect("remembered")
    }
}

fn spawn<R: Send + 'static>(
    world: &Arc<World>,
    f: impl FnOnce(&World) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let world = Arc::clone(world);
    thread::spawn(move || f(&world))
}

fn done<R>(thread: thread::JoinHandle<R>) -> R {
    thread.join().expect("no panic")
}

#[test]
fn models_a_commit_against_an_abort() {
    model(|| {
        let (world, id) = World::new(2, 10);
        let other = spawn(&world, move |world| world.abort(id));
        let mine = world.commit(id, usize::MAX);
        let theirs = done(other);
        assert!(mine.is_some() != theirs.is_some(), "one of the two");
        let state = world.check(id, mine.unwrap_or(0));
        assert_eq!(state, if mine.is_some() { State::Committed } else { State::Aborted });
    });
}

/// A piece, the rest, an abort and the clock: each move goes one way, and the end is somebody's.
#[test]
fn models_pieces_against_an_abort_and_an_expiry() {
    model(|| {
        let (world, id) = World::new(3, 10);
        let aborting = spawn(&world, move |world| world.abort(id));
        let expiring = spawn(&world, |world| world.expire(10));
        let piece = world.commit(id, 1);
        let rest = world.commit(id, usize::MAX);
        let (aborted, expired) = (done(aborting), done(expiring));
        assert!(piece != Some(0) && rest != Some(0), "a piece of nothing is nothing");
        let state = world.check(id, piece.unwrap_or(0) + rest.unwrap_or(0));
        let ways = [rest.is_some(), aborted.is_some(), expired.is_some()];
        assert_eq!(ways.iter().filter(|way| **way).count(), 1, "{ways:?}");
        assert_eq!(
            state,
            [State::Committed, State::Aborted, State::Expired][ways.iter().position(|w| *w).expect("one")]
        );
    });
}

/// Two who commit pieces: together all, each move once.
#[test]
fn models_two_who_commit_pieces() {
    model(|| {
        let (world, id) = World::new(3, 10);
        let other = spawn(&world, move |world| [world.commit(id, 1), world.commit(id, 1)]);
        let mine = [world.commit(id, 1), world.commit(id, 2)];
        let all: usize = done(other).into_iter().chain(mine).flatten().sum();
        assert_eq!(world.check(id, all), State::Committed);
        assert_eq!(all, 3);
    });
}

/// A plan that moves nothing has an end all the same, and only one.
#[test]
fn models_a_plan_without_moves() {
    model(|| {
        let (world, id) = World::new(0, 10);
        let other = spawn(&world, move |world| world.abort(id));
        let expiring = spawn(&world, |world| world.expire(10));
        let mine = world.commit(id, usize::MAX);
        let ways = [mine.is_some(), done(other).is_some(), done(expiring).is_some()];
        assert_eq!(ways.iter().filter(|way| **way).count(), 1, "{ways:?}");
        world.check(id, 0);
    });
}

/// Plans come, are given more time and go while the clock looks: what is due is found, if not at once then by whoever
/// looks next, and then it gets no more time.
#[test]
fn models_no_deadline_is_missed() {
    model(|| {
        let (world, id) = World::new(1, 10);
        let other = spawn(&world, move |world| {
            let renewed = world.plans.renew(id, 20);
            (renewed, world.plans.add(plan(0, 5), Vec::new()).plan().id)
        });
        let early = world.plans.due(10, true).0;
        let (renewed, second) = done(other);
        assert!(early.len() <= 1 || early.iter().any(|e| e.plan().id == second));
        let times = |found: &[Entry], id| found.iter().filter(|e| e.plan().id == id).count();
        // It was due before somebody asked for more time, which is too late then, or after that.
        assert!(!renewed || times(&early, id) == 0);
        assert_eq!(renewed, world.plans.renew(id, 20));
        // Nobody has begun to end them.
        let late = world.plans.due(20, true).0;
        assert_eq!((times(&late, id), times(&late, second)), (1, 1));
        for entry in &late {
            assert!(entry.give_up(State::Expired).is_some());
        }
        assert!(world.plans.due(20, true).0.is_empty());
        assert!(!world.plans.are_due(20));
    });
}

/// A thread finds that a plan's time is over, and stops: another one, which looks at the same moment or later, ends it.
#[test]
fn models_a_thread_that_stops_with_what_is_due() {
    model(|| {
        let (world, id) = World::new(2, 10);
        let other = spawn(&world, |world| drop(world.plans.due(10, true)));
        let early = world.expire(10);
        done(other);
        let late = world.expire(10);
        assert_eq!([early, late].into_iter().flatten().collect::<Vec<_>>(), [2]);
        assert_eq!(world.check(id, 0), State::Expired);
    });
}

/// Somebody looks into the table while a plan ends: whoever ends it does not wait, and it is off the table all the same.
#[test]
fn models_an_end_beside_a_look() {
    model(|| {
        let (world, id) = World::new(1, 10);
        let other = spawn(&world, |world| world.plans.open().len());
        assert_eq!(world.commit(id, 1), Some(1));
        assert!(done(other) <= 1);
        assert!(world.plans.open().is_empty());
        assert_eq!(world.check(id, 1), State::Committed);
    });
}

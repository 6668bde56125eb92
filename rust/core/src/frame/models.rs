//! The races that matter, in arenas of very few frames: all interleavings as far as loom sees them, with weak memory;
//! and very many of them at random with shuttle, which also finds those that loom's reduction leaves out (a change that
//! follows on another thread's read, with a read of one's own between).

mod drains;

#[cfg(kvalloc_loom)]
use loom::{model, thread};
#[cfg(kvalloc_shuttle)]
use shuttle::thread;

use super::*;
use crate::{
    sync::{Arc, Atom, AtomicU64},
    word::{TIERS, Tier},
};

#[cfg(kvalloc_shuttle)]
fn model(f: impl Fn() + Send + Sync + 'static) {
    shuttle::check_pct(f, 20_000, 3);
}

const A: SizeId = SizeId(0);
const B: SizeId = SizeId(1);

fn arena(sizes: &[u64], extent_bytes: u64, extents: u32) -> Arena {
    let bytes = extent_bytes * u64::from(extents);
    let layout =
        ArenaLayout { bytes, rounded_off: 0, extent_bytes, extents, sizes: sizes.into(), reserved: 0 };
    Arena::new(&layout)
}

fn claim(arena: &Arena, size: SizeId, lane: u8, want: usize) -> Vec<FrameId> {
    let mut out = Vec::new();
    arena.claim(size, Lane(lane), want, &mut out);
    out
}

/// When all threads are done: counts, bits and lists agree, and everything comes back.
fn settle(arena: &Arena, held: &[(SizeId, FrameId)]) {
    for extent in 0..arena.len() {
        let state = arena.extent_state(ExtentId(extent));
        assert_eq!(state.used, state.total - state.free);
    }
    for (size, bytes) in arena.sizes().iter().enumerate() {
        let mine = held.iter().filter(|h| h.0.as_usize() == size).count() as u64;
        assert_eq!(arena.allocated_bytes(SizeId(size as u8)), mine * bytes);
    }
    for &(size, frame) in held {
        assert_eq!(arena.release(size, frame), Ok(()));
    }
    for size in (0..arena.sizes().len()).map(|s| SizeId(s as u8)) {
        let all = claim(arena, size, 5, usize::MAX);
        assert_eq!(all.len(), arena.frames(size) as usize);
        assert_eq!(arena.release_many(size, &all), Ok(()));
    }
}

#[test]
fn models_two_claims_on_the_last_frames() {
    model(|| {
        let arena = Arc::new(arena(&[1], 3, 1));
        let other = {
            let arena = arena.clone();
            thread::spawn(move || claim(&arena, A, 1, 2))
        };
        let mut got = claim(&arena, A, 0, 2);
        got.extend(other.join().expect("no panic"));
        got.sort_unstable();
        got.dedup();
        assert_eq!(got.len(), 3);
        settle(&arena, &got.iter().map(|f| (A, *f)).collect::<Vec<_>>());
    });
}

/// Both threads hold one frame at most and there are two: neither may be told that there is none.
#[test]
fn models_a_frame_that_moves_is_not_missed() {
    model(|| {
        let arena = Arc::new(arena(&[1], 1, 2));
        let mine = claim(&arena, A, 0, 1);
        let other = {
            let arena = arena.clone();
            thread::spawn(move || claim(&arena, A, 1, 1))
        };
        assert_eq!(arena.release(A, mine[0]), Ok(()));
        let again = claim(&arena, A, 0, 1);
        let theirs = other.join().expect("no panic");
        assert_eq!((again.len(), theirs.len()), (1, 1));
        settle(&arena, &[(A, again[0]), (A, theirs[0])]);
    });
}

/// Two releases into an exhausted extent that no list has: whoever has released can claim.
#[test]
fn models_a_release_is_seen_at_once() {
    model(|| {
        let arena = Arc::new(arena(&[1], 2, 1));
        let all = claim(&arena, A, 0, 3);
        assert_eq!(all.len(), 2);
        let other = {
            let (arena, frame) = (arena.clone(), all[1]);
            thread::spawn(move || {
                assert_eq!(arena.release(A, frame), Ok(()));
                claim(&arena, A, 1, 1)
            })
        };
        assert_eq!(arena.release(A, all[0]), Ok(()));
        let again = claim(&arena, A, 2, 1);
        let theirs = other.join().expect("no panic");
        assert_eq!((again.len(), theirs.len()), (1, 1));
        settle(&arena, &[(A, again[0]), (A, theirs[0])]);
    });
}

/// A visitor cleans a list while an extent is filled again.
#[test]
fn models_cleaning_loses_no_extent() {
    model(|| {
        let arena = Arc::new(arena(&[1], 1, 2));
        let all = claim(&arena, A, 0, 2);
        assert_eq!(all.len(), 2);
        let other = {
            let arena = arena.clone();
            thread::spawn(move || claim(&arena, A, 1, 1))
        };
        assert_eq!(arena.release(A, all[0]), Ok(()));
        assert_eq!(arena.release(A, all[1]), Ok(()));
        let again = claim(&arena, A, 2, 1);
        assert_eq!(again.len(), 1);
        let mut held = vec![(A, again[0])];
        held.extend(other.join().expect("no panic").iter().map(|f| (A, *f)));
        settle(&arena, &held);
    });
}

/// The last frame comes back, the extent goes to the arena and is taken for the other size.
#[test]
fn models_an_extent_changes_its_size() {
    model(|| {
        let arena = Arc::new(arena(&[1, 2], 2, 1));
        let last = claim(&arena, A, 0, 1);
        let other = {
            let arena = arena.clone();
            thread::spawn(move || claim(&arena, B, 1, 1))
        };
        assert_eq!(arena.release(A, last[0]), Ok(()));
        let more = claim(&arena, A, 0, 1);
        let theirs = other.join().expect("no panic");
        assert_eq!(more.len() + theirs.len(), 1, "one of the two has the extent");
        let held = more.iter().map(|f| (A, *f)).chain(theirs.iter().map(|f| (B, *f)));
        settle(&arena, &held.collect::<Vec<_>>());
    });
}

/// One takes an extent from the arena; another looks there for another size, cleans up, and then wants what the first
/// has left.
#[test]
fn models_a_taken_extent_is_not_hidden() {
    model(|| {
        let arena = Arc::new(arena(&[1, 2], 2, 1));
        let first = {
            let arena = arena.clone();
            thread::spawn(move || claim(&arena, A, 1, 1))
        };
        let visitor = claim(&arena, B, 0, 1);
        let second = claim(&arena, A, 0, 1);
        let first = first.join().expect("no panic");
        match visitor.len() {
            0 => assert_eq!((first.len(), second.len()), (1, 1)),
            _ => assert_eq!((first.len(), second.len()), (0, 0)),
        }
        let held = first.iter().chain(&second).map(|f| (A, *f)).chain(visitor.iter().map(|f| (B, *f)));
        settle(&arena, &held.collect::<Vec<_>>());
    });
}

/// An extent goes from the arena's list to its size's while somebody reads first the one, then the other.
#[test]
fn models_an_extent_between_two_lists() {
    model(|| {
        let arena = Arc::new(arena(&[1, 2], 2, 1));
        let other = {
            let arena = arena.clone();
            thread::spawn(move || {
                let first = claim(&arena, A, 1, 1);
                assert!(claim(&arena, B, 1, 1).is_empty());
                first
            })
        };
        let mine = claim(&arena, A, 0, 1);
        let theirs = other.join().expect("no panic");
        assert_eq!((mine.len(), theirs.len()), (1, 1));
        settle(&arena, &[(A, mine[0]), (A, theirs[0])]);
    });
}

#[test]
fn models_of_two_releases_of_a_frame_one_wins() {
    model(|| {
        let arena = Arc::new(arena(&[1, 2], 2, 1));
        let held = claim(&arena, A, 0, 2);
        let other = {
            let (arena, frame) = (arena.clone(), held[0]);
            thread::spawn(move || arena.release(A, frame).is_ok())
        };
        let mine = arena.release_many(A, &held[..1]).is_ok();
        let theirs = other.join().expect("no panic");
        assert!(mine != theirs);
        assert_eq!(arena.faults(), 1);
        settle(&arena, &[(A, held[1])]);
    });
}

#[test]
fn models_slots() {
    model(|| {
        let slots = Arc::new(Slots::new(2));
        let mut mine = Vec::new();
        slots.claim(Lane(0), 1, &mut mine);
        let other = {
            let slots = slots.clone();
            thread::spawn(move || {
                let mut theirs = Vec::new();
                assert_eq!(slots.claim(Lane(1), 1, &mut theirs), 1);
                assert_eq!(slots.release(theirs[0]), Ok(()));
                assert_eq!(slots.claim(Lane(1), 1, &mut theirs), 1);
                theirs[1]
            })
        };
        assert_eq!(slots.release(mine[0]), Ok(()));
        assert_eq!(slots.claim(Lane(0), 1, &mut mine), 1);
        let theirs = other.join().expect("no panic");
        assert_ne!(mine[1], theirs);
        assert_eq!((slots.allocated(), slots.faults()), (2, 0));
    });
}

fn tiers() -> Arc<[Arena; TIERS]> {
    Arc::new([arena(&[1], 2, 1), arena(&[1], 1, 1)])
}

/// A batch comes out of quiescence while its page moves: either it shows the new place, or the old one stays out.
#[test]
fn models_a_batch_that_entered_keeps_the_frame_out() {
    model(|| {
        let arenas = tiers();
        let quiescence = Arc::new(Quiescence::new(&arenas));
        let places = claim(&arenas[0], A, 0, 2);
        let (old, new) = (places[0], places[1]);
        let location = Arc::new(AtomicU64::new(u64::from(old.0)));
        let reused = Arc::new(AtomicU64::new(0));
        let (batch, mut fresh) = quiescence.register().expect("room");
        // Looked at when the row was added.
        let mut shown = location.get();
        let mover = {
            let (quiescence, arenas) = (quiescence.clone(), arenas.clone());
            let (location, reused) = (location.clone(), reused.clone());
            thread::spawn(move || {
                location.cas(u64::from(old.0), u64::from(new.0)).expect("one mover");
                quiescence.retire(Tier::Device, A, old);
                if quiescence.drain_quiet(&arenas) == 1 {
                    reused.plus(1);
                }
            })
        };
        // The first step looks at a place only if it has to; the second one always does.
        for look in [false, true] {
            let entered = quiescence.enter(batch);
            if look || entered.stale {
                shown = location.get();
                fresh = entered.epoch;
            }
            quiescence.step(batch, fresh);
            // The kernel runs. The add reads what is really there, not what this thread knows.
            assert!(shown == u64::from(new.0) || reused.plus(0) == 0);
            quiescence.quiesce(batch, fresh);
        }
        mover.join().expect("no panic");
        quiescence.drain_quiet(&arenas);
        assert!(quiescence.is_empty());
        assert_eq!((arenas[0].available(A), arenas[0].faults()), (1, 0));
    });
}

/// Two drains: the frame comes back once.
#[test]
fn models_limbo_gives_back_once() {
    model(|| {
        let arenas = tiers();
        let quiescence = Arc::new(Quiescence::new(&arenas));
        let frame = claim(&arenas[0], A, 0, 1)[0];
        let (batch, _) = quiescence.register().expect("room");
        let entered = quiescence.enter(batch);
        quiescence.step(batch, entered.epoch);
        quiescence.retire(Tier::Device, A, frame);
        let other = {
            let (quiescence, arenas) = (quiescence.clone(), arenas.clone());
            thread::spawn(move || quiescence.drain(&arenas))
        };
        let early = quiescence.drain(&arenas);
        assert_eq!(early, 0, "the batch hasn't moved on");
        quiescence.leave(batch);
        let mine = quiescence.drain(&arenas);
        let theirs = other.join().expect("no panic");
        let late = quiescence.drain(&arenas);
        assert_eq!(mine + theirs + late, 1);
        assert_eq!((arenas[0].available(A), arenas[0].faults()), (2, 0));
        assert_eq!(quiescence.frames(Tier::Device, A), 0);
    });
}

/// A page moves while a batch comes up and is given a row with it: it shows the new place, or the old one stays out.
#[test]
fn models_a_batch_that_registers_beside_a_drain() {
    for quiet in [false, true] {
        model(move || {
            let arenas = tiers();
            let quiescence = Arc::new(Quiescence::new(&arenas));
            let places = claim(&arenas[0], A, 0, 2);
            let (old, new) = (places[0], places[1]);
            let location = Arc::new(AtomicU64::new(u64::from(old.0)));
            let reused = Arc::new(AtomicU64::new(0));
            let mover = {
                let (quiescence, arenas) = (quiescence.clone(), arenas.clone());
                let (location, reused) = (location.clone(), reused.clone());
                thread::spawn(move || {
                    location.cas(u64::from(old.0), u64::from(new.0)).expect("one mover");
                    quiescence.retire(Tier::Device, A, old);
                    let n = if quiet { quiescence.drain_quiet(&arenas) } else { quiescence.drain(&arenas) };
                    reused.plus(n as u64);
                })
            };
            let (batch, mut fresh) = quiescence.register().expect("room");
            let mut shown = location.get();
            let entered = quiescence.enter(batch);
            if entered.stale {
                (shown, fresh) = (location.get(), entered.epoch);
            }
            quiescence.step(batch, fresh);
            assert!(shown == u64::from(new.0) || reused.plus(0) == 0);
            mover.join().expect("no panic");
            quiescence.leave(batch);
            quiescence.drain(&arenas);
            assert!(quiescence.is_empty());
            assert_eq!((arenas[0].available(A), arenas[0].faults()), (1, 0));
        });
    }
}

/// A page moves while steps follow upon each other, with none quiet between them: what one looked at is looked at anew by the
/// next, and until then the old place stays out.
#[test]
fn models_a_busy_batch_beside_a_drain() {
    model(|| {
        let arenas = tiers();
        let quiescence = Arc::new(Quiescence::new(&arenas));
        let places = claim(&arenas[0], A, 0, 2);
        let (old, new) = (places[0], places[1]);
        let location = Arc::new(AtomicU64::new(u64::from(old.0)));
        let reused = Arc::new(AtomicU64::new(0));
        let (batch, fresh) = quiescence.register().expect("room");
        quiescence.enter(batch);
        quiescence.step(batch, fresh);
        let mover = {
            let (quiescence, arenas) = (quiescence.clone(), arenas.clone());
            let (location, reused) = (location.clone(), reused.clone());
            thread::spawn(move || {
                location.cas(u64::from(old.0), u64::from(new.0)).expect("one mover");
                quiescence.retire(Tier::Device, A, old);
                reused.plus(quiescence.drain(&arenas) as u64);
                reused.plus(quiescence.drain_quiet(&arenas) as u64);
            })
        };
        for _ in 0..2 {
            let entered = quiescence.enter(batch);
            assert!(!entered.stale, "it was never quiet");
            let shown = location.get();
            quiescence.step(batch, entered.epoch);
            assert!(shown == u64::from(new.0) || reused.plus(0) == 0);
        }
        mover.join().expect("no panic");
        quiescence.leave(batch);
        quiescence.drain(&arenas);
        assert!(quiescence.is_empty());
    });
}

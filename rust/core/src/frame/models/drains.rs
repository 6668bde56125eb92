//! Extents that drain, in arenas of two extents at most: nothing is given out of one, no frame twice, and none is lost,
//! whoever comes first.

use super::*;

const E0: ExtentId = ExtentId(0);

/// One extent, with room for two frames of A or one of B.
fn one() -> Arc<Arena> {
    Arc::new(arena(&[1, 2], 2, 1))
}

fn spawn<R: Send + 'static>(
    arena: &Arc<Arena>,
    f: impl FnOnce(&Arena) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let arena = Arc::clone(arena);
    thread::spawn(move || f(&arena))
}

fn done<R>(thread: thread::JoinHandle<R>) -> R {
    thread.join().expect("no panic")
}

fn held(a: &[&[FrameId]], b: &[FrameId]) -> Vec<(SizeId, FrameId)> {
    a.concat().into_iter().map(|f| (A, f)).chain(b.iter().map(|f| (B, *f))).collect()
}

/// A claim comes in time, or finds nothing.
#[test]
fn models_a_drain_against_a_claim() {
    model(|| {
        let arena = one();
        let first = claim(&arena, A, 0, 1);
        let other = spawn(&arena, |arena| claim(arena, A, 1, 1));
        assert!(arena.drain(E0, A, Some(B)));
        let free = arena.extent_state(E0).free;
        assert!(claim(&arena, A, 2, 1).is_empty(), "nothing is given out");
        let theirs = done(other);
        assert_eq!((arena.extent_state(E0).free, theirs.len() as u32), (free, 1 - free));
        for frame in first.iter().chain(&theirs) {
            assert_eq!(arena.release(A, *frame), Ok(()));
        }
        assert_eq!(arena.glance(E0).size, Some(B));
        settle(&arena, &[]);
    });
}

/// The last two frames come back at once: one of them brings the extent where it is waited for.
#[test]
fn models_the_last_releases_pass_an_extent_on() {
    model(|| {
        let arena = one();
        let all = claim(&arena, A, 0, 2);
        assert!(arena.drain(E0, A, Some(B)));
        let (mine, theirs) = (all[0], all[1]);
        let other = spawn(&arena, move |arena| arena.release(A, theirs));
        assert_eq!(arena.release(A, mine), Ok(()));
        let early = claim(&arena, B, 1, 1);
        assert_eq!(done(other), Ok(()));
        let late = claim(&arena, B, 1, 1);
        assert_eq!(early.len() + late.len(), 1, "it is there, once");
        settle(&arena, &held(&[], &[early, late].concat()));
    });
}

/// The draining is stopped while the last frame comes back: the extent has gone on, or serves on; whole in either case.
#[test]
fn models_a_stop_against_the_last_release() {
    for goal in [None, Some(B)] {
        model(move || {
            let arena = one();
            let last = claim(&arena, A, 0, 1);
            assert!(arena.drain(E0, A, goal));
            let other = spawn(&arena, |arena| arena.undrain(E0));
            assert_eq!(arena.release(A, last[0]), Ok(()));
            let again = claim(&arena, A, 2, 2);
            let stopped = done(other);
            assert!(!stopped || arena.glance(E0).size != Some(B));
            let rest = claim(&arena, A, 2, 2);
            assert_eq!(again.len() + rest.len(), 2, "any size can have it");
            settle(&arena, &held(&[&again, &rest], &[]));
        });
    }
}

/// Somebody looks into the lists while the draining stops, and takes what is exhausted from them: what is free is found.
#[test]
fn models_a_stop_against_a_look() {
    model(|| {
        let arena = one();
        let first = claim(&arena, A, 0, 1);
        assert!(arena.drain(E0, A, Some(B)));
        let other = spawn(&arena, |arena| claim(arena, A, 1, 1));
        assert!(arena.undrain(E0));
        let mine = claim(&arena, A, 2, 1);
        let theirs = done(other);
        assert_eq!(mine.len() + theirs.len(), 1);
        settle(&arena, &held(&[&first, &mine, &theirs], &[]));
    });
}

/// Two stop it, and a third drains it anew: each start ends once.
#[test]
fn models_two_who_stop() {
    model(|| {
        let arena = one();
        let first = claim(&arena, A, 0, 1);
        assert!(arena.drain(E0, A, Some(B)));
        let other = spawn(&arena, |arena| arena.undrain(E0));
        let mine = arena.undrain(E0);
        let anew = arena.drain(E0, A, None);
        let theirs = done(other);
        let draining = arena.glance(E0).draining;
        let (starts, stops) = (1 + u32::from(anew), u32::from(mine) + u32::from(theirs));
        assert_eq!(starts, stops + u32::from(draining));
        if draining {
            assert_eq!(arena.undrain_all(A), 1, "it is known that something drains");
        }
        settle(&arena, &held(&[&first], &[]));
    });
}

/// Draining takes nothing from anybody: whoever stops it all and looks again has what was free all the time.
#[test]
fn models_a_refusal_against_a_drain() {
    model(|| {
        let arena = one();
        let first = claim(&arena, A, 0, 1);
        let other = spawn(&arena, |arena| arena.drain(E0, A, Some(B)));
        let mut mine = claim(&arena, A, 1, 1);
        if mine.is_empty() {
            assert_eq!(arena.undrain_all(A), 1, "it drains, for there was nothing");
            mine = claim(&arena, A, 1, 1);
        }
        assert_eq!(mine.len(), 1);
        assert!(done(other));
        settle_draining(&arena, &held(&[&first, &mine], &[]));
    });
}

/// An extent was passed on while somebody looks for room of that very size: later any other size can have it too.
#[test]
fn models_a_whole_extent_stays_known() {
    model(|| {
        let arena = one();
        let last = claim(&arena, A, 0, 1);
        assert!(arena.drain(E0, A, Some(B)));
        let other = spawn(&arena, |arena| {
            let got = claim(arena, B, 1, 1);
            got.iter().for_each(|f| assert_eq!(arena.release(B, *f), Ok(())));
        });
        assert_eq!(arena.release(A, last[0]), Ok(()));
        done(other);
        let all = claim(&arena, A, 2, 2);
        assert_eq!(all.len(), 2, "it is whole, so it serves any size");
        settle(&arena, &held(&[&all], &[]));
    });
}

/// Two sizes want an extent that was passed on and is whole: one has it.
#[test]
fn models_two_sizes_want_a_whole_extent() {
    model(|| {
        let arena = one();
        let last = claim(&arena, A, 0, 1);
        assert!(arena.drain(E0, A, Some(B)));
        assert_eq!(arena.release(A, last[0]), Ok(()));
        let other = spawn(&arena, |arena| claim(arena, B, 1, 1));
        let mine = claim(&arena, A, 2, 2);
        let theirs = done(other);
        assert!(mine.is_empty() != theirs.is_empty(), "{mine:?} {theirs:?}");
        settle(&arena, &held(&[&mine], &theirs));
    });
}

/// A page that moves between two extents of a size, one of which drains.
#[test]
fn models_a_destination_beside_a_claim() {
    model(|| {
        let arena = Arc::new(arena(&[1, 2], 2, 2));
        let mut mine = claim(&arena, A, 0, 3);
        let moved = mine.pop().expect("three");
        let drained = arena.extent_of(A, moved);
        assert_eq!(arena.release(A, mine.pop().expect("two")), Ok(()));
        assert!(arena.drain(drained, A, Some(B)));
        let other = spawn(&arena, |arena| claim(arena, A, 1, 1));
        let mut to = Vec::new();
        arena.claim_serving(A, Lane(2), 1, &mut to);
        assert!(to.iter().all(|&f| arena.extent_of(A, f) != drained), "not where it comes from");
        if !to.is_empty() {
            assert_eq!(arena.release(A, moved), Ok(()));
        }
        let theirs = done(other);
        // What is left whole behind the page serves any size.
        assert!(!to.is_empty() || theirs.len() == 1, "{to:?} {theirs:?}");
        mine.extend(to.iter().chain(&theirs));
        if to.is_empty() {
            mine.push(moved);
        }
        settle_draining(&arena, &held(&[&mine], &[]));
    });
}

fn settle_draining(arena: &Arena, held: &[(SizeId, FrameId)]) {
    for extent in 0..arena.len() {
        arena.undrain(ExtentId(extent));
    }
    settle(arena, held);
}

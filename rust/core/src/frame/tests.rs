use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU8, Ordering},
};

use proptest::prelude::*;

use super::*;
use crate::word::{TIERS, Tier};

const A: SizeId = SizeId(0);
const B: SizeId = SizeId(1);
const L0: Lane = Lane(0);
const L1: Lane = Lane(1);

fn layout(sizes: &[u64], extent_bytes: u64, bytes: u64, reserved: u64) -> ArenaLayout {
    let extents = bytes.div_ceil(extent_bytes) as u32;
    ArenaLayout { bytes, rounded_off: 0, extent_bytes, extents, sizes: sizes.into(), reserved }
}

fn claim(arena: &Arena, size: SizeId, lane: Lane, want: usize) -> Vec<u32> {
    let mut out = Vec::new();
    assert_eq!(arena.claim(size, lane, want, &mut out), out.len());
    out.iter().map(|frame| frame.0).collect()
}

fn frames(numbers: &[u32]) -> Vec<FrameId> {
    numbers.iter().map(|&n| FrameId(n)).collect()
}

/// free + allocated = capacity, and every extent's count agrees with its bits.
fn check(arena: &Arena) {
    let allocated: u64 = (0..arena.sizes().len()).map(|s| arena.allocated_bytes(SizeId(s as u8))).sum();
    assert_eq!(arena.free_bytes() + allocated, arena.capacity_bytes());
    let mut usable = 0;
    for extent in 0..arena.len() {
        let state = arena.extent_state(ExtentId(extent));
        assert_eq!(state.used, state.total - state.free, "{extent}: {state:?}");
        usable += state.size.map_or(0, |s| u64::from(state.free) * arena.sizes()[s.as_usize()]);
        if state.size.is_none() {
            usable += arena.extents_bytes(extent);
        }
    }
    assert_eq!(usable + arena.unusable_bytes(), arena.free_bytes());
}

impl Arena {
    /// Bytes of an extent that are not reserved.
    fn extents_bytes(&self, extent: u32) -> u64 {
        let tiling = self.extents.tiling(A);
        if extent == 0 && self.sizes.len() > 1 {
            self.extent_bytes() - self.reserved
        } else {
            u64::from(tiling.frames_in(extent as usize)) * self.sizes[0]
        }
    }
    fn extent_bytes(&self) -> u64 {
        u64::from(self.extents.tiling(A).per_extent()) * self.sizes[0]
    }
}

#[test]
fn one_thread_gets_low_adjacent_frames_the_same_every_time() {
    let run = || {
        let arena = Arena::new(&layout(&[4], 4 * 512, 4 * 5000, 4));
        let first = claim(&arena, A, L0, 100);
        assert_eq!(first, (1..101).collect::<Vec<_>>());
        assert_eq!(claim(&arena, A, L0, 500), (101..601).collect::<Vec<_>>());
        arena.release_many(A, &frames(&first[10..20])).expect("allocated");
        let again = claim(&arena, A, L0, 1000);
        check(&arena);
        again
    };
    let again = run();
    assert_eq!(again.len(), 1000);
    assert_eq!(again, run());
    assert!(again.contains(&11), "frames that came back are used before fresh extents");
}

#[test]
fn reserved_bytes_belong_to_nobody() {
    // Lots of 12 bytes; 6 reserved: of the size 4 frames 0 and 1 touch them, of the size 6 frame 0.
    let arena = Arena::new(&layout(&[4, 6], 12, 48, 6));
    assert_eq!(arena.capacity_bytes(), 42);
    assert_eq!((arena.frames(A), arena.frames(B)), (10, 7));
    assert_eq!((arena.available(A), arena.available(B)), (10, 7));
    assert_eq!(claim(&arena, A, L0, 99), (2..12).collect::<Vec<_>>());
    assert_eq!((arena.unusable_bytes(), arena.free_bytes()), (2, 2));
    check(&arena);
    arena.release_many(A, &frames(&(2..12).collect::<Vec<_>>())).expect("allocated");
    assert_eq!(claim(&arena, B, L0, 99), (1..8).collect::<Vec<_>>());
    assert_eq!((arena.unusable_bytes(), arena.free_bytes()), (0, 0));
    check(&arena);
    for frame in [0, 8] {
        assert_eq!(arena.release(B, FrameId(frame)), Err(FrameError::NoSuchFrame { size: B, frame }));
    }
}

#[test]
fn what_fits_together() {
    let arena = Arena::new(&layout(&[2, 4], 8, 32, 0));
    assert!(arena.fits(&[16, 0]) && arena.fits(&[0, 8]) && arena.fits(&[8, 4]) && arena.fits(&[]));
    assert!(!arena.fits(&[9, 5]) && !arena.fits(&[17]));
    // One extent serves the small size now, with three frames left.
    let one = claim(&arena, A, L0, 1);
    assert!(arena.fits(&[3, 6]) && arena.fits(&[4, 4]) && arena.fits(&[15, 0]));
    assert!(!arena.fits(&[4, 5]) && !arena.fits(&[0, 7]) && !arena.fits(&[16, 0]));
    let extent = arena.extent_of(A, FrameId(one[0]));
    assert!(arena.drain(extent, A, None));
    assert!(arena.fits(&[4, 4]) && !arena.fits(&[5, 4]) && !arena.fits(&[13, 0]));
}

#[test]
fn an_extent_that_is_all_reserved_is_passed_by() {
    let arena = Arena::new(&layout(&[2, 4], 4, 16, 4));
    assert_eq!(claim(&arena, B, L0, 9), [1, 2, 3]);
    assert!(claim(&arena, A, L0, 9).is_empty());
    arena.release(B, FrameId(2)).expect("allocated");
    assert_eq!(claim(&arena, A, L0, 9), [4, 5]);
    check(&arena);
}

#[test]
fn the_last_extent_may_be_short() {
    let arena = Arena::new(&layout(&[4], 4 * 64, 4 * 100, 4));
    assert_eq!((arena.len(), arena.frames(A), arena.capacity_bytes()), (2, 99, 396));
    let all = claim(&arena, A, L1, 1000);
    assert_eq!(all.len(), 99);
    assert!(all.iter().all(|&f| (1..100).contains(&f)));
    assert!(claim(&arena, A, L0, 1).is_empty());
    check(&arena);
}

#[test]
fn nothing_and_next_to_nothing() {
    for bytes in [0, 4] {
        let arena = Arena::new(&layout(&[4], 4 * 64, bytes, bytes.min(4)));
        assert!(claim(&arena, A, L0, 3).is_empty());
        assert_eq!((arena.available(A), arena.capacity_bytes(), arena.free_bytes()), (0, 0, 0));
        assert!(arena.release(A, FrameId(0)).is_err());
    }
    let slots = Slots::new(0);
    assert_eq!(slots.claim(L0, 1, &mut Vec::new()), 0);
    let arena = Arena::new(&layout(&[4], 4, 8, 4));
    assert!(claim(&arena, A, L0, 0).is_empty());
    assert_eq!(claim(&arena, A, L0, usize::MAX), [1]);
}

#[test]
fn a_second_release_changes_nothing() {
    let arena = Arena::new(&layout(&[4, 8], 64, 640, 8));
    let held = claim(&arena, A, L0, 20);
    arena.release(A, FrameId(held[3])).expect("allocated");
    let before = arena.free_bytes();
    let again = FrameError::NotAllocated { size: A, frame: held[3] };
    assert_eq!(arena.release(A, FrameId(held[3])), Err(again));
    // The other size's frame over the same bytes was never given out.
    assert!(arena.release(B, FrameId(held[5] / 2)).is_err());
    assert!(arena.release(SizeId(2), FrameId(1)).is_err());
    assert_eq!((arena.free_bytes(), arena.faults()), (before, 3));
    // In a batch: what is right is released, the rest is told and counted.
    let mut batch = frames(&held);
    batch.push(FrameId(held[0]));
    batch.push(FrameId(u32::MAX));
    assert_eq!(arena.release_many(A, &batch), Err(again));
    assert_eq!(arena.faults(), 6);
    assert_eq!(arena.free_bytes(), arena.capacity_bytes());
    check(&arena);
}

#[test]
fn lanes_keep_apart_until_room_is_scarce() {
    let arena = Arena::new(&layout(&[4], 4 * 64, 4 * 64 * 64, 4));
    let mut seen = BTreeMap::new();
    for round in 0..3 {
        for lane in 0..16 {
            for frame in claim(&arena, A, Lane(lane), 60 + round) {
                // An extent may pass from one lane to another once it was exhausted, but isn't shared.
                seen.entry(frame / 64).or_insert(lane);
            }
        }
    }
    check(&arena);
    let mut kept = [0; 16];
    seen.values().for_each(|&lane| kept[usize::from(lane)] += 1);
    assert!(kept.iter().all(|&n| n >= 2), "{kept:?}");
    // And yet each lane finds the last frame of all.
    let left = arena.available(A) as usize;
    assert_eq!(claim(&arena, A, Lane(7), left - 1).len(), left - 1);
    assert_eq!(claim(&arena, A, Lane(9), 2).len(), 1);
    for frame in [1, 777, 4095] {
        arena.release(A, FrameId(frame)).expect("allocated");
        assert_eq!(claim(&arena, A, Lane((frame % 16) as u8), 5), [frame]);
    }
    check(&arena);
}

#[test]
fn case_33_scattered_room_is_room() {
    let arena = Arena::new(&layout(&[4], 4 * 512, 4 * 4097, 4));
    let all = claim(&arena, A, L0, 4096);
    let odd: Vec<_> = all.iter().copied().filter(|f| f % 2 == 1).collect();
    arena.release_many(A, &frames(&odd)).expect("allocated");
    let mut again = claim(&arena, A, L1, 2048);
    again.sort_unstable();
    assert_eq!(again, odd);
}

#[test]
fn case_34_an_empty_arena_serves_any_size() {
    let arena = Arena::new(&layout(&[2, 3, 4], 48, 48 * 40, 4));
    for round in 0..6u8 {
        let size = SizeId(round % 3);
        assert_eq!(arena.available(size), u64::from(arena.frames(size)));
        let mut all = Vec::new();
        while arena.claim(size, Lane(all.len() as u8), 37, &mut all) > 0 {}
        assert_eq!(all.len(), arena.frames(size) as usize);
        assert_eq!((0..3).map(|s| arena.available(SizeId(s))).sum::<u64>(), 0);
        check(&arena);
        if round % 2 == 0 {
            all.reverse();
        }
        arena.release_many(size, &all).expect("allocated");
        assert_eq!(arena.free_bytes(), arena.capacity_bytes());
        assert!((0..40).all(|e| arena.extent_state(ExtentId(e)).size.is_none()));
    }
}

#[test]
fn fuller_extents_first_and_the_arena_last() {
    let arena = Arena::new(&layout(&[1, 2], 64, 64 * 8, 2));
    let all = claim(&arena, A, L0, 62 + 64 * 4);
    assert_eq!(all.len(), 62 + 64 * 4);
    let in_extent = |e: u32, n: u32| frames(&(e * 64..e * 64 + n).collect::<Vec<_>>());
    arena.release_many(A, &in_extent(1, 60)).expect("allocated");
    arena.release_many(A, &in_extent(2, 3)).expect("allocated");
    arena.release_many(A, &in_extent(3, 30)).expect("allocated");
    let got = claim(&arena, A, L1, 3 + 30 + 60 + 1);
    assert!(got[..3].iter().all(|f| f / 64 == 2));
    assert!(got[3..33].iter().all(|f| f / 64 == 3));
    assert!(got[33..93].iter().all(|f| f / 64 == 1));
    assert!(got[93] / 64 > 4);
    assert_eq!(arena.extent_state(ExtentId(0)).size, Some(A));
    assert_eq!(arena.extent_state(ExtentId(7)).size, None);
    check(&arena);
}

#[test]
fn slots_of_any_number() {
    for capacity in [1, 2, 63, 64, 65, 1000, 14_337, 100_000] {
        let slots = Slots::new(capacity);
        assert_eq!((slots.capacity(), slots.available()), (capacity, capacity));
        let mut out = Vec::new();
        slots.claim(L0, 5, &mut out);
        assert_eq!(out[..], (0..capacity.min(5)).map(PageId).collect::<Vec<_>>());
        slots.claim(Lane(13), usize::MAX, &mut out);
        out.sort_unstable();
        assert_eq!(out, (0..capacity).map(PageId).collect::<Vec<_>>());
        assert_eq!((slots.available(), slots.claim(L0, 1, &mut out)), (0, 0));
        slots.release_many(&out).expect("claimed");
        assert_eq!(slots.allocated(), 0);
        assert_eq!(slots.release(PageId(0)), Err(FrameError::NotAllocated { size: A, frame: 0 }));
        assert!(slots.release(PageId(capacity)).is_err());
        assert_eq!(slots.faults(), 2);
    }
}

/// As many frames as the threads may hold at once: each claim must succeed, whatever the others are doing.
#[test]
fn nothing_is_answered_only_if_there_is_nothing() {
    const THREADS: u32 = 4;
    const HOLD: u32 = 9;
    let arena = Arena::new(&layout(&[4], 4 * 3, 4 * (THREADS * HOLD + 1) as u64, 4));
    let owner: Vec<AtomicU8> = (0..=THREADS * HOLD).map(|_| AtomicU8::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (arena, owner) = (&arena, &owner);
            scope.spawn(move || {
                let mut held = Vec::new();
                let mut random = u64::from(thread) + 1;
                for _ in 0..20_000 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let room = HOLD as usize - held.len();
                    let want = (random >> 60) as usize % (room + 1);
                    let before = held.len();
                    assert_eq!(arena.claim(A, Lane(thread as u8), want, &mut held), want);
                    for frame in &held[before..] {
                        assert_eq!(owner[frame.as_usize()].swap(1, Ordering::Relaxed), 0, "{frame} twice");
                    }
                    let give = (random >> 50) as usize % (held.len() + 1);
                    for frame in &held[..give] {
                        owner[frame.as_usize()].store(0, Ordering::Relaxed);
                    }
                    if random >> 40 & 1 == 0 {
                        arena.release_many(A, &held[..give]).expect("allocated");
                    } else {
                        held[..give].iter().for_each(|f| arena.release(A, *f).expect("allocated"));
                    }
                    held.drain(..give);
                }
                held.iter().for_each(|f| owner[f.as_usize()].store(0, Ordering::Relaxed));
                arena.release_many(A, &held).expect("allocated");
            });
        }
    });
    assert_eq!(arena.free_bytes(), arena.capacity_bytes());
    assert_eq!(arena.faults(), 0);
    check(&arena);
}

/// Threads take turns at sizes until all is used, and give back: extents go round and no byte is given out twice.
#[test]
fn extents_change_size_under_threads() {
    let sizes = [2u64, 3, 4];
    let arena = Arena::new(&layout(&sizes, 12, 12 * 20, 4));
    let owner: Vec<AtomicU8> = (0..12 * 20).map(|_| AtomicU8::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 0..3u8 {
            let (arena, owner) = (&arena, &owner);
            scope.spawn(move || {
                let mut random = u64::from(thread) + 1;
                for _ in 0..10_000 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let size = SizeId((random >> 60) as u8 % 3);
                    let bytes = sizes[size.as_usize()] as usize;
                    let mut held = Vec::new();
                    arena.claim(size, Lane(thread), (random >> 50) as usize % 30, &mut held);
                    let range = |f: &FrameId| f.as_usize() * bytes..(f.as_usize() + 1) * bytes;
                    for byte in held.iter().flat_map(range) {
                        assert_eq!(owner[byte].swap(1, Ordering::Relaxed), 0, "byte {byte} twice");
                    }
                    for byte in held.iter().flat_map(range) {
                        owner[byte].store(0, Ordering::Relaxed);
                    }
                    arena.release_many(size, &held).expect("allocated");
                }
            });
        }
    });
    assert_eq!(arena.free_bytes(), arena.capacity_bytes());
    assert!((0..20).all(|e| arena.extent_state(ExtentId(e)).size.is_none()));
    assert_eq!(claim(&arena, B, L0, 999).len(), arena.frames(B) as usize);
}

#[test]
fn limbo() {
    let arenas: [Arena; TIERS] = std::array::from_fn(|_| Arena::new(&layout(&[4], 4 * 64, 4 * 64, 4)));
    let quiescence = Quiescence::new(&arenas);
    let retire = |n| {
        for frame in claim(&arenas[1], A, L0, n) {
            quiescence.retire(Tier::Host, A, FrameId(frame));
        }
    };
    // Nobody shows anything.
    retire(2);
    assert_eq!((quiescence.len(), quiescence.limbo().len()), (2, 2));
    assert_eq!((quiescence.frames(Tier::Host, A), quiescence.frames(Tier::Device, A)), (2, 0));
    assert_eq!(quiescence.drain(&arenas), 2);
    let (busy, _) = quiescence.register().expect("room");
    let (idle, _) = quiescence.register().expect("room");
    let both = || (quiescence.drain(&arenas), quiescence.drain_quiet(&arenas));
    retire(1);
    assert_eq!(both(), (0, 1), "both batches are quiet: only who is in need disturbs them");
    // Whoever was disturbed looks at everything once.
    for stale in [true, false] {
        let entered = quiescence.enter(busy);
        assert_eq!(entered, Entered { epoch: 3, stale });
        quiescence.step(busy, entered.epoch);
        quiescence.quiesce(busy, entered.epoch);
    }
    // A step that began before holds it up, an idle batch doesn't.
    let entered = quiescence.enter(busy);
    retire(1);
    assert_eq!(both(), (0, 0));
    quiescence.step(busy, entered.epoch);
    assert_eq!(both(), (0, 0), "the step may have read the old place");
    // The next step, although the first was not committed.
    let entered = quiescence.enter(busy);
    assert_eq!(both(), (0, 0), "its arrays are not written yet");
    retire(1);
    quiescence.step(busy, entered.epoch);
    assert_eq!(both(), (0, 1), "the idle one has looked at nothing since");
    assert_eq!(quiescence.len(), 1);
    // Not yet looked at, with nothing outstanding.
    quiescence.quiesce(busy, entered.epoch);
    assert_eq!(both(), (0, 1));
    // A batch that goes away holds nothing.
    let entered = quiescence.enter(idle);
    assert!(entered.stale && quiescence.enter(busy).stale);
    quiescence.step(idle, entered.epoch);
    retire(3);
    quiescence.step(busy, quiescence.enter(busy).epoch);
    assert_eq!(both(), (0, 0));
    quiescence.leave(idle);
    assert_eq!(both(), (3, 0), "the other one has looked at everything since");
    assert!(quiescence.is_empty());
    assert_eq!(arenas[1].free_bytes(), arenas[1].capacity_bytes());
    assert_eq!((quiescence.frames(Tier::Host, A), arenas[1].faults()), (0, 0));
    assert_eq!(quiescence.register().map(|r| r.0), Ok(idle), "its place is given again");
    while quiescence.register().is_ok() {}
    assert_eq!(quiescence.register(), Err(FrameError::TooManyBatches { max: 1024 }));
}

/// A plain model: which bytes are taken, and by what.
#[derive(Clone, Debug)]
enum Op {
    Claim { size: u8, lane: u8, want: usize },
    Release { pick: usize, many: usize },
    Again { pick: usize },
    Drain { extent: usize, goal: Option<u8> },
    Undrain { extent: usize },
    UndrainAll { size: u8 },
    ClaimServing { size: u8, want: usize },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..3u8, 0..16u8, 0..40usize).prop_map(|(size, lane, want)| Op::Claim { size, lane, want }),
        4 => (any::<usize>(), 1..60usize).prop_map(|(pick, many)| Op::Release { pick, many }),
        1 => any::<usize>().prop_map(|pick| Op::Again { pick }),
        3 => (any::<usize>(), prop::option::of(0..3u8)).prop_map(|(extent, goal)| Op::Drain { extent, goal }),
        1 => any::<usize>().prop_map(|extent| Op::Undrain { extent }),
        1 => (0..3u8).prop_map(|size| Op::UndrainAll { size }),
        2 => (0..3u8, 0..20usize).prop_map(|(size, want)| Op::ClaimServing { size, want }),
    ]
}

/// Free frames in extents that serve a size and may be claimed from.
fn serving(arena: &Arena, size: SizeId) -> u64 {
    let extents = (0..arena.len()).map(|extent| arena.glance(ExtentId(extent)));
    extents
        .filter(|state| state.size == Some(size) && !state.draining)
        .map(|state| u64::from(state.free))
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn like_a_set(
        sizes in prop::sample::select(vec![vec![5], vec![2, 3], vec![1, 2, 4], vec![6, 2, 3], vec![1, 100]]),
        granules in 1..8u64,
        extents in 1..100u64,
        reserve in any::<bool>(),
        short in 0..8u64,
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let granule = if sizes.contains(&100) { 100 } else if sizes.len() == 1 { 5 } else { 12 };
        let extent = granule * granules;
        let total = extent * extents - if sizes.len() == 1 { 5 * (short % granules) } else { 0 };
        let reserved = if reserve { *sizes.iter().max().expect("some") } else { 0 };
        let arena = Arena::new(&layout(&sizes, extent, total, reserved));
        let mut bytes = vec![false; total as usize];
        let mut held: Vec<(SizeId, FrameId)> = Vec::new();
        // Extents that drain, and the size they go to with their last frame.
        let mut drains: BTreeMap<u32, Option<SizeId>> = BTreeMap::new();
        let mut faults = 0;
        for op in ops {
            match op {
                Op::Claim { .. } | Op::ClaimServing { .. } => {
                    let mut out = Vec::new();
                    let (size, got, can, want) = match op {
                        Op::ClaimServing { size, want } => {
                            let size = SizeId(size % sizes.len() as u8);
                            let can = serving(&arena, size);
                            (size, arena.claim_serving(size, L1, want, &mut out), can, want)
                        }
                        Op::Claim { size, lane, want } => {
                            let size = SizeId(size % sizes.len() as u8);
                            let can = arena.available(size);
                            (size, arena.claim(size, Lane(lane), want, &mut out), can, want)
                        }
                        _ => unreachable!(),
                    };
                    prop_assert_eq!(got, out.len());
                    prop_assert_eq!(got as u64, can.min(want as u64));
                    for frame in out {
                        prop_assert!(!drains.contains_key(&arena.extent_of(size, frame).0), "{} drains", frame);
                        let page = sizes[size.as_usize()];
                        let start = u64::from(frame.0) * page;
                        prop_assert!(start >= reserved && start + page <= total);
                        for byte in &mut bytes[start as usize..(start + page) as usize] {
                            prop_assert!(!std::mem::replace(byte, true));
                        }
                        prop_assert!(arena.is_allocated(size, frame));
                        held.push((size, frame));
                    }
                }
                Op::Release { pick, many } if !held.is_empty() => {
                    let from = pick % held.len();
                    let to = (from + many).min(held.len());
                    for size in 0..sizes.len() as u8 {
                        let of_size = held[from..to].iter().filter(|h| h.0 == SizeId(size)).map(|h| h.1);
                        let of_size: Vec<_> = of_size.collect();
                        match of_size[..] {
                            [one] => prop_assert_eq!(arena.release(SizeId(size), one), Ok(())),
                            _ => prop_assert_eq!(arena.release_many(SizeId(size), &of_size), Ok(())),
                        }
                    }
                    for (size, frame) in held.drain(from..to) {
                        let page = sizes[size.as_usize()] as usize;
                        bytes[frame.as_usize() * page..(frame.as_usize() + 1) * page].fill(false);
                    }
                    // What is empty has gone where it was to go.
                    drains.retain(|&at, &mut goal| {
                        let state = arena.glance(ExtentId(at));
                        let goal = goal.filter(|&goal| arena.frames_in(ExtentId(at), goal) > 0);
                        assert!(state.draining || (state.size, state.free) == (goal, state.total));
                        state.draining
                    });
                }
                Op::Drain { extent, goal } => {
                    let extent = ExtentId((extent % arena.len() as usize) as u32);
                    let before = arena.glance(extent);
                    let goal = goal.map(|goal| SizeId(goal % sizes.len() as u8));
                    let drained = before.size.is_some_and(|size| arena.drain(extent, size, goal));
                    prop_assert_eq!(drained, sizes.len() > 1 && before.size.is_some() && !before.draining);
                    if drained {
                        drains.insert(extent.0, goal.filter(|&goal| Some(goal) != before.size));
                    }
                }
                Op::Undrain { extent } => {
                    let extent = ExtentId((extent % arena.len() as usize) as u32);
                    prop_assert_eq!(arena.undrain(extent), drains.remove(&extent.0).is_some());
                }
                Op::UndrainAll { size } => {
                    let size = SizeId(size % sizes.len() as u8);
                    let before = drains.len();
                    let stopped = arena.undrain_all(size);
                    drains.retain(|&at, _| {
                        let state = arena.extent_state(ExtentId(at));
                        assert!(!state.draining || state.size != Some(size) || state.free == 0);
                        state.draining
                    });
                    prop_assert_eq!(stopped, before - drains.len());
                }
                Op::Again { pick } => {
                    let size = SizeId((pick % sizes.len()) as u8);
                    let frame = FrameId((pick / 7 % (total as usize + 9)) as u32);
                    if !held.contains(&(size, frame)) {
                        prop_assert!(arena.release(size, frame).is_err());
                        faults += 1;
                    }
                }
                Op::Release { .. } => {}
            }
            for (id, &page) in sizes.iter().enumerate() {
                let size = SizeId(id as u8);
                let mine = held.iter().filter(|h| h.0 == size).count() as u64;
                prop_assert_eq!(arena.allocated_bytes(size), mine * page);
                let mut wanted = vec![0; sizes.len()];
                for more in [0, 1] {
                    wanted[id] = arena.available(size) + more;
                    prop_assert_eq!(arena.fits(&wanted), more == 0);
                }
            }
            check(&arena);
            prop_assert_eq!(arena.faults(), faults);
            for extent in 0..arena.len() {
                prop_assert_eq!(arena.glance(ExtentId(extent)).draining, drains.contains_key(&extent));
            }
        }
        // Of extents that drain while nothing is in them any more, nobody else stops it.
        drains.keys().for_each(|&extent| _ = arena.undrain(ExtentId(extent)));
        for &(size, frame) in &held {
            prop_assert_eq!(arena.release(size, frame), Ok(()));
        }
        for (id, &page) in sizes.iter().enumerate() {
            let size = SizeId(id as u8);
            prop_assert_eq!(arena.available(size), total / page - reserved.div_ceil(page));
        }
    }
}

//! What a thread leaves that stops for ever in the middle of a call.

use super::*;

const A: SizeId = SizeId(0);
const B: SizeId = SizeId(1);

fn extents(count: u32, units: &[u64]) -> Extents {
    let tilings = units.iter().map(|&unit| Tiling::new(unit, 4, 0, 4 * u64::from(count)));
    Extents::new(count, tilings.collect())
}

fn claim(extents: &Extents, size: SizeId, lane: u8, want: usize) -> usize {
    extents.claim(size, Lane(lane), want, &mut |_| ())
}

/// An extent that is full and stands in no list.
fn full() -> Extents {
    let full = extents(1, &[1]);
    assert_eq!(claim(&full, A, 0, 5), 4);
    assert!(full.read(0).is_hidden());
    full
}

#[test]
fn a_release_after_the_bit() {
    let it = full();
    assert_eq!(it.clear(0, A, 2, 1 << 2), 1 << 2);
    assert_eq!(claim(&it, A, 1, 1), 0, "not counted, so not free");
    it.release(A, 1).expect("allocated");
    assert_eq!(claim(&it, A, 1, 2), 1);
    assert_eq!(it.release(A, 2).is_err(), it.used_bits(0) == 3);
}

#[test]
fn a_release_before_the_list() {
    let it = full();
    it.clear(0, A, 2, 1 << 2);
    it.word(0).plus(ExtentWord::release_step(1));
    it.release(A, 1).expect("allocated");
    assert!(!it.read(0).is_hidden(), "the next one does it for both");
    assert_eq!(claim(&it, A, 1, 9), 2);
}

#[test]
fn a_release_before_the_mark() {
    let it = full();
    it.clear(0, A, 2, 1 << 2);
    it.word(0).plus(ExtentWord::release_step(1));
    it.lists[0].insert(0);
    assert_eq!(claim(&it, A, 1, 9), 1);
    it.release(A, 2).expect("allocated");
    assert_eq!(claim(&it, A, 1, 9), 1);
}

#[test]
fn a_mark_that_comes_late_is_void() {
    let it = full();
    it.clear(0, A, 2, 1 << 2);
    it.word(0).plus(ExtentWord::release_step(1));
    let late = it.read(0);
    it.lists[0].insert(0);
    // It is about to mark the extent as listed, when the frame goes and with it the place in the list.
    assert_eq!((claim(&it, A, 1, 1), claim(&it, A, 1, 1)), (1, 0));
    // Another release has counted, and not come to the list yet.
    it.clear(0, A, 2, 1 << 2);
    it.word(0).plus(ExtentWord::release_step(1));
    assert!(it.word(0).cas(late.0, late.show().0).is_err());
    it.release(A, 0).expect("allocated");
    assert_eq!(claim(&it, A, 1, 9), 2);
}

#[test]
fn a_claim_with_its_right() {
    let it = extents(1, &[1, 2]);
    assert_eq!(claim(&it, A, 0, 1), 1);
    let (next, n) = it.read(0).claim(A, 1, None).expect("free frames");
    it.word(0).put(next.0);
    assert_eq!((n, claim(&it, A, 1, 9)), (1, 2));
    // Its frame is lost, and with it the extent to other sizes; nothing else is.
    (0..3).for_each(|frame| it.release(A, frame).expect("allocated"));
    assert_eq!((claim(&it, B, 0, 1), claim(&it, A, 2, 9)), (0, 3));
}

#[test]
fn a_claim_that_took_an_extent() {
    for visitor in [A, B] {
        let it = extents(1, &[1, 2]);
        let (next, _) = it.read(0).take(A, 4, 1, None).expect("in the arena");
        it.word(0).put(next.0);
        if visitor == B {
            assert_eq!(claim(&it, B, 3, 1), 0);
        }
        assert_eq!(claim(&it, A, 2, 9), 3);
    }
}

#[test]
fn an_extent_that_went_back_before_the_list() {
    let it = extents(1, &[1, 2]);
    assert_eq!(claim(&it, A, 0, 1), 1);
    assert_eq!(claim(&it, B, 1, 1), 0, "and it left the arena's list");
    it.clear(0, A, 0, 1);
    let next = it.read(0).release(A, 1, 4, true, 0).expect("allocated");
    it.word(0).put(next.0);
    // It still stands in A's list: whoever looks there brings it where it belongs.
    assert_eq!(claim(&it, A, 2, 1), 1);
    it.release(A, 0).expect("allocated");
    assert_eq!(claim(&it, B, 3, 9), 2);
}

#[test]
fn every_frame_has_its_extent() {
    for per_extent in [1u64, 2, 3, 5, 7, 64, 100, 448, 512, 65_537, 1 << 23] {
        let tiling = Tiling::new(1, per_extent, 0, u64::from(u32::MAX));
        let near = |n: u64| n.saturating_sub(2)..(n + 3).min(u64::from(u32::MAX));
        let frames = near(0).chain(near(per_extent)).chain(near(1 << 31)).chain(near(u64::from(u32::MAX)));
        for frame in frames.chain((0..999).map(|n| n * 4_200_013 % (1 << 32))) {
            assert_eq!(u64::from(tiling.extent_of(frame as u32)), frame / per_extent);
        }
    }
}

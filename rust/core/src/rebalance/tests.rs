//! One thread, one thing at a time: extents that change the size they serve.

use std::sync::Arc;

use super::*;
use crate::{
    face::Pages,
    plan::Progress,
    sequence::{Open, Sequence},
    spec::GroupKind,
    tests::build::{batch, empty, green, plain_tenant, pool, spec},
    word::{Generation, GroupId, TenantId},
};

const FULL: GroupId = GroupId(0);
const SMALL: GroupId = GroupId(1);

/// 128 extents of 8 pages of one size, or 16 of the other.
fn two_sizes() -> (Arc<Pool>, TenantId) {
    let pool = pool(spec(&[(GroupKind::Full, 2), (GroupKind::Window { tokens: 6 }, 1)]), 1030);
    assert_eq!((pool.layouts[0].extent_bytes, pool.arena(Tier::Device).len()), (8 * 512, 128));
    let tenant = plain_tenant(&pool, "acme");
    (pool, tenant)
}

fn class(pool: &Pool, group: GroupId) -> Option<ClassId> {
    Some(pool.groups[group.as_usize()].class)
}

fn size_of(pool: &Pool, group: GroupId) -> SizeId {
    pool.classes[pool.groups[group.as_usize()].class.as_usize()].size
}

/// Nobody writes to the page, and nobody outside knows where it lies: as those of sequences that wait for their next turn.
fn forget(pool: &Pool, PageRef { id, .. }: PageRef) {
    let at = pool.pages.location(id);
    pool.pages.set_location(id, Location::new(Tier::Device, at.class(), at.frame()));
}

/// Every extent serves the small size, and holds one page: `(kept, freed)` of a face whose frames nobody was told.
fn scattered(pool: &Arc<Pool>, tenant: TenantId) -> (Pages, Vec<PageRef>) {
    let face = Pages::new(pool);
    let arena = pool.arena(Tier::Device);
    let small = size_of(pool, SMALL);
    let all = arena.available(small) as usize;
    let pages = face.allocate(tenant, SMALL, all).expect("there is room");
    let mut seen = vec![false; arena.len() as usize];
    let (kept, freed): (Vec<_>, Vec<_>) = pages.into_iter().partition(|page| {
        let extent = arena.extent_of(small, pool.pages.location(page.id).frame());
        !std::mem::replace(&mut seen[extent.as_usize()], true)
    });
    face.release(&freed).expect("they are held");
    kept.iter().for_each(|page| forget(pool, *page));
    (face, kept)
}

#[test]
fn case_34_scattered_pages_make_room_for_another_size() {
    let (pool, tenant) = two_sizes();
    let (face, kept) = scattered(&pool, tenant);
    let capacity = pool.arena(Tier::Device).capacity_bytes();
    let full = size_of(&pool, FULL);
    let bytes = pool.spec().sizes()[full.as_usize()];
    assert_eq!(pool.arena(Tier::Device).available(full), 0, "every extent holds a small page");
    assert!(pool.fragmented(Tier::Device) > capacity / 2);
    let refused = face.allocate(tenant, FULL, 1).expect_err("there is no extent for it");
    assert!(refused.to_string().contains("another page size"), "{refused}");
    let used: u64 = kept.len() as u64 * pool.spec().sizes()[size_of(&pool, SMALL).as_usize()];
    let plan = pool.rebalance(class(&pool, FULL), capacity, usize::MAX, 1000, false).expect("open");
    green(&pool);
    assert!(plan.moves.iter().all(|m| m.from.class() == m.to.class() && m.from.frame() != m.to.frame()));
    assert_eq!(pool.commit_plan(&plan), Ok(Progress { moved: plan.moves.len(), dropped: 0, left: 0 }));
    green(&pool);
    // What is left to the small ones holds just them: all else can be had.
    let room = pool.arena(Tier::Device).available(full) * bytes;
    let extent = pool.layouts[0].extent_bytes;
    assert!(
        room + used.next_multiple_of(extent) + 2 * extent > capacity,
        "{room} of {capacity}, {used} used"
    );
    let n = (room / bytes) as usize;
    let pages = face.allocate(tenant, FULL, n).expect("at once");
    green(&pool);
    face.release(&pages).expect("they are held");
    face.release(&kept).expect("they are held");
    // (Whatever was given to one size: an empty pool serves any.)
    let all = pool.arena(Tier::Device).available(size_of(&pool, SMALL)) as usize;
    let pages = face.allocate(tenant, SMALL, all).expect("it is empty");
    assert_eq!(pool.arena(Tier::Device).free_bytes(), pool.arena(Tier::Device).unusable_bytes());
    face.release(&pages).expect("they are held");
    empty(&pool);
}

#[test]
fn nothing_is_moved_for_what_is_there() {
    let (pool, tenant) = two_sizes();
    let face = Pages::new(&pool);
    let page = face.allocate(tenant, SMALL, 1).expect("there is room");
    let plan = pool.rebalance(class(&pool, FULL), 2048, usize::MAX, 1000, false).expect("open");
    assert_eq!((plan.moves.len(), plan.shortfall, plan.emptied), (0, 0, 0));
    pool.commit_plan(&plan).expect("open");
    face.release(&page).expect("it is held");
    empty(&pool);
}

#[test]
fn a_dry_run_and_an_abort_change_nothing() {
    for dry_run in [true, false] {
        let (pool, tenant) = two_sizes();
        let (face, kept) = scattered(&pool, tenant);
        let before = (pool.audit(), pool.arena(Tier::Device).available(size_of(&pool, SMALL)));
        let plan = pool.rebalance(class(&pool, FULL), 4096, usize::MAX, 1000, dry_run).expect("open");
        assert!(!plan.moves.is_empty() && plan.emptied >= 4096 && plan.shortfall == 0);
        assert_eq!(plan.is_dry(), dry_run);
        if dry_run {
            assert!(pool.commit_plan(&plan).is_err() && pool.abort_plan(&plan).is_err());
        } else {
            assert_ne!(pool.audit().balance[0].in_flight, 0);
            pool.abort_plan(&plan).expect("open");
        }
        assert_eq!((pool.audit(), pool.arena(Tier::Device).available(size_of(&pool, SMALL))), before);
        face.release(&kept).expect("they are held");
        empty(&pool);
    }
}

/// At most so many moves at a time, and in pieces: what was committed counts.
#[test]
fn at_a_bounded_rate() {
    let (pool, tenant) = two_sizes();
    let (face, kept) = scattered(&pool, tenant);
    let full = size_of(&pool, FULL);
    let (mut before, mut plans) = (0, 0);
    loop {
        let plan = pool.rebalance(class(&pool, FULL), u64::MAX >> 1, 7, 1000, false).expect("open");
        if plan.moves.is_empty() {
            pool.abort_plan(&plan).expect("open");
            break;
        }
        assert!(plan.moves.len() <= 7);
        while pool.commit_some(&plan, 1).expect("open").left > 0 {}
        let now = pool.arena(Tier::Device).available(full);
        assert!(now > before, "each plan makes some room");
        (before, plans) = (now, plans + 1);
    }
    assert!(plans > 3);
    green(&pool);
    face.release(&kept).expect("they are held");
    empty(&pool);
}

/// Half of it is committed, then its time is over: the rest is as before, and nothing drains any more.
#[test]
fn an_expired_plan_drains_nothing() {
    let (pool, tenant) = two_sizes();
    let (face, kept) = scattered(&pool, tenant);
    let plan = pool.rebalance(class(&pool, FULL), 8192, usize::MAX, 1000, false).expect("open");
    let n = plan.moves.len();
    assert_eq!(pool.commit_some(&plan, n / 2).map(|done| done.moved), Ok(n / 2));
    pool.advance(1000).expect("a manual clock");
    let arena = pool.arena(Tier::Device);
    assert!(!(0..arena.len()).any(|e| arena.glance(ExtentId(e)).draining));
    assert!(pool.commit_plan(&plan).is_err());
    green(&pool);
    face.release(&kept).expect("they are held");
    empty(&pool);
}

/// Two plans at once, and a page that one of them has.
#[test]
fn pages_held_by_another_plan_stay() {
    let (pool, tenant) = two_sizes();
    let (face, kept) = scattered(&pool, tenant);
    let first = pool.rebalance(class(&pool, FULL), 4096, usize::MAX, 1000, false).expect("open");
    let second = pool.rebalance(class(&pool, FULL), 8192, usize::MAX, 1000, false).expect("open");
    let pages = |plan: &Plan| plan.moves.iter().map(|m| m.page.id).collect::<Vec<_>>();
    assert!(!pages(&first).iter().any(|id| pages(&second).contains(id)));
    green(&pool);
    pool.commit_plan(&second).expect("open");
    pool.abort_plan(&first).expect("open");
    green(&pool);
    face.release(&kept).expect("they are held");
    empty(&pool);
}

/// What an engine of its own knows by its frame is not moved, nor is its extent emptied.
#[test]
fn frames_that_were_told_stay() {
    let (pool, tenant) = two_sizes();
    let (face, kept) = scattered(&pool, tenant);
    let frames = face.frames(&kept).expect("they are held");
    let plan = pool.rebalance(class(&pool, FULL), 4096, usize::MAX, 1000, false).expect("open");
    assert_eq!((plan.moves.len(), plan.shortfall), (0, 4096));
    pool.commit_plan(&plan).expect("open");
    assert_eq!(face.frames(&kept).expect("they are held"), frames);
    face.release(&kept).expect("they are held");
    empty(&pool);
}

/// A stale reference is an error and changes nothing: the page that has the id now can be moved as before.
#[test]
fn a_stale_reference_keeps_no_page_where_it_is() {
    let (pool, t) = two_sizes();
    let (face, kept) = scattered(&pool, t);
    let stale = PageRef { generation: Generation(kept[0].generation.0.wrapping_sub(1)), ..kept[0] };
    assert!(face.frames(&[stale]).is_err());
    assert!(!pool.pages.location(stale.id).is_outside());
    face.release(&kept).expect("they are held");
    empty(&pool);
}

/// An engine asks for a frame while the page is being copied: it stays.
#[test]
fn a_frame_that_is_told_meanwhile_stays() {
    let (pool, tenant) = two_sizes();
    let (face, kept) = scattered(&pool, tenant);
    let plan = pool.rebalance(class(&pool, FULL), 4096, usize::MAX, 1000, false).expect("open");
    let told = plan.moves[0].page;
    let frame = face.frames(&[told]).expect("it is held");
    let done = pool.commit_plan(&plan).expect("open");
    assert_eq!((done.moved, done.dropped), (plan.moves.len() - 1, 1));
    assert_eq!(face.frames(&[told]).expect("it is held"), frame);
    green(&pool);
    face.release(&kept).expect("they are held");
    empty(&pool);
}

/// Before an allocation is refused for it, draining ends.
#[test]
fn an_allocation_comes_before_a_plan() {
    let (pool, tenant) = two_sizes();
    let (face, kept) = scattered(&pool, tenant);
    let small = size_of(&pool, SMALL);
    let free = pool.arena(Tier::Device).available(small) as usize;
    let plan = pool.rebalance(class(&pool, FULL), u64::MAX >> 1, usize::MAX, 1000, false).expect("open");
    assert!((pool.arena(Tier::Device).available(small) as usize) < free - plan.moves.len());
    let more =
        face.allocate(tenant, SMALL, free - plan.moves.len()).expect("what the plan does not need itself");
    pool.commit_plan(&plan).expect("open");
    green(&pool);
    let last = face.allocate(tenant, SMALL, plan.moves.len()).expect("what the pages have left");
    green(&pool);
    for pages in [kept, more, last] {
        face.release(&pages).expect("they are held");
    }
    empty(&pool);
}

fn run(b: &crate::batch::Batch, copied: &mut usize) {
    b.step(None, None, |s| {
        assert!(s.refused.is_empty(), "{:?}", s.refused);
        *copied += s.copies.len();
    })
    .expect("step");
    b.commit(Some(&vec![1; b.rows().expect("free")])).expect("commit");
}

/// Sequences decode while their pages move; what a step writes to goes along with the steps.
#[test]
fn sequences_go_on_while_their_extents_are_emptied() {
    let (pool, t) = two_sizes();
    let arena = pool.arena(Tier::Device);
    let (full, small) = (size_of(&pool, FULL), size_of(&pool, SMALL));
    let serving =
        |size| (0..arena.len()).filter(|&e| arena.glance(ExtentId(e)).size == Some(size)).count() as u64;
    let face = Pages::new(&pool);
    let mut others = [(FULL, 80), (SMALL, usize::MAX)].map(|(group, n)| {
        let n = n.min(arena.available(size_of(&pool, group)) as usize);
        face.allocate(t, group, n).expect("there is room")
    });
    let b = batch(&pool, 6, 200);
    let mut copied = 0;
    // Each gets three pages of the window, in an extent of its own.
    let mut seqs = Vec::new();
    for n in 0..6 {
        let extent = ExtentId(20 + n);
        let mut left = 3;
        let (mut mine, rest) = others[1].iter().partition::<Vec<_>, _>(|page| {
            let here = arena.extent_of(small, pool.pages.location(page.id).frame()) == extent && left > 0;
            left -= u32::from(here);
            here
        });
        mine.extend(others[0].drain(..3));
        face.release(&mine).expect("they are held");
        others[1] = rest;
        let open = Open { tokens: (100 * n..100 * n + 11).collect(), ..Open::default() };
        let seq: Arc<Sequence> = pool.open(t, open).expect("open");
        b.add(&seq).expect("row");
        run(&b, &mut copied);
        seqs.push(seq);
    }
    others.iter().for_each(|pages| face.release(pages).expect("they are held"));
    let before = serving(small);
    assert_eq!(before, 6);
    let wanted = arena.capacity_bytes();
    for _ in 0..6 {
        let plan = pool.rebalance(class(&pool, FULL), wanted, usize::MAX, 60_000, false).expect("open");
        // (A copy takes a while.)
        run(&b, &mut copied);
        pool.commit_plan(&plan).expect("open");
        for _ in 0..20 {
            run(&b, &mut copied);
            green(&pool);
        }
    }
    pool.quiescence.drain(&pool.arenas);
    green(&pool);
    assert!(copied > 0, "steps took along what they write to");
    let used = arena.allocated_bytes(small) / 256;
    assert!(serving(small) <= used.div_ceil(16) + 2, "{used} pages in {} extents", serving(small));
    assert!(serving(full) > 0);
    drop((b, seqs));
    empty(&pool);
}

/// A step waits for nobody: what it would take along stays where it is, as long as another thread has the frames that wait.
#[test]
fn a_step_passes_by_a_limbo_that_somebody_has() {
    let (pool, t) = two_sizes();
    let (arena, small) = (pool.arena(Tier::Device), size_of(&pool, SMALL));
    let b = batch(&pool, 1, 200);
    let seq = pool.open(t, Open { tokens: vec![1], ..Open::default() }).expect("open");
    b.add(&seq).expect("row");
    let mut copied = 0;
    run(&b, &mut copied);
    let [page] = seq.pages(SMALL).expect("free").1[..] else { panic!("one page") };
    // Another extent serves the size, so there is somewhere to go.
    let extent = arena.extent_of(small, page.1);
    let face = Pages::new(&pool);
    let others = face.allocate(t, SMALL, 2 * 16).expect("there is room");
    let beside = |p: &&PageRef| arena.extent_of(small, pool.pages.location(p.id).frame()) != extent;
    let (kept, mut freed): (Vec<PageRef>, Vec<PageRef>) = others.iter().partition(|p| beside(p));
    freed.extend(&kept[1..]);
    face.release(&freed).expect("they are held");
    assert!(arena.drain(extent, small, None));
    pool.quiescence.nudge();
    let limbo = pool.quiescence.try_limbo().expect("nobody has it");
    run(&b, &mut copied);
    assert_eq!((copied, seq.pages(SMALL).expect("free").1[0]), (0, page));
    drop(limbo);
    pool.quiescence.nudge();
    run(&b, &mut copied);
    assert_eq!(copied, 1);
    assert_ne!(seq.pages(SMALL).expect("free").1[0].1, page.1);
    green(&pool);
    drop((b, seq));
    face.release(&kept[..1]).expect("it is held");
    empty(&pool);
}

/// What came into an extent since it was chosen counts: no more is moved than was asked for.
#[test]
fn an_extent_that_has_filled_up_meanwhile_is_let_be() {
    let (pool, t) = two_sizes();
    let (face, kept) = scattered(&pool, t);
    let (arena, full, small) = (pool.arena(Tier::Device), size_of(&pool, FULL), size_of(&pool, SMALL));
    let chosen = vec![(ExtentId(3), small), (ExtentId(4), small), (ExtentId(5), small)];
    let mut emptying = pool.lease_all(chosen, Some(full), 2);
    assert_eq!(emptying.iter().map(|one| one.extent).collect::<Vec<_>>(), [ExtentId(3), ExtentId(4)]);
    assert!(!arena.glance(ExtentId(5)).draining);
    emptying.iter_mut().for_each(|one| pool.let_be(one));
    green(&pool);
    face.release(&kept).expect("they are held");
    empty(&pool);
}

/// More bytes than there are numbers for: as many as there are, and what is missing.
#[test]
fn any_number_of_bytes_can_be_asked_for() {
    let (pool, t) = two_sizes();
    let (face, kept) = scattered(&pool, t);
    let plan = pool.rebalance(class(&pool, FULL), u64::MAX, usize::MAX, 1000, false).expect("open");
    assert!(plan.shortfall > 0 && !plan.moves.is_empty());
    pool.abort_plan(&plan).expect("it is open");
    face.release(&kept).expect("they are held");
    empty(&pool);
}

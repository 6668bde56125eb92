//! One thread, one thing at a time: how a plan ends, and what travels.

use std::sync::{Arc, Mutex};

use super::*;
use crate::{
    face::Pages,
    spec::GroupKind,
    tests::build::{empty, green, plain_tenant, pool, spec},
    word::{FrameId, GroupId, PageId, page::PageWord},
};

const LANE: Lane = Lane(0);

/// Leases a page and claims a frame for it, as the builders do.
fn a_move(pool: &Pool, page: PageRef) -> Move {
    pool.pages.transit(page.id, |w| w.lease(page.generation)).expect("it lives and nobody leases it");
    let from = pool.pages.location(page.id);
    let size = pool.classes[from.class().as_usize()].size;
    let mut frame = Vec::new();
    assert_eq!(pool.arena(Tier::Device).claim(size, LANE, 1, &mut frame), 1);
    let to = Location::new(Tier::Device, from.class(), frame[0]);
    Move { page, from, to, payer: pool.pages.payer(page.id) }
}

/// How it ended, for who asks later.
#[derive(Clone, Debug, Default)]
struct Told(Arc<Mutex<Vec<State>>>);

impl Ending for Told {
    fn settle(&mut self, _: &Pool, state: State) {
        self.0.lock().expect("nobody panics").push(state);
    }
}

struct World {
    pool: Arc<Pool>,
    face: Pages,
    pages: Vec<PageRef>,
    told: Told,
}

impl World {
    fn new(pages: usize) -> Self {
        let pool = pool(spec(&[(GroupKind::Full, 1)]), 20);
        let tenant = plain_tenant(&pool, "acme");
        let face = Pages::new(&pool);
        let pages = face.allocate(tenant, GroupId(0), pages).expect("there is room");
        Self { pool, face, pages, told: Told::default() }
    }

    fn build(&self, ttl: u64) -> Plan {
        let mut draft = Draft::new(Kind::Rebalance, TenantId(0), 0);
        draft.plan.moves = self.pages.iter().map(|&page| a_move(&self.pool, page)).collect();
        draft.endings.push(Box::new(self.told.clone()));
        self.pool.open_draft(LANE, draft, ttl, false)
    }

    fn frames(&self) -> Vec<FrameId> {
        self.pages.iter().map(|p| self.pool.pages.location(p.id).frame()).collect()
    }

    fn end(self, expected: &[State]) {
        assert_eq!(*self.told.0.lock().expect("nobody panics"), expected);
        green(&self.pool);
        self.face.release(&self.pages).expect("they are held");
        empty(&self.pool);
        assert!(self.pool.pages.read(PageId(0)).is_free());
        let leased = |id: u32| PageWord::is_leased(self.pool.pages.read(PageId(id)));
        assert!(!(0..self.pool.max_pages()).any(leased));
    }
}

#[test]
fn a_commit_moves_every_page_once() {
    let world = World::new(3);
    let before = world.frames();
    let plan = world.build(1000);
    green(&world.pool);
    assert_eq!(world.pool.audit().balance[0].in_flight, 3 * world.pool.spec().sizes()[0]);
    assert_eq!(world.frames(), before, "nothing moves before the commit");
    let done = world.pool.commit_plan(&plan).expect("open");
    assert_eq!(done, Progress { moved: 3, dropped: 0, left: 0 });
    let after: Vec<_> = plan.moves.iter().map(|m| m.to.frame()).collect();
    assert_eq!(world.frames(), after);
    for late in [world.pool.commit_plan(&plan).map(drop), world.pool.abort_plan(&plan)] {
        assert_eq!(late, Err(Error::Plan(Fault::Ended(plan.id, State::Committed))));
    }
    assert_eq!(world.pool.stats().get(Counter::LateReports), 2);
    assert_eq!(world.frames(), after);
    world.end(&[State::Committed]);
}

#[test]
fn an_abort_leaves_everything_as_it_was() {
    let world = World::new(3);
    let before = world.frames();
    let plan = world.build(1000);
    world.pool.abort_plan(&plan).expect("open");
    assert_eq!(world.frames(), before);
    assert_eq!(world.pool.commit_plan(&plan), Err(Error::Plan(Fault::Ended(plan.id, State::Aborted))));
    world.end(&[State::Aborted]);
}

#[test]
fn a_plan_in_pieces_ends_with_the_last_one() {
    let world = World::new(4);
    let before = world.frames();
    let plan = world.build(1000);
    assert_eq!(world.pool.commit_some(&plan, 0), Ok(Progress { moved: 0, dropped: 0, left: 4 }));
    assert_eq!(world.pool.commit_some(&plan, 3), Ok(Progress { moved: 3, dropped: 0, left: 1 }));
    assert!(world.told.0.lock().expect("nobody panics").is_empty());
    green(&world.pool);
    // Given up in the middle: what was committed stays.
    world.pool.abort_plan(&plan).expect("open");
    let after = world.frames();
    assert_eq!(after[3], before[3]);
    assert!((0..3).all(|n| after[n] == plan.moves[n].to.frame()));
    world.end(&[State::Aborted]);
}

#[test]
fn a_plan_that_nobody_ends_expires_once() {
    let world = World::new(2);
    let before = world.frames();
    let plan = world.build(1000);
    world.pool.advance(500).expect("a manual clock");
    assert_eq!(world.pool.renew_plan(&plan, 1000), Ok(1500));
    world.pool.advance(600).expect("a manual clock");
    assert_eq!(world.pool.plan_state(&plan), Ok(State::Open));
    world.pool.advance(400).expect("a manual clock");
    assert_eq!(world.pool.plan_state(&plan), Ok(State::Expired));
    assert_eq!(world.frames(), before);
    assert_eq!(world.pool.commit_plan(&plan), Err(Error::Plan(Fault::Ended(plan.id, State::Expired))));
    assert_eq!(world.pool.expire_plans(), 0);
    world.end(&[State::Expired]);
}

/// The clock decides, even when nobody looked at it before the report.
#[test]
fn a_report_after_the_deadline_is_late() {
    let world = World::new(1);
    let plan = world.build(0);
    assert_eq!(world.pool.commit_plan(&plan), Err(Error::Plan(Fault::Ended(plan.id, State::Expired))));
    world.end(&[State::Expired]);
}

/// A full pool whose plans were abandoned gets their frames back by itself.
#[test]
fn an_allocation_ends_what_is_over() {
    let world = World::new(10);
    let plan = world.build(0);
    let tenant = plan.moves[0].payer;
    let pages = world.face.allocate(tenant, GroupId(0), 10).expect("the destinations are back");
    world.face.release(&pages).expect("they are held");
    world.end(&[State::Expired]);
}

#[test]
fn a_page_that_everybody_let_go_ends_with_its_lease() {
    for commit in [true, false] {
        let mut world = World::new(2);
        let plan = world.build(1000);
        world.face.release(&std::mem::take(&mut world.pages)).expect("they are held");
        green(&world.pool);
        if commit {
            world.pool.commit_plan(&plan).expect("open");
        } else {
            world.pool.abort_plan(&plan).expect("open");
        }
        world.end(&[if commit { State::Committed } else { State::Aborted }]);
    }
}

#[test]
fn a_plan_of_another_pool_is_none() {
    let (world, other) = (World::new(1), World::new(1));
    let plan = world.build(1000);
    other.build(1000);
    assert_eq!(other.pool.commit_plan(&plan), Err(Error::WrongPool("the plan")));
    assert_eq!(other.pool.abort_plan(&plan), Err(Error::WrongPool("the plan")));
    let unknown = Plan { id: PlanId(7), ..plan.clone() };
    assert_eq!(world.pool.commit_plan(&unknown), Err(Error::Plan(Fault::Unknown(PlanId(7)))));
    let dry = Plan { id: PlanId(0), ..plan.clone() };
    assert_eq!(world.pool.commit_plan(&dry), Err(Error::Plan(Fault::Dry)));
    world.pool.commit_plan(&plan).expect("open");
    world.end(&[State::Committed]);
}

#[test]
fn an_empty_plan_ends_once() {
    let world = World::new(0);
    let plan = world.build(1000);
    assert_eq!(world.pool.commit_some(&plan, 0), Ok(Progress { moved: 0, dropped: 0, left: 0 }));
    assert!(world.pool.abort_plan(&plan).is_err());
    world.end(&[State::Committed]);
}

/// Of a spec: no two bytes of it are equal.
const DIGEST: SpecDigest = *b"0123456789abcdef";

fn traveller() -> Plan {
    let at = |frame| Location::new(Tier::Device, crate::word::ClassId(1), FrameId(frame));
    let page = PageRef::from_bits(7 << 32 | 5);
    let m = Move { page, from: at(3), to: at(u32::MAX), payer: TenantId(9) };
    let row = Some(TakenRow { row: 0, moved: Some(9) });
    let victim =
        Victim { sequence: 3, tenant: TenantId(1), fate: Fate::Swapped, bytes: 1 << 40, tokens: 12, row };
    let other = Victim { row: Some(TakenRow { row: 4, moved: None }), ..victim };
    let rungs = Rungs { free: 1, offload: 2, compress: 3, evict: 4 };
    Plan {
        id: PlanId(4),
        pool: u64::MAX,
        deadline_ms: 17,
        rungs,
        copy_ns: Some(5),
        moves: vec![m; 3],
        victims: vec![victim, other, Victim { row: None, ..victim }],
        host_full: vec![TenantId(0), TenantId(7)],
        ..Plan::new(Kind::Suspend, TenantId(2), 99)
    }
}

#[test]
fn a_plan_travels() {
    let plan = traveller();
    assert_eq!(plan.rungs.sum(), 10);
    assert_eq!(Plan::from_bytes(&plan.to_bytes(DIGEST)), Ok((plan, DIGEST)));
    let bare = Plan::new(Kind::Compress, TenantId(0), 0);
    assert_eq!(Plan::from_bytes(&bare.to_bytes(DIGEST)), Ok((bare, DIGEST)));
}

#[test]
fn what_was_altered_on_the_way_is_no_plan() {
    let bytes = traveller().to_bytes(DIGEST);
    for at in 0..bytes.len() {
        for bit in [0, 7] {
            let mut altered = bytes.clone();
            altered[at] ^= 1 << bit;
            assert!(matches!(Plan::from_bytes(&altered), Err(Fault::Altered(_))), "byte {at}");
        }
        assert!(matches!(Plan::from_bytes(&bytes[..at]), Err(Fault::Altered(_))), "{at} bytes");
    }
    let longer = [&bytes[..], &[0; 8]].concat();
    assert!(matches!(Plan::from_bytes(&longer), Err(Fault::Altered(_))));
}

/// It has to ask for a lock.
#[derive(Debug)]
struct Waiting;

impl Ending for Waiting {
    fn settle(&mut self, _: &Pool, _: State) {}

    fn waits(&self) -> bool {
        true
    }
}

/// Whoever allocates ends the plans whose time is over, but for those whose end takes a lock.
#[test]
fn nobody_who_allocates_ends_a_plan_that_waits() {
    let world = World::new(1);
    let pool = &world.pool;
    let mut draft = Draft::new(Kind::TopUp, TenantId(0), 0);
    draft.endings.push(Box::new(Waiting));
    let waiting = pool.open_draft(LANE, draft, 0, false);
    let plan = world.build(0);
    assert_eq!(pool.expire(), 1);
    let open = |plan: &Plan| pool.plans.get(plan.id).is_some();
    assert_eq!((open(&plan), open(&waiting)), (false, true));
    assert_eq!((pool.expire(), pool.expire_plans()), (0, 1));
    assert_eq!(pool.plan_state(&waiting), Ok(State::Expired));
    world.end(&[State::Expired]);
}

/// A thread that has found what is over, and stops then, leaves it to the next one.
#[test]
fn whoever_stops_with_what_is_due_keeps_nothing() {
    let world = World::new(10);
    let pool = &world.pool;
    let plan = world.build(10);
    pool.advance(9).expect("a manual clock");
    assert_eq!(pool.renew_plan(&plan, 10), Ok(19));
    let (due, _) = pool.plans.due(19, false);
    assert_eq!(due.len(), 1);
    drop(due);
    // It gets no more time.
    assert!(!pool.plans.renew(plan.id, 100));
    pool.advance(10).expect("a manual clock");
    let pages = world.face.allocate(plan.moves[0].payer, GroupId(0), 10).expect("the destinations are back");
    world.face.release(&pages).expect("they are held");
    assert_eq!(pool.plan_state(&plan), Ok(State::Expired));
    world.end(&[State::Expired]);
}

/// Nothing is begun in a closed pool; what was begun is ended either way.
#[test]
fn a_plan_can_be_ended_after_the_pool_is_closed() {
    for commit in [true, false] {
        let world = World::new(2);
        let pool = Arc::clone(&world.pool);
        let before = world.frames();
        let plan = world.build(1000);
        pool.close();
        assert_eq!(pool.rebalance(None, 1, 1, 1000, false), Err(Error::Closed("the pool")));
        if commit {
            assert_eq!(pool.commit_plan(&plan).map(|done| done.moved), Ok(2));
        } else {
            pool.abort_plan(&plan).expect("it is open");
        }
        assert_eq!(world.frames() != before, commit);
        world.told.0.lock().expect("nobody panics").clear();
        world.face.release(&world.pages).expect("they are held");
        green(&pool);
    }
}

//! Where the pages of a batch's rows lie, when pages move.
//!
//! A page that a plan moves is a settled one: its content does not change any more, so its old frame, which stays out of use
//! until the batch has looked (frame/quiesce.rs), is as good as the new one. So a step looks at so many places and no more,
//! and goes on in the next: a round over all rows. Only a batch whose frames were given away while it was quiet looks at all
//! of them at once.
//!
//! A page into which the steps of this batch write (`OPEN`) is moved by nobody but the batch. Where its extent is to be emptied,
//! the round takes it along: the step's copies bring its content to the new frame, before the step's kernels write there, and
//! behind those of the steps before.

use super::rows::{Inner, Row};
use crate::{
    arrays::Shape,
    batch::Copy,
    frame::{BatchSlot, Entered, FrameError},
    pool::{Pool, Scratch},
    stats::Counter,
    word::{
        GroupId, Tier,
        page::{Location, PageWord},
    },
};

/// Places that a step looks at.
const PLACES: usize = if cfg!(test) { 7 } else { 256 };
/// Pages that a step moves by its own copies.
const COPIES: usize = if cfg!(test) { 2 } else { 8 };

/// How far the places have been looked at.
#[derive(Debug)]
pub(super) struct Look {
    /// `None`: it was cleared, and shows nothing until it is used again.
    member: Option<BatchSlot>,
    /// Everything in the arrays was read when at least so many frames had been retired.
    fresh: u64,
    /// That, once the round in progress has come through.
    epoch: u64,
    /// Rows of the round in progress that were not looked at, from the first on. Backwards, for the last row is the one
    /// that moves into holes.
    left: usize,
    /// Of the last of them: the group, and the page in it, at which the next step goes on.
    group: usize,
    page: usize,
}

impl Look {
    /// At a new batch, which has no rows.
    pub(super) fn new(pool: &Pool) -> Result<Self, FrameError> {
        let (member, fresh) = pool.quiescence.register()?;
        Ok(Self { member: Some(member), fresh, epoch: fresh, left: 0, group: 0, page: 0 })
    }

    /// A cleared batch is used again: before it reads any location.
    pub(super) fn join(&mut self, pool: &Pool) -> Result<BatchSlot, FrameError> {
        match self.member {
            Some(member) => Ok(member),
            None => {
                *self = Self::new(pool)?;
                self.join(pool)
            }
        }
    }

    /// A step begins: before it reads any location.
    #[inline]
    pub(super) fn enter(&mut self, pool: &Pool) -> Result<Entered, FrameError> {
        Ok(pool.quiescence.enter(self.join(pool)?))
    }

    /// The arrays are as they say, and something is outstanding.
    #[inline]
    pub(super) fn show(&self, pool: &Pool) {
        if let Some(member) = self.member {
            pool.quiescence.step(member, self.fresh);
        }
    }

    /// Nothing is outstanding.
    pub(super) fn rest(&self, pool: &Pool) {
        if let Some(member) = self.member {
            pool.quiescence.quiesce(member, self.fresh);
        }
    }

    /// The batch is gone, or has neither rows nor steps.
    pub(super) fn leave(&mut self, pool: &Pool) {
        if let Some(member) = self.member.take() {
            pool.quiescence.leave(member);
        }
    }

    /// The batch has so many rows now.
    pub(super) fn clip(&mut self, rows: usize) {
        if self.left > rows {
            (self.left, self.group, self.page) = (rows, 0, 0);
        }
    }
}

impl Inner {
    /// Look at places, if frames were retired since the last round began.
    #[inline]
    pub(super) fn look_at_places(&mut self, pool: &Pool, shape: Shape, entered: Entered) {
        if entered.epoch != self.look.fresh || entered.stale {
            self.go_round(pool, shape, entered);
        }
    }

    #[cold]
    #[inline(never)]
    fn go_round(&mut self, pool: &Pool, shape: Shape, Entered { epoch, stale }: Entered) {
        if stale || self.look.left == 0 {
            let left = self.rows.len();
            self.look = Look { epoch, left, group: 0, page: 0, ..self.look };
        }
        let mut places = if stale { usize::MAX } else { PLACES };
        while self.look.left > 0 && places > 0 {
            let (row, group) = (self.look.left - 1, self.look.group);
            if group == self.hot.base.len() {
                self.find_bases(pool, row);
                (self.look.left, self.look.group) = (row, 0);
                continue;
            }
            let table = &self.rows[row].body.tables[group];
            let from = self.look.page.max(table.start as usize);
            let end = table.pages.len().min(from.saturating_add(places));
            let copies = self.step.copies.len();
            let stopped = self.look_at_row(pool, shape, row, GroupId(group as u8), from..end, stale);
            places = places.saturating_sub(stopped - from.min(stopped) + 1);
            debug_assert!(self.step.copies.len() <= copies + (stopped - from.min(stopped)));
            (self.look.group, self.look.page) = match stopped < self.rows[row].body.tables[group].pages.len()
            {
                true => (group, stopped),
                false => (group + 1, 0),
            };
            if stopped < end {
                break;
            }
        }
        if self.look.left == 0 {
            self.look.fresh = self.look.epoch;
            // Now, and not at the step's end: what only these places kept can serve this step.
            self.look.show(pool);
        }
    }

    /// There is no room, and this batch may be what keeps frames from coming back: look at all places. `false`: it is not.
    pub(super) fn catch_up(&mut self, pool: &Pool, shape: Shape) -> bool {
        let epoch = pool.quiescence.epoch();
        let behind = !pool.quiescence.is_empty() && epoch != self.look.fresh;
        if behind {
            self.go_round(pool, shape, Entered { epoch, stale: true });
        }
        behind
    }

    /// Where pages of a row lie now; the first one that was not looked at. `all`: look at every one.
    fn look_at_row(
        &mut self,
        pool: &Pool,
        shape: Shape,
        row: usize,
        group: GroupId,
        pages: std::ops::Range<usize>,
        all: bool,
    ) -> usize {
        let mut dropped = false;
        for at in pages.clone() {
            let page = self.rows[row].body.tables[group.as_usize()].pages[at];
            let mut location = pool.pages.location(page.id);
            if location.is_gone() && page != pool.pages.gone() && !dropped {
                // Not the step's own scratch: it may have claimed what it needs.
                self.rows[row].body.drop_gone(pool, &mut Scratch::default());
                dropped = true;
            }
            if location.is_open() && pool.is_draining(location) {
                if self.step.copies.len() >= COPIES && !all {
                    return at;
                }
                location = self.take_along(pool, row, group, at, location).unwrap_or(location);
            }
            let shown = &mut self.arrays.group(group.as_usize()).block_table;
            shown[row * shape.pages + at] = pool.entry_at(location);
        }
        pages.end.max(pages.start)
    }

    /// Move a page that this row alone writes to out of an extent that is to be emptied. `None`: not now.
    fn take_along(
        &mut self,
        pool: &Pool,
        row: usize,
        group: GroupId,
        at: usize,
        from: Location,
    ) -> Option<Location> {
        let page = self.rows[row].body.tables[group.as_usize()].pages[at];
        let mine = |w: PageWord| w.refs() == 1 && !w.is_indexed();
        if from.is_outside() || !mine(pool.pages.read(page.id)) {
            return None;
        }
        // A step waits for nobody.
        let mut limbo = pool.quiescence.try_limbo()?;
        let size = pool.classes[from.class().as_usize()].size;
        let arena = pool.arena(Tier::Device);
        self.scratch.frames.clear();
        if arena.claim_serving(size, self.lane, 1, &mut self.scratch.frames) == 0 {
            return None;
        }
        let to = Location::new(Tier::Device, from.class(), self.scratch.frames[0]).open();
        // Whoever holds the lease moves a page; and nobody takes one on what is being written.
        let lease = |w: PageWord| if mine(w) { w.lease(page.generation) } else { None };
        let leased = pool.pages.transit(page.id, lease).is_ok();
        let moved = leased && pool.pages.swap_location(page.id, from, to).is_ok();
        if leased {
            pool.unlease(self.lane, page);
        }
        if !moved {
            let _ = arena.release(size, to.frame());
            return None;
        }
        limbo.retire(Tier::Device, size, from.frame());
        pool.stats.count(self.lane, Counter::PagesMoved, 1);
        self.step.copies.push(Copy { group, from: from.frame(), to: to.frame() });
        self.find_bases(pool, row);
        Some(to)
    }

    /// Where the last page of each group lies, from which slots are counted.
    pub(super) fn find_bases(&mut self, pool: &Pool, row: usize) {
        let page_tokens = i64::from(pool.spec.page_tokens());
        let Row { body, .. } = &self.rows[row];
        for (g, (table, base)) in body.tables.iter().zip(&mut self.hot.base).enumerate() {
            if let (false, Some(last)) = (pool.is_state(GroupId(g as u8)), table.live().last()) {
                let frame = i64::from(pool.pages.location(last.id).frame().0);
                base[row] = (frame - (table.pages.len() as i64 - 1)) * page_tokens;
            }
        }
    }
}

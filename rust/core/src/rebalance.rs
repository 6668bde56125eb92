//! Rebalance: extents that serve one page size are emptied, so that others can have them.
//!
//! Free bytes are of no use to pages of a size whose extents are full, as long as they lie in extents that serve another
//! size. A plan chooses the extents with the least in them, and moves what lives there into free frames of other extents
//! of the same size: nobody's charges change, no extent leaves the arena for it, and whoever holds the pages notices nothing.
//!
//! # Order
//!
//! 1. Choose by the extents' words: as many extents as are missing, the emptiest first, as far as there are frames elsewhere
//!    for what lives in them.
//! 2. Drain them: from now on nothing is claimed there, so what lives there can only become less.
//! 3. Look for the pages, in the page table (there is no map from frames to pages: hot paths would have to keep it), and
//!    lease each. What is in use and no page's (a claim that is under way, what another plan holds, pages that an engine of
//!    its own knows by their frames) can't be moved: such an extent is let be, and another one chosen.
//! 4. Claim destinations, only in extents that serve the size and don't drain.
//!
//! Once its moves are committed, an extent is empty as soon as no batch shows the frames any more, and goes to the size that
//! needs it with its last frame. Pages that steps of a batch write to are not part of a plan: the batches take them
//! along by themselves (batch/places.rs), so an extent may drain on behind the plan's end, up to its deadline.
//!
//! Draining never takes anything from anybody: before an allocation is refused for it, it ends.
//!
//! Callers: reclaim.rs, the binding.

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use crate::{
    error::Error,
    ledger::ROOT,
    plan::{Draft, Ending, Kind, Move, Plan},
    pool::Pool,
    word::{
        ClassId, ExtentId, FrameId, Lane, PageId, PageRef, SizeId, TenantId, Tier,
        page::{Location, PageWord},
        plan::{MAX_MOVES, State},
    },
};

/// How often other extents are chosen for those that had to be let be.
const ROUNDS: usize = 4;

/// An extent that is to be emptied.
#[derive(Debug)]
struct Emptying {
    extent: ExtentId,
    size: SizeId,
    /// Pages leased in it.
    leased: Vec<(Location, Move)>,
    /// Frames whose pages leave by themselves.
    others: u32,
    /// Something in it can't be moved now.
    blocked: bool,
}

/// What became of an attempt to lease the page of a frame.
#[derive(Debug)]
pub(crate) enum Lease {
    Got(Move),
    /// It goes without a plan: a batch takes it along, or it is on its way out.
    Goes,
    /// It stays.
    Stays,
}

/// Extents that drain on behalf of a plan.
#[derive(Debug)]
struct Drains {
    tier: Tier,
    extents: Vec<ExtentId>,
    ttl_ms: u64,
}

impl Ending for Drains {
    fn settle(&mut self, pool: &Pool, state: State) {
        if state == State::Committed {
            let deadline = pool.now_ms().saturating_add(self.ttl_ms);
            pool.plans.linger(deadline, self.tier, &self.extents);
            pool.quiescence.drain(&pool.arenas);
        } else {
            self.extents.iter().for_each(|&extent| {
                let _ = pool.arena(self.tier).undrain(extent);
            });
        }
    }
}

impl Pool {
    /// A plan by which `bytes` of the device can be given out at once to pages of a class, or (`None`) of any class: of at most
    /// `max_moves` moves. What that is short of is in its `shortfall`. With `dry_run` nothing is changed.
    ///
    /// # Errors
    /// The pool is closed; no such class.
    pub fn rebalance(
        &self,
        goal: Option<ClassId>,
        bytes: u64,
        max_moves: usize,
        ttl_ms: u64,
        dry_run: bool,
    ) -> Result<Plan, Error> {
        self.check_open()?;
        if let Some(class) = goal
            && class.as_usize() >= self.classes.len()
        {
            return Err(Error::Argument(format!(
                "there is no page class {}; the spec has {}, counted from 0",
                class.0,
                self.classes.len()
            )));
        }
        let lane = self.next_lane();
        let _op = self.enter(lane);
        self.expire_plans();
        self.quiescence.drain(&self.arenas);
        let mut draft = Draft::new(Kind::Rebalance, TenantId(0), bytes);
        let size = goal.map(|class| self.classes[class.as_usize()].size);
        if !dry_run {
            self.resume_draining();
        }
        draft.plan.shortfall = match dry_run {
            true => self.draft_rebalance(lane, &mut draft, size, bytes, max_moves, ttl_ms),
            false => self.draft_room(lane, &mut draft, size, bytes, max_moves, ttl_ms),
        };
        Ok(self.open_draft(lane, draft, ttl_ms, dry_run))
    }

    /// As [`Self::draft_rebalance`]; where that finds no frames to move to, cached pages go for it, the coldest first.
    pub(crate) fn draft_room(
        &self,
        lane: Lane,
        draft: &mut Draft,
        goal: Option<SizeId>,
        bytes: u64,
        max_moves: usize,
        ttl_ms: u64,
    ) -> u64 {
        let extent = self.layouts[Tier::Device.as_usize()].extent_bytes;
        let asker = draft.plan.tenant;
        let mut short = bytes;
        for _ in 0..ROUNDS {
            let left = max_moves.saturating_sub(draft.plan.moves.len());
            // What this draft empties already is on its way.
            short = self.draft_rebalance(lane, draft, goal, bytes, left, ttl_ms);
            if short == 0 || left == 0 {
                break;
            }
            let units = short.div_ceil(extent).saturating_mul(extent) / self.spec.unit();
            let freed = self.evict_units(lane, ROOT, asker, u32::try_from(units).unwrap_or(u32::MAX));
            draft.plan.rungs.free += self.bytes(freed);
            if freed == 0 {
                break;
            }
        }
        short
    }

    /// Bytes that pages of a size (`None`: of any) can be given at once, or once extents that drain for them are empty.
    pub(crate) fn usable(&self, goal: Option<SizeId>) -> u64 {
        let arena = self.arena(Tier::Device);
        let extents = (0..arena.len()).map(ExtentId).map(|extent| arena.glance(extent));
        match goal {
            Some(size) => {
                let bytes = arena.sizes()[size.as_usize()];
                let coming = extents.zip(0..).filter(|(state, _)| state.draining);
                let coming = coming.map(|(_, extent)| u64::from(arena.frames_in(ExtentId(extent), size)));
                (arena.available(size) + coming.sum::<u64>()) * bytes
            }
            None => {
                let whole = extents.filter(|state| state.free == state.total || state.draining);
                whole.count() as u64 * self.layouts[Tier::Device.as_usize()].extent_bytes
            }
        }
    }

    /// Add to a draft what gives pages of a size `bytes` at once; how many bytes that is short of.
    pub(crate) fn draft_rebalance(
        &self,
        lane: Lane,
        draft: &mut Draft,
        goal: Option<SizeId>,
        bytes: u64,
        max_moves: usize,
        ttl_ms: u64,
    ) -> u64 {
        let tier = Tier::Device;
        let arena = self.arena(tier);
        let mut missing = bytes.saturating_sub(self.usable(goal));
        if missing == 0 || arena.sizes().len() == 1 {
            return missing;
        }
        let mut left = max_moves.min((MAX_MOVES as usize).saturating_sub(draft.plan.moves.len()));
        let mut tried = vec![false; arena.len() as usize];
        for _ in 0..ROUNDS {
            let chosen = self.choose(goal, missing, left, &mut tried);
            if chosen.is_empty() {
                break;
            }
            let mut emptying = self.lease_all(chosen, goal, left);
            self.settle_destinations(lane, &mut emptying);
            let mut extents = Vec::with_capacity(emptying.len());
            for one in emptying {
                let gained = self.gain(one.extent, goal);
                draft.plan.emptied += gained;
                missing = missing.saturating_sub(gained);
                left -= one.leased.len();
                draft.plan.copied[0] += one.leased.len() as u64 * arena.sizes()[one.size.as_usize()];
                draft.plan.moves.extend(one.leased.into_iter().map(|(_, m)| m));
                extents.push(one.extent);
            }
            if !extents.is_empty() {
                draft.endings.push(Box::new(Drains { tier, extents, ttl_ms }));
            }
            if missing == 0 || left == 0 {
                break;
            }
        }
        if !draft.endings.is_empty() {
            // Batches look at their places, and take along what they write to.
            self.quiescence.nudge();
        }
        missing
    }

    /// What earlier plans have left in the extents that they emptied, because it could not be moved then, is looked at again:
    /// these extents are chosen like any other, and have the least in them.
    pub(crate) fn resume_draining(&self) {
        let tier = Tier::Device;
        let arena = self.arena(tier);
        let extents = self.plans.lingering(tier);
        self.plans.forget_lingering(tier, &extents);
        for extent in extents {
            let _ = arena.undrain(extent);
        }
    }

    /// What an extent gives to pages of a size.
    fn gain(&self, extent: ExtentId, goal: Option<SizeId>) -> u64 {
        let arena = self.arena(Tier::Device);
        match goal {
            Some(size) => u64::from(arena.frames_in(extent, size)) * arena.sizes()[size.as_usize()],
            None => self.layouts[Tier::Device.as_usize()].extent_bytes,
        }
    }

    /// The emptiest extents of other sizes, for whose pages there are frames elsewhere.
    fn choose(
        &self,
        goal: Option<SizeId>,
        missing: u64,
        max_moves: usize,
        tried: &mut [bool],
    ) -> Vec<(ExtentId, SizeId)> {
        let arena = self.arena(Tier::Device);
        // Free frames of each size in extents that stay.
        let mut room = vec![0u64; arena.sizes().len()];
        let mut candidates = Vec::new();
        for extent in (0..arena.len()).map(ExtentId) {
            let state = arena.glance(extent);
            let Some(size) = state.size.filter(|_| !state.draining && state.free < state.total) else {
                continue;
            };
            room[size.as_usize()] += u64::from(state.free);
            if goal != Some(size) && !tried[extent.as_usize()] {
                let used = state.total - state.free;
                candidates.push((
                    u64::from(used) * arena.sizes()[size.as_usize()],
                    used,
                    state.free,
                    extent,
                    size,
                ));
            }
        }
        candidates.sort_unstable();
        let (mut chosen, mut gained, mut moves) = (Vec::new(), 0, 0);
        for (_, used, free, extent, size) in candidates {
            let room = &mut room[size.as_usize()];
            let needed = u64::from(used) + u64::from(free);
            if gained >= missing {
                break;
            }
            if needed > *room || moves + used as usize > max_moves {
                continue;
            }
            *room -= needed;
            moves += used as usize;
            gained += self.gain(extent, goal);
            tried[extent.as_usize()] = true;
            chosen.push((extent, size));
        }
        chosen
    }

    /// Drain extents and lease what lives in them. Those in which something stays are let be, and those in which by now there
    /// is more than may be moved.
    fn lease_all(
        &self,
        chosen: Vec<(ExtentId, SizeId)>,
        goal: Option<SizeId>,
        mut most: usize,
    ) -> Vec<Emptying> {
        let arena = self.arena(Tier::Device);
        let drained = |&(extent, size): &(ExtentId, SizeId)| arena.drain(extent, size, goal);
        let mut emptying: Vec<_> = chosen
            .into_iter()
            .filter(drained)
            .map(|(extent, size)| Emptying { extent, size, leased: Vec::new(), others: 0, blocked: false })
            .collect();
        let extents: Vec<_> = emptying.iter().map(|one| one.extent).collect();
        self.plans.forget_lingering(Tier::Device, &extents);
        // Which of them, + 1.
        let mut nth = vec![0u32; arena.len() as usize];
        for (one, n) in emptying.iter().zip(1..) {
            nth[one.extent.as_usize()] = n;
        }
        let find = |location: Location| {
            // (It may have left the device since it was looked at.)
            location.tier().filter(|&tier| tier == Tier::Device && !location.is_gone())?;
            let size = self.classes.get(location.class().as_usize())?.size;
            let extent = arena.extent_of(size, location.frame());
            let n = (*nth.get(extent.as_usize())?).checked_sub(1)?;
            Some((n as usize, size))
        };
        for id in (0..self.pages.len()).map(PageId) {
            let location = self.pages.location(id);
            if location.tier() != Some(Tier::Device) {
                continue;
            }
            let Some((n, size)) = find(location) else { continue };
            if size != emptying[n].size {
                continue;
            }
            match self.lease_to_move(id) {
                Lease::Got(m) if find(m.from) == Some((n, size)) => emptying[n].leased.push((m.from, m)),
                Lease::Got(m) => self.unlease(Lane(0), m.page),
                Lease::Goes => emptying[n].others += 1,
                Lease::Stays => emptying[n].blocked = true,
            }
        }
        for retired in self.quiescence.limbo().iter().filter(|r| r.tier == Tier::Device) {
            let extent = arena.extent_of(retired.size, retired.frame);
            if let Some(n) = nth[extent.as_usize()].checked_sub(1)
                && emptying[n as usize].size == retired.size
            {
                emptying[n as usize].others += 1;
            }
        }
        emptying.retain_mut(|one| {
            let state = arena.glance(one.extent);
            let used = if state.draining { state.total - state.free } else { 0 };
            // What nobody has claimed is whoever's is in the middle of a call.
            let stays = one.blocked || used > one.leased.len() as u32 + one.others;
            let left = most.checked_sub(one.leased.len()).filter(|_| !stays);
            match left {
                Some(left) => most = left,
                None => self.let_be(one),
            }
            left.is_some()
        });
        emptying
    }

    /// Stop draining an extent, and give up what was leased in it.
    fn let_be(&self, one: &mut Emptying) {
        one.leased.drain(..).for_each(|(_, m)| self.unlease(Lane(0), m.page));
        self.arena(Tier::Device).undrain(one.extent);
    }

    /// Claim a frame for each page, in the order of the frames they leave, so that adjacent ones stay adjacent as far as may
    /// be. Extents for which there are too few are let be.
    fn settle_destinations(&self, lane: Lane, emptying: &mut Vec<Emptying>) {
        let arena = self.arena(Tier::Device);
        for size in (0..arena.sizes().len()).map(|s| SizeId(s as u8)) {
            let needed: usize =
                emptying.iter().filter(|one| one.size == size).map(|one| one.leased.len()).sum();
            let mut frames = Vec::with_capacity(needed);
            arena.claim_serving(size, lane, needed, &mut frames);
            frames.sort_unstable();
            let mut frames = frames.into_iter();
            emptying.sort_by_key(|one| one.extent);
            emptying.retain_mut(|one| {
                if one.size != size {
                    return true;
                }
                if frames.len() < one.leased.len() {
                    self.let_be(one);
                    return false;
                }
                one.leased.sort_by_key(|(from, _)| from.frame());
                for ((from, m), frame) in one.leased.iter_mut().zip(&mut frames) {
                    m.to = Location::new(Tier::Device, from.class(), frame);
                }
                true
            });
            let left: Vec<FrameId> = frames.collect();
            // They were claimed here.
            let _ = arena.release_many(size, &left);
        }
    }

    /// Lease a page so that it can be moved, if nobody writes to it and nobody outside knows where it lies.
    pub(crate) fn lease_to_move(&self, id: PageId) -> Lease {
        let word = self.pages.read(id);
        let may = |word: PageWord, at: Location| {
            !at.is_outside() && (!word.is_held() || word.is_indexed() || !at.is_open())
        };
        if word.is_free() || word.is_leaving() || word.is_orphan() {
            return Lease::Goes;
        }
        if !may(word, self.pages.location(id)) {
            return self.stays(word, self.pages.location(id));
        }
        let page = PageRef { id, generation: word.generation() };
        if self.pages.transit(id, |w| w.lease(page.generation)).is_err() {
            let now = self.pages.read(id);
            let gone = now.generation() != page.generation || now.is_leaving();
            return if gone { Lease::Goes } else { Lease::Stays };
        }
        // Read under the lease: whoever opens it, or asks where it lies, from now on, keeps it where it is.
        let from = self.pages.location(id);
        let word = self.pages.read(id);
        if !may(word, from) {
            self.unlease(Lane(0), page);
            return self.stays(word, from);
        }
        Lease::Got(Move { page, from, to: from, payer: self.pages.payer(id) })
    }

    /// Of a page that can't be leased: whether its batch takes it along.
    fn stays(&self, word: PageWord, at: Location) -> Lease {
        let goes = at.is_open() && !at.is_outside() && !word.is_indexed() && word.refs() == 1;
        if goes && !word.is_leased() { Lease::Goes } else { Lease::Stays }
    }
}

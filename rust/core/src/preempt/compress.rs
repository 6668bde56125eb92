//! Pages go on in a smaller class: lossy, and for good.
//!
//! What goes: pages of live sequences that are full and published or settled, so that nothing is written to them any more, and that
//! nobody else holds, pins or copies. Sequences in no batch first, then the longest; in each the oldest pages first. Groups
//! whose pages leave by themselves (windows) and fixed states are let be. Cached pages are too: they cost nothing to give up.
//!
//! Who decides: the tenant that pays for the page ([`Policy::compress`](crate::ledger::Policy::compress)), which for a shared
//! prefix is the scope.
//!
//! # Invariant
//!
//! A compressed page is AWAY for the rest of its life: nobody finds it, so a hit never answers with lossy content, and a prompt
//! that needs it computes it again. Whoever holds it goes on, and may fork it. It is never written to: a sequence can't be
//! truncated to the middle of one ([`Body`] checks that, from its lease on). Nor does anybody find what its holder computes
//! from it: sequence/loss.rs.
//!
//! The place in the smaller class is claimed and charged when the plan is built, so while it is open both are charged. Where
//! there is no room for that, fewer pages go. The commit discharges the old place and retires its frame, which batches may
//! still show; from their next step on their tables show `!frame`.
//!
//! Callers: the binding; cut.rs, for the ladder.

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use std::{cmp::Reverse, ops::Range, sync::Arc};

use super::{Build, Built, From, victims::Surplus};
use crate::{
    error::Error,
    plan::{Kind, Plan},
    pool::Pool,
    sequence::{Body, Sequence, State},
    word::{ClassId, GroupId, PageRef, TenantId, Tier, plan::MAX_MOVES},
};

impl Pool {
    /// Pages paid for below `tenant` go on in the smaller class of their group, until `bytes` come back. The plan says what is
    /// missing.
    ///
    /// # Errors
    /// Closed; no such tenant, or none there that allows it; the spec has no smaller class; a batch or a sequence of another
    /// pool.
    pub fn compress(
        self: &Arc<Self>,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.check_open()?;
        self.check_level(tenant)?;
        if (0..self.groups.len()).all(|g| self.small_class(GroupId(g as u8)).is_none()) {
            return Err(Error::Argument(
                "no layer group that keeps its pages has a class whose pages take fewer bytes; give the spec a small_dtype, \
                 and pages of more tokens if it has one"
                    .into(),
            ));
        }
        if !self.ledger.ids().any(|t| self.ledger.may_compress(t) && self.ledger.is_under(t, tenant)) {
            let name = self.ledger.name(tenant).unwrap_or_default();
            return Err(Error::Argument(format!(
                "{name:?} does not allow it: what is compressed is less exact for good; tenant(..., compress=True) allows it"
            )));
        }
        let plan = Plan::new(Kind::Compress, tenant, bytes);
        self.regain(plan, ttl_ms, dry, |build| build.compress_pages(tenant, bytes, from, false, &mut None))
    }

    /// The class that pages of a group are compressed into, if they stay for as long as their sequence, and take less there:
    /// page bytes are rounded up, and the smallest pages may come out alike.
    fn small_class(&self, group: GroupId) -> Option<ClassId> {
        let units = |class: ClassId| self.classes[class.as_usize()].units;
        let own = units(self.groups[group.as_usize()].class);
        let grows = self.spec.groups()[group.as_usize()].kind.grows();
        self.spec.small_class_of(group).filter(|&small| grows && units(small) < own)
    }

    /// The pages of a sequence that can be compressed, the oldest first.
    fn cold_pages(&self, body: &Body, within: TenantId) -> Vec<(u32, PageRef)> {
        let small = |group| self.small_class(group).is_some();
        let may = |page: PageRef| {
            let payer = self.pages.payer(page.id);
            self.is_alone(page)
                && !self.pages.read(page.id).is_away()
                && self.ledger.is_under(payer, within)
                && self.ledger.may_compress(payer)
        };
        self.settled_pages(body, 0..body.published, small, may)
    }

    /// Whether one holder alone has a page, and neither a pin, a plan nor an engine of its own keeps it where it is.
    pub(super) fn is_alone(&self, page: PageRef) -> bool {
        let word = self.pages.read(page.id);
        word.refs() == 1
            && word.pins() == 0
            && !word.is_leased()
            && !self.pages.location(page.id).is_outside()
    }

    /// The pages of a sequence in some groups, at some places that are written to no more, the oldest first.
    pub(super) fn settled_pages(
        &self,
        body: &Body,
        places: Range<u32>,
        groups: impl Fn(GroupId) -> bool,
        may: impl Fn(PageRef) -> bool,
    ) -> Vec<(u32, PageRef)> {
        let groups = (0..body.tables.len()).filter(|&g| groups(GroupId(g as u8)));
        let mut found: Vec<_> = groups
            .flat_map(|g| {
                let table = &body.tables[g];
                let first = places.start.max(table.start);
                (first..places.end).map(|place| (place, table.pages[place as usize]))
            })
            .filter(|&(_, page)| may(page))
            .collect();
        found.sort_by_key(|&(place, _)| place);
        found
    }
}

impl Build<'_> {
    /// Compress pages of sequences of the subtree of `tenant` until `bytes` come back: how many do. `where_full`: only of those
    /// whose pages have no place in the host tier.
    ///
    /// # Errors
    /// A batch or a sequence of another pool.
    pub(crate) fn compress_pages(
        &mut self,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        where_full: bool,
        surplus: &mut Option<Surplus<'_>>,
    ) -> Result<u64, Error> {
        let pool = self.pool;
        let cold = |_: &Self, body: &Body| pool.cold_pages(body, tenant).len();
        let compress =
            |build: &mut Self, _: &_, body: &mut Body, bytes| build.compress_of(body, tenant, bytes);
        self.shrink_each(tenant, bytes, from, where_full, surplus, cold, compress)
    }

    /// Running sequences of the subtree of `tenant` give pages until `bytes` come back: those in no batch first, then those
    /// that have the most to give. How many do. `where_full`: as in [`Self::compress_pages`].
    ///
    /// # Errors
    /// A batch or a sequence of another pool.
    #[expect(
        clippy::too_many_arguments,
        reason = "of whom, how many, whom not, what they have and how it is taken"
    )]
    pub(super) fn shrink_each(
        &mut self,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        where_full: bool,
        surplus: &mut Option<Surplus<'_>>,
        has: impl Fn(&Self, &Body) -> usize,
        mut give: impl FnMut(&mut Self, &Arc<Sequence>, &mut Body, u64) -> u64,
    ) -> Result<u64, Error> {
        let pool = self.pool;
        let mut queue: Vec<_> = self
            .listed(tenant, from)?
            .into_iter()
            .filter_map(|(sequence, batch)| {
                let has = sequence.visit(|_, body, _| match body.state(pool) {
                    State::Running => has(self, body),
                    _ => 0,
                });
                // What is in use at this moment is passed by.
                let has = has.ok().filter(|&n| n > 0)?;
                Some(((batch.is_some(), Reverse(has)), sequence))
            })
            .collect();
        queue.sort_by_key(|&(rank, _)| rank);
        let mut back = 0;
        for (_, sequence) in queue {
            let owner = sequence.tenant();
            let most = surplus.as_mut().map_or(u64::MAX, |surplus| surplus.of(owner));
            let wanted = most.min(bytes - back);
            if wanted == 0 {
                continue;
            }
            // In one go with its lock, for what is leased must not become something that is written to.
            let got = sequence.visit(|_, body, _| {
                if body.state(pool) != State::Running {
                    return None;
                }
                let full = if where_full { Some(self.finds_host_full(body)?) } else { None };
                Some((give(self, &sequence, body, wanted), full))
            });
            let (got, full) = got.ok().flatten().unwrap_or_default();
            if let Some(level) = full.filter(|_| got > 0) {
                self.plan.tell_host_full(level);
            }
            if let Some(surplus) = surplus {
                surplus.take(owner, got);
            }
            back = bytes.min(back + got.min(most));
        }
        Ok(back)
    }

    /// Of one sequence: the bytes that come back.
    fn compress_of(&mut self, body: &mut Body, tenant: TenantId, bytes: u64) -> u64 {
        let pool = self.pool;
        let small = |class: ClassId| pool.small_class(GroupId(class.0)).unwrap_or(class);
        let units = |class: ClassId| pool.classes[class.as_usize()].units;
        let mut cold = pool.cold_pages(body, tenant);
        let mut back = 0;
        let wanted = cold.iter().take_while(|(_, page)| {
            let class = pool.pages.location(page.id).class();
            let more = back < bytes;
            back += if more { pool.bytes(units(class) - units(small(class))) } else { 0 };
            more
        });
        let wanted = wanted.count().min((MAX_MOVES as usize).saturating_sub(self.plan.moves.len()));
        cold.truncate(wanted);
        let gain = |class: ClassId| pool.bytes(units(class) - units(small(class)));
        if self.dry {
            self.spoken.extend(cold.iter().map(|(_, page)| page.id));
            let classes = || cold.iter().map(|(_, page)| pool.pages.location(page.id).class());
            self.plan.copied[0] += classes().map(|class| pool.bytes(units(class))).sum::<u64>();
            let back: u64 = classes().map(gain).sum();
            self.plan.rungs.compress += back;
            return back;
        }
        while !cold.is_empty() {
            let leased: Vec<_> =
                cold.iter().filter_map(|&(_, page)| pool.lease_out(page).map(|at| (page, at))).collect();
            let Ok(moves) = pool.destinations(self.lane, Tier::Device, &leased, small) else {
                // There is no room for as many beside what they are now.
                cold.truncate(cold.len() / 2);
                continue;
            };
            let from = || moves.iter().map(|m| m.from.class());
            self.plan.copied[0] += from().map(|class| pool.bytes(units(class))).sum::<u64>();
            let back: u64 = from().map(gain).sum();
            self.plan.moves.extend(moves);
            body.may_lose(cold[0].0);
            self.plan.rungs.compress += back;
            return back;
        }
        0
    }
}

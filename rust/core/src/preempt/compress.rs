//! Pages go on in a smaller class: lossy, and for good.
//!
//! What goes: pages of live sequences that are full and published, so that nothing is written to them any more, and that
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
//! truncated to the middle of one ([`Body`] checks that, from its lease on).
//!
//! The place in the smaller class is claimed and charged when the plan is built, so while it is open both are charged. Where
//! there is no room for that, fewer pages go. The commit discharges the old place and retires its frame, which batches may
//! still show; from their next step on their tables show `!frame`.
//!
//! Callers: the binding; reclaim.rs, where the host tier is full.

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use std::{cmp::Reverse, sync::Arc};

use super::{Build, Built, From, Wish};
use crate::{
    error::Error,
    ledger::ROOT,
    plan::{Kind, Plan},
    pool::Pool,
    sequence::{Body, State},
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
        if tenant != ROOT {
            self.check_tenant(tenant)?;
        }
        if (0..self.groups.len()).all(|g| self.small_class(GroupId(g as u8)).is_none()) {
            return Err(Error::Argument(
                "no layer group that keeps its pages has a smaller class; give the spec a small_dtype".into(),
            ));
        }
        if !self.ledger.ids().any(|t| self.ledger.may_compress(t) && self.ledger.is_under(t, tenant)) {
            let name = self.ledger.name(tenant).unwrap_or_default();
            return Err(Error::Argument(format!(
                "{name:?} does not allow it: what is compressed is less exact for good; tenant(..., compress=True) allows it"
            )));
        }
        self.expire_plans();
        let lane = self.next_lane();
        let _op = self.enter(lane);
        let mut build = Build::new(self, lane, Plan::new(Kind::Compress, tenant, bytes), dry);
        let back = build.compress_pages(tenant, bytes, from)?;
        build.plan.shortfall = bytes.saturating_sub(back);
        Ok(build.open(ttl_ms))
    }

    /// Whether pages of a tenant have no place in the host tier.
    pub(crate) fn host_is_full(&self, tenant: TenantId) -> bool {
        let largest = self.spec.sizes().last().copied().unwrap_or(0);
        self.arena_bytes(Tier::Host) == 0 || self.check_host(tenant, largest).is_err()
    }

    /// The class that pages of a group are compressed into, if they stay for as long as their sequence.
    fn small_class(&self, group: GroupId) -> Option<ClassId> {
        self.spec.small_class_of(group).filter(|_| self.spec.groups()[group.as_usize()].kind.grows())
    }

    /// The pages of a sequence that can be compressed, the oldest first.
    fn cold_pages(&self, body: &Body, within: TenantId) -> Vec<PageRef> {
        let may = |page: &PageRef| {
            let (word, at, payer) =
                (self.pages.read(page.id), self.pages.location(page.id), self.pages.payer(page.id));
            let alone = word.refs() == 1 && word.pins() == 0 && word.is_indexed();
            alone
                && !word.is_away()
                && !word.is_leased()
                && !at.is_outside()
                && self.ledger.is_under(payer, within)
                && self.ledger.may_compress(payer)
        };
        let groups = (0..body.tables.len()).filter(|&g| self.small_class(GroupId(g as u8)).is_some());
        let mut cold: Vec<_> = groups
            .flat_map(|g| {
                let table = &body.tables[g];
                let settled = table.pages.iter().enumerate().take(body.published as usize);
                settled.skip(table.start as usize).filter(|(_, page)| may(page))
            })
            .collect();
        cold.sort_by_key(|&(place, _)| place);
        cold.into_iter().map(|(_, &page)| page).collect()
    }
}

impl Build<'_> {
    /// Compress pages of sequences of the subtree of `tenant` until `bytes` come back: how many do.
    ///
    /// # Errors
    /// A batch or a sequence of another pool.
    pub(crate) fn compress_pages(
        &mut self,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
    ) -> Result<u64, Error> {
        let pool = self.pool;
        let mut queue: Vec<_> = self
            .listed(tenant, from)?
            .into_iter()
            .filter_map(|(sequence, batch)| {
                let cold = sequence.visit(|_, body, _| match body.state(pool) {
                    State::Running => pool.cold_pages(body, tenant).len(),
                    _ => 0,
                });
                // What is in use at this moment is passed by.
                let cold = cold.ok().filter(|&n| n > 0)?;
                Some(((batch.is_some(), Reverse(cold)), sequence))
            })
            .collect();
        queue.sort_by_key(|&(rank, _)| rank);
        let mut back = 0;
        for (_, sequence) in queue {
            if back >= bytes {
                break;
            }
            // In one go with its lock, for what is leased must not become something that is written to.
            let got = sequence.visit(|_, body, _| match body.state(pool) {
                State::Running => self.compress_of(body, tenant, bytes - back),
                _ => 0,
            });
            back += got.unwrap_or(0);
        }
        self.plan.rungs.compress += back;
        Ok(back)
    }

    /// Live sequences give bytes back: those whose pages could only be dropped, because the host tier is full, by going on with
    /// less exact ones where that is allowed; then by stopping. How many do.
    ///
    /// # Errors
    /// A batch or a sequence of another pool.
    pub(crate) fn shrink_or_stop(
        &mut self,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        wish: Wish,
    ) -> Result<u64, Error> {
        let mut back = 0;
        if self.pool.host_is_full(tenant) {
            back = self.compress_pages(tenant, bytes, from)?;
        }
        Ok(back + self.stop_victims(tenant, bytes.saturating_sub(back), from, wish)?)
    }

    /// Of one sequence: the bytes that come back.
    fn compress_of(&mut self, body: &Body, tenant: TenantId, bytes: u64) -> u64 {
        let pool = self.pool;
        let small = |class: ClassId| pool.small_class(GroupId(class.0)).unwrap_or(class);
        let units = |class: ClassId| pool.classes[class.as_usize()].units;
        let mut cold = pool.cold_pages(body, tenant);
        let mut back = 0;
        let wanted = cold.iter().take_while(|page| {
            let class = pool.pages.location(page.id).class();
            let more = back < bytes;
            back += if more { pool.bytes(units(class) - units(small(class))) } else { 0 };
            more
        });
        let wanted = wanted.count().min((MAX_MOVES as usize).saturating_sub(self.plan.moves.len()));
        cold.truncate(wanted);
        let gain = |class: ClassId| pool.bytes(units(class) - units(small(class)));
        if self.dry {
            let classes = || cold.iter().map(|page| pool.pages.location(page.id).class());
            self.plan.copied[0] += classes().map(|class| pool.bytes(units(class))).sum::<u64>();
            return classes().map(gain).sum();
        }
        while !cold.is_empty() {
            let leased: Vec<_> =
                cold.iter().filter_map(|&page| pool.lease_out(page).map(|at| (page, at))).collect();
            let Ok(moves) = pool.destinations(self.lane, Tier::Device, &leased, small) else {
                // There is no room for as many beside what they are now.
                cold.truncate(cold.len() / 2);
                continue;
            };
            let from = || moves.iter().map(|m| m.from.class());
            self.plan.copied[0] += from().map(|class| pool.bytes(units(class))).sum::<u64>();
            let back = from().map(gain).sum();
            self.plan.moves.extend(moves);
            return back;
        }
        0
    }
}

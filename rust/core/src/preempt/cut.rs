//! Contexts lose pages for good: the model forgets what stood there, and goes on.
//!
//! What goes: of a running sequence that is longer than its tenant lets a cut leave ([`Policy::cut`](crate::ledger::Policy::cut),
//! in tokens), the oldest pages between the first one and those of the last so many tokens. The first page stays, for a large
//! share of attention goes to the first tokens whatever they say (attention sinks, StreamingLLM). Otherwise as in compress.rs:
//! groups that keep their pages; pages that nothing is written to any more, that nobody else holds, pins or copies; sequences
//! in no batch first, then those that have the most. Compressed pages go too.
//!
//! Who decides: the tenant of the sequence, for it is the one that forgets. What comes back is counted for whoever pays.
//!
//! # Gone
//!
//! A cut is a compression into nothing. The page is leased and AWAY from the plan's building on, so nobody finds it, and a plan
//! that comes to nothing leaves it as it was. Its move has no destination: the commit stores [`Location::gone`], retires the
//! frame, which batches may still show, and discharges it; from their next step on their tables show 0, as before the start of a
//! window. Positions stay as they are.
//!
//! A page that is gone has no frame and no charge, is AWAY for the rest of its life, and nothing is copied from or to it:
//! whatever becomes of its sequence, it stays gone. A sequence that is computed again is whole again. Its number goes back
//! as soon as nothing continues it in the index (sequence/loss.rs); [`Pages::gone`](crate::page::Pages::gone) stands in the
//! table then. A sequence can't be truncated to the middle of one; at its edge it can, and goes on with what is left.
//!
//! Callers: the binding; reclaim.rs, where the host tier is full.

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use std::sync::{Arc, Weak};

use super::{Build, Built, From, Wish, victims::Surplus};
use crate::{
    error::Error,
    plan::{Ending, Fate, Kind, Move, Plan, Victim},
    pool::{Pool, Scratch},
    sequence::{Body, Place, Sequence, try_lock},
    word::{
        PageRef, TenantId, Tier,
        page::Location,
        plan::{MAX_MOVES, State},
    },
};

/// A sequence that loses pages. Their numbers go back at once if it stands in no batch and nobody is using it at that moment;
/// in a batch with its next step, for which nobody else takes the batch's lock.
#[derive(Debug)]
struct Cutting(Weak<Sequence>);

impl Ending for Cutting {
    fn settle(&mut self, pool: &Pool, state: State) {
        if state == State::Committed
            && let Some(sequence) = self.0.upgrade()
            && let Ok(mut place) = try_lock(&sequence.place, "the sequence")
            && let Place::Idle(body) = &mut *place
        {
            body.drop_gone(pool, &mut Scratch::default());
        }
    }
}

impl Pool {
    /// Running sequences of the subtree of `tenant` that are too long lose old pages, until `bytes` come back. The plan says
    /// what is missing.
    ///
    /// # Errors
    /// Closed; no such tenant, or none there that allows it; no group keeps its pages; a batch or a sequence of another pool.
    pub fn cut(
        self: &Arc<Self>,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.check_open()?;
        self.check_level(tenant)?;
        if self.spec.groups().iter().all(|group| !group.kind.grows()) {
            return Err(Error::Argument(
                "no layer group keeps its pages, so no context grows too long".into(),
            ));
        }
        if !self.ledger.ids().any(|t| self.ledger.cut(t).is_some() && self.ledger.is_under(t, tenant)) {
            let name = self.ledger.name(tenant).unwrap_or_default();
            return Err(Error::Argument(format!(
                "{name:?} does not allow it: the model forgets what is cut; tenant(..., cut=tokens) allows it, and says how \
                 many of the last tokens always stay"
            )));
        }
        let plan = Plan::new(Kind::Cut, tenant, bytes);
        self.regain(plan, ttl_ms, dry, |build| build.cut_pages(tenant, bytes, from, false, &mut None))
    }
}

impl Build<'_> {
    /// The pages that a sequence can lose, the oldest first.
    fn old_pages(&self, body: &Body, within: TenantId) -> Vec<(u32, PageRef)> {
        let pool = self.pool;
        let Some(keep) = pool.ledger.cut(body.tenant) else { return Vec::new() };
        let end = body.slots.saturating_sub(keep.get()) / pool.spec.page_tokens();
        let may = |page: PageRef| {
            let at = pool.pages.location(page.id);
            pool.is_alone(page)
                && at.tier() == Some(Tier::Device)
                && !at.is_gone()
                && pool.ledger.is_under(pool.pages.payer(page.id), within)
                && !self.spoken.contains(&page.id)
        };
        let grows = |group: crate::word::GroupId| pool.spec.groups()[group.as_usize()].kind.grows();
        pool.settled_pages(body, 1..end.min(body.published), grows, may)
    }

    /// Cut contexts of the subtree of `tenant` until `bytes` come back: how many do. `where_full`: as in
    /// [`Self::compress_pages`].
    ///
    /// # Errors
    /// A batch or a sequence of another pool.
    pub(crate) fn cut_pages(
        &mut self,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        where_full: bool,
        surplus: &mut Option<Surplus<'_>>,
    ) -> Result<u64, Error> {
        let old = |build: &Self, body: &Body| build.old_pages(body, tenant).len();
        let cut = |build: &mut Self, sequence: &_, body: &mut Body, bytes| {
            build.cut_of(sequence, body, tenant, bytes)
        };
        self.shrink_each(tenant, bytes, from, where_full, surplus, old, cut)
    }

    /// Of one sequence: the bytes that come back.
    fn cut_of(&mut self, sequence: &Arc<Sequence>, body: &mut Body, within: TenantId, bytes: u64) -> u64 {
        let pool = self.pool;
        let (mut back, mut places) = (0, Vec::new());
        for (place, page) in self.old_pages(body, within) {
            if back >= bytes || self.plan.moves.len() >= MAX_MOVES as usize {
                break;
            }
            if self.dry {
                self.spoken.insert(page.id);
                back += pool.bytes(pool.units_of(page.id));
                places.push(place);
                continue;
            }
            let Some(from) = pool.lease_out(page) else { continue };
            let class = pool.classes[from.class().as_usize()];
            let to = Location::gone(pool.groups[class.group.as_usize()].class);
            self.plan.moves.push(Move { page, from, to, payer: pool.pages.payer(page.id) });
            back += pool.bytes(class.units);
            places.push(place);
        }
        let Some(&first) = places.first() else { return 0 };
        if !self.dry {
            body.may_lose(first);
            self.endings.push(Box::new(Cutting(Arc::downgrade(sequence))));
        }
        // Side by side where groups lose the same one.
        places.dedup();
        let tokens = places.len() as u32 * pool.spec.page_tokens();
        let (number, tenant, fate) = (body.born, body.tenant, Fate::Trimmed);
        self.plan.victims.push(Victim { sequence: number, tenant, fate, bytes: back, tokens, row: None });
        self.sequences.push(Arc::clone(sequence));
        self.plan.rungs.evict += back;
        back
    }

    /// Live sequences give bytes back: those whose pages could only be dropped, because the host tier is full or their tenant's
    /// limit of it is reached, by going on with less exact or with fewer ones where that is allowed; then by stopping. How many
    /// do. `whole`: if there is not enough nobody stops.
    ///
    /// # Errors
    /// A batch or a sequence of another pool.
    pub(crate) fn shrink_or_stop(
        &mut self,
        tenant: TenantId,
        bytes: u64,
        from: From<'_>,
        wish: Wish,
        whole: bool,
    ) -> Result<u64, Error> {
        let pool = self.pool;
        let mut surplus = self.surplus(tenant, from);
        let mut back = self.compress_pages(tenant, bytes, from, true, &mut surplus)?;
        back += self.cut_pages(tenant, bytes - back, from, true, &mut surplus)?;
        let missing = bytes - back;
        if whole && !self.dry {
            // Ask first: a row that was taken can't be put back.
            let mut ask = Build::exact(pool, self.lane, Plan::new(self.plan.kind, tenant, missing));
            let more = ask.stop_victims(tenant, missing, from, wish, &mut surplus.clone())?;
            if more < missing {
                return Ok(back + more);
            }
        }
        Ok(back + self.stop_victims(tenant, missing, from, wish, &mut surplus)?)
    }
}

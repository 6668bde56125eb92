//! Reclaim: bytes of a tenant come back; top-up: others get them.
//!
//! # The ladder
//!
//! | rung | takes | here |
//! | --- | --- | --- |
//! | free | cached pages below the tenant: of tenants that do nothing first, then of those most over their share; coldest and leaf first (evict.rs) | yes |
//! | compress | where the host tier is full, for the pool or for a tenant: pages of live sequences whose tenant allows it | `preempt/compress.rs`, with [`Live::Preempt`] |
//! | evict | the same: old pages of contexts whose tenant allows that they are cut | `preempt/cut.rs`, with [`Live::Preempt`] |
//! | offload, recompute | live sequences | preempt.rs, with [`Live::Preempt`] |
//!
//! What it does not touch: pages that others hold too, and what pins keep. The plan says how many bytes these are, and what is
//! missing. Cached pages are evicted when the plan is committed, not when it is built; what was hit by then stays, and is held.
//!
//! [`Live::Freeze`]: from the plan's building on no sequence of the tenant is opened, and those that run may grow to the
//! length they were admitted for, until it is thawed ([`Pool::set_frozen`]), or the plan comes to nothing: `reclaim/freeze.rs`.
//!
//! A tenant may be removed while a plan for it is open. Its plan ends as before then, and does nothing to who gets the id
//! ([`TenantRef`]).
//!
//! # Watermarks
//!
//! A tenant (or the pool) with a high and a low mark gives cached pages up when more than the high one is charged to it, until
//! it is the low one: in small steps ([`Pool::reclaim_some`]), by whoever has time for it, so that no allocation has to
//! evict many pages at once. The word of a tenant: low mark (bits 0-31), high mark (32-62), on the way down (63).
//!
//! # Top-up
//!
//! In one act: the reserve grows, as much as fits beside what others hold and have reserved; cached pages that lie in reserves
//! go, so that nobody has to evict on the way to them; extents are emptied where free bytes serve other page sizes. What needs
//! no copy is done at once. If the whole can't be had nothing is changed, and the error says what is missing.
//!
//! A reserve that is lent, and how it comes back: `reclaim/lend.rs`.
//!
//! Callers: the binding.

mod freeze;
mod lend;

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use std::sync::Arc;

pub(crate) use freeze::Freezes;

use crate::{
    error::{Error, sizes},
    ledger::{LedgerError, ROOT},
    plan::{Ending, Fault, Kind, Plan},
    pool::{Pool, Scratch},
    preempt::{Build, Built, For, From, Wish},
    sync::Atom,
    word::{Lane, TenantId, TenantRef, Tier, Units, plan::State},
};

/// How live sequences go on.
#[derive(Clone, Copy, Debug)]
pub enum Live<'a> {
    /// They are not touched.
    Stay,
    /// They may grow to the length they were admitted for; no new ones.
    Freeze,
    /// Some of them stop.
    Preempt(From<'a>, Wish),
}

/// Pages evicted between two choices of the tenant.
const STEP: u32 = 256;
const DOWN: u64 = 1 << 63;
const MARK: u64 = (1 << 31) - 1;

/// Cached pages that go at the commit.
#[derive(Debug)]
struct Evicting {
    level: TenantRef,
    units: u32,
}

impl Ending for Evicting {
    fn settle(&mut self, pool: &Pool, state: State) {
        let TenantRef { id, .. } = self.level;
        if state == State::Committed && pool.ledger.is_same(self.level) {
            pool.evict_units(pool.next_lane(), id, id, self.units);
        }
    }
}

/// A reserve that has grown, or is to grow once others have left.
#[derive(Debug)]
struct Raising {
    tenant: TenantRef,
    units: u32,
    done: bool,
}

impl Ending for Raising {
    fn settle(&mut self, pool: &Pool, state: State) {
        let by = i64::from(self.units);
        // A tenant that was removed meanwhile has none. What others took in between, where this had to wait for those who
        // left, is missing: the reserve says so.
        let _ = match (state == State::Committed, self.done) {
            (false, true) => pool.ledger.shift_reserve(Tier::Device, self.tenant, -by),
            (true, false) => pool.ledger.shift_reserve(Tier::Device, self.tenant, by),
            _ => Ok(()),
        };
    }

    fn waits(&self) -> bool {
        self.done
    }
}

impl Pool {
    /// A plan by which `bytes` of the subtree of `tenant` come back. With `dry` nothing is changed.
    ///
    /// # Errors
    /// Closed; no such tenant; batches or sequences of another pool.
    pub fn reclaim(
        self: &Arc<Self>,
        tenant: TenantId,
        bytes: u64,
        live: Live<'_>,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.check_open()?;
        self.check_level(tenant)?;
        self.build(Plan::new(Kind::Reclaim, tenant, bytes), ttl_ms, dry, |build| {
            let usage = self.ledger.subtree_usage(Tier::Device, tenant);
            build.plan.pinned = self.bytes(usage.pinned.0);
            let unit = self.spec.unit();
            let free = bytes.div_ceil(unit).min(u64::from(usage.cached.0)) as u32;
            build.plan.rungs.free = self.bytes(free);
            if free > 0 {
                build.endings.push(Box::new(Evicting { level: self.ledger.now(tenant), units: free }));
            }
            let missing = bytes.saturating_sub(self.bytes(free));
            let back = match live {
                Live::Freeze if !dry => {
                    self.freeze_for_plan(build, tenant)?;
                    0
                }
                Live::Preempt(from, wish) if missing > 0 => {
                    build.shrink_or_stop(tenant, missing, from, wish, false)?
                }
                _ => 0,
            };
            build.plan.shortfall = missing.saturating_sub(back);
            Ok(())
        })
    }

    /// Give `tenant` a reserve that is larger by `bytes`, of which nothing is in anybody's use. A plan that needs no copies has
    /// been carried out; else it waits for them, and its abort takes the reserve back.
    ///
    /// # Errors
    /// Closed; no such tenant; it can't be had: then nothing is changed but for cached pages that are gone, and the error says
    /// how many bytes are missing.
    pub fn top_up(
        self: &Arc<Self>,
        tenant: TenantId,
        bytes: u64,
        live: Live<'_>,
        max_moves: usize,
        ttl_ms: u64,
        dry: bool,
    ) -> Result<Built, Error> {
        self.check_open()?;
        self.check_tenant(tenant)?;
        self.expire_plans();
        let lane = self.next_lane();
        let _op = self.enter(lane);
        let wanted = bytes.div_ceil(self.spec.unit());
        let capacity = self.ledger.capacity(Tier::Device);
        let units = u32::try_from(wanted).ok().filter(|&units| units <= capacity.0).ok_or_else(|| {
            self.short(tenant, bytes, bytes.saturating_sub(self.bytes(capacity.0)), "the pool has no more")
        })?;
        let mut build = Build::new(self, lane, Plan::new(Kind::TopUp, tenant, bytes), dry);
        let raised = self.raise(&mut build, tenant, units, live);
        let done = raised.and_then(|()| {
            self.clear_reserves(&mut build, tenant, units);
            self.gather(&mut build, tenant, bytes, max_moves, ttl_ms)
        });
        if let Err(error) = done {
            build.give_up();
            return Err(error);
        }
        let copies = !build.plan.moves.is_empty() || !build.plan.victims.is_empty();
        let built = build.open(ttl_ms);
        if !dry && !copies {
            self.commit_plan(&built.0)?;
        }
        Ok(built)
    }

    /// The reserve grows: now, or when live sequences that are in the way have left.
    fn raise(
        self: &Arc<Self>,
        build: &mut Build<'_>,
        tenant: TenantId,
        units: u32,
        live: Live<'_>,
    ) -> Result<(), Error> {
        let asked = self.bytes(units);
        let whose = self.ledger.now(tenant);
        let raised = self.ledger.shift_reserve(Tier::Device, whose, units.into());
        let short = match raised {
            Ok(()) if build.is_dry() => {
                // As it was.
                let _ = self.ledger.shift_reserve(Tier::Device, whose, -i64::from(units));
                return Ok(());
            }
            Ok(()) => {
                build.endings.push(Box::new(Raising { tenant: whose, units, done: true }));
                return Ok(());
            }
            Err(LedgerError::Reserve { short, .. }) => self.bytes(short.0),
            Err(error) => return Err(Error::Tenant(error.to_string())),
        };
        let held = "what others hold and have reserved does not come back by eviction";
        let Live::Preempt(from, wish) = live else { return Err(self.short(tenant, asked, short, held)) };
        let from = From { who: For::Tenant(tenant), ..from };
        let back = build.shrink_or_stop(ROOT, short, from, wish, true)?;
        if back < short {
            return Err(self.short(tenant, asked, short - back, held));
        }
        if !build.is_dry() {
            build.endings.push(Box::new(Raising { tenant: whose, units, done: false }));
        }
        Ok(())
    }

    /// Cached pages that lie in reserves go, up to what was asked for.
    fn clear_reserves(&self, build: &mut Build<'_>, tenant: TenantId, units: u32) {
        let usage = self.ledger.usage(Tier::Device, ROOT);
        let cached: u64 = std::iter::once(ROOT)
            .chain(self.ledger.ids())
            .map(|t| u64::from(self.ledger.cached(Tier::Device, t).0))
            .sum();
        let claims = u64::from(usage.claim.0) + if build.is_dry() { u64::from(units) } else { 0 };
        let over = (claims + cached).saturating_sub(u64::from(self.ledger.capacity(Tier::Device).0));
        let over = over.min(cached).min(units.into()) as u32;
        let freed = match over {
            0 => 0,
            over if build.is_dry() => over,
            over => self.evict_units(build.lane(), ROOT, tenant, over),
        };
        build.plan.rungs.free += self.bytes(freed);
    }

    /// Where free bytes serve other page sizes, extents are emptied.
    fn gather(
        &self,
        build: &mut Build<'_>,
        tenant: TenantId,
        bytes: u64,
        max_moves: usize,
        ttl_ms: u64,
    ) -> Result<(), Error> {
        let arena = self.arena(Tier::Device);
        // Where sequences leave first, what they leave counts as there.
        let wanted = bytes.min(arena.free_bytes().saturating_sub(arena.unusable_bytes()));
        // Of the classes that pages are taken in; smaller ones are for pages that are there already.
        let mut sizes: Vec<_> = self.groups.iter().map(|g| self.classes[g.class.as_usize()].size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let dry = build.is_dry();
        for size in sizes {
            if arena.sizes().len() == 1 || self.usable(Some(size)) >= wanted {
                continue;
            }
            if !dry {
                self.resume_draining();
            }
            let short = build.with_draft(|lane, draft| match dry {
                true => self.draft_rebalance(lane, draft, Some(size), wanted, max_moves, ttl_ms),
                false => self.draft_room(lane, draft, Some(size), wanted, max_moves, ttl_ms),
            });
            if short > 0 {
                let text = "the free bytes lie in extents of other page sizes, and what lives there can't all be moved";
                return Err(self.short(tenant, bytes, short, text));
            }
        }
        Ok(())
    }

    fn short(&self, tenant: TenantId, asked: u64, short: u64, why: &str) -> Error {
        let name = self.ledger.name(tenant).unwrap_or_default();
        let [more, missing] = sizes([asked, short]);
        let text =
            format!("{name:?} asked for {more} more, and {missing} are missing: {why}; nothing was reserved");
        Error::Plan(Fault::Short { asked, short, text })
    }

    /// Evict cached pages in the subtree of `level`, about `units` of them: how many.
    pub(crate) fn evict_units(&self, lane: Lane, level: TenantId, asker: TenantId, units: u32) -> u32 {
        let mut scratch = Scratch::default();
        let mut freed = 0;
        let idle = |t: TenantId| {
            self.sequences[t.as_usize()].get() == 0 && self.ledger.cached(Tier::Device, t) > Units(0)
        };
        for all in [false, true] {
            let mut tried: Vec<TenantId> = Vec::new();
            while freed < units {
                let skip = |t: TenantId| tried.contains(&t) || !all && (t == asker || !idle(t));
                let Some(tenant) = self.ledger.worst(Tier::Device, level, skip) else { break };
                let (got, whole) = self.evict_some(lane, tenant, asker, units - freed, &mut scratch);
                freed += got;
                if !whole {
                    tried.push(tenant);
                }
            }
        }
        freed
    }

    /// Evict one tenant's: units, and whether there may be more.
    fn evict_some(
        &self,
        lane: Lane,
        tenant: TenantId,
        asker: TenantId,
        units: u32,
        scratch: &mut Scratch,
    ) -> (u32, bool) {
        let mut sizes = self.classes.iter().map(|c| (c.units, c.size));
        let Some((least, size)) = sizes.next().map(|first| sizes.fold(first, std::cmp::Ord::min)) else {
            return (0, false);
        };
        // At most one page more than asked for; of larger ones fewer.
        let n = units.div_ceil(least.max(1)).min(STEP) as usize;
        let mut wanted = Some((size, &mut *scratch));
        let (mut pages, mut got) = self.evict_of(lane, tenant, asker, n, false, &mut wanted);
        if pages < n {
            let more = self.evict_of(lane, tenant, asker, n - pages, true, &mut wanted);
            (pages, got) = (pages + more.0, got + more.1);
        }
        self.unclaim(size, scratch);
        (got, pages == n)
    }

    /// Let cached pages go when more than `high` bytes are charged to the subtree of `tenant` (the root: to all), until it is
    /// `low`. `None`: no marks.
    ///
    /// # Errors
    /// No such tenant; marks out of order.
    pub fn set_watermarks(&self, tenant: TenantId, marks: Option<(u64, u64)>) -> Result<(), Error> {
        self.check_level(tenant)?;
        let unit = self.spec.unit();
        let word = match marks {
            None => 0,
            Some((low, high)) if low <= high && high >= unit => {
                (high / unit).min(MARK) << 32 | (low / unit).min(MARK)
            }
            Some((low, high)) => {
                let [low, high] = sizes([low, high]);
                return Err(Error::Argument(format!(
                    "the low mark is {low} and the high one {high}; the high one is at least {unit} bytes, and the low \
                     one not above it"
                )));
            }
        };
        self.note(tenant, || self.marks[tenant.as_usize()].put(word))
    }

    /// What everybody forgets of a tenant that is removed.
    fn note(&self, tenant: TenantId, f: impl FnOnce()) -> Result<(), Error> {
        if self.ledger.note(tenant, f) { Ok(()) } else { Err(Error::UnknownTenant(tenant.to_string())) }
    }

    /// The marks of a tenant in bytes, low and high.
    pub fn watermarks(&self, tenant: TenantId) -> Option<(u64, u64)> {
        let word = self.marks[tenant.as_usize()].get();
        (word != 0).then(|| (self.bytes(word as u32), self.bytes((word >> 32 & MARK) as u32)))
    }

    /// A small step of what can be done in the background: what is over ends, frames come back, and where more than a high mark
    /// is charged up to `pages` cached pages go. Bytes that were freed; 0: there is nothing to do now.
    pub fn reclaim_some(&self, pages: usize) -> u64 {
        if self.is_closed() {
            return 0;
        }
        let lane = self.next_lane();
        let _op = self.enter(lane);
        self.expire_pins();
        self.expire_plans();
        self.quiescence.drain(&self.arenas);
        let least = self.classes.iter().map(|c| c.units).min().unwrap_or(1).max(1);
        let budget = u32::try_from(pages).unwrap_or(u32::MAX).saturating_mul(least);
        let mut freed = 0;
        // From the top down: what is done for all counts for each.
        for level in (0..=self.ledger.top()).map(TenantId) {
            let mark = &self.marks[level.as_usize()];
            let word = mark.get();
            if word == 0 || freed >= budget {
                continue;
            }
            let charged = u64::from(self.ledger.charged(Tier::Device, level).0);
            let (low, high) = (word & u64::from(u32::MAX), word >> 32 & MARK);
            let down = charged > high || word & DOWN != 0 && charged > low;
            if down != (word & DOWN != 0) {
                // Marks that were set anew meanwhile stay.
                let _ = mark.cas(word, word ^ DOWN);
            }
            if down {
                let units = (charged - low).min(u64::from(budget - freed)) as u32;
                freed += self.evict_units(lane, level, level, units);
            }
        }
        self.bytes(freed)
    }
}

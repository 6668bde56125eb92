//! What keeps pages, and what makes the cache forget: pins, the reset when the weights change, and what nobody can find any
//! more because it is off the device.
//!
//! A pin is a lock, so it has an owner, counts against the owner's budget, may expire, and is listed. Pages are pinned
//! while a sequence holds them, so a pin never takes anything away from anybody at that moment; when the last reference
//! goes, a pinned page is counted as pinned and not as cached: it is never called reclaimable.
//!
//! Order: page words are pinned before the pin is listed, and unpinned after it was taken off the list, which happens
//! once, whoever asks (unpin, expiry). Callers: the binding; pool.rs and preempt/places.rs before they refuse.

use crate::{
    error::{Bytes, Error, sizes},
    event::{Drained, Event, Record},
    ledger::Ledger,
    pins::{Pin, PinId},
    pool::Pool,
    sequence::Sequence,
    stats::{Counter, Snapshot, TenantSnapshot},
    sync::Atom,
    word::{GroupId, Lane, PageId, PageRef, SizeId, TenantId, Tier, Units, page::Dropped},
};

impl Pool {
    /// Pin the published pages of a sequence's first `tokens` tokens (whole pages, in every group that still has them)
    /// for `owner`, for `ttl_ms` of the pool's clock or until it is unpinned.
    ///
    /// # Errors
    /// Busy, closed, suspended; no page of these tokens is published; the budget of the owner's policy is used up.
    pub fn pin(
        &self,
        sequence: &Sequence,
        tokens: u32,
        owner: TenantId,
        ttl_ms: Option<u64>,
        label: &str,
    ) -> Result<PinId, Error> {
        self.check_open()?;
        self.check_tenant(owner)?;
        if !std::ptr::eq(self, &raw const **sequence.pool()) {
            return Err(Error::WrongPool("the sequence"));
        }
        self.expire_pins();
        let budget = self.ledger.policy(owner).map_or(Units(0), |p| p.pin_budget);
        let _op = self.enter(Lane(0));
        let pinned = sequence.visit(|pool, body, _| {
            body.check_running(pool)?;
            let end = (tokens / pool.spec.page_tokens()).min(body.published) as usize;
            let mut pinned: Vec<PageRef> = Vec::new();
            for g in (0..body.tables.len()).filter(|&g| !pool.is_state(GroupId(g as u8))) {
                let table = &body.tables[g];
                for &page in table.pages[..end].iter().skip(table.start as usize) {
                    if pool.pages.transit_with(page.id, |w| w.pin(page.generation)).is_ok() {
                        pinned.push(page);
                    }
                }
            }
            Ok::<_, Error>(pinned)
        })??;
        if pinned.is_empty() {
            return Err(Error::Pin(format!(
                "no page of the first {tokens} tokens is published; commit them first"
            )));
        }
        let units = pinned.iter().map(|p| self.units_of(p.id)).sum();
        let until = ttl_ms.map(|ttl| self.clock.now_ms().saturating_add(ttl));
        self.pins.add(owner, budget, &pinned, Units(units), until, label).map_err(|e| {
            self.unpin_pages(&pinned);
            let [asked, budget, used] = sizes([e.asked, e.budget, e.used].map(|units| self.bytes(units.0)));
            Error::Pin(format!(
                "{:?} asked to pin {asked}; its budget is {budget}, of which {used} are used",
                self.ledger.name(owner).unwrap_or_default(),
            ))
        })
    }

    /// End a pin.
    ///
    /// # Errors
    /// It has ended or expired already, or never was: nothing is changed.
    pub fn unpin(&self, pin: PinId) -> Result<(), Error> {
        let _op = self.enter(Lane(0));
        let pin = self.pins.take(pin).map_err(|e| Error::Pin(e.to_string()))?;
        self.unpin_pages(&pin.pages);
        Ok(())
    }

    /// End the pins whose time is over; how many.
    pub fn expire_pins(&self) -> usize {
        let now = self.clock.now_ms();
        if !self.pins.are_due(now) {
            return 0;
        }
        let _op = self.enter(Lane(0));
        let expired = self.pins.take_expired(now);
        for pin in &expired {
            self.unpin_pages(&pin.pages);
        }
        expired.len()
    }

    /// End what keeps pages and whose time is over: pins, and the leases of plans. How many. Never waits.
    pub(crate) fn expire(&self) -> usize {
        self.expire_pins() + self.expire_plans_in_passing()
    }

    /// The pins, of one owner or of all.
    pub fn pins(&self, owner: Option<TenantId>) -> Vec<Pin> {
        self.expire_pins();
        self.pins.list(owner)
    }

    /// What an owner's pins use of its budget.
    pub fn pin_budget_used(&self, owner: TenantId) -> Units {
        self.pins.used(owner)
    }

    /// Inside an operation, for until it is done the list and the page words differ.
    fn unpin_pages(&self, pages: &[PageRef]) {
        // Children first, as everywhere.
        for page in pages.iter().rev() {
            let (tier, payer) = (self.tier_of(page.id), self.pages.payer(page.id));
            let units = Units(self.units_of(page.id));
            if let Ok(Dropped::Cached { enqueue }) =
                self.pages.transit_with(page.id, |w| w.unpin(page.generation))
            {
                self.ledger.park_pinned(tier, payer, units);
                if enqueue {
                    self.orders.enqueue(&self.pages, payer, page.id);
                }
            }
        }
    }

    /// The weights changed: nothing that is cached may be hit any more, and all of it becomes free. How many pages did.
    ///
    /// # Errors
    /// Published pages are held or pinned: then nothing is done.
    pub fn reset_prefix_cache(&self) -> Result<u64, Error> {
        self.check_open()?;
        let in_use = |id: &PageId| {
            let word = self.pages.read(*id);
            word.is_indexed() && (word.is_held() || word.pins() > 0)
        };
        let pages = (0..self.pages.len()).map(PageId).filter(in_use).count() as u64;
        if pages > 0 {
            return Err(Error::InUse { pages });
        }
        let cached = |id: &PageId| self.pages.read(*id).is_cached();
        let most = (0..self.pages.len()).map(PageId).filter(cached).count() as u64;
        let _op = self.enter(Lane(0));
        // From here on no key of before is asked for; what is still listed under one is on its way out.
        self.weights_epoch.plus(1);
        // Children leave before parents, which may stand in the order of an earlier tenant: until a round finds nothing, or as
        // many have gone as there were (others cache new ones meanwhile).
        let mut dropped = 0;
        while dropped < most {
            let more: u64 = (0..=self.ledger.top()).map(|t| self.drop_cached(TenantId(t))).sum();
            if more == 0 {
                break;
            }
            dropped += more;
        }
        self.events.publish(Event::Cleared);
        Ok(dropped)
    }

    /// Take a tenant out of the tree; its cached pages become free. How many did.
    ///
    /// # Errors
    /// It has children, or pages that are held or promised: then nothing is done.
    pub fn remove_tenant(&self, tenant: TenantId) -> Result<u64, Error> {
        self.check_tenant(tenant)?;
        let whose = self.ledger.now(tenant);
        // All or nothing; what comes up between here and the end only leaves the tenant without its cache.
        let usage = Tier::ALL.map(|tier| self.ledger.subtree_usage(tier, tenant));
        let busy: u32 = usage.iter().map(|usage| usage.held.0 + usage.promised.0).sum();
        if busy > 0 || self.ledger.ids().any(|id| self.ledger.parent(id) == Some(tenant)) {
            return Err(Error::Tenant(format!(
                "tenant {:?} has children, or {} that are held or promised; close those first",
                self.ledger.name(tenant).unwrap_or_default(),
                Bytes(self.bytes(busy))
            )));
        }
        let open = self.sequences[tenant.as_usize()].get();
        if open > 0 {
            return Err(Error::Tenant(format!(
                "tenant {:?} has {open} open sequence{}; close {} first",
                self.ledger.name(tenant).unwrap_or_default(),
                if open == 1 { "" } else { "s" },
                if open == 1 { "it" } else { "them" },
            )));
        }
        let pays = |page: &PageRef| self.pages.payer(page.id) == tenant;
        let kept = |pin: &&Pin| pin.owner != tenant && pin.pages.iter().any(pays);
        if let Some(pin) = self.pins.list(None).iter().find(kept) {
            return Err(Error::Tenant(format!(
                "tenant {:?} pays for pages that a pin of {:?} keeps; unpin those first",
                self.ledger.name(tenant).unwrap_or_default(),
                self.ledger.name(pin.owner).unwrap_or_default()
            )));
        }
        let _op = self.enter(Lane(0));
        for pin in self.pins.take_all(Some(tenant)) {
            self.unpin_pages(&pin.pages);
        }
        let dropped = self.drop_cached(tenant);
        let forget = || {
            self.thaw(tenant);
            self.marks[tenant.as_usize()].put(0);
            self.orders.reset(tenant);
            self.stats.forget(tenant);
        };
        self.ledger.remove(whose, forget).map_err(|e| Error::Tenant(e.to_string()))?;
        Ok(dropped)
    }

    /// Take every cached page of a tenant out of the books; how many.
    fn drop_cached(&self, tenant: TenantId) -> u64 {
        self.orders.victims(&self.pages, tenant, None, usize::MAX, |id, word| self.expel(id, word)) as u64
    }

    /// Pages off the device that nobody holds, and that stand in an order because it listed them, or others continued them,
    /// when they were let go: how many ended. So do cached pages on the device that continue them, for nobody finds those. A
    /// round over the orders of those who have some, then, if others' pages may be in the way, over all. Before anything is
    /// refused, in either tier: on the device they may keep what they continue, whose tenant then has cached pages that can't
    /// be evicted.
    pub(crate) fn drop_lost_pages(&self, lane: Lane) -> usize {
        let mut ended = 0;
        if self.lost.get() == 0 {
            return ended;
        }
        for everybody in [false, true] {
            for tenant in (0..=self.ledger.top()).map(TenantId) {
                if everybody || self.ledger.usage(Tier::Host, tenant).cached > Units(0) {
                    self.orders.drain_away(&self.pages, tenant, |id, word| {
                        ended += 1;
                        self.expel(id, word)
                    });
                }
            }
            if ended > 0 {
                break;
            }
        }
        self.stats.count(lane, Counter::PagesReleased, ended as u64);
        ended
    }

    /// Tenants, limits, charges.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What happened so far.
    pub fn stats(&self) -> Snapshot {
        let events = [
            (Counter::EventsWritten, self.events.written()),
            (Counter::EventsDropped, self.events.dropped()),
        ];
        events.into_iter().fold(self.stats.snapshot(), |stats, (counter, value)| stats.with(counter, value))
    }

    /// What happened to one tenant so far.
    pub fn tenant_stats(&self, tenant: TenantId) -> TenantSnapshot {
        self.stats.tenant_snapshot(tenant)
    }

    /// Up to `max` events, in order.
    ///
    /// # Errors
    /// Another thread is draining them.
    pub fn drain_events(&self, max: usize, out: &mut Vec<Record>) -> Result<Drained, Error> {
        self.events.drain(max, self.clock.now_ms(), out).map_err(|_| Error::Busy("the event ring"))
    }

    /// Whether events are written.
    pub fn turn_events(&self, on: bool) {
        self.events.turn(on);
    }

    /// The pool's time, in milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Move a manual clock on.
    ///
    /// # Errors
    /// The clock is the system's.
    pub fn advance(&self, ms: u64) -> Result<u64, Error> {
        let now = self.clock.advance(ms).map_err(|e| Error::Argument(e.to_string()))?;
        self.expire_pins();
        self.expire_plans();
        Ok(now)
    }

    /// Bytes of a tier that can be given out, and those that are in no page.
    pub fn room_in(&self, tier: Tier) -> (u64, u64) {
        let arena = self.arena(tier);
        (arena.capacity_bytes(), arena.free_bytes())
    }

    /// Bytes of a tier that are free, and of no use to pages of the size that is worst off: they lie in extents that serve
    /// other sizes.
    pub fn fragmented(&self, tier: Tier) -> u64 {
        let arena = self.arena(tier);
        let usable = arena.sizes().iter().zip(0..).map(|(bytes, size)| arena.available(SizeId(size)) * bytes);
        arena.free_bytes().saturating_sub(usable.min().unwrap_or(0))
    }

    /// Bytes of a number of units.
    pub fn bytes_of(&self, units: Units) -> u64 {
        self.bytes(units.0)
    }

    /// Bytes that the books themselves take for each page, the tokens not counted.
    pub fn metadata_bytes(&self) -> u64 {
        let pages = u64::from(self.pages.len());
        pages * 64 + self.index.bytes() + self.orders.bytes() + pages.div_ceil(8) * 2
    }

    /// How many pages there can be.
    pub fn max_pages(&self) -> u32 {
        self.pages.len()
    }
}

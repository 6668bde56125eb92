//! The books together: taking pages, hitting them, letting them go, and making room.
//!
//! Every room keeps its own invariant in its own words. This one fixes the order in which a multi-room operation visits
//! them, so that at every instant, whoever looks or stops, the books err on the safe side:
//!
//! | operation | order | what an onlooker may see in between |
//! | --- | --- | --- |
//! | take | charge, frames, ids, page words | charged bytes without a page |
//! | let go (no key) | page word LEAVING, id, frame, discharge | the same |
//! | let go (has a key) | page word cached, held to cached in the ledger, eviction order | a cached page counted as held |
//! | hit | cached to held in the ledger, page word held | the same |
//! | evict | page word LEAVING, index, parent's child count, id, frame, cached bytes down | charged bytes without a page |
//! | publish | names and tokens, parent's child count, page word INDEXED, index | a page with a key that nobody finds yet |
//!
//! So charged bytes are never less than the bytes of allocated frames, and what is reclaimable is never promised twice.
//! An operation that fails walks back the way it came.
//!
//! Taking and evicting are here; publishing, hitting and letting go in life.rs.
//!
//! Callers: sequence.rs, batch.rs, face.rs, admit.rs, audit.rs. Nothing here blocks: policy (tenants, pins) has its own
//! small locks in ledger.rs and pins.rs.

use crate::{
    clock::Clock,
    error::{Error, Refusal, Why},
    event::Events,
    evict::{NODES_PER_TENANT, Orders},
    frame::{Arena, Quiescence, Slots},
    hash::{ChainKey, Hasher, Secret},
    index::Index,
    ledger::{self, Ledger, Refused},
    page::{MAX_TENANTS, Pages},
    pins::Pins,
    spec::{ArenaLayout, GroupKind, Spec},
    stats::{Counter, Stats, TenantCounter},
    sync::{Atom, AtomicU32, AtomicU64, Words},
    word::{
        ClassId, FrameId, GroupId, LANES, Lane, PageId, PageRef, SizeId, TIERS, TenantId, Tier, Units,
        page::Location,
    },
};

/// How a pool is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the device arena.
    pub device_bytes: u64,
    /// Bytes of the host arena; 0: no host tier.
    pub host_bytes: u64,
    /// The hash secret; `None`: random.
    pub secret: Option<Secret>,
    /// The most tenants the pool can ever have.
    pub max_tenants: u32,
    /// Compare the stored tokens on every hit.
    pub compare_tokens: bool,
    /// Time stands still until [`Pool::advance`] moves it.
    pub manual_clock: bool,
    /// Slots of the event ring; 0: no events.
    pub events: u32,
    /// Every index key collides (for tests).
    pub force_collisions: bool,
}

/// What the pool needs of a layer group on the hot path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupInfo {
    pub(crate) class: ClassId,
    pub(crate) units: u32,
}

/// What the pool needs of a page class on the hot path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClassInfo {
    pub(crate) group: GroupId,
    pub(crate) size: SizeId,
    pub(crate) units: u32,
}

/// The books.
#[derive(Debug)]
pub struct Pool {
    pub(crate) spec: Spec,
    pub(crate) groups: Vec<GroupInfo>,
    pub(crate) classes: Vec<ClassInfo>,
    /// A bit for each group that is a fixed state.
    states: u64,
    pub(crate) layouts: [ArenaLayout; TIERS],
    pub(crate) arenas: [Arena; TIERS],
    pub(crate) slots: Slots,
    pub(crate) pages: Pages,
    pub(crate) hasher: Hasher,
    pub(crate) index: Index,
    pub(crate) orders: Orders,
    pub(crate) ledger: Ledger,
    pub(crate) events: Events,
    pub(crate) stats: Stats,
    pub(crate) clock: Clock,
    pub(crate) pins: Pins,
    pub(crate) quiescence: Quiescence,
    pub(crate) compare_tokens: bool,
    /// Bumped when the weights change; part of every root key.
    pub(crate) weights_epoch: AtomicU64,
    /// Bumped when a page moved: batches then rewrite their block tables.
    pub(crate) moves: AtomicU64,
    /// The tenant whose cached pages go next (bits 0-31) and for how many evictions the choice holds (32-63).
    victim: AtomicU64,
    lanes: AtomicU64,
    closed: AtomicU32,
    /// Per lane a cache line: operations entered, operations left.
    pub(crate) ops: Words,
}

/// Lists that operations use again and again, so that the hot paths don't allocate.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) frames: Vec<FrameId>,
    pub(crate) ids: Vec<PageId>,
    pub(crate) queue: Vec<PageId>,
    pub(crate) reversed: Vec<PageRef>,
    pub(crate) keys: Vec<ChainKey>,
    /// Sources of copies that the step in progress asked for.
    pub(crate) sources: Vec<PageRef>,
}

/// Marks an operation in progress, so that an audit knows when the books stand still.
#[derive(Debug)]
pub(crate) struct Op<'a> {
    left: &'a AtomicU64,
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        self.left.plus(1);
    }
}

/// Evictions between two choices of the tenant that gives back.
const CHOICE_HOLDS: u64 = 32;

impl Pool {
    /// Books for `spec` over the given memory.
    ///
    /// # Errors
    /// Sizes that hold no page, or too many; no entropy for the secret.
    pub fn new(spec: Spec, options: &Options) -> Result<Self, Error> {
        let argument = |e: &dyn std::fmt::Display| Error::Argument(e.to_string());
        if options.max_tenants == 0 || options.max_tenants >= MAX_TENANTS {
            return Err(Error::Argument(format!(
                "max_tenants is {}; it must be between 1 and {}",
                options.max_tenants,
                MAX_TENANTS - 1
            )));
        }
        let device = spec.arena(options.device_bytes).map_err(|e| argument(&e))?;
        let host = match options.host_bytes {
            0 => ArenaLayout { bytes: 0, rounded_off: 0, extents: 0, reserved: 0, ..device.clone() },
            bytes => spec.arena(bytes).map_err(|e| argument(&e))?,
        };
        let layouts = [device, host];
        let smallest = spec.sizes().iter().copied().min().unwrap_or(1);
        let mut pages = 0u64;
        let mut capacity = [Units(0); TIERS];
        for (layout, capacity) in layouts.iter().zip(&mut capacity) {
            pages += layout.bytes / smallest;
            // The spec has refused arenas of more than 2^32 units.
            *capacity = Units(((layout.bytes - layout.reserved) / spec.unit()) as u32);
        }
        let pages = u32::try_from(pages).ok().filter(|&p| p < 1 << 31).ok_or_else(|| {
            Error::Argument(format!(
                "{pages} pages; a pool holds at most {}: use larger pages",
                (1u32 << 31) - 1
            ))
        })?;
        let groups: Vec<_> = (0..spec.groups().len())
            .map(|g| {
                let class = spec.class_of(GroupId(g as u8));
                GroupInfo { class, units: spec.units(class) }
            })
            .collect();
        let class = |(at, class): (usize, &crate::spec::ClassSpec)| ClassInfo {
            group: class.group,
            size: class.size,
            units: spec.units(ClassId(at as u8)),
        };
        let classes = spec.classes().iter().enumerate().map(class).collect();
        let largest = groups.iter().map(|g| g.units).max().unwrap_or(1);
        let secret = match options.secret.clone() {
            Some(secret) => secret,
            None => Secret::random().map_err(|e| argument(&e))?,
        };
        let max_tenants = options.max_tenants + 1; // the root
        let arenas = layouts.each_ref().map(Arena::new);
        Ok(Self {
            slots: Slots::new(pages),
            pages: Pages::new(pages, max_tenants * NODES_PER_TENANT, spec.page_tokens()),
            hasher: Hasher::new(secret, options.force_collisions),
            index: Index::new(pages),
            orders: Orders::new(max_tenants, pages),
            ledger: Ledger::new(capacity, options.max_tenants, Units(largest.saturating_mul(64)))
                .map_err(|e| argument(&e))?,
            events: Events::new(options.events),
            stats: Stats::new(max_tenants),
            clock: if options.manual_clock { Clock::manual() } else { Clock::system() },
            pins: Pins::new(),
            quiescence: Quiescence::new(&arenas),
            compare_tokens: options.compare_tokens,
            weights_epoch: AtomicU64::new(0),
            moves: AtomicU64::new(0),
            victim: AtomicU64::new(0),
            lanes: AtomicU64::new(0),
            closed: AtomicU32::new(0),
            ops: Words::zeroed(LANES * 8),
            arenas,
            layouts,
            states: spec
                .groups()
                .iter()
                .enumerate()
                .map(|(g, group)| u64::from(group.kind == GroupKind::State) << g)
                .sum(),
            groups,
            classes,
            spec,
        })
    }

    /// The geometry.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The next lane, in turn: handles made one after the other use different hot words.
    pub(crate) fn next_lane(&self) -> Lane {
        Lane::wrapped(self.lanes.plus(1))
    }

    /// An operation begins.
    #[inline]
    pub(crate) fn enter(&self, lane: Lane) -> Op<'_> {
        self.ops[lane.as_usize() * 8].plus(1);
        Op { left: &self.ops[lane.as_usize() * 8 + 1] }
    }

    /// Refuse every new operation.
    pub fn close(&self) {
        self.closed.put(1);
    }

    /// Whether the pool was closed.
    pub fn is_closed(&self) -> bool {
        self.closed.get() != 0
    }

    /// # Errors
    /// The pool was closed.
    pub fn check_open(&self) -> Result<(), Error> {
        if self.is_closed() { Err(Error::Closed("the pool")) } else { Ok(()) }
    }

    pub(crate) fn arena(&self, tier: Tier) -> &Arena {
        &self.arenas[tier.as_usize()]
    }

    pub(crate) fn is_state(&self, group: GroupId) -> bool {
        self.states & 1 << group.0 != 0
    }

    pub(crate) fn has_states(&self) -> bool {
        self.states != 0
    }

    pub(crate) fn check_tenant(&self, tenant: TenantId) -> Result<(), Error> {
        match tenant.0 > 0 && self.ledger.is_live(tenant) {
            true => Ok(()),
            false => Err(Error::UnknownTenant(tenant.to_string())),
        }
    }

    pub(crate) fn check_group(&self, group: GroupId) -> Result<(), Error> {
        let groups = self.groups.len();
        if group.as_usize() < groups { Ok(()) } else { Err(Error::NoGroup { group, groups }) }
    }

    pub(crate) fn weights_epoch_now(&self) -> u64 {
        self.weights_epoch.get()
    }

    pub(crate) fn bytes(&self, units: u32) -> u64 {
        u64::from(units) * self.spec.unit()
    }

    pub(crate) fn refusal(&self, refused: Refused) -> Refusal {
        Refusal {
            why: match refused.why {
                ledger::Why::Limit => Why::Limit,
                _ => Why::Claim,
            },
            tier: refused.tier,
            tenant: refused.tenant,
            level: refused.level,
            asked: self.bytes(refused.asked.0),
            room: self.bytes(refused.room.0),
        }
    }

    /// Charge, taking the cached pages under a limit that is in the way.
    fn charge(&self, lane: Lane, payer: TenantId, units: u32) -> Result<(), Refusal> {
        self.pay(lane, payer, || self.ledger.charge(Tier::Device, payer, lane, Units(units)))
    }

    /// Promise `units` to a sequence of `payer`, taking cached pages under a limit that is in the way.
    pub(crate) fn promise(&self, lane: Lane, payer: TenantId, units: u32) -> Result<(), Refusal> {
        self.pay(lane, payer, || self.ledger.promise(Tier::Device, payer, lane, Units(units)))
    }

    fn pay(
        &self,
        lane: Lane,
        payer: TenantId,
        mut attempt: impl FnMut() -> Result<(), Refused>,
    ) -> Result<(), Refusal> {
        loop {
            let Err(refused) = attempt() else { return Ok(()) };
            if refused.why != ledger::Why::Limit {
                return Err(self.refusal(refused));
            }
            // At a limit the cached pages below it go first, the tenant's own before its neighbours'.
            let mut missing = refused.asked.0.saturating_sub(refused.room.0).max(1);
            let mut evicted = false;
            while missing > 0 {
                let own = self.evict_of(lane, payer, payer);
                let Some(units) = own.or_else(|| self.evict_within(lane, refused.level, payer)) else {
                    break;
                };
                evicted = true;
                missing = missing.saturating_sub(units);
            }
            if !evicted {
                return Err(self.refusal(refused));
            }
        }
    }

    /// Take `n` new pages of `group` for `payer`: all or none. Appends them to `out`; their frames are then in
    /// `scratch.frames`, in the same order. What `promise` covers is taken from it.
    pub(crate) fn take(
        &self,
        lane: Lane,
        payer: TenantId,
        group: GroupId,
        n: usize,
        promise: &mut u32,
        out: &mut Vec<PageRef>,
        scratch: &mut Scratch,
    ) -> Result<(), Refusal> {
        let GroupInfo { class, units } = self.groups[group.as_usize()];
        let Some(total) = u32::try_from(n).ok().and_then(|n| n.checked_mul(units)) else {
            let asked = n as u64 * self.bytes(units);
            let room = self.bytes(self.ledger.capacity(Tier::Device).0);
            return Err(Refusal {
                why: Why::Claim,
                tier: Tier::Device,
                tenant: payer,
                level: TenantId(0),
                asked,
                room,
            });
        };
        let promised = total.min(*promise);
        if promised < total {
            self.charge(lane, payer, total - promised)?;
        }
        if promised > 0 {
            self.ledger.charge_promised(Tier::Device, payer, lane, Units(promised));
        }
        if let Err(refusal) = self.claim_frames(lane, payer, class, n, &mut scratch.frames) {
            if promised > 0 {
                self.ledger.discharge_promised(Tier::Device, payer, lane, Units(promised));
            }
            if promised < total {
                self.ledger.discharge(Tier::Device, payer, lane, Units(total - promised));
            }
            return Err(refusal);
        }
        *promise -= promised;
        scratch.ids.clear();
        let ids = self.slots.claim(lane, n, &mut scratch.ids);
        // Ids come back before frames do, and there is one for every frame of the smallest size.
        debug_assert_eq!(ids, n, "an id for every frame");
        out.reserve(n);
        for (&id, &frame) in scratch.ids.iter().zip(&scratch.frames) {
            out.push(self.begin(id, payer, class, frame));
        }
        self.stats.count(lane, Counter::PagesAllocated, n as u64);
        Ok(())
    }

    /// free -> held, of an id and a frame that the caller has claimed and charged.
    #[inline]
    fn begin(&self, id: PageId, payer: TenantId, class: ClassId, frame: FrameId) -> PageRef {
        self.pages.set_payer(id, payer);
        self.pages.set_location(id, Location::new(Tier::Device, class, frame));
        let word = self.pages.transit(id, |w| w.take());
        debug_assert!(word.is_ok(), "{id} was in the free set, and yet {word:?}");
        let (Ok(word) | Err(word)) = word;
        PageRef { id, generation: word.generation() }
    }

    /// Claim up to `n` free frames and as many ids, into `scratch`, without taking anything back for them.
    pub(crate) fn claim_free(&self, lane: Lane, group: GroupId, n: usize, scratch: &mut Scratch) -> usize {
        let size = self.classes[self.groups[group.as_usize()].class.as_usize()].size;
        scratch.frames.clear();
        scratch.ids.clear();
        let got = self.arena(Tier::Device).claim(size, lane, n, &mut scratch.frames);
        let ids = self.slots.claim(lane, got, &mut scratch.ids);
        debug_assert_eq!(ids, got, "an id for every frame");
        got
    }

    /// One page of what [`Self::claim_free`] got, charged to `payer` or taken from `promise`. `None`: not without asking
    /// further, so [`Self::take`] has to.
    #[inline]
    pub(crate) fn take_claimed(
        &self,
        lane: Lane,
        payer: TenantId,
        group: GroupId,
        promise: Option<&mut u32>,
        scratch: &mut Scratch,
    ) -> Option<(PageRef, FrameId)> {
        let GroupInfo { class, units } = self.groups[group.as_usize()];
        let (&id, &frame) = (scratch.ids.last()?, scratch.frames.last()?);
        match promise {
            Some(promise) if *promise >= units => {
                self.ledger.charge_promised(Tier::Device, payer, lane, Units(units));
                *promise -= units;
            }
            Some(0) | None => self.ledger.charge(Tier::Device, payer, lane, Units(units)).ok()?,
            Some(_) => return None,
        }
        scratch.ids.pop();
        scratch.frames.pop();
        Some((self.begin(id, payer, class, frame), frame))
    }

    /// Give back what [`Self::claim_free`] got and nobody took.
    pub(crate) fn unclaim(&self, lane: Lane, group: GroupId, taken: usize, scratch: &Scratch) {
        if !scratch.ids.is_empty() {
            let size = self.classes[self.groups[group.as_usize()].class.as_usize()].size;
            // Both were claimed a moment ago.
            let _ = self.slots.release_many(&scratch.ids);
            let _ = self.arena(Tier::Device).release_many(size, &scratch.frames);
        }
        self.stats.count(lane, Counter::PagesAllocated, taken as u64);
    }

    /// Frames for `n` pages of `class`, evicting where none are free.
    fn claim_frames(
        &self,
        lane: Lane,
        payer: TenantId,
        class: ClassId,
        n: usize,
        frames: &mut Vec<FrameId>,
    ) -> Result<(), Refusal> {
        let size = self.classes[class.as_usize()].size;
        let arena = self.arena(Tier::Device);
        frames.clear();
        let mut got = arena.claim(size, lane, n, frames);
        while got < n {
            let evicted = self.evict(lane, payer, n - got);
            if evicted == 0 && self.quiescence.drain(&self.arenas) == 0 {
                break;
            }
            got += arena.claim(size, lane, n - got, frames);
        }
        if got == n {
            return Ok(());
        }
        // They were claimed a moment ago.
        let _ = arena.release_many(size, frames);
        frames.clear();
        let page = self.spec.sizes()[size.as_usize()];
        let (asked, room) = (n as u64 * page, arena.free_bytes());
        let why = if room >= asked { Why::Fragmented } else { Why::Frames };
        Err(Refusal { why, tier: Tier::Device, tenant: payer, level: TenantId(0), asked, room })
    }

    /// Evict up to `n` cached pages: of the tenants most over their claim first. How many were.
    fn evict(&self, lane: Lane, asker: TenantId, n: usize) -> usize {
        let mut evicted = 0;
        while evicted < n {
            let hint = self.victim.peek();
            let (tenant, holds) = (TenantId(hint as u32), hint >> 32);
            if holds > 0 && self.evict_of(lane, tenant, asker).is_some() {
                self.victim.put((holds - 1) << 32 | u64::from(tenant.0));
                evicted += 1;
                continue;
            }
            if self.evict_within(lane, TenantId(0), asker).is_none() {
                break;
            }
            evicted += 1;
        }
        evicted
    }

    /// Evict a cached page of the subtree of `level`, of the tenant there that should give back first: its units.
    fn evict_within(&self, lane: Lane, level: TenantId, asker: TenantId) -> Option<u32> {
        let worst = self.ledger.worst(Tier::Device, level, |_| false)?;
        if let Some(units) = self.evict_of(lane, worst, asker) {
            if level == TenantId(0) {
                self.victim.put(CHOICE_HOLDS << 32 | u64::from(worst.0));
            }
            return Some(units);
        }
        // Its cached pages are parents of others' pages, which have to leave first, or on their way: look at everybody.
        let all = (0..=self.ledger.top()).map(TenantId).filter(|&t| self.ledger.is_under(t, level));
        all.into_iter().find_map(|t| self.evict_of(lane, t, asker))
    }

    /// Evict one cached page of `tenant` for `asker`: its units, if there was one.
    fn evict_of(&self, lane: Lane, tenant: TenantId, asker: TenantId) -> Option<u32> {
        let id = self.orders.victim(&self.pages, tenant, self.ticks())?;
        self.stats.count_for(tenant, TenantCounter::Evicted, 1);
        if tenant == asker {
            self.stats.count(lane, Counter::EvictedOwn, 1);
        } else {
            self.stats.count(lane, Counter::EvictedForeign, 1);
            self.stats.count_for(tenant, TenantCounter::EvictedByOthers, 1);
        }
        Some(self.expel(id))
    }

    /// The pool's time as the eviction orders count it: protection ends to the second.
    pub(crate) fn ticks(&self) -> u64 {
        self.clock.now_ms() / 1000
    }

    /// A refusal that somebody gets to see.
    pub(crate) fn count_refusal(&self, lane: Lane, refusal: &Refusal) {
        let counter = match refusal.why {
            Why::Limit => Counter::RefusedLimit,
            Why::Claim => Counter::RefusedClaim,
            Why::Frames => Counter::RefusedFrames,
            Why::Fragmented => Counter::RefusedFragmented,
            Why::Row | Why::Budget => return,
        };
        self.stats.count(lane, counter, 1);
        self.stats.count_for(refusal.tenant, TenantCounter::Refused, 1);
    }

    /// Take a page that is LEAVING and was cached out of the books: its units.
    pub(crate) fn expel(&self, id: PageId) -> u32 {
        let payer = self.pages.payer(id);
        let location = self.pages.location(id);
        let tier = location.tier().unwrap_or(Tier::Device);
        let class = self.classes[location.class().as_usize()];
        let units = class.units;
        if self.pages.read(id).is_indexed() {
            self.unindex(id, class.group);
        }
        self.retire(id);
        // The id was taken with the page.
        let _ = self.slots.release(id);
        // The frame was taken with the page, so this can't be a second free: the arena would count it.
        let _ = self.arena(tier).release(class.size, location.frame());
        self.ledger.drop_cached(tier, payer, Units(units));
        units
    }

    /// leaving -> free.
    pub(crate) fn retire(&self, id: PageId) {
        self.pages.set_location(id, Location::NOWHERE);
        let word = self.pages.transit(id, |w| w.retire());
        debug_assert!(word.is_ok(), "{id} is leaving, and yet {word:?}");
    }
}

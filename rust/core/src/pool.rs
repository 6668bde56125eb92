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
//! | evict | page word LEAVING, index, id, frame, parent's child count, cached bytes down | charged bytes without a page |
//! | publish | names and tokens, parent's child count, page word INDEXED, index | a page with a key that nobody finds yet |
//!
//! So charged bytes are never less than the bytes of allocated frames, and what is reclaimable is never promised twice.
//! An operation that fails walks back the way it came.
//!
//! Taking and evicting are here; publishing, hitting and letting go in life.rs.
//!
//! # The one way upward
//!
//! The books know nothing of plans, but for this: before an allocation is refused, what is overdue ends, and a plan's leases are
//! among that ([`Pool::expire`]). For the clock ends a plan whose maker is gone, and nobody else may come by; a hook that the
//! rooms above would hand in would say the same in more words. It never waits.
//!
//! Callers: sequence.rs, batch.rs, face.rs, admit.rs, audit.rs. Nothing here blocks: policy (tenants, pins) has its own
//! small locks in ledger.rs and pins.rs.

use crate::{
    clock::Clock,
    error::{Error, Refusal, Why},
    event::{Events, MAX_EVENTS},
    evict::{NODES_PER_TENANT, Orders},
    frame::{Arena, Quiescence, Slots},
    hash::{ChainKey, Hasher, Secret},
    index::{Index, MAX_PAGES},
    ledger::{self, Ledger, ROOT, Refused},
    life::News,
    page::{MAX_TENANTS, Pages},
    pins::Pins,
    plan::Plans,
    preempt::Turns,
    reclaim::Freezes,
    spec::{ArenaLayout, GroupKind, Spec},
    stats::{Counter, Stats, TenantCounter},
    sync::{Atom, AtomicU32, AtomicU64, Words, pause},
    word::{
        ClassId, FrameId, GroupId, LANES, Lane, PageId, PageRef, SizeId, TIERS, TenantId, Tier, Units,
        page::{Location, PageWord},
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
    pub(crate) plans: Plans,
    /// The last victim of each tenant.
    pub(crate) victims: Turns,
    /// Pages off the device that nobody holds and an order lists (keep.rs).
    pub(crate) lost: AtomicU64,
    /// Tokens a second that a prompt is computed with; 0: not known.
    pub(crate) recompute_speed: AtomicU64,
    pub(crate) quiescence: Quiescence,
    pub(crate) compare_tokens: bool,
    /// Bumped when the weights change; part of every root key.
    pub(crate) weights_epoch: AtomicU64,
    /// The tenant whose cached pages go next (bits 0-31) and for how many evictions the choice holds (32-63).
    victim: AtomicU64,
    /// Handles made so far.
    turns: AtomicU64,
    closed: AtomicU32,
    /// Per lane a cache line: operations entered, operations left.
    pub(crate) ops: Words,
    pub(crate) freezes: Freezes,
    /// Per tenant: watermarks (reclaim.rs).
    pub(crate) marks: Words,
    /// Per tenant: sequences that are open, whether or not they hold pages.
    pub(crate) sequences: Words,
}

/// Lists that operations use again and again, so that the hot paths don't allocate.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) frames: Vec<FrameId>,
    pub(crate) ids: Vec<PageId>,
    pub(crate) queue: Vec<PageId>,
    pub(crate) reversed: Vec<PageRef>,
    pub(crate) keys: Vec<ChainKey>,
    pub(crate) news: News,
    /// Units of pages being let go that are to be promised again, with their payers.
    pub(crate) again: Vec<(TenantId, u32)>,
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

/// Pages evicted for a limit between two looks at it.
const MOST_AT_ONCE: u32 = 64;
/// How often an allocation looks again when the ledger has room and nothing is there to take. A thread that stopped with
/// something in its hand makes others look so often in vain, and holds nobody up.
const PATIENCE: u32 = 100;
/// Evictions between two choices of the tenant that gives back.
const CHOICE_HOLDS: u64 = 32;

/// Tables below this many words are not asked for in advance.
const SMALL_TABLES: usize = 1 << 27;
/// Words of a page in its largest table, and in all others together but for the tokens; of a tenant; of an event.
const PAGE_WORDS: usize = crate::page::STRIDE;
const OTHER_PAGE_WORDS: usize = 2;
const TENANT_WORDS: usize = 400;
const EVENT_WORDS: usize = crate::event::SLOT;

/// Refuse books for which there is no memory, before any of it is taken.
fn check_memory(pages: u32, page_tokens: u32, options: &Options) -> Result<(), Error> {
    let pages = pages as usize;
    let tables = [
        pages * PAGE_WORDS,
        pages * OTHER_PAGE_WORDS,
        pages.saturating_mul((page_tokens as usize).div_ceil(2)),
        options.max_tenants as usize * TENANT_WORDS,
        options.events.min(MAX_EVENTS) as usize * EVENT_WORDS,
    ];
    let words = tables.iter().fold(0, |sum: usize, &n| sum.saturating_add(n));
    if words < SMALL_TABLES || Words::fit(&tables) {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "the books for {pages} pages of {page_tokens} tokens, {} tenants and {} events take about {} GiB of memory, \
         which the system does not give; use fewer or larger pages, fewer tenants or fewer events",
        options.max_tenants,
        options.events,
        words >> 27
    )))
}

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
        let pages = u32::try_from(pages).ok().filter(|&p| p <= MAX_PAGES).ok_or_else(|| {
            Error::Argument(format!("{pages} pages; a pool holds at most {MAX_PAGES}: use larger pages"))
        })?;
        check_memory(pages, spec.page_tokens(), options)?;
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
        let secret = match options.secret {
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
            plans: Plans::new().map_err(|e| argument(&e))?,
            victims: Turns::default(),
            lost: AtomicU64::new(0),
            recompute_speed: AtomicU64::new(0),
            quiescence: Quiescence::new(&arenas),
            compare_tokens: options.compare_tokens,
            weights_epoch: AtomicU64::new(0),
            victim: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            closed: AtomicU32::new(0),
            ops: Words::zeroed(LANES * 8),
            freezes: Freezes::new(max_tenants as usize),
            marks: Words::zeroed(max_tenants as usize),
            sequences: Words::zeroed(max_tenants as usize),
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
        Lane::wrapped(self.next_turn())
    }

    /// A number that rises with each handle.
    pub(crate) fn next_turn(&self) -> u64 {
        self.turns.plus(1)
    }

    /// An operation begins.
    #[inline]
    pub(crate) fn enter(&self, lane: Lane) -> Op<'_> {
        self.ops[lane.as_usize() * 8].plus(1);
        Op { left: &self.ops[lane.as_usize() * 8 + 1] }
    }

    /// Refuse every new operation. What was begun can be ended: steps be committed, plans be committed or aborted, pins be
    /// ended, and everything be given back.
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

    /// Usable bytes of a tier's arena, those that are never given out included; 0 without a host tier.
    pub fn arena_bytes(&self, tier: Tier) -> u64 {
        self.layouts[tier.as_usize()].bytes
    }

    /// Whether a place is to be emptied.
    pub(crate) fn is_draining(&self, at: Location) -> bool {
        let size = self.classes[at.class().as_usize()].size;
        self.arena(at.tier().unwrap_or(Tier::Device)).is_draining(size, at.frame())
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

    /// A tenant, or all of them.
    pub(crate) fn check_level(&self, tenant: TenantId) -> Result<(), Error> {
        if tenant == ROOT { Ok(()) } else { self.check_tenant(tenant) }
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
                // Nobody can raise the limit of the root: it is the capacity.
                ledger::Why::Limit if refused.level != ledger::ROOT => Why::Limit,
                _ => Why::Claim,
            },
            tier: refused.tier,
            tenant: refused.tenant,
            level: refused.level,
            asked: self.bytes(refused.asked.0),
            room: self.bytes(refused.room.0),
        }
    }

    /// Charge, taking the cached pages under a limit that is in the way; places of `size` go to `scratch`.
    pub(crate) fn charge(
        &self,
        lane: Lane,
        payer: TenantId,
        units: u32,
        size: SizeId,
        scratch: &mut Scratch,
    ) -> Result<(), Refusal> {
        let attempt = || self.ledger.charge(Tier::Device, payer, lane, Units(units));
        self.pay(lane, payer, attempt, Some((size, scratch)))
    }

    /// Promise `units` to a sequence of `payer`, taking cached pages under a limit that is in the way.
    pub(crate) fn promise(&self, lane: Lane, payer: TenantId, units: u32) -> Result<(), Refusal> {
        self.pay(lane, payer, || self.ledger.promise(Tier::Device, payer, lane, Units(units)), None)
    }

    /// Give promises back.
    pub(crate) fn unpromise(&self, lane: Lane, promises: &mut Vec<(TenantId, u32)>) {
        for (payer, units) in promises.drain(..).filter(|p| p.1 > 0) {
            self.ledger.unpromise(Tier::Device, payer, lane, Units(units));
        }
    }

    fn pay(
        &self,
        lane: Lane,
        payer: TenantId,
        mut attempt: impl FnMut() -> Result<(), Refused>,
        mut wanted: Option<(SizeId, &mut Scratch)>,
    ) -> Result<(), Refusal> {
        let mut patience = PATIENCE;
        loop {
            let Err(refused) = attempt() else { return Ok(()) };
            if self.expire() > 0 {
                continue;
            }
            if refused.why != ledger::Why::Limit {
                return Err(self.refusal(refused));
            }
            // Cached pages are given up only for what fits then.
            let room = self.ledger.room(Tier::Device, payer, refused.asked);
            if room.now < refused.asked {
                let why = if room.level == ledger::ROOT { ledger::Why::Claim } else { ledger::Why::Limit };
                return Err(self.refusal(Refused { why, level: room.level, room: room.now, ..refused }));
            }
            let mut missing = refused.asked.0.saturating_sub(refused.room.0).max(1);
            let mut evicted = false;
            while missing > 0 {
                // Never more than needed: the loop comes again.
                let largest = self.classes.iter().map(|c| c.units).max().unwrap_or(1).max(1);
                let pages = missing.div_ceil(largest).min(MOST_AT_ONCE) as usize;
                let (got, units) = self.evict_below(lane, refused.level, payer, pages, &mut wanted);
                if got == 0 {
                    break;
                }
                evicted = true;
                missing = missing.saturating_sub(units);
            }
            if !evicted && self.drop_lost_pages(lane) == 0 {
                // There is room, so others have it in hand: a page on its way out, a charge that is being taken back.
                patience -= 1;
                if patience == 0 {
                    return Err(self.refusal(refused));
                }
                pause();
            }
        }
    }

    /// Take `n` new pages of `group` for `payer`: all or none. Appends them to `out`; their frames are then in
    /// `scratch.frames`, in the same order. What `promise` covers is taken from it.
    #[expect(clippy::too_many_arguments, reason = "who, what, how many, out of which promise, where to")]
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
        let size = self.classes[class.as_usize()].size;
        scratch.frames.clear();
        scratch.ids.clear();
        let promised = total.min(*promise);
        if promised < total
            && let Err(refusal) = self.charge(lane, payer, total - promised, size, scratch)
        {
            self.unclaim(size, scratch);
            return Err(refusal);
        }
        if promised > 0 {
            self.ledger.charge_promised(Tier::Device, payer, lane, Units(promised));
        }
        if let Err(refusal) = self.claim(lane, payer, size, n, scratch) {
            if promised > 0 {
                self.ledger.discharge_promised(Tier::Device, payer, lane, Units(promised));
            }
            if promised < total {
                self.ledger.discharge(Tier::Device, payer, lane, Units(total - promised));
            }
            return Err(refusal);
        }
        *promise -= promised;
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
        // Whoever takes a page writes to it.
        self.pages.set_location(id, Location::new(Tier::Device, class, frame).open());
        let word = self.pages.step(id, PageWord::take);
        PageRef { id, generation: word.generation() }
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

    /// Ids and frames for `n` pages, beside those that `scratch` has already, evicting where none are free.
    pub(crate) fn claim(
        &self,
        lane: Lane,
        payer: TenantId,
        size: SizeId,
        n: usize,
        scratch: &mut Scratch,
    ) -> Result<(), Refusal> {
        let mut patience = PATIENCE;
        let mut got = scratch.ids.len();
        got += self.claim_free(lane, size, n.saturating_sub(got), scratch);
        while got < n {
            // What moved away and nobody shows costs nobody a hit. What the arrays of a quiet batch show costs it a step that looks
            // at all its places, so cached pages go before that.
            let drained = self.quiescence.drain(&self.arenas);
            let evicted = if drained > 0 { 0 } else { self.evict(lane, payer, n - got, size, scratch) };
            if drained + evicted == 0
                && self.quiescence.drain_quiet(&self.arenas) == 0
                && self.expire() == 0
                && self.drop_lost_pages(lane) == 0
                && self.arena(Tier::Device).undrain_all(size) == 0
            {
                // With one size of frames the ledger's word is enough, so others have what is missing in hand.
                patience -= 1;
                if patience == 0 || self.spec.sizes().len() > 1 || !self.quiescence.is_empty() {
                    break;
                }
                pause();
            }
            // What was evicted and fits is in `scratch`; what was of another size may have freed an extent.
            got = scratch.ids.len();
            got += self.claim_free(lane, size, n - got, scratch);
        }
        if got >= n {
            // A limit that was deep under use may have given back more.
            self.unclaim_from(n, size, scratch);
            return Ok(());
        }
        self.unclaim(size, scratch);
        let arena = self.arena(Tier::Device);
        let page = self.spec.sizes()[size.as_usize()];
        let (asked, room) = (n as u64 * page, arena.free_bytes());
        let why = if room >= asked { Why::Fragmented } else { Why::Frames };
        Err(Refusal { why, tier: Tier::Device, tenant: payer, level: TenantId(0), asked, room })
    }

    /// Claim up to `n` free frames and as many ids, behind what is in `scratch`, without taking anything back for them.
    pub(crate) fn claim_free(&self, lane: Lane, size: SizeId, n: usize, scratch: &mut Scratch) -> usize {
        if n == 0 {
            return 0;
        }
        let got = self.arena(Tier::Device).claim(size, lane, n, &mut scratch.frames);
        let ids = self.slots.claim(lane, got, &mut scratch.ids);
        // Ids come back before frames do, and there is one for every frame of the smallest size: but pages that were cut, and
        // that others continue, have one and no frame.
        if ids < got {
            let surplus = scratch.frames.split_off(scratch.frames.len() - (got - ids));
            let _ = self.arena(Tier::Device).release_many(size, &surplus);
        }
        ids
    }

    /// Give back ids and frames that nobody took.
    pub(crate) fn unclaim(&self, size: SizeId, scratch: &mut Scratch) {
        self.unclaim_from(0, size, scratch);
    }

    fn unclaim_from(&self, keep: usize, size: SizeId, scratch: &mut Scratch) {
        if scratch.ids.len() > keep {
            // Both were claimed a moment ago.
            let _ = self.slots.release_many(&scratch.ids[keep..]);
            let _ = self.arena(Tier::Device).release_many(size, &scratch.frames[keep..]);
            scratch.ids.truncate(keep);
            scratch.frames.truncate(keep);
        }
    }

    /// Evict up to `n` cached pages: of the tenants most over their claim first. How many were.
    fn evict(&self, lane: Lane, asker: TenantId, n: usize, size: SizeId, scratch: &mut Scratch) -> usize {
        let mut wanted = Some((size, scratch));
        let mut evicted = 0;
        while evicted < n {
            let (got, _) = self.evict_below(lane, ROOT, asker, n - evicted, &mut wanted);
            if got == 0 {
                break;
            }
            evicted += got;
        }
        evicted
    }

    /// Evict some cached pages, `n` at most, in the subtree of `level`: pages, units. At a tenant's limit the asker's own
    /// go first, in the whole pool those of whoever is most over its claim. In the end neither hits nor protection count:
    /// they are a bias, and nothing is refused for it.
    fn evict_below(
        &self,
        lane: Lane,
        level: TenantId,
        asker: TenantId,
        n: usize,
        wanted: &mut Option<(SizeId, &mut Scratch)>,
    ) -> (usize, u32) {
        let hint = self.victim.peek();
        let (mut tenant, mut holds) =
            if level == ROOT { (TenantId(hint as u32), hint >> 32) } else { (asker, n as u64) };
        let mut got = (0, 0);
        if holds > 0 {
            got = self.evict_of(lane, tenant, asker, n.min(holds as usize), false, wanted);
        }
        for last_resort in [false, true] {
            let mut tried = Vec::new();
            while got.0 == 0
                && let Some(worst) = self.worst(level, &tried)
            {
                (tenant, holds) = (worst, CHOICE_HOLDS.max(u64::from(self.ledger.top()) / 8));
                got = self.evict_of(lane, tenant, asker, n.min(holds as usize), last_resort, wanted);
                // Its pages are on their way, or others' pages continue them: then it is the next one's turn.
                tried.push(worst);
            }
        }
        if level == ROOT && got.0 > 0 {
            self.victim.put(holds.saturating_sub(got.0 as u64) << 32 | u64::from(tenant.0));
        }
        got
    }

    /// The tenant in the subtree of `level` that should give back a cached page first, of those not tried yet.
    fn worst(&self, level: TenantId, tried: &[TenantId]) -> Option<TenantId> {
        self.ledger.worst(Tier::Device, level, |t| tried.contains(&t))
    }

    /// Evict up to `n` cached pages of `tenant` for `asker`: pages, units. Ids and frames of a size that is wanted go to a
    /// scratch instead of back into the free sets.
    pub(crate) fn evict_of(
        &self,
        lane: Lane,
        tenant: TenantId,
        asker: TenantId,
        n: usize,
        last_resort: bool,
        wanted: &mut Option<(SizeId, &mut Scratch)>,
    ) -> (usize, u32) {
        let now = (!last_resort).then(|| self.ticks());
        // Pages that left the device wait in the order too, if others continued them when they were let go.
        let (mut units, mut elsewhere) = (0, 0);
        let pages = self.orders.victims(&self.pages, tenant, now, n, |id, word| {
            let (class, location, parent) = self.take_out(id, word);
            match wanted {
                Some((size, scratch))
                    if class.size == *size
                        && !location.is_gone()
                        && location.tier() == Some(Tier::Device)
                        && !self.is_draining(location) =>
                {
                    scratch.ids.push(id);
                    scratch.frames.push(location.frame());
                }
                _ => self.free_place(id, class, location),
            }
            match location.tier() {
                Some(Tier::Host) => elsewhere += class.units,
                _ => units += class.units,
            }
            parent
        });
        if elsewhere > 0 {
            self.ledger.drop_cached(Tier::Host, tenant, Units(elsewhere));
        }
        if pages > 0 {
            self.ledger.drop_cached(Tier::Device, tenant, Units(units));
            self.stats.count_for(tenant, TenantCounter::Evicted, pages as u64);
            if tenant == asker {
                self.stats.count(lane, Counter::EvictedOwn, pages as u64);
            } else {
                self.stats.count(lane, Counter::EvictedForeign, pages as u64);
                self.stats.count_for(tenant, TenantCounter::EvictedByOthers, pages as u64);
            }
        }
        (pages, units)
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
            Why::Row | Why::Budget | Why::Frozen => return,
        };
        self.stats.count(lane, counter, 1);
        self.stats.count_for(refusal.tenant, TenantCounter::Refused, 1);
    }

    /// Take a page that is LEAVING and was cached out of the books: the page that it continued, whose child count is still
    /// to be lowered.
    pub(crate) fn expel(&self, id: PageId, word: PageWord) -> Option<PageRef> {
        let payer = self.pages.payer(id);
        let (class, location, parent) = self.take_out(id, word);
        self.free_place(id, class, location);
        self.ledger.drop_cached(location.tier().unwrap_or(Tier::Device), payer, Units(class.units));
        parent
    }

    /// [`Self::expel`] of a page that leaves alone.
    pub(crate) fn expel_alone(&self, id: PageId, word: PageWord) {
        if let Some(parent) = self.expel(id, word) {
            self.orders.lose_child(&self.pages, parent);
        }
    }

    /// A LEAVING page out of the index and on to its next life; its id and frame are the caller's, and so is what is left
    /// to do for the page that it continued.
    fn take_out(&self, id: PageId, word: PageWord) -> (ClassInfo, Location, Option<PageRef>) {
        let location = self.pages.location(id);
        let class = self.class_at(location);
        let parent = if word.is_indexed() { self.unindex(id, class.group) } else { None };
        if location.tier() == Some(Tier::Host) {
            self.lost.minus(1);
        }
        self.retire(id);
        (class, location, parent)
    }

    /// Id and frame of a page that has ended into the free sets.
    pub(crate) fn free_place(&self, id: PageId, class: ClassInfo, location: Location) {
        // Both were taken with the page, so neither can be a second free; the sets would count it.
        let _ = self.slots.release(id);
        if location.is_gone() {
            return;
        }
        let _ = self.arena(location.tier().unwrap_or(Tier::Device)).release(class.size, location.frame());
    }

    /// leaving -> free.
    pub(crate) fn retire(&self, id: PageId) {
        self.pages.set_location(id, Location::NOWHERE);
        self.pages.step(id, PageWord::retire);
    }
}

//! Proof that the books balance, at any time, naming the page that breaks a rule. Nothing is ever repaired by guess.
//!
//! # What is checked
//!
//! | rule | where |
//! | --- | --- |
//! | a page word is in one of the states of word/page.rs | each page |
//! | a live page lies in an allocated frame, alone, and its id is taken; a free page's id is free | each page, frame map |
//! | a page that was cut has no frame and no charge, and can't be found | each page, sums |
//! | an INDEXED page is listed under its key; its parent lives, is INDEXED and counts it | each page |
//! | a cached page that stands in no order has a child in the index, or a copy uses it: it comes back with the end of that | each page |
//! | free + held + cached + pinned + leaving + in limbo + claimed by open plans = capacity, in bytes, per tier | sum over pages against the arena |
//! | held, cached and pinned units of each tenant equal the sums over its pages, and over the places in another tier that open plans have claimed | ledger |
//! | a page is pinned as often as the listed pins say | each page, pin list |
//! | promised + stock + those = charged; nothing was given back twice | ledger, arenas, slots |
//!
//! # While others work
//!
//! An operation visits several rooms, and between two of them the sums can't agree; a policy that changes is none, and waits
//! meanwhile. Operations are counted as they enter and leave, so the audit knows whether the books stood still while it read them: then the report is `exact`. Under load
//! it tries a few times and, if they never stood still, checks what holds for every page by itself at any instant (each
//! finding is looked at again before it is reported), gives the sums as it saw them, and says `exact: false`.
//!
//! Callers: the binding.

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

use crate::{
    index::is_linked_life,
    page::Link,
    plan::Move,
    pool::Pool,
    sync::{Atom, pause},
    word::{
        LANES, PageId, SizeId, TIERS, TenantId, Tier,
        page::{Location, PageWord},
    },
};

/// A rule that is broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The page, where it is one page's.
    pub page: Option<PageId>,
    /// The rule and the numbers.
    pub text: String,
}

/// One tier's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Balance {
    /// All bytes that can be given out.
    pub capacity: u64,
    /// In no page.
    pub free: u64,
    /// In pages with references, and in places of pages that a plan brings from another tier.
    pub held: u64,
    /// In pages kept for later hits.
    pub cached: u64,
    /// In pages kept by a pin alone.
    pub pinned: u64,
    /// On their way: pages being evicted or freed, frames that readers may still see, destinations of open plans.
    pub in_flight: u64,
}

impl Balance {
    /// `free + held + cached + pinned + in flight - capacity`; 0 when the books balance.
    pub fn excess(&self) -> i128 {
        let sum = [self.free, self.held, self.cached, self.pinned, self.in_flight]
            .map(i128::from)
            .iter()
            .sum::<i128>();
        sum - i128::from(self.capacity)
    }
}

/// What an audit found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The books stood still while they were read.
    pub exact: bool,
    /// Per tier.
    pub balance: [Balance; TIERS],
    /// Pages that are not free.
    pub pages: u32,
    /// Broken rules; empty is green. At most [`MAX_FINDINGS`].
    pub findings: Vec<Finding>,
}

/// More findings than this are not listed.
pub const MAX_FINDINGS: usize = 100;
const ATTEMPTS: usize = 20;

#[derive(Clone, Copy, Default)]
struct Sums {
    held: u64,
    cached: u64,
    pinned: u64,
}

struct Audit<'a> {
    pool: &'a Pool,
    findings: Vec<Finding>,
    balance: [Balance; TIERS],
    tenants: [Vec<Sums>; TIERS],
    /// Per tier and frame size: which frames a page lies in.
    seen: [Vec<Vec<u64>>; TIERS],
    children: Vec<u32>,
    pages: u32,
}

impl Pool {
    /// Check the books.
    pub fn audit(&self) -> Report {
        for attempt in 0..ATTEMPTS {
            let Some(before) = self.standing_still() else {
                pause();
                continue;
            };
            let mut audit = Audit::new(self);
            // A policy that changes is no operation, and takes what lies in stock in its hands for a moment.
            let policies = self.ledger.hold_policies();
            audit.read_pages(true);
            audit.compare_sums();
            drop(policies);
            // Stocks may move beside it all the same: what is broken is still so at the next look.
            if self.standing_still() == Some(before) && (audit.findings.is_empty() || attempt + 1 == ATTEMPTS)
            {
                return audit.report(true);
            }
        }
        let mut audit = Audit::new(self);
        audit.read_pages(false);
        audit.report(false)
    }
}

impl<'a> Audit<'a> {
    fn new(pool: &'a Pool) -> Self {
        let maps = Tier::ALL.map(|tier| {
            let arena = pool.arena(tier);
            let bytes = pool.layouts[tier.as_usize()].bytes;
            arena.sizes().iter().map(|size| vec![0; (bytes / size) as usize / 64 + 1]).collect()
        });
        let tenants = pool.ledger.top() as usize + 1;
        let mut audit = Self {
            pool,
            findings: Vec::new(),
            balance: Tier::ALL.map(|tier| {
                let arena = pool.arena(tier);
                Balance {
                    capacity: arena.capacity_bytes(),
                    free: arena.free_bytes(),
                    in_flight: arena
                        .sizes()
                        .iter()
                        .zip(0..)
                        .map(|(bytes, size)| pool.quiescence.frames(tier, SizeId(size)) * bytes)
                        .sum(),
                    ..Balance::default()
                }
            }),
            tenants: [vec![Sums::default(); tenants], vec![Sums::default(); tenants]],
            seen: maps,
            children: vec![0; pool.pages.len() as usize],
            pages: 0,
        };
        pool.plans.each_claimed(|m| audit.count_claimed(m));
        audit
    }

    /// A place that a plan has claimed for a page. One in another tier or class than the page's is charged already, and so
    /// is held; another one is the page's second place, and in flight.
    fn count_claimed(&mut self, m: &Move) {
        let (Some(tier), class) = (m.to.tier(), self.pool.class_at(m.to)) else { return };
        let (balance, bytes) = (&mut self.balance[tier.as_usize()], self.pool.bytes(class.units));
        if !m.crosses() {
            balance.in_flight += bytes;
            return;
        }
        balance.held += bytes;
        if let Some(sums) = self.tenants[tier.as_usize()].get_mut(m.payer.as_usize()) {
            sums.held += u64::from(class.units);
        }
    }

    fn find(&mut self, page: Option<PageId>, text: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(Finding { page, text });
        }
    }

    fn report(self, exact: bool) -> Report {
        Report { exact, balance: self.balance, pages: self.pages, findings: self.findings }
    }

    fn read_pages(&mut self, exact: bool) {
        let pool = self.pool;
        for id in (0..pool.pages.len()).map(PageId) {
            let word = pool.pages.read(id);
            let broken = self.check_page(id, word, exact);
            // Beside running operations a page may have moved on between two reads: what is broken stays so.
            if let Some(text) = broken
                && (exact || self.is_still_broken(id, word))
            {
                self.find(Some(id), format!("{id} ({word:?}): {text}"));
            }
        }
    }

    fn is_still_broken(&mut self, id: PageId, before: PageWord) -> bool {
        (0..ATTEMPTS).all(|_| {
            pause();
            let word = self.pool.pages.read(id);
            word == before && self.local_rule(id, word).is_some()
        })
    }

    /// What holds for a page by itself, at any instant.
    fn local_rule(&self, id: PageId, word: PageWord) -> Option<String> {
        let pool = self.pool;
        if word.is_free() {
            return (word.0 as u32 != 0).then(|| "free, and yet it has references, pins or flags".into());
        }
        let location = pool.pages.location(id);
        if word.is_leaving() && (word.is_held() || word.pins() > 0) {
            return Some("leaving, and yet held or pinned".into());
        }
        let Some(tier) = location.tier() else {
            return (!word.is_leaving()).then(|| "live, and yet it lies nowhere".into());
        };
        let Some(class) = pool.spec.classes().get(location.class().as_usize()) else {
            return Some(format!("lies in {location:?}, whose class does not exist"));
        };
        if location.is_gone() && (tier != Tier::Device || pool.is_small(location)) {
            return Some(format!("lies in {location:?}, where nothing ever lies"));
        }
        if location.is_gone() && !word.is_leaving() && !word.is_away() {
            return Some("it was cut, and yet it can be found".into());
        }
        if !location.is_gone()
            && !word.is_leaving()
            && !pool.arena(tier).is_allocated(class.size, location.frame())
        {
            return Some(format!("lies in {location:?}, and that frame is free"));
        }
        if !pool.slots.is_allocated(id) && !word.is_leaving() {
            return Some("live, and yet its id is in the free set".into());
        }
        if pool.ledger.parent(pool.pages.payer(id)).is_none() && pool.pages.payer(id) != TenantId(0) {
            return Some(format!("its payer {} is no tenant", pool.pages.payer(id)));
        }
        None
    }

    fn check_page(&mut self, id: PageId, word: PageWord, exact: bool) -> Option<String> {
        let pool = self.pool;
        if word.is_free() {
            if exact && pool.slots.is_allocated(id) {
                return Some("free, and yet its id is not in the free set".into());
            }
            return self.local_rule(id, word);
        }
        self.pages += 1;
        let broken = self.local_rule(id, word);
        let location = pool.pages.location(id);
        let (Some(tier), None) = (location.tier(), &broken) else { return broken };
        self.count(id, word, tier, location);
        if !exact {
            return None;
        }
        if !location.is_gone() {
            let size = pool.spec.classes()[location.class().as_usize()].size;
            let map = &mut self.seen[tier.as_usize()][size.as_usize()];
            let (at, bit) = (location.frame().as_usize() / 64, 1 << (location.frame().0 % 64));
            if map[at] & bit != 0 {
                return Some(format!("lies in {location:?}, where another page lies too"));
            }
            map[at] |= bit;
        }
        if word.is_leaving() {
            return Some("leaving, and nobody is taking it out".into());
        }
        if !word.is_indexed() && !word.is_held() && !word.is_queued() && !word.is_orphan() {
            return Some("neither held nor findable, and yet not free".into());
        }
        // (Beside others it may be about to be listed.)
        if word.is_indexed() && !pool.index.lists(pool.pages.key(id), id) {
            return Some("has a key, and the index does not list it".into());
        }
        if let (true, Link::Page(parent)) = (word.is_indexed(), pool.pages.link(id)) {
            match self.children.get_mut(parent.id.as_usize()) {
                Some(children) => *children += 1,
                None => return Some(format!("continues {parent:?}, which is no page")),
            }
            let above = pool.pages.read(parent.id);
            if !above.is_indexed() || !is_linked_life(parent.generation, above.generation()) {
                return Some(format!("continues {parent:?}, which has gone: nobody can reach it"));
            }
        }
        None
    }

    fn count(&mut self, id: PageId, word: PageWord, tier: Tier, location: Location) {
        let pool = self.pool;
        let units = u64::from(pool.class_at(location).units);
        let bytes = pool.bytes(units as u32);
        let balance = &mut self.balance[tier.as_usize()];
        let mut none = Sums::default();
        let payer = pool.pages.payer(id);
        let sums = self.tenants[tier.as_usize()].get_mut(payer.as_usize()).unwrap_or(&mut none);
        let (to, and) = if word.is_leaving() {
            (&mut balance.in_flight, &mut sums.held)
        } else if word.is_held() || word.is_orphan() {
            (&mut balance.held, &mut sums.held)
        } else if word.is_pinned() {
            (&mut balance.pinned, &mut sums.pinned)
        } else {
            (&mut balance.cached, &mut sums.cached)
        };
        *to += bytes;
        *and += units;
    }

    /// The sums over pages against the ledger, and the tallies of what should never happen.
    fn compare_sums(&mut self) {
        let pool = self.pool;
        for tier in Tier::ALL {
            let excess = self.balance[tier.as_usize()].excess();
            if excess != 0 {
                let text = format!(
                    "{tier:?}: the parts differ from the capacity by {excess} bytes: {:?}",
                    self.balance[tier.as_usize()]
                );
                self.find(None, text);
            }
            for tenant in (0..=pool.ledger.top()).map(TenantId) {
                let usage = pool.ledger.usage(tier, tenant);
                // (A tenant that came up since the audit began has no pages.)
                let sums = self.tenants[tier.as_usize()].get(tenant.as_usize()).copied().unwrap_or_default();
                let ledger = [usage.held, usage.cached, usage.pinned].map(|u| u64::from(u.0));
                if ledger != [sums.held, sums.cached, sums.pinned] {
                    let text = format!(
                        "{tier:?}, {tenant}: the ledger says held, cached, pinned = {ledger:?} units, its pages {:?}",
                        [sums.held, sums.cached, sums.pinned]
                    );
                    self.find(None, text);
                }
                if usage.missing.0 != 0 {
                    self.find(
                        None,
                        format!("{tier:?}, {tenant}: {} units were given back twice", usage.missing.0),
                    );
                }
            }
        }
        let mut pins = vec![0u32; pool.pages.len() as usize];
        for page in pool.pins.list(None).iter().flat_map(|pin| &pin.pages) {
            if pool.pages.read(page.id).generation() == page.generation {
                pins[page.id.as_usize()] += 1;
            } else {
                self.find(Some(page.id), format!("{page:?} is in the list of pins, and its life is over"));
            }
        }
        for (id, &listed) in (0..).map(PageId).zip(&pins) {
            let counted = pool.pages.read(id).pins();
            if counted != listed {
                self.find(Some(id), format!("{id} is pinned {counted} times, and the list says {listed}"));
            }
        }
        for id in (0..pool.pages.len()).map(PageId) {
            let (counted, found) = (pool.pages.children(id), self.children[id.as_usize()]);
            let word = pool.pages.read(id);
            if !word.is_free() && counted != found {
                self.find(Some(id), format!("{id} counts {counted} children in the index, and has {found}"));
            }
            if word.is_aside() && found == 0 && !word.is_leased() {
                self.find(
                    Some(id),
                    format!("{id} is cached, nothing keeps it, and it is in no eviction order"),
                );
            }
        }
        let faults = [
            ("frames were released twice", Tier::ALL.iter().map(|&t| pool.arena(t).faults()).sum::<u64>()),
            ("page ids were released twice", pool.slots.faults()),
            ("units were given back twice", pool.ledger.faults()),
        ];
        for (what, times) in faults {
            if times > 0 {
                self.find(None, format!("{times} time(s) {what}"));
            }
        }
    }
}

impl Pool {
    /// Operations entered so far if none is in progress.
    fn standing_still(&self) -> Option<u64> {
        let mut sum = 0u64;
        for lane in 0..LANES {
            // Left first: an operation that enters between the two reads shows as one in progress.
            let left = self.ops[lane * 8 + 1].get();
            let entered = self.ops[lane * 8].get();
            if left != entered {
                return None;
            }
            sum = sum.wrapping_add(entered);
        }
        Some(sum)
    }
}

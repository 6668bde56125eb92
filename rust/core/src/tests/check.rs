//! What must be true in the world of world.rs after every operation, counted anew from what the model knows.

use std::collections::{HashMap, HashSet};

use super::{
    build::{self, PAGE},
    world::World,
};
use crate::{
    ledger::ROOT,
    spec::GroupKind,
    word::{PageId, PageRef, TenantId, Tier, page::PageWord},
};

impl World {
    // What must be true.

    pub(super) fn prepare(&mut self) {
        let levels = self.levels();
        self.before = levels
            .iter()
            .map(|&t| self.pool.ledger().usage(Tier::Device, t))
            .map(|u| (u.subtree.0, u.claim.0))
            .collect();
        self.before_host = levels.iter().map(|&t| self.pool.ledger().charged(Tier::Host, t).0).collect();
        self.policy_changed = false;
    }

    fn levels(&self) -> Vec<TenantId> {
        [ROOT].into_iter().chain(self.tenants.iter().copied()).collect()
    }

    pub(super) fn check(&self) {
        build::green(&self.pool);
        self.check_sequences();
        self.check_references();
        self.check_ledger();
    }

    fn check_sequences(&self) {
        for model in self.sequences.values() {
            let counts = model.handle.counts().expect("nobody uses it");
            assert_eq!(
                (counts.known, counts.slots, counts.written, counts.cached),
                (model.known(), model.slots(), model.written, model.cached)
            );
            assert_eq!(model.handle.tokens(0).expect("nobody uses it"), model.ids);
            assert_eq!(model.handle.state(), Ok(model.state));
            for group in self.groups() {
                let (start, pages) = model.handle.pages(group).expect("nobody uses it");
                let kind = self.spec.groups()[group.as_usize()].kind;
                let end = if kind == GroupKind::State {
                    u32::from(model.slots() > 0)
                } else {
                    model.slots().div_ceil(PAGE)
                };
                assert_eq!(start + pages.len() as u32, end, "pages of {group}");
                assert!(
                    start <= self.spec.first_needed(group, model.written),
                    "{group} lacks pages it needs"
                );
                for (place, (page, frame)) in (start..).zip(pages).filter(|(_, (_, frame))| frame.0 != 0) {
                    let read = |at| {
                        let slot = self.device.read_in(self.pool.tier_of(page.id), group, frame, at);
                        slot.map(|slot| slot.0)
                    };
                    if kind == GroupKind::State {
                        let content = model.contents.last().copied();
                        assert_eq!(read(0), content);
                        continue;
                    }
                    for position in place * PAGE..((place + 1) * PAGE).min(model.slots()) {
                        assert_eq!(
                            read(position % PAGE),
                            Some(model.contents[position as usize]),
                            "{position} in {group}"
                        );
                    }
                }
            }
        }
    }

    /// Every page has as many references and pins as somebody can name, and lies alone.
    fn check_references(&self) {
        let mut refs: HashMap<PageRef, u32> = HashMap::new();
        let tables = self.sequences.values().flat_map(|m| {
            self.groups()
                .flat_map(|g| m.handle.pages(g).expect("nobody uses it").1)
                .map(|p| p.0)
                .collect::<Vec<_>>()
        });
        let sources = self.batches.iter().flat_map(|b| &b.outstanding).flat_map(|r| &r.sources).copied();
        let tables = tables.filter(|&page| page != self.pool.pages.gone());
        for page in tables.chain(sources).chain(self.owned.iter().map(|o| o.page)) {
            *refs.entry(page).or_default() += 1;
        }
        for (&page, n) in self.plans.iter().flat_map(|plan| &plan.refs) {
            *refs.entry(page).or_default() += n;
        }
        let listed = self.pool.pins(None);
        assert_eq!(
            listed.iter().map(|p| p.id).collect::<HashSet<_>>(),
            self.pins.iter().map(|p| p.0).collect()
        );
        let mut pins: HashMap<PageRef, u32> = HashMap::new();
        listed.iter().flat_map(|p| &p.pages).for_each(|&page| *pins.entry(page).or_default() += 1);
        for id in (0..self.pool.max_pages()).map(PageId) {
            let word: PageWord = self.pool.pages.read(id);
            let page = PageRef { id, generation: word.generation() };
            let expected = (refs.remove(&page).unwrap_or(0), pins.remove(&page).unwrap_or(0));
            assert_eq!((word.refs(), word.pins()), expected, "{page:?}");
        }
        assert!(refs.is_empty() && pins.is_empty(), "stale: {refs:?} {pins:?}");
    }

    /// Claims and sums, from the tenants' own numbers.
    fn check_ledger(&self) {
        let ledger = self.pool.ledger();
        let mut promised: HashMap<TenantId, u32> = HashMap::new();
        for model in self.sequences.values() {
            let promises = model.handle.visit(|_, body, _| body.promises.clone()).expect("nobody uses it");
            promises.into_iter().for_each(|(payer, units)| *promised.entry(payer).or_default() += units);
        }
        for (&payer, units) in self.plans.iter().flat_map(|plan| &plan.promised) {
            *promised.entry(payer).or_default() += units;
        }
        let levels = self.levels();
        for (&level, &(charged, claim)) in levels.iter().zip(&self.before) {
            let usage = ledger.usage(Tier::Device, level);
            assert_eq!(usage.promised.0, promised.get(&level).copied().unwrap_or(0), "{level}");
            assert_eq!((usage.claim.0, usage.subtree.0), (self.claim(level), self.charged(level)), "{level}");
            let limit = usage.limit.unwrap_or(ledger.capacity(Tier::Device)).0;
            assert!(usage.subtree.0 <= limit.max(charged), "{level}: {usage:?}");
            assert!(self.policy_changed || usage.claim.0 <= limit.max(claim), "{level}: {usage:?}");
        }
        for (&level, &charged) in levels.iter().zip(&self.before_host) {
            let usage = ledger.usage(Tier::Host, level);
            let limit = usage.limit.unwrap_or(ledger.capacity(Tier::Host)).0;
            assert!(usage.subtree.0 <= limit.max(charged), "{level}: {usage:?}");
        }
        let capacity = ledger.capacity(Tier::Device).0;
        assert!(self.claim(ROOT) <= capacity && self.charged(ROOT) <= capacity);
    }

    fn children(&self, level: TenantId) -> impl Iterator<Item = TenantId> {
        let ledger = self.pool.ledger();
        self.tenants.iter().copied().filter(move |&t| ledger.parent(t) == Some(level))
    }

    fn claim(&self, level: TenantId) -> u32 {
        let u = self.pool.ledger().usage(Tier::Device, level);
        let own = u.held.0 + u.pinned.0 + u.promised.0 + u.stock.0;
        u.reserve.0.max(own + self.children(level).map(|t| self.claim(t)).sum::<u32>())
    }

    fn charged(&self, level: TenantId) -> u32 {
        let own = self.pool.ledger().usage(Tier::Device, level).charged.0;
        own + self.children(level).map(|t| self.charged(t)).sum::<u32>()
    }

    /// Everybody goes, and nothing is left.
    pub(super) fn finish(mut self) {
        while !self.plans.is_empty() {
            self.abort(0);
        }
        for id in self.sequences.keys().copied().collect::<Vec<_>>() {
            self.close(id, id % 2 == 0);
        }
        self.batches.clear();
        let held: Vec<_> = self.owned.drain(..).map(|o| o.page).collect();
        self.face.release(&held).expect("they are held");
        for (pin, _) in std::mem::take(&mut self.pins) {
            self.pool.unpin(pin).expect("it is listed");
        }
        build::empty(&self.pool);
    }
}

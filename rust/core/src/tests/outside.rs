//! What others than schedulers do in the world of world.rs: pins, policies, time, resets, and the lower face.

use std::{collections::HashSet, num::NonZeroU32};

use super::{
    build::PAGE,
    device::{self, Content},
    world::{Owned, World},
};
use crate::{
    error::Error,
    hash::CallerKey,
    index::page_before,
    ledger::Policy,
    sequence::State,
    word::{GroupId, PageId, PageRef, TIERS, TenantId, Tier, Units},
};

impl World {
    // Pins, policies, time.

    pub(super) fn pin(&mut self, id: u64, tokens: u32, owner: usize, ttl: Option<u64>) {
        let owner = self.tenants[owner % self.tenants.len()];
        let model = &self.sequences[&id];
        let runs = model.state == State::Running;
        if let Ok(pin) = self.pool.pin(&model.handle, tokens, owner, ttl, "test") {
            assert!(runs, "pages may be away");
            self.pins.push((pin, ttl.map(|ttl| self.pool.now_ms() + ttl)));
        }
    }

    pub(super) fn unpin(&mut self, n: usize) {
        if let Some(at) = n.checked_rem(self.pins.len()) {
            let (pin, _) = self.pins.remove(at);
            self.pool.unpin(pin).expect("it is listed");
            assert!(self.pool.unpin(pin).is_err());
        }
    }

    pub(super) fn advance(&mut self, ms: u64) {
        let now = self.pool.advance(ms).expect("a manual clock");
        self.pins.retain(|&(_, until)| until.is_none_or(|until| until > now));
        self.expire(now);
    }

    pub(super) fn set_policy(
        &mut self,
        tenant: usize,
        reserve: u32,
        limits: [Option<u32>; TIERS],
        weight: u32,
        publish: u8,
    ) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let org = self.tenants[3];
        let units = self.spec.units(self.spec.class_of(GroupId(0)));
        let publish = match publish % 3 {
            _ if tenant == org || !self.pool.ledger().is_under(tenant, org) => vec![],
            0 => vec![],
            1 => vec![(org, None)],
            _ => vec![(org, Some(Units(units * 4)))],
        };
        let policy = Policy {
            reserve: [Units(reserve * units), Units(0)],
            limit: limits.map(|limit| limit.map(|n| Units(n * units))),
            weight,
            pin_budget: Units(weight * 8),
            publish,
            compress: reserve.is_multiple_of(2),
            cut: NonZeroU32::new(reserve % 4 * 3),
            ..Policy::default()
        };
        // Refused or not: the claims tell.
        let _ = self.pool.ledger().set_policy(tenant, &policy);
        self.policy_changed = true;
    }

    pub(super) fn reset(&mut self) {
        let used = (0..self.pool.max_pages()).map(|id| self.pool.pages.read(PageId(id)));
        let used = used.filter(|w| w.is_indexed() && (w.is_held() || w.pins() > 0)).count();
        match self.pool.reset_prefix_cache() {
            Ok(_) => {
                assert_eq!(used, 0);
                // What a copy uses, and what that continues, goes when its plan has ended.
                let pages = &self.pool.pages;
                let ids = (0..self.pool.max_pages()).map(PageId);
                let leased = ids.filter(|&id| pages.read(id).is_leased());
                let chain = |id| {
                    let page = PageRef { id, generation: pages.read(id).generation() };
                    std::iter::successors(Some(page), |&at| page_before(pages, at)).map(|page| page.id)
                };
                let kept: HashSet<_> =
                    leased.flat_map(chain).filter(|&id| pages.read(id).is_cached()).collect();
                let left = kept.iter().map(|&id| self.pool.bytes(self.pool.units_of(id))).sum::<u64>();
                assert_eq!(self.pool.audit().balance[0].cached, left, "everything cached is dropped");
                self.resets += 1;
            }
            Err(e) => assert!(used > 0, "{e}"),
        }
    }

    // The lower face.

    fn content_of(tenant: TenantId, group: GroupId, key: u64) -> Content {
        device::root(&(tenant.0, group.0, key))
    }

    pub(super) fn allocate(&mut self, tenant: usize, group: usize, n: usize) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let must = self.must_succeed(tenant, group, n as u32);
        match self.face.allocate(tenant, group, n) {
            Ok(pages) => {
                assert_eq!(pages.len(), n);
                self.owned.extend(pages.into_iter().map(|page| Owned { page, tenant, group }));
            }
            Err(e) => assert!(!must, "{tenant} may have {n} pages, and yet {e}; {:?}", self.live_pages()),
        }
    }

    /// Whether a cached page is kept by a child that somebody holds: there is none but while a copy is made, since whoever
    /// holds a page holds what it continues.
    fn is_something_kept(&self) -> bool {
        let pages = &self.pool.pages;
        let kept = (0..pages.len()).map(PageId).any(|id| {
            let word = pages.read(id);
            let page = PageRef { id, generation: word.generation() };
            (word.is_held() || word.is_pinned())
                && word.is_indexed()
                && page_before(pages, page).is_some_and(|before| pages.read(before.id).is_cached())
        });
        let copying = self.batches.iter().flat_map(|b| &b.outstanding).any(|r| !r.sources.is_empty());
        assert!(!kept || copying, "{:?}", self.live_pages());
        kept
    }

    /// For messages.
    fn live_pages(&self) -> Vec<String> {
        let pages = &self.pool.pages;
        let live = (0..pages.len()).map(PageId).filter(|&id| !pages.read(id).is_free());
        live.map(|id| {
            let (payer, word, link) = (pages.payer(id), pages.read(id), pages.link(id));
            format!("{id} of {payer}: {word:?}, {} children, {link:?}", pages.children(id))
        })
        .collect()
    }

    /// Inside every limit and claim, and everything that is cached can be taken: then there is no reason to refuse.
    fn must_succeed(&self, tenant: TenantId, group: GroupId, n: u32) -> bool {
        let ledger = self.pool.ledger();
        let (mut level, mut growth) = (tenant, n * self.spec.units(self.spec.class_of(group)));
        let asked = growth;
        loop {
            let usage = ledger.usage(Tier::Device, level);
            let limit = usage.limit.unwrap_or(ledger.capacity(Tier::Device)).0;
            let cached = ledger.subtree_usage(Tier::Device, level).cached.0;
            let claim = usage.reserve.0.max(usage.demand.0 + growth);
            growth = claim - usage.claim.0;
            if growth > 0 && claim > limit || usage.subtree.0 - cached + asked > limit {
                return false;
            }
            match ledger.parent(level) {
                Some(parent) => level = parent,
                None => return self.every_frame_counts() && !self.is_something_kept(),
            }
        }
    }

    pub(super) fn publish(&mut self, n: usize, key: u64) {
        let Some(&Owned { page, tenant, group }) = self.owned.get(n % self.owned.len().max(1)) else {
            return;
        };
        let word = self.pool.pages.read(page.id);
        if !word.is_indexed() {
            let frame = self.pool.pages.location(page.id).frame();
            let write = self.device.new_write();
            self.device.finish(write);
            let cells = if self.is_state(group) { 1 } else { PAGE };
            for cell in 0..cells {
                self.device.write(group, frame, cell, Self::content_of(tenant, group, key), write);
            }
        }
        let answer =
            self.face.publish(tenant, group, &[page], &[CallerKey::Int(key.into())]).expect("it is held");
        assert!(!(word.is_indexed() && answer[0]), "it has a key already");
    }

    fn check_found(&self, page: PageRef, group: GroupId, content: Content) {
        let frame = self.pool.pages.location(page.id).frame();
        assert_eq!(self.device.read(group, frame, 0), Some((content, true)), "{page:?} holds something else");
    }

    pub(super) fn lookup(&mut self, tenant: usize, group: usize, keys: &[u64]) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let asked: Vec<_> = keys.iter().map(|&key| CallerKey::Int(key.into())).collect();
        let pages = self.face.lookup(tenant, group, &asked).expect("sound keys");
        for (&page, &key) in pages.iter().zip(keys) {
            self.check_found(page, group, Self::content_of(tenant, group, key));
            self.owned.push(Owned { page, tenant, group });
        }
    }

    pub(super) fn find(&mut self, tenant: usize, group: usize, keys: &[u64]) {
        let tenant = self.tenants[tenant % self.tenants.len()];
        let group = GroupId((group % self.spec.groups().len()) as u8);
        let asked: Vec<_> = keys.iter().map(|&key| CallerKey::Int(key.into())).collect();
        let pages = self.face.find_all(tenant, group, &asked).expect("sound keys");
        for (page, &key) in pages.into_iter().zip(keys) {
            self.found.extend(page.map(|page| (page, group, Self::content_of(tenant, group, key))));
        }
    }

    pub(super) fn share(&mut self, n: usize) {
        let Some(&(page, group, content)) = self.found.get(n % self.found.len().max(1)) else { return };
        if self.face.share(&[page]).expect("pages of this pool") == [true] {
            self.check_found(page, group, content);
            self.owned.push(Owned { page, tenant: self.pool.pages.payer(page.id), group });
        }
    }

    pub(super) fn release(&mut self, n: usize, twice: bool) {
        if self.owned.is_empty() {
            return;
        }
        let Owned { page, .. } = self.owned.swap_remove(n % self.owned.len());
        let others = self.pool.pages.read(page.id).refs() - 1;
        if twice && others == 0 {
            // More often than it is held: nothing is changed, so once is still right.
            assert!(matches!(self.face.release(&[page, page]), Err(Error::Stale { .. })));
        }
        self.face.release(&[page]).expect("it is held");
        self.old.push(page);
    }

    pub(super) fn release_stale(&mut self, n: usize) {
        let Some(&page) = self.old.get(n % self.old.len().max(1)) else { return };
        let word = self.pool.pages.read(page.id);
        if word.generation() != page.generation || !word.is_held() {
            assert!(matches!(self.face.release(&[page]), Err(Error::Stale { .. })));
            assert_eq!(self.pool.pages.read(page.id), word);
        }
    }
}

//! A page's life between its taking and its end: published, hit, let go. The order in which the rooms are visited, and
//! why, stands at the head of pool.rs.
//!
//! A hit on a cached page needs room in the ledger before it happens, and whether it happens is known only when the
//! compare-exchange succeeds. So a hit carries a credit: the ledger is asked in bulk for what a first look at the words
//! predicts, each transition that needs credit spends some, one that finds none asks for a page's worth, and what is left
//! over goes back. Most calls touch the ledger once or twice, whatever the number of pages.
//!
//! Callers: pool.rs, sequence.rs, batch.rs, face.rs.

use crate::{
    error::Refusal,
    event::Event,
    evict::take_leaf,
    index::{Parent, Seen},
    ledger::Refused,
    page::{Line, Link},
    pool::{ClassInfo, Pool, Scratch},
    stats::Counter,
    sync::Atom,
    word::{
        ClassId, GroupId, Lane, PageId, PageRef, TenantId, Tier, Units,
        page::{Dropped, Ended, Location, PageWord, Shared},
    },
};

/// The names of a page about to be published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names<'a> {
    /// Its index key.
    pub(crate) key: u64,
    /// What it continues: a page that the caller holds, or a digest.
    pub(crate) parent: Parent,
    /// Its tokens; `None`: a key of the caller's.
    pub(crate) tokens: Option<&'a [u32]>,
    /// Its parent counts it already.
    pub(crate) counted: bool,
    /// The caller is about to publish a page that continues it, and that page is to be counted already.
    pub(crate) continued: bool,
}

/// What publishing some pages has to tell.
#[derive(Debug, Default)]
pub(crate) struct News {
    published: u64,
    events: Vec<Event>,
}

/// Where a page is charged, and how much.
#[derive(Clone, Copy)]
struct Account {
    payer: TenantId,
    tier: Tier,
    units: Units,
}

impl Pool {
    pub(crate) fn tier_of(&self, id: PageId) -> Tier {
        self.pages.location(id).tier().unwrap_or(Tier::Device)
    }

    /// Whether a page that lies there can be found: on the device, in the class it was written in.
    pub(crate) fn is_home(&self, at: Location) -> bool {
        at.tier() == Some(Tier::Device) && !self.is_lossy(at)
    }

    /// Whether what lies there is less exact than it was written.
    pub(crate) fn is_lossy(&self, at: Location) -> bool {
        self.is_small(at) || at.is_gone()
    }

    /// Whether a page that the caller holds is compressed or cut, or about to be, so that it can't be written to.
    pub(crate) fn is_fixed(&self, page: PageRef) -> bool {
        self.pages.read(page.id).is_away() || self.pages.location(page.id).is_gone()
    }

    /// Whether a place is one of a class that pages are compressed into.
    pub(crate) fn is_small(&self, at: Location) -> bool {
        at.class().as_usize() >= self.groups.len()
    }

    /// A page's place as block tables show it: the number of its frame, or `!frame` of a smaller class, which is negative; 0:
    /// it is gone.
    #[inline]
    pub(crate) fn entry(&self, id: PageId) -> i32 {
        self.entry_at(self.pages.location(id))
    }

    /// As [`Self::entry`].
    #[inline]
    pub(crate) fn entry_at(&self, at: Location) -> i32 {
        let frame = at.frame().0 as i32;
        if self.is_small(at) { !frame } else { frame }
    }

    pub(crate) fn units_of(&self, id: PageId) -> u32 {
        self.class_at(self.pages.location(id)).units
    }

    /// The class of a place, and what a page that lies there is charged.
    #[inline]
    pub(crate) fn class_at(&self, at: Location) -> ClassInfo {
        let class = self.classes[at.class().as_usize()];
        if at.is_gone() { ClassInfo { units: 0, ..class } } else { class }
    }

    /// Make a page that the caller holds, written to the end, findable. `None`: it could not be listed, and stays private.
    /// What is to be told goes to `news`, for the caller to tell ([`Self::tell`]) while it still holds the page.
    pub(crate) fn publish(
        &self,
        lane: Lane,
        page: PageRef,
        group: GroupId,
        names: &Names<'_>,
        proven: bool,
        news: &mut News,
    ) -> Option<Seen> {
        let id = page.id;
        let line = self.pages.line(id);
        let payer = line.payer();
        let (link, parent) = match names.parent {
            Parent::Page { at, .. } => (Link::Page(at), Some(at)),
            Parent::Digest(digest) => (Link::Digest(digest), None),
        };
        let uncount = || {
            if let Some(parent) = parent {
                self.orders.lose_child(&self.pages, parent);
            }
        };
        // Another holder may be at it.
        if line.transit(|w| w.name(page.generation)).is_err() {
            if names.counted {
                uncount();
            }
            return None;
        }
        if let Some(parent) = parent
            && !names.counted
            && !self.pages.add_child(parent.id)
        {
            let _ = line.transit(|w| w.unname());
            return None;
        }
        let wanted =
            crate::index::Wanted { key: names.key, scope: payer, parent: names.parent, tokens: names.tokens };
        let (twin, gap) = self.index.lookup_to_insert(&self.pages, &wanted);
        let prefix = twin.map_or(page.to_bits(), |twin| twin.prefix);
        self.pages.set_names(id, names.key, link, prefix);
        if let Some(tokens) = names.tokens {
            self.pages.set_tokens(id, tokens);
        }
        // Listed before it is INDEXED: whoever guesses its id finds nothing that may have to be taken back.
        if !self.index.insert_into_gap(names.key, id, gap) {
            let _ = line.transit(|w| w.unname());
            uncount();
            self.stats.count(lane, Counter::PublishRefused, 1);
            return None;
        }
        if names.continued {
            self.pages.expect_child(id);
        }
        let published =
            line.transit(|w| if w.generation() == page.generation { w.publish(proven) } else { None });
        debug_assert!(published.is_ok(), "{page:?} is held and named by the caller, and yet {published:?}");
        news.published += 1;
        if twin.is_none() && self.events.is_on() {
            news.events.push(Event::Stored {
                key: names.key,
                parent: parent.map(|at| self.pages.key(at.id)),
                page,
                group,
                tenant: payer,
                tokens: names.tokens.map_or(self.spec.page_tokens(), |t| t.len() as u32),
                tier: Tier::Device,
            });
        }
        Some(Seen { page, prefix, exact: true })
    }

    /// Tell what publishing did. The caller still holds the pages, so nobody hears of their end before.
    pub(crate) fn tell(&self, lane: Lane, news: &mut News) {
        if news.published > 0 {
            self.stats.count(lane, Counter::PagesPublished, news.published);
            self.events.publish_all(&news.events);
            news.published = 0;
            news.events.clear();
        }
    }

    /// Tell that a page has left the place where it can be found, or is back there. The caller holds its lease, so nobody hears
    /// of its end before.
    fn tell_moved(&self, page: PageRef, from: Location, to: Location) {
        let (id, back) = (page.id, self.is_home(to));
        let told = self.is_home(from) != back && self.events.is_on() && self.pages.read(id).is_indexed();
        if !told || self.index.has_copy(&self.pages, id) {
            return;
        }
        let (key, tenant, tier) = (self.pages.key(id), self.pages.payer(id), Tier::Device);
        let group = self.classes[to.class().as_usize()].group;
        self.events.publish(if back {
            let parent = match self.pages.link(id) {
                Link::Page(parent) => Some(self.pages.key(parent.id)),
                Link::Digest(_) => None,
            };
            Event::Stored { key, parent, page, group, tenant, tokens: self.spec.page_tokens(), tier }
        } else {
            Event::Removed { key, group, tenant, tier }
        });
    }

    /// Out of the index, so that nobody finds it any more. The caller owns the page: it is LEAVING, or the caller alone holds
    /// it. The answer is the page that it continued, which has one child less: the caller counts that.
    pub(crate) fn unindex(&self, id: PageId, group: GroupId) -> Option<PageRef> {
        let key = self.pages.key(id);
        self.index.remove(key, id);
        // Of what can't be found where it lies that was told when it left (`tell_moved`).
        let home = self.is_home(self.pages.location(id));
        if home && self.events.is_on() && !self.index.has_copy(&self.pages, id) {
            let tenant = self.pages.payer(id);
            self.events.publish(Event::Removed { key, group, tenant, tier: Tier::Device });
        }
        match self.pages.link(id) {
            Link::Page(parent) => Some(parent),
            Link::Digest(_) => None,
        }
    }

    /// A page that the caller alone holds loses its key, because its content is about to change: the reference to it from
    /// now on. `None`: others hold it too, or found it meanwhile, so it has to be copied instead.
    pub(crate) fn make_private(&self, page: PageRef, group: GroupId) -> Option<PageRef> {
        let word = self.pages.read(page.id);
        if word.refs() != 1 || word.pins() != 0 || word.generation() != page.generation {
            return None;
        }
        if !word.is_indexed() {
            return Some(page);
        }
        if !self.unlist(page, group) {
            return None;
        }
        // It will be published again, and who saw it under its old key must not take it for that: another life begins.
        // Not while a copy uses the frame: whoever ends the lease knows this life.
        let word = self.pages.transit(page.id, |w| w.renew()).ok()?;
        Some(PageRef { id: page.id, generation: word.generation() })
    }

    /// A page that the caller alone holds loses its key. `false`: it keeps it, for others hold it too, or found it meanwhile,
    /// or continue it.
    pub(crate) fn unlist(&self, page: PageRef, group: GroupId) -> bool {
        let proven = self.pages.read(page.id).is_proven();
        let alone = |w: PageWord| w.refs() == 1 && w.pins() == 0 && w.generation() == page.generation;
        let taken = self.pages.transit(page.id, |w| if alone(w) { w.unpublish() } else { None });
        if taken.is_err() {
            return false;
        }
        // From here on nobody can hit it, so nobody can hang a child on it any more. Children in the index continue what
        // it says now.
        if self.pages.children(page.id) > 0 {
            let again = self.pages.transit(page.id, |w| w.publish(proven));
            debug_assert!(again.is_ok(), "{page:?} is held by the caller and private, and yet {again:?}");
            return false;
        }
        if let Some(parent) = self.unindex(page.id, group) {
            self.orders.lose_child(&self.pages, parent);
        }
        true
    }

    /// Reference pages that were found, in order, until one is gone or may not be held: how many are now held.
    pub(crate) fn hold(&self, lane: Lane, found: &[PageRef]) -> (usize, Option<Refusal>) {
        let mut held = 0;
        while held < found.len() {
            // A page in another life may be another tenant's, whose books this must not touch even for a moment. The word
            // first, for a life has its payer when it is there to be found; one that is over can't be held any more.
            let payer_of = |page: &PageRef| {
                let line = self.pages.line(page.id);
                let word = line.read();
                (word.generation() == page.generation && !word.is_free()).then(|| line.payer())
            };
            let Some(payer) = payer_of(&found[held]) else { break };
            let run = found[held..].iter().take_while(|page| payer_of(page) == Some(payer)).count();
            let (n, refusal) = self.hold_of(lane, payer, &found[held..held + run]);
            held += n;
            if n < run || refusal.is_some() {
                return (held, refusal);
            }
        }
        (held, None)
    }

    /// [`Self::hold`] of pages that were found as those of one payer.
    pub(crate) fn hold_of(&self, lane: Lane, payer: TenantId, found: &[PageRef]) -> (usize, Option<Refusal>) {
        let (held, refused) = self.hold_run(payer, found);
        if refused.is_some() {
            self.stats.count(lane, Counter::LookupsStopped, 1);
        }
        (held, refused.map(|r| self.refusal(r)))
    }

    fn hold_run(&self, payer: TenantId, run: &[PageRef]) -> (usize, Option<Refused>) {
        let tier = Tier::Device;
        let units_of = |line: Line<'_>| self.classes[line.location().class().as_usize()].units;
        let predicted = run
            .iter()
            .map(|page| self.pages.line(page.id))
            .zip(run)
            .filter(|(line, page)| {
                let word = line.read();
                word.is_cached() && word.generation() == page.generation
            })
            .map(|(line, _)| units_of(line))
            .sum();
        // What does not fit in bulk is asked for page by page.
        let mut credit = match predicted {
            0 => 0,
            units if self.ledger.revive(tier, payer, Units(units)).is_ok() => units,
            _ => 0,
        };
        let (mut unpinned, mut n, mut refused) = (0, 0, None);
        'pages: for page in run {
            let line = self.pages.line(page.id);
            let units = units_of(line);
            loop {
                let shared = line.transit_with(|w| {
                    if w.is_cached() && credit < units { None } else { w.share(page.generation) }
                });
                match shared {
                    Ok(Shared::Held) => {}
                    Ok(Shared::Unparked) => unpinned += units,
                    Ok(Shared::Revived) => credit -= units,
                    Err(word) if word.share(page.generation).is_some() => {
                        match self.ledger.revive(tier, payer, Units(units)) {
                            Ok(()) => {
                                credit += units;
                                continue;
                            }
                            Err(r) => {
                                refused = Some(r);
                                break 'pages;
                            }
                        }
                    }
                    Err(_) => break 'pages,
                }
                break;
            }
            n += 1;
        }
        if credit > 0 {
            self.ledger.park(tier, payer, Units(credit));
        }
        if unpinned > 0 {
            self.ledger.from_pinned(tier, payer, Units(unpinned));
        }
        (n, refused)
    }

    /// A page that has just been let go by all, and of which there is another copy, ends at once: sequences that built the
    /// same prefix at the same time keep one copy of it. The caller would put it into the order, so nobody else evicts it.
    fn drop_twin(&self, id: PageId) -> bool {
        let seen = self.pages.read(id);
        let page = PageRef { id, generation: seen.generation() };
        // The first that had this content knows of no copy, nor does one whose key was taken from it.
        if !seen.is_indexed() || self.pages.prefix(id) == page.to_bits() || self.pages.children(id) > 0 {
            return false;
        }
        if !self.index.has_copy(&self.pages, id) {
            return false;
        }
        let Some(word) = take_leaf(&self.pages, id, seen) else { return false };
        self.expel_alone(id, word);
        true
    }

    /// One more reference on each page, by somebody who holds them (a fork). Stops at a page with too many references:
    /// how many got one.
    pub(crate) fn hold_again(&self, pages: impl Iterator<Item = PageRef>) -> usize {
        let mut n = 0;
        for page in pages {
            if page != self.pages.gone()
                && self.pages.transit(page.id, |w| w.share_held(page.generation)).is_err()
            {
                break;
            }
            n += 1;
        }
        n
    }

    /// Drop one reference on each page, in this order (children before parents). What nobody can find any more becomes
    /// free, the rest is cached. The number of stale references, which changed nothing.
    pub(crate) fn let_go(&self, lane: Lane, pages: &[PageRef], scratch: &mut Scratch) -> usize {
        let mut stale = 0;
        let mut rest = pages;
        while let Some((&first, others)) = rest.split_first() {
            let payer = self.pages.payer(first.id);
            let location = self.pages.location(first.id);
            if location.tier() == Some(Tier::Host) {
                stale += usize::from(self.let_go_away(lane, first));
                rest = others;
                continue;
            }
            let place = |at: Location| (at.tier(), at.class());
            let same = |p: &&PageRef| {
                self.pages.payer(p.id) == payer && place(self.pages.location(p.id)) == place(location)
            };
            let run = others.iter().take_while(same).count() + 1;
            let (now, later) = rest.split_at(run);
            stale += self.let_go_run(lane, payer, location.class(), now, scratch);
            rest = later;
        }
        if stale > 0 {
            self.stats.count(lane, Counter::StaleReferences, stale as u64);
        }
        stale
    }

    /// A page that the caller alone holds begins to leave the device or its class, or to come back: where it lies now. Nobody
    /// finds it from here on, until it has landed on the device or the move came to nothing. `None`: others hold it too, a
    /// pin keeps it, another copy uses it, or it is gone.
    pub(crate) fn lease_out(&self, page: PageRef) -> Option<Location> {
        self.pages.transit(page.id, |w| w.lease_out(page.generation)).ok()?;
        let at = self.pages.location(page.id);
        if at.is_gone() {
            self.stay(Lane(0), page);
            return None;
        }
        Some(at)
    }

    /// The copy of a page that was leased out is done, and it lies in `to` from now on: its old place and what it was
    /// charged there are the caller's. `false`: it has not moved, and `to` is the caller's. That is so when everybody let go
    /// of it while it was on its way off the device: what is there can be hit again.
    pub(crate) fn land(&self, lane: Lane, page: PageRef, from: Location, to: Location) -> bool {
        let word = self.pages.read(page.id);
        if word.generation() != page.generation || !word.is_leased() {
            return false;
        }
        let lost = word.is_orphan() && from.tier() == Some(Tier::Device);
        // Only the holder of the lease moves a page.
        let moved = !lost && self.pages.swap_location(page.id, from, to).is_ok();
        let at = if moved { to } else { self.pages.location(page.id) };
        debug_assert!(moved || lost || at.is_outside(), "{page:?} moved while it was leased");
        if moved {
            self.tell_moved(page, from, to);
        }
        self.end_lease(lane, page, |_| !self.is_home(at));
        moved
    }

    /// The copy of a page that was leased out came to nothing: it is as before.
    pub(crate) fn stay(&self, lane: Lane, page: PageRef) {
        self.end_lease(lane, page, |_| !self.is_home(self.pages.location(page.id)));
    }

    /// A copy has ended; what everybody let go of meanwhile is cached or free now.
    pub(crate) fn end_lease(&self, lane: Lane, page: PageRef, away: impl Fn(PageWord) -> bool) {
        // Nobody else moves it while it is leased.
        let account = self.account_of(page.id);
        let ended = self.pages.transit_with(page.id, |w| w.unlease(page.generation, away(w)));
        match ended {
            Ok(Ended::Leaving) => self.free_leaving(lane, page.id),
            Ok(Ended::Cached { enqueue }) => self.park_alone(lane, page.id, account, enqueue),
            Ok(Ended::Aside) => self.orders.relist(&self.pages, page),
            Ok(Ended::Kept) | Err(_) => {}
        }
    }

    /// Where a page is charged. To be read before the transition that lets go of it: what an order lists may be evicted at once,
    /// and be another tenant's. (What is read of a page that moves meanwhile belongs to a transition that is tried again.)
    fn account_of(&self, id: PageId) -> Account {
        Account { payer: self.pages.payer(id), tier: self.tier_of(id), units: Units(self.units_of(id)) }
    }

    /// A page that has just become cached and is counted as held. What is off the device can't be hit, so it ends at once,
    /// unless others continue it, or an order lists it already.
    fn park_alone(&self, lane: Lane, id: PageId, account: Account, enqueue: bool) {
        let Account { payer, tier, units } = account;
        self.ledger.park(tier, payer, units);
        if tier == Tier::Host {
            self.lost.plus(1);
        }
        if !enqueue {
            return;
        }
        if self.drop_lost(id) || self.drop_twin(id) {
            self.stats.count(lane, Counter::PagesReleased, 1);
        } else {
            self.orders.enqueue(&self.pages, payer, id);
        }
    }

    /// A page off the device that nobody holds and nothing continues ends. The caller would put it into the order.
    fn drop_lost(&self, id: PageId) -> bool {
        if !self.pages.read(id).is_away() || self.pages.children(id) > 0 {
            return false;
        }
        let Ok(word) = self.pages.transit(id, |w| w.evict()) else { return false };
        self.expel_alone(id, word);
        true
    }

    /// Drop one reference on a page that may be off the device, or on its way. Whether the reference was stale.
    fn let_go_away(&self, lane: Lane, page: PageRef) -> bool {
        // With the word that is dropped: between it and the end of a lease a page does not move.
        let drop_ref = |w: PageWord| {
            w.drop_ref(page.generation).map(|(next, dropped)| (next, (dropped, self.account_of(page.id))))
        };
        match self.pages.transit_with(page.id, drop_ref) {
            Ok((dropped, account)) => {
                self.settle_alone(lane, page.id, dropped, account);
                false
            }
            Err(_) => true,
        }
    }

    /// The books of one page whose reference was dropped.
    fn settle_alone(&self, lane: Lane, id: PageId, dropped: Dropped, account: Account) {
        match dropped {
            Dropped::Held => {}
            Dropped::Pinned => self.ledger.to_pinned(account.tier, account.payer, account.units),
            Dropped::Cached { enqueue } => self.park_alone(lane, id, account, enqueue),
            Dropped::Leaving => {
                self.free_leaving(lane, id);
                self.stats.count(lane, Counter::PagesReleased, 1);
            }
        }
    }

    /// A page that is LEAVING, never had a key (or lost it) and was counted as held.
    pub(crate) fn free_leaving(&self, lane: Lane, id: PageId) {
        let (location, payer) = (self.pages.location(id), self.pages.payer(id));
        let tier = location.tier().unwrap_or(Tier::Device);
        let class = self.class_at(location);
        self.retire(id);
        self.free_place(id, class, location);
        self.ledger.discharge(tier, payer, lane, Units(class.units));
    }

    /// Pages of one payer and one class, on the device.
    fn let_go_run(
        &self,
        lane: Lane,
        payer: TenantId,
        class: ClassId,
        run: &[PageRef],
        scratch: &mut Scratch,
    ) -> usize {
        let tier = Tier::Device;
        let class = self.classes[class.as_usize()];
        let units = class.units;
        scratch.ids.clear();
        scratch.queue.clear();
        let (mut parked, mut pinned, mut stale) = (0, 0, 0);
        for page in run {
            // It may have landed in another tier since the run was made up.
            let drop_ref = |w: PageWord| {
                let (next, dropped) = w.drop_ref(page.generation)?;
                Some((next, (dropped, w.is_away().then(|| self.account_of(page.id)))))
            };
            match self.pages.transit_with(page.id, drop_ref) {
                Ok((Dropped::Held, _)) => {}
                Ok((dropped, Some(account))) => self.settle_alone(lane, page.id, dropped, account),
                Ok((Dropped::Pinned, _)) => pinned += units,
                Ok((Dropped::Cached { enqueue }, _)) => {
                    parked += units;
                    if enqueue {
                        scratch.queue.push(page.id);
                    }
                }
                Ok((Dropped::Leaving, _)) => scratch.ids.push(page.id),
                Err(_) => stale += 1,
            }
        }
        if pinned > 0 {
            self.ledger.to_pinned(tier, payer, Units(pinned));
        }
        if parked > 0 {
            self.ledger.park(tier, payer, Units(parked));
            let before = scratch.queue.len();
            scratch.queue.retain(|&id| !self.drop_twin(id));
            let dropped = before - scratch.queue.len();
            if dropped > 0 {
                self.stats.count(lane, Counter::PagesReleased, dropped as u64);
            }
            self.orders.enqueue_all(&self.pages, payer, &scratch.queue);
        }
        if !scratch.ids.is_empty() {
            scratch.frames.clear();
            for &id in &scratch.ids {
                scratch.frames.push(self.pages.location(id).frame());
                self.retire(id);
            }
            // Both were taken with the pages.
            let _ = self.slots.release_many(&scratch.ids);
            let _ = self.arena(tier).release_many(class.size, &scratch.frames);
            let freed = scratch.ids.len() as u32 * units;
            let mut kept = 0;
            if let Some(again) = scratch.again.iter_mut().find(|again| again.0 == payer) {
                kept = freed.min(again.1);
                again.1 -= kept;
                self.ledger.discharge_promised(tier, payer, lane, Units(kept));
            }
            self.ledger.discharge(tier, payer, lane, Units(freed - kept));
            self.stats.count(lane, Counter::PagesReleased, scratch.ids.len() as u64);
        }
        stale
    }
}

#[cfg(all(test, any(kvalloc_loom, kvalloc_shuttle)))]
mod models;

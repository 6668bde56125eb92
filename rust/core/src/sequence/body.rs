//! What a sequence is: its counts, its tables, its chain of keys, its promises, and how each of them moves. The counts and
//! the invariant stand at the head of sequence.rs.

use std::sync::Arc;

use super::{
    Counts, MOST_ROOM,
    loss::Full,
    suspend::{Passage, State},
};
use crate::{
    error::{Error, Refusal},
    evict::Protection,
    hash::ChainKey,
    index::Parent,
    life::{Names, News},
    pool::{Pool, Scratch},
    prefix::{Hit, Range, scope_at},
    spec::GroupKind,
    stats::Lookup,
    sync::Atom,
    word::{GroupId, Lane, PageRef, TenantId},
};
/// The pages of one layer group. Entries before `start` have been released (they left the window), and so have those that are
/// [`gone`](crate::page::Pages::gone).
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    pub(crate) start: u32,
    pub(crate) pages: Vec<PageRef>,
}

impl Table {
    pub(crate) fn live(&self) -> &[PageRef] {
        &self.pages[self.start as usize..]
    }
}

/// How many chain keys a sequence remembers, so that a rejected draft can be taken back without hashing anew.
const KEPT_KEYS: usize = 4;

/// Whether the child counts of the chain's pages run ahead of their publication, behind a page and before it.
#[derive(Clone, Copy, Default)]
struct Chained {
    to_last: bool,
    to_next: bool,
}

/// All that a sequence is.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) tenant: TenantId,
    pub(crate) lane: Lane,
    pub(crate) tokens: Vec<u32>,
    pub(crate) slots: u32,
    pub(crate) written: u32,
    pub(crate) prompt: u32,
    pub(crate) cached: u32,
    pub(crate) tables: Vec<Table>,
    /// Pages published, hit or settled (loss.rs), per group and place.
    pub(crate) published: u32,
    /// The keys of the last published pages, the newest last; the root's below them all.
    pub(super) keys: Vec<ChainKey>,
    pub(super) root: ChainKey,
    /// What the next page continues; `None`: nothing more is published.
    parent: Option<Parent>,
    pub(super) ranges: Vec<Range>,
    /// Parts of the prompt that were to be shared and are the sequence's own: scope, tokens.
    pub(super) fallbacks: Vec<(TenantId, u32)>,
    pub(crate) promises: Vec<(TenantId, u32)>,
    /// What the promises may be filled up to again when pages go back.
    pub(super) promised: Vec<(TenantId, u32)>,
    pub(crate) shared_tail: bool,
    /// The most tokens it was admitted for; 0: no bound of its own.
    pub(crate) admitted: u32,
    /// Room for all of that was reserved when it was opened.
    pub(super) reserved: bool,
    /// Its lookup is counted.
    pub(super) counted: bool,
    /// Tokens it looked up when it was resumed; `None`: this is its first run.
    pub(super) resumed: Option<u32>,
    pub(super) protection: Protection,
    /// Running or suspended,
    pub(super) stand: State,
    /// and the plan that has it in hand (suspend.rs).
    pub(super) passage: Option<Arc<Passage>>,
    /// Some of its tokens are not known.
    pub(crate) blind: bool,
    /// The first page that may be less exact than it was written (loss.rs).
    pub(super) lossy: Option<u32>,
    /// Sequences that are older have a smaller number.
    pub(crate) born: u64,
}

impl Body {
    #[expect(clippy::too_many_arguments, reason = "all that a sequence begins with")]
    pub(super) fn new(
        tenant: TenantId,
        lane: Lane,
        mut tokens: Vec<u32>,
        max_new: u32,
        root: ChainKey,
        ranges: Vec<Range>,
        hit: Hit,
        pool: &Pool,
    ) -> Self {
        pool.sequences[tenant.as_usize()].plus(1);
        // So that steps don't allocate; but an absurd bound takes no memory before it is used.
        let room =
            (tokens.len() + max_new.min(MOST_ROOM) as usize).div_ceil(pool.spec.page_tokens() as usize);
        tokens.reserve(max_new.min(MOST_ROOM) as usize);
        let mut body = Self {
            tenant,
            lane,
            prompt: tokens.len() as u32,
            tokens,
            slots: 0,
            written: 0,
            cached: 0,
            tables: Vec::new(),
            published: 0,
            keys: Vec::new(),
            root,
            parent: None,
            ranges,
            fallbacks: Vec::new(),
            promises: Vec::new(),
            promised: Vec::new(),
            shared_tail: false,
            admitted: 0,
            reserved: false,
            counted: false,
            resumed: None,
            protection: Protection::default(),
            stand: State::Running,
            passage: None,
            blind: false,
            lossy: None,
            born: 0,
        };
        body.begin(pool, hit, room);
        body
    }

    /// Begin with what was hit, in tables with room for `room` pages.
    pub(super) fn begin(&mut self, pool: &Pool, hit: Hit, room: usize) {
        let state = |g: usize| pool.is_state(GroupId(g as u8));
        // A snapshot that was hit is copied before the state is written on.
        self.shared_tail = hit.tables.iter().enumerate().any(|(g, t)| state(g) && !t.1.is_empty());
        self.cached = hit.pages * pool.spec.page_tokens();
        (self.slots, self.written, self.published) = (self.cached, self.cached, hit.pages);
        self.keys = hit.keys[hit.keys.len().saturating_sub(KEPT_KEYS)..].to_vec();
        self.parent = Some(hit.parent);
        self.lossy = None;
        let tables = hit.tables.into_iter().enumerate().map(|(g, (start, mut pages))| {
            let start = if state(g) { 0 } else { start };
            let dead = PageRef::from_bits(0);
            pages.splice(..0, std::iter::repeat_n(dead, start as usize));
            pages.reserve(room.saturating_sub(pages.len()));
            Table { start, pages }
        });
        self.tables = tables.collect();
    }

    pub(crate) fn known(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// The tokens of a step are written, and nobody said what they are: what follows can't be found by content.
    pub(crate) fn lose_sight(&mut self, known: u32) {
        self.tokens.resize(known as usize, 0);
        self.parent = None;
        self.blind = true;
    }

    /// How many written and known tokens it takes until there is a page to publish; 0 while the hits are not counted.
    pub(crate) fn next_publish(&self, page_tokens: u32) -> u32 {
        match (self.counted, self.parent) {
            (false, _) => 0,
            (true, None) => u32::MAX,
            (true, Some(_)) => (self.published + 1).saturating_mul(page_tokens),
        }
    }

    pub(crate) fn fallbacks(&self) -> &[(TenantId, u32)] {
        &self.fallbacks
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            known: self.known(),
            slots: self.slots,
            written: self.written,
            prompt: self.prompt,
            cached: self.cached,
        }
    }

    /// Reserve what the sequence will need on its way to `total` tokens and does not hold yet.
    pub(super) fn reserve(&mut self, pool: &Pool, total: u32) -> Result<(), Error> {
        let page_tokens = pool.spec.page_tokens();
        for (g, info) in pool.groups.iter().enumerate() {
            let group = GroupId(g as u8);
            let have = self.tables[g].live().len() as u32;
            if pool.spec.groups()[g].kind.grows() {
                let mut page = self.tables[g].pages.len() as u32;
                let end = total.div_ceil(page_tokens);
                while page < end {
                    let payer = self.payer(page_tokens, page);
                    let run = (page..end).take_while(|&p| self.payer(page_tokens, p) == payer).count() as u32;
                    self.add_promise(payer, run.saturating_mul(info.units));
                    page += run;
                }
            } else if pool.is_state(group) {
                // A hit is a snapshot, which is copied into a page of the sequence's own.
                if have == 0 || self.slots == self.cached {
                    let payer = if have > 0 { self.tenant } else { self.payer(page_tokens, 0) };
                    self.add_promise(payer, info.units);
                }
            } else {
                let most = pool.spec.peak_pages(group, total, page_tokens).saturating_sub(have);
                let mut page = self.tables[g].pages.len() as u32;
                let end = total.div_ceil(page_tokens);
                while page < end {
                    let payer = self.payer(page_tokens, page);
                    let run = (page..end).take_while(|&p| self.payer(page_tokens, p) == payer).count() as u32;
                    self.add_promise(payer, run.min(most).saturating_mul(info.units));
                    page += run;
                }
            }
        }
        let promises = std::mem::take(&mut self.promises);
        if !self.ranges.is_empty() {
            let mut need: Vec<_> = promises.iter().map(|&(payer, units)| (payer, u64::from(units))).collect();
            for page in self.tables.iter().flat_map(Table::live) {
                let payer = pool.pages.payer(page.id);
                let units = u64::from(pool.units_of(page.id));
                if units == 0 {
                    continue;
                }
                match need.iter_mut().find(|n| n.0 == payer) {
                    Some(sum) => sum.1 += units,
                    None => need.push((payer, units)),
                }
            }
            pool.check_ever(self.tenant, &need)?;
        }
        for (payer, units) in promises {
            pool.promise(self.lane, payer, units)?;
            self.promises.push((payer, units));
        }
        self.promised.clone_from(&self.promises);
        Ok(())
    }

    fn add_promise(&mut self, payer: TenantId, units: u32) {
        match self.promises.iter_mut().find(|p| p.0 == payer) {
            Some(promise) => promise.1 = promise.1.saturating_add(units),
            None => self.promises.push((payer, units)),
        }
    }

    fn promise_of(&mut self, payer: TenantId) -> Option<&mut u32> {
        self.promises.iter_mut().find(|p| p.0 == payer).map(|p| &mut p.1)
    }

    fn payer(&self, page_tokens: u32, page: u32) -> TenantId {
        if self.ranges.is_empty() {
            self.tenant
        } else {
            scope_at(&self.ranges, self.tenant, page_tokens, page)
        }
    }

    /// Whether a page is paid by the tenant, or by whom its place belongs to: not where a shared range was cut inside it.
    pub(crate) fn is_its_payers(&self, pool: &Pool, place: usize, page: PageRef) -> bool {
        let payer = pool.pages.payer(page.id);
        payer == self.tenant || payer == self.payer(pool.spec.page_tokens(), place as u32)
    }

    /// Whether all further pages are its tenant's.
    pub(crate) fn pays_alone(&self) -> bool {
        self.ranges.is_empty() || self.ranges.last().is_some_and(|r| r.end <= self.slots)
    }

    /// Who pays, and what is left of its promise.
    pub(crate) fn purse(&mut self) -> (TenantId, Option<&mut u32>) {
        (self.tenant, self.promises.iter_mut().find(|p| p.0 == self.tenant).map(|p| &mut p.1))
    }

    /// Take the pages for `slots` tokens in every group: all or none.
    pub(crate) fn grow(
        &mut self,
        pool: &Pool,
        lane: Lane,
        slots: u32,
        scratch: &mut Scratch,
    ) -> Result<(), Refusal> {
        let page_tokens = pool.spec.page_tokens();
        if slots > self.admitted && pool.is_frozen(self.tenant) {
            let more = u64::from(slots - self.slots) * pool.spec.bytes_per_token();
            return Err(pool.frozen(self.tenant, more));
        }
        let end = slots.div_ceil(page_tokens);
        // The group that is looked at first decides who pays for a place; the others follow.
        let first = (0..self.tables.len()).find(|&g| !pool.is_state(GroupId(g as u8))).unwrap_or(0);
        for g in 0..self.tables.len() {
            let group = GroupId(g as u8);
            let end = if pool.is_state(group) { 1 } else { end };
            let mut at = self.tables[g].pages.len() as u32;
            while at < end {
                let mut payer = self.payer(page_tokens, at);
                let mut run = if self.ranges.is_empty() {
                    end - at
                } else {
                    (at..end).take_while(|&p| self.payer(page_tokens, p) == payer).count() as u32
                };
                let promised = self.promises.iter().any(|p| p.0 == payer && p.1 >= pool.groups[g].units);
                if payer != self.tenant && !promised && g == first {
                    match pool.may_charge(self.tenant, payer).min(run) {
                        0 => {
                            // The right is used up: from here on the tenant pays itself, in every group.
                            self.fall_back(page_tokens, at);
                            payer = self.tenant;
                            run =
                                (at..end).take_while(|&p| self.payer(page_tokens, p) == payer).count() as u32;
                        }
                        pages => run = pages,
                    }
                }
                let mut none = 0;
                let promise = self
                    .promises
                    .iter_mut()
                    .find(|p| p.0 == payer)
                    .map_or(&mut none, |promise| &mut promise.1);
                let taken =
                    pool.take(lane, payer, group, run as usize, promise, &mut self.tables[g].pages, scratch);
                if let Err(refusal) = taken {
                    self.shrink_to(pool, lane, self.slots, scratch);
                    return Err(refusal);
                }
                at += run;
            }
        }
        Ok(())
    }

    /// What is left of the shared range that page `at` lies in becomes the tenant's own.
    fn fall_back(&mut self, page_tokens: u32, at: u32) {
        let start = at * page_tokens;
        let Some(r) = self.ranges.iter().position(|range| start < range.end) else { return };
        let lost = self.ranges[r];
        self.ranges[r].end = start;
        self.ranges.insert(r + 1, Range { end: lost.end, scope: self.tenant, may_publish: true });
        self.fallbacks.push((lost.scope, lost.end - start));
    }

    /// Give back the pages behind `slots` tokens, filling the promise up again.
    pub(crate) fn shrink_to(&mut self, pool: &Pool, lane: Lane, slots: u32, scratch: &mut Scratch) {
        let page_tokens = pool.spec.page_tokens();
        let keep = slots.div_ceil(page_tokens) as usize;
        for g in (0..self.tables.len()).rev() {
            let group = GroupId(g as u8);
            let keep = if pool.is_state(group) { usize::from(slots > 0) } else { keep };
            if self.tables[g].pages.len() > keep {
                let surplus = self.tables[g].pages.split_off(keep);
                self.give_back(pool, lane, g, &surplus, None, scratch);
            }
        }
    }

    /// Forget what steps that are not committed did. A fixed state has moved on with them and can't go back, so there
    /// the sequence begins anew.
    pub(crate) fn forget_steps(&mut self, pool: &Pool, lane: Lane, scratch: &mut Scratch) {
        let spoilt = self.slots > self.written && pool.has_states();
        self.slots = self.written;
        if spoilt {
            // Pages of other groups are children of the anchor's, so the anchor's go last.
            for g in self.groups_up(pool) {
                self.trim_table(pool, lane, g, u32::MAX, scratch);
            }
            self.begin(pool, Hit::nothing(pool, self.root), 0);
        }
        self.shrink_to(pool, lane, self.slots, scratch);
    }

    /// Pages of group `g` go back. An admitted sequence keeps the room it was promised with `payer`, or with all.
    fn give_back(
        &mut self,
        pool: &Pool,
        lane: Lane,
        g: usize,
        pages: &[PageRef],
        payer: Option<TenantId>,
        scratch: &mut Scratch,
    ) {
        scratch.again.clear();
        for &(payer, most) in self.promised.iter().filter(|p| payer.is_none_or(|payer| p.0 == payer)) {
            let given = pages.iter().filter(|p| pool.pages.payer(p.id) == payer).count() as u32;
            let now = self.promises.iter().find(|p| p.0 == payer).map_or(most, |p| p.1);
            scratch.again.push((payer, (given * pool.groups[g].units).min(most.saturating_sub(now))));
        }
        let wanted = scratch.again.clone();
        // What becomes free goes from held to promised at once, which nothing can refuse.
        pool.let_go_reversed(lane, pages, scratch);
        let missing = std::mem::take(&mut scratch.again);
        for ((payer, wanted), (_, missing)) in wanted.into_iter().zip(missing) {
            let Some(promise) = self.promise_of(payer) else { continue };
            *promise += wanted - missing;
            // What stays cached, or others hold too, takes room of its own.
            if missing > 0 && pool.promise(lane, payer, missing).is_ok() {
                *promise += missing;
            }
        }
    }

    /// Release what is in no window of the token number `next` and those behind it.
    pub(crate) fn trim(&mut self, pool: &Pool, lane: Lane, next: u32, scratch: &mut Scratch) {
        for g in 0..self.tables.len() {
            let needed = pool.spec.first_needed(GroupId(g as u8), next);
            self.trim_table(pool, lane, g, needed, scratch);
        }
    }

    /// Release the pages of a group before page `end`.
    fn trim_table(&mut self, pool: &Pool, lane: Lane, g: usize, end: u32, scratch: &mut Scratch) {
        let table = &mut self.tables[g];
        let end = end.min(table.pages.len() as u32);
        if end > table.start {
            let left = table.pages[table.start as usize..end as usize].to_vec();
            table.start = end;
            // What a window leaves behind in a shared range is not needed there again.
            self.give_back(pool, lane, g, &left, Some(self.tenant), scratch);
        }
    }

    /// The first count of written tokens at which [`Self::trim`] has something to do.
    pub(crate) fn next_trim(&self, pool: &Pool) -> u32 {
        let page_tokens = pool.spec.page_tokens();
        let trims = pool.spec.groups().iter().zip(&self.tables).map(|(group, table)| match group.kind {
            GroupKind::Window { tokens } => {
                (table.start + 1).saturating_mul(page_tokens).saturating_add(tokens - 1)
            }
            GroupKind::Chunked { tokens } => {
                // The first chunk border behind the end of the first page still held.
                ((table.start + 1).saturating_mul(page_tokens)).div_ceil(tokens).saturating_mul(tokens)
            }
            _ => u32::MAX,
        });
        trims.min().unwrap_or(u32::MAX)
    }

    /// Publish the pages that are full, written and known.
    pub(crate) fn publish(&mut self, pool: &Pool, lane: Lane, scratch: &mut Scratch) {
        let page_tokens = pool.spec.page_tokens();
        let end = self.written.min(self.known()) / page_tokens;
        if self.published >= end || self.parent.is_none() {
            return;
        }
        match self.full(pool) {
            Full::Publish => {}
            Full::Settle => {
                self.settle(pool, end);
                return self.drop_gone(pool, scratch);
            }
            Full::Wait => return,
        }
        let first_group = pool.spec.anchor().unwrap_or(GroupId(0));
        let mut keys = std::mem::take(&mut scratch.keys);
        while self.published < end && self.parent.is_some() {
            let start = self.published;
            let scope = self.payer(page_tokens, start);
            let run = match self.ranges.is_empty() {
                true => end,
                false => (start..end).find(|&page| self.payer(page_tokens, page) != scope).unwrap_or(end),
            };
            keys.clear();
            let parent = *self.keys.last().unwrap_or(&self.root);
            let size = page_tokens as usize;
            let tokens = &self.tokens[start as usize * size..run as usize * size];
            pool.hasher.pages(scope, parent, size, tokens, &mut keys);
            // What left the cache not long ago and is written again counts as proven, the run judged as one.
            let proven =
                pool.orders.recall(scope, keys.iter().map(|&key| pool.hasher.index_key(key, first_group)));
            for (nth, &key) in keys.iter().enumerate() {
                // In the chain each page counts the next one before that is there, so that it is counted without a word.
                let chained = Chained { to_last: nth > 0, to_next: nth + 1 < keys.len() };
                if !self.publish_page(pool, lane, key, chained, nth < proven, &mut scratch.news) {
                    break;
                }
            }
            let done = &keys[..(self.published - start) as usize];
            self.keys.extend_from_slice(&done[done.len().saturating_sub(KEPT_KEYS)..]);
            self.keys.drain(..self.keys.len().saturating_sub(KEPT_KEYS));
        }
        scratch.keys = keys;
        pool.tell(lane, &mut scratch.news);
    }

    fn page(&self, page_tokens: u32, page: u32) -> &[u32] {
        &self.tokens[page as usize * page_tokens as usize..][..page_tokens as usize]
    }

    /// Publish the next page in every group; `false`: the chain ends here.
    fn publish_page(
        &mut self,
        pool: &Pool,
        lane: Lane,
        key: ChainKey,
        chained: Chained,
        proven: bool,
        news: &mut News,
    ) -> bool {
        let Some(parent) = self.parent else { return false };
        let page = self.published;
        let tokens = self.page(pool.spec.page_tokens(), page);
        let names = |group, parent, chained: Chained| Names {
            key: pool.hasher.index_key(key, group),
            parent,
            tokens: Some(tokens),
            counted: chained.to_last,
            continued: chained.to_next,
        };
        let anchor = pool.spec.anchor();
        let mut next = Parent::Digest(pool.hasher.digest(key));
        let mut others = parent;
        if let Some(group) = anchor {
            let at = self.tables[group.as_usize()].pages[page as usize];
            match pool.publish(lane, at, group, &names(group, parent, chained), proven, news) {
                Some(seen) => (next, others) = (seen.as_parent(), seen.as_parent()),
                None => {
                    self.parent = None;
                    return false;
                }
            }
            self.protect(pool, at);
        }
        for g in (0..self.tables.len()).map(|g| GroupId(g as u8)) {
            let table = &self.tables[g.as_usize()];
            if Some(g) != anchor && !pool.is_state(g) && page >= table.start {
                let at = table.pages[page as usize];
                // What can't be listed costs later hits, nothing else.
                if pool.publish(lane, at, g, &names(g, others, Chained::default()), proven, news).is_none() {
                    // It is full all the same.
                    pool.pages.clear_open(at.id);
                }
                self.protect(pool, at);
            }
        }
        self.parent = Some(next);
        self.published += 1;
        true
    }

    /// The pages that steps of a batch may write to: what is published does not change any more.
    pub(crate) fn unsettled(&self, pool: &Pool) -> impl Iterator<Item = PageRef> {
        let settled = |g: usize| if pool.is_state(GroupId(g as u8)) { 0 } else { self.published };
        self.tables.iter().enumerate().flat_map(move |(g, table)| {
            table.pages.iter().skip(settled(g).max(table.start) as usize).copied()
        })
    }

    fn protect(&self, pool: &Pool, page: PageRef) {
        if self.protection != Protection::default() {
            pool.pages.set_protection(page.id, self.protection.0);
        }
    }

    /// Keep the fixed state as it is now as a snapshot that later prompts can start from: its page is published, and the
    /// next step continues in a copy. `false`: there is none, or it does not stand at a page's edge.
    pub(crate) fn keep_state(&mut self, pool: &Pool, lane: Lane) -> bool {
        let page_tokens = pool.spec.page_tokens();
        // A step that is not committed has moved the state on.
        if self.written == 0
            || self.slots != self.written
            || !self.written.is_multiple_of(page_tokens)
            || self.published != self.written / page_tokens
            || self.full(pool) != Full::Publish
        {
            return false;
        }
        let (Some(parent), Some(&key)) = (self.parent, self.keys.last()) else { return false };
        // It stands beside the page that ends here, and continues what that page of another group continues.
        let parent = match (pool.spec.anchor(), self.keys.len().checked_sub(2)) {
            (Some(_), _) => parent,
            (None, Some(before)) => Parent::Digest(pool.hasher.digest(self.keys[before])),
            (None, None) => return false,
        };
        let tokens = &self.tokens[(self.written - page_tokens) as usize..self.written as usize];
        let mut kept = false;
        let mut news = News::default();
        for g in (0..self.tables.len()).map(|g| GroupId(g as u8)).filter(|&g| pool.is_state(g)) {
            let Some(&page) = self.tables[g.as_usize()].pages.first() else { continue };
            if !pool.pages.read(page.id).is_indexed() {
                let key = pool.hasher.index_key(key, g);
                let names = Names { key, parent, tokens: Some(tokens), counted: false, continued: false };
                kept |= pool.publish(lane, page, g, &names, false, &mut news).is_some();
                self.shared_tail = true;
            }
        }
        pool.tell(lane, &mut news);
        kept
    }

    /// Count the prompt's hits, once for each sequence however often it is stepped.
    pub(crate) fn count_hits(&mut self, pool: &Pool, lane: Lane) {
        if !self.counted {
            self.counted = true;
            let mut lookup = match self.resumed {
                Some(tokens) => Lookup::new(tokens, self.cached, true),
                None => Lookup::new(self.prompt, self.cached, false),
            };
            pool.stats.count_lookup(lane, self.tenant, &mut lookup);
        }
    }

    /// Forget the tokens behind `n`.
    pub(crate) fn truncate(
        &mut self,
        pool: &Pool,
        lane: Lane,
        n: u32,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        if n == 0 || n > self.known().max(self.slots) {
            return Err(Error::Argument(format!(
                "can't truncate to {n} tokens; the sequence has {} (at least 1 stays)",
                self.known()
            )));
        }
        let page_tokens = pool.spec.page_tokens();
        for (g, table) in self.tables.iter().enumerate() {
            let group = GroupId(g as u8);
            if pool.is_state(group) && n < self.slots {
                return Err(Error::Argument(format!(
                    "the fixed state of group {g} can't go back to {n} tokens from {}; fork before drafting",
                    self.slots
                )));
            }
            if table.start > 0 && pool.spec.first_needed(group, n) < table.start {
                return Err(Error::Argument(format!(
                    "group {g} needs page {} at {n} tokens, which has left its window and was released",
                    pool.spec.first_needed(group, n)
                )));
            }
        }
        self.check_writable(pool, n)?;
        self.slots = self.slots.min(n);
        self.written = self.written.min(n);
        self.tokens.truncate(n as usize);
        // What was to be shared is the prompt that was opened, and not what comes in its place.
        for range in &mut self.ranges {
            range.end = range.end.min(n);
        }
        self.shrink_to(pool, lane, self.slots, scratch);
        let whole = n / page_tokens;
        if whole < self.published {
            self.rewind(pool, whole);
        }
        // A fork may share the page in which the next token goes, whether it has a key or not.
        self.shared_tail |= !self.slots.is_multiple_of(page_tokens);
        self.cached = self.cached.min(whole * page_tokens);
        Ok(())
    }

    /// What comes behind the first `n` tokens is written into the page they end in: not if that is compressed or cut, or about
    /// to be.
    fn check_writable(&self, pool: &Pool, n: u32) -> Result<(), Error> {
        let page_tokens = pool.spec.page_tokens();
        let at = n / page_tokens;
        let small = |(g, table): (usize, &Table)| {
            let page = table.pages.get(at as usize).filter(|_| at >= table.start);
            !pool.is_state(GroupId(g as u8)) && page.is_some_and(|page| pool.is_fixed(*page))
        };
        if n.is_multiple_of(page_tokens) || n >= self.slots || !self.tables.iter().enumerate().any(small) {
            return Ok(());
        }
        Err(Error::Argument(format!(
            "can't truncate to {n} tokens: page {at} is compressed or cut, or a plan is about to, and can't be written on; \
             truncate to {} tokens and compute the rest again",
            at * page_tokens
        )))
    }

    /// Continue the chain behind `page` pages.
    fn rewind(&mut self, pool: &Pool, page: u32) {
        let back = (self.published - page) as usize;
        if back < self.keys.len() {
            self.keys.truncate(self.keys.len() - back);
        } else {
            let page_tokens = pool.spec.page_tokens();
            let mut key = self.root;
            for p in 0..page {
                let tokens = &self.tokens[p as usize * page_tokens as usize..][..page_tokens as usize];
                key = pool.hasher.page(self.payer(page_tokens, p), key, tokens);
            }
            self.keys = vec![key];
        }
        self.published = page;
        let key = *self.keys.last().unwrap_or(&self.root);
        self.parent = match (page.checked_sub(1), pool.spec.anchor()) {
            (Some(last), Some(group)) => {
                // (One that was cut leads nowhere, and nothing is published behind it.)
                let at = self.tables[group.as_usize()].pages[last as usize];
                Some(Parent::Page { at, prefix: pool.pages.prefix(at.id) })
            }
            _ => Some(Parent::Digest(pool.hasher.digest(key))),
        };
    }

    /// A second sequence with the same tokens and pages; both copy a shared page before they write into it.
    pub(crate) fn fork(&mut self, pool: &Pool, scratch: &mut Scratch) -> Result<Self, Error> {
        if self.slots > self.written && pool.has_states() {
            return Err(Error::Argument(format!(
                "the fixed state has moved on to {} tokens with steps that are not committed; commit them, then fork",
                self.slots
            )));
        }
        // What both hold can't be unlisted any more.
        self.drop_gone(pool, scratch);
        let mut shared: Vec<PageRef> = Vec::new();
        let mut tables = self.tables.clone();
        for (g, table) in tables.iter_mut().enumerate() {
            // Pages of steps that are not committed yet are this sequence's alone.
            let keep = if pool.is_state(GroupId(g as u8)) {
                1
            } else {
                self.written.div_ceil(pool.spec.page_tokens())
            };
            table.pages.truncate(keep as usize);
            let live = table.live();
            let n = pool.hold_again(live.iter().copied());
            shared.extend_from_slice(&live[..n]);
            if n < live.len() {
                pool.let_go_reversed(self.lane, &shared, scratch);
                return Err(Error::Argument(match pool.pages.read(live[n].id).is_leased() {
                    true => {
                        "a plan compresses or cuts its pages, or moves compressed ones; commit or abort it, then fork"
                            .into()
                    }
                    false => format!("a page can have at most {} references", crate::word::page::MAX_REFS),
                }));
            }
        }
        self.shared_tail = true;
        if self.slots == self.written {
            // Both ask before they write to what they share now.
            self.unsettled(pool).for_each(|page| pool.pages.clear_open(page.id));
        }
        pool.sequences[self.tenant.as_usize()].plus(1);
        let born = pool.next_turn();
        Ok(Self {
            born,
            lane: Lane::wrapped(born),
            tokens: self.tokens.clone(),
            tables,
            keys: self.keys.clone(),
            ranges: self.ranges.clone(),
            fallbacks: self.fallbacks.clone(),
            promises: Vec::new(),
            promised: Vec::new(),
            // Slots of steps that are not committed are the parent's alone.
            slots: self.written,
            counted: true,
            reserved: false,
            stand: State::Running,
            passage: None,
            ..*self
        })
    }

    /// The groups in the order in which their pages go: those of other groups are children of the anchor's.
    pub(crate) fn groups_up(&self, pool: &Pool) -> impl Iterator<Item = usize> + use<> {
        let anchor = pool.spec.anchor().map(GroupId::as_usize);
        (0..self.tables.len()).filter(move |&g| Some(g) != anchor).chain(anchor)
    }

    /// Everything goes back, once.
    pub(crate) fn release_all(&mut self, pool: &Pool, scratch: &mut Scratch) {
        for g in self.groups_up(pool) {
            let table = std::mem::take(&mut self.tables[g]);
            pool.let_go_reversed(self.lane, table.live(), scratch);
        }
        pool.unpromise(self.lane, &mut self.promises);
        self.parent = None;
        pool.sequences[self.tenant.as_usize()].minus(1);
    }
}

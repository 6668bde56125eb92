//! The longest cached prefix of a prompt, found and referenced in one step.
//!
//! A hit of n tokens needs all that decoding from n needs: every page of a group that grows, the last window's pages of
//! a window group, a kept snapshot at n of a fixed state. The first group that grows is the anchor: its pages form the
//! chain, and pages of the other groups continue the anchor's page at the same place. A model without an anchor (all
//! layers slide) has no chain of pages: there each page is linked to a digest of all tokens before it.
//!
//! What is referenced here can't be evicted before it is used. Dropping the [`Hit`] without using it is a leak, so it is
//! handed to a sequence at once or let go.
//!
//! Callers: sequence.rs, admit.rs.

use crate::{
    hash::ChainKey,
    index::{AHEAD, Hints, Parent, Wanted, can_hit, page_before},
    pool::{Pool, Scratch},
    spec::GroupKind,
    word::{GroupId, Lane, PageRef, TenantId},
};

/// A part of a prompt and the node under which it is shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Range {
    /// The first token behind it.
    pub(crate) end: u32,
    /// Who pays for its new pages, and under whom they are found.
    pub(crate) scope: TenantId,
    /// New pages may be published there. Without the right what is there is hit, and the rest is the sequence's own.
    pub(crate) may_publish: bool,
}

/// Which node a page belongs to: the one of its last token. What lies behind all ranges is the tenant's own.
pub(crate) fn scope_at(ranges: &[Range], tenant: TenantId, page_tokens: u32, page: u32) -> TenantId {
    range_at(ranges, page_tokens, page).map_or(tenant, |r| ranges[r].scope)
}

fn range_at(ranges: &[Range], page_tokens: u32, page: u32) -> Option<usize> {
    let last = u64::from(page_tokens) * (u64::from(page) + 1) - 1;
    ranges.iter().position(|r| last < u64::from(r.end))
}

/// What was found. Every page in it holds a reference.
#[derive(Debug)]
pub(crate) struct Hit {
    /// Pages hit, per layer group and place.
    pub(crate) pages: u32,
    /// Per group: the first page number, and the pages from there on. Of a fixed state: the snapshot.
    pub(crate) tables: Vec<(u32, Vec<PageRef>)>,
    /// The keys of the last pages hit, the newest last; at least one (the root's if nothing was hit).
    pub(crate) keys: Vec<ChainKey>,
    /// What the next page continues.
    pub(crate) parent: Parent,
}

impl Hit {
    /// A prompt of which nothing is there.
    pub(crate) fn nothing(pool: &Pool, root: ChainKey) -> Self {
        Self {
            pages: 0,
            tables: vec![(0, Vec::new()); pool.groups.len()],
            keys: vec![root],
            parent: Parent::Digest(pool.hasher.digest(root)),
        }
    }
}

/// A prompt to look up.
#[derive(Debug)]
pub(crate) struct Prompt<'a> {
    pub(crate) tenant: TenantId,
    pub(crate) tokens: &'a [u32],
    pub(crate) root: ChainKey,
}

/// The chain of a lookup in progress.
struct Chain {
    keys: Vec<ChainKey>,
    seen: Vec<PageRef>,
    /// Pages of other groups count only if they continue the very pages of the chain.
    exact: bool,
}

impl Pool {
    /// Look a prompt up and reference what is there. The last token is never hit: somebody has to compute something.
    /// Ranges without the right to publish are cut where their hits end.
    pub(crate) fn find_prefix(
        &self,
        lane: Lane,
        prompt: &Prompt<'_>,
        ranges: &mut Vec<Range>,
        scratch: &mut Scratch,
    ) -> Hit {
        let page_tokens = self.spec.page_tokens();
        let most = (prompt.tokens.len() as u32).saturating_sub(1) / page_tokens;
        let anchor = self.spec.anchor();
        let groups = self.groups.len();
        let mut chain = Chain { keys: vec![prompt.root], seen: Vec::new(), exact: false };
        let mut n = match anchor {
            Some(group) => {
                self.follow(lane, prompt, ranges, group, most, &mut chain);
                chain.seen.len() as u32
            }
            None => {
                self.hash_all(prompt, ranges, most, &mut chain.keys);
                most
            }
        };
        let mut tables: Vec<(u32, Vec<PageRef>)> = vec![(0, Vec::new()); groups];
        // Others may shorten the hit, and what shortens one group shortens all: until nothing changes.
        'again: loop {
            let mut before = u32::MAX;
            while before != n {
                before = n;
                for g in (0..groups).map(|g| GroupId(g as u8)).filter(|&g| Some(g) != anchor) {
                    n = self.longest(prompt, ranges, &chain, g, n);
                }
            }
            if anchor.is_some() && !chain.exact {
                chain.exact = true;
                if self.change_over(lane, prompt, ranges, &mut chain, n, scratch) {
                    continue 'again;
                }
            }
            for g in (0..groups).map(|g| GroupId(g as u8)).filter(|&g| Some(g) != anchor) {
                let places = self.places(g, n);
                let wanted =
                    places.clone().map_while(|i| self.look(prompt, ranges, &chain, g, i)).collect::<Vec<_>>();
                let (held, _) = self.hold(lane, &wanted);
                tables[g.as_usize()] = (places.start, wanted[..held].to_vec());
                if held < places.len() {
                    // Evicted since it was seen, or not to be held: the hit ends before it.
                    n = places.start + held as u32;
                    for table in &mut tables {
                        self.let_go_reversed(lane, &table.1, scratch);
                        table.1.clear();
                    }
                    continue 'again;
                }
            }
            break;
        }
        chain.keys.truncate(n as usize + 1);
        let parent = match (n, anchor) {
            (0, _) => Parent::Digest(self.hasher.digest(prompt.root)),
            (_, Some(_)) => self.parent_of(chain.seen[n as usize - 1]),
            (_, None) => Parent::Digest(self.hasher.digest(chain.keys[n as usize])),
        };
        if let Some(group) = anchor {
            self.let_go_reversed(lane, &chain.seen[n as usize..], scratch);
            chain.seen.truncate(n as usize);
            tables[group.as_usize()] = (0, chain.seen);
        }
        Hit { pages: n, tables, keys: chain.keys, parent }
    }

    /// How many tokens of a prompt are cached now, without taking any reference: an answer that may be old at once.
    pub(crate) fn peek_prefix(&self, prompt: &Prompt<'_>, ranges: &[Range]) -> Vec<PageRef> {
        let Some(group) = self.spec.anchor() else { return Vec::new() };
        let page_tokens = self.spec.page_tokens();
        let most = (prompt.tokens.len() as u32).saturating_sub(1) / page_tokens;
        let mut chain = Chain { keys: vec![prompt.root], seen: Vec::new(), exact: false };
        let mut parent = self.anchor_parent(prompt, &chain, 0);
        for page in 0..most {
            let scope = scope_at(ranges, prompt.tenant, page_tokens, page);
            chain.keys.push(self.hasher.page(
                scope,
                chain.keys[page as usize],
                self.page_of(prompt.tokens, page),
            ));
            let wanted = self.wanted(prompt, &chain, scope, group, page, parent);
            let Some(seen) = self.index.lookup(&self.pages, &wanted, Some) else { break };
            chain.seen.push(seen.page);
            parent = seen.as_parent();
        }
        chain.seen
    }

    fn page_of<'a>(&self, tokens: &'a [u32], page: u32) -> &'a [u32] {
        let size = self.spec.page_tokens() as usize;
        &tokens[page as usize * size..][..size]
    }

    fn anchor_parent(&self, prompt: &Prompt<'_>, chain: &Chain, page: u32) -> Parent {
        match page.checked_sub(1) {
            None => Parent::Digest(self.hasher.digest(prompt.root)),
            Some(before) => self.parent_of(chain.seen[before as usize]),
        }
    }

    /// What continues a page that is held.
    fn parent_of(&self, at: PageRef) -> Parent {
        Parent::Page { at, prefix: self.pages.prefix(at.id) }
    }

    fn wanted<'a>(
        &self,
        prompt: &Prompt<'a>,
        chain: &Chain,
        scope: TenantId,
        group: GroupId,
        page: u32,
        parent: Parent,
    ) -> Wanted<'a> {
        Wanted {
            key: self.hasher.index_key(chain.keys[page as usize + 1], group),
            scope,
            parent,
            tokens: self.compare_tokens.then(|| self.page_of(prompt.tokens, page)),
        }
    }

    /// Follow the anchor's chain and reference it, some pages at a time.
    fn follow(
        &self,
        lane: Lane,
        prompt: &Prompt<'_>,
        ranges: &mut Vec<Range>,
        group: GroupId,
        most: u32,
        chain: &mut Chain,
    ) {
        let page_tokens = self.spec.page_tokens();
        let mut found = Vec::with_capacity(AHEAD);
        let mut in_a_row = false;
        loop {
            let start = chain.seen.len() as u32;
            let some = (most - start).min(AHEAD as u32);
            if start as usize == AHEAD {
                // A long hit, from the looks of it.
                chain.keys.reserve(most as usize);
                chain.seen.reserve(most as usize);
            }
            if some == 0 {
                return;
            }
            self.hash_on(prompt, ranges, chain.keys.len() as u32 - 1..start + some, &mut chain.keys);
            let mut keys = [0; AHEAD];
            for (index_key, &key) in keys.iter_mut().zip(&chain.keys[start as usize + 1..]) {
                *index_key = self.hasher.index_key(key, group);
            }
            let hints = match &chain.seen[..] {
                [.., before, last] if in_a_row => Hints::onward(&self.pages, before.id, last.id),
                _ => None,
            };
            let hints = hints.unwrap_or_else(|| self.index.probe(&self.pages, &keys[..some as usize]));
            found.clear();
            let mut parent = self.anchor_parent(prompt, chain, start);
            for (&key, (nth, page)) in keys.iter().zip((start..start + some).enumerate()) {
                let wanted = Wanted {
                    key,
                    scope: scope_at(ranges, prompt.tenant, page_tokens, page),
                    parent,
                    tokens: self.compare_tokens.then(|| self.page_of(prompt.tokens, page)),
                };
                let Some(seen) = self.index.lookup_probed(&self.pages, &hints, nth, &wanted, Some) else {
                    break;
                };
                parent = seen.as_parent();
                chain.seen.push(seen.page);
                found.push(seen.page);
                if !seen.exact {
                    self.follow_back(lane, chain, chain.seen.len() - 1, start as usize, &mut found);
                }
                // While the processor waits for this page's words it can hash the page that is looked up next time.
                let ahead = page + AHEAD as u32;
                if ahead < most {
                    let scope = scope_at(ranges, prompt.tenant, page_tokens, ahead);
                    let last = chain.keys.last().copied().unwrap_or(prompt.root);
                    chain.keys.push(self.hasher.page(scope, last, self.page_of(prompt.tokens, ahead)));
                }
            }
            let (held, refusal) = match ranges.is_empty() {
                true => self.hold_of(lane, prompt.tenant, &found),
                false => self.hold(lane, &found),
            };
            chain.seen.truncate(start as usize + held);
            if held == some as usize {
                // The ids of pages that were found came one after the other: so may the next ones.
                in_a_row =
                    found.len() > 1 && found[0].id.0.abs_diff(found[held - 1].id.0) as usize == held - 1;
                continue;
            }
            // Where a range without the right to publish ends its hits, the tenant's own pages may go on.
            let end = chain.seen.len() as u32;
            if refusal.is_none()
                && held == found.len()
                && let Some(r) = range_at(ranges, page_tokens, end)
                && !ranges[r].may_publish
            {
                chain.keys.truncate(end as usize + 1);
                ranges.insert(r, Range { end: end * page_tokens, ..ranges[r] });
                ranges[r + 1].scope = prompt.tenant;
                ranges[r + 1].may_publish = true;
                continue;
            }
            chain.keys.truncate(end as usize + 1);
            return;
        }
    }

    /// The page `last` of the chain may continue a copy of the page before it: then the chain goes over the copy. So whoever
    /// holds a page holds what it continues, and nothing that is cached is kept there by what is held; but for a copy that is off
    /// the device, which can't be hit. Pages from `start` on are in `found` and not held yet.
    fn follow_back(
        &self,
        lane: Lane,
        chain: &mut Chain,
        mut last: usize,
        start: usize,
        found: &mut [PageRef],
    ) {
        while last > 0
            && let Some(before) = page_before(&self.pages, chain.seen[last])
            && before != chain.seen[last - 1]
            && can_hit(self.pages.read(before.id))
        {
            last -= 1;
            let copy = std::mem::replace(&mut chain.seen[last], before);
            if last >= start {
                found[last - start] = before;
            } else if self.hold(lane, &[before]).0 == 1 {
                self.let_go(lane, &[copy], &mut Scratch::default());
            } else {
                // It is going, or may not be held: the copy is as good.
                chain.seen[last] = copy;
                return;
            }
        }
    }

    fn hash_all(&self, prompt: &Prompt<'_>, ranges: &mut [Range], most: u32, keys: &mut Vec<ChainKey>) {
        for range in ranges.iter_mut().filter(|r| !r.may_publish) {
            (range.scope, range.may_publish) = (prompt.tenant, true);
        }
        self.hash_on(prompt, ranges, 0..most, keys);
    }

    /// The keys of some pages behind those in `keys`.
    fn hash_on(
        &self,
        prompt: &Prompt<'_>,
        ranges: &[Range],
        pages: std::ops::Range<u32>,
        keys: &mut Vec<ChainKey>,
    ) {
        let size = self.spec.page_tokens();
        let mut start = pages.start;
        while start < pages.end {
            let scope = scope_at(ranges, prompt.tenant, size, start);
            let same = |&page: &u32| scope_at(ranges, prompt.tenant, size, page) == scope;
            let run = if ranges.is_empty() {
                pages.end
            } else {
                start + (start..pages.end).take_while(same).count() as u32
            };
            let tokens = &prompt.tokens[start as usize * size as usize..run as usize * size as usize];
            let parent = keys.last().copied().unwrap_or(prompt.root);
            self.hasher.pages(scope, parent, size as usize, tokens, keys);
            start = run;
        }
    }

    /// The places of `group` that a hit of `n` pages needs.
    fn places(&self, group: GroupId, n: u32) -> std::ops::Range<u32> {
        match self.spec.groups()[group.as_usize()].kind {
            GroupKind::State => n.saturating_sub(1)..n,
            // Behind the border of a chunk no page is needed. Without an anchor the last one stands for the chain: what
            // nobody ever wrote is no hit.
            _ => {
                let most = if self.spec.anchor().is_none() { n.saturating_sub(1) } else { n };
                self.spec.first_needed(group, n * self.spec.page_tokens()).min(most)..n
            }
        }
    }

    /// The page of a group other than the anchor at one place, if it is cached.
    fn look(
        &self,
        prompt: &Prompt<'_>,
        ranges: &[Range],
        chain: &Chain,
        group: GroupId,
        page: u32,
    ) -> Option<PageRef> {
        let parent = match chain.seen.get(page as usize) {
            Some(&anchor) => self.parent_of(anchor),
            None => Parent::Digest(self.hasher.digest(chain.keys[page as usize])),
        };
        let scope = scope_at(ranges, prompt.tenant, self.spec.page_tokens(), page);
        let wanted = self.wanted(prompt, chain, scope, group, page, parent);
        let found = self.index.lookup(&self.pages, &wanted, Some)?.page;
        let fits = !chain.exact
            || chain.seen.get(page as usize).is_none_or(|&at| page_before(&self.pages, found) == Some(at));
        fits.then_some(found)
    }

    /// Pages of other groups may continue copies of the chain's pages: then the chain goes over those that the last of
    /// them continue. Whether pages of other groups have to be looked up again.
    fn change_over(
        &self,
        lane: Lane,
        prompt: &Prompt<'_>,
        ranges: &[Range],
        chain: &mut Chain,
        n: u32,
        scratch: &mut Scratch,
    ) -> bool {
        let Some(last) = n.checked_sub(1) else { return false };
        let others =
            (0..self.groups.len()).map(|g| GroupId(g as u8)).filter(|&g| Some(g) != self.spec.anchor());
        let mut again = false;
        for group in others {
            for page in self.places(group, n) {
                again |= self.look(prompt, ranges, chain, group, page).is_none();
            }
        }
        let others =
            (0..self.groups.len()).map(|g| GroupId(g as u8)).filter(|&g| Some(g) != self.spec.anchor());
        if again {
            chain.exact = false;
            let found = others
                .filter(|&group| self.places(group, n).contains(&last))
                .find_map(|group| self.look(prompt, ranges, chain, group, last));
            chain.exact = true;
            let at = &mut chain.seen[last as usize];
            if let Some(copy) = found.and_then(|page| page_before(&self.pages, page))
                && copy != *at
                && self.hold(lane, &[copy]).0 == 1
            {
                let old = std::mem::replace(at, copy);
                self.let_go(lane, &[old], scratch);
                self.follow_back(lane, chain, last as usize, usize::MAX, &mut []);
            }
        }
        again
    }

    /// The longest hit of at most `n` pages that this group allows.
    fn longest(&self, prompt: &Prompt<'_>, ranges: &[Range], chain: &Chain, group: GroupId, n: u32) -> u32 {
        let there = |page| self.look(prompt, ranges, chain, group, page).is_some();
        if self.spec.groups()[group.as_usize()].kind.grows() {
            return (0..n).find(|&page| !there(page)).unwrap_or(n);
        }
        // From the right: `end` is a candidate, all places from `page + 1` up to it are there.
        let mut end = n;
        let mut page = n;
        while end > 0 && page > self.places(group, end).start {
            page -= 1;
            if !there(page) {
                end = page;
            }
        }
        end
    }

    /// Let pages go, the last first: children before parents.
    pub(crate) fn let_go_reversed(&self, lane: Lane, pages: &[PageRef], scratch: &mut Scratch) {
        if pages.is_empty() {
            return;
        }
        let mut reversed = std::mem::take(&mut scratch.reversed);
        reversed.clear();
        reversed.extend(pages.iter().rev().filter(|&&page| page != self.pages.gone()));
        let stale = self.let_go(lane, &reversed, scratch);
        debug_assert_eq!(stale, 0, "held pages can't be stale");
        scratch.reversed = reversed;
    }
}

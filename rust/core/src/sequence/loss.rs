//! What a sequence computes once pages of it are less exact than they were written (preempt/compress.rs), or were cut
//! (preempt/cut.rs).
//!
//! KV depends on all that is attended to, so what comes behind such a page is no more exact than that page, wherever it lies
//! and whatever else is like it. So it is not published: a key would lead to it by way of other copies of the pages before.
//! It is settled instead: full, so that nothing more is written to it, and known to nobody else.
//!
//! `lossy` is the first page that a plan took in hand to make less exact, and it is looked at before anything is published:
//!
//! | of the pages from there on | what is full |
//! | --- | --- |
//! | one is less exact | is settled |
//! | one is in the hands of such a plan, whose end is open | waits |
//! | none is: the plans came to nothing, or the sequence went back to before | is published |
//!
//! A page that was cut has a number, so that its holders and those that continue it in the index still know it. Nobody finds
//! what continues it any more: so that loses its key as well, and the numbers go back ([`Body::drop_gone`]). They are needed:
//! there are no more of them than frames. What others hold or continue keeps its key, and the numbers before it.

use super::Body;
use crate::{
    pool::{Pool, Scratch},
    word::{GroupId, PageRef},
};

/// What becomes of pages that are full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Full {
    Publish,
    Settle,
    Wait,
}

impl Body {
    /// A plan is about to make page `place` less exact.
    pub(crate) fn may_lose(&mut self, place: u32) {
        self.lossy = Some(self.lossy.map_or(place, |first| first.min(place)));
    }

    /// What becomes of pages that are full now.
    pub(crate) fn full(&mut self, pool: &Pool) -> Full {
        let Some(first) = self.lossy else { return Full::Publish };
        let mut open = false;
        for place in first..self.published {
            if self.kept_pages(pool, place).any(|page| pool.is_lossy(pool.pages.location(page.id))) {
                if !open {
                    // The next look begins here.
                    self.lossy = Some(place);
                }
                return Full::Settle;
            }
            open |= self.kept_pages(pool, place).any(|page| pool.pages.read(page.id).is_away());
        }
        if open {
            return Full::Wait;
        }
        self.lossy = None;
        Full::Publish
    }

    /// The pages at one place, of the groups that keep theirs.
    fn kept_pages(&self, pool: &Pool, place: u32) -> impl Iterator<Item = PageRef> {
        let kept = |g: usize| pool.spec.groups()[g].kind.grows();
        let tables = self.tables.iter().enumerate().filter(move |(g, _)| kept(*g));
        tables.filter_map(move |(_, table)| table.pages.get(place as usize).copied())
    }

    /// Pages up to `end` are full, and stay unknown.
    pub(super) fn settle(&mut self, pool: &Pool, end: u32) {
        for (g, table) in self.tables.iter().enumerate() {
            if !pool.is_state(GroupId(g as u8)) {
                let first = self.published.max(table.start).min(end) as usize;
                table.pages[first..end as usize].iter().for_each(|page| pool.pages.clear_open(page.id));
            }
        }
        self.published = end;
        // Their keys are nobody's: where the chain is continued again it is computed from its start.
        self.keys.clear();
    }

    /// Give back the numbers of pages that were cut.
    pub(crate) fn drop_gone(&mut self, pool: &Pool, scratch: &mut Scratch) {
        let Some(lossy) = self.lossy else { return };
        let gone = |page: PageRef| page != pool.pages.gone() && pool.pages.location(page.id).is_gone();
        let Some(first) = (lossy..self.published).find(|&p| self.kept_pages(pool, p).any(gone)) else {
            return;
        };
        // What continues a page goes before it.
        for place in (first..self.published).rev() {
            for g in self.groups_up(pool) {
                let (group, table) = (GroupId(g as u8), &mut self.tables[g]);
                if pool.is_state(group) || place < table.start {
                    continue;
                }
                let page = table.pages[place as usize];
                let unknown = !pool.pages.read(page.id).is_indexed() || pool.unlist(page, group);
                if unknown && gone(page) {
                    table.pages[place as usize] = pool.pages.gone();
                    pool.let_go_reversed(self.lane, &[page], scratch);
                }
            }
        }
    }
}

//! The lower face: pages in batches, for engines that keep their own tables.
//!
//! The same books and the same rules as for sequences. A reference is (page, generation) in 64 bits; a stale one is an
//! answer in [`Pages::share`] and an error in [`Pages::release`], and changes nothing in either.
//!
//! Callers: the binding.

use std::sync::Arc;

use crate::{
    error::Error,
    hash::{CallerKey, ChainKey, MAX_CALLER_KEY},
    index::{Parent, Wanted},
    life::{Names, News},
    pool::{Pool, Scratch},
    stats::Counter,
    word::{FrameId, GroupId, Lane, PageRef, TenantId},
};

/// The lower face of a pool. Each has its own lane: threads that use their own share no hot words.
#[derive(Clone, Debug)]
pub struct Pages {
    pool: Arc<Pool>,
    lane: Lane,
}

impl Pages {
    /// The lower face of `pool`.
    pub fn new(pool: &Arc<Pool>) -> Self {
        Self { pool: Arc::clone(pool), lane: pool.next_lane() }
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn check(&self, tenant: TenantId, group: GroupId) -> Result<(), Error> {
        self.pool.check_open()?;
        self.pool.check_group(group)?;
        self.pool.check_tenant(tenant)
    }

    fn check_refs(&self, pages: &[PageRef]) -> Result<(), Error> {
        let outside = pages.iter().find(|p| p.id.0 >= self.pool.pages.len());
        outside.map_or(Ok(()), |page| {
            Err(Error::Argument(format!("{page:?} is no page; the pool has {}", self.pool.pages.len())))
        })
    }

    /// Take `n` pages for `tenant`: all or none.
    ///
    /// # Errors
    /// No room; no such group or tenant.
    pub fn allocate(&self, tenant: TenantId, group: GroupId, n: usize) -> Result<Vec<PageRef>, Error> {
        self.check(tenant, group)?;
        let _op = self.pool.enter(self.lane);
        let mut out = Vec::new();
        let taken = self.pool.take(self.lane, tenant, group, n, &mut 0, &mut out, &mut Scratch::default());
        taken.inspect_err(|refusal| self.pool.count_refusal(self.lane, refusal))?;
        // The caller keeps tables of its own, in which they must not move.
        out.iter().for_each(|page| self.pool.pages.set_outside(page.id));
        Ok(out)
    }

    /// Where pages lie.
    ///
    /// # Errors
    /// Stale references, references that are no page.
    pub fn frames(&self, pages: &[PageRef]) -> Result<Vec<FrameId>, Error> {
        self.check_refs(pages)?;
        // A page in another life is another one's, and can be moved as before.
        self.all_current(pages, |word_refs| word_refs >= 1)?;
        // Before the caller is told, so that they don't move meanwhile.
        pages.iter().for_each(|p| self.pool.pages.set_outside(p.id));
        let frames = pages.iter().map(|p| self.pool.pages.location(p.id).frame()).collect();
        // The location belongs to this life of the page if the page is in it still.
        self.all_current(pages, |word_refs| word_refs >= 1)?;
        Ok(frames)
    }

    fn all_current(&self, pages: &[PageRef], enough: impl Fn(u32) -> bool) -> Result<(), Error> {
        let bad = |page: &&PageRef| {
            let word = self.pool.pages.read(page.id);
            word.generation() != page.generation || !enough(word.refs())
        };
        match pages.iter().find(bad) {
            None => Ok(()),
            Some(&first) => {
                let count = pages.iter().filter(bad).count();
                self.pool.stats.count(self.lane, Counter::StaleReferences, count as u64);
                Err(Error::Stale { count, first })
            }
        }
    }

    fn names(&self, scope: TenantId, group: GroupId, key: CallerKey<'_>) -> Result<Names<'static>, Error> {
        if let CallerKey::Bytes(bytes) = key
            && (bytes.is_empty() || bytes.len() > MAX_CALLER_KEY)
        {
            return Err(Error::Argument(format!(
                "a key of {} bytes; it must have 1 to {MAX_CALLER_KEY}",
                bytes.len()
            )));
        }
        let chain: ChainKey = self.pool.hasher.caller(scope, group, key);
        let parent = Parent::Digest(self.pool.hasher.digest(chain));
        let key = self.pool.hasher.index_key(chain, group);
        Ok(Names { key, parent, tokens: None, counted: false, continued: false })
    }

    /// Make pages that the caller holds, written to the end, findable under its keys. Which of them now are: one that is
    /// published already, or that the index has no room for, is not.
    ///
    /// # Errors
    /// Stale references; as many keys as pages; empty or long keys.
    pub fn publish(
        &self,
        tenant: TenantId,
        group: GroupId,
        pages: &[PageRef],
        keys: &[CallerKey<'_>],
    ) -> Result<Vec<bool>, Error> {
        self.check(tenant, group)?;
        self.check_refs(pages)?;
        if keys.len() != pages.len() {
            return Err(Error::Argument(format!("{} keys for {} pages", keys.len(), pages.len())));
        }
        let names = keys.iter().map(|&k| self.names(tenant, group, k)).collect::<Result<Vec<_>, _>>()?;
        self.all_current(pages, |refs| refs >= 1)?;
        let pool = &self.pool;
        let class = pool.groups[group.as_usize()].class;
        for page in pages {
            if pool.pages.payer(page.id) != tenant || pool.pages.location(page.id).class() != class {
                return Err(Error::Argument(format!(
                    "{page:?} was not allocated for tenant {:?} and group {}",
                    pool.ledger.name(tenant),
                    group.0
                )));
            }
        }
        let _op = pool.enter(self.lane);
        // References of its own: names must not be written on a page that the caller releases meanwhile.
        let held = pool.hold_again(pages.iter().copied());
        if held < pages.len() {
            pool.let_go(self.lane, &pages[..held], &mut Scratch::default());
            return Err(Error::Stale { count: 1, first: pages[held] });
        }
        let mut news = News::default();
        let publish = |(&page, names): (&PageRef, &Names<'_>)| {
            let word = pool.pages.read(page.id);
            // Somebody who holds it too could publish it at the same moment: one of them gives it its names.
            let proven = || pool.orders.recall(tenant, [names.key]) == 1;
            !word.is_indexed() && pool.publish(self.lane, page, group, names, proven(), &mut news).is_some()
        };
        let published = pages.iter().zip(&names).map(publish).collect();
        pool.tell(self.lane, &mut news);
        pool.let_go(self.lane, pages, &mut Scratch::default());
        Ok(published)
    }

    /// Look keys up in the scope of `tenant` and reference what is there, up to the first that is not: a gap ends a hit.
    ///
    /// # Errors
    /// No such group or tenant, empty or long keys.
    pub fn lookup(
        &self,
        tenant: TenantId,
        group: GroupId,
        keys: &[CallerKey<'_>],
    ) -> Result<Vec<PageRef>, Error> {
        let _op = self.pool.enter(self.lane);
        let mut found = self.find_all(tenant, group, keys)?;
        let end = found.iter().position(Option::is_none).unwrap_or(found.len());
        found.truncate(end);
        let found: Vec<_> = found.into_iter().flatten().collect();
        let (held, _) = self.pool.hold(self.lane, &found);
        Ok(found[..held].to_vec())
    }

    /// Look keys up without a reference: what is found may be gone at once, and [`Self::share`] tells.
    ///
    /// # Errors
    /// No such group or tenant, empty or long keys.
    pub fn find_all(
        &self,
        tenant: TenantId,
        group: GroupId,
        keys: &[CallerKey<'_>],
    ) -> Result<Vec<Option<PageRef>>, Error> {
        self.check(tenant, group)?;
        keys.iter()
            .map(|&key| {
                let Names { key, parent, tokens, .. } = self.names(tenant, group, key)?;
                let wanted = Wanted { key, scope: tenant, parent, tokens };
                Ok(self.pool.index.lookup(&self.pool.pages, &wanted, |seen| Some(seen.page)))
            })
            .collect()
    }

    /// Reference pages that were found. Which of them now are: a stale reference is an answer, not an error.
    ///
    /// # Errors
    /// References that are no page.
    pub fn share(&self, pages: &[PageRef]) -> Result<Vec<bool>, Error> {
        self.pool.check_open()?;
        self.check_refs(pages)?;
        let _op = self.pool.enter(self.lane);
        Ok(pages.iter().map(|page| self.pool.hold(self.lane, std::slice::from_ref(page)).0 == 1).collect())
    }

    /// Drop one reference on each page, in this order: children (later pages of a prefix) first.
    ///
    /// # Errors
    /// Stale references, or more drops of a page than it has references: then nothing is changed.
    pub fn release(&self, pages: &[PageRef]) -> Result<(), Error> {
        self.check_refs(pages)?;
        let mut sorted: Vec<u64> = pages.iter().map(|p| p.to_bits()).collect();
        sorted.sort_unstable();
        for same in sorted.chunk_by(|a, b| a == b) {
            let page = PageRef::from_bits(same[0]);
            let word = self.pool.pages.read(page.id);
            if word.generation() != page.generation || (word.refs() as usize) < same.len() {
                self.pool.stats.count(self.lane, Counter::StaleReferences, 1);
                return Err(Error::Stale { count: same.len(), first: page });
            }
        }
        let _op = self.pool.enter(self.lane);
        match self.pool.let_go(self.lane, pages, &mut Scratch::default()) {
            0 => Ok(()),
            // Another thread dropped them between the check and here.
            count => Err(Error::Stale { count, first: pages[0] }),
        }
    }
}

//! WHO holds: one request's tokens and, per layer group, its list of pages.
//!
//! # Counts
//!
//! | count | meaning |
//! | --- | --- |
//! | `known` | tokens whose ids are known: the prompt and what was sampled |
//! | `slots` | tokens that have a place in a page |
//! | `written` | tokens whose KV is in that place |
//!
//! `written <= slots`, and pages up to `written / page_tokens` whose tokens are known are published. An asynchronous
//! scheduler may have `slots > known` by the tokens of the steps that are not committed yet.
//!
//! # Invariant
//!
//! The tables of all groups that follow the tokens reach equally far; a window group's table begins later. Every page
//! listed holds one reference of this sequence. A page beyond the published ones is private unless a fork shares it;
//! `shared_tail` is set while the page of the next slot may be shared or findable, and is looked at before it is written.
//! What a sequence was promised at admission and does not hold yet is in `promises`.
//!
//! # Who may use one
//!
//! One thread at a time: the [`Body`] lies behind a lock that is only ever tried, and a second thread gets
//! [`Error::Busy`]. While the sequence stands in a batch, its body lies in the batch's row, behind the batch's own lock.
//! Dropping the last handle closes the sequence.
//!
//! Here is how one is opened and what its handle is; what it does is in body.rs, how it is suspended and comes back in
//! suspend.rs, what becomes of what is less exact in loss.rs.

mod body;
mod loss;
mod suspend;

use std::sync::{Arc, Weak};

pub(crate) use body::Body;
pub use suspend::{Mode, State};
pub(crate) use suspend::{Passage, Promises};

use crate::{
    batch::Shared as BatchShared,
    error::Error,
    evict::Protection,
    hash::{ChainKey, Context},
    ledger::ROOT,
    pool::{Pool, Scratch},
    prefix::{Hit, Prompt, Range},
    sync::{AtomicU32, Mutex, MutexGuard},
    word::{Lane, TenantId, Tier},
};

/// What a sequence is opened with.
#[derive(Clone, Debug, Default)]
pub struct Open<'a> {
    /// The prompt; at least one token. Becomes the sequence's own.
    pub tokens: Vec<u32>,
    /// How many tokens it may grow by.
    pub max_new_tokens: u32,
    /// Reserve the whole need now, or refuse.
    pub admit: bool,
    /// Shared parts of the prompt: how many tokens, under which node; one after the other from the start.
    pub share: &'a [(TenantId, u32)],
    /// The adapter's name.
    pub adapter: Option<&'a [u8]>,
    /// Which weights the adapter's name stands for.
    pub adapter_generation: u64,
    /// The caller's own key.
    pub extra_key: Option<&'a [u8]>,
    /// How much its pages are protected from eviction, 0-100.
    pub protection: u8,
    /// For how long, in milliseconds of the pool's clock; 0: for ever.
    pub protection_ms: u64,
}

/// Where a body is.
#[derive(Debug)]
pub(crate) enum Place {
    Idle(Box<Body>),
    Batched(Weak<BatchShared>),
    Closed,
}

/// A handle on a sequence.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) pool: Arc<Pool>,
    pub(crate) place: Mutex<Place>,
    /// Its row while it stands in a batch; kept by the batch.
    pub(crate) row: AtomicU32,
    pub(crate) tenant: TenantId,
    pub(crate) born: u64,
}

/// What a sequence counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Tokens whose ids are known.
    pub known: u32,
    /// Tokens with a place.
    pub slots: u32,
    /// Tokens written.
    pub written: u32,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens of the prompt that were hit.
    pub cached: u32,
}

/// (A panic inside left the body as it was between two steps of the books: it can still be closed.)
pub(crate) fn try_lock<'a, T>(lock: &'a Mutex<T>, what: &'static str) -> Result<MutexGuard<'a, T>, Error> {
    crate::sync::try_lock(lock).ok_or(Error::Busy(what))
}

impl Pool {
    /// Open a sequence: look its prompt up, reference what is cached, reserve the rest if asked to.
    ///
    /// # Errors
    /// An empty prompt, a scope that is not above the tenant, or (with `admit`) no room: then nothing is changed.
    pub fn open(self: &Arc<Self>, tenant: TenantId, mut open: Open<'_>) -> Result<Arc<Sequence>, Error> {
        self.check_open()?;
        if open.tokens.is_empty() {
            return Err(Error::Argument("the prompt is empty; a sequence needs at least one token".into()));
        }
        let total = u32::try_from(open.tokens.len())
            .ok()
            .and_then(|n| n.checked_add(open.max_new_tokens))
            .filter(|&n| n <= MAX_TOKENS)
            .ok_or_else(|| {
                Error::Argument(format!(
                    "{} prompt tokens and {} new ones; a sequence has at most {MAX_TOKENS}",
                    open.tokens.len(),
                    open.max_new_tokens
                ))
            })?;
        self.check_tenant(tenant)?;
        if self.is_frozen(tenant) {
            let refusal = self.frozen(tenant, self.need(total) * self.spec.unit());
            return Err(refusal.into());
        }
        let asked = self.ranges(tenant, &open)?;
        let born = self.next_turn();
        let lane = Lane::wrapped(born);
        let _op = self.enter(lane);
        if open.admit {
            // Whoever pays, it has to fit into the pool; with nothing shared this is the whole answer, before any lookup.
            let payer = open.share.first().map_or(tenant, |_| ROOT);
            self.check_ever(tenant, &[(payer, self.need(total))])?;
        }
        let mut scratch = Scratch::default();
        let root = self.root(&open);
        let mut ranges = asked.clone();
        let tokens = std::mem::take(&mut open.tokens);
        let prompt = Prompt { tenant, tokens: &tokens, root };
        let hit = self.find_prefix(lane, &prompt, &mut ranges, &mut scratch);
        let begin = |mut ranges: Vec<Range>, hit: Hit, tokens| {
            self.settle_ranges(tenant, &mut ranges, &hit);
            let mut body = Body::new(tenant, lane, tokens, open.max_new_tokens, root, ranges, hit, self);
            body.fallbacks = fallbacks(&asked, &body.ranges, tenant);
            body.protection = self.protection(&open);
            body.born = born;
            body
        };
        let mut body = begin(ranges, hit, tokens);
        if open.admit {
            let mut reserved = body.reserve(self, total);
            if reserved.is_err() && self.has_states() && body.cached > 0 {
                // A snapshot that was hit is held beside the state that continues it: without it there may be room.
                body.release_all(self, &mut scratch);
                let tokens = std::mem::take(&mut body.tokens);
                body = begin(asked.clone(), Hit::nothing(self, root), tokens);
                reserved = body.reserve(self, total);
            }
            if let Err(error) = reserved {
                body.release_all(self, &mut scratch);
                if let Error::Refused(refusal) = &error {
                    self.count_refusal(lane, refusal);
                }
                return Err(error);
            }
        }
        body.admitted = if open.max_new_tokens > 0 { total } else { 0 };
        body.reserved = open.admit;
        Ok(Sequence::handle(self, body))
    }

    fn protection(&self, open: &Open<'_>) -> Protection {
        let level = u16::from(open.protection.min(100)).div_ceil(7).min(Protection::MAX_LEVEL);
        let end = || self.clock.now_ms().saturating_add(open.protection_ms).div_ceil(1000);
        let until = (open.protection_ms > 0).then(end);
        if level == 0 { Protection::default() } else { Protection::new(level, until) }
    }

    /// How many more pages (of every group together) may be charged to `scope` for `tenant`.
    fn may_charge(&self, tenant: TenantId, scope: TenantId) -> u32 {
        match self.ledger.may_publish(tenant, scope) {
            None => 0,
            Some(None) => u32::MAX,
            Some(Some(most)) => {
                let usage = self.ledger.usage(Tier::Device, scope);
                let used = usage.held.0 + usage.cached.0 + usage.pinned.0 + usage.promised.0;
                let page: u32 = self.groups.iter().map(|g| g.units).sum();
                most.0.saturating_sub(used) / page.max(1)
            }
        }
    }

    /// What comes before a sequence's first page.
    pub(crate) fn root(&self, open: &Open<'_>) -> ChainKey {
        self.hasher.root(&Context {
            adapter: open.adapter,
            adapter_generation: open.adapter_generation,
            extra_key: open.extra_key,
            weights: self.weights_epoch_now(),
        })
    }

    pub(crate) fn ranges(&self, tenant: TenantId, open: &Open<'_>) -> Result<Vec<Range>, Error> {
        let mut end = 0u32;
        let mut ranges = Vec::with_capacity(open.share.len());
        for &(scope, tokens) in open.share {
            self.check_tenant(scope)?;
            if !self.ledger.is_under(tenant, scope) {
                return Err(Error::Tenant(format!(
                    "a prompt of {:?} can be shared under {:?} only if that is the tenant itself or a level above it",
                    self.ledger.name(tenant).unwrap_or_default(),
                    self.ledger.name(scope).unwrap_or_default()
                )));
            }
            end = end.saturating_add(tokens).min(open.tokens.len() as u32);
            ranges.push(Range {
                end,
                scope,
                may_publish: scope == tenant || self.ledger.may_publish(tenant, scope).is_some(),
            });
        }
        Ok(ranges)
    }

    /// New pages go only where they may: what is left of a range without the right, or over its bytes, is the tenant's.
    fn settle_ranges(&self, tenant: TenantId, ranges: &mut Vec<Range>, hit: &Hit) {
        let page_tokens = self.spec.page_tokens();
        let end = hit.pages * page_tokens;
        let mut at = 0;
        while at < ranges.len() {
            let range = ranges[at];
            let over =
                || (range.end / page_tokens).saturating_sub(hit.pages) > self.may_charge(tenant, range.scope);
            if range.scope != tenant && range.end > end && (!range.may_publish || over()) {
                let own = Range { end: range.end, scope: tenant, may_publish: true };
                let start = if at == 0 { 0 } else { ranges[at - 1].end };
                if end > start {
                    ranges[at].end = end;
                    ranges.insert(at + 1, own);
                    at += 1;
                } else {
                    ranges[at] = own;
                }
            }
            at += 1;
        }
    }
}

/// Room made in advance for at most so many new tokens.
const MOST_ROOM: u32 = 1 << 16;

/// The longest sequence there can be; the counts have room above it.
pub const MAX_TOKENS: u32 = 1 << 30;

fn fallbacks(asked: &[Range], got: &[Range], tenant: TenantId) -> Vec<(TenantId, u32)> {
    let mut start = 0;
    asked
        .iter()
        .filter_map(|range| {
            let from = std::mem::replace(&mut start, range.end);
            let kept =
                got.iter().filter(|g| g.scope == range.scope && g.end <= range.end).map(|g| g.end).max();
            let kept = kept.unwrap_or(from).max(from);
            (range.scope != tenant && kept < range.end).then_some((range.scope, range.end - kept))
        })
        .collect()
}

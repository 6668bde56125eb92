//! What happened, counted: the numbers behind the metrics.
//!
//! Every counter is declared once, with its name, unit and help text; whoever shows them (Python, Prometheus) lists
//! [`Counter::ALL`] and [`TenantCounter::ALL`]. Nothing here is a state of the pool: held, cached and free bytes come
//! from the ledger, so they can't drift from it.
//!
//! # Words
//!
//! One row of words for each [`Lane`], rounded up to whole cache lines, one word a counter; a snapshot adds up the
//! lanes. One cache line for each tenant, one word a counter.
//!
//! # Invariant
//!
//! - A counter only grows, so what one thread reads never decreases.
//! - An effect is never ahead of its cause: within one snapshot hits <= queries, released <= allocated. Causes are
//!   declared, and counted, before their effects; a snapshot reads in the opposite order. (This is why a counter is added
//!   to with `plus` and not `tally`: whoever sees the hit sees its query.)
//! - A lookup is counted once, when the first step of its sequence is committed, however often the allocation was tried
//!   in between: [`Lookup`]. Hits of a resumed sequence are counted apart.
//!
//! Timing stays outside the core. Callers: pool.rs, sequence.rs, batch.rs count; the binding reads.

use crate::{
    sync::{Atom, AtomicU64, Words},
    word::{LANES, Lane, TenantId},
};

#[cfg(all(test, kvalloc_loom))]
mod models;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

/// What a counter counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Tokens.
    Tokens,
    /// Pages.
    Pages,
    /// Times that something happened.
    Times,
}

impl Unit {
    /// As it stands in a metric's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Pages => "pages",
            Self::Times => "times",
        }
    }
}

macro_rules! counters {
    ($(#[$doc:meta])* $table:ident { $($variant:ident, $name:literal, $unit:ident, $help:literal;)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum $table {
            $(#[doc = $help] $variant,)+
        }

        impl $table {
            /// Every counter, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Its name: lower case, unique in its table.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }
            /// What it counts.
            pub const fn unit(self) -> Unit {
                match self { $(Self::$variant => Unit::$unit,)+ }
            }
            /// One sentence on it.
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)+ }
            }
        }
    };
}

counters! {
    /// The counters of a pool. A cause stands before its effects.
    Counter {
        Steps, "steps", Times, "Batch steps that were committed.";
        TokensWritten, "written_tokens", Tokens, "Tokens whose KV was written, by commit.";
        PagesAllocated, "allocated_pages", Pages, "Pages given out, not counting hits.";
        PagesReleased, "released_pages", Pages, "Pages that became free again.";
        PagesPublished, "published_pages", Pages, "Full pages that were put into the prefix index.";
        QueryTokens, "query_tokens", Tokens, "Prompt tokens looked up in the prefix index, once for each sequence that ran.";
        HitTokens, "hit_tokens", Tokens, "Prompt tokens found in the prefix index, of those in query_tokens.";
        ResumedQueryTokens, "resumed_query_tokens", Tokens, "Tokens looked up again because their sequence was preempted.";
        ResumedHitTokens, "resumed_hit_tokens", Tokens, "Tokens found again after a preemption, of those in resumed_query_tokens.";
        CopiesOnWrite, "copied_pages", Pages, "Shared partial pages copied before a write.";
        EvictedOwn, "evicted_own_pages", Pages, "Cached pages taken back for their own tenant.";
        EvictedForeign, "evicted_foreign_pages", Pages, "Cached pages taken back for another tenant.";
        PublishRefused, "publish_refused_pages", Pages, "Full pages that stayed out of the prefix index because it had no room.";
        LookupsStopped, "stopped_lookups", Times, "Lookups that ended at a cached page because reviving it would have reached into a reserve or over a limit.";
        RefusedLimit, "refused_limit", Times, "Allocations refused at a tenant's limit.";
        RefusedClaim, "refused_claim", Times, "Allocations refused because they would have reached into somebody's reserve.";
        RefusedFrames, "refused_frames", Times, "Allocations refused because nothing was free or could be taken back.";
        RefusedFragmented, "refused_fragmented", Times, "Allocations refused although enough bytes were free: they lay in extents of other page classes.";
        DoubleFrees, "double_frees", Times, "Releases of what was not held: refused, nothing changed.";
        StaleReferences, "stale_references", Times, "Uses of a page by a reference to an earlier life of it: refused, nothing changed.";
        PlansOpened, "opened_plans", Times, "Plans that took leases and destination frames.";
        PlansCommitted, "committed_plans", Times, "Plans of which every move was committed.";
        PlansAborted, "aborted_plans", Times, "Plans that were given up.";
        PlansExpired, "expired_plans", Times, "Plans whose time was over before somebody ended them.";
        LateReports, "late_reports", Times, "Commits and aborts of a plan that had ended: ignored, nothing changed.";
        PagesMoved, "moved_pages", Pages, "Pages that lie in another frame since a plan was committed.";
        PagesCut, "cut_pages", Pages, "Pages that contexts lost for good: nothing lies there any more.";
        MovesDropped, "dropped_moves", Pages, "Pages that a committed plan left where they were, because they had gone or somebody had begun to write into them.";
        EventsWritten, "written_events", Times, "KV events that got a sequence number.";
        EventsDropped, "dropped_events", Times, "KV events that no reader will get, because the ring was full or their writer stopped.";
    }
}

counters! {
    /// The counters of one tenant. A cause stands before its effects.
    TenantCounter {
        QueryTokens, "query_tokens", Tokens, "Prompt tokens looked up, once for each sequence that ran.";
        HitTokens, "hit_tokens", Tokens, "Prompt tokens found in the prefix index, of those in query_tokens.";
        ResumedHitTokens, "resumed_hit_tokens", Tokens, "Tokens found again after a preemption.";
        Evicted, "evicted_pages", Pages, "Its cached pages that were taken back, for whomever.";
        EvictedByOthers, "evicted_by_others_pages", Pages, "Its cached pages that were taken back for another tenant.";
        Waited, "waited", Times, "Admissions answered with wait.";
        Refused, "refused", Times, "Allocations refused, for whatever reason.";
    }
}

const COUNTERS: usize = Counter::ALL.len();
const LINE: usize = 8;
const STRIDE: usize = COUNTERS.next_multiple_of(LINE);
const TENANT_COUNTERS: usize = TenantCounter::ALL.len();
const _: () = assert!(TENANT_COUNTERS <= LINE, "a tenant is a cache line");

/// A sequence's lookup, kept with the sequence until it is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lookup {
    /// Tokens asked for.
    pub query_tokens: u32,
    /// Tokens found.
    pub hit_tokens: u32,
    /// The sequence ran before and was preempted.
    pub resumed: bool,
    counted: bool,
}

impl Lookup {
    /// A lookup that was not counted yet.
    pub const fn new(query_tokens: u32, hit_tokens: u32, resumed: bool) -> Self {
        Self { query_tokens, hit_tokens, resumed, counted: false }
    }
}

/// The counters of a pool and of its tenants.
#[derive(Debug)]
pub(crate) struct Stats {
    lanes: Words,
    tenants: Words,
    max_tenants: u32,
}

impl Stats {
    /// All 0, for tenants 0 to `max_tenants - 1`.
    pub(crate) fn new(max_tenants: u32) -> Self {
        Self {
            lanes: Words::zeroed(LANES * STRIDE),
            tenants: Words::zeroed(max_tenants as usize * LINE),
            max_tenants,
        }
    }

    #[inline]
    fn word(&self, lane: usize, counter: Counter) -> &AtomicU64 {
        &self.lanes[lane * STRIDE + counter as usize]
    }

    fn tenant_word(&self, tenant: TenantId, counter: TenantCounter) -> Option<&AtomicU64> {
        debug_assert!(tenant.0 < self.max_tenants);
        (tenant.0 < self.max_tenants).then(|| &self.tenants[tenant.as_usize() * LINE + counter as usize])
    }

    /// It happened `times` times, to somebody who counts on this lane.
    #[inline]
    pub(crate) fn count(&self, lane: Lane, counter: Counter, times: u64) {
        if times > 0 {
            self.word(lane.as_usize() % LANES, counter).plus(times);
        }
    }

    /// It happened `times` times to this tenant.
    #[inline]
    pub(crate) fn count_for(&self, tenant: TenantId, counter: TenantCounter, times: u64) {
        if times > 0
            && let Some(word) = self.tenant_word(tenant, counter)
        {
            word.plus(times);
        }
    }

    /// The first step after a lookup was committed: count it, unless it was.
    pub(crate) fn count_lookup(&self, lane: Lane, tenant: TenantId, lookup: &mut Lookup) {
        if std::mem::replace(&mut lookup.counted, true) {
            return;
        }
        let (queries, hits) = (u64::from(lookup.query_tokens), u64::from(lookup.hit_tokens));
        debug_assert!(hits <= queries);
        if lookup.resumed {
            self.count(lane, Counter::ResumedQueryTokens, queries);
            self.count(lane, Counter::ResumedHitTokens, hits);
            self.count_for(tenant, TenantCounter::ResumedHitTokens, hits);
        } else {
            self.count(lane, Counter::QueryTokens, queries);
            self.count(lane, Counter::HitTokens, hits);
            self.count_for(tenant, TenantCounter::QueryTokens, queries);
            self.count_for(tenant, TenantCounter::HitTokens, hits);
        }
    }

    /// The counters, all lanes together. `EventsWritten` and `EventsDropped` are counted by the ring: the caller sets them.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut values = [0; COUNTERS];
        // Effects before causes, across all lanes.
        for (value, &counter) in values.iter_mut().zip(Counter::ALL).rev() {
            *value = self.sum(counter);
        }
        Snapshot { values }
    }

    fn sum(&self, counter: Counter) -> u64 {
        (0..LANES).fold(0, |sum: u64, lane| sum.wrapping_add(self.word(lane, counter).get()))
    }

    /// The counters of a tenant; all 0 for one that can't exist.
    pub(crate) fn tenant_snapshot(&self, tenant: TenantId) -> TenantSnapshot {
        let mut values = [0; TENANT_COUNTERS];
        if tenant.0 < self.max_tenants {
            for (value, &counter) in values.iter_mut().zip(TenantCounter::ALL).rev() {
                *value = self.tenant_word(tenant, counter).map_or(0, Atom::get);
            }
        }
        TenantSnapshot { values }
    }

    /// The tenant was removed: whoever gets its number next starts at 0. Nobody counts for it at this moment.
    pub(crate) fn forget(&self, tenant: TenantId) {
        for &counter in TenantCounter::ALL {
            if let Some(word) = self.tenant_word(tenant, counter) {
                word.put(0);
            }
        }
    }
}

/// The counters of a pool at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Snapshot {
    values: [u64; COUNTERS],
}

impl Snapshot {
    /// One counter.
    pub const fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }
    /// All of them, in the order of [`Counter::ALL`].
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Counter, u64)> + '_ {
        Counter::ALL.iter().copied().zip(self.values)
    }
    /// With a number that another room counts.
    #[must_use]
    pub(crate) const fn with(mut self, counter: Counter, value: u64) -> Self {
        self.values[counter as usize] = value;
        self
    }
    /// Hit tokens among those looked up, first runs only; `None` before the first lookup.
    pub fn hit_rate(&self) -> Option<f64> {
        rate(self.get(Counter::HitTokens), self.get(Counter::QueryTokens))
    }
}

/// The counters of a tenant at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantSnapshot {
    values: [u64; TENANT_COUNTERS],
}

impl TenantSnapshot {
    /// One counter.
    pub const fn get(&self, counter: TenantCounter) -> u64 {
        self.values[counter as usize]
    }
    /// All of them, in the order of [`TenantCounter::ALL`].
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (TenantCounter, u64)> + '_ {
        TenantCounter::ALL.iter().copied().zip(self.values)
    }
    /// Hit tokens among those looked up, first runs only; `None` before the first lookup.
    pub fn hit_rate(&self) -> Option<f64> {
        rate(self.get(TenantCounter::HitTokens), self.get(TenantCounter::QueryTokens))
    }
}

fn rate(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

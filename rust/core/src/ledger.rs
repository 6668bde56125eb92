//! HOW MUCH: who is charged for what, in each tier.
//!
//! Every frame handed out is charged, in units, to exactly one node of the tenant tree. A tier has a book: a tree
//! (limits and claims) and the stocks in front of it. So at any moment, per tier:
//!
//! ```text
//! charged(root) = held + cached + pinned + promised + stocks of all nodes <= capacity
//! claim(root)   = sum of the tenants' claims                              <= capacity
//! ```
//!
//! | file | keeps |
//! | --- | --- |
//! | `word/ledger.rs` | the packed words and their transitions |
//! | `ledger/tree.rs` | subtree charges against limits, claims against capacity |
//! | `ledger/stock.rs` | pre-charged units per lane, so that a charge touches one word of its own |
//! | `ledger/book.rs` | the two together: what is refused only after the stocks were drained |
//! | `ledger/usage.rs` | exact snapshots; room for admission; whose cached pages go first |
//! | `ledger/policy.rs` | names, policies, rights to publish: the only part with a lock |
//! | `ledger/error.rs` | refusals, with their numbers |
//!
//! # Reserves
//!
//! `claim(node) = max(kept, demand)`: kept is the node's reserve. Of a reserve that is lent only what its owner asked back
//! is kept, so the rest may be charged to others. Claims say who may be charged *now*; what policies grant is bounded apart
//! from that: at every level `sum of floors <= limit`, `floor(node) = max(reserve, sum of the children's floors)`, lent or not. So
//! what stands in the way of a lender inside its reserve is what others have beyond theirs (reclaim/lend.rs).
//!
//! # The life of a unit
//!
//! ```text
//!            charge                    park                  drop_cached
//!   free ---------------> held <------------------> cached ----------------> free
//!    |   <-------------   ^  ^        revive         ^  |
//!    |     discharge      |  |                       |  |
//!    |                    |  |  to_pinned            |  |  revive_pinned
//!    |    charge_promised |  +-----------> pinned ---+  |
//!    |                    |    from_pinned   ^          |
//!    +---> promised ------+                  +----------+
//!          promise, unpromise                park_pinned: pinned to cached
//! ```
//!
//! Entering held, pinned or promised from free or cached may be refused; every other way can't. A page's state moves first
//! and its booking follows; only what may be refused is booked before (and undone by the inverse when the page turns out
//! to have gone).
//!
//! # Who waits for whom
//!
//! Nobody: every operation but policy changes is lock-free. A refusal is final when nothing lay in stock below the level
//! that refused; what another thread has in hand at that very moment (at most a filling of a stock) is not waited for.
//!
//! Callers: pool.rs, sequence.rs, audit.rs.

mod book;
mod error;
mod policy;
mod stock;
mod tree;
mod usage;

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod model;
#[cfg(all(test, kvalloc_loom))]
mod models;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

pub use error::{LedgerError, NameRule, Refused, Why};
pub use policy::{MAX_NAME, Policy, check_name};
pub use tree::{MAX_DEPTH, ROOT};
pub use usage::{Room, Usage};

use crate::{
    page::MAX_TENANTS,
    word::{Lane, TIERS, TenantId, Tier, Units, ledger::MAX_UNITS},
};
use book::Book;
use policy::Tenants;
use tree::Obstacle;

/// The ledger of a pool.
#[derive(Debug)]
pub struct Ledger {
    books: [Book; TIERS],
    tenants: Tenants,
}

impl Ledger {
    /// A ledger for tiers of these capacities and up to `max_tenants` tenants beside the root. A lane's stock is filled up
    /// by `stock` units at a time; 0: every charge goes through the tree.
    ///
    /// # Errors
    /// A capacity or the number of tenants is above what the words can count.
    pub fn new(capacity: [Units; TIERS], max_tenants: u32, stock: Units) -> Result<Self, LedgerError> {
        capacity.iter().try_for_each(|&units| Self::check_capacity(units))?;
        if max_tenants >= MAX_TENANTS {
            return Err(LedgerError::TooLarge { asked: max_tenants, most: MAX_TENANTS - 1 });
        }
        let book = |units| Book::new(max_tenants + 1, units, stock);
        Ok(Self { books: capacity.map(book), tenants: Tenants::new(max_tenants) })
    }

    fn check_capacity(capacity: Units) -> Result<(), LedgerError> {
        if capacity.0 > MAX_UNITS {
            return Err(LedgerError::TooLarge { asked: capacity.0, most: MAX_UNITS });
        }
        Ok(())
    }

    #[inline]
    fn book(&self, tier: Tier) -> &Book {
        &self.books[tier.as_usize()]
    }

    /// free -> held.
    ///
    /// # Errors
    /// A limit, or the claims of others; nothing is charged then.
    #[inline]
    pub fn charge(&self, tier: Tier, tenant: TenantId, lane: Lane, n: Units) -> Result<(), Refused> {
        if self.book(tier).stocks.draw(tenant, lane, n) {
            return Ok(());
        }
        self.book(tier).charge(tenant, lane, n).map_err(|obstacle| refused(tier, tenant, n, obstacle))
    }

    /// held -> free.
    #[inline]
    pub fn discharge(&self, tier: Tier, tenant: TenantId, lane: Lane, n: Units) {
        if !self.book(tier).stocks.store(tenant, lane, n) {
            self.book(tier).discharge(tenant, lane, n);
        }
    }

    /// free -> promised: what an admitted sequence will need, counted in limits and claims, not in held.
    ///
    /// # Errors
    /// As [`Self::charge`].
    pub fn promise(&self, tier: Tier, tenant: TenantId, lane: Lane, n: Units) -> Result<(), Refused> {
        self.charge(tier, tenant, lane, n)?;
        self.book(tier).count_promised(tenant, lane, n.0 as i32);
        Ok(())
    }

    /// promised -> held. Never refused.
    #[inline]
    pub fn charge_promised(&self, tier: Tier, tenant: TenantId, lane: Lane, n: Units) {
        self.book(tier).count_promised(tenant, lane, -(n.0 as i32));
    }

    /// held -> promised: a sequence gives pages back and keeps the right to them.
    #[inline]
    pub fn discharge_promised(&self, tier: Tier, tenant: TenantId, lane: Lane, n: Units) {
        self.book(tier).count_promised(tenant, lane, n.0 as i32);
    }

    /// promised -> free.
    pub fn unpromise(&self, tier: Tier, tenant: TenantId, lane: Lane, n: Units) {
        self.book(tier).count_promised(tenant, lane, -(n.0 as i32));
        self.discharge(tier, tenant, lane, n);
    }

    /// held -> cached: the claim shrinks.
    pub fn park(&self, tier: Tier, tenant: TenantId, n: Units) {
        self.book(tier).tree.park(tenant, n);
    }

    /// cached -> held: an allocation for claims.
    ///
    /// # Errors
    /// The claims of others; the hit ends there.
    pub fn revive(&self, tier: Tier, tenant: TenantId, n: Units) -> Result<(), Refused> {
        self.book(tier).revive(tenant, n).map_err(|obstacle| refused(tier, tenant, n, obstacle))
    }

    /// cached -> free.
    pub fn drop_cached(&self, tier: Tier, tenant: TenantId, n: Units) {
        self.book(tier).tree.drop_cached(tenant, n);
    }

    /// held -> pinned: the last reference has gone, a pin is left.
    pub fn to_pinned(&self, tier: Tier, tenant: TenantId, n: Units) {
        self.book(tier).tree.count_pinned(tenant, n.0 as i32);
    }

    /// pinned -> held: a page that only a pin kept is referenced again.
    pub fn from_pinned(&self, tier: Tier, tenant: TenantId, n: Units) {
        self.book(tier).tree.count_pinned(tenant, -(n.0 as i32));
    }

    /// pinned -> cached: the last pin has gone.
    pub fn park_pinned(&self, tier: Tier, tenant: TenantId, n: Units) {
        self.from_pinned(tier, tenant, n);
        self.park(tier, tenant, n);
    }

    /// cached -> pinned.
    ///
    /// # Errors
    /// As [`Self::revive`].
    pub fn revive_pinned(&self, tier: Tier, tenant: TenantId, n: Units) -> Result<(), Refused> {
        self.revive(tier, tenant, n)?;
        self.to_pinned(tier, tenant, n);
        Ok(())
    }

    /// What a node has and where it stands, the children not counted.
    pub fn usage(&self, tier: Tier, tenant: TenantId) -> Usage {
        self.book(tier).usage(tenant)
    }

    /// Cached units of a node itself, as they are counted at this moment.
    pub fn cached(&self, tier: Tier, tenant: TenantId) -> Units {
        Units(self.book(tier).tree.own(tenant).cached().max(0) as u32)
    }

    /// What is charged to the subtree of a node.
    pub fn charged(&self, tier: Tier, tenant: TenantId) -> Units {
        self.book(tier).tree.usage(tenant).charged()
    }

    /// The sum of the subtree's usages; each is exact, the sum is taken one after the other. The last six fields are those
    /// of `tenant` itself.
    pub fn subtree_usage(&self, tier: Tier, tenant: TenantId) -> Usage {
        let mut sum = self.usage(tier, tenant);
        for node in self.ids().filter(|&node| node != tenant && self.is_under(node, tenant)) {
            let usage = self.usage(tier, node);
            sum.held.0 += usage.held.0;
            sum.cached.0 += usage.cached.0;
            sum.pinned.0 += usage.pinned.0;
            sum.promised.0 += usage.promised.0;
            sum.stock.0 += usage.stock.0;
            sum.charged.0 += usage.charged.0;
            sum.missing.0 += usage.missing.0;
            sum.merged |= usage.merged;
        }
        sum
    }

    /// The tier's capacity.
    pub fn capacity(&self, tier: Tier) -> Units {
        self.book(tier).tree.usage(ROOT).limit()
    }

    /// What `tenant` could get; stocks are given back first when that is less than `want`.
    pub fn room(&self, tier: Tier, tenant: TenantId, want: Units) -> Room {
        self.book(tier).room(tenant, want)
    }

    /// Whether all of this could be charged, each to its payer; with `emptied` once cached pages that are in the way have gone.
    ///
    /// # Errors
    /// The first payer that it does not fit for, and the level: of what was asked there up to then.
    pub fn fit(&self, tier: Tier, charges: &[(TenantId, Units)], emptied: bool) -> Result<(), Refused> {
        let fit = self.book(tier).fit(charges, emptied);
        fit.map_err(|(payer, asked, obstacle)| refused(tier, payer, asked, obstacle))
    }

    /// Whose cached pages go first, of the subtree of `level`, leaving out whom `skip` names. Reads a line per tenant.
    pub fn worst(&self, tier: Tier, level: TenantId, skip: impl Fn(TenantId) -> bool) -> Option<TenantId> {
        self.book(tier).worst(level, skip)
    }

    /// Give all stocks back to the tree.
    pub fn drain(&self, tier: Tier) {
        self.book(tier).drain(ROOT);
    }

    /// How often a caller gave back more than there was. Such a booking changes nothing.
    pub fn faults(&self) -> u64 {
        self.books.iter().map(|book| book.tree.faults()).sum()
    }
}

#[cold]
fn refused(tier: Tier, tenant: TenantId, asked: Units, obstacle: Obstacle) -> Refused {
    let Obstacle { level, why, short, limit } = obstacle;
    Refused { tier, tenant, level, why, asked, room: Units(asked.0.saturating_sub(short)), limit }
}

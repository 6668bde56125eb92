//! The book of one tier: its tree and its stocks together.

use crate::{
    ledger::{
        error::Why,
        stock::Stocks,
        tree::{Obstacle, Tree},
    },
    sync::{Atom, AtomicU64},
    word::{LANES, Lane, TenantId, Units},
};

/// A stock is filled only where every level has room for this many full stocks.
const COMFORT: u32 = 4 * LANES as u32;
/// The most units a stock is filled up by.
pub(super) const MAX_STOCK: u32 = 1 << 20;

#[derive(Debug)]
pub(super) struct Book {
    pub(super) tree: Tree,
    pub(super) stocks: Stocks,
    /// The highest id that was ever given to a tenant.
    top: AtomicU64,
}

impl Book {
    pub(super) fn new(nodes: u32, capacity: Units, stock: Units) -> Self {
        Self {
            tree: Tree::new(nodes, capacity),
            stocks: Stocks::new(nodes, Units(stock.0.min(MAX_STOCK))),
            top: AtomicU64::new(0),
        }
    }

    pub(super) fn top(&self) -> u32 {
        self.top.get() as u32
    }
    /// With the policy lock held.
    pub(super) fn set_top(&self, top: u32) {
        self.top.put(u64::from(top));
    }

    /// Give all stocks in the subtree of `level` back to the tree. Whether there may have been any.
    pub(super) fn drain(&self, level: TenantId) -> bool {
        let mut found = false;
        self.stocks.each_listed(self.top(), |node| {
            if self.tree.is_under(node, level) {
                found |= self.stocks.drain(node, |n| self.tree.surrender(node, n));
            }
        });
        found
    }

    /// Put units into a lane's stock; what does not go in goes back to the tree.
    ///
    /// Where a limit was lowered below use there are no stocks, or a tenant could go on with what it gives back: whoever
    /// lowers a limit drains the stocks below it, and whoever lists a lane looks at the limits once more. Both look with
    /// read-modify-writes of the same words, so one of them sees the other.
    fn fill(&self, node: TenantId, lane: Lane, n: Units) {
        if self.tree.is_over(node) {
            return self.tree.surrender(node, n);
        }
        let (left, listed) = self.stocks.fill(node, lane, n);
        self.tree.surrender(node, left);
        if listed && self.tree.is_over_now(node) {
            self.stocks.drain(node, |n| self.tree.surrender(node, n));
        }
    }

    /// Another limit, with the policy lock held: the limit before.
    pub(super) fn set_limit(&self, node: TenantId, limit: Units) -> Units {
        let before = self.tree.set_limit(node, limit);
        if limit < before {
            self.drain(node);
        }
        before
    }

    /// Try until it succeeds, or is refused while nothing lay in stock below the level that refused. Every further round
    /// means that another thread has put something into a stock meanwhile.
    fn insist(&self, attempt: impl Fn() -> Result<(), Obstacle>) -> Result<(), Obstacle> {
        let mut clean = None;
        loop {
            let Err(obstacle) = attempt() else { return Ok(()) };
            if clean == Some((obstacle.level, self.stocks.listings())) {
                return Err(obstacle);
            }
            let listings = self.stocks.listings();
            clean = if self.drain(obstacle.level) { None } else { Some((obstacle.level, listings)) };
        }
    }

    /// The stock did not suffice: charge through the tree, and fill the stock where nobody could miss it.
    #[cold]
    pub(super) fn charge(&self, node: TenantId, lane: Lane, n: Units) -> Result<(), Obstacle> {
        let closed = Obstacle { level: node, why: Why::Closed, short: n.0, limit: Units(0) };
        if !self.tree.is_live(node) {
            return Err(closed);
        }
        let stock = self.stocks.units();
        if n.0 > 0 && n.0 <= stock.0 {
            let both = Units(n.0 + stock.0);
            let comfortable = self.tree.fits(node, both.0, both.0, COMFORT * stock.0).is_ok();
            if comfortable && self.tree.obtain(node, both).is_ok() {
                self.fill(node, lane, stock);
                return Ok(());
            }
        }
        let obtained = self.insist(|| self.tree.obtain(node, n));
        // A tenant that is being removed has limits of 0.
        obtained.map_err(|obstacle| if self.tree.is_live(node) { obstacle } else { closed })
    }

    /// The stock was full, unlisted or closed.
    #[cold]
    pub(super) fn discharge(&self, node: TenantId, lane: Lane, n: Units) {
        if n.0 <= self.stocks.units().0 {
            self.fill(node, lane, n);
        } else {
            self.tree.surrender(node, n);
        }
    }

    pub(super) fn revive(&self, node: TenantId, n: Units) -> Result<(), Obstacle> {
        self.insist(|| self.tree.revive(node, n))
    }

    pub(super) fn set_kept(&self, node: TenantId, kept: Units) -> Result<Units, Obstacle> {
        let before = std::cell::Cell::new(Units(0));
        self.insist(|| self.tree.set_kept(node, kept).map(|kept| before.set(kept)))?;
        Ok(before.get())
    }

    #[inline]
    pub(super) fn count_promised(&self, node: TenantId, lane: Lane, by: i32) {
        if !self.stocks.promise(node, lane, by) {
            self.tree.count_promised(node, by);
        }
    }
}

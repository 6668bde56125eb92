//! Stocks: units that were charged through the tree and lie ready in a lane, so that the usual charge and discharge is one
//! compare-exchange on a word that other lanes don't touch.
//!
//! Per (node, lane) a cache line: the [`StockWord`], and the lane's share of the node's promised units (a [`CountWord`];
//! a promise made in one lane may be used in another, so a share may stand below 0). The lines of one lane lie together.
//!
//! Units in stock count as charged and hard, and are in nobody's use: before anything is refused they are drained. To
//! find them without a look at every lane of every tenant, a lane with stock is LISTED: `listed` counts the listed lanes
//! of each node, 16 bits a node. A lane is counted before it becomes LISTED and struck off after, so a node whose count is
//! 0 has no stock. `listings` moves after the lane: whoever reads it, finds no listed lane, sees the tree refuse, and reads
//! the same number again, knows that nothing lay in stock when the tree refused, but for discharges that had not ended yet.

use crate::{
    sync::{Atom, AtomicU64, Words},
    word::{
        LANES, Lane, TenantId, Units,
        ledger::{CountWord, StockWord},
    },
};

/// Words of a lane of a node. Models have no cache lines.
const STRIDE: usize = if cfg!(any(kvalloc_loom, kvalloc_shuttle)) { 2 } else { 8 };
const PER_WORD: usize = 4;

#[derive(Debug)]
pub(super) struct Stocks {
    lanes: Words,
    listed: Words,
    listings: AtomicU64,
    nodes: usize,
    /// A lane is filled up by so much and holds at most twice as much; 0: no stocks.
    units: Units,
}

impl Stocks {
    pub(super) fn new(nodes: u32, units: Units) -> Self {
        let nodes = nodes as usize;
        Self {
            lanes: Words::zeroed(nodes * LANES * STRIDE),
            listed: Words::zeroed(nodes.div_ceil(PER_WORD)),
            listings: AtomicU64::new(0),
            nodes,
            units,
        }
    }

    pub(super) fn units(&self) -> Units {
        self.units
    }

    fn most(&self) -> Units {
        Units(self.units.0 * 2)
    }

    #[inline]
    fn stock(&self, node: TenantId, lane: usize) -> &AtomicU64 {
        &self.lanes[(lane % LANES * self.nodes + node.as_usize()) * STRIDE]
    }
    #[inline]
    fn promised(&self, node: TenantId, lane: usize) -> &AtomicU64 {
        &self.lanes[(lane % LANES * self.nodes + node.as_usize()) * STRIDE + 1]
    }

    /// Take `n` out for use.
    #[inline]
    pub(super) fn draw(&self, node: TenantId, lane: Lane, n: Units) -> bool {
        // An id from nowhere must not reach another lane's line.
        node.as_usize() < self.nodes
            && self.stock(node, lane.as_usize()).transit(|w| StockWord(w).draw(n).map(|w| w.0)).is_ok()
    }

    /// Put `n` back into a lane that is listed and has room.
    #[inline]
    pub(super) fn store(&self, node: TenantId, lane: Lane, n: Units) -> bool {
        let step = |w| StockWord(w).store(n, self.most()).map(|w| w.0);
        self.stock(node, lane.as_usize())
            .transit(|w| if StockWord(w).is_listed() { step(w) } else { None })
            .is_ok()
    }

    /// Put `n` in, listing the lane where needed: the units that must go back to the tree instead, and whether the lane was
    /// not listed before.
    pub(super) fn fill(&self, node: TenantId, lane: Lane, n: Units) -> (Units, bool) {
        if n.0 > self.most().0 {
            return (n, false);
        }
        let word = self.stock(node, lane.as_usize());
        let (mut counted, mut listed) = (false, false);
        let mut now = StockWord(word.first());
        let left = loop {
            let (next, left) = match (now.store(n, self.most()), now.trim(n, self.units)) {
                (Some(next), _) => (next, Units(0)),
                (None, Some(trimmed)) => trimmed,
                (None, None) => break n,
            };
            if !now.is_listed() && !counted {
                self.count(node, 1);
                counted = true;
            }
            match word.cas(now.0, next.0) {
                Ok(_) => {
                    listed = !now.is_listed();
                    break left;
                }
                Err(found) => now = StockWord(found),
            }
        };
        if listed {
            self.listings.plus(1);
        } else if counted {
            self.count(node, -1);
        }
        (left, listed)
    }

    fn count(&self, node: TenantId, by: i64) {
        let unit = 1 << (node.as_usize() % PER_WORD * 16);
        self.listed[node.as_usize() / PER_WORD].plus((unit * by) as u64);
    }

    /// How often a lane was listed, ever.
    pub(super) fn listings(&self) -> u64 {
        self.listings.get()
    }

    /// Call `f` for each node, up to `top`, that may have stock.
    pub(super) fn each_listed(&self, top: u32, mut f: impl FnMut(TenantId)) {
        for at in 0..=top as usize / PER_WORD {
            let word = self.listed[at].get();
            if word != 0 {
                (0..PER_WORD).filter(|i| word >> (i * 16) & 0xffff != 0).for_each(|i| {
                    f(TenantId((at * PER_WORD + i) as u32));
                });
            }
        }
    }

    /// Empty every lane of a node: `back` gives units to the tree. A lane stays listed until its units are back. Whether a
    /// lane was listed: a thread that has counted one and not listed it yet is not waited for.
    pub(super) fn drain(&self, node: TenantId, mut back: impl FnMut(Units)) -> bool {
        let mut found = false;
        for lane in 0..LANES {
            let word = self.stock(node, lane);
            if !StockWord(word.get()).is_listed() {
                continue;
            }
            found = true;
            if let Ok(before) = word.transit(|w| StockWord(w).empty().map(|w| w.0)) {
                back(StockWord(before).units());
            }
            if word.transit(|w| StockWord(w).unlist().map(|w| w.0)).is_ok() {
                self.count(node, -1);
            }
        }
        found
    }

    /// Move the lane's share of the promised units; `false` while a reader has closed it.
    #[inline]
    pub(super) fn promise(&self, node: TenantId, lane: Lane, by: i32) -> bool {
        self.promised(node, lane.as_usize()).transit(|w| CountWord(w).shift(by).map(|w| w.0)).is_ok()
    }

    /// Read all lanes of a node.
    pub(super) fn read(&self, node: TenantId) -> [(StockWord, CountWord); LANES] {
        std::array::from_fn(|lane| {
            (StockWord(self.stock(node, lane).get()), CountWord(self.promised(node, lane).get()))
        })
    }

    /// Stop or release all lanes of a node.
    pub(super) fn set_closed(&self, node: TenantId, closed: bool) {
        for lane in 0..LANES {
            // A lane that is so already stays as it is.
            let _ = self.stock(node, lane).transit(|w| StockWord(w).with_closed(closed).map(|w| w.0));
            let _ = self.promised(node, lane).transit(|w| CountWord(w).with_closed(closed).map(|w| w.0));
        }
    }
}

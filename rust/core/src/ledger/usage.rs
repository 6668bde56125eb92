//! Reading the books: exact snapshots, what admission can count on, and whose cached pages go first.

use std::collections::HashMap;

use crate::{
    ledger::{
        book::Book,
        error::Why,
        tree::{Obstacle, Path, ROOT},
    },
    word::{
        LANES, TenantId, Units,
        ledger::{CountWord, OwnWord, StockWord},
    },
};

/// What one node (not its children) has in one tier, as it was at one moment, and where it stands.
///
/// `held + cached + pinned + promised + stock = charged` always holds. Units on their way between a stock and the tree, in
/// the hands of another thread at that moment, count as held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Units of pages with references.
    pub held: Units,
    /// Units of published pages without references.
    pub cached: Units,
    /// Units of pages without references that pins keep.
    pub pinned: Units,
    /// Units reserved for admitted sequences and not yet in use.
    pub promised: Units,
    /// Units charged and in nobody's use, ready in the lanes. They are given back before anything is refused.
    pub stock: Units,
    /// The sum of the above.
    pub charged: Units,
    /// More was given up than there was, by so much: a caller's fault, for the audit to report. Then `held` is 0 and the
    /// sum exceeds `charged` by this.
    pub missing: Units,
    /// Charged to the whole subtree, stocks and promises included. Read beside the snapshot, not in it.
    pub subtree: Units,
    /// What the subtree keeps from others: `max(reserve, demand)`; of a reserve that is lent, what was asked back of it.
    pub claim: Units,
    /// Own hard units and the claims of the children.
    pub demand: Units,
    /// The reserve.
    pub reserve: Units,
    /// The limit of the subtree, `None`: the capacity alone.
    pub limit: Option<Units>,
    /// Other threads were so busy with this tenant that promised units and stocks could not be told from held ones:
    /// they are in `held`, and `promised` and `stock` are 0.
    pub merged: bool,
}

/// What a tenant could get, for admission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// What it could hold more, at once, when cached pages below the level in the way are given up for it.
    pub now: Units,
    /// The level that ends `now`.
    pub level: TenantId,
    /// Of `now`, what can be charged without anybody giving up cached pages.
    pub unreclaimed: Units,
    /// The level that ends `unreclaimed`.
    pub unreclaimed_level: TenantId,
    /// The most it could ever hold: limits, and the capacity without the reserves of others.
    pub ever: Units,
    /// The level that ends `ever`.
    pub ever_level: TenantId,
    /// The most its own pages could ever be: `ever` without the reserves of its children.
    pub own: Units,
    /// The level that ends `own`.
    pub own_level: TenantId,
}

/// The words of a node at one moment.
struct Snapshot {
    own: OwnWord,
    pinned: CountWord,
    /// Promised and stock units of all lanes; `None`: not told apart.
    lanes: Option<(i64, i64)>,
}

/// Attempts at a snapshot beside running threads, and then with the lanes closed to them.
const OPEN_TRIES: u32 = 8;
const CLOSED_TRIES: u32 = 64;

impl Book {
    /// The node's line, as it was when `own` was read: the two tagged words did not move meanwhile.
    fn read_line(&self, node: TenantId) -> Option<(OwnWord, CountWord, CountWord)> {
        let (pinned, promised) = (self.tree.pinned(node), self.tree.promised(node));
        let own = self.tree.own(node);
        let same = pinned == self.tree.pinned(node) && promised == self.tree.promised(node);
        same.then_some((own, pinned, promised))
    }

    /// Read everything twice: what did not move (each word has a tag) between the end of the first and the start of the
    /// second reading stood so at every moment between, and `own` was read there.
    fn collect(&self, node: TenantId) -> Option<Snapshot> {
        let lanes: [(StockWord, CountWord); LANES] = self.stocks.read(node);
        let (own, pinned, promised) = (0..LANES).find_map(|_| self.read_line(node))?;
        if lanes != self.stocks.read(node) {
            return None;
        }
        let promised =
            lanes.iter().fold(i64::from(promised.count()), |sum, (_, w)| sum + i64::from(w.count()));
        let stock = lanes.iter().map(|(w, _)| i64::from(w.units().0)).sum();
        Some(Snapshot { own, pinned, lanes: Some((promised, stock)) })
    }

    fn snapshot(&self, node: TenantId) -> Snapshot {
        if let Some(seen) = (0..OPEN_TRIES).find_map(|_| self.collect(node)) {
            return seen;
        }
        // A busy tenant: its threads go through the tree for a moment. If this thread dies here the lanes stay closed
        // until the next such reading, which costs time and nothing else.
        self.stocks.set_closed(node, true);
        let seen = (0..CLOSED_TRIES).find_map(|_| self.collect(node));
        self.stocks.set_closed(node, false);
        seen.unwrap_or_else(|| {
            loop {
                if let Some((own, pinned, _)) = self.read_line(node) {
                    break Snapshot { own, pinned, lanes: None };
                }
            }
        })
    }

    pub(super) fn usage(&self, node: TenantId) -> Usage {
        let Snapshot { own, pinned, lanes } = self.snapshot(node);
        let (promised, stock) = lanes.unwrap_or((0, 0));
        let (cached, pinned) = (i64::from(own.cached()), i64::from(pinned.count()));
        // A count below 0 waits for the booking of a page that another thread has already taken out of use; until then
        // the page is counted twice, once as held.
        let held = i64::from(own.hard()) - stock - promised.max(0) - pinned.max(0) + cached.min(0);
        let (claim, usage) = (self.tree.claim(node), self.tree.usage(node));
        let units = |n: i64| Units(n.max(0) as u32);
        Usage {
            held: units(held),
            cached: units(cached),
            pinned: units(pinned),
            promised: units(promised),
            stock: units(stock),
            charged: units(i64::from(own.hard()) + cached),
            missing: units(-held),
            subtree: usage.charged(),
            claim: claim.claim(),
            demand: claim.demand(),
            reserve: self.tree.floor(node).reserve(),
            limit: Some(usage.limit()).filter(|limit| limit.0 != u32::MAX),
            merged: lanes.is_none(),
        }
    }

    /// What `node` could get. When that is less than `want`, stocks that are in the way are given back first.
    pub(super) fn room(&self, node: TenantId, want: Units) -> Room {
        loop {
            let room = self.room_at_once(node);
            if room.now >= want || !self.drain(room.level) {
                return room;
            }
        }
    }

    fn room_at_once(&self, node: TenantId) -> Room {
        let path = self.tree.path(node);
        let capacity = self.tree.usage(ROOT).limit();
        // From the root down: (units, the level that ends them).
        let mut now = (u64::from(capacity.0.saturating_sub(self.tree.claim(ROOT).claim().0)), ROOT);
        let mut unreclaimed = (u64::from(self.tree.usage(ROOT).room().0), ROOT);
        let mut ever = (u64::from(capacity.0), ROOT);
        for (&level, &parent) in path.iter().zip(&path[1..]).rev() {
            let (claim, usage) = (self.tree.claim(level), self.tree.usage(level));
            let limit = u64::from(usage.limit().0);
            // Inside the level's reserve nothing is asked of the levels above.
            now.0 += u64::from(claim.unused().0);
            tighten(&mut now, limit.saturating_sub(u64::from(claim.demand().0)), level);
            tighten(&mut unreclaimed, u64::from(usage.room().0), level);
            let others =
                self.tree.unlent(parent).children().0.saturating_sub(self.tree.unlent(level).floor().0);
            let left = ever.0.saturating_sub(u64::from(others));
            tighten(&mut ever, left, parent);
            tighten(&mut ever, limit, level);
        }
        for &level in path.iter() {
            let limit = self.tree.usage(level).limit();
            if self.tree.claim(level).claim() > limit {
                // Claims bound charges everywhere but where a limit was lowered below them, which is rare: look closer.
                tighten(&mut now, u64::from(limit.0).saturating_sub(self.hard_below(level)), level);
            }
        }
        tighten(&mut unreclaimed, now.0, now.1);
        let mut own = ever;
        tighten(&mut own, ever.0.saturating_sub(u64::from(self.tree.unlent(node).children().0)), node);
        let units = |n: u64| Units(n.min(u64::from(capacity.0)) as u32);
        Room {
            now: units(now.0),
            level: now.1,
            unreclaimed: units(unreclaimed.0),
            unreclaimed_level: unreclaimed.1,
            ever: units(ever.0),
            ever_level: ever.1,
            own: units(own.0),
            own_level: own.1,
        }
    }

    /// Whether all of this could be charged, each to its payer, with `emptied` once cached pages in the way have gone; else the
    /// payer and the level that stand for what does not fit, and what is asked there by then. Stocks that are in the way are
    /// given back first.
    pub(super) fn fit(
        &self,
        charges: &[(TenantId, Units)],
        emptied: bool,
    ) -> Result<(), (TenantId, Units, Obstacle)> {
        loop {
            match self.fit_at_once(charges, emptied) {
                Err((.., obstacle)) if self.drain(obstacle.level) => {}
                answer => return answer,
            }
        }
    }

    fn fit_at_once(
        &self,
        charges: &[(TenantId, Units)],
        emptied: bool,
    ) -> Result<(), (TenantId, Units, Obstacle)> {
        let units = |n: u64| Units(u32::try_from(n).unwrap_or(u32::MAX));
        // What the demand of each level grows by, and what is charged below it.
        let mut grown: HashMap<TenantId, (u64, u64)> = HashMap::new();
        for &(payer, n) in charges {
            let mut more = u64::from(n.0);
            for &level in self.tree.path(payer).iter() {
                let (claim, usage) = (self.tree.claim(level), self.tree.usage(level));
                let (grown, charged) = grown.entry(level).or_default();
                let before = u64::from(claim.demand().0) + *grown;
                *grown += more;
                *charged += u64::from(n.0);
                let after = before + more;
                let most = u64::from(usage.limit().0);
                // As in [`Self::room_at_once`].
                let mut over = if more > 0 { after.saturating_sub(most) } else { 0 };
                if n.0 > 0 && !emptied {
                    over = over.max((u64::from(usage.charged().0) + *charged).saturating_sub(most));
                } else if n.0 > 0 && claim.claim() > usage.limit() {
                    over = over.max((self.hard_below(level) + *charged).saturating_sub(most));
                }
                if over > 0 {
                    let why = if level == ROOT { Why::Claim } else { Why::Limit };
                    let obstacle = Obstacle { level, why, short: units(over).0, limit: usage.limit() };
                    return Err((payer, units(*charged), obstacle));
                }
                // Inside the level's reserve nothing is asked of the levels above.
                let kept = u64::from(claim.kept().0);
                more = after.max(kept) - before.max(kept);
            }
        }
        Ok(())
    }

    fn hard_below(&self, level: TenantId) -> u64 {
        let below = (0..=self.top()).map(TenantId).filter(|&node| self.tree.is_under(node, level));
        below.map(|node| u64::from(self.tree.own(node).hard())).sum()
    }

    /// Whose cached pages go first below `level`: a tenant that has some and is not in `skip`.
    ///
    /// At each level the child goes first whose subtree has the most above its reserve by weight; so whoever lies inside a
    /// reserve, its own or one above it, comes last. Then lower priority, then lower id. A node's own pages stand among its
    /// children as those of a child of weight 1 without reserve.
    pub(super) fn worst(&self, level: TenantId, skip: impl Fn(TenantId) -> bool) -> Option<TenantId> {
        let mut worst: Option<Path> = None;
        for node in (0..=self.top()).map(TenantId) {
            if self.tree.own(node).cached() <= 0 || skip(node) {
                continue;
            }
            let path = self.tree.path(node);
            if !path.contains(&level) {
                continue;
            }
            if worst.is_none_or(|worst| self.is_worse(&path, &worst)) {
                worst = Some(path);
            }
        }
        worst.map(|path| path[0])
    }

    fn is_worse(&self, path: &Path, than: &Path) -> bool {
        let depth = path.iter().rev().zip(than.iter().rev()).take_while(|(a, b)| a == b).count();
        let (a, b) = (self.over_use(path, depth), self.over_use(than, depth));
        // a.over / a.weight against b.over / b.weight
        let by_weight = (i128::from(a.0) * i128::from(b.1)).cmp(&(i128::from(b.0) * i128::from(a.1)));
        by_weight.then(b.2.cmp(&a.2)).then(b.3.cmp(&a.3)).is_gt()
    }

    /// (units above the reserve, weight, priority, id) of the node `depth` levels below the root on this path.
    fn over_use(&self, path: &Path, depth: usize) -> (i64, u32, u8, TenantId) {
        match path.iter().rev().nth(depth) {
            Some(&node) => {
                let meta = self.tree.meta(node);
                let over = i64::from(self.tree.usage(node).charged().0);
                let reserve = i64::from(self.tree.floor(node).reserve().0);
                (over - reserve, meta.weight().max(1), meta.priority(), node)
            }
            None => {
                let own = self.tree.own(path[0]);
                let over = i64::from(own.hard()) + i64::from(own.cached());
                (over, 1, self.tree.meta(path[0]).priority(), path[0])
            }
        }
    }
}

fn tighten(at: &mut (u64, TenantId), most: u64, level: TenantId) {
    if most < at.0 {
        *at = (most, level);
    }
}

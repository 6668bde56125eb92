//! The tree of one tier: what is charged to each node, and what each keeps from all others.
//!
//! A node is a cache line:
//!
//! | word | content | moved by |
//! | --- | --- | --- |
//! | 0 | [`UsageWord`]: charged to the subtree, limit | a walk from the node to the root |
//! | 1 | [`ClaimWord`]: demand, kept | a walk upward that ends where the claim does not change |
//! | 2 | [`OwnWord`]: own hard and cached units | every operation of this file |
//! | 3 | [`CountWord`]: own pinned units | pins |
//! | 4 | [`CountWord`]: own promised units booked while the lanes were closed | stock.rs |
//! | 5 | [`MetaWord`]: parent, weight, priority, live | policy.rs |
//! | 6 | [`FloorWord`]: reserves of the node and below, lent or not | policy.rs |
//! | 7 | [`UsageWord`]: pinned units against the pin budget | pins |
//!
//! # Rules
//!
//! `claim(node) = max(kept, demand)`, `demand(node) = own hard + sum of the children's claims`; kept is the reserve, or of one
//! that is lent what was asked back. At every level: a charge
//! may not lift `charged` above the limit, and growth may not lift `claim` above it either; the root's limit is the
//! capacity. (A limit that were checked against charges alone would let one child's held pages fill the place that
//! another child has reserved below the same limit.)
//!
//! # Order of the steps
//!
//! `max` is not linear: an add that is undone later would let others pass wrong differences upward. So growth is acquired
//! from the parent first and the node moves after; a node shrinks first and its parent after. A parent may so count too
//! much for a moment, never too little; what each word passes upward telescopes, so at rest all is exact. For the same
//! reason own units are counted last on the way in and given up first on the way out.

use crate::{
    ledger::error::Why,
    sync::{Atom, AtomicU64, Words},
    word::{
        TenantId, Units,
        ledger::{ClaimWord, CountWord, FloorWord, MetaWord, OwnWord, UsageWord},
    },
};

/// The node above all tenants.
pub const ROOT: TenantId = TenantId(0);
/// The deepest level of a tenant; the root is level 0.
pub const MAX_DEPTH: u32 = 8;

const STRIDE: usize = 8;
const USAGE: usize = 0;
const CLAIM: usize = 1;
const OWN: usize = 2;
const PINNED: usize = 3;
const PROMISED: usize = 4;
const META: usize = 5;
const FLOOR: usize = 6;
const PINS: usize = 7;

/// What stood in the way of an amount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Obstacle {
    pub(super) level: TenantId,
    pub(super) why: Why,
    /// How much too much was asked.
    pub(super) short: u32,
    pub(super) limit: Units,
}

impl Obstacle {
    fn limit(level: TenantId, now: UsageWord, asked: u32) -> Self {
        Self { level, why: Why::Limit, short: asked.saturating_sub(now.room().0), limit: now.limit() }
    }
}

/// A node's way to the root, the node first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    nodes: [TenantId; MAX_DEPTH as usize + 1],
    len: usize,
}

impl std::ops::Deref for Path {
    type Target = [TenantId];
    fn deref(&self) -> &[TenantId] {
        &self.nodes[..self.len]
    }
}

#[derive(Debug)]
pub(super) struct Tree {
    words: Words,
    /// A [`FloorWord`] of each node, as in its line but without reserves that are lent: read by admission alone.
    unlent: Words,
    /// Bookings that would have taken more than there was: a caller's fault. They change nothing.
    faults: AtomicU64,
}

impl Tree {
    pub(super) fn new(nodes: u32, capacity: Units) -> Self {
        let nodes = nodes as usize;
        let (words, unlent) = (Words::zeroed(nodes * STRIDE), Words::zeroed(nodes));
        let tree = Self { words, unlent, faults: AtomicU64::new(0) };
        tree.at(ROOT, USAGE).put(UsageWord::new(capacity).0);
        tree.set_meta(ROOT, MetaWord::new(ROOT, 1, 0));
        tree
    }

    #[inline]
    fn at(&self, node: TenantId, word: usize) -> &AtomicU64 {
        &self.words[node.as_usize() * STRIDE + word]
    }
    #[inline]
    pub(super) fn usage(&self, node: TenantId) -> UsageWord {
        UsageWord(self.at(node, USAGE).get())
    }
    #[inline]
    pub(super) fn claim(&self, node: TenantId) -> ClaimWord {
        ClaimWord(self.at(node, CLAIM).get())
    }
    #[inline]
    pub(super) fn own(&self, node: TenantId) -> OwnWord {
        OwnWord(self.at(node, OWN).get())
    }
    #[inline]
    pub(super) fn pinned(&self, node: TenantId) -> CountWord {
        CountWord(self.at(node, PINNED).get())
    }
    #[inline]
    pub(super) fn promised(&self, node: TenantId) -> CountWord {
        CountWord(self.at(node, PROMISED).get())
    }
    #[inline]
    pub(super) fn meta(&self, node: TenantId) -> MetaWord {
        MetaWord(self.at(node, META).get())
    }
    pub(super) fn floor(&self, node: TenantId) -> FloorWord {
        FloorWord(self.at(node, FLOOR).get())
    }
    /// As [`Self::floor`], without reserves that are lent.
    pub(super) fn unlent(&self, node: TenantId) -> FloorWord {
        FloorWord(self.unlent[node.as_usize()].get())
    }
    pub(super) fn faults(&self) -> u64 {
        self.faults.get()
    }
    #[cold]
    fn fault(&self) {
        self.faults.tally(1);
    }

    /// Whether this id is a tenant or the root.
    pub(super) fn is_live(&self, node: TenantId) -> bool {
        node.as_usize() < self.words.len() / STRIDE && self.meta(node).is_live()
    }

    /// The node above; `None` above the root.
    #[inline]
    pub(super) fn above(&self, node: TenantId) -> Option<TenantId> {
        if node == ROOT { None } else { Some(self.meta(node).parent()) }
    }

    pub(super) fn path(&self, node: TenantId) -> Path {
        let mut path = Path { nodes: [node; MAX_DEPTH as usize + 1], len: 1 };
        while let Some(parent) = self.above(path.nodes[path.len - 1])
            && path.len < path.nodes.len()
        {
            path.nodes[path.len] = parent;
            path.len += 1;
        }
        path
    }

    pub(super) fn is_under(&self, node: TenantId, level: TenantId) -> bool {
        level == ROOT || self.path(node).contains(&level)
    }

    /// Whether `charge` more could be charged and `claim` more be claimed, by reading alone: what is refused here disturbs
    /// nobody. `margin` asks for so much more room at every level.
    pub(super) fn fits(&self, node: TenantId, charge: u32, claim: u32, margin: u32) -> Result<(), Obstacle> {
        let mut at = Some(node);
        while let Some(level) = at {
            let usage = self.usage(level);
            if charge > 0 && u64::from(usage.room().0) < u64::from(charge) + u64::from(margin) {
                return Err(Obstacle::limit(level, usage, charge));
            }
            at = self.above(level);
        }
        let (mut at, mut grow) = (Some(node), claim);
        while let Some(level) = at {
            if grow == 0 {
                break;
            }
            let now = self.claim(level);
            let Some(next) = now.more(Units(grow)) else { return Err(self.no_claim(level, now, None)) };
            let growth = next.claim().0 - now.claim().0;
            let limit = self.usage(level).limit();
            if growth > 0 && u64::from(next.claim().0) + u64::from(margin) > u64::from(limit.0) {
                return Err(self.no_claim(level, now, Some(next)));
            }
            (at, grow) = (self.above(level), growth);
        }
        Ok(())
    }

    /// Whether a level on the way up has more charged or claimed than its limit, which was lowered then.
    pub(super) fn is_over(&self, node: TenantId) -> bool {
        self.path(node).iter().any(|&level| self.is_level_over(level, self.usage(level)))
    }
    /// The same, and whoever lowers a limit later sees what this thread did before.
    pub(super) fn is_over_now(&self, node: TenantId) -> bool {
        let now = |level| UsageWord(self.at(level, USAGE).plus(0));
        self.path(node).iter().any(|&level| self.is_level_over(level, now(level)))
    }
    fn is_level_over(&self, level: TenantId, usage: UsageWord) -> bool {
        usage.charged() > usage.limit() || self.claim(level).claim() > usage.limit()
    }

    fn no_claim(&self, level: TenantId, now: ClaimWord, next: Option<ClaimWord>) -> Obstacle {
        let limit = self.usage(level).limit();
        let short = next.map_or(u32::MAX, |next| {
            // A limit that was lowered below the claim does not add to what the asker is short of.
            (next.claim().0 - now.claim().0).min(next.claim().0.saturating_sub(limit.0))
        });
        Obstacle { level, why: Why::Claim, short, limit }
    }

    /// Charge the subtrees from `node` to the root: all or nothing.
    fn charge(&self, node: TenantId, n: Units) -> Result<(), Obstacle> {
        let path = self.path(node);
        for (i, &level) in path.iter().enumerate() {
            if let Err(now) = self.at(level, USAGE).transit(|w| UsageWord(w).charge(n).map(|w| w.0)) {
                self.uncharge(&path[..i], n);
                return Err(Obstacle::limit(level, UsageWord(now), n.0));
            }
        }
        Ok(())
    }

    /// From the top down: the node's own word comes last, so a node without charges has nothing on its way any more.
    fn uncharge(&self, path: &[TenantId], n: Units) {
        for &level in path.iter().rev() {
            if self.at(level, USAGE).transit(|w| UsageWord(w).discharge(n).map(|w| w.0)).is_err() {
                self.fault();
            }
        }
    }

    /// Move a claim word along `step`, with the growth acquired from the levels above before the word moves.
    fn raise(
        &self,
        node: TenantId,
        step: impl Fn(ClaimWord) -> Option<ClaimWord>,
    ) -> Result<ClaimWord, Obstacle> {
        let word = self.at(node, CLAIM);
        let above = self.above(node);
        let mut have = 0;
        let mut now = ClaimWord(word.first());
        let obstacle = loop {
            let Some(next) = step(now) else { break self.no_claim(node, now, None) };
            let growth = next.claim().0.saturating_sub(now.claim().0);
            if growth > 0 && next.claim().0 > self.usage(node).limit().0 {
                break self.no_claim(node, now, Some(next));
            }
            if let Some(parent) = above
                && growth > have
            {
                if let Err(obstacle) = self.acquire(parent, Units(growth - have)) {
                    break obstacle;
                }
                have = growth;
            }
            match word.cas(now.0, next.0) {
                Ok(_) => {
                    // What was acquired too much, or what the claim shrank by. At the root there is nobody to tell.
                    if let Some(parent) = above {
                        self.release(parent, Units(have + now.claim().0 - next.claim().0));
                    }
                    return Ok(now);
                }
                Err(found) => now = ClaimWord(found),
            }
        };
        if let Some(parent) = above {
            self.release(parent, Units(have));
        }
        Err(obstacle)
    }

    /// More demand at `node`.
    fn acquire(&self, node: TenantId, n: Units) -> Result<(), Obstacle> {
        self.raise(node, |w| w.more(n)).map(drop)
    }

    /// Less demand at `node`. The way up is read first: it is that of the units, whatever becomes of the node.
    fn release(&self, node: TenantId, n: Units) {
        let mut shrink = n;
        for &level in self.path(node).iter() {
            if shrink.0 == 0 {
                return;
            }
            let less = |w| ClaimWord(w).less(shrink).map(|w| w.0);
            let Ok(before) = self.at(level, CLAIM).transit(less) else { return self.fault() };
            let before = ClaimWord(before);
            let after = before.less(shrink).unwrap_or(before);
            shrink = Units(before.claim().0 - after.claim().0);
        }
    }

    fn move_own(&self, node: TenantId, hard: i32, cached: i32) -> bool {
        // Hard units are counted before they are used and for as long: there are never too few of them.
        let step = |w| Some(OwnWord(w)).filter(|w| hard >= 0 || w.hard() >= hard.unsigned_abs());
        let moved = self.at(node, OWN).transit(|w| step(w).map(|w| w.shift(hard, cached).0)).is_ok();
        if !moved {
            self.fault();
        }
        moved
    }

    /// free -> hard.
    pub(super) fn obtain(&self, node: TenantId, n: Units) -> Result<(), Obstacle> {
        self.fits(node, n.0, n.0, 0)?;
        self.charge(node, n)?;
        if let Err(obstacle) = self.acquire(node, n) {
            self.uncharge(&self.path(node), n);
            return Err(obstacle);
        }
        self.move_own(node, n.0 as i32, 0);
        Ok(())
    }

    /// hard -> free.
    pub(super) fn surrender(&self, node: TenantId, n: Units) {
        if n.0 > 0 && self.move_own(node, -(n.0 as i32), 0) {
            self.release(node, n);
            self.uncharge(&self.path(node), n);
        }
    }

    /// hard -> cached.
    pub(super) fn park(&self, node: TenantId, n: Units) {
        if self.move_own(node, -(n.0 as i32), n.0 as i32) {
            self.release(node, n);
        }
    }

    /// cached -> hard.
    pub(super) fn revive(&self, node: TenantId, n: Units) -> Result<(), Obstacle> {
        self.fits(node, 0, n.0, 0)?;
        self.acquire(node, n)?;
        self.move_own(node, n.0 as i32, -(n.0 as i32));
        Ok(())
    }

    /// cached -> free.
    pub(super) fn drop_cached(&self, node: TenantId, n: Units) {
        self.move_own(node, 0, -(n.0 as i32));
        self.uncharge(&self.path(node), n);
    }

    /// Pinned units are hard like held ones; only the kind changes.
    pub(super) fn count_pinned(&self, node: TenantId, by: i32) {
        // Never closed, so never refused.
        let _ = self.at(node, PINNED).transit(|w| CountWord(w).shift(by).map(|w| w.0));
    }

    pub(super) fn count_promised(&self, node: TenantId, by: i32) {
        let _ = self.at(node, PROMISED).transit(|w| CountWord(w).shift(by).map(|w| w.0));
    }

    /// The budget of pinned units.
    pub(super) fn pin_budget(&self, node: TenantId) -> Units {
        UsageWord(self.at(node, PINS).get()).limit()
    }

    // What follows is called with the policy lock held.

    pub(super) fn set_meta(&self, node: TenantId, meta: MetaWord) {
        self.at(node, META).put(meta.0);
    }
    /// The limit before.
    pub(super) fn set_limit(&self, node: TenantId, limit: Units) -> Units {
        let step = |w| Some(UsageWord(w).with_limit(limit).0);
        let before = match self.at(node, USAGE).transit(step) {
            Ok(before) | Err(before) => before,
        };
        UsageWord(before).limit()
    }
    pub(super) fn set_pin_budget(&self, node: TenantId, budget: Units) {
        let _ = self.at(node, PINS).transit(|w| Some(UsageWord(w).with_limit(budget).0));
    }
    /// What was kept before.
    pub(super) fn set_kept(&self, node: TenantId, kept: Units) -> Result<Units, Obstacle> {
        self.raise(node, |w| Some(w.with_kept(kept))).map(ClaimWord::kept)
    }
    /// Write a node's floors and carry the differences to the root.
    pub(super) fn set_floor(&self, node: TenantId, reserve: Units, lends: bool) {
        self.carry(node, reserve, |level| self.at(level, FLOOR));
        self.carry(node, if lends { Units(0) } else { reserve }, |level| &self.unlent[level.as_usize()]);
    }
    fn carry<'a>(&self, node: TenantId, reserve: Units, word: impl Fn(TenantId) -> &'a AtomicU64) {
        let floor = |level| FloorWord(word(level).get());
        let (mut level, mut next) = (node, FloorWord::new(reserve, floor(node).children()));
        loop {
            let before = floor(level);
            word(level).put(next.0);
            let Some(parent) = self.above(level) else { return };
            let sum = floor(parent).children().0 - before.floor().0 + next.floor().0;
            next = FloorWord::new(floor(parent).reserve(), Units(sum));
            level = parent;
        }
    }
}

//! The words of the ledger. All numbers are ledger units, below 2^31 ([`MAX_UNITS`]).
//!
//! | word | bits 0-31 | bits 32-63 |
//! | --- | --- | --- |
//! | [`UsageWord`] | charged to the subtree | limit of the subtree |
//! | [`ClaimWord`] | demand: own hard units + the children's claims | kept: the reserve, but for what is lent of it |
//! | [`OwnWord`] | cached (signed) | hard: held + pinned + promised + stocks |
//! | [`CountWord`] | count (signed) | bit 32 CLOSED, 33-63 tag |
//! | [`StockWord`] | units in stock | bit 32 CLOSED, 33 LISTED, 34-63 tag |
//! | [`MetaWord`] | weight | parent (32-55), live (56), priority (57-63) |
//! | [`FloorWord`] | sum of the children's floors | reserve |
//!
//! A tag moves with every transition, so that two equal readings of a word mean that nothing happened in between.
//!
//! Signed counts: a page's state moves first and its booking follows, so of two threads that park and revive one page
//! the second may book first. A count then stands below 0 until the first has booked; it is kept modulo 2^32.

use super::{TenantId, Units};

/// The most units a tier can have.
pub const MAX_UNITS: u32 = i32::MAX as u32;

const LOW: u64 = u32::MAX as u64;

#[inline]
const fn pack(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

macro_rules! word {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            #[allow(dead_code, reason = "the halves have names of their own")]
            const fn low(self) -> u32 {
                self.0 as u32
            }
            #[allow(dead_code, reason = "the halves have names of their own")]
            const fn high(self) -> u32 {
                (self.0 >> 32) as u32
            }
        }
    };
}

word!(/** What is charged to a node and everything below it, and the most that may be. */ UsageWord);

impl UsageWord {
    /// Nothing charged.
    pub const fn new(limit: Units) -> Self {
        Self(pack(limit.0, 0))
    }
    /// Units charged.
    #[inline]
    pub const fn charged(self) -> Units {
        Units(self.low())
    }
    /// The most that may be charged; `u32::MAX`: no limit.
    #[inline]
    pub const fn limit(self) -> Units {
        Units(self.high())
    }
    /// Units until the limit; 0 when it was lowered below use.
    #[inline]
    pub const fn room(self) -> Units {
        Units(self.high().saturating_sub(self.low()))
    }
    /// Charge, within the limit.
    #[inline]
    pub const fn charge(self, n: Units) -> Option<Self> {
        if n.0 <= self.room().0 { Some(Self(self.0 + n.0 as u64)) } else { None }
    }
    /// Give back what was charged.
    #[inline]
    pub const fn discharge(self, n: Units) -> Option<Self> {
        if n.0 <= self.low() { Some(Self(self.0 - n.0 as u64)) } else { None }
    }
    /// Another limit, below use too.
    #[inline]
    pub const fn with_limit(self, limit: Units) -> Self {
        Self(pack(limit.0, self.low()))
    }
}

word!(/** What a node keeps from all others: `max(kept, demand)`. */ ClaimWord);

impl ClaimWord {
    /// Own hard units and the children's claims.
    #[inline]
    pub const fn demand(self) -> Units {
        Units(self.low())
    }
    /// The reserve, but for what is lent of it.
    #[inline]
    pub const fn kept(self) -> Units {
        Units(self.high())
    }
    /// `max(kept, demand)`.
    #[inline]
    pub const fn claim(self) -> Units {
        if self.high() > self.low() { Units(self.high()) } else { Units(self.low()) }
    }
    /// Kept units that are not in demand.
    #[inline]
    pub const fn unused(self) -> Units {
        Units(self.high().saturating_sub(self.low()))
    }
    /// More demand.
    #[inline]
    pub const fn more(self, n: Units) -> Option<Self> {
        match self.low().checked_add(n.0) {
            Some(demand) => Some(Self(pack(self.high(), demand))),
            None => None,
        }
    }
    /// Less demand.
    #[inline]
    pub const fn less(self, n: Units) -> Option<Self> {
        if n.0 <= self.low() { Some(Self(self.0 - n.0 as u64)) } else { None }
    }
    /// More or less of the reserve kept.
    #[inline]
    pub const fn with_kept(self, kept: Units) -> Self {
        Self(pack(kept.0, self.low()))
    }
}

word!(/** A node's own units: hard (not reclaimable) and cached. */ OwnWord);

impl OwnWord {
    /// Held, pinned, promised and in stock.
    #[inline]
    pub const fn hard(self) -> u32 {
        self.high()
    }
    /// Cached; below 0 while a booking is owed.
    #[inline]
    pub const fn cached(self) -> i32 {
        self.low() as i32
    }
    /// Move both by signed amounts.
    #[inline]
    pub const fn shift(self, hard: i32, cached: i32) -> Self {
        Self(pack(self.high().wrapping_add_signed(hard), self.low().wrapping_add_signed(cached)))
    }
}

const CLOSED: u64 = 1 << 32;

word!(/** A tagged, signed count. While CLOSED it does not move: a reader is taking a snapshot. */ CountWord);

impl CountWord {
    const TAG: u64 = 1 << 33;

    /// The count.
    #[inline]
    pub const fn count(self) -> i32 {
        self.low() as i32
    }
    /// Whether a reader stopped it.
    #[inline]
    pub const fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }
    /// Move by a signed amount, unless closed.
    #[inline]
    pub const fn shift(self, by: i32) -> Option<Self> {
        if self.is_closed() {
            return None;
        }
        let count = self.low().wrapping_add_signed(by) as u64;
        Some(Self((self.0 & !LOW).wrapping_add(Self::TAG) | count))
    }
    /// Stop or release it.
    #[inline]
    pub const fn with_closed(self, closed: bool) -> Option<Self> {
        if self.is_closed() == closed { None } else { Some(Self((self.0 ^ CLOSED).wrapping_add(Self::TAG))) }
    }
}

word!(/** Units one lane has charged through the tree and not in use. LISTED: counted among the lanes that may have some. */ StockWord);

impl StockWord {
    const LISTED: u64 = 1 << 33;
    const TAG: u64 = 1 << 34;

    /// Units in stock.
    #[inline]
    pub const fn units(self) -> Units {
        Units(self.low())
    }
    /// Whether a reader stopped it: everything goes through the tree.
    #[inline]
    pub const fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }
    /// Whether it is counted among the lanes that may have stock; nothing is put into one that isn't.
    #[inline]
    pub const fn is_listed(self) -> bool {
        self.0 & Self::LISTED != 0
    }
    /// Take `n` for use.
    #[inline]
    pub const fn draw(self, n: Units) -> Option<Self> {
        if n.0 <= self.low() && !self.is_closed() {
            Some(Self((self.0 - n.0 as u64).wrapping_add(Self::TAG)))
        } else {
            None
        }
    }
    /// Put `n` in, up to `most` in all; the word becomes listed.
    #[inline]
    pub const fn store(self, n: Units, most: Units) -> Option<Self> {
        if !self.is_closed() && self.low() as u64 + n.0 as u64 <= most.0 as u64 {
            Some(Self((self.0 + n.0 as u64).wrapping_add(Self::TAG) | Self::LISTED))
        } else {
            None
        }
    }
    /// Put `n` in and keep `keep`: the rest is to be given back to the tree.
    #[inline]
    pub const fn trim(self, n: Units, keep: Units) -> Option<(Self, Units)> {
        let total = self.low() as u64 + n.0 as u64;
        if self.is_closed() || !self.is_listed() || total < keep.0 as u64 {
            return None;
        }
        let next = Self((self.0 & !LOW).wrapping_add(Self::TAG) | keep.0 as u64);
        Some((next, Units((total - keep.0 as u64) as u32)))
    }
    /// Take everything out, to be given back to the tree.
    #[inline]
    pub const fn empty(self) -> Option<Self> {
        if self.low() > 0 { Some(Self((self.0 & !LOW).wrapping_add(Self::TAG))) } else { None }
    }
    /// Strike it off the list, when there is nothing in it.
    #[inline]
    pub const fn unlist(self) -> Option<Self> {
        if self.is_listed() && self.low() == 0 {
            Some(Self((self.0 & !Self::LISTED).wrapping_add(Self::TAG)))
        } else {
            None
        }
    }
    /// Stop or release it.
    #[inline]
    pub const fn with_closed(self, closed: bool) -> Option<Self> {
        if self.is_closed() == closed { None } else { Some(Self((self.0 ^ CLOSED).wrapping_add(Self::TAG))) }
    }
}

word!(/** Where a node stands and how it is weighed. 0: no tenant was ever here. */ MetaWord);

impl MetaWord {
    const LIVE: u64 = 1 << 56;

    /// A live node.
    pub const fn new(parent: TenantId, weight: u32, priority: u8) -> Self {
        Self((priority as u64) << 57 | Self::LIVE | (parent.0 as u64 & 0xff_ffff) << 32 | weight as u64)
    }
    /// The node above; of the root: the root.
    #[inline]
    pub const fn parent(self) -> TenantId {
        TenantId((self.0 >> 32) as u32 & 0xff_ffff)
    }
    /// Whether it is a tenant.
    #[inline]
    pub const fn is_live(self) -> bool {
        self.0 & Self::LIVE != 0
    }
    /// Its weight among its siblings.
    #[inline]
    pub const fn weight(self) -> u32 {
        self.low()
    }
    /// Its priority, 0-100.
    #[inline]
    pub const fn priority(self) -> u8 {
        (self.0 >> 57) as u8
    }
    /// No tenant any more; the way up stays, for what is on its way.
    #[inline]
    pub const fn dead(self) -> Self {
        Self(self.0 & !Self::LIVE)
    }
}

word!(/** What policies alone keep from all others, whatever is in use. */ FloorWord);

impl FloorWord {
    /// From a reserve and the children's sum.
    pub const fn new(reserve: Units, children: Units) -> Self {
        Self(pack(reserve.0, children.0))
    }
    /// The reserve.
    #[inline]
    pub const fn reserve(self) -> Units {
        Units(self.high())
    }
    /// `max(reserve, sum of the children's floors)`.
    #[inline]
    pub const fn floor(self) -> Units {
        if self.high() > self.low() { Units(self.high()) } else { Units(self.low()) }
    }
    /// The sum of the children's floors.
    #[inline]
    pub const fn children(self) -> Units {
        Units(self.low())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_stops_at_the_limit_and_survives_a_lower_one() {
        let word = UsageWord::new(Units(10)).charge(Units(7)).expect("fits");
        assert_eq!(word.charge(Units(4)), None);
        let low = word.with_limit(Units(3));
        assert_eq!((low.charged(), low.room(), low.charge(Units(1))), (Units(7), Units(0), None));
        assert_eq!(low.discharge(Units(8)), None);
        assert_eq!(low.discharge(Units(7)).map(UsageWord::charged), Some(Units(0)));
        assert!(UsageWord::new(Units(u32::MAX)).charge(Units(MAX_UNITS)).is_some());
    }

    #[test]
    fn claim_is_the_larger_of_kept_and_demand() {
        let word = ClaimWord(0).with_kept(Units(5)).more(Units(3)).expect("small");
        assert_eq!((word.claim(), word.unused()), (Units(5), Units(2)));
        let more = word.more(Units(4)).expect("small");
        assert_eq!((more.claim(), more.demand(), more.unused()), (Units(7), Units(7), Units(0)));
        assert_eq!(more.less(Units(8)), None);
    }

    #[test]
    fn counts_go_below_zero_and_back() {
        let word = OwnWord(0).shift(4, 0).shift(4, -4);
        assert_eq!((word.hard(), word.cached()), (8, -4));
        assert_eq!(word.shift(-4, 4), OwnWord(0).shift(4, 0));
        let count = CountWord(0).shift(-3).expect("open");
        assert_eq!(count.count(), -3);
        let closed = count.with_closed(true).expect("was open");
        assert_eq!((closed.count(), closed.shift(1)), (-3, None));
        assert_ne!(closed.with_closed(false), Some(count));
    }

    #[test]
    fn the_tag_wraps_without_touching_the_units() {
        let last = StockWord(!0 << 34).store(Units(9), Units(9)).expect("room");
        assert_eq!((last.units(), last.is_listed(), last.0 >> 34), (Units(9), true, 0));
        assert_eq!(last.store(Units(1), Units(9)), None);
        let count = CountWord(!0 << 33).shift(-1).expect("open");
        assert_eq!((count.count(), count.0 >> 33), (-1, 0));
    }

    #[test]
    fn a_closed_stock_can_only_be_emptied() {
        let word = StockWord(0).store(Units(4), Units(8)).and_then(|w| w.with_closed(true)).expect("open");
        assert_eq!((word.draw(Units(1)), word.store(Units(1), Units(8)), word.unlist()), (None, None, None));
        let empty = word.empty().expect("has some");
        assert_eq!((empty.units(), empty.is_listed(), empty.is_closed()), (Units(0), true, true));
        assert!(empty.unlist().is_some_and(|w| !w.is_listed()));
    }

    #[test]
    fn meta_keeps_the_way_up_when_dead() {
        let meta = MetaWord::new(TenantId(0xff_fffe), u32::MAX, 100);
        assert_eq!((meta.parent(), meta.weight(), meta.priority()), (TenantId(0xff_fffe), u32::MAX, 100));
        assert!(meta.is_live() && !meta.dead().is_live());
        assert_eq!(meta.dead().parent(), meta.parent());
    }
}

//! The words of a page: its state and where it lies.
//!
//! # `PageWord`, 64 bits
//!
//! | bits | field | meaning |
//! | --- | --- | --- |
//! | 0-16 | `refs` | references held by sequences, batches and callers of the lower face |
//! | 17 | `AWAY` | off the device, in a smaller class than it was written in, cut, or on its way there or back: nobody finds or pins it |
//! | 18-23 | `pins` | pins on the page |
//! | 24 | `LIVE` | given out: in hands, in the index, or on its way out |
//! | 25 | `INDEXED` | has a key and stands in the index: it may be shared |
//! | 26 | `QUEUED` | stands in its tenant's eviction order, once |
//! | 27 | `VISITED` | hit since it last passed the clock hand |
//! | 28 | `PROVEN` | belongs to the proven half of its tenant's order |
//! | 29 | `LEAVING` | one thread owns it alone and is taking it out: nobody else may touch it |
//! | 30 | `NAMED` | one thread is giving it its names, or has: nobody else may |
//! | 31 | `LEASED` | a copy reads or writes its frame; it may not leave |
//! | 32-63 | `generation` | which life of this page id |
//!
//! # Invariant
//!
//! | state | refs | pins | bits |
//! | --- | --- | --- | --- |
//! | free | 0 | 0 | none |
//! | held | > 0 | any | LIVE |
//! | pinned | 0 | > 0 | LIVE, INDEXED |
//! | cached | 0 | 0 | LIVE, QUEUED, and INDEXED unless its key was taken from it while it was held |
//! | set aside | 0 | 0 | LIVE, INDEXED, not QUEUED: cached too, but kept by its children in the index, or by a copy |
//! | orphan | 0 | 0 | LIVE, LEASED, and AWAY or neither INDEXED nor QUEUED: nobody can find it, and a copy still uses its frame; whoever ends the lease frees it |
//! | leaving | 0 | 0 | LIVE, LEAVING, not QUEUED |
//!
//! A cached page is QUEUED from the same transition that made it cached, until the order sets it aside because it can't leave
//! now; whoever takes away the last thing that kept it makes it QUEUED again (evict.rs). A held or pinned one may still be
//! QUEUED from before (it stands in the order once, and the order drops it when it comes up). The generation moves from leaving to
//! free, and when a page that one holder has loses its key to be written anew ([`PageWord::renew`]): a reference names
//! one content at most.
//!
//! A page goes AWAY in the hands of one holder alone, and nobody else can find it until it is back. It keeps its key and its
//! children: what continues it is found again when it is back. Compression and cuts are final, so such a page never is; its
//! holder may fork it, once its lease has ended. Without references an AWAY page is no use to anybody, and leaves as soon as nothing
//! continues it, QUEUED until then; no lease is taken on it any more.

use super::{ClassId, FrameId, Generation, Tier};

const REFS: u64 = (1 << 17) - 1;
const AWAY: u64 = 1 << 17;
const PIN_SHIFT: u32 = 18;
const PINS: u64 = ((1 << 6) - 1) << PIN_SHIFT;
const LIVE: u64 = 1 << 24;
const INDEXED: u64 = 1 << 25;
const QUEUED: u64 = 1 << 26;
const VISITED: u64 = 1 << 27;
const PROVEN: u64 = 1 << 28;
const LEAVING: u64 = 1 << 29;
const NAMED: u64 = 1 << 30;
const LEASED: u64 = 1 << 31;
const GENERATION_SHIFT: u32 = 32;

const _: () = assert!(REFS & PINS == 0 && (REFS | AWAY | PINS) >> 24 == 0, "counts end below the flags");
const _: () = assert!(AWAY & (REFS | PINS) == 0, "a bit of its own between the counts");
const _: () = assert!(LEASED < 1 << GENERATION_SHIFT, "flags end below the generation");

/// The most references a page can have.
pub const MAX_REFS: u32 = REFS as u32;
/// The most pins a page can have.
pub const MAX_PINS: u32 = (PINS >> PIN_SHIFT) as u32;

/// State, reference count, pin count and generation of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct PageWord(pub u64);

/// What became of a page whose reference was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dropped {
    /// Others still hold it.
    Held,
    /// Nobody holds it, a pin keeps it.
    Pinned,
    /// Nobody holds it, it stays for later hits. `enqueue`: it does not stand in the order yet; the caller puts it there.
    Cached {
        /// The caller must put it into the eviction order.
        enqueue: bool,
    },
    /// It has no key, so nobody can find it: it is LEAVING, owned by the caller, who frees it.
    Leaving,
}

/// What a share did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shared {
    /// It was held already.
    Held,
    /// It was cached: now held again, so the ledger's held bytes grow.
    Revived,
    /// It was kept by a pin alone: now held.
    Unparked,
}

/// What became of a page whose copy has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// Somebody holds it, or it stands in the order.
    Kept,
    /// The order had set it aside: the caller puts it back, if nothing else keeps it ([`PageWord::relist`]).
    Aside,
    /// Everybody let go meanwhile, and it has a key: it is cached. Until now it counted as held.
    Cached {
        /// The caller must put it into the eviction order.
        enqueue: bool,
    },
    /// Everybody let go meanwhile: it is LEAVING, owned by the caller, who frees it.
    Leaving,
}

impl PageWord {
    /// The number of references.
    #[inline]
    pub const fn refs(self) -> u32 {
        (self.0 & REFS) as u32
    }
    /// The number of pins.
    #[inline]
    pub const fn pins(self) -> u32 {
        ((self.0 & PINS) >> PIN_SHIFT) as u32
    }
    /// Which life of the page.
    #[inline]
    pub const fn generation(self) -> Generation {
        Generation((self.0 >> GENERATION_SHIFT) as u32)
    }
    const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }
    /// Not given out.
    #[inline]
    pub const fn is_free(self) -> bool {
        !self.has(LIVE)
    }
    /// Has at least one reference.
    #[inline]
    pub const fn is_held(self) -> bool {
        self.refs() > 0
    }
    /// Kept by a pin alone.
    #[inline]
    pub const fn is_pinned(self) -> bool {
        self.refs() == 0 && self.pins() > 0
    }
    /// Kept for later hits, free to take.
    #[inline]
    pub const fn is_cached(self) -> bool {
        self.refs() == 0
            && self.pins() == 0
            && self.0 & (INDEXED | QUEUED) != 0
            && !self.has(LEAVING)
            && !self.is_orphan()
    }
    /// Cached, and not in the order.
    #[inline]
    pub const fn is_aside(self) -> bool {
        self.is_cached() && !self.has(QUEUED)
    }
    /// Let go by all, not to be found, and in use by a copy.
    #[inline]
    pub const fn is_orphan(self) -> bool {
        self.refs() == 0
            && self.pins() == 0
            && self.has(LIVE | LEASED)
            && (self.has(AWAY) || self.0 & (INDEXED | QUEUED) == 0)
    }
    /// Owned by one thread that is taking it out.
    #[inline]
    pub const fn is_leaving(self) -> bool {
        self.has(LEAVING)
    }
    /// Stands in the index.
    #[inline]
    pub const fn is_indexed(self) -> bool {
        self.has(INDEXED)
    }
    /// Stands in the eviction order.
    #[inline]
    pub const fn is_queued(self) -> bool {
        self.has(QUEUED)
    }
    /// Hit since it last passed the hand.
    #[inline]
    pub const fn is_visited(self) -> bool {
        self.has(VISITED)
    }
    /// In the proven half of the order.
    #[inline]
    pub const fn is_proven(self) -> bool {
        self.has(PROVEN)
    }
    /// Off the device, compressed, or on the way.
    #[inline]
    pub const fn is_away(self) -> bool {
        self.has(AWAY)
    }
    /// A copy uses its frame.
    #[inline]
    pub const fn is_leased(self) -> bool {
        self.has(LEASED)
    }

    /// free -> held once, by whoever claimed the id.
    #[inline]
    pub const fn take(self) -> Option<Self> {
        if self.0 as u32 == 0 { Some(Self(self.0 | LIVE | 1)) } else { None }
    }

    /// One more reference for somebody who holds one already (a fork).
    #[inline]
    pub const fn share_held(self, generation: Generation) -> Option<Self> {
        if self.generation().0 == generation.0
            && self.refs() > 0
            && self.refs() < MAX_REFS
            && !self.has(AWAY | LEASED)
        {
            Some(Self(self.0 + 1))
        } else {
            None
        }
    }

    /// A hit: one more reference on a page found in the index, and its clock bit.
    #[inline]
    pub const fn share(self, generation: Generation) -> Option<(Self, Shared)> {
        if self.generation().0 != generation.0
            || !self.has(LIVE | INDEXED)
            || self.0 & (LEAVING | AWAY) != 0
            || self.refs() == MAX_REFS
        {
            return None;
        }
        let was = if self.refs() > 0 {
            Shared::Held
        } else if self.pins() > 0 {
            Shared::Unparked
        } else {
            Shared::Revived
        };
        Some((Self((self.0 + 1) | VISITED), was))
    }

    /// One reference less.
    #[inline]
    pub const fn drop_ref(self, generation: Generation) -> Option<(Self, Dropped)> {
        if self.generation().0 != generation.0 || self.refs() == 0 {
            return None;
        }
        let next = Self(self.0 - 1);
        Some(next.settle())
    }

    /// What a page becomes when its last reference or pin has gone.
    const fn settle(self) -> (Self, Dropped) {
        if self.refs() > 0 {
            (self, Dropped::Held)
        } else if self.pins() > 0 {
            (self, Dropped::Pinned)
        } else if self.is_orphan() {
            (self, Dropped::Held)
        } else if self.has(INDEXED) {
            (Self(self.0 | QUEUED), Dropped::Cached { enqueue: !self.has(QUEUED) })
        } else if self.has(QUEUED) {
            // Its key went while it was held, and the order still lists it: the order takes it out when it comes up.
            (self, Dropped::Cached { enqueue: false })
        } else {
            (Self(self.0 | LEAVING), Dropped::Leaving)
        }
    }

    /// A held page without a key is about to get its names, from one thread alone.
    #[inline]
    pub const fn name(self, generation: Generation) -> Option<Self> {
        if self.generation().0 == generation.0
            && self.has(LIVE)
            && self.0 & (INDEXED | NAMED | LEAVING) == 0
            && self.refs() > 0
        {
            Some(Self(self.0 | NAMED))
        } else {
            None
        }
    }

    /// It gets none after all.
    #[inline]
    pub const fn unname(self) -> Option<Self> {
        if self.has(NAMED) && !self.has(INDEXED) { Some(Self(self.0 & !NAMED)) } else { None }
    }

    /// A held page gets a key and may be found. `proven`: the ghosts remember it.
    #[inline]
    pub const fn publish(self, proven: bool) -> Option<Self> {
        if self.has(LIVE) && !self.has(INDEXED) && self.refs() > 0 {
            Some(Self(self.0 | INDEXED | NAMED | if proven { PROVEN } else { 0 }))
        } else {
            None
        }
    }

    /// A held page loses its key (the index had no room, or its content is about to change).
    #[inline]
    pub const fn unpublish(self) -> Option<Self> {
        if self.has(INDEXED) && self.refs() > 0 {
            Some(Self(self.0 & !(INDEXED | PROVEN | NAMED)))
        } else {
            None
        }
    }

    /// A page that one holder has, and that has no key any more, begins another life in his hands.
    #[inline]
    pub const fn renew(self) -> Option<Self> {
        if self.refs() == 1 && self.pins() == 0 && self.has(LIVE) && self.0 & (INDEXED | LEASED | AWAY) == 0 {
            let next = (self.generation().0.wrapping_add(1) as u64) << GENERATION_SHIFT;
            Some(Self(next | self.0 & u32::MAX as u64))
        } else {
            None
        }
    }

    /// A cached page is taken by one thread, which stands at its place in the order: cached -> leaving.
    #[inline]
    pub const fn evict(self) -> Option<Self> {
        if self.has(LIVE | QUEUED)
            && self.refs() == 0
            && self.pins() == 0
            && !self.has(LEAVING)
            && !self.has(LEASED)
        {
            Some(Self((self.0 & !QUEUED) | LEAVING))
        } else {
            None
        }
    }

    /// The order met the page while somebody holds or pins it: it leaves the order and comes back when released.
    #[inline]
    pub const fn dequeue(self) -> Option<Self> {
        if self.has(QUEUED) && (self.refs() > 0 || self.pins() > 0) {
            Some(Self(self.0 & !QUEUED))
        } else {
            None
        }
    }

    /// The order met the page while its children or a copy keep it: it leaves the order until they don't.
    #[inline]
    pub const fn set_aside(self) -> Option<Self> {
        if self.refs() == 0 && self.pins() == 0 && self.has(LIVE | INDEXED | QUEUED) && !self.has(LEAVING) {
            Some(Self(self.0 & !QUEUED))
        } else {
            None
        }
    }

    /// A page that was set aside, and that nothing continues, goes back into the order: whoever does this puts it there. While
    /// a copy uses its frame that is for the end of the copy.
    #[inline]
    pub const fn relist(self) -> Option<Self> {
        if self.is_aside() && !self.has(LEASED) { Some(Self(self.0 | QUEUED)) } else { None }
    }

    /// The hand passes: the visit is used up, and the page stands where `proven` says.
    #[inline]
    pub const fn pass(self, proven: bool) -> Self {
        Self((self.0 & !(VISITED | PROVEN)) | if proven { PROVEN } else { 0 })
    }

    /// leaving -> free; the next life begins.
    #[inline]
    pub const fn retire(self) -> Option<Self> {
        if self.has(LEAVING) && self.refs() == 0 && self.pins() == 0 {
            Some(Self((self.generation().0.wrapping_add(1) as u64) << GENERATION_SHIFT))
        } else {
            None
        }
    }

    /// One more pin on a held or cached page. `true`: it was cached, so it is no longer reclaimable.
    #[inline]
    pub const fn pin(self, generation: Generation) -> Option<(Self, bool)> {
        if self.generation().0 == generation.0
            && self.has(LIVE | INDEXED)
            && self.0 & (LEAVING | AWAY) == 0
            && self.pins() < MAX_PINS
        {
            Some((Self(self.0 + (1 << PIN_SHIFT)), self.is_cached()))
        } else {
            None
        }
    }

    /// One pin less.
    #[inline]
    pub const fn unpin(self, generation: Generation) -> Option<(Self, Dropped)> {
        if self.generation().0 == generation.0 && self.pins() > 0 {
            Some(Self(self.0 - (1 << PIN_SHIFT)).settle())
        } else {
            None
        }
    }

    /// A copy begins to use the frame.
    #[inline]
    pub const fn lease(self, generation: Generation) -> Option<Self> {
        let lost = self.has(AWAY) && self.refs() == 0;
        let free = !self.has(LEAVING) && !self.has(LEASED) && !lost;
        if self.generation().0 == generation.0 && self.has(LIVE) && free {
            Some(Self(self.0 | LEASED))
        } else {
            None
        }
    }

    /// A page that one holder has alone begins to leave the device, or to come back to it: nobody else can come by it.
    #[inline]
    pub const fn lease_out(self, generation: Generation) -> Option<Self> {
        match self.lease(generation) {
            Some(leased) if self.refs() == 1 && self.pins() == 0 => Some(Self(leased.0 | AWAY)),
            _ => None,
        }
    }

    /// The copy has ended or its time is over; a second end is `None`. A page that was leased out stays AWAY or not.
    #[inline]
    pub const fn unlease(self, generation: Generation, away: bool) -> Option<(Self, Ended)> {
        if self.generation().0 != generation.0 || !self.has(LEASED) {
            return None;
        }
        let next = Self(self.0 & !(LEASED | AWAY) | if away { AWAY } else { 0 });
        Some(if self.is_aside() {
            (next, Ended::Aside)
        } else if !self.is_orphan() {
            (next, Ended::Kept)
        } else if self.0 & (INDEXED | QUEUED) != 0 {
            (Self(next.0 | QUEUED), Ended::Cached { enqueue: !self.has(QUEUED) })
        } else {
            (Self(next.0 | LEAVING), Ended::Leaving)
        })
    }
}

impl std::fmt::Debug for PageWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} refs={} pins={}", self.generation(), self.refs(), self.pins())?;
        for (bit, name) in [
            (AWAY, "away"),
            (LIVE, "live"),
            (INDEXED, "indexed"),
            (QUEUED, "queued"),
            (VISITED, "visited"),
            (PROVEN, "proven"),
            (LEAVING, "leaving"),
            (NAMED, "named"),
            (LEASED, "leased"),
        ] {
            if self.has(bit) {
                write!(f, " {name}")?;
            }
        }
        Ok(())
    }
}

/// Where a page lies. Storing a new one is how a page moves; nobody who holds the page notices.
///
/// | bits | field |
/// | --- | --- |
/// | 0-31 | frame; 0: it is gone, and lies nowhere any more |
/// | 32-39 | page class |
/// | 40-41 | tier |
/// | 42 | set in every location, so that 0 is "nowhere" |
/// | 43 | `OPEN`: it stands in a row of a batch, whose steps write into this frame until the page is published |
/// | 44 | `OUTSIDE`: an engine with tables of its own was told this frame, and may come back to it while the page lives |
///
/// Both belong to the frame and not to the page: a move stores a location without them, by compare-exchange on the one
/// it began with. So whoever sets one before that keeps the page where it is, and whoever comes after sees the new frame.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Location(pub u64);

pub(crate) const OPEN: u64 = 1 << 43;
pub(crate) const OUTSIDE: u64 = 1 << 44;

impl Location {
    /// Nowhere: the page is free.
    pub const NOWHERE: Self = Self(0);

    /// A place.
    #[inline]
    pub const fn new(tier: Tier, class: ClassId, frame: FrameId) -> Self {
        Self(1 << 42 | (tier as u64) << 40 | (class.0 as u64) << 32 | frame.0 as u64)
    }
    /// In frame 0 of its class, where no page lies: it was cut, and holds no frame and no charge (preempt/cut.rs).
    #[inline]
    pub const fn gone(class: ClassId) -> Self {
        Self::new(Tier::Device, class, FrameId(0))
    }
    /// Whether it was cut.
    #[inline]
    pub const fn is_gone(self) -> bool {
        self.tier().is_some() && self.frame().0 == 0
    }
    /// The frame.
    #[inline]
    pub const fn frame(self) -> FrameId {
        FrameId(self.0 as u32)
    }
    /// The page class.
    #[inline]
    pub const fn class(self) -> ClassId {
        ClassId((self.0 >> 32) as u8)
    }
    /// A place that is written to by steps.
    #[inline]
    pub const fn open(self) -> Self {
        Self(self.0 | OPEN)
    }
    /// Whether steps write to it.
    #[inline]
    pub const fn is_open(self) -> bool {
        self.0 & OPEN != 0
    }
    /// Whether an engine with tables of its own was told it.
    #[inline]
    pub const fn is_outside(self) -> bool {
        self.0 & OUTSIDE != 0
    }
    /// The tier, `None` for [`Self::NOWHERE`].
    #[inline]
    pub const fn tier(self) -> Option<Tier> {
        match self.0 >> 40 & 7 {
            4 => Some(Tier::Device),
            5 => Some(Tier::Host),
            _ => None,
        }
    }
}

impl std::fmt::Debug for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.tier() {
            Some(tier) => {
                write!(f, "{tier:?}:{}:{}", self.class(), self.frame())?;
                f.write_str(if self.is_gone() { " gone" } else { "" })?;
                f.write_str(if self.is_open() { " open" } else { "" })?;
                f.write_str(if self.is_outside() { " outside" } else { "" })
            }
            None => f.write_str("nowhere"),
        }
    }
}

#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests {
    use super::*;

    /// A word in generation 3 with these bits.
    fn word(bits: u64) -> PageWord {
        PageWord(3 << GENERATION_SHIFT | bits)
    }

    #[test]
    fn a_reference_to_another_life_changes_nothing() {
        for bits in
            [LIVE | 1, LIVE | INDEXED | NAMED | 2, LIVE | INDEXED | QUEUED, LIVE | INDEXED | 1 << PIN_SHIFT]
        {
            for generation in [2, 4].map(Generation) {
                let page = word(bits);
                assert_eq!(page.drop_ref(generation).map(|p| p.0), None);
                assert_eq!(page.share(generation).map(|p| p.0), None);
                assert_eq!(page.share_held(generation), None);
                assert_eq!(page.pin(generation).map(|p| p.0), None);
                assert_eq!(page.unpin(generation).map(|p| p.0), None);
                assert_eq!(page.lease(generation), None);
                assert_eq!(word(bits | LEASED).unlease(generation, false).map(|p| p.0), None);
                assert_eq!(page.name(generation), None);
            }
        }
        assert_eq!(word(LIVE | 2).drop_ref(Generation(3)), Some((word(LIVE | 1), Dropped::Held)));
    }

    #[test]
    fn a_page_is_renewed_by_its_only_holder() {
        let next = PageWord(4 << GENERATION_SHIFT | LIVE | QUEUED | 1);
        assert_eq!(word(LIVE | QUEUED | 1).renew(), Some(next));
        for bits in [LIVE | 2, LIVE | INDEXED | 1, LIVE | 1 | 1 << PIN_SHIFT, LIVE | LEASED | 1, LIVE, 0] {
            assert_eq!(word(bits).renew(), None);
        }
    }

    #[test]
    fn a_page_goes_away_in_the_hands_of_one_holder() {
        let generation = Generation(3);
        for bits in
            [0, LIVE | 2, LIVE | INDEXED | QUEUED, LIVE | LEASED | 1, LIVE | INDEXED | 1 | 1 << PIN_SHIFT]
        {
            assert_eq!(word(bits).lease_out(generation), None, "{:?}", word(bits));
        }
        let out = word(LIVE | INDEXED | 1).lease_out(generation).expect("one holder, no pin");
        assert_eq!(out, word(LIVE | INDEXED | LEASED | AWAY | 1));
        // Nobody else comes by it, nor does its holder change it.
        assert_eq!(out.share(generation).map(|p| p.0), None);
        assert_eq!((out.share_held(generation), out.renew(), out.lease(generation)), (None, None, None));
        assert_eq!(out.pin(generation).map(|p| p.0), None);
        let (there, ended) = out.unlease(generation, true).expect("it was leased");
        assert_eq!((there, ended), (word(LIVE | INDEXED | AWAY | 1), Ended::Kept));
        assert_eq!(there.share(generation).map(|p| p.0), None);
        assert_eq!(there.unlease(generation, true), None);
        // Back, by the same way.
        let (back, _) =
            there.lease_out(generation).and_then(|w| w.unlease(generation, false)).expect("held once");
        assert_eq!(back, word(LIVE | INDEXED | 1));
    }

    #[test]
    fn what_is_let_go_on_its_way_waits_for_the_copy() {
        let generation = Generation(3);
        let out = |bits: u64| word(LIVE | 1 | bits).lease_out(generation).expect("one holder, no pin");
        for (bits, end, state) in [
            (0, Ended::Leaving, LIVE | LEAVING),
            (INDEXED, Ended::Cached { enqueue: true }, LIVE | INDEXED | QUEUED),
            (INDEXED | QUEUED, Ended::Cached { enqueue: false }, LIVE | INDEXED | QUEUED),
            (QUEUED, Ended::Cached { enqueue: false }, LIVE | QUEUED),
        ] {
            let (orphan, dropped) = out(bits).drop_ref(generation).expect("held");
            assert_eq!((orphan.is_orphan(), orphan.is_cached(), dropped), (true, false, Dropped::Held));
            assert_eq!(orphan.evict(), None);
            assert_eq!(orphan.unlease(generation, false), Some((word(state), end)));
            assert_eq!(orphan.unlease(generation, true), Some((word(state | AWAY), end)));
        }
    }

    #[test]
    fn a_cached_page_is_set_aside_and_comes_back() {
        let generation = Generation(3);
        let cached = word(LIVE | INDEXED | QUEUED | VISITED);
        let aside = cached.set_aside().expect("it is cached");
        assert!(aside == word(LIVE | INDEXED | VISITED) && aside.is_aside() && aside.is_cached());
        assert_eq!((aside.relist(), aside.set_aside(), aside.evict()), (Some(cached), None, None));
        // Not while a copy uses it; its end says that the order wants to know.
        let leased = aside.lease(generation).expect("it lives");
        assert_eq!(leased.relist(), None);
        assert_eq!(leased.unlease(generation, false), Some((aside, Ended::Aside)));
        // A hit and a release list it.
        let (held, _) = aside.share(generation).expect("it can be found");
        assert_eq!((held.relist(), held.set_aside()), (None, None));
        assert_eq!(held.drop_ref(generation), Some((cached, Dropped::Cached { enqueue: true })));
        // Without a key, with a holder, a pin or an owner it is not the order's to set aside.
        for bits in
            [QUEUED | LEASED, INDEXED | QUEUED | 1, INDEXED | QUEUED | 1 << PIN_SHIFT, INDEXED | LEAVING]
        {
            assert_eq!(word(LIVE | bits).set_aside(), None);
            assert_eq!(word(LIVE | bits).relist(), None);
        }
    }

    #[test]
    fn one_names_a_page() {
        let named = word(LIVE | 2).name(Generation(3)).expect("held, without a key");
        assert_eq!(named.name(Generation(3)), None);
        let published = named.publish(false).expect("it is held");
        assert_eq!((published.unname(), published.name(Generation(3))), (None, None));
        assert_eq!(published.unpublish(), Some(word(LIVE | 2)));
        assert_eq!(named.unname(), Some(word(LIVE | 2)));
    }
}

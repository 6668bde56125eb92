//! What happened to the prefix cache, for those who mirror it: a bounded ring of KV events.
//!
//! Any number of threads publish, from inside a commit or an eviction; one consumer at a time drains, in order. Nobody
//! who publishes ever waits: when the ring is full the oldest event is overwritten, and counted. An event's sequence
//! number is its ticket, so whoever reads can see every gap.
//!
//! # Words
//!
//! A slot is one cache line of eight words. Event `s` lies in slot `s % capacity` and belongs to lap `s / capacity`.
//! EVERY word carries `lap + 1` in its upper 32 bits, its share of the event in the lower 32:
//!
//! | word | bits 0-31 |
//! | --- | --- |
//! | 0 | kind (0-1, 0 = nothing yet), TAKEN (2), tier (3), has a parent (4), group (5-12), tokens (13-31) |
//! | 1 | tenant |
//! | 2, 3 | key |
//! | 4, 5 | parent |
//! | 6, 7 | page: id, generation |
//!
//! Beside the slots: `head` (the next ticket) and `dropped` in one line, the consumer's `claim`, `tail`, `delivered` and
//! `waiting_since` and `waiting_for` (its patience) in another, `on` in a third.
//!
//! # Protocol
//!
//! A producer takes a ticket (one add on `head`), moves word 0 to its lap (a compare-exchange, only ever forward), then
//! stores the other seven. The consumer reads all eight; if every word is of the lap it looks for, it sets TAKEN in word 0
//! by compare-exchange and only then has the event.
//!
//! # Invariant
//!
//! - No torn event: only the producer of ticket `s` ever writes a word of that lap into that slot, so eight words of one
//!   lap are one event. No ordering between the words is needed for this. (A lap number has 32 bits: a producer would have
//!   to sleep for exactly 2^32 laps to be taken for another.)
//! - Every ticket ends once, and word 0 decides how: TAKEN by the consumer (delivered); overwritten without TAKEN
//!   (dropped, counted by who overwrote it); found to be overtaken by its own producer (dropped, counted by that one); or
//!   given up by the consumer, who sets TAKEN on an unfinished slot (dropped). At rest,
//!   `written = delivered + dropped + unread`.
//! - Nobody waits. A producer stopped half-way leaves an unfinished slot: the consumer stands before it until half the
//!   ring has been written behind it or [`PATIENCE_MS`] have passed, then gives it up. The producer of the next lap
//!   writes over it at once. A producer that wakes up a whole lap later, between its word 0 and its last store, may spoil
//!   the newer event in its slot: that one then reads as unfinished, and is given up and counted.
//!
//! Callers: pool.rs (publishes, drains); the order of events of one key is the order of the calls.

use crate::{
    sync::{Atom, AtomicU64, Words},
    word::{GroupId, PageRef, TenantId, Tier},
};

#[cfg(all(test, kvalloc_loom))]
mod models;
#[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
mod tests;

/// How long the consumer stands before an unfinished event before it gives it up.
pub const PATIENCE_MS: u64 = 1_000;

/// The largest ring: 1 GiB.
pub const MAX_EVENTS: u32 = 1 << 24;

/// The most tokens an event can tell of (19 bits); the core's pages are far smaller.
pub const MAX_TOKENS: u32 = (1 << 19) - 1;

/// Something that happened to the prefix cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A page can now be found.
    Stored {
        /// The external block hash of the page.
        key: u64,
        /// The key of the page before it, `None` at the start.
        parent: Option<u64>,
        /// The page, so that whoever drains can still read its tokens: check the generation after reading.
        page: PageRef,
        /// Its layer group.
        group: GroupId,
        /// The scope in which it can be found.
        tenant: TenantId,
        /// Tokens in it, at most [`MAX_TOKENS`].
        tokens: u32,
        /// Where it lies.
        tier: Tier,
    },
    /// The last page with this content can't be found any more: it went, or has left the device or its class, for a while or
    /// for good. Back there it is stored again.
    Removed {
        /// The external block hash of the page.
        key: u64,
        /// Its layer group.
        group: GroupId,
        /// The scope in which it could be found.
        tenant: TenantId,
        /// Where it could be found.
        tier: Tier,
    },
    /// Nothing is cached any more.
    Cleared,
}

/// An event with its number. Numbers count up by one; a jump is a gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Its number since the pool was made.
    pub sequence: u64,
    /// What happened.
    pub event: Event,
}

/// What a drain did besides the events it appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Drained {
    /// Events it gave out.
    pub events: u64,
    /// Events since the drain before that nobody will ever get.
    pub lost: u64,
    /// The number of the next event a drain will look for.
    pub next: u64,
    /// The next event has a number but is not written yet: its producer is about to, or has stopped.
    pub pending: bool,
}

/// Somebody else drains at this moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Busy;

impl std::fmt::Display for Busy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            "another thread is draining the events of this pool; drain them from one thread, or try again",
        )
    }
}

impl std::error::Error for Busy {}

pub(crate) const SLOT: usize = 8;

const LAP_SHIFT: u32 = 32;
const PAYLOAD: u64 = (1 << LAP_SHIFT) - 1;

const KIND: u64 = 0b11;
const STORED: u64 = 1;
const REMOVED: u64 = 2;
const CLEARED: u64 = 3;
const TAKEN: u64 = 1 << 2;
const TIER_SHIFT: u32 = 3;
const PARENT: u64 = 1 << 4;
const GROUP_SHIFT: u32 = 5;
const TOKENS_SHIFT: u32 = 13;
const _: () = assert!(TOKENS_SHIFT + 19 == LAP_SHIFT, "tokens end where the lap begins");

// The hot words, by line: producers, consumer, everybody's read.
const HEAD: usize = 0;
const DROPPED: usize = 1;
const CLAIM: usize = 8;
const TAIL: usize = 9;
const DELIVERED: usize = 10;
const WAITING_SINCE: usize = 11;
const WAITING_FOR: usize = 12;
const ON: usize = 16;
const HOT: usize = 24;

/// The ring.
#[derive(Debug)]
pub(crate) struct Events {
    slots: Words,
    hot: Words,
    /// Slots; a power of two, or 0: never on.
    capacity: u64,
}

impl Events {
    /// A ring of `capacity` events, at most [`MAX_EVENTS`], rounded up to a power of two; 0 for none at all. It is on
    /// unless it is 0.
    pub(crate) fn new(capacity: u32) -> Self {
        debug_assert!(capacity <= MAX_EVENTS, "the caller checks it");
        let capacity = match capacity.min(MAX_EVENTS) {
            0 => 0,
            some => u64::from(some.next_power_of_two()),
        };
        let events =
            Self { slots: Words::zeroed(capacity as usize * SLOT), hot: Words::zeroed(HOT), capacity };
        events.turn(true);
        events
    }

    /// How many events it can hold.
    #[cfg(all(test, not(any(kvalloc_loom, kvalloc_shuttle))))]
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Turn it on or off. What happens while it is off has no number: whoever turns it on starts from nothing.
    pub(crate) fn turn(&self, on: bool) {
        self.hot[ON].put(u64::from(on && self.capacity > 0));
    }

    /// Whether events are written.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.hot[ON].peek() != 0
    }

    /// Events that got a number.
    pub(crate) fn written(&self) -> u64 {
        self.hot[HEAD].get()
    }

    /// Events that a consumer got.
    #[cfg(test)]
    pub(crate) fn delivered(&self) -> u64 {
        self.hot[DELIVERED].get()
    }

    /// Events that nobody will ever get.
    pub(crate) fn dropped(&self) -> u64 {
        self.hot[DROPPED].get()
    }

    /// Tell what happened. Never waits; a load and a branch while the ring is off.
    #[inline]
    pub(crate) fn publish(&self, event: Event) {
        if self.is_on() {
            self.write(self.hot[HEAD].plus(1), &event);
        }
    }

    /// Tell many things in a row, with one ticket for all of them.
    #[inline]
    pub(crate) fn publish_all(&self, events: &[Event]) {
        if self.is_on() && !events.is_empty() {
            let first = self.hot[HEAD].plus(events.len() as u64);
            for (event, sequence) in events.iter().zip(first..) {
                self.write(sequence, event);
            }
        }
    }

    fn slot(&self, sequence: u64) -> &[AtomicU64] {
        let start = (sequence & (self.capacity - 1)) as usize * SLOT;
        &self.slots[start..start + SLOT]
    }

    /// The lap of an event, placed in the upper half of a word. 0 is before the first.
    fn lap(&self, sequence: u64) -> u64 {
        // The capacity is a power of two above 0 wherever a sequence number exists.
        ((sequence >> self.capacity.trailing_zeros()) + 1) << LAP_SHIFT
    }

    fn write(&self, sequence: u64, event: &Event) {
        let lap = self.lap(sequence);
        let slot = self.slot(sequence);
        let words = pack(event);
        let entered = slot[0].transit(|now| (order(now, lap) < 0).then_some(lap | words[0]));
        match entered {
            // What was there was an event and nobody had taken it.
            Ok(before) if before & KIND != 0 && before & TAKEN == 0 => self.hot[DROPPED].tally(1),
            Ok(_) => {}
            // Overtaken by a whole lap, or given up, between the ticket and here.
            Err(_) => return self.hot[DROPPED].tally(1),
        }
        for (word, payload) in slot.iter().zip(words).skip(1) {
            word.put(lap | payload);
        }
    }

    /// Append up to `max` events to `out`, in order. `now_ms` is the pool's clock, by which it loses patience with an
    /// event that is never finished.
    pub(crate) fn drain(&self, max: usize, now_ms: u64, out: &mut Vec<Record>) -> Result<Drained, Busy> {
        let _claim = Claim::take(&self.hot[CLAIM])?;
        // Only the holder of the claim writes the tail.
        let start = self.hot[TAIL].get();
        let head = self.hot[HEAD].get();
        let mut at = start.max(head.saturating_sub(self.capacity));
        // First, so that nothing panics once an event is taken.
        out.reserve(max.min((head - at) as usize));
        let (mut events, mut pending) = (0, false);
        while at < head && events < max as u64 {
            match self.take(at) {
                Taken::Event(event) => {
                    out.push(Record { sequence: at, event });
                    events += 1;
                }
                Taken::Overtaken => {}
                Taken::Unfinished if head - at > self.capacity / 2 || self.overdue(at, head, now_ms) => {
                    self.give_up(at);
                }
                Taken::Unfinished => {
                    pending = true;
                    break;
                }
            }
            at += 1;
        }
        self.hot[TAIL].put(at);
        self.hot[DELIVERED].plus(events);
        Ok(Drained { events, lost: at - start - events, next: at, pending })
    }

    fn take(&self, sequence: u64) -> Taken {
        let lap = self.lap(sequence);
        let slot = self.slot(sequence);
        let mut words = [0; SLOT];
        for (into, word) in words.iter_mut().zip(slot) {
            let now = word.get();
            match order(now, lap) {
                0 => *into = now & PAYLOAD,
                1.. => return Taken::Overtaken,
                _ => return Taken::Unfinished,
            }
        }
        match slot[0].cas(lap | words[0], lap | words[0] | TAKEN) {
            Ok(_) => Taken::Event(unpack(&words)),
            // Word 0 of this lap changes only to a later lap's: the consumer is alone.
            Err(_) => Taken::Overtaken,
        }
    }

    /// Whether an unfinished event has had its time. The first one that the consumer meets starts the clock, for itself
    /// and for all that had a number by then: a producer that stopped among many events costs one wait, not many.
    fn overdue(&self, sequence: u64, head: u64, now_ms: u64) -> bool {
        if sequence >= self.hot[WAITING_FOR].get() {
            self.hot[WAITING_SINCE].put(now_ms);
            self.hot[WAITING_FOR].put(head);
        }
        now_ms.saturating_sub(self.hot[WAITING_SINCE].get()) >= PATIENCE_MS
    }

    /// Close an unfinished event for good: whoever was to write it will find it closed, and nobody reads it.
    fn give_up(&self, sequence: u64) {
        let lap = self.lap(sequence);
        let closed = self.slot(sequence)[0].transit(|now| match order(now, lap) {
            0 => Some(now | TAKEN),
            1.. => None,
            _ => Some(lap | CLEARED | TAKEN),
        });
        match closed {
            // Its producer had entered, so it will not notice.
            Ok(before) if order(before, lap) == 0 => self.hot[DROPPED].tally(1),
            // It had not: it will find the slot closed and count itself. What stood there of the lap before was an
            // event if nobody took it.
            Ok(before) if before & KIND != 0 && before & TAKEN == 0 => self.hot[DROPPED].tally(1),
            // Overtaken: counted by whoever did.
            _ => {}
        }
    }
}

/// One consumer at a time; let go even by a panic.
struct Claim<'a>(&'a AtomicU64);

impl<'a> Claim<'a> {
    fn take(word: &'a AtomicU64) -> Result<Self, Busy> {
        word.cas(0, 1).map(|_| Self(word)).map_err(|_| Busy)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.put(0);
    }
}

enum Taken {
    Event(Event),
    Overtaken,
    Unfinished,
}

/// How a word's lap stands to `lap`: below 0 earlier, 0 the same, above 0 later. Serial arithmetic, so it may wrap.
fn order(word: u64, lap: u64) -> i32 {
    ((word >> LAP_SHIFT) as u32).wrapping_sub((lap >> LAP_SHIFT) as u32) as i32
}

fn halves(word: u64) -> [u64; 2] {
    [word & PAYLOAD, word >> 32]
}

fn pack(event: &Event) -> [u64; SLOT] {
    match *event {
        Event::Stored { key, parent, page, group, tenant, tokens, tier } => {
            debug_assert!(tokens <= MAX_TOKENS);
            let tokens = u64::from(tokens.min(MAX_TOKENS));
            let has_parent = if parent.is_some() { PARENT } else { 0 };
            let [key_low, key_high] = halves(key);
            let [parent_low, parent_high] = halves(parent.unwrap_or(0));
            let [id, generation] = halves(page.to_bits());
            let head = STORED | place(group, tier) | has_parent | tokens << TOKENS_SHIFT;
            [head, u64::from(tenant.0), key_low, key_high, parent_low, parent_high, id, generation]
        }
        Event::Removed { key, group, tenant, tier } => {
            let [key_low, key_high] = halves(key);
            [REMOVED | place(group, tier), u64::from(tenant.0), key_low, key_high, 0, 0, 0, 0]
        }
        Event::Cleared => [CLEARED, 0, 0, 0, 0, 0, 0, 0],
    }
}

fn place(group: GroupId, tier: Tier) -> u64 {
    u64::from(group.0) << GROUP_SHIFT | (tier as u64) << TIER_SHIFT
}

fn unpack(words: &[u64; SLOT]) -> Event {
    let head = words[0];
    let tenant = TenantId(words[1] as u32);
    let key = words[2] | words[3] << 32;
    let group = GroupId((head >> GROUP_SHIFT) as u8);
    let tier = if head >> TIER_SHIFT & 1 == 0 { Tier::Device } else { Tier::Host };
    match head & KIND {
        STORED => Event::Stored {
            key,
            parent: (head & PARENT != 0).then_some(words[4] | words[5] << 32),
            page: PageRef::from_bits(words[6] | words[7] << 32),
            group,
            tenant,
            tokens: (head >> TOKENS_SHIFT) as u32,
            tier,
        },
        REMOVED => Event::Removed { key, group, tenant, tier },
        _ => Event::Cleared,
    }
}

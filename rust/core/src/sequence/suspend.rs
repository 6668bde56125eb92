//! A sequence off the device, and on its way: what may be done with it, and how its body goes and comes back.
//!
//! ```text
//!              plan              commit                 plan              commit
//!   running ----------> leaving ----------> suspended ----------> returning ----------> running
//!      ^                   |                    ^                      |
//!      +-------------------+                    +----------------------+
//!          abort, expiry                             abort, expiry
//! ```
//!
//! Suspended by *swap*, its private pages lie in the host tier (AWAY: nobody finds them), and pages that others hold too, or
//! that pins keep, stay where they are with its reference. Suspended by *recompute* it has its tokens and nothing else:
//! what was published may be hit when it comes back, the rest is computed again from the tokens, sampled ones included.
//!
//! # Invariant
//!
//! A body has `stand` Running or Suspended, and while a plan has it in hand a [`Passage`]. That the plan came to nothing is
//! said in the passage alone, so that giving up needs no lock of the sequence: whoever looks next takes note
//! ([`Body::state`]). A commit writes `stand`. What a sequence needs to come back is the plan's until the commit.
//!
//! A plan that is committed in pieces and given up in the middle leaves a sequence suspended if a page of it has left the
//! device.
//!
//! Only a running sequence grows, forks, is truncated, pinned or given a row. Any can be closed at any time: the plan then
//! finds its pages let go, and gives back what it brought.

use std::sync::Arc;

use super::{Body, fallbacks};
use crate::{
    error::Error,
    hash::ChainKey,
    pool::{Pool, Scratch},
    prefix::{Hit, Prompt, Range},
    sync::{Atom, AtomicU32},
    word::{Lane, PageRef, TenantId},
};

/// How a sequence is suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Its pages go to the host tier and come back.
    Swap,
    /// Its pages are let go; its tokens are computed again.
    Recompute,
}

/// Where a sequence stands between running and suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It may grow.
    Running,
    /// A plan is taking it off the device.
    Leaving(Mode),
    /// It is off the device.
    Suspended(Mode),
    /// A plan is bringing it back.
    Returning(Mode),
}

/// A plan has the sequence in hand.
#[derive(Debug)]
pub(crate) struct Passage {
    during: State,
    given_up: AtomicU32,
}

impl Passage {
    pub(crate) fn new(during: State) -> Arc<Self> {
        Arc::new(Self { during, given_up: AtomicU32::new(0) })
    }

    /// The plan came to nothing: the sequence stands where it stood; `partly`: but for pages that have left the device, so it
    /// is suspended.
    pub(crate) fn give_up(&self, partly: bool) {
        self.given_up.put(if partly { PARTLY } else { NOTHING });
    }
}

/// What a passage says of a plan that was given up: no page has moved, or some have.
const NOTHING: u32 = 1;
const PARTLY: u32 = 2;

/// What a sequence was promised, while it is on its way back.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    now: Vec<(TenantId, u32)>,
    most: Vec<(TenantId, u32)>,
}

impl Promises {
    pub(crate) fn give_back(&mut self, pool: &Pool, lane: Lane) {
        pool.unpromise(lane, &mut self.now);
    }
}

impl Body {
    /// Running, suspended or on the way. A plan that has it in hand and whose time is over ends here, if nobody came by before:
    /// its handle may be lost.
    pub(crate) fn state(&mut self, pool: &Pool) -> State {
        if self.passage.is_some() {
            pool.expire_plans();
        }
        match self.passage.as_ref().map_or(0, |passage| passage.given_up.get()) {
            NOTHING => self.passage = None,
            PARTLY => (self.passage, self.stand) = (None, State::Suspended(Mode::Swap)),
            _ => {}
        }
        self.passage.as_ref().map_or(self.stand, |passage| passage.during)
    }

    /// # Errors
    /// It is suspended, or on the way.
    pub(crate) fn check_running(&mut self, pool: &Pool) -> Result<(), Error> {
        let what = match self.state(pool) {
            State::Running => return Ok(()),
            State::Leaving(_) => "is being suspended; commit or abort the plan first",
            State::Suspended(_) => "is suspended; resume it first",
            State::Returning(_) => "is being resumed; commit the plan first",
        };
        Err(Error::Argument(format!("the sequence {what}")))
    }

    /// A plan takes it in hand.
    pub(crate) fn set_out(&mut self, during: State) -> Arc<Passage> {
        let passage = Passage::new(during);
        self.passage = Some(Arc::clone(&passage));
        passage
    }

    /// The plan that has it in hand is done. `false`: that is another one, or none.
    pub(crate) fn arrive(&mut self, passage: &Arc<Passage>) -> bool {
        let mine = self.passage.as_ref().is_some_and(|p| Arc::ptr_eq(p, passage));
        if mine {
            self.passage = None;
            self.stand = match passage.during {
                State::Leaving(mode) => State::Suspended(mode),
                _ => State::Running,
            };
        }
        mine
    }

    /// Whether its tokens are all known, so that they can be computed again.
    pub(crate) fn is_known(&self) -> bool {
        !self.blind
    }

    /// Its pages and promises go back, its tokens stay.
    pub(crate) fn let_all_go(&mut self, pool: &Pool, scratch: &mut Scratch) {
        for g in self.groups_up(pool) {
            let pages = std::mem::take(&mut self.tables[g]);
            pool.let_go_reversed(self.lane, pages.live(), scratch);
        }
        self.begin(pool, Hit::nothing(pool, self.root), 0);
        self.drop_promises(pool);
    }

    /// What it was promised goes back.
    pub(crate) fn drop_promises(&mut self, pool: &Pool) {
        pool.unpromise(self.lane, &mut self.promises);
        self.promised.clear();
    }

    /// Room for all its known tokens, and for all it may still grow by if that was reserved at its opening, in promises of its
    /// own. Its pages are in its tables, wherever they lie.
    ///
    /// # Errors
    /// No room: then it has none.
    pub(crate) fn reserve_again(&mut self, pool: &Pool) -> Result<(), Error> {
        // Of a plan to suspend it that was given up in the middle.
        self.drop_promises(pool);
        let total = if self.reserved { self.admitted.max(self.known()) } else { self.known() };
        self.reserve(pool, total).inspect_err(|_| self.drop_promises(pool))
    }

    pub(crate) fn take_promises(&mut self) -> Promises {
        Promises { now: std::mem::take(&mut self.promises), most: std::mem::take(&mut self.promised) }
    }

    pub(crate) fn give_promises(&mut self, Promises { now, most }: Promises) {
        (self.promises, self.promised) = (now, most);
    }

    /// The body that goes on in place of one that was suspended by recompute: what is cached of its tokens is referenced,
    /// and there is room for the rest.
    ///
    /// # Errors
    /// No room: then nothing is taken.
    pub(crate) fn reborn(&self, pool: &Pool, scratch: &mut Scratch) -> Result<Box<Self>, Error> {
        let found = |tokens: Vec<u32>, look: bool, scratch: &mut Scratch| {
            let prompt = Prompt { tenant: self.tenant, tokens: &tokens, root: self.root };
            let mut ranges = self.ranges.clone();
            let hit = match look {
                true => pool.find_prefix(self.lane, &prompt, &mut ranges, scratch),
                false => Hit::nothing(pool, self.root),
            };
            pool.settle_ranges(self.tenant, &mut ranges, &hit);
            let more = self.admitted.saturating_sub(self.known());
            let mut body = Self::new(self.tenant, self.lane, tokens, more, self.root, ranges, hit, pool);
            body.prompt = self.prompt;
            (body.admitted, body.reserved) = (self.admitted, self.reserved);
            body.protection = self.protection;
            body.born = self.born;
            body.resumed = Some(self.known());
            body.fallbacks.clone_from(&self.fallbacks);
            body.fallbacks.extend(fallbacks(&self.ranges, &body.ranges, self.tenant));
            body
        };
        let mut body = found(self.tokens.clone(), true, scratch);
        let mut reserved = body.reserve_again(pool);
        if reserved.is_err() && pool.has_states() && body.cached > 0 {
            // As in open: a snapshot that was hit is held beside the state that continues it.
            body.release_all(pool, scratch);
            body = found(std::mem::take(&mut body.tokens), false, scratch);
            reserved = body.reserve_again(pool);
        }
        match reserved {
            Ok(()) => Ok(Box::new(body)),
            Err(error) => {
                body.release_all(pool, scratch);
                Err(error)
            }
        }
    }

    pub(crate) fn root(&self) -> ChainKey {
        self.root
    }

    pub(crate) fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// The pages it holds: those that others continue before those that continue them.
    pub(crate) fn held_pages(&self, pool: &Pool) -> Vec<PageRef> {
        let groups: Vec<_> = self.groups_up(pool).collect();
        groups.into_iter().rev().flat_map(|g| self.tables[g].live()).copied().collect()
    }
}

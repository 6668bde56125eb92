//! What hangs on the end of a plan that carries sequences. Giving up touches no sequence's lock (sequence/suspend.rs says
//! why); a commit waits for a moment for whoever is looking at the sequence, which is on its way and does nothing else.

use std::sync::Arc;

use crate::{
    plan::Ending,
    pool::{Pool, Scratch},
    sequence::{Body, Mode, Passage, Place, Promises, Sequence},
    sync::lock,
    word::{Lane, PageRef, TenantId, Tier, plan::State},
};

/// A sequence that leaves.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) sequence: Arc<Sequence>,
    pub(super) passage: Arc<Passage>,
    pub(super) mode: Mode,
    /// What moves.
    pub(super) pages: Vec<PageRef>,
    /// It was chosen to go: by whom it is remembered.
    pub(super) victim: Option<TenantId>,
}

impl Ending for Leaving {
    fn settle(&mut self, pool: &Pool, state: State) {
        if state != State::Committed {
            // Of a plan that was given up in the middle some pages have gone.
            let gone = |page: &PageRef| {
                let word = pool.pages.read(page.id);
                word.generation() == page.generation && pool.tier_of(page.id) == Tier::Host
            };
            self.passage.give_up(self.pages.iter().any(gone));
            return;
        }
        let mut place = lock(&self.sequence.place);
        if let Place::Idle(body) = &mut *place
            && body.arrive(&self.passage)
        {
            match self.mode {
                Mode::Swap => body.drop_promises(pool),
                Mode::Recompute => body.let_all_go(pool, &mut Scratch::default()),
            }
            if let Some(tenant) = self.victim {
                pool.victims.remember(tenant, body.born);
            }
        }
    }
}

/// A sequence that comes back.
#[derive(Debug)]
pub(super) struct Returning {
    sequence: Arc<Sequence>,
    passage: Arc<Passage>,
    promises: Promises,
    /// The body that takes its place; `None`: it keeps its own.
    next: Option<Box<Body>>,
}

impl Returning {
    pub(super) fn swapped(sequence: &Arc<Sequence>, passage: Arc<Passage>, promises: Promises) -> Self {
        Self { sequence: Arc::clone(sequence), passage, promises, next: None }
    }

    pub(super) fn computed(sequence: &Arc<Sequence>, passage: Arc<Passage>, next: Box<Body>) -> Self {
        Self { sequence: Arc::clone(sequence), passage, promises: Promises::default(), next: Some(next) }
    }

    /// Tokens that it has to compute again.
    pub(super) fn tokens(&self) -> u32 {
        self.next.as_ref().map_or(0, |next| next.known() - next.written)
    }
}

impl Ending for Returning {
    fn settle(&mut self, pool: &Pool, state: State) {
        let mut scratch = Scratch::default();
        if state == State::Committed {
            let mut place = lock(&self.sequence.place);
            if let Place::Idle(body) = &mut *place
                && body.arrive(&self.passage)
            {
                match self.next.take() {
                    Some(next) => std::mem::replace(body, next).release_all(pool, &mut scratch),
                    None => body.give_promises(std::mem::take(&mut self.promises)),
                }
                return;
            }
        }
        // It was given up, or the sequence was closed meanwhile.
        self.passage.give_up(false);
        self.promises.give_back(pool, Lane::wrapped(self.sequence.born));
        if let Some(mut next) = self.next.take() {
            next.release_all(pool, &mut scratch);
        }
    }
}

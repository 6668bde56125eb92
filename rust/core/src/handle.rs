//! What a holder of a [`Sequence`] can do with it, wherever its body is: idle behind the handle, or in a batch's row.
//!
//! Locks are only tried, the handle's before the batch's; a second thread gets [`Error::Busy`] and nothing has happened.
//!
//! Callers: the binding.

use std::sync::Arc;

use crate::{
    error::Error,
    pool::{Pool, Scratch},
    sequence::{Body, Counts, Place, Sequence, State, try_lock},
    sync::{AtomicU32, Mutex},
    word::{FrameId, GroupId, PageRef, TenantId},
};

impl Sequence {
    pub(crate) fn handle(pool: &Arc<Pool>, body: Body) -> Arc<Self> {
        Arc::new(Self {
            pool: Arc::clone(pool),
            tenant: body.tenant,
            born: body.born,
            place: Mutex::new(Place::Idle(Box::new(body))),
            row: AtomicU32::new(u32::MAX),
        })
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Whose it is.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    pub(crate) fn visit<R>(&self, f: impl FnOnce(&Pool, &mut Body, &mut Scratch) -> R) -> Result<R, Error> {
        // Dropped after the lock: should this be the last handle of the batch, its end locks its sequences.
        let batch;
        let mut place = try_lock(&self.place, "the sequence")?;
        match &mut *place {
            Place::Closed => Err(Error::Closed("the sequence")),
            Place::Idle(body) => {
                let _op = self.pool.enter(body.lane);
                Ok(f(&self.pool, body, &mut Scratch::default()))
            }
            Place::Batched(at) => {
                // A batch that is going away is about to hand the body back.
                batch = at.upgrade().ok_or(Error::Busy("the batch of the sequence"))?;
                batch.visit(self, |body, scratch| f(&self.pool, body, scratch))
            }
        }
    }

    /// Its number, unique in the pool: older ones have a smaller one.
    pub fn number(&self) -> u64 {
        self.born
    }

    /// What it counts.
    ///
    /// # Errors
    /// Busy, closed.
    pub fn counts(&self) -> Result<Counts, Error> {
        self.visit(|_, body, _| body.counts())
    }

    /// Whether it runs, is suspended, or is on the way from one to the other.
    ///
    /// # Errors
    /// Busy, closed.
    pub fn state(&self) -> Result<State, Error> {
        self.visit(|pool, body, _| body.state(pool))
    }

    /// How many of its tokens, from the first on, have ids that somebody told. Fewer than are counted as known once a step
    /// was committed that didn't say what it wrote: of those, whole pages that were published before.
    ///
    /// # Errors
    /// Busy, closed.
    pub fn told(&self) -> Result<u32, Error> {
        self.visit(
            |pool, body, _| {
                if body.blind { body.published * pool.spec.page_tokens() } else { body.known() }
            },
        )
    }

    /// Its tokens from `from` on.
    ///
    /// # Errors
    /// Busy, closed.
    pub fn tokens(&self, from: usize) -> Result<Vec<u32>, Error> {
        self.visit(|_, body, _| body.tokens.get(from..).unwrap_or_default().to_vec())
    }

    /// Parts of the prompt that were to be shared and became the tenant's own: scope, tokens.
    ///
    /// # Errors
    /// Busy, closed.
    pub fn fallbacks(&self) -> Result<Vec<(TenantId, u32)>, Error> {
        self.visit(|_, body, _| body.fallbacks().to_vec())
    }

    /// Bytes promised to it and not held yet.
    ///
    /// # Errors
    /// Busy, closed.
    pub fn promised(&self) -> Result<u64, Error> {
        self.visit(|pool, body, _| body.promises.iter().map(|p| pool.bytes(p.1)).sum())
    }

    /// The number of the first page of a group that it still holds, and the pages from there on with their frames as block
    /// tables show them ([`Pool::entry`]).
    ///
    /// # Errors
    /// Busy, closed, no such group.
    pub fn pages(&self, group: GroupId) -> Result<(u32, Vec<(PageRef, FrameId)>), Error> {
        self.pool.check_group(group)?;
        self.visit(|pool, body, _| {
            let table = &body.tables[group.as_usize()];
            let live = table.live().iter().map(|&page| (page, FrameId(pool.entry(page.id) as u32)));
            (table.start, live.collect())
        })
    }

    /// Further tokens whose ids are known: drafts, or the next turn of a chat.
    ///
    /// # Errors
    /// Busy, closed; suspended; too many; slots were given out for tokens nobody knows.
    pub fn extend(&self, tokens: &[u32]) -> Result<(), Error> {
        self.visit(|pool, body, _| {
            body.check_running(pool)?;
            if body.slots > body.known() && !tokens.is_empty() {
                return Err(Error::Argument(format!(
                    "the sequence has {} tokens and slots for {}, which steps that are not committed have written: \
                     what stands there is known after the commit",
                    body.known(),
                    body.slots
                )));
            }
            let total = body.tokens.len() + tokens.len();
            if total > crate::sequence::MAX_TOKENS as usize {
                return Err(Error::Argument(format!(
                    "{total} tokens; a sequence has at most {}",
                    crate::sequence::MAX_TOKENS
                )));
            }
            body.tokens.extend_from_slice(tokens);
            Ok(())
        })?
    }

    /// Forget the tokens behind the first `n`.
    ///
    /// # Errors
    /// Busy, closed; suspended; `n` is 0 or more than there are; pages it would need have been released.
    pub fn truncate(&self, n: u32) -> Result<(), Error> {
        self.visit(|pool, body, scratch| {
            body.check_running(pool)?;
            body.truncate(pool, body.lane, n, scratch)
        })?
    }

    /// A second sequence with the same tokens, sharing all pages that are written.
    ///
    /// # Errors
    /// Busy, closed; suspended; a page has too many references, or is being
    /// compressed.
    pub fn fork(&self) -> Result<Arc<Self>, Error> {
        self.pool.check_open()?;
        let body = self.visit(|pool, body, scratch| {
            body.check_running(pool)?;
            if body.slots > body.written && (0..body.tables.len()).any(|g| pool.is_state(GroupId(g as u8))) {
                return Err(Error::Argument(
                    "a step that is not committed is writing the fixed state; commit it before the fork"
                        .into(),
                ));
            }
            body.fork(pool, scratch)
        })??;
        Ok(Self::handle(&self.pool, body))
    }

    /// Keep the fixed state as it is now, so that later prompts can start from it. `false`: there is none, or the
    /// sequence does not stand at a page's edge.
    ///
    /// # Errors
    /// Busy, closed, suspended.
    pub fn keep_state(&self) -> Result<bool, Error> {
        self.visit(|pool, body, _| {
            body.check_running(pool)?;
            Ok(body.keep_state(pool, body.lane))
        })?
    }

    /// Give everything back. A second time is fine.
    ///
    /// # Errors
    /// Busy.
    pub fn close(&self) -> Result<(), Error> {
        // Dropped after the lock, as in `visit`.
        let batch;
        let mut place = try_lock(&self.place, "the sequence")?;
        let body = match &mut *place {
            Place::Closed => return Ok(()),
            Place::Idle(_) => None,
            Place::Batched(at) => {
                batch = at.upgrade().ok_or(Error::Busy("the batch of the sequence"))?;
                Some(batch.expel(self)?)
            }
        };
        let body = match (std::mem::replace(&mut *place, Place::Closed), body) {
            (_, Some(body)) | (Place::Idle(body), None) => Some(body),
            _ => None,
        };
        if let Some(mut body) = body {
            self.release(&mut body);
        }
        Ok(())
    }

    /// Whether it was closed; one that somebody is using is not.
    pub fn is_closed(&self) -> bool {
        try_lock(&self.place, "the sequence").is_ok_and(|place| matches!(*place, Place::Closed))
    }

    fn release(&self, body: &mut Body) {
        let _op = self.pool.enter(body.lane);
        body.release_all(&self.pool, &mut Scratch::default());
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // A batch holds its sequences, so the last handle is never one that stands in a batch.
        let place = self.place.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Place::Idle(mut body) = std::mem::replace(place, Place::Closed) {
            self.release(&mut body);
        }
    }
}

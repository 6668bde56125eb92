//! One call per scheduler step: every running sequence gets room for its next tokens, and the kernels' arrays are filled.
//!
//! A batch is a set of rows that persist between steps. A row holds the body of a sequence, which lies here and not
//! behind its handle while it stands in the batch, so a step takes one lock (its own, and only tried), however many rows
//! there are. What a step looks at in every row lies in arrays of its own ([`Hot`]); a row's body is touched only where a
//! page edge is crossed, a window moves on, or a shared page is about to be written.
//!
//! # Invariant
//!
//! For every row: `written <= slots <= room`, `room` is what its pages hold (0 while the page of the next slot may be
//! shared, so that the slow path looks at it), and the page of the last slot is its last page: `base[group] + position`
//! is a slot in it. Between calls, `Hot` is the truth for `slots`, `written` and `known`; the body has it while somebody
//! works on the sequence by its handle ([`Inner::visit`]).
//!
//! Steps that are not committed are remembered in order; taking a row out forgets what they did for it.
//!
//! Here is what others call; the rows and the passes of a step over them are in rows.rs, what pages that move mean for them
//! in places.rs.
//!
//! Callers: the binding; sequence handles (handle.rs) for sequences that stand here.

mod places;
mod rows;

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
};

use places::Look;
use rows::{Hot, Inner, Row};

use crate::{
    arrays::{Arrays, Shape},
    error::{Error, Refusal},
    frame::FrameError,
    pool::{Pool, Scratch},
    sequence::{Body, Place, Sequence, try_lock},
    sync::{Atom, Mutex, lock},
    word::{FrameId, GroupId},
};

/// Tokens of a draft that can be taken back after their commit, whatever has left a window by then.
pub const LONGEST_DRAFT: u32 = 64;

/// Steps that may wait for their commit.
pub const MAX_OUTSTANDING: usize = 8;

/// A page that has to be copied before the step's kernels run: its content was shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    /// The layer group.
    pub group: GroupId,
    /// Read this frame,
    pub from: FrameId,
    /// and write this one.
    pub to: FrameId,
}

/// A row that got nothing.
#[derive(Clone, Debug)]
pub struct RefusedRow {
    /// Its number in that step.
    pub row: u32,
    /// Its sequence, wherever that is by now.
    pub sequence: Weak<Sequence>,
    /// Why.
    pub refusal: Refusal,
}

/// A row that a sequence was taken out of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TakenRow {
    /// Its number.
    pub row: u32,
    /// The row that moved into its place.
    pub moved: Option<u32>,
}

/// What a step did.
#[derive(Debug, Default)]
pub struct Step {
    /// Tokens in the arrays.
    pub num_tokens: u32,
    /// Rows in the arrays.
    pub num_rows: u32,
    /// Tokens per row.
    pub counts: Vec<u32>,
    /// Rows that got nothing, and why.
    pub refused: Vec<RefusedRow>,
    /// Copies to do before the kernels run.
    pub copies: Vec<Copy>,
}

/// What handles of sequences in the batch share with it.
#[derive(Debug)]
pub(crate) struct Shared {
    pool: Arc<Pool>,
    shape: Shape,
    inner: Mutex<Inner>,
}

/// A batch.
#[derive(Debug)]
pub struct Batch {
    shared: Arc<Shared>,
}

impl Batch {
    /// A batch whose steps fill `arrays`, which have this `shape`.
    ///
    /// # Errors
    /// The pool is closed, or has too many batches.
    pub fn new(pool: &Arc<Pool>, shape: Shape, arrays: Box<dyn Arrays>) -> Result<Self, Error> {
        pool.check_open()?;
        let look = Look::new(pool).map_err(too_many)?;
        let rows = shape.rows;
        let mut hot = Hot { base: vec![Vec::with_capacity(rows); pool.groups.len()], ..Hot::default() };
        hot.each(|v| v.reserve_exact(rows));
        let inner = Inner {
            lane: pool.next_lane(),
            rows: Vec::with_capacity(rows),
            hot,
            step: Step {
                counts: Vec::with_capacity(rows),
                refused: Vec::with_capacity(rows),
                ..Step::default()
            },
            outstanding: VecDeque::with_capacity(MAX_OUTSTANDING),
            spare: Vec::with_capacity(MAX_OUTSTANDING),
            arrays,
            scratch: Scratch::default(),
            tight: Vec::with_capacity(rows),
            shown: 0,
            look,
        };
        Ok(Self { shared: Arc::new(Shared { pool: Arc::clone(pool), shape, inner: Mutex::new(inner) }) })
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.shared.pool
    }

    /// The shape of the arrays.
    pub fn shape(&self) -> Shape {
        self.shared.shape
    }

    /// The number of rows.
    ///
    /// # Errors
    /// Busy.
    pub fn rows(&self) -> Result<usize, Error> {
        Ok(try_lock(&self.shared.inner, "the batch")?.rows.len())
    }

    /// Give a sequence a row.
    ///
    /// # Errors
    /// Busy; the sequence is closed, suspended, in a batch already, of another pool, or too long; the batch is full.
    pub fn add(&self, sequence: &Arc<Sequence>) -> Result<usize, Error> {
        let Shared { pool, shape, .. } = &*self.shared;
        pool.check_open()?;
        if !Arc::ptr_eq(pool, &sequence.pool) {
            return Err(Error::WrongPool("the sequence"));
        }
        let mut place = try_lock(&sequence.place, "the sequence")?;
        let inner = &mut *try_lock(&self.shared.inner, "the batch")?;
        let _op = pool.enter(inner.lane);
        if let Place::Idle(body) = &mut *place {
            body.check_running(pool)?;
        }
        match &*place {
            Place::Closed => return Err(Error::Closed("the sequence")),
            Place::Batched(at) if at.strong_count() > 0 => {
                return Err(Error::Argument(
                    "the sequence has a row in a batch already; remove it there first".into(),
                ));
            }
            Place::Idle(body) if body.known().max(body.slots) > shape.tokens => {
                return Err(Error::Argument(format!(
                    "the sequence has {} tokens; a row of this batch shows at most {}",
                    body.known(),
                    shape.tokens
                )));
            }
            _ => {}
        }
        if inner.rows.len() == shape.rows {
            return Err(Error::Argument(format!("all {} rows of the batch are taken", shape.rows)));
        }
        inner.look.join(pool).map_err(too_many)?;
        match std::mem::replace(&mut *place, Place::Batched(Arc::downgrade(&self.shared))) {
            Place::Idle(body) => {
                let row = inner.rows.len();
                sequence.row.put(row as u32);
                inner.push(pool, *shape, Row { body, sequence: Arc::clone(sequence) });
                Ok(row)
            }
            // Only an idle one got here; its batch is gone and has given everything back.
            other => {
                *place = other;
                Err(Error::Closed("the sequence"))
            }
        }
    }

    /// Take a sequence out of its row. The last row moves into the hole: its old number, if one moved.
    ///
    /// # Errors
    /// Busy; the sequence has no row here.
    pub fn remove(&self, sequence: &Sequence) -> Result<Option<usize>, Error> {
        let mut place = try_lock(&sequence.place, "the sequence")?;
        Ok(self.empty_row(&mut place, sequence)?.moved.map(|row| row as usize))
    }

    /// Take a sequence out of its row, if it has one here.
    ///
    /// # Errors
    /// Busy.
    pub(crate) fn take_out(&self, sequence: &Sequence) -> Result<Option<TakenRow>, Error> {
        let mut place = try_lock(&sequence.place, "the sequence")?;
        self.has(&place).then(|| self.empty_row(&mut place, sequence)).transpose()
    }

    /// Whether this is the place of a sequence.
    pub(crate) fn has(&self, place: &Place) -> bool {
        matches!(place, Place::Batched(at) if std::ptr::eq(at.as_ptr(), Arc::as_ptr(&self.shared)))
    }

    fn empty_row(&self, place: &mut Place, sequence: &Sequence) -> Result<TakenRow, Error> {
        let inner = &mut *try_lock(&self.shared.inner, "the batch")?;
        let _op = self.shared.pool.enter(inner.lane);
        let row = inner.find(sequence)?;
        let body = inner.pull(&self.shared.pool, self.shared.shape, row);
        *place = Place::Idle(body);
        let last = inner.rows.len();
        Ok(TakenRow { row: row as u32, moved: (row < last).then_some(last as u32) })
    }

    /// The sequences in its rows.
    ///
    /// # Errors
    /// Busy.
    pub fn sequences(&self) -> Result<Vec<Arc<Sequence>>, Error> {
        let inner = try_lock(&self.shared.inner, "the batch")?;
        Ok(inner.rows.iter().map(|row| Arc::clone(&row.sequence)).collect())
    }

    /// Give each row room for its next tokens and fill the arrays. `counts`: tokens per row; without: one for a row whose
    /// prompt is in, else as much of the prompt as `budget` allows. `seen` gets what the step did.
    ///
    /// # Errors
    /// Busy; counts that don't fit; too many steps without a commit. Then nothing was done.
    pub fn step<R>(
        &self,
        counts: Option<&[i32]>,
        budget: Option<u32>,
        seen: impl FnOnce(&Step) -> R,
    ) -> Result<R, Error> {
        let Shared { pool, shape, .. } = &*self.shared;
        let inner = &mut *try_lock(&self.shared.inner, "the batch")?;
        pool.check_open()?;
        if inner.outstanding.len() == MAX_OUTSTANDING {
            return Err(Error::Argument(format!(
                "{MAX_OUTSTANDING} steps wait for their commit; commit first"
            )));
        }
        let _op = pool.enter(inner.lane);
        inner.plan(*shape, counts, budget)?;
        let entered = inner.look.enter(pool).map_err(too_many)?;
        inner.make_room(pool, *shape, entered);
        let one_each = inner.write(pool, *shape);
        inner.look.show(pool);
        inner.remember(one_each);
        Ok(seen(&inner.step))
    }

    /// What the last step did.
    ///
    /// # Errors
    /// Busy.
    pub fn last<R>(&self, see: impl FnOnce(&Step) -> R) -> Result<R, Error> {
        Ok(see(&try_lock(&self.shared.inner, "the batch")?.step))
    }

    /// The sequence in a row.
    ///
    /// # Errors
    /// Busy.
    pub fn sequence(&self, row: usize) -> Result<Option<Arc<Sequence>>, Error> {
        let inner = try_lock(&self.shared.inner, "the batch")?;
        Ok(inner.rows.get(row).map(|r| Arc::clone(&r.sequence)))
    }

    /// The model has run for the oldest step that is not committed: its tokens are written. `sampled`: the next token of
    /// each row of that step, negative where there is none. Full pages are published.
    ///
    /// # Errors
    /// Busy; no step waits; as many tokens as rows. Then nothing was done.
    pub fn commit(&self, sampled: Option<&[i32]>) -> Result<(), Error> {
        let Shared { pool, shape, .. } = &*self.shared;
        let inner = &mut *try_lock(&self.shared.inner, "the batch")?;
        let Some(record) = inner.outstanding.front() else {
            return Err(Error::Argument("no step waits for a commit; call step first".into()));
        };
        if let Some(sampled) = sampled
            && sampled.len() != record.rows
        {
            return Err(Error::Argument(format!(
                "{} sampled tokens for a step of {} rows",
                sampled.len(),
                record.rows
            )));
        }
        let _op = pool.enter(inner.lane);
        inner.commit(pool, *shape, sampled);
        if inner.outstanding.is_empty() {
            inner.look.rest(pool);
        }
        Ok(())
    }

    /// Fill other arrays of the same shape from now on.
    ///
    /// # Errors
    /// Busy.
    pub fn bind(&self, arrays: Box<dyn Arrays>) -> Result<(), Error> {
        let old = {
            let inner = &mut *try_lock(&self.shared.inner, "the batch")?;
            let old = std::mem::replace(&mut inner.arrays, arrays);
            for row in 0..inner.rows.len() {
                inner.sync_out(row);
                inner.sync_in(&self.shared.pool, self.shared.shape, row);
            }
            inner.shown = self.shared.shape.step as usize;
            old
        };
        // Not under the lock: whoever owned the old arrays may look at the batch when they go.
        drop(old);
        Ok(())
    }

    /// Take every sequence out, and forget the steps that wait for their commit. The sequences stay open. The batch is none of
    /// those that the pool can have until it is used again.
    ///
    /// # Errors
    /// Busy, also if one of the sequences is: those before it are out then.
    pub fn clear(&self) -> Result<(), Error> {
        while let Some(last) = self.rows()?.checked_sub(1) {
            if let Some(sequence) = self.sequence(last)? {
                self.remove(&sequence)?;
            }
        }
        let Shared { pool, .. } = &*self.shared;
        let inner = &mut *try_lock(&self.shared.inner, "the batch")?;
        if inner.rows.is_empty() {
            let _op = pool.enter(inner.lane);
            inner.forget_records(pool);
            inner.look.leave(pool);
        }
        Ok(())
    }

    /// Steps that wait for their commit.
    ///
    /// # Errors
    /// Busy.
    pub fn outstanding(&self) -> Result<usize, Error> {
        Ok(try_lock(&self.shared.inner, "the batch")?.outstanding.len())
    }

    /// The tables of a group as FlashInfer reads them: `indptr` of rows + 1, the frames, and how full each row's last page
    /// is. Pages that left the window are not listed.
    ///
    /// # Errors
    /// Busy; no such group.
    pub fn csr(
        &self,
        group: GroupId,
        indptr: &mut Vec<i32>,
        indices: &mut Vec<i32>,
        last: &mut Vec<i32>,
    ) -> Result<(), Error> {
        let Shared { pool, .. } = &*self.shared;
        pool.check_group(group)?;
        let inner = try_lock(&self.shared.inner, "the batch")?;
        let page_tokens = pool.spec.page_tokens();
        indptr.clear();
        indices.clear();
        last.clear();
        indptr.push(0);
        for (row, slots) in inner.rows.iter().zip(&inner.hot.slots) {
            let table = &row.body.tables[group.as_usize()];
            indices.extend(table.live().iter().map(|p| pool.entry(p.id)));
            if indices.iter().any(|&entry| entry <= 0) {
                return Err(Error::Argument(
                    "pages of the batch are compressed or cut: a list of frames names pages of one class, and all of \
                     them; attend by the block table, which shows compressed ones as ~frame, and cut ones as 0"
                        .into(),
                ));
            }
            indptr.push(indices.len() as i32);
            last.push(if *slots == 0 { 0 } else { ((slots - 1) % page_tokens + 1) as i32 });
        }
        Ok(())
    }
}

fn too_many(error: FrameError) -> Error {
    Error::Argument(error.to_string())
}

/// A group's block table and slot mapping.
#[cfg(all(test, not(kvalloc_loom)))]
type ShownGroup = (Vec<i32>, Vec<i64>);

#[cfg(all(test, not(kvalloc_loom)))]
impl Batch {
    /// What stands in the arrays: block table and slot mapping of each group; lengths, starts and positions.
    pub(crate) fn shown(&self) -> (Vec<ShownGroup>, [Vec<i32>; 3]) {
        let inner = &mut *try_lock(&self.shared.inner, "the batch").expect("nobody uses it");
        let group = |g| {
            let shown = inner.arrays.group(g);
            (shown.block_table.to_vec(), shown.slot_mapping.to_vec())
        };
        let groups = (0..self.shared.pool.groups.len()).map(group).collect();
        let rows = inner.arrays.rows();
        (groups, [rows.seq_lens.to_vec(), rows.query_start_loc.to_vec(), rows.positions.to_vec()])
    }
}

impl Shared {
    /// Work on the body of a sequence that stands here.
    pub(crate) fn visit<R>(
        &self,
        sequence: &Sequence,
        f: impl FnOnce(&mut Body, &mut Scratch) -> R,
    ) -> Result<R, Error> {
        let inner = &mut *try_lock(&self.inner, "the batch")?;
        let _op = self.pool.enter(inner.lane);
        let row = inner.find(sequence)?;
        inner.sync_out(row);
        let answer = f(&mut inner.rows[row].body, &mut inner.scratch);
        if inner.rows[row].body.slots < inner.hot.slots[row] {
            inner.clip(row);
        }
        inner.sync_in(&self.pool, self.shape, row);
        Ok(answer)
    }

    /// Take a sequence out, to close it.
    pub(crate) fn expel(&self, sequence: &Sequence) -> Result<Box<Body>, Error> {
        let inner = &mut *try_lock(&self.inner, "the batch")?;
        let _op = self.pool.enter(inner.lane);
        let row = inner.find(sequence)?;
        Ok(inner.pull(&self.pool, self.shape, row))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Self { pool, shape, inner } = self;
        let inner = inner.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _op = pool.enter(inner.lane);
        while !inner.rows.is_empty() {
            let last = inner.rows.len() - 1;
            let sequence = Arc::clone(&inner.rows[last].sequence);
            let body = inner.pull(pool, *shape, last);
            // Whoever holds this lock never waits for another, so this waits for a moment at most.
            let mut place = lock(&sequence.place);
            *place = Place::Idle(body);
        }
        inner.forget_records(pool);
        inner.look.leave(pool);
    }
}

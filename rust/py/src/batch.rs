//! `kvalloc.Batch` and what its steps answer.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use kvalloc_core::{arrays::Shape, batch::Batch as Core, error::Error, word::GroupId};
use pyo3::{
    prelude::*,
    types::{PyList, PyTuple},
};

use crate::{
    args,
    arrays::{self, Objects},
    errors::InvalidArgument,
    owner::Owner,
    pool::Pool,
    sequence::Sequence,
    step::Step,
};

/// Steps taken in this process, of all batches.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// What a batch and its steps share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) owner: Owner,
    pub(crate) core: Core,
}

/// Rows that persist between steps, and the arrays that kernels read. Made by `Pool.batch`.
///
/// A scheduler makes one pair of calls for each run of the model: `step` gives every row room for its next tokens and fills
/// the arrays, `commit` says that the model has run.
///
/// ================== ======================================== ==================================================
/// array              shape, dtype                             meaning
/// ================== ======================================== ==================================================
/// `block_table`      int32 [max_sequences, max_pages]         frame of each page of each row, per layer group; 0
///                                                             where there is none
/// `slot_mapping`     int64 [max_step_tokens]                  ``frame * page_tokens + offset`` of each token of the
///                                                             step, per layer group; -1 behind them
/// `seq_lens`         int32 [max_sequences]                    tokens of each row, those of the step included
/// `query_start_loc`  int32 [max_sequences + 1]                where each row's tokens of the step begin
/// `positions`        int32 [max_step_tokens]                  position of each token of the step in its sequence
/// ================== ======================================== ==================================================
///
/// ``max_pages`` is ``max_tokens / page_tokens``, rounded up. The arrays are written in place, so a kernel binds them once.
/// Behind ``len(batch)`` rows, block tables and ``seq_lens`` are 0. Of ``query_start_loc`` the first ``num_rows + 1`` entries
/// belong to the step, of ``positions`` the first ``num_tokens``; what is behind them is left from earlier steps.
///
/// Notes
/// -----
/// One thread at a time, its sequences included: a second one gets `SequenceBusy`. Batches in different threads don't wait
/// for each other. ``len(batch)`` is the number of rows taken; an empty batch is true.
///
/// It is a context manager: at the end of the block its sequences are taken out, and stay open.
///
/// Examples
/// --------
/// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
/// >>> acme = pool.tenant("acme")
/// >>> batch = pool.batch(max_sequences=4, max_tokens=512)
/// >>> [batch.add(pool.open(acme, range(n))) for n in (5, 20)]
/// [0, 1]
/// >>> out = batch.step()
/// >>> out.num_tokens, batch.seq_lens.tolist(), batch.query_start_loc[: out.num_rows + 1].tolist()
/// (25, [5, 20, 0, 0], [0, 5, 25])
/// >>> batch.slot_mapping()[23:27].tolist() == [*(int(batch.block_table()[1, 1]) * 16 + np.arange(2, 4)), -1, -1]
/// True
/// >>> batch.commit([100, 101])
/// >>> batch.step().num_tokens
/// 2
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Batch {
    inner: Arc<Inner>,
    pool: Py<Pool>,
    step: Py<Step>,
    /// Which of the process's steps the arrays show; 0: none yet.
    step_id: AtomicU64,
    objects: Mutex<Objects>,
    shape: Shape,
}

impl Batch {
    pub(crate) fn new(pool: &Bound<'_, Pool>, shape: Shape) -> PyResult<Self> {
        let (py, owner) = (pool.py(), &pool.get().owner);
        let books = owner.live()?;
        let objects = Objects::new(py, shape, books.spec().groups().len())?;
        let shown = objects.bind(py, shape)?;
        let core = Core::new(books, shape, Box::new(shown)).map_err(|e| owner.error(py, &e))?;
        let inner = Arc::new(Inner { owner: owner.clone(), core });
        let step = Py::new(py, Step::new(&inner))?;
        let pool = pool.clone().unbind();
        Ok(Self { inner, pool, step, step_id: AtomicU64::new(0), objects: Mutex::new(objects), shape })
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    fn error(&self, py: Python<'_>, error: &Error) -> PyErr {
        self.inner.owner.error(py, error)
    }

    fn object(
        &self,
        py: Python<'_>,
        pick: impl FnOnce(&Objects) -> Option<&Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        pick(&objects).map(|o| o.clone_ref(py)).ok_or_else(|| {
            InvalidArgument::new_err(format!(
                "there is no such layer group; the spec has {}",
                objects.block_table.len()
            ))
        })
    }
}

#[pymethods]
impl Batch {
    /// Give a sequence a row: the first that is not taken.
    ///
    /// Parameters
    /// ----------
    /// sequence : Sequence
    ///     In no batch, and not longer than ``max_tokens``.
    ///
    /// Returns
    /// -------
    /// int
    ///     Its row.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     All rows are taken, the sequence has a row already, or is too long.
    /// SequenceBusy, ClosedError, WrongPool
    fn add(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<usize> {
        self.inner.owner.live()?;
        self.inner.core.add(&sequence.core).map_err(|e| self.error(py, &e))
    }

    /// Take a sequence out of its row. It stays open.
    ///
    /// Parameters
    /// ----------
    /// sequence : Sequence
    ///     One with a row here.
    ///
    /// Returns
    /// -------
    /// int or None
    ///     The last row moves into the hole: its old number. None if no row moved.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     The sequence has no row here.
    /// SequenceBusy
    ///
    /// Notes
    /// -----
    /// What steps that are not committed did for this row is forgotten: its slots go back to what is written. Commit first to
    /// keep it.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme")
    /// >>> batch = pool.batch(max_sequences=4, max_tokens=512)
    /// >>> first, second, third = (pool.open(acme, [n]) for n in range(3))
    /// >>> rows = [batch.add(seq) for seq in (first, second, third)]
    /// >>> batch.remove(first)  # row 2 is now row 0
    /// 2
    /// >>> batch.rows == [third, second], batch.remove(second)
    /// (True, None)
    fn remove(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<Option<usize>> {
        self.inner.owner.live()?;
        self.inner.core.remove(&sequence.core).map_err(|e| self.error(py, &e))
    }

    /// Give each row room for its next tokens, and fill the arrays.
    ///
    /// Parameters
    /// ----------
    /// counts : int32 [len(batch)], optional
    ///     Tokens for each row, none negative. Default: what is known and has no slot yet (the prompt, what was sampled, drafts),
    ///     and at least one; rows with one token come first, then as much of the others as the budget allows, in the order of the
    ///     rows.
    /// token_budget : int, optional
    ///     The most tokens altogether; ``max_step_tokens`` if that is less.
    ///
    /// Returns
    /// -------
    /// Step
    ///     The batch's own object, which shows its newest step: read it before the next one.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     Not as many counts as rows; a negative one; more tokens than the step can show; 8 steps wait for their commit. Nothing was
    ///     done.
    /// SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// A row that can't grow as planned gets as many whole pages as there are, or nothing: then it is in ``Step.refused`` with
    /// the reason, its count is 0, and all other rows have grown. Read the counts from ``Step.counts``.
    ///
    /// Where a page is shared with a fork, or was published before its sequence was truncated, its row goes on in a copy: do the
    /// copies in ``Step.copies`` before the kernels run. Pages that have left every window are released here.
    ///
    /// A step may be taken before the one before is committed: the row then gets a slot for a token whose id is not known yet.
    /// Up to 8 steps can be outstanding; commits follow in the same order.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> batch = pool.batch(max_sequences=4, max_tokens=512)
    /// >>> seq = pool.open(pool.tenant("acme"), range(100))
    /// >>> row = batch.add(seq)
    /// >>> batch.step(token_budget=64).num_tokens  # a chunk of the prompt
    /// 64
    /// >>> batch.step(token_budget=64).num_tokens  # the rest, before the first chunk is committed
    /// 36
    /// >>> batch.step().num_tokens  # a token that the second step will sample
    /// 1
    /// >>> batch.commit(), batch.commit([7]), batch.commit([8])
    /// (None, None, None)
    /// >>> seq.tokens[-2:].tolist(), seq.num_slots, seq.num_written
    /// ([7, 8], 101, 101)
    #[pyo3(signature = (counts = None, token_budget = None))]
    fn step(
        &self,
        py: Python<'_>,
        counts: Option<&Bound<'_, PyAny>>,
        token_budget: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<Step>> {
        self.inner.owner.live()?;
        let budget = match token_budget {
            None => None,
            Some(value) => Some(args::number(value, "token_budget", 0, u64::from(u32::MAX))? as u32),
        };
        let done = match counts {
            None => self.inner.core.step(None, budget, |_| ()),
            Some(counts) => args::with_int32(counts, "counts", self.shape.rows, |counts| {
                self.inner.core.step(Some(counts), budget, |_| ())
            })?,
        };
        done.map_err(|e| self.error(py, &e))?;
        self.step_id.store(STEPS.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        Ok(self.step.clone_ref(py))
    }

    /// The model has run for the oldest step that is not committed: its KV is written.
    ///
    /// Parameters
    /// ----------
    /// sampled : int32 [num_rows of that step], optional
    ///     The token that follows in each row, in the rows' order when the step was taken. Negative: none, as for a chunk of a
    ///     prompt that goes on. Ignored for rows whose known tokens are not all written, and for rows that got no token.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     No step waits for a commit, or not as many tokens as rows. Nothing was done.
    /// SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// Pages that are now full, written and known are published. Publishing is never done before: a key never points at KV that
    /// is not written.
    ///
    /// If nobody says which tokens a step wrote (no ``sampled``, and the ids were not known before), the sequence counts them, but
    /// their content is unknown, so nothing more of it is published.
    #[pyo3(signature = (sampled = None))]
    fn commit(&self, py: Python<'_>, sampled: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.inner.owner.live()?;
        let done = match sampled {
            None => self.inner.core.commit(None),
            Some(sampled) => {
                args::with_int32(sampled, "sampled", self.shape.rows, |s| self.inner.core.commit(Some(s)))?
            }
        };
        done.map_err(|e| self.error(py, &e))
    }

    /// Fill arrays of one's own from now on, such as pinned host memory.
    ///
    /// Parameters
    /// ----------
    /// block_table, slot_mapping : array, or a list of one per layer group, optional
    ///     int32 [max_sequences, max_pages] and int64 [max_step_tokens].
    /// seq_lens, query_start_loc, positions : array, optional
    ///     int32 [max_sequences], [max_sequences + 1], [max_step_tokens].
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     Not writable, not contiguous, the wrong dtype or shape, two that share memory: nothing was bound.
    /// SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// Anything with a writable buffer, or a tensor in host memory (DLPack). What is not given stays as it is. The rows' pages are
    /// written at once, everything else with the next step.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> batch = pool.batch(max_sequences=4, max_tokens=512)
    /// >>> lengths = np.zeros(4, dtype=np.int32)
    /// >>> batch.bind(seq_lens=lengths)
    /// >>> row, out = batch.add(pool.open(pool.tenant("acme"), [1, 2, 3])), batch.step()
    /// >>> lengths.tolist(), batch.seq_lens is lengths
    /// ([3, 0, 0, 0], True)
    #[pyo3(signature = (
        *, block_table = None, slot_mapping = None, seq_lens = None, query_start_loc = None, positions = None
    ))]
    fn bind(
        &self,
        py: Python<'_>,
        block_table: Option<&Bound<'_, PyAny>>,
        slot_mapping: Option<&Bound<'_, PyAny>>,
        seq_lens: Option<&Bound<'_, PyAny>>,
        query_start_loc: Option<&Bound<'_, PyAny>>,
        positions: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.inner.owner.live()?;
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner).clone_ref(py);
        let groups = objects.block_table.len();
        if let Some(arrays) = block_table {
            objects.block_table = per_group(arrays, "block_table", groups)?;
        }
        if let Some(arrays) = slot_mapping {
            objects.slot_mapping = per_group(arrays, "slot_mapping", groups)?;
        }
        if let Some(array) = seq_lens {
            objects.seq_lens = as_array(array)?;
        }
        if let Some(array) = query_start_loc {
            objects.query_start_loc = as_array(array)?;
        }
        if let Some(array) = positions {
            objects.positions = as_array(array)?;
        }
        let shown = objects.bind(py, self.shape)?;
        self.inner.core.bind(Box::new(shown)).map_err(|e| self.error(py, &e))?;
        // The old arrays go when nothing is locked: their owners may look at the batch from a finaliser.
        let old =
            std::mem::replace(&mut *self.objects.lock().unwrap_or_else(PoisonError::into_inner), objects);
        drop(old);
        Ok(())
    }

    /// The block table of a layer group.
    ///
    /// Parameters
    /// ----------
    /// group : int, optional
    ///     The layer group.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     int32 [max_sequences, max_pages], the array itself: the frame of each page. 0 where there is none: frame 0 is never
    ///     given out, so that padding may be read. Of a fixed state, the first entry of the row is the state's frame.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     No such group.
    #[pyo3(signature = (group = 0))]
    fn block_table(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Py<PyAny>> {
        self.object(py, |o| o.block_table.get(usize::from(group)))
    }

    /// Where the tokens of the step go, for a layer group.
    ///
    /// Parameters
    /// ----------
    /// group : int, optional
    ///     The layer group.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     int64 [max_step_tokens], the array itself: ``frame * page_tokens + offset`` of each token, row after row; -1 (skip)
    ///     behind the step's tokens. All -1 for a fixed state.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     No such group.
    #[pyo3(signature = (group = 0))]
    fn slot_mapping(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Py<PyAny>> {
        self.object(py, |o| o.slot_mapping.get(usize::from(group)))
    }

    /// numpy.ndarray : int32 [max_sequences]. Tokens of each row, those of the step included; 0 behind the rows.
    #[getter]
    fn seq_lens(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.object(py, |o| Some(&o.seq_lens))
    }

    /// numpy.ndarray : int32 [max_sequences + 1]. Where each row's tokens of the step begin; entry ``num_rows`` is their number.
    #[getter]
    fn query_start_loc(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.object(py, |o| Some(&o.query_start_loc))
    }

    /// numpy.ndarray : int32 [max_step_tokens]. Position of each token of the step in its sequence, row after row.
    #[getter]
    fn positions(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.object(py, |o| Some(&o.positions))
    }

    /// The tables of a layer group as FlashInfer reads them, for the rows as they are now.
    ///
    /// Parameters
    /// ----------
    /// group : int, optional
    ///     The layer group.
    ///
    /// Returns
    /// -------
    /// kv_indptr : numpy.ndarray
    ///     int32 [rows + 1]. Where each row's pages begin in ``kv_indices``.
    /// kv_indices : numpy.ndarray
    ///     int32 [pages]. The frames; pages that left the window are not listed.
    /// kv_last_page_len : numpy.ndarray
    ///     int32 [rows]. Tokens in each row's last page, 1 to ``page_tokens``; 0 for a row without slots.
    ///
    /// Raises
    /// ------
    /// InvalidArgument, SequenceBusy, ClosedError
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme")
    /// >>> batch = pool.batch(max_sequences=4, max_tokens=512)
    /// >>> rows = [batch.add(pool.open(acme, range(n))) for n in (5, 20)]
    /// >>> out = batch.step()
    /// >>> kv_indptr, kv_indices, kv_last_page_len = batch.csr()
    /// >>> kv_indptr.tolist(), len(kv_indices), kv_last_page_len.tolist()
    /// ([0, 1, 3], 3, [5, 4])
    #[pyo3(signature = (group = 0))]
    fn csr(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<(Py<PyAny>, Py<PyAny>, Py<PyAny>)> {
        self.inner.owner.live()?;
        let (mut indptr, mut indices, mut last) = (Vec::new(), Vec::new(), Vec::new());
        self.inner
            .core
            .csr(GroupId(group), &mut indptr, &mut indices, &mut last)
            .map_err(|e| self.error(py, &e))?;
        Ok((
            arrays::int32(py, &indptr)?.unbind(),
            arrays::int32(py, &indices)?.unbind(),
            arrays::int32(py, &last)?.unbind(),
        ))
    }

    /// list of Sequence : The sequences, row by row.
    #[getter]
    fn rows(&self, py: Python<'_>) -> PyResult<Vec<Sequence>> {
        let n = self.__len__(py)?;
        let mut rows = Vec::with_capacity(n);
        for row in 0..n {
            if let Some(core) = self.inner.core.sequence(row).map_err(|e| self.error(py, &e))? {
                rows.push(Sequence { owner: self.inner.owner.clone(), core });
            }
        }
        Ok(rows)
    }

    /// Pool : The pool that made it.
    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<Pool> {
        self.pool.clone_ref(py)
    }

    /// Step : What the newest step did: the object that `step` returns.
    #[getter]
    fn last(&self, py: Python<'_>) -> Py<Step> {
        self.step.clone_ref(py)
    }

    /// int : Names the step that the arrays show: no other step in this process has its number. 0 before the first.
    ///
    /// What is derived from the arrays once a step, rather than once a layer, is kept under it.
    #[getter]
    fn step_id(&self) -> u64 {
        self.step_id.load(Ordering::Relaxed)
    }

    /// int : Steps that wait for their commit.
    #[getter]
    fn outstanding(&self, py: Python<'_>) -> PyResult<usize> {
        self.inner.owner.live()?;
        self.inner.core.outstanding().map_err(|e| self.error(py, &e))
    }

    /// int : Rows there are.
    #[getter]
    fn max_sequences(&self) -> usize {
        self.shape.rows
    }

    /// int : The longest sequence a row can show.
    #[getter]
    fn max_tokens(&self) -> u32 {
        self.shape.tokens
    }

    /// int : The most tokens of one step.
    #[getter]
    fn max_step_tokens(&self) -> u32 {
        self.shape.step
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.inner.owner.live()?;
        self.inner.core.rows().map_err(|e| self.error(py, &e))
    }

    fn __bool__(&self) -> bool {
        true
    }

    /// Take every sequence out, and forget the steps that wait for their commit. The sequences stay open.
    ///
    /// A pool can have 1,024 batches at a time; one that is closed is none of them, until it is used again.
    ///
    /// Raises
    /// ------
    /// SequenceBusy
    ///     Another thread is using the batch or one of them: those before it are out then.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.inner.owner.live().is_err() {
            return Ok(());
        }
        self.inner.core.clear().map_err(|e| self.error(py, &e))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let Shape { rows, tokens, .. } = self.shape;
        match self.inner.core.rows() {
            Ok(n) => format!("<kvalloc.Batch {n} of {rows} rows of at most {tokens} tokens>"),
            Err(error) => format!("<kvalloc.Batch of {rows} rows, {error}>"),
        }
    }
}

/// One array for each layer group; alone if there is one group.
fn per_group(value: &Bound<'_, PyAny>, name: &str, groups: usize) -> PyResult<Vec<Py<PyAny>>> {
    if groups == 1 && !value.is_instance_of::<PyList>() && !value.is_instance_of::<PyTuple>() {
        return Ok(vec![as_array(value)?]);
    }
    let items = value.try_iter().map_err(|_| {
        InvalidArgument::new_err(format!("{name} is a list of {groups} arrays, one per layer group"))
    })?;
    let list = args::collected(items, name, groups, |_, array| as_array(&array))?;
    if list.len() == groups {
        Ok(list)
    } else {
        Err(InvalidArgument::new_err(format!("{name}: {} arrays for {groups} layer groups", list.len())))
    }
}

/// Something with a buffer as it is; a tensor on the host as the array that shares its memory.
fn as_array(value: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    if value.hasattr("__array_interface__")? || !value.hasattr("__dlpack__")? {
        return Ok(value.clone().unbind());
    }
    Ok(value.py().import("numpy")?.call_method1("from_dlpack", (value,))?.unbind())
}

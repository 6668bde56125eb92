//! `kvalloc.Sequence`.

use std::sync::Arc;

use kvalloc_core::{
    sequence::{Counts, Sequence as Core},
    word::GroupId,
};
use pyo3::prelude::*;

use crate::{args, arrays, errors::name_of, owner::Owner, tenant::Tenant};

/// One request's tokens and, per layer group, its pages. Made by `Pool.open` and `fork`.
///
/// Three counts tell where it stands:
///
/// =============== =====================================================================
/// ``num_tokens``  tokens whose ids are known: the prompt, `extend`, what was sampled
/// ``num_slots``   tokens with a place in a page: grows with `Batch.step`
/// ``num_written`` tokens whose KV is in that place: grows with `Batch.commit`
/// =============== =====================================================================
///
/// ``num_written <= num_slots``. Between a step and its commit ``num_slots`` is ahead; an asynchronous scheduler has
/// ``num_slots > num_tokens`` as well, by the tokens of steps that are not committed. Pages that are full, written and known
/// are published: other sequences can hit them.
///
/// Notes
/// -----
/// One thread at a time: a second one gets `SequenceBusy`, and nothing has happened. While it stands in a batch, every use
/// of it is a use of the batch. Different sequences are used from any number of threads at once.
///
/// It is a context manager that closes itself, and closes when the last handle is dropped. Two handles of one sequence are
/// equal.
///
/// Examples
/// --------
/// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
/// >>> pool.tenant("acme")
/// <kvalloc.Tenant "acme" ...>
/// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
/// >>> with pool.open("acme", range(20), max_new_tokens=8) as seq:
/// ...     row = batch.add(seq)
/// ...     out = batch.step()
/// ...     print(seq.num_tokens, seq.num_slots, seq.num_written)
/// ...     batch.commit([7])
/// ...     print(seq.num_tokens, seq.num_slots, seq.num_written)
/// 20 20 0
/// 21 20 20
#[pyclass(frozen, weakref, eq, hash, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) owner: Owner,
    pub(crate) core: Arc<Core>,
}

impl PartialEq for Sequence {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl std::hash::Hash for Sequence {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.core).hash(state);
    }
}

impl Sequence {
    fn counts(&self, py: Python<'_>) -> PyResult<Counts> {
        self.owner.live()?;
        self.core.counts().map_err(|e| self.owner.error(py, &e))
    }
}

#[pymethods]
impl Sequence {
    /// Tenant or None : Whose it is; None if that tenant is gone.
    #[getter]
    fn tenant(&self) -> PyResult<Option<Tenant>> {
        self.owner.live()?;
        Ok(Tenant::of(&self.owner, self.core.tenant()))
    }

    /// int : Tokens whose ids are known.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.known)
    }

    /// int : Tokens with a place in a page.
    #[getter]
    fn num_slots(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.slots)
    }

    /// int : Tokens whose KV is written.
    #[getter]
    fn num_written(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.written)
    }

    /// int : Tokens, from the first on, whose ids are certain: ``num_tokens``, or less once a step was committed that did not say
    /// what it wrote (`tokens` has 0 for those). What is kept by content, keep up to here.
    #[getter]
    fn num_told(&self, py: Python<'_>) -> PyResult<u32> {
        self.owner.live()?;
        self.core.told().map_err(|e| self.owner.error(py, &e))
    }

    /// int : Tokens of the prompt that were in the cache when it was opened: whole pages, never the last token.
    #[getter]
    fn cached_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.cached)
    }

    /// int : Tokens of the prompt it was opened with.
    #[getter]
    fn num_prompt_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.prompt)
    }

    /// numpy.ndarray : int32 [num_tokens]. Its token ids, a copy.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.owner.live()?;
        let tokens = self.core.tokens(0).map_err(|e| self.owner.error(py, &e))?;
        arrays::int32(py, &tokens.iter().map(|&t| t as i32).collect::<Vec<_>>())
    }

    /// list of (str, int) : Parts of the prompt that were to be shared and became the tenant's own: scope, tokens.
    #[getter]
    fn fallbacks(&self, py: Python<'_>) -> PyResult<Vec<(String, u32)>> {
        let core = self.owner.live()?;
        let fallbacks = self.core.fallbacks().map_err(|e| self.owner.error(py, &e))?;
        Ok(fallbacks.into_iter().map(|(scope, tokens)| (name_of(core, scope), tokens)).collect())
    }

    /// int : Bytes reserved for it (``admit=True``) and not in use yet.
    #[getter]
    fn promised(&self, py: Python<'_>) -> PyResult<u64> {
        self.owner.live()?;
        self.core.promised().map_err(|e| self.owner.error(py, &e))
    }

    /// bool : Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.owner.live().is_err() || self.core.is_closed()
    }

    /// References to its pages of a layer group.
    ///
    /// Parameters
    /// ----------
    /// group : int, optional
    ///     The layer group.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     uint64 [pages]: id and generation of each, as `Pages` takes them; pages that left the window or were cut are not among them. The
    ///     references stay the sequence's: don't release them.
    ///
    /// Raises
    /// ------
    /// InvalidArgument, SequenceBusy, ClosedError
    #[pyo3(signature = (group = 0))]
    fn pages<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.owner.live()?;
        let (_, pages) = self.core.pages(GroupId(group)).map_err(|e| self.owner.error(py, &e))?;
        let there = pages.iter().filter(|(_, frame)| frame.0 != 0);
        arrays::uint64(py, &there.map(|(page, _)| page.to_bits()).collect::<Vec<_>>())
    }

    /// The frames of its pages of a layer group, as a row of a batch shows them: compressed pages as ``~frame``, below 0.
    ///
    /// Parameters
    /// ----------
    /// group : int, optional
    ///     The layer group.
    ///
    /// Returns
    /// -------
    /// numpy.ndarray
    ///     int32 [pages]; 0 for pages that left the window or were cut. A page may move: a batch's own table is kept up to date,
    ///     this is a copy. While the sequence is suspended by swap, the frames of its private pages are those of the host tier.
    ///
    /// Raises
    /// ------
    /// InvalidArgument, SequenceBusy, ClosedError
    #[pyo3(signature = (group = 0))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.owner.live()?;
        let (start, pages) = self.core.pages(GroupId(group)).map_err(|e| self.owner.error(py, &e))?;
        let gone = std::iter::repeat_n(0, start as usize);
        arrays::int32(py, &gone.chain(pages.iter().map(|(_, frame)| frame.0 as i32)).collect::<Vec<_>>())
    }

    /// Add tokens whose ids are known: drafts of a speculative decoder, or the next turn of a chat.
    ///
    /// Parameters
    /// ----------
    /// ids : int32 array or sequence of int
    ///     As in `Pool.open`; may be empty.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     Ids outside int32, or more than 2**30 tokens altogether.
    /// SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// The next step gives room for all tokens that have none. To decode speculatively, extend by the drafts and step: the row
    /// gets ``1 + drafts`` tokens. When the model has verified them, `truncate` to those that are accepted and commit with the
    /// token that follows them (or commit with -1, truncate, and extend by it).
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme")
    /// >>> batch = pool.batch(max_sequences=1, max_tokens=512)
    /// >>> seq = pool.open(acme, range(20), max_new_tokens=8)
    /// >>> row, out = batch.add(seq), batch.step()
    /// >>> batch.commit([100])
    /// >>> seq.extend([101, 102, 103])  # three drafts
    /// >>> batch.step().num_tokens
    /// 4
    /// >>> batch.commit([-1])
    /// >>> seq.truncate(22)  # the first draft was right
    /// >>> seq.extend([7])  # and this is what the model says instead of the second
    /// >>> seq.tokens[-3:].tolist(), seq.num_written
    /// ([100, 101, 7], 22)
    fn extend(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.owner.live()?;
        let tokens = args::tokens(ids, 0)?;
        self.core.extend(&tokens).map_err(|e| self.owner.error(py, &e))
    }

    /// Forget the tokens behind the first ``n``, and give back the pages that held nothing else.
    ///
    /// Parameters
    /// ----------
    /// n : int
    ///     How many stay; at least 1.
    ///
    /// Raises
    /// ------
    /// InvalidArgument
    ///     More tokens than there are; pages it would need have left their window and were released; a fixed state can't go
    ///     back. Nothing was changed.
    /// SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// Pages behind ``n`` that were published already stay in the cache: their KV is right for the tokens they are found by. A
    /// published page that is cut in the middle is copied before the sequence writes into it (``Step.copies``).
    fn truncate(&self, py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        self.owner.live()?;
        let n = args::number(n, "n", 1, u64::from(u32::MAX))? as u32;
        self.core.truncate(n).map_err(|e| self.owner.error(py, &e))
    }

    /// A second sequence with the same tokens, sharing all pages that are written.
    ///
    /// Returns
    /// -------
    /// Sequence
    ///     It stands in no batch, is promised nothing, and is written as far as this one.
    ///
    /// Raises
    /// ------
    /// SequenceBusy, ClosedError, InvalidArgument
    ///
    /// Notes
    /// -----
    /// Whoever of the two writes into the half-filled page they share gets a copy of it first: see ``Step.copies``. After that
    /// copy is committed the page is the other's alone. Slots of steps that are not committed stay the parent's.
    ///
    /// Examples
    /// --------
    /// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
    /// >>> acme = pool.tenant("acme")
    /// >>> batch = pool.batch(max_sequences=2, max_tokens=512)
    /// >>> seq = pool.open(acme, range(20))
    /// >>> row, out = batch.add(seq), batch.step()
    /// >>> batch.commit([7])
    /// >>> other = seq.fork()
    /// >>> batch.add(other)
    /// 1
    /// >>> batch.step([0, 1]).copies.shape  # it goes on in a copy of the half-filled page
    /// (1, 3)
    /// >>> bool(seq.pages()[0] == other.pages()[0]), bool(seq.pages()[1] == other.pages()[1])
    /// (True, False)
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        self.owner.live()?;
        let core = self.core.fork().map_err(|e| self.owner.error(py, &e))?;
        Ok(Self { owner: self.owner.clone(), core })
    }

    /// Keep the fixed state as it is now, so that later prompts can start from it.
    ///
    /// Returns
    /// -------
    /// bool
    ///     False: the spec has no group with a fixed state, or the sequence does not stand at a page's edge with everything
    ///     published.
    ///
    /// Raises
    /// ------
    /// SequenceBusy, ClosedError
    ///
    /// Notes
    /// -----
    /// The state's page becomes a snapshot that can be hit; the next step goes on in a copy of it (``Step.copies``).
    fn keep_state(&self, py: Python<'_>) -> PyResult<bool> {
        self.owner.live()?;
        self.core.keep_state().map_err(|e| self.owner.error(py, &e))
    }

    /// Give everything back. A second time is fine.
    ///
    /// Published pages become cached, the others free. A sequence that stands in a batch leaves it: the batch's last row moves
    /// into its place. Use `Batch.remove` first to learn about it.
    ///
    /// Raises
    /// ------
    /// SequenceBusy
    ///     Another thread is using it: nothing was changed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.owner.live().is_err() {
            // The books are the parent process's; this copy of them ends with the fork.
            return Ok(());
        }
        self.core.close().map_err(|e| self.owner.error(py, &e))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.counts(py)?.known as usize)
    }

    fn __repr__(&self) -> String {
        if self.owner.live().is_err() {
            return "<kvalloc.Sequence of the parent process>".into();
        }
        let tenant = name_of(&self.owner.core, self.core.tenant());
        match self.core.counts() {
            Ok(Counts { known, slots, written, cached, .. }) => format!(
                "<kvalloc.Sequence of {tenant:?}, {known} tokens, {slots} with slots, {written} written, {cached} from cache>"
            ),
            Err(error) => format!("<kvalloc.Sequence of {tenant:?}, {error}>"),
        }
    }
}

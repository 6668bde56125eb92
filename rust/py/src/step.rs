//! `kvalloc.Step` and `kvalloc.Refusal`: what a step of a batch answers.

use std::sync::Arc;

use kvalloc_core::{
    batch::Copy,
    error::{Refusal as CoreRefusal, Why},
};
use pyo3::{IntoPyObjectExt, prelude::*};

use crate::{
    arrays,
    batch::Inner,
    errors::{name_of, sentence, why},
    owner::Owner,
    sequence::Sequence,
};

/// What the batch's last step did. The object is the batch's own and shows its newest step.
///
/// Examples
/// --------
/// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
/// >>> small = pool.tenant("small", limit="64KiB")  # two pages
/// >>> batch = pool.batch(max_sequences=4, max_tokens=512)
/// >>> rows = [batch.add(pool.open(small, range(n))) for n in (32, 20)]
/// >>> out = batch.step()
/// >>> out
/// <kvalloc.Step 32 tokens in 2 rows, 1 refused, 0 copies>
/// >>> out.counts.tolist(), [(refusal.row, refusal.why) for refusal in out.refused]
/// ([32, 0], [(1, 'limit')])
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Step {
    inner: Arc<Inner>,
}

impl Step {
    pub(crate) fn new(inner: &Arc<Inner>) -> Self {
        Self { inner: Arc::clone(inner) }
    }

    fn last<R>(&self, py: Python<'_>, see: impl FnOnce(&kvalloc_core::batch::Step) -> R) -> PyResult<R> {
        self.inner.owner.live()?;
        self.inner.core.last(see).map_err(|e| self.inner.owner.error(py, &e))
    }
}

#[pymethods]
impl Step {
    /// int : Tokens in the arrays.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        self.last(py, |s| s.num_tokens)
    }

    /// int : Rows in the arrays.
    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<u32> {
        self.last(py, |s| s.num_rows)
    }

    /// numpy.ndarray : int32 [num_rows]. Tokens that each row got, which may be fewer than asked for.
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let counts: Vec<i32> = self.last(py, |s| s.counts.iter().map(|&c| c as i32).collect())?;
        arrays::int32(py, &counts)
    }

    /// list of Refusal : Rows that got nothing, and why. Read it before rows are added or removed.
    #[getter]
    fn refused(&self, py: Python<'_>) -> PyResult<Vec<Refusal>> {
        let refused = self.last(py, |s| s.refused.clone())?;
        refused
            .into_iter()
            .map(|refused| {
                let core = refused.sequence.upgrade();
                let sequence = core.map(|core| Sequence { owner: self.inner.owner.clone(), core });
                Refusal::new(py, &self.inner.owner, refused.row, sequence, &refused.refusal)
            })
            .collect()
    }

    /// numpy.ndarray : int32 [copies, 3]. Layer group, source frame, destination frame.
    ///
    /// Copy these frames before the kernels of the step run. The sources stay as they are until the step is committed.
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let rows = |c: &Copy| [i32::from(c.group.0), c.from.0 as i32, c.to.0 as i32];
        let copies: Vec<i32> = self.last(py, |s| s.copies.iter().flat_map(rows).collect())?;
        arrays::int32(py, &copies)?.call_method1("reshape", (-1, 3))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.last(py, |s| {
            format!(
                "<kvalloc.Step {} tokens in {} rows, {} refused, {} copies>",
                s.num_tokens,
                s.num_rows,
                s.refused.len(),
                s.copies.len()
            )
        })
    }
}

/// A row that could not grow. Nothing was taken for it.
///
/// Attributes
/// ----------
/// row : int
///     Its row in the step.
/// sequence : Sequence or None
///     The sequence there.
/// why : {"limit", "claim", "frames", "fragmented", "row", "budget"}
///     A limit of the tenant or above it; what is held, reserved and promised; every page in use; free bytes that serve pages
///     of another size; the batch's rows are shorter; its steps are.
/// reason : str
///     The same as a sentence, with names and numbers, and what to do.
/// needed_bytes, room : int
///     Bytes asked for and bytes there were (tokens for ``"row"`` and ``"budget"``).
/// level : str or None
///     The tenant whose limit is in the way; None: it is no limit.
#[pyclass(frozen, get_all, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Refusal {
    /// Its row in this step.
    row: u32,
    /// Its sequence.
    sequence: Py<PyAny>,
    /// One word for the reason.
    why: &'static str,
    /// The reason as a sentence.
    reason: String,
    /// Bytes it needs.
    needed_bytes: u64,
    /// Bytes there are.
    room: u64,
    /// Whose limit.
    level: Option<String>,
}

impl Refusal {
    fn new(
        py: Python<'_>,
        owner: &Owner,
        row: u32,
        sequence: Option<Sequence>,
        refusal: &CoreRefusal,
    ) -> PyResult<Self> {
        Ok(Self {
            row,
            sequence: sequence.into_py_any(py)?,
            why: why(refusal.why),
            reason: sentence(&owner.core, refusal),
            needed_bytes: refusal.asked,
            room: refusal.room,
            level: (refusal.why == Why::Limit).then(|| name_of(&owner.core, refusal.level)),
        })
    }
}

#[pymethods]
impl Refusal {
    fn __repr__(&self) -> String {
        format!("<kvalloc.Refusal row {}: {}>", self.row, self.reason)
    }
}

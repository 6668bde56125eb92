//! `kvalloc.Batch` and what its steps answer.

use std::sync::{Arc, Mutex, PoisonError};

use kvalloc_core::{
    arrays::Shape,
    batch::{Batch as Core, Copy},
    error::{Error, Refusal as CoreRefusal},
    word::GroupId,
};
use pyo3::{IntoPyObjectExt, prelude::*, types::PyDict};

use crate::{
    args,
    arrays::{self, Objects},
    errors::{InvalidArgument, sentence, why},
    pool::Owner,
    sequence::Sequence,
};

#[derive(Debug)]
struct Inner {
    owner: Owner,
    core: Core,
}

/// Rows that persist between steps, and the arrays that kernels read.
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Batch {
    inner: Arc<Inner>,
    step: Py<Step>,
    objects: Mutex<Objects>,
    shape: Shape,
}

impl Batch {
    pub(crate) fn new(py: Python<'_>, owner: &Owner, shape: Shape) -> PyResult<Self> {
        let pool = owner.live()?;
        let objects = Objects::new(py, shape, pool.spec().groups().len())?;
        let shown = objects.bind(py, shape)?;
        let core = Core::new(pool, shape, Box::new(shown)).map_err(|e| owner.error(py, &e))?;
        let inner = Arc::new(Inner { owner: owner.clone(), core });
        let step = Py::new(py, Step { inner: Arc::clone(&inner) })?;
        Ok(Self { inner, step, objects: Mutex::new(objects), shape })
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
    /// Give a sequence a row.
    fn add(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<usize> {
        self.inner.owner.live()?;
        self.inner.core.add(&sequence.core).map_err(|e| self.error(py, &e))
    }

    /// Take a sequence out; the old number of the row that moved into its place, None if none did.
    fn remove(&self, py: Python<'_>, sequence: &Sequence) -> PyResult<Option<usize>> {
        self.inner.owner.live()?;
        self.inner.core.remove(&sequence.core).map_err(|e| self.error(py, &e))
    }

    /// Room for each row's next tokens.
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
            Some(counts) => args::with_int32(counts, "counts", |counts| {
                self.inner.core.step(Some(counts), budget, |_| ())
            })?,
        };
        done.map_err(|e| self.error(py, &e))?;
        Ok(self.step.clone_ref(py))
    }

    /// The model has run for the oldest step that is not committed.
    #[pyo3(signature = (sampled = None))]
    fn commit(&self, py: Python<'_>, sampled: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.inner.owner.live()?;
        let done = match sampled {
            None => self.inner.core.commit(None),
            Some(sampled) => args::with_int32(sampled, "sampled", |s| self.inner.core.commit(Some(s)))?,
        };
        done.map_err(|e| self.error(py, &e))
    }

    /// Use arrays of one's own from now on: dicts or lists by group for `block_table` and `slot_mapping`.
    #[pyo3(signature = (**own))]
    fn bind(&self, py: Python<'_>, own: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
        self.inner.owner.live()?;
        let Some(own) = own else { return Ok(()) };
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner).clone_ref(py);
        for (name, value) in own {
            let name: String = name.extract()?;
            let groups = objects.block_table.len();
            let per_group = |value: &Bound<'_, PyAny>| -> PyResult<Vec<Py<PyAny>>> {
                if groups == 1 && !value.is_instance_of::<pyo3::types::PyList>() {
                    return Ok(vec![as_array(value)?]);
                }
                let list = value.try_iter()?.map(|v| as_array(&v?)).collect::<PyResult<Vec<_>>>()?;
                if list.len() == groups {
                    Ok(list)
                } else {
                    Err(InvalidArgument::new_err(format!("{} arrays for {groups} layer groups", list.len())))
                }
            };
            match name.as_str() {
                "block_table" => objects.block_table = per_group(&value)?,
                "slot_mapping" => objects.slot_mapping = per_group(&value)?,
                "seq_lens" => objects.seq_lens = as_array(&value)?,
                "query_start_loc" => objects.query_start_loc = as_array(&value)?,
                "positions" => objects.positions = as_array(&value)?,
                other => {
                    return Err(InvalidArgument::new_err(format!(
                        "{other} is no array of a batch; those are block_table, slot_mapping, seq_lens, \
                         query_start_loc, positions"
                    )));
                }
            }
        }
        let shown = objects.bind(py, self.shape)?;
        self.inner.core.bind(Box::new(shown)).map_err(|e| self.error(py, &e))?;
        *self.objects.lock().unwrap_or_else(PoisonError::into_inner) = objects;
        Ok(())
    }

    #[pyo3(signature = (group = 0))]
    fn block_table(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Py<PyAny>> {
        self.object(py, |o| o.block_table.get(usize::from(group)))
    }

    #[pyo3(signature = (group = 0))]
    fn slot_mapping(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Py<PyAny>> {
        self.object(py, |o| o.slot_mapping.get(usize::from(group)))
    }

    #[getter]
    fn seq_lens(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.object(py, |o| Some(&o.seq_lens))
    }

    #[getter]
    fn query_start_loc(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.object(py, |o| Some(&o.query_start_loc))
    }

    #[getter]
    fn positions(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.object(py, |o| Some(&o.positions))
    }

    /// The tables as FlashInfer reads them: kv_indptr, kv_indices, kv_last_page_len.
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

    /// The sequences, row by row.
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

    /// Steps that wait for their commit.
    #[getter]
    fn outstanding(&self, py: Python<'_>) -> PyResult<usize> {
        self.inner.owner.live()?;
        self.inner.core.outstanding().map_err(|e| self.error(py, &e))
    }

    #[getter]
    fn max_sequences(&self) -> usize {
        self.shape.rows
    }

    #[getter]
    fn max_tokens(&self) -> u32 {
        self.shape.tokens
    }

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

    /// Take every sequence out; they stay open.
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

/// Something with a buffer as it is; a tensor on the host as the array that shares its memory.
fn as_array(value: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    if value.hasattr("__array_interface__")? || !value.hasattr("__dlpack__")? {
        return Ok(value.clone().unbind());
    }
    Ok(value.py().import("numpy")?.call_method1("from_dlpack", (value,))?.unbind())
}

/// What the batch's last step did. The object is the batch's own and shows its newest step.
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Step {
    inner: Arc<Inner>,
}

impl Step {
    fn last<R>(&self, py: Python<'_>, see: impl FnOnce(&kvalloc_core::batch::Step) -> R) -> PyResult<R> {
        self.inner.owner.live()?;
        self.inner.core.last(see).map_err(|e| self.inner.owner.error(py, &e))
    }
}

#[pymethods]
impl Step {
    /// Tokens in the arrays.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        self.last(py, |s| s.num_tokens)
    }

    /// Rows in the arrays.
    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<u32> {
        self.last(py, |s| s.num_rows)
    }

    /// Tokens per row, int32.
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let counts: Vec<i32> = self.last(py, |s| s.counts.iter().map(|&c| c as i32).collect())?;
        arrays::int32(py, &counts)
    }

    /// Rows that got nothing, and why.
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

    /// Frames to copy before the kernels run, int32 [n, 3]: layer group, source, destination.
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

/// A row that could not grow.
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
        })
    }
}

#[pymethods]
impl Refusal {
    fn __repr__(&self) -> String {
        format!("<kvalloc.Refusal row {}: {}>", self.row, self.reason)
    }
}

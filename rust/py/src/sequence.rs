//! `kvalloc.Sequence`.

use std::sync::Arc;

use kvalloc_core::{
    sequence::{Counts, Sequence as Core},
    word::GroupId,
};
use pyo3::prelude::*;

use crate::{args, arrays, errors::name_of, pool::Owner, tenant::Tenant};

/// One request's tokens and pages.
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
    #[getter]
    fn tenant(&self) -> PyResult<Option<Tenant>> {
        self.owner.live()?;
        Ok(Tenant::of(&self.owner, self.core.tenant()))
    }

    /// Tokens whose ids are known.
    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.known)
    }

    /// Tokens with a place in a page.
    #[getter]
    fn num_slots(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.slots)
    }

    /// Tokens whose KV is written.
    #[getter]
    fn num_written(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.written)
    }

    /// Tokens of the prompt that were in the cache when it was opened.
    #[getter]
    fn cached_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.cached)
    }

    #[getter]
    fn num_prompt_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.counts(py)?.prompt)
    }

    /// Its tokens, int32.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.owner.live()?;
        let tokens = self.core.tokens(0).map_err(|e| self.owner.error(py, &e))?;
        arrays::int32(py, &tokens.iter().map(|&t| t as i32).collect::<Vec<_>>())
    }

    /// Parts of the prompt that were to be shared and became the tenant's own: (scope, tokens).
    #[getter]
    fn fallbacks(&self, py: Python<'_>) -> PyResult<Vec<(String, u32)>> {
        let core = self.owner.live()?;
        let fallbacks = self.core.fallbacks().map_err(|e| self.owner.error(py, &e))?;
        Ok(fallbacks.into_iter().map(|(scope, tokens)| (name_of(core, scope), tokens)).collect())
    }

    /// Bytes reserved for it and not in use yet.
    #[getter]
    fn promised(&self, py: Python<'_>) -> PyResult<u64> {
        self.owner.live()?;
        self.core.promised().map_err(|e| self.owner.error(py, &e))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.owner.live().is_err() || self.core.is_closed()
    }

    /// References to its pages of a group, uint64; pages that left the window are not among them.
    #[pyo3(signature = (group = 0))]
    fn pages<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::group)] group: u8,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.owner.live()?;
        let (_, pages) = self.core.pages(GroupId(group)).map_err(|e| self.owner.error(py, &e))?;
        arrays::uint64(py, &pages.iter().map(|(page, _)| page.to_bits()).collect::<Vec<_>>())
    }

    /// The frames of its pages of a group, int32; 0 for pages that left the window.
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

    /// Further tokens whose ids are known.
    fn extend(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.owner.live()?;
        let tokens = args::tokens(ids, 0)?;
        self.core.extend(&tokens).map_err(|e| self.owner.error(py, &e))
    }

    /// Forget the tokens behind the first `n`.
    fn truncate(&self, py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        self.owner.live()?;
        let n = args::number(n, "n", 1, u64::from(u32::MAX))? as u32;
        self.core.truncate(n).map_err(|e| self.owner.error(py, &e))
    }

    /// A second sequence with the same tokens, sharing what is written.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        self.owner.live()?;
        let core = self.core.fork().map_err(|e| self.owner.error(py, &e))?;
        Ok(Self { owner: self.owner.clone(), core })
    }

    /// Keep the fixed state as it is now, so that later prompts can start from it.
    fn keep_state(&self, py: Python<'_>) -> PyResult<bool> {
        self.owner.live()?;
        self.core.keep_state().map_err(|e| self.owner.error(py, &e))
    }

    /// Give everything back; a second time is fine.
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

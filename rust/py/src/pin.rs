//! `kvalloc.Pin`.

use std::sync::Arc;

use kvalloc_core::{
    error::Error,
    pins::{Pin as CorePin, PinId},
};
use pyo3::prelude::*;

use crate::{errors::name_of, owner::Owner};

/// Pages kept for their owner until it ends. From `Pool.pin` and `Pool.pins`; handles of one pin are equal.
///
/// A context manager that unpins at the end of the block. The figures are those of the moment the object was made.
#[pyclass(frozen, eq, hash, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Pin {
    owner: Owner,
    id: PinId,
    pin: Option<CorePin>,
}

impl PartialEq for Pin {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && Arc::ptr_eq(&self.owner.core, &other.owner.core)
    }
}

impl std::hash::Hash for Pin {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.id.hash(state);
        Arc::as_ptr(&self.owner.core).hash(state);
    }
}

impl Pin {
    pub(crate) fn new(owner: &Owner, pin: Option<CorePin>, id: PinId) -> Self {
        Self { owner: owner.clone(), id, pin }
    }
}

#[pymethods]
impl Pin {
    /// str or None : The tenant whose budget it counts against; None if it had ended when the object was made.
    #[getter]
    fn owner(&self) -> Option<String> {
        self.pin.as_ref().map(|p| name_of(&self.owner.core, p.owner))
    }

    /// str or None : What it was called.
    #[getter]
    fn label(&self) -> Option<&str> {
        self.pin.as_ref().map(|p| p.label.as_str())
    }

    /// int : How many pages it keeps.
    #[getter]
    fn pages(&self) -> usize {
        self.pin.as_ref().map_or(0, |p| p.pages.len())
    }

    /// int : Bytes it counts against its owner's budget.
    #[getter]
    fn bytes(&self) -> u64 {
        self.pin.as_ref().map_or(0, |p| self.owner.core.bytes_of(p.units))
    }

    /// float or None : When it ends, in seconds of the pool's clock; None: when it is unpinned.
    #[getter]
    fn expires(&self) -> Option<f64> {
        self.pin.as_ref().and_then(|p| p.expires_at_ms).map(|ms| ms as f64 / 1000.0)
    }

    /// End it: pages that nobody references become cached.
    ///
    /// Raises
    /// ------
    /// PinError
    ///     It was unpinned before, or expired. Nothing was changed.
    fn unpin(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.live()?.unpin(self.id).map_err(|e| self.owner.error(py, &e))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(core) = self.owner.live() else { return Ok(()) };
        match core.unpin(self.id) {
            // It expired meanwhile, or was unpinned inside the block.
            Ok(()) | Err(Error::Pin(_)) => Ok(()),
            Err(error) => Err(self.owner.error(py, &error)),
        }
    }

    fn __repr__(&self) -> String {
        let Some(CorePin { pages, label, .. }) = &self.pin else { return "<kvalloc.Pin, ended>".into() };
        format!("<kvalloc.Pin {label:?} of {:?}, {} pages>", self.owner().unwrap_or_default(), pages.len())
    }
}

//! `kvalloc.Events`.

use kvalloc_core::{
    event::{Drained, Event, Record},
    pool::Pool as Core,
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyIterator, PyTuple},
};

use crate::errors::{name_of, tier_name};

/// Events since the last call: a sequence of dicts, and how many were lost on the way.
///
/// `Pool.events` makes them, and tells what is in them.
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Events {
    events: Py<PyTuple>,
    lost: u64,
    next: u64,
}

impl Events {
    pub(crate) fn new(py: Python<'_>, core: &Core, records: &[Record], drained: Drained) -> PyResult<Self> {
        let events = records.iter().map(|record| as_dict(py, core, record)).collect::<PyResult<Vec<_>>>()?;
        Ok(Self { events: PyTuple::new(py, events)?.unbind(), lost: drained.lost, next: drained.next })
    }
}

fn as_dict(py: Python<'_>, core: &Core, record: &Record) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("sequence", record.sequence)?;
    match record.event {
        Event::Stored { key, parent, page, group, tenant, tokens, tier: at } => {
            dict.set_item("type", "stored")?;
            dict.set_item("key", key)?;
            dict.set_item("parent", parent)?;
            dict.set_item("page", page.to_bits())?;
            dict.set_item("group", group.0)?;
            dict.set_item("scope", name_of(core, tenant))?;
            dict.set_item("tokens", tokens)?;
            dict.set_item("tier", tier_name(at))?;
        }
        Event::Removed { key, group, tenant, tier: at } => {
            dict.set_item("type", "removed")?;
            dict.set_item("key", key)?;
            dict.set_item("group", group.0)?;
            dict.set_item("scope", name_of(core, tenant))?;
            dict.set_item("tier", tier_name(at))?;
        }
        Event::Cleared => dict.set_item("type", "cleared")?,
    }
    Ok(dict.unbind())
}

#[pymethods]
impl Events {
    /// int : Events since the last call that nobody will get, because the ring was full.
    #[getter]
    fn lost(&self) -> u64 {
        self.lost
    }

    /// int : The number of the next event.
    #[getter]
    fn next(&self) -> u64 {
        self.next
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.events.bind(py).len()
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.events.bind(index.py()).as_any().get_item(index)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.events.bind(py).try_iter()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<kvalloc.Events {} events, {} lost>", self.__len__(py), self.lost)
    }
}

//! The arrays of a batch: numpy arrays that the core writes in place.
//!
//! Each is a Python buffer that stays exported, and so at its address, for as long as the batch lives. The core writes it
//! only inside `add`, `remove`, `step` and calls on sequences that stand in the batch, behind the batch's lock. Whoever
//! reads it from another thread at that moment sees numbers of either step, as with any array that is shared.

use kvalloc_core::arrays::{Arrays, GroupArrays, RowArrays, Shape};
use pyo3::{
    buffer::{Element, PyBuffer},
    prelude::*,
    types::PyDict,
};

use crate::{
    args::{self, shown},
    errors::InvalidArgument,
};

/// A writable, contiguous buffer of a fixed number of elements.
#[derive(Debug)]
struct Bound1<T: Element> {
    buffer: PyBuffer<T>,
    len: usize,
}

// SAFETY: the pointer in a PyBuffer stays valid until the buffer is released; it is released with the interpreter attached.
unsafe impl<T: Element> Send for Bound1<T> {}

impl<T: Element> Bound1<T> {
    fn new(array: &Bound<'_, PyAny>, name: &str, shape: &[usize]) -> PyResult<Self> {
        let dtype = match size_of::<T>() {
            4 => "int32",
            _ => "int64",
        };
        let wrong = |what: String| {
            InvalidArgument::new_err(format!(
                "{name} must be a writable, contiguous {dtype} array of shape {shape:?}; {what}"
            ))
        };
        let buffer = args::buffer::<T>(array).ok_or_else(|| wrong(format!("got {}", shown(array))))?;
        if buffer.shape() != shape {
            return Err(wrong(format!("its shape is {:?}", buffer.shape())));
        }
        if buffer.readonly() {
            return Err(wrong("it is read-only".into()));
        }
        if !buffer.is_c_contiguous() {
            return Err(wrong("it is not contiguous".into()));
        }
        Ok(Self { len: buffer.item_count(), buffer })
    }

    fn range(&self) -> std::ops::Range<usize> {
        let start = self.buffer.buf_ptr().addr();
        start..start + self.len * size_of::<T>()
    }

    fn slice(&mut self) -> &mut [T] {
        // SAFETY: the exporter keeps `len` elements of T at this address until the buffer is released, which `self` owns;
        // it is writable and contiguous (checked in `new`), and the batch's lock makes this the only slice of it in Rust.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.buf_ptr().cast(), self.len) }
    }
}

/// The arrays of one batch, and the Python objects that show them.
#[derive(Debug)]
pub(crate) struct Shown {
    groups: Vec<(Bound1<i32>, Bound1<i64>)>,
    seq_lens: Bound1<i32>,
    query_start_loc: Bound1<i32>,
    positions: Bound1<i32>,
}

impl Shown {
    /// No two arrays share memory: a step would write one over the other.
    fn check_apart(&self) -> PyResult<()> {
        let mut ranges = vec![
            ("seq_lens", self.seq_lens.range()),
            ("query_start_loc", self.query_start_loc.range()),
            ("positions", self.positions.range()),
        ];
        for (table, slots) in &self.groups {
            ranges.extend([("block_table", table.range()), ("slot_mapping", slots.range())]);
        }
        ranges.sort_by_key(|(_, range)| range.start);
        match ranges.windows(2).find(|pair| pair[1].1.start < pair[0].1.end) {
            None => Ok(()),
            Some(pair) => Err(InvalidArgument::new_err(format!(
                "{} and {} share memory; each array needs memory of its own",
                pair[0].0, pair[1].0
            ))),
        }
    }
}

impl Arrays for Shown {
    fn group(&mut self, group: usize) -> GroupArrays<'_> {
        let (block_table, slot_mapping) = &mut self.groups[group];
        GroupArrays { block_table: block_table.slice(), slot_mapping: slot_mapping.slice() }
    }

    fn rows(&mut self) -> RowArrays<'_> {
        RowArrays {
            seq_lens: self.seq_lens.slice(),
            query_start_loc: self.query_start_loc.slice(),
            positions: self.positions.slice(),
        }
    }
}

/// The Python objects, by name; `block_table` and `slot_mapping` are one per group.
#[derive(Debug)]
pub(crate) struct Objects {
    pub(crate) block_table: Vec<Py<PyAny>>,
    pub(crate) slot_mapping: Vec<Py<PyAny>>,
    pub(crate) seq_lens: Py<PyAny>,
    pub(crate) query_start_loc: Py<PyAny>,
    pub(crate) positions: Py<PyAny>,
}

impl Objects {
    /// Arrays of numpy's own.
    pub(crate) fn new(py: Python<'_>, shape: Shape, groups: usize) -> PyResult<Self> {
        let numpy = py.import("numpy")?;
        let full = |dims: &[usize], value: i64, dtype: &str| -> PyResult<Py<PyAny>> {
            let keywords = PyDict::new(py);
            keywords.set_item("dtype", dtype)?;
            let dims = pyo3::types::PyTuple::new(py, dims)?;
            // Zeros come untouched from the system, however large.
            Ok(match value {
                0 => numpy.call_method("zeros", (dims,), Some(&keywords))?,
                _ => numpy.call_method("full", (dims, value), Some(&keywords))?,
            }
            .unbind())
        };
        let step = shape.step as usize;
        Ok(Self {
            block_table: (0..groups)
                .map(|_| full(&[shape.rows, shape.pages], 0, "int32"))
                .collect::<PyResult<_>>()?,
            slot_mapping: (0..groups).map(|_| full(&[step], -1, "int64")).collect::<PyResult<_>>()?,
            seq_lens: full(&[shape.rows], 0, "int32")?,
            query_start_loc: full(&[shape.rows + 1], 0, "int32")?,
            positions: full(&[step], 0, "int32")?,
        })
    }

    /// The buffers behind the objects.
    pub(crate) fn bind(&self, py: Python<'_>, shape: Shape) -> PyResult<Shown> {
        let step = [shape.step as usize];
        let groups = self.block_table.iter().zip(&self.slot_mapping).map(|(table, slots)| {
            Ok((
                Bound1::new(table.bind(py), "block_table", &[shape.rows, shape.pages])?,
                Bound1::new(slots.bind(py), "slot_mapping", &step)?,
            ))
        });
        let shown = Shown {
            groups: groups.collect::<PyResult<_>>()?,
            seq_lens: Bound1::new(self.seq_lens.bind(py), "seq_lens", &[shape.rows])?,
            query_start_loc: Bound1::new(
                self.query_start_loc.bind(py),
                "query_start_loc",
                &[shape.rows + 1],
            )?,
            positions: Bound1::new(self.positions.bind(py), "positions", &step)?,
        };
        shown.check_apart()?;
        Ok(shown)
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        let each = |list: &[Py<PyAny>]| list.iter().map(|o| o.clone_ref(py)).collect();
        Self {
            block_table: each(&self.block_table),
            slot_mapping: each(&self.slot_mapping),
            seq_lens: self.seq_lens.clone_ref(py),
            query_start_loc: self.query_start_loc.clone_ref(py),
            positions: self.positions.clone_ref(py),
        }
    }
}

fn copied<'py>(py: Python<'py>, bytes: &[u8], dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    let bytes = pyo3::types::PyBytes::new(py, bytes);
    py.import("numpy")?.call_method1("frombuffer", (bytes, dtype))?.call_method0("copy")
}

/// A numpy array with these numbers.
pub(crate) fn int32<'py>(py: Python<'py>, numbers: &[i32]) -> PyResult<Bound<'py, PyAny>> {
    copied(py, &numbers.iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<_>>(), "int32")
}

/// A numpy array with these numbers.
pub(crate) fn uint64<'py>(py: Python<'py>, numbers: &[u64]) -> PyResult<Bound<'py, PyAny>> {
    copied(py, &numbers.iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<_>>(), "uint64")
}

/// A numpy array of rows of `columns` numbers.
pub(crate) fn int64_rows<'py>(
    py: Python<'py>,
    numbers: &[i64],
    columns: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let flat = copied(py, &numbers.iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<_>>(), "int64")?;
    flat.call_method1("reshape", ((numbers.len() / columns, columns),))
}

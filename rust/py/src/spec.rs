//! Geometry for Python: [`Spec`] and its errors. `kvalloc.KVSpec` wraps it.

use std::sync::Arc;

use kvalloc_core::{
    spec::{self, Dtype, GroupKind, GroupSpec, Layout, SpecError},
    word::GroupId,
};
use pyo3::{exceptions::PyIndexError, prelude::*, types::PyType};

mod exceptions {
    #![allow(missing_debug_implementations)]
    pyo3::import_exception!(kvalloc.errors, SpecError);
}

/// A layer group: name, kind, tokens of its window or chunk (else 0), layers, KV heads, values of a K head, values of a V
/// head, dtype, state bytes.
type Group = (String, String, u32, u32, u32, u32, u32, String, u64);
/// A page class: group, dtype, page bytes, raw bytes, layer bytes, size.
type Class = (u8, &'static str, u64, u64, u64, u8);

/// The geometry of a model's KV cache: layer groups, page classes, bytes.
#[pyclass(frozen, eq, hash, module = "kvalloc._core")]
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Spec {
    inner: Arc<spec::Spec>,
    small: Option<Dtype>,
}

impl Spec {
    /// The core's spec.
    pub(crate) fn core(&self) -> &Arc<spec::Spec> {
        &self.inner
    }

    fn group(&self, group: usize) -> PyResult<GroupId> {
        let groups = self.inner.groups().len();
        if group >= groups {
            return Err(PyIndexError::new_err(format!("group {group} of {groups}")));
        }
        Ok(GroupId(group as u8))
    }
}

#[pymethods]
impl Spec {
    #[new]
    #[pyo3(signature = (page_tokens, groups, layout = "page_major", small = None))]
    fn new(
        py: Python<'_>,
        page_tokens: u32,
        groups: Vec<Group>,
        layout: &str,
        small: Option<&str>,
    ) -> PyResult<Self> {
        let layout = match layout {
            "page_major" => Layout::PageMajor,
            "layer_major" => Layout::LayerMajor,
            other => return Err(refused("layout", other, "page_major, layer_major")),
        };
        let groups = groups.into_iter().map(group).collect::<PyResult<Vec<_>>>()?;
        let small = small.map(dtype).transpose()?;
        let inner = spec::Spec::new(page_tokens, groups, layout, small).map_err(|e| spec_error(py, &e))?;
        Ok(Self { inner: Arc::new(inner), small })
    }

    #[getter]
    fn page_tokens(&self) -> u32 {
        self.inner.page_tokens()
    }

    #[getter]
    fn layout(&self) -> &'static str {
        match self.inner.layout() {
            Layout::PageMajor => "page_major",
            Layout::LayerMajor => "layer_major",
        }
    }

    #[getter]
    fn small(&self) -> Option<&'static str> {
        self.small.map(Dtype::name)
    }

    #[getter]
    fn groups(&self) -> Vec<Group> {
        self.inner
            .groups()
            .iter()
            .map(|g| {
                let (kind, tokens) = match g.kind {
                    GroupKind::Full => ("full", 0),
                    GroupKind::Window { tokens } => ("window", tokens),
                    GroupKind::Chunked { tokens } => ("chunked", tokens),
                    GroupKind::Latent => ("latent", 0),
                    GroupKind::State => ("state", 0),
                };
                let dtype = g.dtype.name().to_owned();
                let name = g.name.clone();
                (name, kind.to_owned(), tokens, g.layers, g.kv_heads, g.k_dim, g.v_dim, dtype, g.state_bytes)
            })
            .collect()
    }

    #[getter]
    fn classes(&self) -> Vec<Class> {
        self.inner
            .classes()
            .iter()
            .map(|c| (c.group.0, c.dtype.name(), c.page_bytes, c.raw_bytes, c.layer_bytes, c.size.0))
            .collect()
    }

    #[getter]
    fn sizes(&self) -> Vec<u64> {
        self.inner.sizes().to_vec()
    }

    #[getter]
    fn granule(&self) -> u64 {
        self.inner.granule()
    }

    #[getter]
    fn unit(&self) -> u64 {
        self.inner.unit()
    }

    #[getter]
    fn anchor(&self) -> Option<u8> {
        self.inner.anchor().map(|g| g.0)
    }

    #[getter]
    fn bytes_per_token(&self) -> u64 {
        self.inner.bytes_per_token()
    }

    #[getter]
    fn grow_bytes_per_token(&self) -> u64 {
        self.inner.grow_bytes_per_token()
    }

    #[getter]
    fn window_cap_bytes(&self) -> u64 {
        self.inner.window_cap_bytes()
    }

    #[getter]
    fn state_bytes(&self) -> u64 {
        self.inner.state_bytes()
    }

    /// First page and one past the last that a sequence of so many tokens holds.
    fn pages_of(&self, group: usize, tokens: u32) -> PyResult<(u32, u32)> {
        let pages = self.inner.pages_of(self.group(group)?, tokens);
        Ok((pages.start, pages.end))
    }

    /// The most pages of a group on the way to so many tokens, with at most `step` new ones a step.
    #[pyo3(signature = (group, tokens, step = 1))]
    fn peak_pages(&self, group: usize, tokens: u32, step: u32) -> PyResult<u32> {
        Ok(self.inner.peak_pages(self.group(group)?, tokens, step))
    }

    /// Bytes that a sequence of so many tokens holds.
    fn bytes_for(&self, tokens: u32) -> u64 {
        self.inner.bytes_for(tokens)
    }

    /// The most bytes on the way to so many tokens.
    #[pyo3(signature = (tokens, step = 1))]
    fn peak_for(&self, tokens: u32, step: u32) -> u64 {
        self.inner.peak_for(tokens, step)
    }

    /// The longest length to which so many sequences can grow at once; None: any.
    #[pyo3(signature = (bytes, sequences = 1, step = 1))]
    fn tokens_in(&self, bytes: u64, sequences: u32, step: u32) -> Option<u32> {
        self.inner.tokens_in(bytes, sequences, step)
    }

    /// How many sequences of so many tokens fit at once.
    #[pyo3(signature = (bytes, tokens, step = 1))]
    fn sequences_in(&self, bytes: u64, tokens: u32, step: u32) -> u64 {
        self.inner.sequences_in(bytes, tokens, step)
    }

    /// The same with every window and chunk kept in full.
    fn unwindowed(&self) -> Self {
        Self { inner: Arc::new(self.inner.unwindowed()), small: self.small }
    }

    /// Usable bytes, bytes rounded off, bytes of an extent, extents, reserved bytes.
    fn arena(&self, py: Python<'_>, bytes: u64) -> PyResult<(u64, u64, u64, u32, u64)> {
        let a = self.inner.arena(bytes).map_err(|e| spec_error(py, &e))?;
        Ok((a.bytes, a.rounded_off, a.extent_bytes, a.extents, a.reserved))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, Arguments) {
        let arguments = (self.page_tokens(), self.groups(), self.layout(), self.small());
        (py.get_type::<Self>(), arguments)
    }

    fn __repr__(&self) -> String {
        format!("Spec({}, {:?}, {:?}, {:?})", self.page_tokens(), self.groups(), self.layout(), self.small())
    }
}

/// What [`Spec::new`] takes.
type Arguments = (u32, Vec<Group>, &'static str, Option<&'static str>);

fn group(g: Group) -> PyResult<GroupSpec> {
    let (name, kind, tokens, layers, kv_heads, k_dim, v_dim, storage, state_bytes) = g;
    let kind = match kind.as_str() {
        "full" => GroupKind::Full,
        "window" => GroupKind::Window { tokens },
        "chunked" => GroupKind::Chunked { tokens },
        "latent" => GroupKind::Latent,
        "state" => GroupKind::State,
        other => return Err(refused("kind", other, "full, window, chunked, latent, state")),
    };
    let dtype = dtype(&storage)?;
    Ok(GroupSpec { name, kind, layers, kv_heads, k_dim, v_dim, dtype, state_bytes })
}

fn dtype(name: &str) -> PyResult<Dtype> {
    const ALL: [Dtype; 5] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8, Dtype::Int8];
    ALL.into_iter()
        .find(|d| d.name() == name)
        .ok_or_else(|| refused("dtype", name, "float32, float16, bfloat16, float8_e4m3fn, int8"))
}

fn refused(field: &str, given: &str, known: &str) -> PyErr {
    exceptions::SpecError::new_err(format!("{field} {given:?}: must be one of {known}"))
}

/// The Python error, with the numbers as attributes.
pub(crate) fn spec_error(py: Python<'_>, error: &SpecError) -> PyErr {
    let raised = exceptions::SpecError::new_err(error.to_string());
    let value = raised.value(py);
    let set = match error {
        SpecError::PageTokens { given, max } => {
            value.setattr("given", given).and_then(|()| value.setattr("max", max))
        }
        SpecError::Groups { given, max } => {
            value.setattr("given", given).and_then(|()| value.setattr("max", max))
        }
        SpecError::Name { name, .. } => value.setattr("group", name),
        SpecError::Group { group, field, given, .. } => value
            .setattr("group", group)
            .and_then(|()| value.setattr("field", field))
            .and_then(|()| value.setattr("given", given)),
        SpecError::PageTooLarge { group, bytes, max } => value
            .setattr("group", group)
            .and_then(|()| value.setattr("bytes", bytes))
            .and_then(|()| value.setattr("max", max)),
        SpecError::SmallNotSmaller { group, .. } => value.setattr("group", group),
        SpecError::LayerMajor { layers, .. } => value.setattr("layers", layers),
        SpecError::Sizes { sizes, .. } => value.setattr("sizes", sizes),
        SpecError::ArenaTooSmall { bytes, needed } => {
            value.setattr("bytes", bytes).and_then(|()| value.setattr("needed", needed))
        }
        SpecError::ArenaTooLarge { bytes, most } => {
            value.setattr("bytes", bytes).and_then(|()| value.setattr("most", most))
        }
    };
    match set {
        Ok(()) => raised,
        Err(other) => other,
    }
}

//! `kvalloc.Pool`.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use kvalloc_core::{
    arrays::Shape,
    error::Error,
    hash::Secret,
    pool::{Options, Pool as Core},
    sequence::Open,
    spec::Spec as CoreSpec,
    word::{TenantId, Tier},
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyInt, PyString},
};

use crate::{
    args,
    batch::Batch,
    books::{Admission, AuditReport, Events, Pin, Stats},
    errors::{self, ClosedError, InvalidArgument, UnknownTenant, WrongPool, raised},
    pages::Pages,
    sequence::Sequence,
    spec::Spec,
    tenant::{self, Tenant},
};

/// How often this process is a fork of another: pools of the parent are not the child's.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Called in the child after a fork.
#[pyfunction]
pub(crate) fn _forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A pool and the process it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(crate) core: Arc<Core>,
    born: u32,
}

impl Owner {
    /// The books, unless this process is a fork of the one that made them.
    #[inline]
    pub(crate) fn live(&self) -> PyResult<&Arc<Core>> {
        if self.born == FORKS.load(Ordering::Relaxed) {
            Ok(&self.core)
        } else {
            Err(ClosedError::new_err(
                "this process is a fork of the one that made the pool; make a pool of its own here \
                 (or start workers with the 'spawn' method)",
            ))
        }
    }

    pub(crate) fn error(&self, py: Python<'_>, error: &Error) -> PyErr {
        raised(py, &self.core, error)
    }

    /// A tenant given by handle or by name.
    pub(crate) fn tenant(&self, value: &Bound<'_, PyAny>, default: Option<TenantId>) -> PyResult<TenantId> {
        if let Ok(tenant) = value.cast::<Tenant>() {
            let tenant = tenant.get();
            return if Arc::ptr_eq(&tenant.owner.core, &self.core) {
                Ok(tenant.id)
            } else {
                Err(WrongPool::new_err(format!("tenant {:?} belongs to another pool", tenant.name)))
            };
        }
        let Ok(name) = value.cast::<PyString>() else {
            return Err(InvalidArgument::new_err(format!(
                "a tenant is a Tenant or its name, not {}",
                args::shown(value)
            )));
        };
        let id = name.to_str().ok().and_then(|name| self.core.ledger().find(name));
        id.or(default).ok_or_else(|| {
            let known: Vec<_> = self.core.ledger().ids().filter_map(|t| self.core.ledger().name(t)).take(8).collect();
            UnknownTenant::new_err(format!(
                "there is no tenant {}; known are {known:?}. Make it with pool.tenant(...), or give the pool a default_tenant",
                args::shown(value)
            ))
        })
    }
}

/// The books over one device arena (and one host arena): pages, tenants, prefixes. No tensor.
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) owner: Owner,
    spec: Py<PyAny>,
    default: Option<TenantId>,
}

impl Pool {
    fn live(&self) -> PyResult<&Arc<Core>> {
        self.owner.live()
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (
        spec, device_bytes, host_bytes = None, *, secret = None, max_tenants = 4096, default_tenant = None,
        compare_tokens = true, clock = "system", events = 0, force_collisions = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a constructor")]
    fn new(
        spec: &Bound<'_, PyAny>,
        device_bytes: &Bound<'_, PyAny>,
        host_bytes: Option<&Bound<'_, PyAny>>,
        secret: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::max_tenants)] max_tenants: u32,
        default_tenant: Option<&Bound<'_, PyAny>>,
        compare_tokens: bool,
        clock: &str,
        #[pyo3(from_py_with = args::events)] events: u32,
        force_collisions: bool,
    ) -> PyResult<Self> {
        let native = spec.getattr("_native").and_then(|n| Ok(n.cast_into::<Spec>()?)).map_err(|_| {
            InvalidArgument::new_err(format!("spec must be a KVSpec, not {}", args::shown(spec)))
        })?;
        let geometry: &CoreSpec = native.get().core();
        let secret = match secret {
            None => None,
            Some(secret) => {
                // Never shown: the error says only how long it is.
                let bytes = secret.cast::<PyBytes>().ok().map(|b| b.as_bytes().to_vec());
                let bytes: Option<[u8; 16]> = bytes.and_then(|b| b.try_into().ok());
                Some(Secret::from_bytes(bytes.ok_or_else(|| {
                    InvalidArgument::new_err("secret must be 16 bytes, for instance os.urandom(16)")
                })?))
            }
        };
        let manual_clock = match clock {
            "system" => false,
            "manual" => true,
            other => {
                return Err(InvalidArgument::new_err(format!(
                    "clock is {other:?}; it is \"system\" or \"manual\""
                )));
            }
        };
        let options = Options {
            device_bytes: args::bytes(device_bytes)?,
            host_bytes: host_bytes.map_or(Ok(0), args::bytes)?,
            secret,
            max_tenants,
            compare_tokens,
            manual_clock,
            events,
            force_collisions,
        };
        let core =
            Core::new(geometry.clone(), &options).map_err(|e| InvalidArgument::new_err(e.to_string()))?;
        let owner = Owner { core: Arc::new(core), born: FORKS.load(Ordering::Relaxed) };
        let default = default_tenant
            .map(|name| tenant::create(&owner, &args::text(name)?, None).map(|tenant| tenant.id))
            .transpose()?;
        if events > 0 {
            owner.core.turn_events(true);
        }
        Ok(Self { owner, spec: spec.clone().unbind(), default })
    }

    /// Make a tenant, or change what is given of one that exists.
    #[pyo3(signature = (name, **policy))]
    fn tenant(
        &self,
        #[pyo3(from_py_with = args::text)] name: String,
        policy: Option<&Bound<'_, pyo3::types::PyDict>>,
    ) -> PyResult<Tenant> {
        tenant::create(self.live().map(|_| &self.owner)?, &name, policy)
    }

    /// Every tenant, in the order in which they were made.
    fn tenants(&self) -> PyResult<Vec<Tenant>> {
        let core = self.live()?;
        Ok(core.ledger().ids().filter_map(|id| Tenant::of(&self.owner, id)).collect())
    }

    /// May this start now?
    #[pyo3(signature = (tenant, prompt_ids, max_new_tokens = 0))]
    fn admit(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        prompt_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::max_new_tokens)] max_new_tokens: u32,
    ) -> PyResult<Admission> {
        let core = self.live()?;
        let id = self.owner.tenant(tenant, self.default)?;
        let (ids, length) = if prompt_ids.is_instance_of::<PyInt>() {
            (Vec::new(), args::number(prompt_ids, "the prompt's length", 1, u64::from(u32::MAX))? as u32)
        } else {
            let ids = args::tokens(prompt_ids, 0)?;
            let length = ids.len() as u32;
            (ids, length)
        };
        let answer = core.admit(id, &ids, length, max_new_tokens).map_err(|e| self.owner.error(py, &e))?;
        Ok(Admission::new(core, id, &answer))
    }

    /// Open a sequence.
    #[pyo3(signature = (
        tenant, prompt_ids, max_new_tokens = 0, *, share = None, adapter = None, adapter_generation = 0,
        extra_key = None, priority = 0, ttl = None, admit = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn open(
        &self,
        py: Python<'_>,
        tenant: &Bound<'_, PyAny>,
        prompt_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::max_new_tokens)] max_new_tokens: u32,
        #[pyo3(from_py_with = args::share)] share: Option<Vec<(Bound<'_, PyAny>, u32)>>,
        adapter: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::adapter_generation)] adapter_generation: u64,
        extra_key: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::priority)] priority: u8,
        #[pyo3(from_py_with = args::ttl)] ttl: Option<u64>,
        admit: bool,
    ) -> PyResult<Sequence> {
        let core = self.live()?;
        let id = self.owner.tenant(tenant, self.default)?;
        let tokens = args::tokens(prompt_ids, max_new_tokens as usize)?;
        let share = share
            .iter()
            .flatten()
            .map(|(scope, n)| Ok((self.owner.tenant(scope, None)?, *n)))
            .collect::<PyResult<Vec<_>>>()?;
        let adapter = adapter.map(text_or_bytes).transpose()?;
        let extra_key = extra_key.map(text_or_bytes).transpose()?;
        let open = Open {
            tokens,
            max_new_tokens,
            admit,
            share: &share,
            adapter: adapter.as_deref(),
            adapter_generation,
            extra_key: extra_key.as_deref(),
            protection: priority,
            protection_ms: ttl.unwrap_or(0),
        };
        // Hashing a long prompt takes longer than letting go of the interpreter.
        let long = open.tokens.len() > LONG_PROMPT;
        let opened = if long { py.detach(|| core.open(id, open)) } else { core.open(id, open) };
        match opened {
            Ok(sequence) => Ok(Sequence { owner: self.owner.clone(), core: sequence }),
            Err(Error::Refused(refusal)) if admit => Err(errors::admission(py, core, "wait", &refusal)),
            Err(error) => Err(self.owner.error(py, &error)),
        }
    }

    /// A batch: rows that persist between steps, and the arrays that kernels read.
    #[pyo3(signature = (max_sequences, max_tokens, *, max_step_tokens = None))]
    fn batch(
        &self,
        py: Python<'_>,
        max_sequences: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        max_step_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Batch> {
        let core = self.live()?;
        let rows = args::number(max_sequences, "max_sequences", 1, 1 << 20)?;
        let tokens =
            args::number(max_tokens, "max_tokens", 1, u64::from(kvalloc_core::sequence::MAX_TOKENS))?;
        let default = tokens.max(8192) + rows;
        let step = match max_step_tokens {
            Some(value) => args::number(value, "max_step_tokens", rows, 1 << 30)?,
            None => default.min(1 << 30),
        };
        let pages = tokens.div_ceil(u64::from(core.spec().page_tokens()));
        if rows * pages > 1 << 31 {
            return Err(InvalidArgument::new_err(format!(
                "a block table of {rows} rows of {pages} pages; at most 2^31 entries: use fewer rows or shorter ones"
            )));
        }
        let shape =
            Shape { rows: rows as usize, tokens: tokens as u32, pages: pages as usize, step: step as u32 };
        Batch::new(py, &self.owner, shape)
    }

    /// The lower face: pages in batches, for engines with tables of their own.
    #[getter]
    fn pages(&self) -> PyResult<Pages> {
        Ok(Pages::new(&self.owner, self.live()?, self.default))
    }

    /// Pin the published pages of a sequence's first tokens.
    #[pyo3(signature = (sequence, tokens, *, owner, ttl = None, label = None))]
    fn pin(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        #[pyo3(from_py_with = args::tokens_to_pin)] tokens: u32,
        owner: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::ttl)] ttl: Option<u64>,
        label: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pin> {
        let core = self.live()?;
        let owner = self.owner.tenant(owner, None)?;
        let label = label.map(args::text).transpose()?.unwrap_or_default();
        let pin =
            core.pin(&sequence.core, tokens, owner, ttl, &label).map_err(|e| self.owner.error(py, &e))?;
        Ok(Pin::new(&self.owner, core.pins(Some(owner)).into_iter().find(|p| p.id == pin), pin))
    }

    /// The pins, of one owner or of all.
    #[pyo3(signature = (owner = None))]
    fn pins(&self, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Pin>> {
        let core = self.live()?;
        let owner = owner.map(|o| self.owner.tenant(o, None)).transpose()?;
        Ok(core.pins(owner).into_iter().map(|pin| Pin::new(&self.owner, Some(pin.clone()), pin.id)).collect())
    }

    /// Check the books.
    fn audit(&self, py: Python<'_>) -> PyResult<AuditReport> {
        let core = self.live()?;
        Ok(AuditReport::new(py.detach(|| core.audit())))
    }

    /// What happened so far.
    fn stats(&self) -> PyResult<Stats> {
        Ok(Stats::new(self.live()?))
    }

    /// What was published and removed since the last call.
    #[pyo3(signature = (max = 65536))]
    fn events(&self, py: Python<'_>, #[pyo3(from_py_with = args::max)] max: usize) -> PyResult<Events> {
        let core = self.live()?;
        let mut records = Vec::new();
        let drained = core.drain_events(max, &mut records).map_err(|e| self.owner.error(py, &e))?;
        Events::new(py, core, &records, drained)
    }

    /// The weights changed: forget everything that is cached. How many pages became free.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<u64> {
        let core = self.live()?;
        py.detach(|| core.reset_prefix_cache()).map_err(|e| self.owner.error(py, &e))
    }

    /// Move a manual clock on, by seconds; the time it shows then.
    fn advance(&self, py: Python<'_>, seconds: &Bound<'_, PyAny>) -> PyResult<f64> {
        let core = self.live()?;
        let ms = args::seconds(seconds, "seconds")?;
        core.advance(ms).map(|now| now as f64 / 1000.0).map_err(|e| self.owner.error(py, &e))
    }

    /// Refuse everything from now on. Handles that exist give back what they hold when they are closed.
    fn close(&self) {
        self.owner.core.close();
    }

    #[getter]
    fn closed(&self) -> bool {
        self.owner.core.is_closed()
    }

    #[getter]
    fn spec(&self, py: Python<'_>) -> Py<PyAny> {
        self.spec.clone_ref(py)
    }

    /// Bytes of the device arena that can be given out.
    #[getter]
    fn capacity(&self) -> PyResult<u64> {
        Ok(self.live()?.room_in(Tier::Device).0)
    }

    /// Bytes that are in no page.
    #[getter]
    fn free(&self) -> PyResult<u64> {
        Ok(self.live()?.room_in(Tier::Device).1)
    }

    #[getter]
    fn held(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.held.0))
    }

    #[getter]
    fn cached(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.cached.0))
    }

    #[getter]
    fn pinned(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.pinned.0))
    }

    #[getter]
    fn promised(&self) -> PyResult<u64> {
        Ok(tenant::sum(self.live()?, |u| u.promised.0))
    }

    /// Bytes of the books for each page; the tokens kept for comparison not counted.
    #[getter]
    fn metadata_bytes_per_page(&self) -> PyResult<f64> {
        let core = self.live()?;
        Ok(core.metadata_bytes() as f64 / f64::from(core.max_pages()))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) {
        self.close();
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Ok(core) = self.live() else { return Ok("<kvalloc.Pool of the parent process>".into()) };
        if core.is_closed() {
            return Ok("<kvalloc.Pool, closed>".into());
        }
        let (capacity, free) = core.room_in(Tier::Device);
        let format = py.import("kvalloc.sizes")?.getattr("format_bytes")?;
        Ok(format!(
            "<kvalloc.Pool {} free of {}, {} tenants>",
            format.call1((free,))?,
            format.call1((capacity,))?,
            core.ledger().len()
        ))
    }
}

/// Prompts longer than this are looked up without holding the interpreter.
const LONG_PROMPT: usize = 4096;

fn text_or_bytes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = value.cast::<PyString>() {
        return args::text(text).map(String::into_bytes);
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(bytes.as_bytes().to_vec());
    }
    Err(InvalidArgument::new_err(format!("keys are text or bytes, not {}", args::shown(value))))
}

//! `kvalloc.Pool`.

use std::sync::Arc;

use kvalloc_core::{
    arrays::Shape,
    error::Error,
    hash::Secret,
    pool::{Options, Pool as Core},
    sequence::Open,
    spec::Spec as CoreSpec,
    word::{TenantId, Tier},
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    args::{self, Given, milliseconds, text_or_bytes},
    batch::Batch,
    books::{Admission, AuditReport},
    errors::{self, InvalidArgument},
    events::Events,
    owner::Owner,
    pages::Pages,
    pin::Pin,
    sequence::Sequence,
    spec::Spec,
    stats::Stats,
    tenant::{self, Changes, Tenant},
};

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

    /// Pairs of a scope and a number of tokens.
    fn share(&self, pairs: &Bound<'_, PyAny>) -> PyResult<Vec<(TenantId, u32)>> {
        let wrong = || {
            InvalidArgument::new_err(format!(
                "share is a list of (scope, tokens), one after the other from the prompt's start, not {}",
                args::shown(pairs)
            ))
        };
        pairs
            .try_iter()
            .map_err(|_| wrong())?
            .map(|pair| {
                let pair = pair?;
                let (scope, tokens): (Bound<'_, PyAny>, Bound<'_, PyAny>) =
                    pair.extract().map_err(|_| wrong())?;
                let tokens = args::number(&tokens, "the tokens of a share", 0, u64::from(u32::MAX))?;
                Ok((self.owner.tenant(&scope, None)?, tokens as u32))
            })
            .collect()
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
        default_tenant: Option<&str>,
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
        let owner = Owner::new(core);
        let default = default_tenant
            .map(|name| owner.core.ledger().create(kvalloc_core::ledger::ROOT, name, &Default::default()))
            .transpose()
            .map_err(|e| errors::TenantError::new_err(e.to_string()))?;
        if events > 0 {
            owner.core.turn_events(true);
        }
        Ok(Self { owner, spec: spec.clone().unbind(), default })
    }

    /// Make a tenant, or change what is given of one that exists.
    #[pyo3(signature = (
        name, *, reserve = Given(None), limit = Given(None), weight = Given(None), priority = Given(None),
        parent = Given(None), publish = Given(None), pin_budget = Given(None), lend = Given(None)
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn tenant(
        &self,
        name: &str,
        reserve: Given<'_>,
        limit: Given<'_>,
        weight: Given<'_>,
        priority: Given<'_>,
        parent: Given<'_>,
        publish: Given<'_>,
        pin_budget: Given<'_>,
        lend: Given<'_>,
    ) -> PyResult<Tenant> {
        let owner = self.live().map(|_| &self.owner)?;
        let changes = Changes { reserve, limit, weight, priority, parent, publish, pin_budget, lend };
        tenant::create(owner, name, &changes)
    }

    /// Take a tenant out of the tree; its cached pages become free. How many did.
    fn remove_tenant(&self, py: Python<'_>, tenant: &Bound<'_, PyAny>) -> PyResult<u64> {
        let core = self.live()?;
        let id = self.owner.tenant(tenant, None)?;
        core.remove_tenant(id).map_err(|e| self.owner.error(py, &e))
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
        let (ids, length) = if args::is_number(prompt_ids)? {
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
        share: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::adapter_generation)] adapter_generation: u64,
        extra_key: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::priority)] priority: u8,
        ttl: Option<f64>,
        admit: bool,
    ) -> PyResult<Sequence> {
        let core = self.live()?;
        let id = self.owner.tenant(tenant, self.default)?;
        let tokens = args::tokens(prompt_ids, max_new_tokens as usize)?;
        let share = share.map_or(Ok(Vec::new()), |share| self.share(share))?;
        let ttl = milliseconds("ttl", ttl)?;
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
    #[pyo3(signature = (sequence, tokens, *, owner, ttl = None, label = ""))]
    fn pin(
        &self,
        py: Python<'_>,
        sequence: &Sequence,
        #[pyo3(from_py_with = args::tokens_to_pin)] tokens: u32,
        owner: &Bound<'_, PyAny>,
        ttl: Option<f64>,
        label: &str,
    ) -> PyResult<Pin> {
        let core = self.live()?;
        let owner = self.owner.tenant(owner, None)?;
        let pin = core
            .pin(&sequence.core, tokens, owner, milliseconds("ttl", ttl)?, label)
            .map_err(|e| self.owner.error(py, &e))?;
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
    fn advance(&self, py: Python<'_>, seconds: f64) -> PyResult<f64> {
        let core = self.live()?;
        let ms = milliseconds("seconds", Some(seconds))?.unwrap_or(0);
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
        let core = &self.owner.core;
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

//! What the books tell: admissions, audits, counters, events, pins.

use std::collections::BTreeMap;

use kvalloc_core::{
    admit::{Admission as CoreAdmission, Verdict},
    audit::{Balance as CoreBalance, Report},
    error::{Error, Refusal},
    event::{Drained, Event, Record},
    ledger::{LedgerError, ROOT},
    pins::{Pin as CorePin, PinId},
    pool::Pool as Core,
    stats::Counter,
    word::{TenantId, Tier},
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyInt, PyList},
};

use crate::{
    args,
    errors::{name_of, sentence, why},
    pool::Owner,
};

/// The ledger's errors in names and bytes.
pub(crate) fn in_bytes(core: &Core, error: &LedgerError) -> String {
    let bytes = |units| core.bytes_of(units);
    match *error {
        LedgerError::LimitBelowReserve { limit, reserve, .. } => format!(
            "a limit of {} bytes is below the tenant's own reserve of {}: lower the reserve first",
            bytes(limit),
            bytes(reserve)
        ),
        LedgerError::LimitBelowReserves { limit, reserves, .. } => format!(
            "a limit of {} bytes is below the {} that its children have reserved",
            bytes(limit),
            bytes(reserves)
        ),
        LedgerError::Reserve { asked, level, short, .. } => format!(
            "a reserve of {} bytes does not fit: {} has {} too few beside what is held and reserved",
            bytes(asked),
            name_of(core, level),
            bytes(short)
        ),
        LedgerError::Unknown { tenant } => format!("there is no tenant {}", name_of(core, tenant)),
        LedgerError::Scope { scope } => {
            format!(
                "a tenant publishes into itself and the tenants above it; {:?} is neither",
                name_of(core, scope)
            )
        }
        ref other => other.to_string(),
    }
}

/// The answer to "may this start now?".
#[pyclass(frozen, get_all, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Admission {
    /// "now", "wait" or "never".
    verdict: &'static str,
    /// Bytes it needs beyond what is held for its prompt already.
    bytes: u64,
    /// Bytes there are now; for "never": that there can ever be.
    room: u64,
    /// "limit" or "claim".
    why: &'static str,
    /// The tenant whose limit is in the way; None: the pool, or nothing.
    behind: Option<String>,
    /// The answer as a sentence.
    reason: String,
}

impl Admission {
    pub(crate) fn new(core: &Core, tenant: TenantId, answer: &CoreAdmission) -> Self {
        let CoreAdmission { need, room, .. } = *answer;
        let refusal =
            Refusal { why: answer.why, tier: Tier::Device, tenant, level: answer.behind, asked: need, room };
        let (verdict, reason) = match answer.verdict {
            Verdict::Now => ("now", format!("{need} bytes fit into {room}")),
            Verdict::Wait => ("wait", sentence(core, &refusal)),
            Verdict::Never => (
                "never",
                format!(
                    "{need} bytes are needed, and {} can never have more than {room}",
                    name_of(core, tenant)
                ),
            ),
        };
        let behind =
            (answer.verdict != Verdict::Now && answer.behind != ROOT).then(|| name_of(core, answer.behind));
        Self { verdict, bytes: need, room, why: why(answer.why), behind, reason }
    }
}

#[pymethods]
impl Admission {
    fn __bool__(&self) -> bool {
        self.verdict == "now"
    }

    fn __repr__(&self) -> String {
        format!("<kvalloc.Admission {}: {}>", self.verdict, self.reason)
    }
}

/// One tier's bytes at one moment.
#[pyclass(frozen, get_all, module = "kvalloc")]
#[derive(Clone, Debug)]
pub(crate) struct Balance {
    capacity: u64,
    free: u64,
    held: u64,
    cached: u64,
    pinned: u64,
    in_flight: u64,
}

impl Balance {
    fn new(balance: &CoreBalance) -> Self {
        let CoreBalance { capacity, free, held, cached, pinned, in_flight } = *balance;
        Self { capacity, free, held, cached, pinned, in_flight }
    }
}

#[pymethods]
impl Balance {
    fn __repr__(&self) -> String {
        let Self { capacity, free, held, cached, pinned, in_flight } = self;
        format!(
            "Balance(capacity={capacity}, free={free}, held={held}, cached={cached}, pinned={pinned}, in_flight={in_flight})"
        )
    }
}

/// What an audit found. True if the books balance.
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct AuditReport {
    report: Report,
}

impl AuditReport {
    pub(crate) fn new(report: Report) -> Self {
        Self { report }
    }
}

#[pymethods]
impl AuditReport {
    /// No rule is broken.
    #[getter]
    fn ok(&self) -> bool {
        self.report.findings.is_empty()
    }

    /// The books stood still while they were read, so that the sums mean something.
    #[getter]
    fn exact(&self) -> bool {
        self.report.exact
    }

    /// The device's bytes.
    #[getter]
    fn device(&self) -> Balance {
        Balance::new(&self.report.balance[Tier::Device.as_usize()])
    }

    /// The host's bytes.
    #[getter]
    fn host(&self) -> Balance {
        Balance::new(&self.report.balance[Tier::Host.as_usize()])
    }

    /// Pages that are not free.
    #[getter]
    fn pages(&self) -> u32 {
        self.report.pages
    }

    /// Broken rules, each with the page's number where it is one page's: (page or None, text).
    #[getter]
    fn findings(&self) -> Vec<(Option<u32>, String)> {
        self.report.findings.iter().map(|f| (f.page.map(|p| p.0), f.text.clone())).collect()
    }

    fn __bool__(&self) -> bool {
        self.ok()
    }

    fn __repr__(&self) -> String {
        let Report { exact, pages, findings, .. } = &self.report;
        let first = findings.first().map(|f| format!(", first: {}", f.text)).unwrap_or_default();
        let under_load = if *exact { "" } else { ", under load" };
        format!("<kvalloc.AuditReport {} finding(s) in {pages} pages{under_load}{first}>", findings.len())
    }
}

/// Counters of what happened: a mapping from name to count, and a few rates.
#[pyclass(frozen, mapping, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Stats {
    counts: BTreeMap<&'static str, u64>,
    hit_rate: Option<f64>,
}

impl Stats {
    pub(crate) fn new(core: &Core) -> Self {
        let snapshot = core.stats();
        let counts = snapshot.iter().map(|(counter, value)| (counter.name(), value)).collect();
        Self { counts, hit_rate: snapshot.hit_rate() }
    }
}

#[pymethods]
impl Stats {
    /// Tokens found of tokens looked up; None before the first lookup.
    #[getter]
    fn hit_rate(&self) -> Option<f64> {
        self.hit_rate
    }

    /// Evictions for anybody.
    #[getter]
    fn evictions(&self) -> u64 {
        [Counter::EvictedOwn, Counter::EvictedForeign].iter().filter_map(|c| self.counts.get(c.name())).sum()
    }

    /// Each counter's unit and meaning.
    #[staticmethod]
    fn describe(py: Python<'_>) -> PyResult<Py<PyDict>> {
        let dict = PyDict::new(py);
        for counter in Counter::ALL {
            dict.set_item(counter.name(), (counter.unit().name(), counter.help()))?;
        }
        Ok(dict.unbind())
    }

    fn as_dict(&self) -> BTreeMap<&'static str, u64> {
        self.counts.clone()
    }

    fn keys(&self) -> Vec<&'static str> {
        self.counts.keys().copied().collect()
    }

    fn __getitem__(&self, #[pyo3(from_py_with = args::text)] name: String) -> PyResult<u64> {
        self.counts.get(name.as_str()).copied().ok_or_else(|| {
            pyo3::exceptions::PyKeyError::new_err(format!("{name:?}; known are {:?}", self.keys()))
        })
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyList::new(py, self.counts.keys())?.try_iter()?.into_any())
    }

    fn __len__(&self) -> usize {
        self.counts.len()
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        args::text(name).is_ok_and(|name| self.counts.contains_key(name.as_str()))
    }

    fn __repr__(&self) -> String {
        let shown: Vec<_> =
            self.counts.iter().filter(|c| *c.1 > 0).map(|(k, v)| format!("{k}={v}")).collect();
        format!("<kvalloc.Stats {}>", shown.join(" "))
    }
}

/// Events since the last call: a list, and how many were lost on the way.
#[pyclass(frozen, sequence, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Events {
    events: Vec<Py<PyDict>>,
    lost: u64,
    next: u64,
}

impl Events {
    pub(crate) fn new(py: Python<'_>, core: &Core, records: &[Record], drained: Drained) -> PyResult<Self> {
        let events = records.iter().map(|record| as_dict(py, core, record)).collect::<PyResult<_>>()?;
        Ok(Self { events, lost: drained.lost, next: drained.next })
    }
}

fn as_dict(py: Python<'_>, core: &Core, record: &Record) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("sequence", record.sequence)?;
    let tier = |tier: Tier| match tier {
        Tier::Device => "device",
        Tier::Host => "host",
    };
    match record.event {
        Event::Stored { key, parent, page, group, tenant, tokens, tier: at } => {
            dict.set_item("type", "stored")?;
            dict.set_item("key", key)?;
            dict.set_item("parent", parent)?;
            dict.set_item("page", page.to_bits())?;
            dict.set_item("group", group.0)?;
            dict.set_item("scope", name_of(core, tenant))?;
            dict.set_item("tokens", tokens)?;
            dict.set_item("tier", tier(at))?;
        }
        Event::Removed { key, group, tenant, tier: at } => {
            dict.set_item("type", "removed")?;
            dict.set_item("key", key)?;
            dict.set_item("group", group.0)?;
            dict.set_item("scope", name_of(core, tenant))?;
            dict.set_item("tier", tier(at))?;
        }
        Event::Cleared => dict.set_item("type", "cleared")?,
    }
    Ok(dict.unbind())
}

#[pymethods]
impl Events {
    /// Events that nobody will get, because the ring was full.
    #[getter]
    fn lost(&self) -> u64 {
        self.lost
    }

    /// The number of the next event.
    #[getter]
    fn next(&self) -> u64 {
        self.next
    }

    fn __len__(&self) -> usize {
        self.events.len()
    }

    fn __getitem__(&self, py: Python<'_>, at: &Bound<'_, PyAny>) -> PyResult<Py<PyDict>> {
        // What does not fit is outside.
        let at = match at.cast::<PyInt>() {
            Ok(at) => at.extract().unwrap_or(i128::MAX),
            Err(_) => at.extract::<isize>()? as i128,
        };
        let from_start = if at < 0 { at + self.events.len() as i128 } else { at };
        let event = usize::try_from(from_start).ok().and_then(|at| self.events.get(at));
        let event = event.map(|e| e.clone_ref(py));
        event.ok_or_else(|| {
            pyo3::exceptions::PyIndexError::new_err(format!("event {at} of {}", self.events.len()))
        })
    }

    fn __repr__(&self) -> String {
        format!("<kvalloc.Events {} events, {} lost>", self.events.len(), self.lost)
    }
}

/// A pin: pages kept for their owner until it ends.
#[pyclass(frozen, module = "kvalloc")]
#[derive(Debug)]
pub(crate) struct Pin {
    owner: Owner,
    id: PinId,
    pin: Option<CorePin>,
}

impl Pin {
    pub(crate) fn new(owner: &Owner, pin: Option<CorePin>, id: PinId) -> Self {
        Self { owner: owner.clone(), id, pin }
    }
}

#[pymethods]
impl Pin {
    #[getter]
    fn owner(&self) -> Option<String> {
        self.pin.as_ref().map(|p| name_of(&self.owner.core, p.owner))
    }

    #[getter]
    fn label(&self) -> Option<&str> {
        self.pin.as_ref().map(|p| p.label.as_str())
    }

    /// How many pages it keeps.
    #[getter]
    fn pages(&self) -> usize {
        self.pin.as_ref().map_or(0, |p| p.pages.len())
    }

    /// Bytes it counts against its owner's budget.
    #[getter]
    fn bytes(&self) -> u64 {
        self.pin.as_ref().map_or(0, |p| self.owner.core.bytes_of(p.units))
    }

    /// When it ends, in seconds of the pool's clock; None: when it is unpinned.
    #[getter]
    fn expires(&self) -> Option<f64> {
        self.pin.as_ref().and_then(|p| p.expires_at_ms).map(|ms| ms as f64 / 1000.0)
    }

    /// End it. A second time, or after it expired, is a `PinError`, and changes nothing.
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

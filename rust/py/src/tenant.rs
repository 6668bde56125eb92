//! `kvalloc.Tenant` and `kvalloc.Usage`.

use kvalloc_core::{
    ledger::{Policy, ROOT, Usage as CoreUsage},
    pool::Pool as Core,
    word::{TenantId, Tier, Units},
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyString},
};

use crate::{
    args,
    errors::{InvalidArgument, TenantError, name_of},
    pool::Owner,
};

/// A node of the tenant tree.
#[pyclass(frozen, eq, hash, module = "kvalloc")]
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) owner: Owner,
    pub(crate) id: TenantId,
    pub(crate) name: String,
}

impl PartialEq for Tenant {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && std::sync::Arc::ptr_eq(&self.owner.core, &other.owner.core)
    }
}

impl std::hash::Hash for Tenant {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.id.hash(state);
        std::sync::Arc::as_ptr(&self.owner.core).hash(state);
    }
}

const POLICY: [&str; 8] =
    ["reserve", "limit", "weight", "priority", "parent", "publish", "pin_budget", "lend"];

/// Units of so many bytes: reserves and budgets round up, limits down.
fn units(core: &Core, value: &Bound<'_, PyAny>, name: &str, up: bool) -> PyResult<Units> {
    let bytes = args::bytes(value)?;
    let unit = core.spec().unit();
    let units = if up { bytes.div_ceil(unit) } else { bytes / unit };
    // What is beyond the largest pool is no bound.
    match u32::try_from(units) {
        Ok(units) => Ok(Units(units)),
        Err(_) if !up => Ok(Units(u32::MAX)),
        Err(_) => Err(TenantError::new_err(format!(
            "{name} is {bytes} bytes, more than any pool of this spec can have"
        ))),
    }
}

/// Change what `changes` names.
fn apply(owner: &Owner, policy: &mut Policy, changes: &Bound<'_, PyDict>) -> PyResult<()> {
    let core = &owner.core;
    let device = Tier::Device.as_usize();
    for (key, value) in changes {
        let key = key.cast::<PyString>()?.to_string();
        match key.as_str() {
            "reserve" => policy.reserve[device] = units(core, &value, "reserve", true)?,
            "limit" if value.is_none() => policy.limit[device] = None,
            "limit" => policy.limit[device] = Some(units(core, &value, "limit", false)?),
            "weight" => policy.weight = args::number(&value, "weight", 1, 1 << 16)? as u32,
            "priority" => policy.priority = args::number(&value, "priority", 0, 100)? as u8,
            "pin_budget" => policy.pin_budget = units(core, &value, "pin_budget", false)?,
            "lend" => policy.lend = value.extract()?,
            "publish" => policy.publish = publish(owner, &value)?,
            "parent" => {}
            other => {
                return Err(InvalidArgument::new_err(format!(
                    "{other} is no part of a policy; those are {POLICY:?}"
                )));
            }
        }
    }
    Ok(())
}

/// The scopes a tenant may publish into: a list of them, or a dict with the most bytes charged there.
fn publish(owner: &Owner, value: &Bound<'_, PyAny>) -> PyResult<Vec<(TenantId, Option<Units>)>> {
    if let Ok(dict) = value.cast::<PyDict>() {
        return dict
            .iter()
            .map(|(scope, most)| {
                let most =
                    if most.is_none() { None } else { Some(units(&owner.core, &most, "publish", false)?) };
                Ok((owner.tenant(&scope, None)?, most))
            })
            .collect();
    }
    if value.is_instance_of::<PyString>() {
        return Err(InvalidArgument::new_err("publish is a list of scopes, or a dict of scopes and bytes"));
    }
    value.try_iter()?.map(|scope| Ok((owner.tenant(&scope?, None)?, None))).collect()
}

/// Make a tenant, or change one that exists.
pub(crate) fn create(owner: &Owner, name: &str, changes: Option<&Bound<'_, PyDict>>) -> PyResult<Tenant> {
    let ledger = owner.core.ledger();
    owner.core.check_open().map_err(|e| crate::errors::ClosedError::new_err(e.to_string()))?;
    let parent = match changes.map(|c| c.get_item("parent")).transpose()?.flatten() {
        Some(parent) if !parent.is_none() => Some(owner.tenant(&parent, None)?),
        _ => None,
    };
    if let Some(id) = ledger.find(name) {
        if let Some(parent) = parent
            && ledger.parent(id) != Some(parent)
        {
            return Err(TenantError::new_err(format!(
                "{name:?} stands below {:?}; a tenant can't move to {:?}",
                ledger.parent(id).map(|p| name_of(&owner.core, p)).unwrap_or_default(),
                name_of(&owner.core, parent)
            )));
        }
        if let Some(changes) = changes {
            change(owner, id, changes)?;
        }
        return Ok(Tenant { owner: owner.clone(), id, name: name.to_owned() });
    }
    let mut policy = Policy::default();
    if let Some(changes) = changes {
        apply(owner, &mut policy, changes)?;
    }
    let id = ledger
        .create(parent.unwrap_or(ROOT), name, &policy)
        .map_err(|e| TenantError::new_err(crate::books::in_bytes(&owner.core, &e)))?;
    Ok(Tenant { owner: owner.clone(), id, name: name.to_owned() })
}

fn change(owner: &Owner, id: TenantId, changes: &Bound<'_, PyDict>) -> PyResult<()> {
    let ledger = owner.core.ledger();
    let mut policy = ledger.policy(id).unwrap_or_default();
    apply(owner, &mut policy, changes)?;
    ledger.set_policy(id, &policy).map_err(|e| TenantError::new_err(crate::books::in_bytes(&owner.core, &e)))
}

/// The sum over all tenants of a figure in units, as bytes.
pub(crate) fn sum(core: &Core, figure: impl Fn(&CoreUsage) -> u32) -> u64 {
    let units: u64 = std::iter::once(ROOT)
        .chain(core.ledger().ids())
        .map(|t| u64::from(figure(&core.ledger().usage(Tier::Device, t))))
        .sum();
    units * core.spec().unit()
}

impl Tenant {
    pub(crate) fn of(owner: &Owner, id: TenantId) -> Option<Self> {
        Some(Self { owner: owner.clone(), id, name: owner.core.ledger().name(id)? })
    }

    fn figure(&self, figure: impl Fn(&CoreUsage) -> Units) -> PyResult<u64> {
        let core = self.owner.live()?;
        Ok(core.bytes_of(figure(&core.ledger().usage(Tier::Device, self.id))))
    }

    fn policy(&self) -> PyResult<Policy> {
        Ok(self.owner.live()?.ledger().policy(self.id).unwrap_or_default())
    }
}

#[pymethods]
impl Tenant {
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn parent(&self) -> PyResult<Option<Self>> {
        let ledger = self.owner.live()?.ledger();
        Ok(ledger.parent(self.id).filter(|&p| p != ROOT).and_then(|p| Self::of(&self.owner, p)))
    }

    /// Bytes of its own pages with references.
    #[getter]
    fn held(&self) -> PyResult<u64> {
        self.figure(|u| u.held)
    }

    /// Bytes of its own published pages without references: free to take.
    #[getter]
    fn cached(&self) -> PyResult<u64> {
        self.figure(|u| u.cached)
    }

    /// Bytes of its own pages that only a pin keeps.
    #[getter]
    fn pinned(&self) -> PyResult<u64> {
        self.figure(|u| u.pinned)
    }

    /// Bytes reserved for its admitted sequences and not in use yet.
    #[getter]
    fn promised(&self) -> PyResult<u64> {
        self.figure(|u| u.promised)
    }

    #[getter]
    fn reserve(&self) -> PyResult<u64> {
        self.figure(|u| u.reserve)
    }

    /// None: no limit but the pool.
    #[getter]
    fn limit(&self) -> PyResult<Option<u64>> {
        let core = self.owner.live()?;
        Ok(self.policy()?.limit[0].map(|limit| core.bytes_of(limit)))
    }

    #[getter]
    fn weight(&self) -> PyResult<u32> {
        Ok(self.policy()?.weight)
    }

    #[getter]
    fn priority(&self) -> PyResult<u8> {
        Ok(self.policy()?.priority)
    }

    #[getter]
    fn pin_budget(&self) -> PyResult<u64> {
        Ok(self.owner.live()?.bytes_of(self.policy()?.pin_budget))
    }

    #[getter]
    fn lend(&self) -> PyResult<bool> {
        Ok(self.policy()?.lend)
    }

    /// Scopes it may publish into, and the most bytes charged there (None: no bound).
    #[getter]
    fn publish(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let core = self.owner.live()?;
        let dict = PyDict::new(py);
        for (scope, most) in self.policy()?.publish {
            dict.set_item(name_of(core, scope), most.map(|m| core.bytes_of(m)))?;
        }
        Ok(dict.unbind())
    }

    /// Change what is given; the rest stays.
    #[pyo3(signature = (**policy))]
    fn set(&self, policy: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
        self.owner.live()?;
        let Some(policy) = policy else { return Ok(()) };
        if policy.contains("parent")? {
            return Err(TenantError::new_err("a tenant can't move to another parent"));
        }
        change(&self.owner, self.id, policy)
    }

    /// All figures at one moment.
    #[pyo3(signature = (*, subtree = false))]
    fn usage(&self, subtree: bool) -> PyResult<Usage> {
        let core = self.owner.live()?;
        let ledger = core.ledger();
        let usage = match subtree {
            true => ledger.subtree_usage(Tier::Device, self.id),
            false => ledger.usage(Tier::Device, self.id),
        };
        Ok(Usage::new(core, &usage))
    }

    fn stats(&self) -> PyResult<std::collections::BTreeMap<&'static str, u64>> {
        let stats = self.owner.live()?.tenant_stats(self.id);
        Ok(stats.iter().map(|(counter, value)| (counter.name(), value)).collect())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.owner.live().is_err() {
            return Ok(format!("<kvalloc.Tenant {:?} of the parent process>", self.name));
        }
        let format = py.import("kvalloc.sizes")?.getattr("format_bytes")?;
        let show = |bytes: u64| format.call1((bytes,))?.extract::<String>();
        let limit = self.limit()?.map_or(Ok("none".to_owned()), show)?;
        Ok(format!(
            "<kvalloc.Tenant {:?} held={} cached={} reserve={} limit={limit}>",
            self.name,
            show(self.held()?)?,
            show(self.cached()?)?,
            show(self.reserve()?)?,
        ))
    }
}

/// What a tenant has, at one moment, in bytes.
#[pyclass(frozen, eq, get_all, module = "kvalloc")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Usage {
    held: u64,
    cached: u64,
    pinned: u64,
    promised: u64,
    stock: u64,
    charged: u64,
    claim: u64,
    reserve: u64,
    limit: Option<u64>,
}

impl Usage {
    fn new(core: &Core, usage: &CoreUsage) -> Self {
        let bytes = |units| core.bytes_of(units);
        Self {
            held: bytes(usage.held),
            cached: bytes(usage.cached),
            pinned: bytes(usage.pinned),
            promised: bytes(usage.promised),
            stock: bytes(usage.stock),
            charged: bytes(usage.charged),
            claim: bytes(usage.claim),
            reserve: bytes(usage.reserve),
            limit: usage.limit.map(bytes),
        }
    }
}

#[pymethods]
impl Usage {
    fn __repr__(&self) -> String {
        let Self { held, cached, pinned, promised, charged, .. } = self;
        format!(
            "Usage(held={held}, cached={cached}, pinned={pinned}, promised={promised}, charged={charged})"
        )
    }
}

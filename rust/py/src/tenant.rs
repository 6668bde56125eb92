//! `kvalloc.Tenant` and `kvalloc.Usage`.

use std::num::NonZeroU32;

use kvalloc_core::{
    error::Bytes,
    ledger::{MAX_NAME, Policy, ROOT, Usage as CoreUsage},
    pool::Pool as Core,
    word::{TenantId, Tier, Units},
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyString},
};

use crate::{
    args::{self, Given},
    errors::{InvalidArgument, TenantError, UnknownTenant, name_of},
    owner::Owner,
};

/// A node of the tenant tree. Made by `Pool.tenant`.
///
/// Handles of one tenant are equal, and may be used from any number of threads. All sizes are bytes on the device, but for those
/// that begin with ``host``.
///
/// Examples
/// --------
/// >>> pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=4, kv_heads=2, head_dim=64), "64MiB")
/// >>> acme = pool.tenant("acme", reserve="16MiB")
/// >>> acme
/// <kvalloc.Tenant "acme" held=0 B cached=0 B reserve=16 MiB limit=none>
/// >>> acme.set(limit="32MiB", weight=2)
/// >>> acme.limit, acme.usage().charged
/// (33554432, 0)
#[pyclass(frozen, eq, hash, module = "kvalloc")]
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) owner: Owner,
    pub(crate) id: TenantId,
    pub(crate) name: String,
}

impl PartialEq for Tenant {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
            && self.name == other.name
            && std::sync::Arc::ptr_eq(&self.owner.core, &other.owner.core)
    }
}

impl std::hash::Hash for Tenant {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.id.hash(state);
        std::sync::Arc::as_ptr(&self.owner.core).hash(state);
    }
}

/// What a call says of a policy.
#[derive(Debug)]
pub(crate) struct Changes<'py> {
    pub(crate) reserve: Given<'py>,
    pub(crate) limit: Given<'py>,
    pub(crate) host_limit: Given<'py>,
    pub(crate) weight: Given<'py>,
    pub(crate) priority: Given<'py>,
    pub(crate) parent: Given<'py>,
    pub(crate) publish: Given<'py>,
    pub(crate) pin_budget: Given<'py>,
    pub(crate) lend: Given<'py>,
    pub(crate) compress: Given<'py>,
    pub(crate) cut: Given<'py>,
}

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
            "{name} is {}, more than any pool of this spec can have",
            Bytes(bytes)
        ))),
    }
}

/// Change what is given.
fn apply(owner: &Owner, policy: &mut Policy, changes: &Changes<'_>) -> PyResult<()> {
    let core = &owner.core;
    let [device, host] = Tier::ALL.map(Tier::as_usize);
    if let Given(Some(value)) = &changes.reserve {
        policy.reserve[device] = units(core, value, "reserve", true)?;
    }
    for (tier, name, given) in [(device, "limit", &changes.limit), (host, "host_limit", &changes.host_limit)]
    {
        if let Given(Some(value)) = given {
            policy.limit[tier] = if value.is_none() { None } else { Some(units(core, value, name, false)?) };
        }
    }
    if let Given(Some(value)) = &changes.weight {
        policy.weight = args::number(value, "weight", 1, 1 << 16)? as u32;
    }
    if let Given(Some(value)) = &changes.priority {
        policy.priority = args::priority(value)?;
    }
    if let Given(Some(value)) = &changes.pin_budget {
        policy.pin_budget = units(core, value, "pin_budget", false)?;
    }
    if let Given(Some(value)) = &changes.lend {
        policy.lend = args::flag(value, "lend")?;
    }
    if let Given(Some(value)) = &changes.compress {
        policy.compress = args::flag(value, "compress")?;
    }
    if let Given(Some(value)) = &changes.cut {
        policy.cut = if value.is_none() {
            None
        } else {
            NonZeroU32::new(args::number(value, "cut", 1, u32::MAX.into())? as u32)
        };
    }
    if let Given(Some(value)) = &changes.publish {
        policy.publish = publish(owner, value)?;
    }
    Ok(())
}

/// The parent that is asked for; None: none is named.
fn parent(owner: &Owner, changes: &Changes<'_>) -> PyResult<Option<TenantId>> {
    match &changes.parent {
        Given(Some(parent)) if !parent.is_none() => owner.tenant(parent, None).map(Some),
        _ => Ok(None),
    }
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
    let scopes = value.try_iter().map_err(|_| {
        InvalidArgument::new_err(format!(
            "publish is a list of scopes, or a dict of scopes and bytes, not {}",
            args::shown(value)
        ))
    })?;
    args::collected(scopes, "publish", args::MOST_SCOPES, |_, scope| Ok((owner.tenant(&scope, None)?, None)))
}

/// A name of a megabyte is not worth its echo.
pub(crate) fn check_length(name: &str) -> PyResult<()> {
    if name.len() <= MAX_NAME {
        return Ok(());
    }
    let start: String = name.chars().take(40).collect();
    Err(TenantError::new_err(format!(
        "{start:?}... can't name a tenant: it is longer than {MAX_NAME} bytes ({})",
        name.len()
    )))
}

/// Make a tenant, or change one that exists.
pub(crate) fn create(owner: &Owner, name: &str, changes: &Changes<'_>) -> PyResult<Tenant> {
    let ledger = owner.core.ledger();
    owner.core.check_open().map_err(|e| crate::errors::ClosedError::new_err(e.to_string()))?;
    if let Some(id) = ledger.find(name) {
        change(owner, id, changes)?;
        return Ok(Tenant { owner: owner.clone(), id, name: name.to_owned() });
    }
    check_length(name)?;
    let parent = parent(owner, changes)?.unwrap_or(ROOT);
    let mut policy = Policy::default();
    apply(owner, &mut policy, changes)?;
    let id = ledger
        .create(parent, name, &policy)
        .map_err(|e| TenantError::new_err(crate::books::in_bytes(&owner.core, &e)))?;
    Ok(Tenant { owner: owner.clone(), id, name: name.to_owned() })
}

fn change(owner: &Owner, id: TenantId, changes: &Changes<'_>) -> PyResult<()> {
    let ledger = owner.core.ledger();
    if let Some(parent) = parent(owner, changes)?
        && ledger.parent(id) != Some(parent)
    {
        return Err(TenantError::new_err(format!(
            "{:?} stands below {:?}; a tenant can't move to {:?}",
            name_of(&owner.core, id),
            ledger.parent(id).map(|p| name_of(&owner.core, p)).unwrap_or_default(),
            name_of(&owner.core, parent)
        )));
    }
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

    /// The books, if the tenant is still in them: its number may be another's by now.
    pub(crate) fn live(&self) -> PyResult<&std::sync::Arc<Core>> {
        let core = self.owner.live()?;
        if core.ledger().name(self.id).as_ref() == Some(&self.name) {
            Ok(core)
        } else {
            Err(UnknownTenant::new_err(format!(
                "tenant {:?} was removed; make it again with pool.tenant(...)",
                self.name
            )))
        }
    }

    fn figure(&self, figure: impl Fn(&CoreUsage) -> Units) -> PyResult<u64> {
        let core = self.live()?;
        Ok(core.bytes_of(figure(&core.ledger().usage(Tier::Device, self.id))))
    }

    fn policy(&self) -> PyResult<Policy> {
        Ok(self.live()?.ledger().policy(self.id).unwrap_or_default())
    }
}

#[pymethods]
impl Tenant {
    /// str : Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Tenant or None : The tenant above it; None: it stands below the root.
    #[getter]
    fn parent(&self) -> PyResult<Option<Self>> {
        let ledger = self.live()?.ledger();
        Ok(ledger.parent(self.id).filter(|&p| p != ROOT).and_then(|p| Self::of(&self.owner, p)))
    }

    /// int : Bytes of its own pages with references. Its children's are not among them.
    #[getter]
    fn held(&self) -> PyResult<u64> {
        self.figure(|u| u.held)
    }

    /// int : Bytes of its own published pages without references: free to take.
    #[getter]
    fn cached(&self) -> PyResult<u64> {
        self.figure(|u| u.cached)
    }

    /// int : Bytes of its own pages that only a pin keeps.
    #[getter]
    fn pinned(&self) -> PyResult<u64> {
        self.figure(|u| u.pinned)
    }

    /// int : Bytes reserved for its admitted sequences and not in use yet.
    #[getter]
    fn promised(&self) -> PyResult<u64> {
        self.figure(|u| u.promised)
    }

    /// int : Bytes of its own pages that are in the host tier, or on their way there.
    #[getter]
    fn host_held(&self) -> PyResult<u64> {
        let core = self.live()?;
        Ok(core.bytes_of(core.ledger().usage(Tier::Host, self.id).held))
    }

    /// int : Bytes that are available to its subtree at once.
    #[getter]
    fn reserve(&self) -> PyResult<u64> {
        self.figure(|u| u.reserve)
    }

    /// int or None : The most bytes charged to its subtree; None: no limit but the pool.
    #[getter]
    fn limit(&self) -> PyResult<Option<u64>> {
        let core = self.live()?;
        Ok(self.policy()?.limit[Tier::Device.as_usize()].map(|limit| core.bytes_of(limit)))
    }

    /// int or None : The most bytes of the host tier charged to its subtree; None: no limit but the tier.
    #[getter]
    fn host_limit(&self) -> PyResult<Option<u64>> {
        let core = self.live()?;
        Ok(self.policy()?.limit[Tier::Host.as_usize()].map(|limit| core.bytes_of(limit)))
    }

    /// int : 1 to 65,536; who has twice the weight keeps twice as much above the reserve before it gives back first.
    #[getter]
    fn weight(&self) -> PyResult<u32> {
        Ok(self.policy()?.weight)
    }

    /// int : 0 to 100; among equals the lower gives back first.
    #[getter]
    fn priority(&self) -> PyResult<u8> {
        Ok(self.policy()?.priority)
    }

    /// int : Bytes it may pin.
    #[getter]
    fn pin_budget(&self) -> PyResult<u64> {
        Ok(self.live()?.bytes_of(self.policy()?.pin_budget))
    }

    /// int : Bytes that its pins use of the budget.
    #[getter]
    fn pin_used(&self) -> PyResult<u64> {
        let core = self.live()?;
        Ok(core.bytes_of(core.pin_budget_used(self.id)))
    }

    /// bool : Whether sequences of others may run in what it does not use of its reserve (`Pool.give_back`).
    #[getter]
    fn lend(&self) -> PyResult<bool> {
        Ok(self.policy()?.lend)
    }

    /// int : Bytes of its reserve that others may have at this moment: neither in use nor given back.
    #[getter]
    fn lent(&self) -> PyResult<u64> {
        Ok(self.live()?.lent(self.id))
    }

    /// Lend all that it does not use of its reserve, what was given back by `Pool.give_back` included.
    ///
    /// Notes
    /// -----
    /// Without ``lend=True`` it does nothing.
    fn lend_unused(&self) -> PyResult<()> {
        self.live()?.lend_unused(self.id).map_err(|e| pyo3::Python::attach(|py| self.owner.error(py, &e)))
    }

    /// bool : Whether pages it pays for may go on in a smaller class (`Pool.compress`): less exact, for good.
    #[getter]
    fn compress(&self) -> PyResult<bool> {
        Ok(self.policy()?.compress)
    }

    /// int or None : The last tokens that a context keeps when it is cut (`Pool.cut`); None: its contexts are never cut.
    #[getter]
    fn cut(&self) -> PyResult<Option<u32>> {
        Ok(self.policy()?.cut.map(NonZeroU32::get))
    }

    /// dict of str to (int or None) : Scopes it may publish into, and the most bytes charged there (None: no bound).
    #[getter]
    fn publish(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let core = self.live()?;
        let dict = PyDict::new(py);
        for (scope, most) in self.policy()?.publish {
            dict.set_item(name_of(core, scope), most.map(|m| core.bytes_of(m)))?;
        }
        Ok(dict.unbind())
    }

    /// Change what is given; the rest stays.
    ///
    /// Parameters
    /// ----------
    /// reserve, limit, host_limit, weight, priority, publish, pin_budget, lend, compress, cut : optional
    ///     As in `Pool.tenant`.
    /// parent : Tenant or str, optional
    ///     Only to check: a tenant can't move.
    ///
    /// Raises
    /// ------
    /// TenantError
    ///     What can't be, see `Pool.tenant`: nothing is changed then.
    #[pyo3(signature = (
        *, reserve = Given(None), limit = Given(None), host_limit = Given(None), weight = Given(None),
        priority = Given(None), parent = Given(None), publish = Given(None), pin_budget = Given(None),
        lend = Given(None), compress = Given(None), cut = Given(None)
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a call")]
    fn set(
        &self,
        reserve: Given<'_>,
        limit: Given<'_>,
        host_limit: Given<'_>,
        weight: Given<'_>,
        priority: Given<'_>,
        parent: Given<'_>,
        publish: Given<'_>,
        pin_budget: Given<'_>,
        lend: Given<'_>,
        compress: Given<'_>,
        cut: Given<'_>,
    ) -> PyResult<()> {
        self.live()?;
        let changes = Changes {
            reserve,
            limit,
            host_limit,
            weight,
            priority,
            parent,
            publish,
            pin_budget,
            lend,
            compress,
            cut,
        };
        change(&self.owner, self.id, &changes)
    }

    /// All figures at one moment.
    ///
    /// Parameters
    /// ----------
    /// subtree : bool, optional
    ///     Add up the tenants below it as well, one after the other; ``claim``, ``reserve`` and the limits stay its own.
    ///
    /// Returns
    /// -------
    /// Usage
    ///     ``held + cached + pinned + promised + stock = charged``, exactly. What is said of the host tier was read after that.
    #[pyo3(signature = (*, subtree = false))]
    fn usage(&self, subtree: bool) -> PyResult<Usage> {
        let core = self.live()?;
        let ledger = core.ledger();
        let [device, host] = Tier::ALL.map(|tier| match subtree {
            true => ledger.subtree_usage(tier, self.id),
            false => ledger.usage(tier, self.id),
        });
        Ok(Usage::new(core, &device, &host))
    }

    /// What happened to this tenant so far.
    ///
    /// Returns
    /// -------
    /// dict of str to int
    ///     ``query_tokens`` looked up and ``hit_tokens`` found of its prompts; ``resumed_hit_tokens``; ``evicted_pages`` of its
    ///     cache, and ``evicted_by_others_pages`` of those; ``waited`` and ``refused``, times.
    ///
    /// Notes
    /// -----
    /// ``waited`` counts the answers ``"wait"`` of `Pool.admit`, which takes nothing: somebody asked, and was told to come again.
    /// ``refused`` counts what was tried and did not get its bytes for now: a row of a step, `Pages.allocate`, an `open` with
    /// ``admit=True``. One request may count in both, and many times. What can never fit counts in neither.
    fn stats(&self) -> PyResult<std::collections::BTreeMap<&'static str, u64>> {
        let stats = self.live()?.tenant_stats(self.id);
        Ok(stats.iter().map(|(counter, value)| (counter.name(), value)).collect())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.owner.live().is_err() {
            return Ok(format!("<kvalloc.Tenant {:?} of the parent process>", self.name));
        }
        if self.live().is_err() {
            return Ok(format!("<kvalloc.Tenant {:?}, removed>", self.name));
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

/// What a tenant has at one moment, in bytes of the device; figures of the host tier begin with ``host``.
///
/// Usages with equal figures are equal.
///
/// Attributes
/// ----------
/// held, cached, pinned : int
///     Pages with references; published pages without, free to take; pages that only a pin keeps.
/// promised : int
///     Reserved for admitted sequences and not in use yet.
/// stock : int
///     Charged in advance, so that threads need not meet for every page; given back before anything is refused. Like
///     ``promised`` a right to bytes that no page uses yet.
/// charged : int
///     The sum of the above.
/// claim : int
///     What the subtree keeps from others: the larger of its reserve and of what it holds, pins, was promised and has in stock,
///     the claims of the tenants below it included.
/// reserve : int
///     What is available to the subtree at once.
/// limit : int or None
///     The most that is charged to the subtree.
/// host_held, host_charged : int
///     Pages in the host tier or on their way there; these, pages there that nobody needs any more and could not end yet, and
///     what was charged there in advance.
/// host_limit : int or None
///     The most that is charged to the subtree of the host tier.
#[pyclass(frozen, eq, hash, get_all, module = "kvalloc")]
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
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
    host_held: u64,
    host_charged: u64,
    host_limit: Option<u64>,
}

impl Usage {
    fn new(core: &Core, usage: &CoreUsage, host: &CoreUsage) -> Self {
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
            host_held: bytes(host.held),
            host_charged: bytes(host.charged),
            host_limit: host.limit.map(bytes),
        }
    }
}

#[pymethods]
impl Usage {
    fn __repr__(&self) -> String {
        let Self { held, cached, pinned, promised, stock, charged, claim, reserve, .. } = self;
        let Self { host_held, host_charged, .. } = self;
        let shown = |limit: Option<u64>| limit.map_or("None".to_owned(), |limit| limit.to_string());
        let (limit, host_limit) = (shown(self.limit), shown(self.host_limit));
        format!(
            "Usage(held={held}, cached={cached}, pinned={pinned}, promised={promised}, stock={stock}, \
             charged={charged}, claim={claim}, reserve={reserve}, limit={limit}, host_held={host_held}, \
             host_charged={host_charged}, host_limit={host_limit})"
        )
    }
}

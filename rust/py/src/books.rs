//! What the books tell: admissions and audits.

use kvalloc_core::{
    admit::{Admission as CoreAdmission, Verdict},
    audit::{Balance as CoreBalance, Report},
    error::{Refusal, Why, sizes},
    ledger::{LedgerError, ROOT},
    pool::Pool as Core,
    word::{TenantId, Tier},
};
use pyo3::prelude::*;

use crate::errors::{name_of, sentence, why};

/// The ledger's errors in names and bytes.
pub(crate) fn in_bytes(core: &Core, error: &LedgerError) -> String {
    let pair = |a, b| sizes([core.bytes_of(a), core.bytes_of(b)]);
    match *error {
        LedgerError::LimitBelowReserve { limit, reserve, .. } => {
            let [limit, reserve] = pair(limit, reserve);
            format!(
                "a limit of {limit} is below the tenant's own reserve of {reserve}: lower the reserve first"
            )
        }
        LedgerError::LimitBelowReserves { limit, reserves, .. } => {
            let [limit, reserves] = pair(limit, reserves);
            format!("a limit of {limit} is below the {reserves} that its children have reserved")
        }
        LedgerError::Reserve { asked, level, short, .. } => {
            let [asked, short] = pair(asked, short);
            format!(
                "a reserve of {asked} does not fit: {} has {short} too few beside what is held and reserved",
                name_of(core, level)
            )
        }
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

/// The answer to "may this start now?". True if the verdict is ``"now"``. From `Pool.admit`.
///
/// Attributes
/// ----------
/// verdict : {"now", "wait", "never"}
///     It fits; it will fit once something is given back; it can never fit.
/// bytes : int
///     What it needs beyond what is held for its prompt already.
/// room : int
///     What there is now; for ``"never"``, what there can ever be.
/// why : {"limit", "claim"} or None
///     A limit is in the way, or what others hold, have reserved and were promised.
/// behind : str or None
///     The tenant whose limit is in the way; None: the pool, or nothing.
/// reason : str
///     The answer as a sentence.
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
    why: Option<&'static str>,
    /// The tenant whose limit is in the way; None: the pool, or nothing.
    behind: Option<String>,
    /// The answer as a sentence.
    reason: String,
}

impl Admission {
    pub(crate) fn new(core: &Core, tenant: TenantId, answer: &CoreAdmission) -> Self {
        let CoreAdmission { need, room, .. } = *answer;
        let refusal = Refusal {
            why: answer.why.unwrap_or(Why::Claim),
            tier: Tier::Device,
            tenant,
            level: answer.behind,
            asked: need,
            room,
        };
        let texts = sizes([need, room]);
        let (verdict, reason) = match answer.verdict {
            Verdict::Now => ("now", format!("{} fit into {}", texts[0], texts[1])),
            Verdict::Wait => ("wait", sentence(core, &refusal)),
            Verdict::Never => (
                "never",
                format!(
                    "{} are needed, and {} can never have more than {}",
                    texts[0],
                    name_of(core, tenant),
                    texts[1]
                ),
            ),
        };
        let behind =
            (answer.verdict != Verdict::Now && answer.behind != ROOT).then(|| name_of(core, answer.behind));
        Self { verdict, bytes: need, room, why: answer.why.map(why), behind, reason }
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

/// One tier's bytes as an audit saw them. ``free + held + cached + pinned + in_flight = capacity`` if it was exact.
///
/// Attributes
/// ----------
/// capacity : int
///     All that can be given out.
/// free : int
///     In no page.
/// held, cached, pinned : int
///     In pages with references, and in places that a plan has claimed for pages of the other tier; in published pages without,
///     free to take; in pages that only a pin keeps.
/// in_flight : int
///     On their way: pages being evicted or freed, frames that readers may still see, second places of pages that a plan moves
///     within the tier.
#[pyclass(frozen, eq, hash, get_all, module = "kvalloc")]
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
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

/// What an audit found. True if no rule is broken. From `Pool.audit`.
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
    /// bool : No rule is broken.
    #[getter]
    fn ok(&self) -> bool {
        self.report.findings.is_empty()
    }

    /// bool : The books stood still while they were read, so that the sums mean something.
    #[getter]
    fn exact(&self) -> bool {
        self.report.exact
    }

    /// Balance : The device's bytes.
    #[getter]
    fn device(&self) -> Balance {
        Balance::new(&self.report.balance[Tier::Device.as_usize()])
    }

    /// Balance : The host's bytes.
    #[getter]
    fn host(&self) -> Balance {
        Balance::new(&self.report.balance[Tier::Host.as_usize()])
    }

    /// int : Pages that are not free.
    #[getter]
    fn pages(&self) -> u32 {
        self.report.pages
    }

    /// list of (int or None, str) : Broken rules: the page's number, where it is one page's, and what is wrong. At most 100.
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

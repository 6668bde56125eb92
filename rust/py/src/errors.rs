//! The core's errors as Python exceptions: a sentence that names tenants, and the numbers as attributes.

use kvalloc_core::{
    error::{Error, Refusal, Why, sizes},
    ledger::ROOT,
    plan::Fault,
    pool::Pool,
    word::{TenantId, Tier},
};
use pyo3::{PyTypeInfo, prelude::*};

mod exceptions {
    #![allow(missing_debug_implementations)]
    pyo3::import_exception!(kvalloc.errors, AdmissionRefused);
    pyo3::import_exception!(kvalloc.errors, ClosedError);
    pyo3::import_exception!(kvalloc.errors, InUse);
    pyo3::import_exception!(kvalloc.errors, InvalidArgument);
    pyo3::import_exception!(kvalloc.errors, OutOfPages);
    pyo3::import_exception!(kvalloc.errors, PinError);
    pyo3::import_exception!(kvalloc.errors, PlanError);
    pyo3::import_exception!(kvalloc.errors, SequenceBusy);
    pyo3::import_exception!(kvalloc.errors, StaleReference);
    pyo3::import_exception!(kvalloc.errors, TenantError);
    pyo3::import_exception!(kvalloc.errors, UnknownTenant);
    pyo3::import_exception!(kvalloc.errors, WrongPool);
}

pub(crate) use exceptions::{ClosedError, InvalidArgument, PlanError, TenantError, UnknownTenant, WrongPool};

/// A tenant as a person knows it.
pub(crate) fn name_of(pool: &Pool, tenant: TenantId) -> String {
    if tenant == ROOT {
        "the pool".into()
    } else {
        pool.ledger().name(tenant).unwrap_or_else(|| tenant.to_string())
    }
}

pub(crate) fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
    }
}

pub(crate) fn why(why: Why) -> &'static str {
    match why {
        Why::Limit => "limit",
        Why::Claim => "claim",
        Why::Frames => "frames",
        Why::Fragmented => "fragmented",
        Why::Frozen => "frozen",
        Why::Row => "row",
        Why::Budget => "budget",
    }
}

/// What was asked, what there was, and what to do.
pub(crate) fn sentence(pool: &Pool, refusal: &Refusal) -> String {
    let [asked, room] = sizes([refusal.asked, refusal.room]);
    let (tenant, level) = (name_of(pool, refusal.tenant), name_of(pool, refusal.level));
    if refusal.tier == Tier::Host {
        let what = format!("{tenant} asked for {asked} of the host tier");
        return match refusal.why {
            Why::Limit => format!(
                "{what}, and the host_limit of {level} leaves {room}: wait until its pages there come back, or raise it"
            ),
            Why::Fragmented => format!(
                "{what}; {room} are free there, but in extents that serve pages of another size: wait until those are empty"
            ),
            _ => format!(
                "{what}, which has {room} left: wait until pages there come back, or give the pool more host_bytes"
            ),
        };
    }
    match refusal.why {
        Why::Limit => format!(
            "{tenant} asked for {asked}, and the limit of {level} leaves {room}: \
             wait until it releases pages, or raise the limit"
        ),
        Why::Claim => format!(
            "{tenant} asked for {asked}, and what is held, reserved and promised leaves {room} in {level}: \
             wait until pages are released, or give the tenant a reserve"
        ),
        Why::Frames => format!(
            "{tenant} asked for {asked}, and every page is in use ({room} are free): \
             wait until pages are released"
        ),
        Why::Fragmented => format!(
            "{tenant} asked for {asked}; {room} are free, but in extents that serve pages of another size: \
             wait until those are empty"
        ),
        Why::Frozen => format!(
            "{tenant} is frozen: no new requests, and no growth beyond what was admitted, until it is thawed"
        ),
        // Of tokens.
        Why::Row => format!(
            "{tenant} asked for {} tokens, and a row of this batch shows at most {}",
            refusal.asked, refusal.room
        ),
        Why::Budget => format!(
            "{tenant} asked for {} tokens, and a step of this batch shows at most {}",
            refusal.asked, refusal.room
        ),
    }
}

fn with<T: PyTypeInfo>(
    py: Python<'_>,
    text: String,
    set: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>,
) -> PyErr {
    match py.get_type::<T>().call1((text,)) {
        Ok(value) => match set(&value) {
            Ok(()) => PyErr::from_value(value),
            Err(error) => error,
        },
        Err(error) => error,
    }
}

fn set_refusal(pool: &Pool, refusal: &Refusal, value: &Bound<'_, PyAny>) -> PyResult<()> {
    value.setattr("asked", refusal.asked)?;
    value.setattr("room", refusal.room)?;
    value.setattr("why", why(refusal.why))?;
    value.setattr("tenant", name_of(pool, refusal.tenant))?;
    value.setattr("tier", tier_name(refusal.tier))?;
    let level = (refusal.level != ROOT).then(|| name_of(pool, refusal.level));
    value.setattr("level", level)
}

/// The exception for an error of the core.
pub(crate) fn raised(py: Python<'_>, pool: &Pool, error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Refused(refusal) => {
            with::<exceptions::OutOfPages>(py, sentence(pool, refusal), |v| set_refusal(pool, refusal, v))
        }
        Error::Never(refusal) => admission(py, pool, "never", refusal),
        Error::Busy(_) => {
            exceptions::SequenceBusy::new_err(format!("{text}; use it from one thread at a time"))
        }
        Error::Closed(_) => ClosedError::new_err(text),
        Error::Stale { count, first } => with::<exceptions::StaleReference>(py, text, |v| {
            v.setattr("count", count)?;
            v.setattr("first", first.to_bits())
        }),
        Error::WrongPool(_) => WrongPool::new_err(format!("{text}; use the handles of one pool together")),
        Error::NoGroup { .. } | Error::Argument(_) => InvalidArgument::new_err(text),
        Error::UnknownTenant(_) => UnknownTenant::new_err(text),
        Error::Tenant(_) => TenantError::new_err(text),
        Error::Plan(fault) => plan_error(py, &text, fault),
        Error::Pin(_) => exceptions::PinError::new_err(text),
        Error::InUse { pages } => with::<exceptions::InUse>(py, text, |v| v.setattr("pages", pages)),
    }
}

/// A plan that can't be built, read or ended.
pub(crate) fn plan_error(py: Python<'_>, text: &str, fault: &Fault) -> PyErr {
    with::<exceptions::PlanError>(py, text.to_owned(), |v| match *fault {
        Fault::Ended(id, state) => {
            v.setattr("plan", id.0)?;
            v.setattr("state", state.name())
        }
        Fault::Forgotten(id) | Fault::Unknown(id) => v.setattr("plan", id.0),
        Fault::Short { asked, short, .. } => {
            v.setattr("asked", asked)?;
            v.setattr("shortfall", short)
        }
        Fault::Dry | Fault::Altered(_) | Fault::TooLong(_) => Ok(()),
    })
}

/// An admission that was refused: `verdict` is wait or never.
pub(crate) fn admission(py: Python<'_>, pool: &Pool, verdict: &str, refusal: &Refusal) -> PyErr {
    let [asked, room] = sizes([refusal.asked, refusal.room]);
    let text = match verdict {
        "never" => format!(
            "{} needs {asked} and can never have more than {room} (set by {}): shorten the request, or raise what bounds it",
            name_of(pool, refusal.tenant),
            name_of(pool, refusal.level)
        ),
        _ => sentence(pool, refusal),
    };
    with::<exceptions::AdmissionRefused>(py, text, |v| {
        v.setattr("verdict", verdict)?;
        set_refusal(pool, refusal, v)
    })
}

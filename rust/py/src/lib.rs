//! The Python face of the core: argument checks, buffers, error mapping. No policy lives here.
//!
//! Everything is `frozen` and lies behind the core's own words and try-locks, so the module needs no GIL: on a
//! free-threaded interpreter its objects are used from any number of threads at once, and a second thread in one sequence
//! or batch gets `SequenceBusy`.

#![allow(clippy::doc_lazy_continuation, reason = "docstrings are numpydoc, for Python's help()")]

use pyo3::prelude::*;

mod args;
mod arrays;
mod batch;
mod books;
mod errors;
mod events;
mod owner;
mod pages;
mod pin;
mod plan;
mod pool;
mod preempt;
mod reclaim;
mod sequence;
mod spec;
mod stats;
mod step;
mod tenant;

/// The native half of kvalloc.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::batch::Batch;
    #[pymodule_export]
    use crate::books::{Admission, AuditReport, Balance};
    #[pymodule_export]
    use crate::events::Events;
    #[pymodule_export]
    use crate::owner::_forked;
    #[pymodule_export]
    use crate::pages::Pages;
    #[pymodule_export]
    use crate::pin::Pin;
    #[pymodule_export]
    use crate::plan::{Plan, Progress, Victim};
    #[pymodule_export]
    use crate::pool::Pool;
    #[pymodule_export]
    use crate::sequence::Sequence;
    #[pymodule_export]
    use crate::spec::Spec;
    #[pymodule_export]
    use crate::stats::Stats;
    #[pymodule_export]
    use crate::step::{Refusal, Step};
    #[pymodule_export]
    use crate::tenant::{Tenant, Usage};
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

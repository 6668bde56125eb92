//! The Python face of the core: argument checks, buffers, error mapping. No policy lives here.
use pyo3::prelude::*;

mod spec;

/// The native half of kvalloc.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::spec::Spec;
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

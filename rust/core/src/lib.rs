//! The books of kvalloc: which page holds which tokens, who shares it, which tenant pays for it, where it lies.
//!
//! Nothing here knows of Python, tensors or CUDA. The rooms, from the bottom up:
//!
//! | room | keeps |
//! | --- | --- |
//! | [`word`], `sync` | the packed words and their transitions; the only gate to atomics |
//! | [`spec`] | geometry: layer groups, page classes, bytes |
//! | `frame` | WHERE there is room |
//! | `page` | WHAT lives |
//! | `hash`, `index` | content -> page |
//! | `evict` | which cached page goes first |
//! | [`ledger`] | HOW MUCH: tenants, charges, reserves, limits |
//! | [`event`], [`stats`] | what happened |
//! | [`pins`], [`clock`] | who keeps which pages, until when; what time it is |
//! | [`pool`] | the books together: allocate, hit, release, evict |
//! | [`sequence`], [`batch`] | WHO holds: page tables; one call per scheduler step |
//! | [`audit`] | proof that the books balance |
#![forbid(unsafe_code)]

#[cfg(feature = "measure")]
#[doc(hidden)]
pub mod clock;
pub mod event;
mod evict;
pub mod frame;
pub mod hash;
pub(crate) mod index;
pub mod ledger;
pub mod measure;
pub mod page;
pub mod pins;
pub mod spec;
pub mod stats;
mod sync;
pub mod word;

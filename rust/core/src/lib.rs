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
//! | [`pool`], `life`, `prefix` | the books together: take, publish, hit, let go, evict; the longest cached prefix |
//! | [`sequence`], [`handle`], [`batch`], [`arrays`] | WHO holds: page tables; one call per scheduler step |
//! | [`face`] | the lower face: pages in batches, for engines with tables of their own |
//! | [`plan`] | getting memory back: what will be done, and the leases until it is done |
//! | `rebalance` | extents change the page size they serve |
//! | [`reclaim`] | bytes of a tenant come back, and others get them |
//! | [`admit`] | may this start now? |
//! | [`audit`] | proof that the books balance |
#![forbid(unsafe_code)]
pub mod admit;
pub mod arrays;
pub mod audit;
pub mod batch;
pub mod clock;
pub mod error;
pub mod event;
pub(crate) mod evict;
pub mod face;
pub mod frame;
pub mod handle;
pub mod hash;
pub(crate) mod index;
mod keep;
pub mod ledger;
mod life;
#[cfg(feature = "measure")]
pub mod measure;
pub mod page;
pub mod pins;
pub mod plan;
pub mod pool;
pub mod preempt;
mod prefix;
mod rebalance;
pub mod reclaim;
pub mod sequence;
pub mod spec;
pub mod stats;
mod sync;
#[cfg(all(test, not(kvalloc_loom)))]
mod tests;
pub mod word;

//! Tests of the whole core: everything above the single rooms, together.
//!
//! | file | shows |
//! | --- | --- |
//! | `build.rs` | specs and pools of a few pages |
//! | `life.rs`, `corners.rs` | one thread, one thing at a time: what a scheduler does, and where something went wrong once |
//! | `machine.rs`; `world.rs`, `actor.rs`, `away.rs`, `outside.rs`, `check.rs` | random operations (proptest); a simple model of the books, what is done with it, what must be true |
//! | `device.rs` | a device made of numbers: every slot remembers which content was written to it |
//! | `shuttle.rs`, `shuttle/plans.rs` | two or three threads under random schedules |

#[cfg(not(kvalloc_shuttle))]
mod actor;
#[cfg(not(kvalloc_shuttle))]
mod away;
pub(crate) mod build;
#[cfg(not(kvalloc_shuttle))]
mod check;
#[cfg(not(kvalloc_shuttle))]
mod corners;
#[cfg(not(kvalloc_shuttle))]
mod device;
#[cfg(not(kvalloc_shuttle))]
mod life;
#[cfg(not(kvalloc_shuttle))]
mod machine;
#[cfg(not(kvalloc_shuttle))]
mod outside;
#[cfg(kvalloc_shuttle)]
mod shuttle;
#[cfg(not(kvalloc_shuttle))]
mod world;

//! Tests of the whole core: everything above the single rooms, together.
//!
//! | file | shows |
//! | --- | --- |
//! | `build.rs` | specs and pools of a few pages |
//! | `life.rs` | one thread, one thing at a time: what a scheduler does |
//! | `corners.rs` | corners of the books in which something went wrong once |
//! | `machine.rs`, `actor.rs` | random operations against a simple model of the books (proptest) |
//! | `device.rs` | a device made of numbers: every slot remembers which content was written to it |
//! | `shuttle.rs` | two or three threads under random schedules |

#[cfg(not(kvalloc_shuttle))]
mod actor;
mod build;
#[cfg(not(kvalloc_shuttle))]
mod corners;
#[cfg(not(kvalloc_shuttle))]
mod device;
#[cfg(not(kvalloc_shuttle))]
mod life;
#[cfg(not(kvalloc_shuttle))]
mod machine;
#[cfg(kvalloc_shuttle)]
mod shuttle;

//! Written with its room.

//! Two or three threads under random schedules.

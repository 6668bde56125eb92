"""Order between what a store computes and what it copies, on a device that works behind the caller's back.

Copies between tiers have a stream of their own, so that they run beside the model. They wait for what was
computed before them: a page that is still being written is not copied out, one that is still being read is
not copied over. And what is computed after them waits for them. A stream is anything with the methods
of `Stream`: tests hand in one that is late.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

__all__ = ["Inline", "Order", "Stream"]

R = TypeVar("R")


class Stream(Protocol):
    """A queue of work, done in order."""

    def run(self, work: Callable[[], R]) -> R:
        """Queue work. What it returns may not be there yet on the device, but has its place."""

    def record(self) -> Any:
        """Mark this point: the mark is reached when everything queued so far is done."""

    def wait(self, mark: Any) -> None:
        """Queue nothing further before a mark of another stream is reached."""

    def finish(self) -> None:
        """Wait until everything queued so far is done."""


class Inline:
    """No queue: work is done when it is handed in, as on the CPU."""

    def run(self, work: Callable[[], R]) -> R:
        """Do it."""
        return work()

    def record(self) -> None:
        """Nothing to mark."""

    def wait(self, mark: Any) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""


class Order:
    """The two streams of a store, and how they wait for each other.

    Parameters
    ----------
    compute, copies : Stream
    """

    def __init__(self, compute: Stream, copies: Stream) -> None:
        self._compute, self._copies = compute, copies
        self._copied: Any = None

    def compute(self, work: Callable[[], R]) -> R:
        """Do work that reads or writes pages, after every copy so far."""
        if self._copied is not None:
            self._compute.wait(self._copied)
        return self._compute.run(work)

    def copy(self, work: Callable[[], None]) -> None:
        """Copy pages, after everything that was computed so far. Later calls of `compute` wait for it."""
        self._copies.wait(self._compute.record())
        self._copies.run(work)
        self._copied = self._copies.record()

    def finish_copies(self) -> None:
        """Wait, on the host, for the copies so far: the host is about to work on what they touch."""
        self._copies.finish()

"""Time: a clock that is real or not, and a stand-in for a model that only takes time.

The time of a step is ``base + prefill * (prompt tokens) + row * (rows that decode) + (KV bytes read) /
bandwidth``. The first term is what a step costs whatever it does (reading the weights, launching kernels),
the second is arithmetic of the prompt, the last one is attention reading the cache. The defaults resemble a
model of 7 to 8 billion parameters on a node of a few current accelerators, a server that can just keep up
with one request of 12,000 tokens every 0.3 s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .request import Int32, reply_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvalloc import Batch, Plan, Step

    from .rows import Rows

__all__ = ["Clock", "ClockModel", "StepTime", "VirtualClock", "WallClock"]


class Clock(Protocol):
    """Where the engine reads the time and waits when it has nothing to do."""

    def now(self) -> float:
        """Return seconds since the start."""
        ...

    def wait_until(self, when: float) -> None:
        """Return when the time is `when` or later."""
        ...


class VirtualClock:
    """A clock that is moved by hand: waiting takes no time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Return seconds since the start."""
        return self.seconds

    def wait_until(self, when: float) -> None:
        """Jump to `when`, never back."""
        self.seconds = max(self.seconds, when)


class WallClock:
    """Real time, for real models."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def now(self) -> float:
        """Return seconds since the clock was made."""
        return time.monotonic() - self._start

    def wait_until(self, when: float) -> None:
        """Sleep until `when`."""
        time.sleep(max(0.0, when - self.now()))


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes.

    Parameters
    ----------
    base : float
        Seconds a step, whatever it does; at most a million, as are the next two.
    prefill : float
        Seconds a prompt token.
    row : float
        Seconds a row that decodes.
    bandwidth : float
        Bytes of KV read a second, at least 1.
    host : float
        Bytes a second between device and host, at least 1. A swap takes this long, and steps wait for it.
    """

    base: float = 0.018
    prefill: float = 5e-6
    row: float = 20e-6
    bandwidth: float = 5e12
    host: float = 25e9

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"step time: {item.name} is {value!r}; a number of at least 0 is needed")
            if item.name not in ("bandwidth", "host") and value > 1e6:
                raise ValueError(f"step time: {item.name} is {value!r} seconds; at most a million")
        for name, usual in (("bandwidth", "5e12"), ("host", "25e9")):
            if (value := getattr(self, name)) < 1.0:
                raise ValueError(
                    f"step time: {name} is {value!r}; give bytes a second, for example {name}={usual}"
                )
        if self.base + self.prefill + self.row == 0.0:
            raise ValueError("step time: base, prefill and row are all 0, so time would stand still")

    @classmethod
    def parse(cls, text: str) -> StepTime:
        """Read ``"base=0.018,prefill=5e-6,row=2e-5,bandwidth=5e12"``; what is not named keeps its default.

        Raises
        ------
        ValueError
            An unknown name, or something that is not a number.

        Examples
        --------
        >>> from kvalloc.engine import StepTime
        >>> StepTime.parse("base=0.02").base
        0.02
        """
        values: dict[str, float] = {}
        known = [item.name for item in fields(cls)]
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, sep, number = (piece.strip() for piece in part.partition("="))
            if not sep or name not in known:
                raise ValueError(f"step time: {part!r} is not NAME=NUMBER with a name of {', '.join(known)}")
            try:
                values[name] = float(number)
            except ValueError:
                raise ValueError(f"step time: {number!r} for {name} is not a number") from None
        return cls(**values)


class ClockModel:
    """A model that computes nothing: it moves a virtual clock and makes up tokens.

    Parameters
    ----------
    clock : VirtualClock
        The clock that the engine reads.
    step_time : StepTime
        How far a step moves it.
    kv_bytes : sequence of (float, int or None)
        Per layer group: bytes a token, and the window in tokens beyond which nothing is read.
    """

    def __init__(
        self,
        clock: VirtualClock,
        step_time: StepTime | None = None,
        kv_bytes: Sequence[tuple[float, int | None]] = (),
    ) -> None:
        self.clock = clock
        self.step_time = step_time or StepTime()
        self._full = sum(size for size, window in kv_bytes if window is None)
        self._windows = [(size, window) for size, window in kv_bytes if window is not None]

    def step(self, batch: Batch, step: Step, rows: Rows) -> Int32:
        """Move the clock by one step and say what each row sampled."""
        n, cost = len(rows), self.step_time
        lens = rows.lens[:n]
        read = self._full * float(lens.sum(dtype=np.int64))
        for size, window in self._windows:
            read += size * float(np.minimum(lens, window).sum(dtype=np.int64))
        decoding = n - len(rows.prefilling)
        self.clock.seconds += (
            cost.base
            + cost.prefill * (step.num_tokens - decoding)
            + cost.row * decoding
            + read / cost.bandwidth
        )
        return reply_tokens(rows.reply[:n], lens)

    def execute(self, plan: Plan) -> None:
        """Move the clock by the time the copies of a plan take between the tiers."""
        self.clock.seconds += plan.copied[1] / self.step_time.host

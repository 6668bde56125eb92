"""Measuring a replay: counts per tenant, waiting times, and use over time.

Requests are counted as they end; use is sampled from the books at an interval of virtual time. The number
of samples is bounded: when there are too many, every second one goes and the interval doubles, so a run of
any length costs the same.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .request import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from .request import Request
    from .scheduler import Engine

__all__ = ["Meter", "Refusals", "TenantCounts", "quantiles"]

MOST_SAMPLES = 1024
FIELDS = (
    "held",
    "cached",
    "pinned",
    "promised",
    "waiting",
    "running",
    "stopped",
    "prompt_tokens",
    "cached_tokens",
    "waste",
)
# Bytes at a time; then, grown so far, rows that were stopped and bytes that were copied for it.
POOL_FIELDS = ("free", "held", "cached", "pinned", "swapped", "recomputed", "swapped_bytes")


@dataclass(slots=True)
class Refusals:
    """Requests that were refused for causes of one kind: how many, the largest need, the least room."""

    count: int
    cause: Cause

    def add(self, cause: Cause) -> None:
        """Count one more."""
        known, self.count = self.cause, self.count + 1
        needed, room = max(known.needed, cause.needed), min(known.room, cause.room)
        self.cause = Cause(known.what, known.by, needed, room, known.unit)


@dataclass(slots=True)
class TenantCounts:
    """What one tenant asked for and got."""

    arrived: int = 0
    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    refusals: dict[str, Refusals] = field(default_factory=dict)  # by kind
    waits: array[float] = field(default_factory=lambda: array("d"))
    first_tokens: array[float] = field(default_factory=lambda: array("d"))
    stops: int = 0  # of running requests, for lack of room
    stalls: array[float] = field(default_factory=lambda: array("d"))  # seconds, of requests that were stopped
    paces: array[float] = field(default_factory=lambda: array("d"))  # seconds a token behind the first


def quantiles(values: Seq[float]) -> dict[str, float]:
    """Return mean, p50, p99 and max; zeros if there is nothing."""
    if not len(values):
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    data = np.asarray(values, dtype=np.float64)
    p50, p99 = np.percentile(data, (50, 99))
    return {"mean": float(data.mean()), "p50": float(p50), "p99": float(p99), "max": float(data.max())}


class Meter:
    """Counts what happens in an engine.

    Parameters
    ----------
    page_tokens : int
        Tokens a page.
    token_bytes : float
        Bytes a token over all layer groups that keep pages.
    interval : float
        Seconds between samples at first.
    """

    def __init__(self, page_tokens: int, token_bytes: float, interval: float = 0.1) -> None:
        self.page_tokens, self.token_bytes, self.interval = page_tokens, token_bytes, interval
        self.tenants: dict[str, TenantCounts] = {}
        self.next = 0.0
        self.times: list[float] = []
        self.samples: list[NDArray[np.float64]] = []  # [tenants, FIELDS]
        self.pool_samples: list[tuple[int, ...]] = []
        self.peak_held = 0
        self.peak_charged = 0
        self.oldest_wait = 0.0

    def note(self, event: str, request: Request) -> None:
        """Take in an event of `Engine`."""
        counts = self.tenants.get(request.tenant)
        if counts is None:
            counts = self.tenants[request.tenant] = TenantCounts()
        if event == "arrived":
            counts.arrived += 1
        elif event == "admitted":
            counts.admitted += 1
            counts.prompt_tokens += len(request.prompt)
            counts.cached_tokens += request.cached
            counts.waits.append(request.admitted - request.arrival)
        elif event == "refused":
            cause = request.cause or Cause("unknown")
            if cause.kind in counts.refusals:
                counts.refusals[cause.kind].add(cause)
            else:
                counts.refusals[cause.kind] = Refusals(1, cause)
        elif event == "stopped":
            counts.stops += 1
        else:
            counts.finished += event == "finished"
            counts.aborted += event == "aborted"
            counts.generated_tokens += request.produced
            if request.first_token >= 0.0:
                counts.first_tokens.append(request.first_token - request.arrival)
            if event == "finished" and request.produced > 1:
                counts.paces.append((request.finished - request.first_token) / (request.produced - 1))
            if request.stalled:
                counts.stalls.append(request.stalled)

    def sample(self, now: float, engine: Engine) -> None:
        """Write down the books as they are."""
        rows, queues = engine.rows, engine.queues
        n, size = len(rows), self.page_tokens
        waste: NDArray[np.float64] = np.zeros(len(queues))
        if n:
            tail = -rows.lens[:n] % size
            waste += np.bincount(rows.tenant[:n], weights=tail, minlength=len(queues)) * self.token_bytes
        table = np.empty((len(queues), len(FIELDS)))
        nothing = TenantCounts()
        pressure = engine.pressure
        stopped = Counter(run.queue.index for run in pressure.stopped) if pressure else Counter[int]()
        for i, queue in enumerate(queues.values()):
            tenant, counts = queue.tenant, self.tenants.get(queue.name, nothing)
            table[i] = (
                tenant.held,
                tenant.cached,
                tenant.pinned,
                tenant.promised,
                len(queue.requests),
                queue.running - stopped[i],
                stopped[i],
                counts.prompt_tokens,
                counts.cached_tokens,
                waste[i],
            )
            if queue.requests:
                self.oldest_wait = max(self.oldest_wait, now - queue.requests[0].arrival)
        pool = engine.pool
        _, held, cached, pinned = books = (pool.free, pool.held, pool.cached, pool.pinned)
        taken = (0, 0, 0)
        if pressure is not None:
            taken = (pressure.counts["swapped"], pressure.counts["recomputed"], pressure.swapped_bytes)
        self.peak_held = max(self.peak_held, held + pinned)
        self.peak_charged = max(self.peak_charged, held + cached + pinned)
        self.times.append(now)
        self.samples.append(table)
        self.pool_samples.append((*books, *taken))
        if len(self.times) >= MOST_SAMPLES:
            del self.times[1::2], self.samples[1::2], self.pool_samples[1::2]
            self.interval *= 2
        self.next = now + self.interval

    def series(self, names: Seq[str]) -> dict[str, Any]:
        """Return all samples as plain lists: ``{"time", "pool": {...}, "tenants": {name: {...}}}``."""
        table = np.array(self.samples).reshape(len(self.times), len(names), len(FIELDS))
        pool = np.array(self.pool_samples, dtype=np.int64).reshape(len(self.times), len(POOL_FIELDS))
        return {
            "time": [round(time, 3) for time in self.times],
            "pool": {name: pool[:, k].tolist() for k, name in enumerate(POOL_FIELDS)},
            "tenants": {
                name: {what: table[:, i, k].astype(np.int64).tolist() for k, what in enumerate(FIELDS)}
                for i, name in enumerate(names)
            },
        }

    def mean_waste(self) -> tuple[float, NDArray[np.float64]]:
        """Return internal waste as a share of held bytes, in all and per tenant, a mean over the samples."""
        if not self.samples:
            return 0.0, np.zeros(0)
        table = np.array(self.samples)
        held = table[:, :, [0, 2]].sum(axis=(0, 2))
        waste = table[:, :, FIELDS.index("waste")].sum(axis=0)
        return float(waste.sum() / held.sum()) if held.sum() else 0.0, waste / np.maximum(held, 1.0)

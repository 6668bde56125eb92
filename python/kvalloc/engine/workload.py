"""The built-in workload: four tenants that a serving team knows, in five minutes.

``chat``
    Conversations of a few turns. All begin with the same system prompt, shared with ``agent`` under their
    parent ``shop``.
``agent``
    Sessions of many quick turns; each sends the whole context again and a tool's answer.
``search``
    Long prompts of retrieved documents, used once: the scans that wash a cache out.
``batch``
    A flood of jobs once a minute, as many as fit; it has a limit and no reserve.

A later turn repeats the earlier ones word by word, replies included, so that it hits what is still cached.
Turns come at times that were drawn beforehand, whether or not the reply is out by then. Everything follows
from the seed.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .request import Request, Text
from .tenants import TenantPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEVICE", "SECONDS", "builtin_tenants", "builtin_workload"]

SECONDS = 300.0
DEVICE = "24GiB"  # the size at which the default model shows eviction, a reserve and a limit at work
_SYSTEM, _SYSTEM_TOKENS = 1, 1536
_FEWSHOT, _FEWSHOT_TOKENS = 2, 1024
_REPLY = 1 << 29  # added to a question's text number


class _Sessions(NamedTuple):
    """How many start in a second, turns, tokens of a turn and of its reply, seconds between turns."""

    rate: float
    turns: float
    asks: tuple[int, int]
    replies: tuple[int, int]
    pause: float


_CHAT = _Sessions(rate=1.3, turns=4, asks=(30, 220), replies=(60, 420), pause=14.0)
_AGENT = _Sessions(rate=0.13, turns=10, asks=(250, 2200), replies=(40, 220), pause=3.0)


def builtin_tenants() -> list[TenantPlan]:
    """Return the tenant tree of the workload."""
    return [
        TenantPlan("shop", limit="70%", traffic=0.0),
        TenantPlan("chat", "shop", reserve="20%", weight=4, share="shop", share_tokens=_SYSTEM_TOKENS),
        TenantPlan("agent", "shop", reserve="15%", weight=2, share="shop", share_tokens=_SYSTEM_TOKENS),
        TenantPlan("search", None, reserve="10%", limit="40%", weight=2),
        TenantPlan("batch", None, limit="30%", weight=1),
    ]


def builtin_workload(seconds: float = SECONDS, *, seed: int = 0) -> Iterator[Request]:
    """Generate the requests that arrive in a number of seconds, in order.

    Examples
    --------
    >>> from kvalloc.engine import builtin_workload
    >>> first = next(builtin_workload())
    >>> first.tenant in {"chat", "agent", "search", "batch"}
    True
    """
    texts = (itertools.count(16 + k, 4) for k in range(4))
    rngs = (np.random.default_rng([seed, k]) for k in itertools.count(1))
    streams = [
        _sessions("chat", seconds, next(texts), next(rngs), _CHAT),
        _sessions("agent", seconds, next(texts), next(rngs), _AGENT),
        _search(seconds, next(texts), next(rngs)),
        _batch(seconds, next(texts), next(rngs)),
    ]
    return heapq.merge(*streams, key=lambda request: request.arrival)


def _sessions(
    tenant: str, seconds: float, texts: itertools.count[int], rng: np.random.Generator, kind: _Sessions
) -> Iterator[Request]:
    """Conversations that start at a rate and have a geometric number of turns."""
    coming: list[tuple[float, int, Request]] = []  # turns of conversations that have begun, by time
    start, share = rng.exponential(1.0 / kind.rate), (("shop", _SYSTEM_TOKENS),)
    while start < seconds:
        time = start
        parts: tuple[tuple[int, int], ...] = ((_SYSTEM, _SYSTEM_TOKENS),)
        for _ in range(int(rng.geometric(1.0 / kind.turns))):
            ask, length, reply = next(texts), int(rng.integers(*kind.asks)), int(rng.integers(*kind.replies))
            parts += ((ask, length),)
            heapq.heappush(
                coming, (time, ask, Request(time, tenant, Text(parts), reply, share, ask, ask + _REPLY))
            )
            parts += ((ask + _REPLY, reply),)
            time += 1.0 + reply * 0.02 + rng.exponential(kind.pause)
        start += rng.exponential(1.0 / kind.rate)
        while coming and coming[0][0] < min(start, seconds):
            yield heapq.heappop(coming)[2]


def _search(seconds: float, texts: itertools.count[int], rng: np.random.Generator) -> Iterator[Request]:
    time = 0.0
    while (time := time + rng.exponential(1.0 / 0.9)) < seconds:
        text = next(texts)
        yield Request(
            time,
            "search",
            Text(((text, int(rng.integers(5000, 13000))),)),
            int(rng.integers(80, 500)),
            (),
            text,
            text + _REPLY,
        )


def _batch(seconds: float, texts: itertools.count[int], rng: np.random.Generator) -> Iterator[Request]:
    time = 30.0
    while time < seconds:
        for _ in range(180):
            text = next(texts)
            parts = ((_FEWSHOT, _FEWSHOT_TOKENS), (text, int(rng.integers(400, 3000))))
            yield Request(time, "batch", Text(parts), int(rng.integers(200, 900)), (), text, text + _REPLY)
        time += 60.0

"""Tenants drawn from ServeGen's digest of production clients: rates, burstiness, lengths.

The digest has a row per model, client and window of six hours. A client is a renewal process: its intervals
are gamma with the window's mean rate and coefficient of variation, so that a bursty client (CV 10) sends
crowds and then nothing for long. The process starts in the middle of its life (the first interval is a
residual one), else every client would begin with a burst. Lengths follow a lognormal curve bent so that it
meets p50, p90 and p99. Prompts share nothing: the digest does not know.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .request import Request, Text
from .traces import Reader, TraceError, read_table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Client", "Window", "draw", "read_digest"]

_COLUMNS = (
    "model", "client", "window_start_s", "mean_rps", "arrival_cv",
    "in_p50", "in_p90", "in_p99", "out_p50", "out_p90", "out_p99",
)  # fmt: skip
_Z90, _Z99, _Z_TOP = 1.2815515655, 2.3263478740, 3.2


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts with given p50, p90 and p99."""

    p50: float
    p90: float
    p99: float

    def at(self, z: float) -> int:
        """Return the length at a place of the normal distribution (0 is the median), at least 1."""
        a, b, c = math.log(self.p50), math.log(self.p90), math.log(self.p99)
        z = min(z, _Z_TOP)
        log = a + (b - a) * z / _Z90 if z <= _Z90 else b + (c - b) * (z - _Z90) / (_Z99 - _Z90)
        return max(1, round(math.exp(log)))


@dataclass(frozen=True, slots=True)
class Window:
    """What a client does from `start` (seconds) on."""

    start: float
    rate: float
    cv: float
    prompt: Lengths
    reply: Lengths


@dataclass(frozen=True, slots=True)
class Client:
    """A production client: one tenant."""

    number: int
    windows: tuple[Window, ...]

    @property
    def rate(self) -> float:
        """Requests a second in the first window."""
        return self.windows[0].rate


def read_digest(path: str | Path, model: str | None = None) -> list[Client]:
    """Read the clients of one model, those with the highest rate first.

    Parameters
    ----------
    path : path
        The digest, a CSV file.
    model : str, optional
        A model of the digest; the first one by default.

    Raises
    ------
    TraceError
        A broken line, or a model that is not there.
    """
    reader = Reader(Path(path))
    found: dict[str, dict[int, list[Window]]] = defaultdict(lambda: defaultdict(list))
    for row in read_table(reader.path, reader, _COLUMNS):
        number = reader.whole(row["client"], "client")
        values = {name: reader.seconds(row[name], name) for name in _COLUMNS[2:]}
        if not (values["mean_rps"] >= 0 and values["arrival_cv"] > 0):
            raise reader.fail("mean_rps below 0, or arrival_cv not above 0")
        lengths = []
        for kind in ("in", "out"):
            p50, p90, p99 = (max(1.0, values[f"{kind}_p{p}"]) for p in (50, 90, 99))
            if not p50 <= p90 <= p99:
                raise reader.fail(
                    f"{kind}_p50, {kind}_p90, {kind}_p99 do not rise: {p50:g}, {p90:g}, {p99:g}"
                )
            lengths.append(Lengths(p50, p90, p99))
        window = Window(values["window_start_s"], values["mean_rps"], values["arrival_cv"], *lengths)
        found[row["model"]][number].append(window)
    if not found:
        raise TraceError(path, 0, "no clients")
    model = model or next(iter(found))
    if model not in found:
        raise TraceError(path, 0, f"no model {model!r}; there are {', '.join(found)}")
    clients = [
        Client(number, tuple(sorted(windows, key=lambda window: window.start)))
        for number, windows in found[model].items()
    ]
    return sorted(clients, key=lambda client: (client.windows[0].start, -client.rate, client.number))


def draw(
    clients: list[Client], seconds: float, *, seed: int = 0, rate: float | None = None
) -> Iterator[Request]:
    """Draw the requests of some clients, in the order they arrive.

    Parameters
    ----------
    clients : list of Client
        Who sends. The request's tenant is "client-N", its key N.
    seconds : float
        How long.
    seed : int
        Same seed, same requests; a client's do not depend on who else is drawn.
    rate : float, optional
        Requests a second of all together in the first window, reached by stretching time, which keeps
        bursts in shape.
    """
    total = sum(client.rate for client in clients)
    stretch = 1.0 if rate is None or total == 0 else total / rate
    ordered = heapq.merge(
        *(_requests(client, seconds, stretch, seed) for client in clients), key=lambda r: r.arrival
    )
    for number, request in enumerate(ordered):
        own = (1 << 30) + number
        request.prompt, request.reply = Text(((own, len(request.prompt)),)), own
        yield request


def _requests(client: Client, seconds: float, stretch: float, seed: int) -> Iterator[Request]:
    rng = np.random.default_rng([seed, client.number])
    start = client.windows[0].start
    ends = [window.start - start for window in client.windows[1:]] + [math.inf]
    at, now = 0, 0.0
    # A renewal process seen from a random moment: an interval chosen by its length (gamma of shape + 1), and
    # a random part of it.
    shape = client.windows[0].cv ** -2
    wait = rng.gamma(shape + 1.0) / shape * rng.random()
    while True:
        window = client.windows[at]
        # `wait` is in units of the mean interval, which changes from window to window.
        left = (ends[at] - now / stretch) * window.rate if ends[at] < math.inf else math.inf
        if wait > left:
            wait, now = wait - max(0.0, left), ends[at] * stretch
            at += 1
            if now >= seconds:
                return
            continue
        if window.rate == 0.0:
            return
        now += wait / window.rate * stretch
        if now >= seconds:
            return
        z = rng.standard_normal(2)
        yield Request(
            arrival=now,
            tenant=f"client-{client.number}",
            prompt=Text(((0, window.prompt.at(z[0])),)),
            max_new=window.reply.at(z[1]),
            key=client.number,
        )
        wait = rng.gamma(window.cv**-2) * window.cv**2

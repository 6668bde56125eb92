"""Timing and the description of the machine, shared by the jobs of both sides."""

from __future__ import annotations

import gc
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any


@dataclass
class Result:
    """One job of one side: the median over repeats, and all of them, so that a reader sees the spread."""

    job: str
    side: str
    value: float
    unit: str
    repeats: list[float] = field(default_factory=list)
    note: str = ""

    def json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


def median_of(
    job: str, side: str, once: Callable[[], float], repeats: int, *, unit: str, note: str = ""
) -> Result:
    """Call `once`, which returns nanoseconds, `repeats` times after one warm-up that is thrown away.

    The collector stays on, as in a serving process, but what existed before the job is out of its sight on
    both sides (vLLM's engine process does the same with ``gc.freeze``).
    """
    scale = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}[unit]
    once()
    gc.collect()
    gc.freeze()
    values = [once() / scale for _ in range(repeats)]
    gc.unfreeze()
    return Result(job, side, statistics.median(values), unit, values, note)


def timed(call: Callable[[], object]) -> int:
    """Nanoseconds of one call; its result is dropped after the clock was read."""
    start = perf_counter_ns()
    kept = call()
    stop = perf_counter_ns()
    del kept
    return stop - start


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    named = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    if named:
        cpu = named[0].split(":", 1)[1].strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }

"""Which requests are replayed and who sends them, from the options."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from kvalloc.engine import servegen, traces, workload
from kvalloc.engine.tenants import TenantPlan, numbered, read_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvalloc.engine.request import Request

__all__ = ["Traffic", "choose"]

SERVEGEN_SECONDS = 600.0
SERVEGEN_RATE = 10.0
SERVEGEN_CLIENTS = 12
SERVEGEN_DEVICE = "16GiB"
TRACE_TENANTS = 4
TRACE_DEVICE = "128GiB"


@dataclass(slots=True)
class Traffic:
    """Requests, tenants, and what a progress bar needs to know: how many requests, or how many seconds."""

    requests: Iterator[Request]
    plans: list[TenantPlan]
    device: str
    total_requests: int | None = None
    total_seconds: float | None = None


def choose(
    trace: Path | None,
    tenants: int | None,
    tenants_file: Path | None,
    seed: int,
    limit_requests: int | None,
    limit_seconds: float | None,
    rate: float | None,
    digest_model: str | None,
) -> Traffic:
    """Put a source of requests and its tenants together.

    Raises
    ------
    ValueError
        Options that contradict each other, or a file that can't be read.
    """
    if limit_seconds is not None and not 0.0 < limit_seconds < float("inf"):
        raise ValueError(f"--limit-seconds {limit_seconds:g}: a number above 0 is needed")
    if rate is not None and not 0.0 < rate < float("inf"):
        raise ValueError(f"--rate {rate:g}: a number above 0 is needed")
    if tenants is not None and tenants_file is not None:
        raise ValueError("--tenants and --tenants-file say the same thing in two ways: give one")
    kind = traces.detect(trace) if trace is not None else "built-in"
    if kind != "servegen" and (rate is not None or digest_model is not None):
        raise ValueError("--rate and --digest-model are for a ServeGen digest")
    plans = read_tenants(tenants_file) if tenants_file is not None else None
    if trace is None:
        traffic = _builtin(plans, tenants, seed, limit_seconds)
    elif kind == "servegen":
        traffic = _servegen(trace, plans, tenants, seed, limit_seconds, rate, digest_model)
    else:
        known = kind in ("mooncake", "bailian")  # the others do not know what prompts have in common
        default = numbered(TRACE_TENANTS if tenants is None else tenants, 512 if known else 0)
        traffic = Traffic(traces.FORMATS[kind](trace), plans or default, TRACE_DEVICE)
        traffic.total_requests = _count_lines(trace) - (trace.suffix == ".csv")
        if limit_seconds is not None:
            end = limit_seconds
            traffic.requests = takewhile(lambda request: request.arrival < end, traffic.requests)
            traffic.total_requests, traffic.total_seconds = None, limit_seconds
    if limit_requests is not None:
        traffic.requests = islice(traffic.requests, limit_requests)
        if traffic.total_seconds is None:
            traffic.total_requests = min(limit_requests, traffic.total_requests or limit_requests)
    return traffic


def _builtin(
    plans: list[TenantPlan] | None, tenants: int | None, seed: int, limit_seconds: float | None
) -> Traffic:
    if tenants is not None:
        raise ValueError(
            "--tenants: the built-in workload has its own tenants; give a --trace, or a --tenants-file"
        )
    seconds = limit_seconds or workload.SECONDS
    requests: Iterator[Request] = workload.builtin_workload(seconds, seed=seed)
    if plans is not None:
        requests = _anonymous(requests)
    return Traffic(requests, plans or workload.builtin_tenants(), workload.DEVICE, total_seconds=seconds)


def _servegen(
    trace: Path,
    plans: list[TenantPlan] | None,
    tenants: int | None,
    seed: int,
    limit_seconds: float | None,
    rate: float | None,
    digest_model: str | None,
) -> Traffic:
    if tenants is not None and tenants < 1:
        raise ValueError(f"--tenants {tenants}: at least 1 is needed")
    clients = servegen.read_digest(trace, digest_model)[: tenants or SERVEGEN_CLIENTS]
    seconds = limit_seconds or SERVEGEN_SECONDS
    requests = servegen.draw(clients, seconds, seed=seed, rate=rate or SERVEGEN_RATE)
    if plans is not None:
        requests = _anonymous(requests)
    else:
        share = f"{50 / len(clients):.3f}%"
        plans = [
            TenantPlan(f"client-{client.number}", reserve=share, traffic=client.rate) for client in clients
        ]
    return Traffic(requests, plans, SERVEGEN_DEVICE, total_seconds=seconds)


def _anonymous(requests: Iterator[Request]) -> Iterator[Request]:
    """Take the tenants' names off, so that the ones of a tenants file get the requests."""
    for request in requests:
        request.tenant, request.share = "", ()
        yield request


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))

"""Replaying requests through a pool, with everything measured.

>>> from kvalloc import KVSpec
>>> from kvalloc.engine import replay, workload
>>> spec = KVSpec.uniform(layers=28, kv_heads=4, head_dim=128)
>>> run = replay.Replay(spec, "24GiB", workload.builtin_tenants())
>>> result = run.run(workload.builtin_workload(seconds=20))
>>> result["audit"]["ok"]
True

The result is a dict of plain values, what ``kvalloc replay --json`` writes:

``schema``
    "kvalloc.replay/1". A later number means that something below was renamed or removed.
``settings``
    What the run was asked to do.
``interrupted``
    True if it was stopped before the end.
``run``
    ``virtual_seconds``, ``host_seconds``, ``steps``, ``requests`` (arrived), ``finished``, ``refused``,
    ``aborted``, ``waiting`` and ``running`` at the end, ``idle_while_waiting_s`` (seconds in which somebody
    waited and nothing ran: 0 if all is well), ``oldest_wait_s``, ``step_us`` (host time per step, all of
    Python and the pool) and ``core_us`` (``Batch.step`` and ``Batch.commit`` alone), each with ``mean``,
    ``p50``, ``p99``, ``max``, all 0 if there were no steps. With a `speed`, ``host_seconds`` has the pauses.
``pool``
    Bytes: ``capacity``, ``peak_held``, ``peak_charged``, and at the end ``free``, ``held``, ``cached``,
    ``pinned``. Shares: ``hit_rate`` (of prompt tokens), ``waste`` (room in last pages without a token, of
    held bytes, mean over time), ``fragmentation`` (bytes that are free but in extents of another class, of
    free bytes). ``evictions``: cached pages that were taken back. ``stats``: the pool's own counters.
``tenants``
    A list, each tenant before those below it: ``name``, ``parent``, ``depth`` (0 at the top), ``reserve``,
    ``limit`` and ``host_limit`` (null: none), ``weight``, ``requests``, ``finished``, ``refused`` (kind to
    count, such as ``{"never fits: limit of shop": 98, "never fits: pool": 2}``), ``refusals`` (the same with
    numbers: ``what``, ``by``, ``requests``, the largest ``needed``, the least ``room``, their ``unit``,
    ``text``), ``prompt_tokens``, ``cached_tokens``, ``generated_tokens``, ``hit_rate``, ``wait_s``,
    ``first_token_s`` and ``token_s`` (seconds a token behind the first, of each request that finished), each
    with ``mean``, ``p50``, ``p99``, ``max``; ``stops`` (of running requests) and ``stall_s`` (seconds that
    each request was stopped that ever was), ``waste``, ``held``, ``cached``, ``pinned``, ``host_held``.
``pressure``
    ``policy`` ("reserve", or how rows are stopped), ``victims`` (what became of them, to count), ``stopped``
    at the end, ``swapped_bytes`` (both ways), ``stalled_s`` (seconds that requests were stopped, summed),
    ``expired`` (plans whose copies took too long: all was as before), ``give_backs`` (by lender: ``count``,
    ``rows`` that stopped, ``bytes``, ``seconds`` from asking to having), and ``reclaims``: for each one asked
    for its ``tenant``, ``at_s``, ``asked``, ``bytes`` that came back, ``rungs``, ``victims``, ``shortfall``,
    ``shared`` and ``pinned`` bytes that stayed, ``host_full`` (whose ``host_limit`` was in the way, null: the
    host tier was full or is not there).
``audit``
    ``ok`` and ``problems``, what `Pool.audit` said at the end.
``series``
    ``time`` (seconds), ``pool`` and ``tenants``: bytes and counts at those times; ``prompt_tokens``,
    ``cached_tokens``, ``swapped``, ``recomputed`` and ``swapped_bytes`` grow.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

from kvalloc import InvalidArgument, Pool

from .clock import ClockModel, StepTime, VirtualClock
from .meter import Meter, TenantCounts, quantiles
from .scheduler import Engine
from .tenants import TenantPlan, assign, create, depth_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvalloc import KVSpec

    from .pressure import Mode
    from .request import Request

__all__ = ["SCHEMA", "Replay"]

SCHEMA = "kvalloc.replay/1"


class Replay:
    """A pool, its tenants, the engine and a meter: ready to run requests.

    Parameters
    ----------
    spec : KVSpec
        The model's geometry.
    device_bytes, host_bytes : int or str
        Sizes of the tiers.
    plans : list of TenantPlan
        The tenants, in any order.
    step_time : StepTime, optional
        How long steps take.
    max_rows, token_budget, max_tokens : int
        As `Engine` takes them.
    seed : int
        Decides which requests go to which tenant.
    preempt : {"auto", "swap", "recompute"}, optional
        As `Engine` takes it.
    reclaims : sequence of (str, int, float)
        Take so many bytes back from a tenant, at a time in seconds; its rows stop as `preempt` says.
    """

    def __init__(
        self,
        spec: KVSpec,
        device_bytes: int | str,
        plans: list[TenantPlan],
        *,
        host_bytes: int | str = 0,
        step_time: StepTime | None = None,
        max_rows: int = 256,
        token_budget: int = 8192,
        max_tokens: int = 131_072,
        seed: int = 0,
        preempt: Mode | None = None,
        reclaims: Sequence[tuple[str, int, float]] = (),
    ) -> None:
        self.spec, self.plans, self.seed = spec, depth_first(plans), seed
        # The secret is set so that a replay repeats exactly: which pages collide in the index depends on it.
        self.pool = Pool(spec, device_bytes, host_bytes, secret=bytes(16), clock="manual")
        self.tenants = create(self.pool, self.plans)
        self.clock = VirtualClock()
        groups = kv_bytes(spec)
        self.step_time = step_time or StepTime()
        self.meter = Meter(spec.page_tokens, sum(size for size, _ in groups))
        self.engine = Engine(
            self.pool,
            ClockModel(self.clock, self.step_time, groups),
            self.tenants,
            clock=self.clock,
            max_rows=max_rows,
            token_budget=token_budget,
            max_tokens=max_tokens,
            preempt=preempt,
            listener=self.meter.note,
        )
        if preempt is not None:
            tokens = round(1.0 / self.step_time.prefill) if self.step_time.prefill else 1 << 40
            self.pool.set_speeds(host=round(self.step_time.host), tokens=tokens)
        elif reclaims:
            raise InvalidArgument(
                "bytes can be taken back from rows only with a policy: auto, swap or recompute"
            )
        self._due = sorted(reclaims, key=lambda each: each[2])
        self.reclaims: list[dict[str, Any]] = []
        self.host_ns = 0  # since the run began
        self.busy_ns = 0  # of it in steps
        self.interrupted = False
        self._step_ns: array[int] = array("q")
        self._core_ns: array[int] = array("q")

    def run(
        self,
        requests: Iterable[Request],
        *,
        refresh: Callable[[], None] | None = None,
        every: float = 0.25,
        speed: float | None = None,
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Serve all requests and return what was measured.

        Parameters
        ----------
        requests : iterable of Request
            In order of arrival. Those without a tenant are given one.
        refresh : callable, optional
            Called about every `every` seconds of real time, for a live view. `stop` may be called from it.
        speed : float, optional
            How many times as fast as real time to go at most. Default: no pauses.
        settings : dict, optional
            Goes into the result as it is.
        """
        engine, meter = self.engine, self.meter
        began = last = perf_counter_ns()
        pause = int(every * 1e9)
        due = began + pause
        steps = 0
        for now in engine.run(assign(requests, self.plans, self.seed)):
            time = perf_counter_ns()
            if (
                engine.steps > steps
            ):  # else nothing ran: everybody waits, or the next request is still to come
                self._step_ns.append(time - last)
                self.busy_ns += time - last
                self._core_ns.append(engine.core_ns)
                steps = engine.steps
            last = time
            while self._due and now >= self._due[0][2]:
                self._reclaim(*self._due.pop(0))
                last = perf_counter_ns()
            if now >= meter.next:
                meter.sample(now, engine)
                last = perf_counter_ns()
            if last >= due:
                self.host_ns = last - began
                if refresh is not None:
                    refresh()
                last = perf_counter_ns()
                due = last + pause
            if speed is not None:
                self._pace(began, now / speed, refresh, every)
                last = perf_counter_ns()
            if self.interrupted:
                break
        meter.sample(self.clock.now(), engine)
        self.host_ns = perf_counter_ns() - began
        return self.result(settings or {})

    def _pace(self, began: int, until: float, refresh: Callable[[], None] | None, every: float) -> None:
        """Wait until so many seconds have passed since `began`; go on drawing meanwhile."""
        while not self.interrupted:
            self.host_ns = perf_counter_ns() - began
            left = until - self.host_ns / 1e9
            if left <= 0.0:
                return
            sleep(min(left, max(0.01, every)))
            if refresh is not None and left > every:
                refresh()

    def _reclaim(self, tenant: str, size: int, at: float) -> None:
        pressure = self.engine.pressure
        assert pressure is not None
        plan = self.pool.reclaim(tenant, size, live="preempt", batch=self.engine.batch, mode=pressure.mode)
        pressure.carry_out(plan)
        self.reclaims.append(
            {
                "tenant": tenant,
                "at_s": at,
                "asked": size,
                "bytes": plan.bytes,
                "rungs": plan.rungs,
                "victims": sum(victim.fate != "trimmed" for victim in plan.victims),
                "shortfall": plan.shortfall,
                "shared": plan.shared,
                "pinned": plan.pinned,
                "host_full": plan.host_full,
            }
        )

    def _pressure(self) -> dict[str, Any]:
        pressure = self.engine.pressure
        if pressure is None:
            return {"policy": "reserve"}
        return {
            "policy": pressure.mode,
            "victims": dict(pressure.counts),
            "stopped": len(pressure),
            "swapped_bytes": pressure.swapped_bytes,
            "stalled_s": pressure.stalled,
            "expired": pressure.expired,
            "give_backs": {
                tenant.name: {
                    "count": got.count,
                    "rows": got.rows,
                    "bytes": got.bytes,
                    "seconds": quantiles(got.seconds),
                }
                for tenant, got in pressure.give_backs.items()
            },
            "reclaims": self.reclaims,
        }

    def stop(self) -> None:
        """End the run after the current step; safe to call from a signal handler."""
        self.interrupted = True

    def counts(self, name: str) -> TenantCounts:
        """Return the counts of a tenant, zeros if it has sent nothing."""
        return self.meter.tenants.get(name) or TenantCounts()

    def result(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what was measured up to now."""
        pool, engine, meter = self.pool, self.engine, self.meter
        waste, waste_of = meter.mean_waste()
        depths: dict[str | None, int] = {None: -1}
        for plan in self.plans:
            depths[plan.name] = depths[plan.parent] + 1
        rows = [
            self._tenant(plan, float(waste_of[i]), depths[plan.name]) for i, plan in enumerate(self.plans)
        ]
        unknown = [name for name in meter.tenants if name not in self.tenants]  # whose requests were refused
        rows += [self._tenant(TenantPlan(name), 0.0) for name in unknown]
        total = {
            key: sum(row[key] for row in rows)
            for key in ("requests", "finished", "prompt_tokens", "cached_tokens")
        }
        audit = pool.audit()
        stats = pool.stats()
        return {
            "schema": SCHEMA,
            "settings": settings,
            "interrupted": self.interrupted,
            "run": {
                "virtual_seconds": round(self.clock.now(), 6),
                "host_seconds": self.host_ns / 1e9,
                "steps": engine.steps,
                "requests": total["requests"],
                "finished": total["finished"],
                "refused": sum(sum(row["refused"].values()) for row in rows),
                "aborted": sum(counts.aborted for counts in meter.tenants.values()),
                "waiting": engine.waiting,
                "running": len(engine.rows),
                "idle_while_waiting_s": engine.idle_while_waiting,
                "oldest_wait_s": meter.oldest_wait,
                "step_us": scaled(quantiles(self._step_ns)),
                "core_us": scaled(quantiles(self._core_ns)),
            },
            "pool": {
                "capacity": pool.capacity,
                "peak_held": meter.peak_held,
                "peak_charged": meter.peak_charged,
                "free": pool.free,
                "held": pool.held,
                "cached": pool.cached,
                "pinned": pool.pinned,
                "hit_rate": total["cached_tokens"] / total["prompt_tokens"]
                if total["prompt_tokens"]
                else 0.0,
                "waste": waste,
                "fragmentation": pool.fragmented / max(1, pool.free),
                "evictions": stats.evictions,
                "stats": stats.as_dict(),
            },
            "tenants": rows,
            "pressure": self._pressure(),
            "audit": {"ok": audit.ok, "problems": [text for _, text in audit.findings]},
            "series": meter.series(list(engine.queues)),
        }

    def _tenant(self, plan: TenantPlan, waste: float, depth: int = 0) -> dict[str, Any]:
        counts, tenant = self.counts(plan.name), self.tenants.get(plan.name)
        return {
            "name": plan.name,
            "parent": plan.parent,
            "depth": depth,
            "reserve": tenant.reserve if tenant else 0,
            "limit": tenant.limit if tenant else None,
            "host_limit": tenant.host_limit if tenant else None,
            "weight": tenant.weight if tenant else 0,
            "requests": counts.arrived,
            "finished": counts.finished,
            "refused": {kind: group.count for kind, group in counts.refusals.items()},
            "refusals": [
                {
                    "what": group.cause.what,
                    "by": group.cause.by,
                    "requests": group.count,
                    "needed": group.cause.needed,
                    "room": group.cause.room,
                    "unit": group.cause.unit,
                    "text": group.cause.text(many=group.count > 1),
                }
                for group in counts.refusals.values()
            ],
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "generated_tokens": counts.generated_tokens,
            "hit_rate": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else 0.0,
            "wait_s": quantiles(counts.waits),
            "first_token_s": quantiles(counts.first_tokens),
            "token_s": quantiles(counts.paces),
            "stops": counts.stops,
            "stall_s": quantiles(counts.stalls),
            "waste": waste,
            "held": tenant.held if tenant else 0,
            "cached": tenant.cached if tenant else 0,
            "pinned": tenant.pinned if tenant else 0,
            "host_held": tenant.host_held if tenant else 0,
        }


def kv_bytes(spec: KVSpec) -> list[tuple[float, int | None]]:
    """Return, per layer group that keeps pages, bytes a token and the window (None: no window)."""
    return [(group.bytes_per_token, group.window) for group in spec.groups if group.kind != "state"]


def scaled(values: dict[str, float], factor: float = 1e-3) -> dict[str, float]:
    """Return nanoseconds as microseconds."""
    return {name: value * factor for name, value in values.items()}

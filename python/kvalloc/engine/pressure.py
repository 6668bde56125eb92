"""What the engine does when rows find no room: some stop, and go on later with the same tokens.

With `Engine(preempt=...)` a request is admitted when its prompt fits now, not its whole need. That fills the
pool with work, and sometimes a row then finds no room for its next page. After such a step the pool names
victims (`Pool.preempt`: least priority, most over its share, cheapest to restore; a tenant's oldest is
spared), which stop by swap or by recompute. They go on, oldest first, as soon as the pool has room for all
they need; nobody new is admitted before them but of tenants that are less over their share.

A tenant that lends its reserve and is refused inside it gets it back before the next step
(`Pool.give_back`), by the same way: those stop who are beyond their own.

Who stops loses no token: what it generated stays with its sequence. Recompute prefills it again, by chunks
among the others' steps; swap brings the pages back as they were.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from kvalloc import AdmissionRefused, OutOfPages, PlanError

if TYPE_CHECKING:
    from typing import Any, Literal

    from kvalloc import Plan, Sequence, Step, Tenant

    from .request import Request
    from .rows import Queue, Running
    from .scheduler import Engine

    Mode = Literal["auto", "swap", "recompute"]

__all__ = ["Pressure"]


class Pressure:
    """The requests of an engine that were stopped, and what it cost.

    Parameters
    ----------
    engine : Engine
        Whose rows may be taken.
    mode : {"auto", "swap", "recompute"}
        How victims stop; "auto": as each is restored sooner.

    Attributes
    ----------
    stopped : deque of Running
        Those that wait to go on, the oldest first.
    counts : Counter of str
        Victims by what became of them: "swapped", "recomputed".
    swapped_bytes : int
        Copied between device and host, both ways.
    stalled : float
        Seconds that sequences were stopped, summed over those that went on.
    """

    def __init__(self, engine: Engine, mode: Mode) -> None:
        self.engine, self.mode = engine, mode
        self.stopped: deque[Running] = deque()
        self.counts: Counter[str] = Counter()
        self.swapped_bytes = 0
        self.stalled = 0.0
        # Lenders that got bytes back, and the number of the step that is to use them.
        self._recalled: dict[Tenant, int] = {}

    def __len__(self) -> int:
        """Return how many wait to go on."""
        return len(self.stopped)

    def open(self, queue: Queue, request: Request, **how: Any) -> Sequence:
        """Open a request if its prompt fits now, and leaves every running row room for its next page.

        Those that were stopped go before requests of tenants that are more over their share than theirs.
        Inside its reserve a tenant waits for nobody.

        Parameters
        ----------
        queue : Queue
            Its tenant's.
        request : Request
            With its ``ids``.
        **how
            Other arguments of `Pool.open`.

        Raises
        ------
        AdmissionRefused
            What is in the way; "never" if there will never be room for all that it may grow to.
        """
        engine, tenant = self.engine, queue.tenant
        pool, size = engine.pool, len(request.prompt)
        assert request.ids is not None
        whole = pool.admit(tenant, size, request.max_new)
        if whole.verdict == "never":  # it would be, if the tenant had to pay for what it shares
            pool.open(tenant, request.ids, request.max_new, admit=True, **how).close()
        spec, shared = pool.spec, sum(count for _, count in request.share)
        need = spec.bytes_for(size + request.max_new) - spec.bytes_for(
            shared // spec.page_tokens * spec.page_tokens
        )
        own = _used(tenant) + need <= tenant.reserve
        if self.stopped and not own:
            first = self.stopped[0].queue.tenant
            if _over_use(tenant, need) >= _over_use(first, 0):
                raise self._refusal(f"those of {first.name} that were stopped go first", whole.bytes, 0)
        self._lend_again()
        soon = min(request.max_new, spec.page_tokens)
        try:
            sequence = pool.open(tenant, request.ids, soon, admit=True, **how)
        except AdmissionRefused as no:
            if not own or not self._give_back(tenant, no.asked):
                raise
            sequence = pool.open(tenant, request.ids, soon, admit=True, **how)
        page = sum(cls.page_bytes for cls in spec.classes[: len(spec.groups)])
        left = pool.capacity - pool.held - pool.pinned - pool.promised
        if not own and left < len(engine.rows) * page:
            sequence.close()
            raise self._refusal("rows that run need their next page", len(engine.rows) * page, max(0, left))
        return sequence

    def _refusal(self, why: str, asked: int, room: int) -> AdmissionRefused:
        error = AdmissionRefused(why)
        error.asked, error.room = asked, room
        return error

    def _give_back(self, tenant: Tenant, needed: int) -> int:
        """Get lent bytes back for the next step; return how many rows stopped for them, and 1 for none."""
        if not tenant.lend:
            return 0
        engine = self.engine
        idle = [run.sequence for run in self.stopped if run.sequence.state == "running"]
        try:
            plan = engine.pool.give_back(tenant, needed, batch=engine.batch, sessions=idle, mode=self.mode)
        except PlanError:
            return 0
        self._recalled[tenant] = engine.steps
        return max(1, self.carry_out(plan))

    def _lend_again(self) -> None:
        """Lend what was given back for a step that is over."""
        for tenant, step in list(self._recalled.items()):
            if step < self.engine.steps:
                del self._recalled[tenant]
                tenant.lend_unused()

    def relieve(self, out: Step) -> bool:
        """Stop rows so that those that were refused can grow next time; False if none could be stopped.

        Where no row grew, and the pool spares all that could stop, the newest stops: the others then go on.
        """
        engine = self.engine
        self._lend_again()
        levels: dict[str | None, int] = {}
        lenders: dict[Tenant, int] = {}
        for refusal in out.refused:
            needed = refusal.needed_bytes
            tenant = refusal.sequence.tenant if refusal.sequence is not None else None
            if (
                tenant is not None
                and refusal.why == "claim"
                and tenant.lend
                and _used(tenant) + lenders.get(tenant, 0) + needed <= tenant.reserve
            ):
                lenders[tenant] = lenders.get(tenant, 0) + needed
            elif refusal.why in ("limit", "claim", "frames", "fragmented"):
                levels[refusal.level] = levels.get(refusal.level, 0) + needed
        stopped = sum(self._give_back(tenant, needed) for tenant, needed in lenders.items())
        for level, needed in levels.items():
            plan = engine.pool.preempt(level, needed, batch=engine.batch, mode=self.mode)
            stopped += self.carry_out(plan)
        if not stopped and not out.num_tokens and len(engine.rows) > 1:
            newest = max(engine.rows.running, key=lambda run: run.sequence.number)
            stopped = self.carry_out(engine.pool.suspend(newest.sequence, mode=self.mode, batch=engine.batch))
        return stopped > 0

    def carry_out(self, plan: Plan) -> int:
        """Follow a plan that took rows: copy, commit, and remember who has to go on later.

        Parameters
        ----------
        plan : Plan
            Built with the engine's batch; see `Pool.preempt` and `Pool.reclaim`.

        Returns
        -------
        int
            Rows that were stopped.
        """
        engine, now = self.engine, self.engine.clock.now()
        runs = []
        for victim in plan.victims:
            if victim.row is None:
                continue
            run = engine.rows.running[victim.row]
            engine.rows.remove(run)
            runs.append(run)
            self.counts[victim.fate] += 1
            run.stopped = now
        # Whatever becomes of the copies, these have no row now.
        self.stopped = deque(sorted((*self.stopped, *runs), key=lambda run: run.request.admitted))
        with plan:
            engine.model.execute(plan)
        self.swapped_bytes += plan.copied[1]
        return len(runs)

    def resume(self) -> Queue | None:
        """Let stopped requests go on while there is room; return the queue of the first that has none."""
        engine = self.engine
        while self.stopped and len(engine.rows) < engine.max_rows:
            run = self.stopped[0]
            if run.sequence.state != "running":  # else its plan was aborted, and it has all it had
                try:
                    plan = engine.pool.resume(run.sequence)
                except OutOfPages:
                    return run.queue
                with plan:
                    engine.model.execute(plan)
                self.swapped_bytes += plan.copied[1]
            self.stopped.popleft()
            self.stalled += engine.clock.now() - run.stopped
            run.row = engine.batch.add(run.sequence)
            run.todo = run.sequence.num_tokens - run.sequence.num_written
            engine.rows.add(run)
        return None

    def drop(self, run: Running) -> None:
        """Close a request that was stopped and will not go on."""
        self.stopped.remove(run)
        run.sequence.close()


def _used(tenant: Tenant) -> int:
    return tenant.held + tenant.pinned + tenant.promised


def _over_use(tenant: Tenant, more: int) -> float:
    """How far a tenant is over its reserve by its weight, with so many bytes more."""
    return (tenant.held + tenant.promised + more - tenant.reserve) / tenant.weight

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

A plan whose copies take longer than it lives expires, and all is as before it. That is counted, and whoever
it was for tries again: rows that are to stop without copies then, rows that are to go on a few times more.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvalloc import AdmissionRefused, OutOfPages, PlanError

if TYPE_CHECKING:
    from typing import Any, Literal

    from kvalloc import Plan, Sequence, Step, Tenant

    from .request import Request
    from .rows import Queue, Running
    from .scheduler import Engine

    Mode = Literal["auto", "swap", "recompute"]

__all__ = ["GiveBacks", "Pressure"]

_TRIES = 3  # plans to go on that expire one after another before nothing more is tried in this step


@dataclass(slots=True)
class GiveBacks:
    """What one lender asked back so far.

    Attributes
    ----------
    count : int
        How often it got something.
    rows : int
        Rows that stopped for it.
    bytes : int
        What came back.
    seconds : array of float
        From asking to having, each time: the copies of those that stopped.
    """

    count: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: array[float] = field(default_factory=lambda: array("d"))


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
    expired : int
        Plans that ran out of time before their copies were done.
    waits_for : str
        What those that wait to go on wait for.
    give_backs : dict of Tenant to GiveBacks
        What lenders asked back.
    """

    def __init__(self, engine: Engine, mode: Mode) -> None:
        self.engine, self.mode = engine, mode
        self.stopped: deque[Running] = deque()
        self.counts: Counter[str] = Counter()
        self.swapped_bytes = 0
        self.stalled = 0.0
        self.expired = 0
        self.waits_for = ""
        self.give_backs: dict[Tenant, GiveBacks] = {}
        self._late = False  # the last plan that stopped rows has expired
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
        engine, began = self.engine, self.engine.clock.now()
        idle = [run.sequence for run in self.stopped if run.sequence.state == "running"]
        try:
            plan = engine.pool.give_back(tenant, needed, batch=engine.batch, sessions=idle, mode=self._how())
        except PlanError:
            return 0
        self._recalled[tenant] = engine.steps
        rows = self.carry_out(plan)
        if plan.state == "committed":
            got = self.give_backs.setdefault(tenant, GiveBacks())
            got.count, got.rows, got.bytes = got.count + 1, got.rows + rows, got.bytes + plan.bytes
            got.seconds.append(engine.clock.now() - began)
        return max(1, rows)

    def _lend_again(self) -> bool:
        """Lend what was given back for a step that is over; True if there was any."""
        over = [tenant for tenant, step in self._recalled.items() if step < self.engine.steps]
        for tenant in over:
            del self._recalled[tenant]
            tenant.lend_unused()
        return bool(over)

    def relieve(self, out: Step) -> bool:
        """Stop rows so that those that were refused can grow next time; False if there is no more to be had.

        What was given back and is not used is lent again first: that alone may be enough. Where no row
        grew, and the pool spares all that could stop, the newest stops: the others then go on.
        """
        engine = self.engine
        lent = self._lend_again()
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
            plan = engine.pool.preempt(level, needed, batch=engine.batch, mode=self._how())
            stopped += self.carry_out(plan)
        if not stopped and not out.num_tokens and len(engine.rows) > 1:
            newest = max(engine.rows.running, key=lambda run: run.sequence.number)
            plan = engine.pool.suspend(newest.sequence, mode=self._how(), batch=engine.batch)
            stopped = self.carry_out(plan)
        return lent or stopped > 0

    def _how(self) -> Mode:
        """How the next victims stop: without copies, if those of the last ones took too long."""
        return "recompute" if self._late else self.mode

    def carry_out(self, plan: Plan) -> int:
        """Follow a plan that took rows: copy, commit, and remember who has to go on later.

        If the plan expires meanwhile its sequences have all they had, and go on as soon as there are rows.

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
        runs, fates = [], Counter[str]()
        for victim in plan.victims:
            if victim.row is None:
                continue
            run = engine.rows.running[victim.row]
            engine.rows.remove(run)
            runs.append(run)
            fates[victim.fate] += 1
            run.stopped = now
        # Whatever becomes of the copies, these have no row now.
        self.stopped = deque(sorted((*self.stopped, *runs), key=lambda run: run.request.admitted))
        self._late = not self._executed(plan)
        if not self._late:
            self.counts.update(fates)
            for run in runs:
                engine.tell("stopped", run.request)
        return len(runs)

    def _executed(self, plan: Plan) -> bool:
        """Copy and commit; False if the plan's time was over first, and so all is as before it."""
        try:
            with plan:
                self.engine.model.execute(plan)
        except PlanError as error:
            if error.state != "expired":
                raise
            self.expired += 1
            return False
        self.swapped_bytes += plan.copied[1]
        return True

    def resume(self) -> None:
        """Let stopped requests go on, the oldest first, while there is room."""
        engine, tries = self.engine, _TRIES
        self._lend_again()
        self.waits_for = "what is held outside this engine"  # if nothing runs here
        while self.stopped and len(engine.rows) < engine.max_rows:
            run = self.stopped[0]
            if run.sequence.state != "running":  # else its plan came to nothing, and it has all it had
                try:
                    plan = engine.pool.resume(run.sequence)
                except OutOfPages:
                    return
                if not self._executed(plan):
                    tries -= 1
                    if not tries:
                        self.waits_for = "copies that take longer than their plan lives"
                        return
                    continue
            self.stopped.popleft()
            self._went_on(run)

    def _went_on(self, run: Running) -> None:
        """Give a request that was stopped a row again."""
        engine, stalled = self.engine, self.engine.clock.now() - run.stopped
        self.stalled += stalled
        run.request.stalled += stalled
        run.row = engine.batch.add(run.sequence)
        run.todo = run.sequence.num_tokens - run.sequence.num_written
        engine.rows.add(run)

    def drop(self, run: Running) -> None:
        """Close a request that was stopped and will not go on."""
        self.stopped.remove(run)
        run.sequence.close()


def _used(tenant: Tenant) -> int:
    return tenant.held + tenant.pinned + tenant.promised


def _over_use(tenant: Tenant, more: int) -> float:
    """How far a tenant is over its reserve by its weight, with so many bytes more."""
    return (tenant.held + tenant.promised + more - tenant.reserve) / tenant.weight

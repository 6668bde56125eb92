"""The reference scheduler: continuous batching over one pool, fair between tenants.

Each call of `Engine.step` is one step of a serving engine:

1. *Admit.* Tenants take turns by virtual time: bytes they were granted times the steps they hold them,
   divided by their weight; the smallest goes next. So tenants that all wait hold memory by their weights,
   whatever the lengths of their requests. Within a tenant it is first come, first served. A request is
   opened with its whole need (prompt and every token it may generate) reserved, so that once it runs it
   finishes: nothing is preempted, nothing is half loaded. With ``preempt`` it is opened when its prompt
   fits, and rows that find no room later make others stop for a while (`pressure`). A request that can
   never fit is refused at once and the next one is looked at.
2. *Step.* Rows that decode get one token each. What is left of the step's token budget goes to prompts, in
   the order they were admitted, in chunks. One call, `Batch.step`, makes room for all of them.
3. *Run* the model, which says what each row sampled. A row whose prompt is not in yet sampled nothing: -1.
4. *Commit*, then retire the rows that are done.

Tokens go out as they come: to `Request.on_token`, or to whoever pulls `Engine.stream`.

Nobody starves. When the next request in turn waits for room in the pool, no later one may take that room;
only requests that fit into what is free of their own tenant's reserve go past, because those bytes are not
available to the waiting one anyway. The same holds below a tenant whose limit the request waits for; who is
not below it is not kept waiting. While nothing runs no room is kept: nothing would be given back, so whoever
waits then waits for bytes that this engine does not hold.

Per-row state is kept in arrays numbered like the batch's rows. Python touches a single row only when it is
admitted, while its prompt is going in, and when it ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvalloc import AdmissionRefused, KvallocError, OutOfPages

from .clock import Clock, VirtualClock
from .pressure import Pressure
from .request import Cause
from .rows import Queue, Rows, Running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvalloc import Batch, Plan, Pool, Sequence, Step, Tenant

    from .pressure import Mode
    from .request import Int32, Request

__all__ = ["Engine", "Model"]


class Model(Protocol):
    """What turns the batch's arrays into tokens."""

    def step(self, batch: Batch, step: Step, rows: Rows) -> Int32:
        """Run one step and return what each row sampled, int32 ``[len(rows)]``; the engine may write to it.

        The entries of rows whose prompt is not in after this step (`Rows.prefilling`) are ignored.
        """
        ...

    def execute(self, plan: Plan) -> None:
        """Copy what a plan moves; its pages are where it says when the next step begins."""
        ...


class Engine:
    """Continuous batching over one pool.

    Parameters
    ----------
    pool : Pool
        The pool.
    model : Model
        What runs a step; `kvalloc.engine.ClockModel` only takes time.
    tenants : mapping of str to Tenant
        Who may send requests. One of another name is refused.
    clock : Clock, optional
        Where time is read; by default a virtual clock, which a model has to move.
    max_rows : int
        Most sequences that run at once.
    token_budget : int
        Most tokens in one step: decoding rows first, then prompts.
    max_tokens : int
        The longest sequence, prompt and reply.
    whole_need : bool
        Reserve a request's whole need when it is admitted. Without it a sequence may find no room half way;
        when no row at all can grow, the newest one fails and says by how much.
    preempt : {"auto", "swap", "recompute"}, optional
        Reserve nothing; stop rows when others find no room, and let them go on later (`pressure`).
    stop : int or iterable of int, optional
        Tokens that end a reply early.
    reuse : bool
        Hit prefixes that are cached. Without it every prompt is computed whole.
    listener : callable, optional
        Called as ``listener(event, request)`` with "arrived", "admitted", "stopped" (for lack of room, to go
        on later), "finished", "refused" or "aborted".
    """

    def __init__(
        self,
        pool: Pool,
        model: Model,
        tenants: Mapping[str, Tenant],
        *,
        clock: Clock | None = None,
        max_rows: int = 256,
        token_budget: int = 8192,
        max_tokens: int = 131_072,
        whole_need: bool = True,
        preempt: Mode | None = None,
        stop: int | Iterable[int] | None = None,
        reuse: bool = True,
        listener: Callable[[str, Request], None] | None = None,
    ) -> None:
        if token_budget < max_rows:
            raise ValueError(
                f"token_budget {token_budget} is below max_rows {max_rows}: each row decodes a token"
            )
        self.pool, self.model, self.clock = pool, model, clock or VirtualClock()
        self.max_rows, self.token_budget, self.max_tokens = max_rows, token_budget, max_tokens
        self.whole_need, self.reuse = whole_need and preempt is None, reuse
        self.pressure = None if preempt is None else Pressure(self, preempt)
        stops = () if stop is None else (stop,) if isinstance(stop, int) else stop
        self.stop = np.array(sorted(set(stops)), dtype=np.int32)
        self.batch = pool.batch(max_rows, max_tokens)
        self.rows = Rows(self.batch, max_rows)
        self.queues = {name: Queue(tenant, name, i) for i, (name, tenant) in enumerate(tenants.items())}
        self.steps = 0
        self.waiting = 0  # requests in all queues
        self.core_ns = 0  # time the last step spent in Batch.step and Batch.commit
        self.idle_while_waiting = 0.0  # seconds in which somebody waited and nothing ran: stays 0
        self.tell = listener or (lambda event, request: None)
        self._turns: list[tuple[float, int, Queue]] = []  # heap of queues to look at, by virtual time
        self._asleep: list[Queue] = []  # queues whose first request waits until something is given back
        # For whom the room of a level is kept: by the name of the tenant with that limit, None for the pool.
        self._kept: dict[str | None, Queue] = {}
        self._keeps = True
        self._virtual = 0.0
        self._opened = itertools.count()

    def run(self, arrivals: Iterable[Request]) -> Iterator[float]:
        """Serve requests in the order they arrive; yield the time after each step.

        Parameters
        ----------
        arrivals : iterable of Request
            Sorted by arrival. Read one ahead, so it may be endless.
        """
        source = iter(arrivals)
        coming = next(source, None)
        while coming is not None or self.waiting or self.rows or self.pressure:
            now = self.clock.now()
            while coming is not None and coming.arrival <= now:
                self.submit(coming)
                coming = next(source, None)
            if not self.step():
                self.wake()  # limits may have changed, pins may have run out
                if coming is not None:
                    self.clock.wait_until(coming.arrival)
                    self.idle_while_waiting += self.clock.now() - now if self.waiting else 0.0
                else:
                    self._give_up()
            yield self.clock.now()

    def stream(self, request: Request) -> Iterator[int]:
        """Submit a request and yield its tokens as they come.

        Whoever asks for a token that is not there yet runs steps for everybody, so several streams may be
        read in turn. One that has begun and is dropped before its end aborts its request.

        Parameters
        ----------
        request : Request
            Its `on_token` is set. When nothing comes any more, `Request.refused` says why, if it was refused.
        """
        tokens: deque[int] = deque()
        request.on_token = tokens.append
        self.submit(request)
        return self._pull(request, tokens)

    def _pull(self, request: Request, tokens: deque[int]) -> Iterator[int]:
        try:
            while tokens or request.finished < 0.0:
                if tokens:
                    yield tokens.popleft()
                elif not self.step():
                    self.wake()
                    if not self.step():
                        self._give_up()
        finally:
            if request.finished < 0.0:
                self.abort(request)

    def submit(self, request: Request) -> None:
        """Put a request at the end of its tenant's queue."""
        self.tell("arrived", request)
        queue, need = self.queues.get(request.tenant), len(request.prompt) + request.max_new
        if queue is None:
            self._refuse(request, Cause(f"unknown tenant {request.tenant!r}"))
        elif need > self.max_tokens:
            self._refuse(request, Cause("never fits", "longest sequence", need, self.max_tokens, "tokens"))
        else:
            if not queue.requests:
                queue.served = max(queue.served, self._virtual)  # being away earns no credit
            if not queue.listed:
                self._list(queue)
            queue.requests.append(request)
            self.waiting += 1

    def abort(self, request: Request) -> bool:
        """Take a request out, whether it waits or runs; return False if it does neither."""
        for run in self.rows.running:
            if run.request is request:
                self._retire(run, "aborted")
                return True
        for run in self.pressure.stopped if self.pressure else ():
            if run.request is request:
                self._drop(run, "aborted")
                return True
        queue = self.queues.get(request.tenant)
        if queue is None or request not in queue.requests:
            return False
        queue.requests.remove(request)  # an empty queue is dropped when its turn comes
        request.finished = self.clock.now()
        self.waiting -= 1
        self.wake()
        self.tell("aborted", request)
        return True

    def step(self) -> bool:
        """Run one step; return False if there was nothing to run."""
        self.core_ns = 0
        self._admit()
        rows, batch = self.rows, self.batch
        if not rows.running and self._kept:
            self._keeps = False
            self.wake()
            self._admit()
            self._keeps = True
        n = len(rows)
        if n == 0:
            return False
        budget = self.token_budget - (n - len(rows.prefilling))
        for run in rows.prefilling:
            rows.counts[run.row] = chunk = min(run.todo, budget)
            budget -= chunk
        start = perf_counter_ns()
        out = batch.step(rows.counts[:n])
        stepped = perf_counter_ns()
        if out.num_tokens == 0:
            batch.commit()
            if self.pressure is None or not self.pressure.relieve(out):
                self._fail_newest(out)
            return True
        sampled = self.model.step(batch, out, rows)
        for refusal in out.refused:
            sampled[refusal.row] = -1
        if rows.prefilling:
            self._advance_prompts(sampled, {refusal.row for refusal in out.refused})
        committing = perf_counter_ns()
        batch.commit(sampled)
        self.core_ns = stepped - start + perf_counter_ns() - committing
        self.steps += 1
        left, got = rows.left[:n], sampled >= 0
        left -= got
        np.copyto(rows.last[:n], sampled, where=got)
        done = left == 0
        if len(self.stop):
            done |= np.isin(sampled, self.stop)
        ended = [rows.running[row] for row in done.nonzero()[0][::-1].tolist()]
        told = got.nonzero()[0].tolist() if rows.streams else ()
        news = [(rows.running[row].request.on_token, int(sampled[row])) for row in told]
        try:
            for on_token, token in news:
                if on_token is not None:
                    on_token(token)
        finally:  # whatever a listener does, who is done leaves
            for run in ended:
                if run.request.finished < 0.0:  # else a listener has just aborted it
                    self._retire(run, "finished")
        if self.pressure is not None and out.refused:
            self.pressure.relieve(out)
        return True

    def _advance_prompts(self, sampled: Int32, refused: set[int]) -> None:
        """Count off the chunks that went in; those that are complete decode from now on."""
        rows, now = self.rows, self.clock.now()
        still: list[Running] = []
        for run in rows.prefilling:
            if run.row not in refused:
                run.todo -= int(rows.counts[run.row])
            if run.todo:
                sampled[run.row] = -1
                still.append(run)
            else:
                rows.counts[run.row] = 1
                if run.request.first_token < 0.0:
                    run.request.first_token = now
        rows.prefilling = still

    def _admit(self) -> None:
        """Let those go on that were stopped; open requests in turn while rows and the step's budget last."""
        if self.pressure:
            self.pressure.resume()
        if not self._turns:
            return
        rows = self.rows
        backlog = len(rows) + sum(run.todo for run in rows.prefilling)
        while self._turns and len(rows) < self.max_rows and backlog < self.token_budget:
            queue = heapq.heappop(self._turns)[2]
            while queue.requests:
                request = queue.requests[0]
                sequence = self._open(queue, request)
                if sequence is None and request.refused:
                    queue.requests.popleft()  # it never fits: look at the next one
                    self.waiting -= 1
                    continue
                break
            else:
                queue.listed = False
                continue
            if sequence is None:
                self._asleep.append(queue)
                continue
            queue.requests.popleft()
            self.waiting -= 1
            run = self._start(queue, request, sequence)
            backlog += run.todo
            self._list(queue)

    def _open(self, queue: Queue, request: Request) -> Sequence | None:
        """Open a request, or return None: it waits, or was refused for good."""
        tenant = queue.tenant
        for level in queue.levels if self._kept else ():
            if self._kept.get(level, queue) is not queue:
                need = self.pool.spec.bytes_for(len(request.prompt) + request.max_new)
                if tenant.held + tenant.pinned + tenant.promised + need > tenant.reserve:
                    queue.waits_for = Cause("stuck", f"room that is kept for {self._kept[level].name}")
                    return None
        if request.ids is None:
            request.ids = request.prompt.tokens()
        how: dict[str, Any] = {
            "share": request.share,
            "extra_key": None if self.reuse else f"alone {next(self._opened)}",
        }
        try:
            if self.pressure is not None:
                return self.pressure.open(queue, request, **how)
            return self.pool.open(tenant, request.ids, request.max_new, admit=self.whole_need, **how)
        except AdmissionRefused as no:
            if no.verdict == "never":
                self._refuse(request, self._cause("never fits", no, tenant))
            else:
                queue.waits_for = self._cause("stuck", no, tenant)
                if self._keeps:
                    self._kept.setdefault(no.level, queue)
        except KvallocError as error:
            self._refuse(request, Cause(str(error)))
        return None

    def _cause(self, what: str, no: OutOfPages, tenant: Tenant) -> Cause:
        """Say what is in the way: a limit or the pool, by itself or with what others have reserved."""
        level: Tenant | None = tenant
        while level is not None and level.name != no.level:
            level = level.parent
        limit = None if level is None else level.limit
        by, bound = ("pool", self.pool.capacity) if limit is None else (f"limit of {no.level}", limit)
        if what == "never fits" and no.room < bound:
            by += " beside others' reserves"
        return Cause(what, by, no.asked, no.room)

    def _start(self, queue: Queue, request: Request, sequence: Sequence) -> Running:
        prompt = len(request.prompt)
        request.ids, request.admitted, request.cached = None, self.clock.now(), sequence.cached_tokens
        run = Running(request, sequence, queue, self.batch.add(sequence), prompt - request.cached)
        self.rows.add(run)
        self._virtual = max(self._virtual, queue.served)
        held = self.pool.spec.bytes_for(prompt + request.max_new // 2)  # on average
        queue.served += held * request.max_new / queue.tenant.weight
        queue.running += 1
        queue.waits_for = None
        self.tell("admitted", request)
        return run

    def _retire(self, run: Running, event: str) -> None:
        """Give back a row, its sequence and what it reserved."""
        request, queue = run.request, run.queue
        request.produced = request.max_new - int(self.rows.left[run.row])
        request.finished = self.clock.now()
        self.batch.remove(run.sequence)
        self.rows.remove(run)
        run.sequence.close()
        queue.running -= 1
        self.wake()
        self.tell(event, request)

    def _drop(self, run: Running, event: str) -> None:
        """Give back the sequence of a request that was stopped, and what it reserved."""
        assert self.pressure is not None
        self.pressure.drop(run)
        run.request.produced, run.request.finished = run.request.max_new - run.left, self.clock.now()
        run.queue.running -= 1
        self.wake()
        self.tell(event, run.request)

    def _refuse(self, request: Request, why: Cause) -> None:
        request.cause, request.ids, request.finished = why, None, self.clock.now()
        self.tell("refused", request)

    def wake(self) -> None:
        """Look at those who wait: something was given back, or a limit or reserve was changed outside."""
        self._kept.clear()
        for queue in self._asleep:
            self._list(queue)
        self._asleep.clear()

    def _list(self, queue: Queue) -> None:
        queue.listed = True
        heapq.heappush(self._turns, (queue.served, queue.index, queue))

    def _fail_newest(self, out: Step) -> None:
        """No row could grow: the newest one ends, which lets the others go on."""
        refused = {refusal.row: refusal for refusal in out.refused}
        run = max((self.rows.running[row] for row in refused), key=lambda run: run.request.admitted)
        no = refused[run.row]
        by = f"a limit above {run.queue.name}" if no.why == "limit" else "pool"
        run.request.cause = Cause("out of pages", by, no.needed_bytes, no.room)
        self._retire(run, "refused")

    def _give_up(self) -> None:
        """Nothing runs or will come: who is first waits for bytes held elsewhere, or for copies too slow."""
        if self.pressure:
            run = self.pressure.stopped[0]
            run.request.cause = Cause("stuck", self.pressure.waits_for)
            self._drop(run, "refused")
            return
        for queue in self.queues.values():
            if queue.requests:
                held = Cause("stuck", "what is held outside this engine")
                self._refuse(queue.requests.popleft(), queue.waits_for or held)
                self.waiting -= 1
        self.wake()  # those behind may need less

"""State of the rows of a batch, and of the queues in front of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvalloc import Batch, Sequence, Tenant

    from .request import Cause, Int32, Request

__all__ = ["Queue", "Rows", "Running"]


@dataclass(slots=True, eq=False)
class Running:
    """A request that has a row."""

    request: Request
    sequence: Sequence
    queue: Queue
    row: int
    todo: int  # prompt tokens that have no room yet
    left: int = field(init=False)  # tokens to generate when it got its row
    stopped: float = -1.0  # when it was stopped, if it was

    def __post_init__(self) -> None:
        """Begin with all of them."""
        self.left = self.request.max_new


@dataclass(slots=True, eq=False)
class Queue:
    """What one tenant waits for."""

    tenant: Tenant
    name: str
    index: int
    levels: tuple[str | None, ...] = field(init=False)  # the tenant and all above it; None is the pool
    requests: deque[Request] = field(default_factory=deque)
    served: float = 0.0  # virtual time: bytes granted x steps / weight
    running: int = 0
    listed: bool = False  # stands among those to look at, or among those that wait
    waits_for: Cause | None = None  # why the first request waits; None: it was not looked at, or has left

    def __post_init__(self) -> None:
        """Look the levels up once: a tenant does not move."""
        above: Tenant | None = self.tenant
        names: list[str | None] = []
        while above is not None:
            names.append(above.name)
            above = above.parent
        self.levels = (*names, None)


class Rows:
    """State of the batch's rows: the same numbers, the same moves when a row leaves.

    Attributes
    ----------
    running : list of Running
        One a row.
    prefilling : list of Running
        Those whose prompt is not in yet, in the order they were admitted.
    streams : int
        How many of them want to be told of each token.
    counts, left, last, reply, tenant : int32 ``[max_rows]``
        Tokens the row asks for in this step; tokens it has still to generate; the one it sampled last; the
        text its made-up reply is drawn from (`kvalloc.engine.request`); its tenant's number.
    lens : int32 ``[max_rows]``
        The batch's own `seq_lens`.
    """

    def __init__(self, batch: Batch, max_rows: int) -> None:
        self.running: list[Running] = []
        self.prefilling: list[Running] = []
        self.lens: Int32 = np.asarray(batch.seq_lens)
        self.streams = 0
        self.counts, self.left, self.last, self.reply, self.tenant = np.zeros((5, max_rows), dtype=np.int32)

    def __len__(self) -> int:
        """Return the number of rows in use."""
        return len(self.running)

    def add(self, run: Running) -> None:
        """Append a row."""
        row = run.row
        self.running.append(run)
        self.prefilling.append(run)
        self.streams += run.request.on_token is not None
        self.counts[row] = 0
        self.left[row] = run.left
        self.reply[row] = run.request.reply
        self.tenant[row] = run.queue.index

    def remove(self, run: Running) -> None:
        """Take a row out; the last one moves into the hole."""
        last = self.running.pop()
        run.left = int(self.left[run.row])
        self.streams -= run.request.on_token is not None
        if last is not run:
            for array in (self.counts, self.left, self.last, self.reply, self.tenant):
                array[run.row] = array[last.row]
            self.running[run.row] = last
            last.row = run.row
        if run.todo:
            self.prefilling.remove(run)

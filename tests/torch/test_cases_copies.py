"""Fault cases H: copies beside a device that works behind the caller's back, by streams that are late."""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from store_contract import Moves, copying, pool_of, spec_of

torch = pytest.importorskip("torch")

from kvalloc.store.streams import Order  # noqa: E402


class Late:
    """A queue whose work is done when somebody makes it: `drain`. Marks of other queues are waited for."""

    def __init__(self, *, waits: bool = True) -> None:
        self.queue, self.waits, self.done, self.sent = [], waits, 0, 0

    def run(self, work):
        self.queue.append(work)
        self.sent += 1

    def record(self):
        return self, self.sent

    def wait(self, mark):
        if self.waits:
            self.queue.append(mark)

    def finish(self):
        self.drain()

    def drain(self, upto=None):
        """Do what is queued, or so many pieces of work; what is waited for is done first."""
        while self.queue and (upto is None or self.done < upto):
            work = self.queue.pop(0)
            if isinstance(work, tuple):
                other, count = work
                other.drain(count)
            else:
                work()
                self.done += 1


def stores(copies, compute):
    pool = pool_of(spec_of("full", layers=1), host_bytes="64KiB")
    batch = pool.batch(2, 64)
    batch.add(pool.open("a", np.arange(16)))
    batch.step()
    store = kvalloc.TorchStore(pool, order=Order(compute, copies))
    for part in (*store.page_parts(0), *store.page_parts(0, host=True)):
        part.fill_(0)
    return store, batch, int(batch.block_table()[0, 0])


def filled(value):
    return torch.full((16, 2, 32), float(value))


@pytest.mark.parametrize("waits", [True, False])
def test_h43_copy_out_waits_for_the_writer(waits):
    """The copy stream runs as soon as it may. One that does not wait takes bytes that are not written yet."""
    compute, copies = Late(), Late(waits=waits)
    store, batch, frame = stores(copies, compute)
    store.write(0, filled(3), filled(4), batch)  # queued, and late
    store.execute(Moves((0, 0, frame, 1, 0, 5)))
    copies.drain()
    compute.drain()
    out = store.page_parts(0, host=True)[0][5].view(torch.float32)
    assert (out[: 16 * 64] == (3 if waits else 0)).all()


@pytest.mark.parametrize("waits", [True, False])
def test_h43_copy_in_waits_for_the_reader(waits):
    """A page that a kernel still reads is not copied over."""
    compute, copies = Late(), Late(waits=waits)
    store, batch, frame = stores(copies, compute)
    view = store.views(0)
    store.write(0, filled(3), filled(4), batch)
    compute.drain()
    seen = []
    store._order.compute(lambda: seen.append(float(view.k[frame].mean())))  # a kernel that reads
    store.page_parts(0, host=True)[0][5].view(torch.float32).fill_(9)
    store.execute(Moves((1, 0, 5, 0, 0, frame)))
    copies.drain()
    compute.drain()
    assert seen == [3 if waits else 9]
    assert (view.k[frame] == 9).all()


@pytest.mark.parametrize("waits", [True, False])
def test_h44_a_frame_is_used_again_while_an_old_copy_reads_it(waits):
    """A page is preempted, its frame given to another in the same step: the copy has the old bytes, whole."""
    compute, copies = Late(waits=waits), Late()
    store, batch, frame = stores(copies, compute)
    store.write(0, filled(3), filled(4), batch)
    compute.drain()
    store.execute(Moves((0, 0, frame, 1, 0, 5)))  # queued, and late
    batch.step(counts=[0])
    batch.slot_mapping()[:16] = np.arange(16) + frame * 16
    store._step.clear()
    store._order.compute(lambda: store.views(0).k[frame].fill_(7))  # the new owner writes
    compute.drain()
    copies.drain()
    out = store.page_parts(0, host=True)[0][5].view(torch.float32)
    assert (out[: 16 * 64] == (3 if waits else 7)).all()
    assert (store.views(0).k[frame] == 7).all()


def test_h43_a_step_s_copies_are_computing(monkeypatch):
    """Copies of shared pages stand in the queue with the kernels, between the writes around them."""
    compute, copies = Late(), Late()
    store, batch, frame = stores(copies, compute)
    store.write(0, filled(3), filled(4), batch)
    store.copy(copying(batch, [0, frame, 9]))
    store.execute(Moves((0, 0, 9, 1, 0, 2)))
    copies.drain()
    out = store.page_parts(0, host=True)[0][2].view(torch.float32)
    assert (out[: 16 * 64] == 3).all()
    assert compute.queue == []

"""Threads in one handle, exceptions inside a `with`, interpreter exit, fork, dead threads."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

import kvalloc
from tinypool import (
    FULL,
    PAGE,
    SPECS,
    check_idle,
    finish,
    hit,
    ids,
    make_pool,
    serve,
    unchanged,
)


@pytest.fixture
def pool():
    pool = make_pool(20)
    pool.tenant("a", pin_budget=20 * PAGE)
    return pool


def race(jobs, seconds=1.0):
    """Run jobs in a loop, each in a thread; the errors of others than `SequenceBusy` are the test's."""
    stop = threading.Event()
    failures, busy, done = [], [0], [0]

    def run(job):
        while not stop.is_set():
            try:
                job()
                done[0] += 1
            except kvalloc.SequenceBusy:
                busy[0] += 1
            except (kvalloc.InvalidArgument, kvalloc.OutOfPages, kvalloc.ClosedError):
                pass
            except BaseException as failure:
                failures.append(failure)
                return

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        threads[0].join(seconds)
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(switch)
    if failures:
        raise failures[0]
    assert done[0] > 0
    return busy[0]


@pytest.mark.parametrize("spec", ["full", "full+window", "full+state"])
def test_threads_in_one_sequence_and_batch(spec):
    pool = make_pool(60, SPECS[spec])
    pool.tenant("a")
    batch = pool.batch(3, 200)
    seq, other = pool.open("a", ids(40)), pool.open("a", ids(50, 1))
    batch.add(other)
    race(
        [
            lambda: (batch.add(seq), batch.remove(seq)),
            lambda: (batch.step(token_budget=3), batch.commit()),
            lambda: (seq.extend([1]), seq.truncate(40)),
            lambda: seq.fork().close(),
            lambda: (repr(seq), repr(batch), seq.tokens, batch.rows, batch.csr()),
            lambda: pool.audit().ok or pytest.fail("books"),
        ]
    )
    with contextlib.suppress(kvalloc.InvalidArgument):
        while True:
            batch.commit()
    seq.close()
    other.close()
    check_idle(pool)


def test_threads_that_cut_a_context_and_go_on_with_it():
    pool = make_pool(60, SPECS["full"])
    tenant = pool.tenant("a", cut=8)
    batch, seq = pool.batch(2, 200), pool.open("a", ids(60))
    batch.add(seq)
    batch.step()
    batch.commit([1])

    def cut(end):
        plan = pool.cut("a", PAGE, batch=batch)
        with contextlib.suppress(kvalloc.PlanError):
            getattr(plan, end)()

    race(
        [
            lambda: cut("commit"),
            lambda: cut("abort"),
            lambda: (batch.step(), batch.commit([1])),
            lambda: (tenant.set(cut=16), tenant.set(cut=8)),
            lambda: seq.fork().close(),
            lambda: pool.open("a", ids(60)).close(),
            lambda: pool.audit().ok or pytest.fail("books"),
        ]
    )
    assert pool.stats().cut_pages > 0
    seq.close()
    batch.close()
    check_idle(pool)


def test_a_second_thread_gets_sequence_busy(pool):
    """A long prompt is looked up without holding the interpreter; meanwhile others work."""
    long = ids(40_000)
    race(
        [
            lambda: pool.open("a", long).close(),
            lambda: pool.open("a", ids(20)).close(),
            lambda: pool.admit("a", 5),
        ]
    )
    check_idle(pool)
    assert issubclass(kvalloc.SequenceBusy, kvalloc.KvallocError)


def test_closing_under_others_hands(pool):
    for n in range(30):
        batch = pool.batch(2, 100)
        seq = pool.open("a", ids(30, n))
        batch.add(seq)
        start = threading.Barrier(4)

        def attempt(job, start=start):
            start.wait()
            with contextlib.suppress(kvalloc.KvallocError):
                job()

        jobs = [seq.close, batch.step, lambda batch=batch, seq=seq: batch.remove(seq), batch.close]
        threads = [threading.Thread(target=attempt, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        batch.close()
        seq.close()
        check_idle(pool)


def test_tenants_are_made_by_many_threads_at_once(pool):
    race(
        [
            lambda: pool.tenant("same", weight=2),
            lambda: pool.tenant("same", limit="1MiB"),
            lambda: pool.tenants(),
        ],
        0.5,
    )
    assert [t.name for t in pool.tenants()].count("same") == 1


# Exceptions, interpreter exit, fork, dead threads.


@pytest.mark.parametrize("what", ["sequence", "batch", "pin", "pool"])
def test_an_exception_inside_a_with(what):
    pool = make_pool(20)
    pool.tenant("a", pin_budget=20 * PAGE)
    seq = serve(pool, "a", ids(40))
    batch = pool.batch(2, 100)
    if what == "sequence":
        with pytest.raises(ZeroDivisionError), pool.open("a", ids(30, 1)) as inner:  # noqa: PT012
            batch.add(inner)
            batch.step()
            raise ZeroDivisionError
        assert inner.closed
        assert len(batch) == 0
    elif what == "batch":
        with pytest.raises(ZeroDivisionError), batch:  # noqa: PT012
            batch.add(seq)
            seq.extend([1])
            batch.step()
            raise ZeroDivisionError
        assert len(batch) == 0
        assert not seq.closed
        assert seq.num_slots == seq.num_written == 40
    elif what == "pin":
        with pytest.raises(ZeroDivisionError), pool.pin(seq, 32, owner="a"):
            raise ZeroDivisionError
        assert pool.pins() == []
    else:
        with pytest.raises(ZeroDivisionError), pool:
            raise ZeroDivisionError
        assert pool.closed
    seq.close()
    check_idle(pool)


def test_handles_close_themselves(pool):
    seq = serve(pool, "a", ids(40))
    gone = weakref.ref(seq)
    seq = None
    gc.collect()
    assert gone() is None
    check_idle(pool)
    seq = pool.open("a", ids(30, 1))
    batch = pool.batch(2, 100)
    batch.add(seq)
    finish(batch)
    del seq
    gc.collect()
    assert len(batch) == 1
    assert pool.held > 0
    del batch
    gc.collect()
    check_idle(pool)


def script(text, **options):
    text = "import kvalloc, os, sys, threading, gc\n" + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


SETUP = """
spec = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64)
pool = kvalloc.Pool(spec, "1MiB", events=100)
tenant = pool.tenant("a", pin_budget="1MiB")
seq = pool.open(tenant, list(range(100)))
batch = pool.batch(4, 400)
batch.add(seq)
out = batch.step()
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "batch.commit(); pin = pool.pin(seq, 64, owner='a')",
        "pool.close()",
        "del pool; gc.collect()",
        "cycle = [seq, batch]; cycle.append(cycle)",
        "sys.modules['kept'] = (pool, seq, batch, out)",
        "twins = [seq.fork() for _ in range(5)]",
        "import atexit\natexit.register(lambda: (seq.close(), pool.close()))",
        "threading.Thread(target=lambda: [batch.rows for _ in range(10**9)], daemon=True).start()",
        "def work():\n    while True: pool.open('a', list(range(5000))).close()\n"
        "threading.Thread(target=work, daemon=True).start()",
        "threading.Thread(target=lambda: [pool.audit() for _ in range(10**9)], daemon=True).start()",
        "class Bad:\n    def __del__(self): seq.close(); batch.close()\nbad = Bad(); bad.me = bad",
    ],
)
def test_interpreter_exit_with_open_handles(end):
    done = script(SETUP + end + "\nprint('end')\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


CHILD = """
def child():
    calls = [
        lambda: pool.open("a", [1]), lambda: pool.admit("a", 1), lambda: pool.tenant("b"), pool.tenants,
        pool.stats, lambda: pool.free, lambda: pool.pages, pool.audit, pool.events,
        lambda: pool.batch(1, 1), pool.pins, lambda: seq.num_tokens, lambda: seq.tokens,
        lambda: seq.extend([1]), seq.fork, lambda: seq.tenant, lambda: seq.block_table(),
        lambda: batch.step(), lambda: batch.commit(), lambda: batch.add(seq), lambda: batch.remove(seq),
        lambda: batch.rows, lambda: len(batch), lambda: batch.csr(), lambda: batch.outstanding,
        lambda: out.num_tokens, lambda: out.refused, lambda: tenant.held, tenant.usage,
        lambda: tenant.set(weight=2), pool.reset_prefix_cache,
    ]
    for n, call in enumerate(calls):
        try:
            call()
        except kvalloc.ClosedError as error:
            assert "fork" in str(error)
        else:
            raise AssertionError(f"call {n} worked in the child")
    for thing in (pool, seq, batch, tenant, out):
        try:
            repr(thing)
        except kvalloc.ClosedError:
            pass
    seq.close(); batch.close(); pool.close()
    # A pool of its own works.
    mine = kvalloc.Pool(spec, "1MiB")
    mine.tenant("a")
    with mine.open("a", [1, 2, 3]):
        pass
    assert mine.audit().ok
"""


@pytest.mark.parametrize("busy", [False, True])
def test_fork_of_the_process(busy):
    work = """
def work():
    while not stop.is_set():
        pool.tenant("t", weight=2); pool.audit(); pool.pins(); pool.tenants()
        with pool.open("a", list(range(64))): pass
stop = threading.Event()
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
"""
    text = f"""
{SETUP}
{CHILD}
{work if busy else ""}
import warnings; warnings.simplefilter("ignore")
for _ in range({20 if busy else 1}):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
{"stop.set(); [t.join() for t in threads]" if busy else ""}
batch.commit()
assert seq.num_written == 100
seq.close()
assert pool.audit().ok and pool.held == 0
print("parent unharmed")
"""
    done = script(text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent unharmed\n", "")


def forked_worker(pool, seq, answers):
    try:
        seq.extend([1])
    except kvalloc.ClosedError as error:
        answers.put(str(error))


def test_fork_by_multiprocessing(pool):
    context = multiprocessing.get_context("fork")
    seq = serve(pool, "a", ids(40))
    answers = context.SimpleQueue()
    process = context.Process(target=forked_worker, args=(pool, seq, answers))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert "spawn" in answers.get()
    assert seq.num_tokens == 40
    seq.close()
    check_idle(pool)


def test_handles_do_not_travel():
    """Pickling a handle is refused; a spec travels."""
    import copy
    import pickle

    pool = make_pool(4)
    tenant = pool.tenant("a")
    for thing in (pool, tenant, pool.open("a", [1]), pool.batch(1, 10), pool.pages):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError):
                way(thing)
    assert pickle.loads(pickle.dumps(FULL)) == FULL


@pytest.mark.parametrize("end", ["raise SystemExit", "raise KeyboardInterrupt", "1 / 0", "sys.exit(3)"])
def test_a_thread_that_dies_holding_handles(end):
    done = script(
        f"""
        {textwrap.indent(SETUP, " " * 8)}
        def work():
            mine = pool.open("a", list(range(500, 600)))
            rows = pool.batch(1, 200)
            rows.add(mine)
            rows.step()
            {end}

        threading.excepthook = lambda arguments: None
        for _ in range(50):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        gc.collect()
        assert pool.held == 7 * spec.page_bytes() and pool.audit().ok
        batch.commit()
        seq.close()
        assert pool.held == 0 and pool.free + pool.cached == pool.capacity and pool.audit().ok
        print("goes on")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


def test_an_object_that_raises_while_it_is_read(pool):
    """Arguments are Python objects; their exceptions come through, and nothing has happened."""

    class Bad:
        def __index__(self):
            raise ZeroDivisionError

        def __repr__(self):
            raise ZeroDivisionError

        def __iter__(self):
            yield 1
            raise ZeroDivisionError

        def __len__(self):
            return 2

    bad = Bad()
    batch = pool.batch(1, 100)
    with unchanged(pool):
        for call in (
            lambda: pool.open("a", bad),
            lambda: pool.open("a", [bad]),
            lambda: pool.open(bad, [1]),
            lambda: pool.open("a", [1], share=bad),
            lambda: pool.batch(bad, 1),
            lambda: batch.step(bad),
            lambda: pool.pages.release(bad),
            lambda: pool.pages.lookup("a", bad),
            lambda: pool.tenant("x", reserve=bad),
            lambda: pool.tenant("x", publish=bad),
            lambda: batch.bind(seq_lens=bad),
            lambda: kvalloc.Pool(FULL, bad),
            lambda: pool.advance(bad),
            lambda: pool.tenant("x", weight=bad),
        ):
            with pytest.raises((ZeroDivisionError, kvalloc.KvallocError, TypeError)):
                call()
    assert hit(pool, "a", ids(20)) == 0

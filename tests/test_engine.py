"""The reference scheduler: fault cases of admission, fairness, order, accounting; the replay around it."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

import kvalloc
from kvalloc.engine import (
    Blocks,
    ClockModel,
    Engine,
    Literal,
    Request,
    StepTime,
    Text,
    VirtualClock,
    WallClock,
    builtin_tenants,
    builtin_workload,
)
from kvalloc.engine.meter import MOST_SAMPLES, Meter, quantiles
from kvalloc.engine.replay import SCHEMA, Replay
from kvalloc.engine.tenants import TenantPlan, TenantsError, numbered

PAGE = 4096  # bytes; 16 tokens of the spec below


def small_spec(page_tokens: int = 16) -> kvalloc.KVSpec:
    return kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, dtype="float16", page_tokens=page_tokens)


def make_pool(pages: int, **options) -> kvalloc.Pool:
    """Return a pool with so many usable pages: one frame more is never given out."""
    return kvalloc.Pool(small_spec(), (pages + 1) * PAGE, **options)


class Log:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Request]] = []

    def __call__(self, event: str, request: Request) -> None:
        self.events.append((event, request))

    def of(self, event: str) -> list[Request]:
        return [request for kind, request in self.events if kind == event]


def make_engine(pool: kvalloc.Pool, *names: str, **options) -> tuple[Engine, Log]:
    clock, log = VirtualClock(), Log()
    tenants = {name: pool.tenant(name) for name in names or ("a",)}
    options.setdefault("max_tokens", 4096)
    model = options.pop("model", None) or ClockModel(clock, StepTime(), [(256.0, None)])
    return Engine(pool, model, tenants, clock=clock, listener=log, **options), log


def ask(text: int, prompt: int, reply: int, at: float = 0.0, tenant: str = "a", **more) -> Request:
    return Request(at, tenant, Text(((text, prompt),)), reply, reply=(1 << 30) + text, **more)


def check(pool: kvalloc.Pool) -> None:
    report = pool.audit()
    assert report.ok, report.findings
    assert pool.free + pool.held + pool.cached + pool.pinned == pool.capacity


def serve(engine: Engine, requests: list[Request]) -> list[float]:
    return list(engine.run(requests))


# Fault cases


def test_e26_never_fits_is_said_at_once_and_the_queue_moves_on():
    pool = make_pool(49)  # 50 pages, one reserved: 784 tokens
    engine, log = make_engine(pool)
    big, next_one = ask(1, 1002, 10), ask(2, 100, 10)
    engine.submit(big)
    engine.submit(next_one)
    engine.step()
    assert log.of("refused") == [big]
    assert "never fits" in big.refused
    assert (big.cause.by, big.cause.room) == ("pool", pool.capacity)
    assert f"the pool allows {kvalloc.format_bytes(pool.capacity)}" in big.refused
    assert log.of("admitted") == [next_one]
    assert pool.stats()["hit_tokens"] == 0
    serve(engine, [])
    assert log.of("finished") == [next_one]
    check(pool)


def test_e26_longer_than_a_row_is_refused_before_the_pool_is_asked():
    engine, log = make_engine(make_pool(200), max_tokens=1024)
    too_long, fits = ask(1, 1000, 25), ask(2, 1000, 24)
    serve(engine, [too_long, fits])
    assert too_long.refused == "never fits: 1,025 tokens needed, longest sequence 1,024 tokens"
    assert log.of("finished") == [fits]


def test_e26_above_the_limit_of_a_level_never_fits_either():
    pool = make_pool(1000)
    team = pool.tenant("team", limit=20 * PAGE)
    pool.tenant("a", parent=team)
    engine, log = make_engine(pool)
    big, small = ask(1, 400, 100), ask(2, 200, 100)
    serve(engine, [big, small])
    assert log.of("refused") == [big]
    assert log.of("finished") == [small]
    check(pool)


def test_e27_prompt_fits_but_not_its_reply():
    pool = make_pool(63)  # 1,008 tokens
    engine, log = make_engine(pool)
    over, exact = ask(1, 1000, 24), ask(2, 1000, 8)
    serve(engine, [over, exact])
    assert "never fits" in over.refused
    assert over.produced == 0
    assert log.of("finished") == [exact]
    assert exact.produced == 8
    check(pool)


def test_e28_the_whole_need_is_reserved_before_a_prompt_is_loaded():
    pool = make_pool(300)
    engine, log = make_engine(pool, token_budget=512)
    long = [ask(i, 1000, 100) for i in range(1, 5)]  # 69 pages each: 276 of 300
    fifth = ask(5, 1000, 100)
    for _ in engine.run([*long, fifth]):
        assert fifth.admitted < 0 or log.of("finished")  # it holds nothing before somebody is done
    finished = log.of("finished")
    assert len(finished) == 5
    assert finished[-1] is fifth
    assert fifth.admitted >= min(request.finished for request in long)
    assert len(log.of("admitted")) == 5  # nobody was taken out and queued again
    check(pool)


def test_e29_the_only_sequence_that_can_not_grow_fails_with_its_numbers():
    pool = make_pool(10)
    engine, log = make_engine(pool, whole_need=False)
    hungry, later = ask(1, 100, 200), ask(2, 50, 20, at=10.0)
    serve(engine, [hungry, later])
    assert hungry.refused.startswith("out of pages: ")
    assert hungry.cause.needed == PAGE
    assert f"{kvalloc.format_bytes(PAGE)} needed" in hungry.refused
    assert 0 < hungry.produced < 200
    assert log.of("finished") == [later]  # serving goes on
    check(pool)


def test_e29_without_reservations_the_newest_makes_room_for_the_others():
    pool = make_pool(20)
    engine, log = make_engine(pool, whole_need=False)
    requests = [ask(i, 60, 120, at=i * 1e-6) for i in range(1, 5)]
    serve(engine, requests)
    assert len(log.of("finished")) + len(log.of("refused")) == 4
    assert requests[0] in log.of("finished")
    check(pool)


def test_e31_full_cache_more_sequences_than_pages_all_finish():
    pool = make_pool(16)
    engine, log = make_engine(pool)
    serve(engine, [ask(100 + i, 16, 0 + 16) for i in range(8)])  # fills the cache
    serve(engine, [ask(i, 10, 4) for i in range(20)])
    assert len(log.of("finished")) == 28
    check(pool)


def test_e32_nobody_waits_while_nothing_runs():
    pool = make_pool(40)
    engine, log = make_engine(pool, "a", "b")
    rng = random.Random(3)
    requests = [
        ask(i, rng.randint(1, 400), rng.randint(1, 60), at=i * 0.05, tenant=rng.choice("ab"))
        for i in range(200)
    ]
    idle = 0
    for _ in engine.run(requests):
        idle = idle + 1 if engine.waiting and not len(engine.rows) else 0
        assert idle <= 1  # all rows may end in one step; the next one fills them
    assert engine.idle_while_waiting == 0.0
    assert len(log.of("finished")) == 200
    check(pool)


def test_e32_what_waits_for_bytes_that_nobody_here_holds_is_told_so():
    pool = make_pool(20)
    holder = pool.open(pool.tenant("outside"), np.arange(200, dtype=np.int32), 0)
    batch = pool.batch(1, 512)
    batch.add(holder)
    assert not batch.step().refused
    batch.commit()
    engine, log = make_engine(pool)
    stuck = ask(1, 200, 20)
    serve(engine, [stuck])  # ends, although it can't be served
    assert log.of("refused") == [stuck]
    assert stuck.refused.startswith("stuck: ")
    assert (stuck.cause.by, stuck.cause.needed) == ("pool", 14 * PAGE)
    batch.remove(holder)
    holder.close()
    again = ask(2, 200, 20)
    serve(engine, [again])
    assert log.of("finished") == [again]


def test_e32_a_full_cache_of_shared_beginnings_keeps_nobody_waiting():
    # The scope's pages all have children that other tenants pay for, so none of its own can go first.
    run = Replay(small_spec(), 3001 * PAGE, numbered(4, share_tokens=512), max_tokens=65_536)
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.3, 600))
    requests = [
        Request(
            float(at), "", Text(((i + 1, int(rng.lognormal(6, 1)) + 1),)), int(rng.integers(20, 300)), key=i
        )
        for i, at in enumerate(times)
    ]
    result = run.run(requests)
    assert result["run"]["finished"] == 600
    assert result["run"]["idle_while_waiting_s"] == 0
    assert result["audit"]["ok"]


def test_j51_numbers_come_from_the_books_and_stay_in_range():
    pool = make_pool(30)
    engine, _ = make_engine(pool, "a", "b")
    rng = random.Random(5)
    requests = [
        ask(i % 7, rng.randint(1, 300), rng.randint(1, 50), at=i * 0.1, tenant="ab"[i % 2]) for i in range(80)
    ]
    for _ in engine.run(requests):
        books = (pool.free, pool.held, pool.cached, pool.pinned)
        assert min(books) >= 0
        assert sum(books) == pool.capacity
        assert sum(q.tenant.held + q.tenant.cached + q.tenant.pinned for q in engine.queues.values()) == sum(
            books[1:]
        )
    assert pool.held == 0


def test_j52_a_request_that_is_tried_a_hundred_times_counts_its_hits_once():
    pool = make_pool(40)
    engine, log = make_engine(pool)
    prefix = ((1, 320),)
    serve(engine, [Request(0.0, "a", Text(prefix), 1)])
    before = pool.stats()["hit_tokens"]
    engine.submit(ask(2, 300, 20))
    engine.step()
    waits = Request(0.0, "a", Text((*prefix, (3, 80))), 50)
    engine.submit(waits)
    for _ in range(100):
        engine.wake()  # every step tries again
        engine.step()
        if waits.admitted >= 0:
            break
        assert pool.stats()["hit_tokens"] == before
    serve(engine, [])
    assert waits in log.of("finished")
    gained = pool.stats()["hit_tokens"] - before
    assert gained == waits.cached  # once
    assert waits.cached > 0


# Order and fairness


def test_first_come_first_served_within_a_tenant():
    engine, log = make_engine(make_pool(60), max_rows=2, token_budget=64)
    requests = [ask(i, 50, 5, at=i * 1e-9) for i in range(10)]
    serve(engine, requests)
    assert log.of("admitted") == requests


def test_tokens_are_shared_out_by_weight():
    pool = make_pool(64)
    pool.tenant("a", weight=3)
    pool.tenant("b", weight=1)
    engine, _ = make_engine(pool, "a", "b", max_rows=4)
    requests = [ask(i, 100, 20, tenant=name) for i, name in enumerate("ab" * 300)]
    served = {"a": 0, "b": 0}
    for request in requests:
        engine.submit(request)
    while all(queue.requests for queue in engine.queues.values()):
        engine.step()
    for request in requests:
        served[request.tenant] += request.admitted >= 0
    assert served["a"] / served["b"] == pytest.approx(3, rel=0.05)


def test_a_tenant_that_was_away_has_no_credit():
    pool = make_pool(64)
    engine, log = make_engine(pool, "a", "b", max_rows=1)
    for i in range(40):
        engine.submit(ask(i, 20, 2))
    while len(log.of("finished")) < 20:
        engine.step()
    for i in range(40):
        engine.submit(ask(100 + i, 20, 2, tenant="b"))
    while len(log.of("finished")) < 40:
        engine.step()
    late = [request.tenant for request in log.of("finished")[20:]]
    assert 8 <= late.count("b") <= 12  # half, not all of them


def test_a_large_request_is_not_starved_by_small_ones():
    pool = make_pool(100)
    engine, log = make_engine(pool, "a", "b")
    small = [ask(i, 100, 60, at=i * 0.05, tenant="b") for i in range(400)]
    large = ask(999, 1400, 60, at=2.0)
    serve(engine, sorted([*small, large], key=lambda request: request.arrival))
    assert large in log.of("finished")
    assert large.admitted - large.arrival < 5.0  # while the flood lasts for 20 s and more
    check(pool)


def test_room_in_ones_own_reserve_goes_past_a_waiting_large_request():
    pool = make_pool(100)
    pool.tenant("b", reserve=30 * PAGE)
    engine, log = make_engine(pool, "a", "b")
    first, large, reserved = ask(1, 600, 400), ask(2, 900, 100, at=1e-6), ask(3, 100, 20, at=0.5, tenant="b")
    serve(engine, [first, large, reserved])
    assert reserved.admitted < first.finished <= large.admitted
    assert len(log.of("finished")) == 3
    check(pool)


def test_a_tenant_at_its_limit_makes_nobody_else_wait():
    pool = make_pool(200)
    pool.tenant("a", limit=20 * PAGE)
    engine, _ = make_engine(pool, "a", "b")
    requests = [ask(i, 200, 100, at=0.0) for i in range(5)] + [
        ask(100 + i, 200, 50, at=0.1, tenant="b") for i in range(5)
    ]
    serve(engine, requests)
    assert max(request.admitted for request in requests if request.tenant == "b") < 0.2
    assert all(request.produced == request.max_new for request in requests)


def test_a_large_request_below_a_shared_limit_is_not_starved_by_its_sibling():
    pool = make_pool(1000)
    team = pool.tenant("team", limit=100 * PAGE)
    pool.tenant("a", parent=team)
    pool.tenant("b", parent=team)
    engine, log = make_engine(pool, "a", "b", "c")
    small = [ask(i, 100, 60, at=i * 0.05, tenant="b") for i in range(400)]
    other = [ask(500 + i, 100, 60, at=i * 0.05, tenant="c") for i in range(400)]
    large = ask(999, 1400, 60, at=2.0)
    serve(engine, sorted([*small, *other, large], key=lambda request: request.arrival))
    assert large in log.of("finished")
    assert large.admitted - large.arrival < 5.0
    assert max(request.admitted - request.arrival for request in other) < 1.0  # not below the limit: not kept
    check(pool)


def test_an_unknown_tenant_is_refused():
    engine, log = make_engine(make_pool(10))
    serve(engine, [ask(1, 10, 1, tenant="nobody"), ask(2, 10, 1)])
    assert [request.refused for request in log.of("refused")] == ["unknown tenant 'nobody'"]
    assert len(log.of("finished")) == 1


# The step


class Recorder:
    """A model that checks the arrays it is given and remembers what it sampled for whom."""

    def __init__(self, budget: int) -> None:
        self.budget, self.said, self.n, self.seen = budget, {}, 0, {}

    def step(self, batch, step, rows):
        n = len(rows)
        assert len(batch) == n == step.num_rows
        assert step.num_tokens <= self.budget
        counts = np.asarray(step.counts)[:n]
        lens = np.asarray(batch.seq_lens)[:n]
        out = np.arange(self.n, self.n + n, dtype=np.int32)
        self.n += n
        filling = set(map(id, rows.prefilling))
        for row, run in enumerate(rows.running):
            assert run.row == row
            request = run.request
            before = self.seen.get(id(request), request.cached)
            self.seen[id(request)] = before + int(counts[row])
            assert lens[row] == self.seen[id(request)]
            if id(run) not in filling:
                assert counts[row] == 1  # decoding rows always get their token
            if lens[row] >= len(request.prompt):
                self.said.setdefault(id(request), []).append(int(out[row]))
        return out


@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_its_tokens_whatever_rows_move(seed):
    rng = random.Random(seed)
    pool = make_pool(rng.choice((60, 200, 600)))
    model = Recorder(budget=96)
    engine, log = make_engine(pool, "a", "b", "c", model=model, max_rows=16, token_budget=96)
    requests = [
        Request(
            i * 1e-9,
            rng.choice("abc"),
            Text(((rng.randint(0, 3), rng.randint(1, 90)), (100 + i, rng.randint(1, 90)))),
            rng.randint(1, 40),
        )
        for i in range(150)
    ]
    aborted = set()
    for step, _ in enumerate(engine.run(requests)):
        if step % 9 == 0:
            victim = rng.choice(requests)
            if victim.finished < 0 and victim in log.of("arrived") and engine.abort(victim):
                aborted.add(id(victim))
                assert not engine.abort(victim)
    assert len(log.of("finished")) + len(aborted) == 150
    for request in log.of("finished"):
        assert len(model.said[id(request)]) == request.max_new == request.produced
        assert model.seen[id(request)] == len(request.prompt) + request.max_new - 1
        assert request.arrival <= request.admitted <= request.first_token <= request.finished
    assert not engine.rows.running
    assert not engine.rows.prefilling
    assert engine.waiting == 0
    assert pool.held == 0
    check(pool)


class Lengths:
    """A model that says how long each row is."""

    def step(self, batch, step, rows):
        return np.asarray(batch.seq_lens)[: len(rows)].copy()


@pytest.mark.parametrize("stop", [25, [7, 25, 99]])
def test_a_stop_token_ends_a_reply(stop):
    engine, log = make_engine(make_pool(50), model=Lengths(), stop=stop)
    request = ask(1, 20, 100)
    serve(engine, [request])
    assert log.of("finished") == [request]
    assert request.produced == 6  # at lengths 20 to 25


def test_tokens_are_told_as_they_come():
    engine, log = make_engine(make_pool(50), model=Lengths())
    said = []
    one, two = ask(1, 40, 3, on_token=said.append), ask(2, 10, 5)  # the second tells nobody
    engine.submit(one)
    engine.submit(two)
    told = []
    while engine.step():
        told.append(len(said))
    assert said == [40, 41, 42]
    assert told == [1, 2, 3, 3, 3]
    assert log.of("finished") == [one, two]
    assert engine.rows.streams == 0


def test_rows_remember_their_last_token_when_they_move():
    class Checks(Recorder):
        def step(self, batch, step, rows):
            filling = set(map(id, rows.prefilling))
            for row, run in enumerate(rows.running):
                if id(run) not in filling:
                    assert rows.last[row] == self.said[id(run.request)][-1]
            return super().step(batch, step, rows)

    engine, log = make_engine(make_pool(200), model=Checks(64), max_rows=6, token_budget=64)
    requests = [ask(i, 5 + 13 * i, 1 + i * 7 % 11) for i in range(12)]
    serve(engine, requests)
    assert len(log.of("finished")) == 12


def test_a_listener_may_abort_who_it_listens_to_and_others():
    engine, log = make_engine(make_pool(50), model=Lengths())
    said = []

    def enough(token: int) -> None:
        said.append(token)
        if token == 22:
            assert engine.abort(one)
            assert engine.abort(two)

    one, two, three = ask(1, 20, 3, on_token=enough), ask(2, 10, 9), ask(3, 30, 4)
    serve(engine, [one, two, three])
    assert said == [20, 21, 22]
    assert (log.of("aborted"), log.of("finished")) == ([one, two], [three])
    assert (one.produced, three.produced) == (3, 4)
    check(engine.pool)


def test_a_listener_that_fails_keeps_nobody_in():
    def fails(token: int) -> None:
        raise RuntimeError("the client is gone")

    engine, log = make_engine(make_pool(50), model=Lengths())
    one, two = ask(1, 20, 1, on_token=fails), ask(2, 10, 2)
    engine.submit(one)
    engine.submit(two)
    with pytest.raises(RuntimeError, match="the client is gone"):
        engine.step()
    assert log.of("finished") == [one]
    while engine.step():
        pass
    assert log.of("finished") == [one, two]
    check(engine.pool)


def test_streams_run_the_engine_for_everybody():
    engine, _ = make_engine(make_pool(50), model=Lengths())
    one, two = engine.stream(ask(1, 20, 3)), engine.stream(ask(2, 10, 5))
    assert next(one) == 20
    assert list(two) == [10, 11, 12, 13, 14]
    assert engine.steps == 5
    assert list(one) == [21, 22]
    assert not engine.rows


def test_a_stream_of_a_refused_request_is_empty_and_one_of_an_aborted_request_ends():
    engine, _ = make_engine(make_pool(9), model=Lengths())
    never, stranger = ask(1, 2000, 3), ask(2, 10, 3, tenant="nobody")
    assert list(engine.stream(never)) == list(engine.stream(stranger)) == []
    assert never.refused.startswith("never fits")
    assert stranger.refused == "unknown tenant 'nobody'"
    first, waits = ask(3, 100, 20), ask(4, 100, 20)
    running, waiting = engine.stream(first), engine.stream(waits)
    assert next(running) == 100
    assert engine.abort(waits)
    assert engine.abort(first)
    assert list(waiting) == list(running) == []
    check(engine.pool)


def test_a_stream_that_nothing_can_serve_ends_with_a_cause():
    pool = make_pool(9)
    engine, _ = make_engine(pool, model=Lengths())
    outside = pool.open(pool.tenant("outside"), np.arange(100, dtype=np.int32), 20, admit=True)
    request = ask(1, 100, 20)
    assert list(engine.stream(request)) == []
    assert request.refused.startswith("stuck")
    outside.close()


def test_a_stream_that_is_dropped_aborts_its_request():
    engine, log = make_engine(make_pool(50), model=Lengths())
    request = ask(1, 20, 30)
    tokens = engine.stream(request)
    assert [next(tokens), next(tokens)] == [20, 21]
    tokens.close()
    assert log.of("aborted") == [request]
    assert not engine.rows
    check(engine.pool)


def test_without_reuse_every_prompt_is_computed_whole():
    engine, _ = make_engine(make_pool(100), model=Lengths(), reuse=False)
    requests = [ask(1, 100, 4) for _ in range(3)]
    serve(engine, requests)
    assert [request.cached for request in requests] == [0, 0, 0]
    assert not engine.pool.stats().hit_tokens


def test_a_prompt_that_hits_is_not_computed_again():
    pool = make_pool(100)
    engine, _ = make_engine(pool)
    prompt = Text(((1, 320),))
    one = Request(0.0, "a", prompt, 4, reply=77)
    two = Request(5.0, "a", Text(((1, 320), (77, 4), (2, 40))), 4)  # the first turn, its reply, and more
    three = Request(9.0, "a", prompt, 4)  # the whole prompt again: one token at least has to be computed
    serve(engine, [one, two, three])
    assert one.cached == 0
    assert two.cached == 320
    assert three.cached == 304
    assert two.first_token - two.admitted < one.first_token - one.admitted


def test_prompts_are_shared_under_a_scope_and_not_beside_it():
    pool = make_pool(200)
    org = pool.tenant("org")
    pool.tenant("a", parent=org, publish=["org"])
    pool.tenant("b", parent=org, publish=["org"])
    pool.tenant("c")
    engine, _ = make_engine(pool, "a", "b", "c")
    share = (("org", 160),)
    requests = [
        Request(0.0, "a", Text(((1, 160), (2, 160))), 1, share),
        Request(5.0, "b", Text(((1, 160), (2, 160))), 1, share),
        Request(9.0, "c", Text(((1, 160), (2, 160))), 1),
        Request(12.0, "a", Text(((1, 160), (2, 160))), 1, share),
    ]
    serve(engine, requests)
    assert [request.cached for request in requests] == [0, 160, 0, 304]
    check(pool)


def test_prompts_may_be_literal_arrays():
    pool = make_pool(100)
    engine, log = make_engine(pool)
    serve(engine, [Request(0.0, "a", Literal(np.arange(50, dtype=np.int32)), 3)])
    assert len(log.of("finished")) == 1


def test_one_that_waits_for_bytes_held_elsewhere_holds_up_nobody_for_good():
    """Its room is not kept while nothing runs, and at the end only who is first in a queue is given up."""
    pool = make_pool(20)
    holder = pool.open(pool.tenant("outside"), np.arange(100, dtype=np.int32), 0)
    batch = pool.batch(1, 512)
    batch.add(holder)
    assert not batch.step().refused  # 7 pages
    engine, log = make_engine(pool, "a", "b")
    stuck, behind = ask(1, 250, 6), ask(2, 30, 2)
    others = [ask(i, 30, 2, at=i * 0.001, tenant="b") for i in range(3, 9)]
    serve(engine, [stuck, behind, *others])
    assert log.of("refused") == [stuck]
    assert stuck.refused.startswith("stuck: ")
    assert len(log.of("finished")) == 7
    assert log.of("finished")[-1] is behind  # who is first in its queue keeps its place until the end
    assert engine.waiting == 0


def test_a_budget_below_the_rows_is_refused():
    with pytest.raises(ValueError, match="token_budget 10 is below max_rows 20"):
        make_engine(make_pool(10), max_rows=20, token_budget=10)


def test_the_clock_model_takes_the_time_it_says():
    pool, clock = make_pool(200), VirtualClock()
    cost = StepTime(base=1.0, prefill=0.001, row=0.01, bandwidth=1000.0)
    model = ClockModel(clock, cost, [(2.0, None), (1.0, 50)])
    engine = Engine(
        pool, model, {"a": pool.tenant("a")}, clock=clock, token_budget=256, max_rows=8, max_tokens=1024
    )
    engine.submit(ask(1, 100, 3))
    engine.step()
    assert clock.now() == pytest.approx(1.0 + 0.1 + 0.200 + 0.05)
    engine.step()
    assert clock.now() == pytest.approx(1.35 + 1.0 + 0.01 + 0.202 + 0.05)


def test_step_time_parses_and_refuses():
    assert StepTime.parse("") == StepTime()
    assert StepTime.parse(" base = 0.5 , row=1e-3") == StepTime(base=0.5, row=1e-3)
    for text, message in (
        ("speed=1", "is not NAME=NUMBER"),
        ("base", "is not NAME=NUMBER"),
        ("base=fast", "'fast' for base is not a number"),
        ("base=nan", "base is nan"),
        ("base=-1", "base is -1"),
        ("base=inf", "base is inf"),
        ("bandwidth=0", "bandwidth is 0"),
        ("base=0,prefill=0,row=0", "time would stand still"),
    ):
        with pytest.raises(ValueError, match=message):
            StepTime.parse(text)


def test_the_wall_clock_waits():
    clock = WallClock()
    clock.wait_until(0.02)
    assert clock.now() >= 0.02
    clock.wait_until(0.0)


# Replay


def test_replay_of_the_builtin_workload():
    run = Replay(
        kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128),
        "4GiB",
        builtin_tenants(),
        max_tokens=32_768,
    )
    calls = []
    result = run.run(builtin_workload(20.0), refresh=lambda: calls.append(1), every=0.0, settings={"seed": 0})
    assert result["schema"] == SCHEMA
    assert result["audit"] == {"ok": True, "problems": []}
    ran = result["run"]
    assert ran["requests"] == ran["finished"] + ran["refused"] > 20
    assert ran["idle_while_waiting_s"] == 0
    assert ran["steps"] > 100
    assert len(calls) >= ran["steps"]
    rows = {row["name"]: row for row in result["tenants"]}
    assert list(rows) == [plan.name for plan in builtin_tenants()]
    assert rows["chat"]["hit_rate"] > 0.5
    assert rows["search"]["hit_rate"] == 0
    assert sum(row["prompt_tokens"] for row in rows.values()) > 0
    series = result["series"]
    assert (
        len(series["time"])
        == len(series["pool"]["free"])
        == len(series["tenants"]["chat"]["held"])
        <= MOST_SAMPLES
    )
    for at in range(len(series["time"])):
        assert (
            sum(series["pool"][what][at] for what in ("free", "held", "cached", "pinned"))
            == result["pool"]["capacity"]
        )
    assert 0 < result["pool"]["waste"] < 0.05


def test_replay_repeats_exactly():
    def once() -> dict:
        run = Replay(small_spec(), 200 * PAGE, numbered(3), max_tokens=4096)
        requests = [
            Request(i * 0.02, "", Blocks((0, i % 9), 64, 100 + i % 28), 1 + i % 30, key=i % 9)
            for i in range(200)
        ]
        result = run.run(requests)
        for key in ("host_seconds", "step_us", "core_us"):
            del result["run"][key]
        return result

    assert once() == once()


def test_replay_can_be_stopped_and_says_what_is_left():
    run = Replay(small_spec(), 200 * PAGE, [TenantPlan("a", traffic=1.0)], max_tokens=4096)
    steps = []

    def stop() -> None:
        steps.append(1)
        if len(steps) == 5:
            run.stop()

    result = run.run((ask(i, 50, 50, at=i * 0.01) for i in range(10_000)), refresh=stop, every=0.0)
    assert result["interrupted"]
    assert result["run"]["running"] > 0
    assert result["audit"]["ok"]


def test_refusals_are_counted_by_reason():
    run = Replay(small_spec(), 100 * PAGE, [TenantPlan("a", traffic=1.0)], max_tokens=4096)
    result = run.run([ask(1, 4090, 10), ask(2, 4091, 10), ask(3, 10, 1), ask(4, 10, 1, tenant="x")])
    rows = {row["name"]: row for row in result["tenants"]}
    assert rows["a"]["refused"] == {"never fits: longest sequence": 2}
    assert rows["a"]["refusals"] == [
        {
            "what": "never fits",
            "by": "longest sequence",
            "requests": 2,
            "needed": 4101,
            "room": 4096,
            "unit": "tokens",
            "text": "never fit: up to 4,101 tokens needed, longest sequence 4,096 tokens",
        }
    ]
    assert rows["x"]["refused"] == {"unknown tenant 'x'": 1}
    assert result["run"]["refused"] == 3
    assert result["run"]["finished"] == 1


def test_refusals_tell_a_limit_from_the_pool():
    plans = [TenantPlan("org", limit=20 * PAGE), TenantPlan("b"), TenantPlan("a", "org")]
    run = Replay(small_spec(), 100 * PAGE, plans, max_tokens=4096)
    requests = [ask(1, 400, 8), ask(2, 500, 8), ask(3, 2000, 8, tenant="b"), ask(4, 10, 1)]
    result = run.run(requests)
    rows = {row["name"]: row for row in result["tenants"]}
    assert list(rows) == ["org", "a", "b"]  # as a tree
    assert [row["depth"] for row in rows.values()] == [0, 1, 0]
    assert rows["a"]["refused"] == {"never fits: limit of org": 2}
    assert rows["b"]["refused"] == {"never fits: pool": 1}
    (group,) = rows["a"]["refusals"]
    assert (group["needed"], group["room"]) == (32 * PAGE, 20 * PAGE)
    pages = kvalloc.format_bytes(32 * PAGE), kvalloc.format_bytes(20 * PAGE)
    assert group["text"] == f"never fit: up to {pages[0]} needed, the limit of org allows {pages[1]}"


def test_refusals_tell_the_reserves_of_others():
    plans = [TenantPlan("org"), TenantPlan("a", "org"), TenantPlan("b", "org", reserve=30 * PAGE)]
    run = Replay(small_spec(), 100 * PAGE, plans, max_tokens=4096)
    result = run.run([ask(1, 80 * 16, 8)])
    rows = {row["name"]: row for row in result["tenants"]}
    assert rows["a"]["refused"] == {"never fits: pool beside others' reserves": 1}


def test_speed_paces_the_run_by_the_clock_on_the_wall():
    run = Replay(small_spec(), 100 * PAGE, [TenantPlan("a", traffic=1.0)], max_tokens=4096)
    drawn = []
    result = run.run(
        [ask(1, 10, 1), ask(2, 10, 1, at=3.0)], speed=10.0, refresh=lambda: drawn.append(1), every=0.02
    )
    assert 0.3 <= result["run"]["host_seconds"] < 3.0
    assert len(drawn) >= 5
    assert result["run"]["step_us"]["max"] < 200_000  # the pauses are no part of a step


def test_a_tenant_that_can_not_be_says_its_name_and_sizes():
    with pytest.raises(TenantsError) as caught:
        Replay(small_spec(), 100 * PAGE, [TenantPlan("a", reserve="60%"), TenantPlan("b", reserve="1GiB")])
    text = str(caught.value)
    assert text.startswith("tenants.b (reserve = '1GiB', ")
    assert "a reserve of 1 GiB does not fit" in text
    assert not re.search(r"\d{5}", text)


def test_waste_is_the_room_in_last_pages():
    run = Replay(small_spec(), 100 * PAGE, [TenantPlan("a", traffic=1.0)], max_tokens=4096)
    run.engine.submit(ask(1, 17, 50))
    run.engine.step()
    run.meter.sample(0.0, run.engine)
    total, by_tenant = run.meter.mean_waste()
    assert total == pytest.approx(15 / 32)
    assert by_tenant[0] == pytest.approx(15 / 32)


def test_the_number_of_samples_is_bounded():
    run = Replay(small_spec(), 100 * PAGE, [TenantPlan("a", traffic=1.0)])
    meter = Meter(16, 256.0, interval=1.0)
    now = 0.0
    for _ in range(5000):
        meter.sample(now, run.engine)
        now = meter.next
    assert MOST_SAMPLES // 2 <= len(meter.times) <= MOST_SAMPLES
    gaps = np.diff(meter.times)
    assert gaps.max() <= 2 * gaps.min()


def test_quantiles_of_nothing_are_zero():
    assert quantiles([]) == {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    assert quantiles([1.0, 3.0])["p50"] == 2.0

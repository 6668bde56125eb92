"""The reference scheduler when rows find no room: who stops, how they go on, and that no token is lost."""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from kvalloc.engine import (
    ClockModel,
    Engine,
    Request,
    StepTime,
    Text,
    VirtualClock,
    builtin_tenants,
    builtin_workload,
)
from kvalloc.engine.replay import Replay

PAGE = 4096  # bytes; 16 tokens of the spec below
SPEC = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, dtype="float16", page_tokens=16)


class Model(ClockModel):
    """Makes up the same tokens wherever a row lies, and remembers the plans it carried out."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, StepTime(), [(256.0, None)])
        self.plans: list[kvalloc.Plan] = []
        self.fail = False
        self.late: list[str] = []  # kinds of plans that take longer than they live, in this order

    def execute(self, plan: kvalloc.Plan) -> None:
        if self.fail:
            raise OSError("the link is down")
        self.plans.append(plan)
        if plan.copied[1] and self.late and self.late[0] == plan.kind:
            self.late.pop(0)
            self.pool.advance(31.0)
            if self.notices:
                plan.to_copy(self.pool)  # as a store does before it copies
        super().execute(plan)


def engine_of(pages: int, *names: str, host: int = 0, **options):
    pool = kvalloc.Pool(SPEC, (pages + 1) * PAGE, (host + 1) * PAGE if host else None, clock="manual")
    tenants = {name: pool.tenant(name) for name in names or ("a",)}
    clock = VirtualClock()
    options.setdefault("preempt", "auto")
    model = Model(clock)
    model.pool, model.notices = pool, True
    return Engine(pool, model, tenants, clock=clock, max_tokens=4096, **options)


class Asked(Request):
    """A request that remembers what it was told."""

    said: list[int]


def ask(text: int, prompt: int, reply: int, tenant: str = "a", at: float = 0.0) -> Asked:
    request = Asked(at, tenant, Text(((text, prompt),)), reply, reply=(1 << 29) + text)
    request.said = []
    request.on_token = request.said.append
    return request


def serve(engine: Engine, requests: list[Asked]) -> None:
    for _ in engine.run(requests):
        report = engine.pool.audit()
        assert report.ok, report.findings
    assert not engine.pressure
    assert engine.pool.held == engine.pool.promised == 0
    assert engine.pool.audit().host.held == 0


def alone(request: Asked) -> list[int]:
    engine = engine_of(512, preempt=None)
    again = ask(0, 1, 1)
    again.prompt, again.max_new, again.reply = request.prompt, request.max_new, request.reply
    serve_free(engine, [again])
    return again.said


def serve_free(engine: Engine, requests: list[Asked]) -> None:
    for _ in engine.run(requests):
        pass


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("host", [0, 20, 200])
def test_e28_all_finish_with_the_tokens_they_would_have_had(mode, host):
    engine = engine_of(40, preempt=mode, host=host)
    requests = [ask(i, 100 + 7 * i, 150) for i in range(12)]
    serve(engine, requests)
    assert engine.pressure.counts.total() > 0, "nobody had to stop: the pool is too large for this test"
    for request in requests:
        assert request.produced == 150, request.refused
        assert request.said == alone(request)
    if mode == "recompute" or not host:
        assert engine.pressure.swapped_bytes == 0
        assert set(engine.pressure.counts) == {"recomputed"}
    elif mode == "swap" and host == 200:
        assert set(engine.pressure.counts) == {"swapped"}
        assert engine.pressure.swapped_bytes > 0


def test_g40_a_full_host_tier_means_recompute():
    engine = engine_of(40, preempt="swap", host=9)
    requests = [ask(i, 100 + 7 * i, 150) for i in range(12)]
    serve(engine, requests)
    assert engine.pressure.counts["recomputed"] > 0
    assert all(request.said == alone(request) for request in requests)


def test_e30_the_oldest_of_a_tenant_is_never_stopped():
    engine = engine_of(40, "a", "b")
    requests = [ask(i, 100, 200, "ab"[i % 2]) for i in range(10)]
    stopped = []
    carry_out = engine.pressure.carry_out

    def watch(plan):
        stopped.extend(victim.number for victim in plan.victims)
        oldest = {}
        for run in engine.rows.running:
            oldest.setdefault(run.queue.name, run.sequence.number)
            oldest[run.queue.name] = min(oldest[run.queue.name], run.sequence.number)
        if len(engine.rows) > len(oldest):  # else each tenant has one row, no row can grow, and one has to go
            assert not {victim.number for victim in plan.victims} & set(oldest.values())
        assert min(oldest.values()) not in {victim.number for victim in plan.victims}
        return carry_out(plan)

    engine.pressure.carry_out = watch
    serve(engine, requests)
    assert stopped


def test_e29_the_only_row_that_finds_no_room_fails_and_says_so():
    engine = engine_of(10)
    first = ask(1, 100, 400)
    serve(engine, [first])
    assert first.refused.startswith("never fits")
    # Without a bound that admission could see: another holds what it needs to grow.
    engine = engine_of(10)
    holder = engine.pool.open(engine.pool.tenant("other"), range(40))
    batch = engine.pool.batch(1, 512)
    batch.add(holder)
    batch.step()
    batch.commit()
    second = ask(2, 60, 60)
    list(engine.run([second]))
    # Seven pages are left of ten, and 120 tokens need eight: it ends at the edge of the seventh.
    assert second.refused == "out of pages: 4 KiB needed, the pool leaves 0 B"
    assert second.produced == 7 * 16 - 60 + 1
    assert second.said == alone(second)[: second.produced]
    assert engine.pool.audit().ok


def test_those_that_were_stopped_go_first():
    engine = engine_of(40)
    requests = [ask(i, 100, 150) for i in range(4)] + [ask(9, 100, 20, at=1.0)]
    admitted_while_stopped = []
    tell = engine.tell

    def listen(event, request):
        if event == "admitted":
            admitted_while_stopped.append(len(engine.pressure))
        tell(event, request)

    engine.tell = listen
    serve(engine, requests)
    assert set(admitted_while_stopped) == {0}


def test_inside_its_reserve_a_tenant_is_served_while_others_wait():
    engine = engine_of(60, "a", "b")
    engine.queues["b"].tenant.set(reserve=15 * PAGE)
    requests = [ask(i, 100, 300) for i in range(8)] + [ask(20, 100, 100, "b", at=3.0)]
    serve(engine, requests)
    waits = {request.tenant: request.admitted - request.arrival for request in requests}
    assert waits["b"] < 0.1
    assert all(request.said == alone(request) for request in requests)


def test_a_copy_that_fails_loses_nothing():
    engine = engine_of(40, preempt="swap", host=200)
    requests = [ask(i, 100 + 7 * i, 150) for i in range(12)]
    engine.model.fail = True
    steps = engine.run(requests)
    failures = 0
    while True:
        try:
            next(steps)
        except OSError:
            failures += 1
            engine.model.fail = failures < 3
            steps = engine.run([])  # the engine goes on where it was
        except StopIteration:
            break
        assert engine.pool.audit().ok
    assert failures == 3
    assert all(request.said == alone(request) for request in requests)
    assert engine.pool.held == 0


@pytest.mark.parametrize("notices", [True, False], ids=["before the copies", "after them"])
@pytest.mark.parametrize("late", [["suspend"], ["resume"], ["suspend", "resume", "resume", "suspend"]])
def test_a_plan_that_expires_is_an_aborted_one_and_counted(late, notices):
    engine = engine_of(40, preempt="swap", host=200)
    requests = [ask(i, 100 + 7 * i, 150) for i in range(12)]
    engine.model.late, engine.model.notices = list(late), notices
    serve(engine, requests)
    assert engine.pressure.expired == len(late)
    assert engine.pool.stats().expired_plans == len(late)
    assert engine.pressure.counts["swapped"] > 0
    # Who was to stop when a swap had taken too long went by recompute: that needs no copies.
    assert (engine.pressure.counts["recomputed"] > 0) == ("suspend" in late)
    done = [plan for plan in engine.model.plans if plan.state == "committed"]
    assert engine.pressure.swapped_bytes == sum(plan.copied[1] for plan in done)
    assert all(request.said == alone(request) for request in requests)


def test_a_request_whose_pages_never_come_back_in_time_is_given_up():
    engine = engine_of(40, preempt="swap", host=200)
    requests = [ask(i, 200, 150) for i in range(2)]
    engine.model.late = ["resume"] * 1000
    serve(engine, requests)
    first, second = requests
    assert first.said == alone(first)
    assert second.refused == "stuck: copies that take longer than their plan lives"
    assert 0 < second.produced < 150
    assert engine.pressure.expired >= 3


def test_a_stopped_request_can_be_aborted():
    engine = engine_of(40, preempt="swap", host=200)
    requests = [ask(i, 100 + 7 * i, 150) for i in range(12)]
    aborted = None
    for _ in engine.run(requests):
        if aborted is None and engine.pressure.stopped:
            aborted = engine.pressure.stopped[-1].request
            assert engine.abort(aborted)
            assert not engine.abort(aborted)
    assert aborted is not None
    assert aborted.finished >= 0.0
    assert 0 < aborted.produced < 150
    assert engine.pool.held == 0
    assert engine.pool.audit().host.held == 0
    assert all(request.said == alone(request) for request in requests if request is not aborted)


def test_a_limit_stops_rows_below_it_only():
    engine = engine_of(200, "a", "b")
    engine.queues["a"].tenant.set(limit=30 * PAGE)
    requests = [ask(i, 100, 150) for i in range(6)] + [ask(10 + i, 100, 150, "b") for i in range(4)]
    tenants = set()
    carry_out = engine.pressure.carry_out
    engine.pressure.carry_out = lambda plan: tenants.update(v.tenant for v in plan.victims) or carry_out(plan)
    serve(engine, requests)
    assert tenants == {"a"}
    assert all(request.said == alone(request) for request in requests)


def test_bytes_are_taken_back_in_the_middle():
    engine = engine_of(80, "a", "b", host=200)
    requests = [ask(i, 100, 200) for i in range(6)]
    taken = None
    for _ in engine.run(requests):
        if taken is None and engine.steps == 50:
            taken = engine.pool.reclaim("a", 20 * PAGE, live="preempt", batch=engine.batch, mode="swap")
            stopped = engine.pressure.carry_out(taken)
            assert stopped == len(taken.victims) > 0
            assert taken.state == "committed"
            assert taken.bytes >= 20 * PAGE
            assert engine.pool.free >= 20 * PAGE
    assert all(request.said == alone(request) for request in requests)
    assert engine.pool.audit().ok


def test_replay_reports_what_was_stopped_and_taken_back():
    spec = kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128)
    replay = Replay(
        spec, "6GiB", builtin_tenants(), host_bytes="4GiB", preempt="auto", reclaims=[("chat", 1 << 30, 20.0)]
    )
    result = replay.run(builtin_workload(40))
    pressure = result["pressure"]
    assert result["audit"]["ok"]
    assert pressure["policy"] == "auto"
    assert pressure["stopped"] == 0
    assert pressure["expired"] == 0
    assert pressure["give_backs"] == {}
    stops = sum(row["stops"] for row in result["tenants"])
    assert stops == sum(pressure["victims"].values()) > 0
    series, tenants = result["series"], result["series"]["tenants"].values()
    assert series["pool"]["swapped"][-1] + series["pool"]["recomputed"][-1] == stops
    assert series["pool"]["swapped_bytes"][-1] == pressure["swapped_bytes"]
    assert max(sum(at) for at in zip(*(one["stopped"] for one in tenants), strict=True)) > 0
    chat = next(row for row in result["tenants"] if row["name"] == "chat")
    assert chat["token_s"]["p50"] >= StepTime().base
    assert (
        chat["stops"] == 0 or 0.0 < chat["stall_s"]["p50"] <= chat["stall_s"]["max"] <= pressure["stalled_s"]
    )
    (one,) = pressure["reclaims"]
    assert one["tenant"] == "chat"
    assert one["asked"] == 1 << 30
    assert one["bytes"] + one["shortfall"] >= 1 << 30
    assert result["run"]["running"] == result["run"]["waiting"] == 0
    assert Replay(spec, "6GiB", builtin_tenants()).run(builtin_workload(5))["pressure"] == {
        "policy": "reserve"
    }
    with pytest.raises(kvalloc.InvalidArgument, match="policy"):
        Replay(spec, "6GiB", builtin_tenants(), reclaims=[("chat", 1, 1.0)])


def test_the_same_twice():
    def once():
        engine = engine_of(40, host=30)
        requests = [ask(i, 100 + 7 * i, 150) for i in range(12)]
        serve(engine, requests)
        return [(request.admitted, request.finished) for request in requests], engine.pressure.counts

    assert once() == once()
    assert np.isfinite(once()[0][0]).all()


# ---- a reserve that is lent ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_lender_is_served_in_the_next_step(mode):
    engine = engine_of(64, "owner", "b", preempt=mode, host=200)
    owner, borrower = (engine.queues[name].tenant for name in ("owner", "b"))
    owner.set(reserve=40 * PAGE, lend=True)
    requests = [ask(i, 100, 300, "b") for i in range(12)]
    mine = [ask(50 + i, 200, 100, "owner", at=0.5 + i) for i in range(3)]
    asked, first, most = {}, {}, 0
    give_back, opens = engine.pressure._give_back, engine.pressure.open

    def watch(tenant, needed):
        assert tenant == owner
        assert give_back(tenant, needed), "it is there"
        return 1

    def watch_open(queue, request, **how):
        asked.setdefault(request.reply, engine.steps)
        return opens(queue, request, **how)

    def hear(request):
        def on_token(token):
            first.setdefault(request.reply, engine.steps)
            request.said.append(token)

        return on_token

    engine.pressure._give_back, engine.pressure.open = watch, watch_open
    for request in mine:
        request.on_token = hear(request)
    for _ in engine.run([*requests, *mine]):
        most = max(most, borrower.held)
        assert engine.pool.audit().ok
    assert most > 24 * PAGE, "others ran in the reserve"
    assert [first[r.reply] - asked[r.reply] for r in mine] == [1, 1, 1]
    assert engine.pressure.counts.total() > 0
    for request in (*requests, *mine):
        assert request.said == alone(request)
    assert engine.pool.held == engine.pool.promised == 0
    owner.lend_unused()
    assert owner.lent == owner.reserve


@pytest.mark.parametrize(
    "asked",
    [
        [(130, 70, "a", 0.0), (90, 80, "owner", 0.0)],  # who was stopped waits for what is lent again
        [(80, 100, "a", 0.0), (120, 140, "a", 0.0), (40, 50, "owner", 0.5)],  # and so does who runs alone
    ],
    ids=["stopped", "running"],
)
def test_what_a_lender_no_longer_uses_lets_the_last_one_go_on(asked):
    engine = engine_of(20, "a", "owner", preempt="recompute")
    engine.queues["owner"].tenant.set(reserve=10 * PAGE, lend=True)
    requests = [ask(i, *how) for i, how in enumerate(asked)]
    serve(engine, requests)
    assert [request.refused for request in requests] == [""] * len(requests)
    assert all(request.said == alone(request) for request in requests)

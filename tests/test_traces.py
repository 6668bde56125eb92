"""Readers of traces: what they make of each format, what they refuse, the facts of the public traces."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from kvalloc.engine import servegen, traces
from kvalloc.engine.request import Blocks, Literal, Request, Text, reply_tokens
from kvalloc.engine.tenants import TenantPlan, TenantsError, assign, numbered, parse_size, read_tenants
from kvalloc.engine.workload import builtin_tenants, builtin_workload

PUBLIC = Path(os.environ.get("KVALLOC_TRACES") or Path(__file__).parents[2] / "shared" / "traces")


def public(name: str) -> Path:
    path = PUBLIC / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {PUBLIC}; KVALLOC_TRACES says where the public traces are")
    return path


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def mooncake(time: float, length: int, reply: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": time, "input_length": length, "output_length": reply, "hash_ids": ids})


# Prompts


def test_blocks_with_equal_ids_have_equal_tokens_and_others_differ_everywhere():
    a = Blocks((7, 8, 9), 512, 1536).tokens()
    b = Blocks((7, 11, 9), 512, 1536).tokens()
    assert a.dtype == np.int32
    assert a.shape == (1536,)
    assert a.min() >= 0
    np.testing.assert_array_equal(a[:512], b[:512])
    np.testing.assert_array_equal(a[1024:], b[1024:])
    assert not (a[512:1024] == b[512:1024]).any()


def test_a_partial_last_block_gets_the_first_tokens_of_its_id():
    whole, part = Blocks((3, 4), 512, 1024).tokens(), Blocks((3, 4), 512, 600).tokens()
    np.testing.assert_array_equal(part, whole[:600])


def test_tokens_are_the_same_in_every_process():
    assert Blocks((0, 5), 4, 7).tokens().tolist() == Blocks((0, 5), 4, 8).tokens().tolist()[:7]
    assert Text(((1, 2), (2, 2))).tokens().tolist() == [506952113, 652626410, 2082827495, 1826199648]
    assert Blocks((1,), 3, 3).tokens().tolist() == Text(((1, 3),)).tokens().tolist()


def test_a_reply_reads_the_same_in_a_later_prompt():
    first = Text(((1, 10), (2, 5)))
    later = Text(((1, 10), (2, 5), (99, 6), (3, 4)))
    np.testing.assert_array_equal(later.tokens()[:15], first.tokens())
    said = reply_tokens(np.full(6, 99, np.int32), np.arange(15, 21, dtype=np.int32))
    np.testing.assert_array_equal(later.tokens()[15:21], said)


def test_no_two_texts_share_a_token_at_one_place():
    texts = np.array([0, 1, 2, 1 << 20, (1 << 30) - 1, 1 << 30, (1 << 31) - 1], dtype=np.int32)
    said = reply_tokens(texts, np.full(len(texts), 12345, np.int32))
    assert len(set(said.tolist())) == len(texts)


def test_a_literal_prompt_is_its_array():
    ids = np.arange(5, dtype=np.int32)
    assert Literal(ids).tokens() is ids
    assert len(Literal(ids)) == 5


# Formats


def test_mooncake(tmp_path):
    path = write(tmp_path / "t.jsonl", mooncake(1500, 600, 30, [0, 7]), "", mooncake(2750, 512, 0, [0]))
    assert traces.detect(path) == "mooncake"
    one, two = traces.open_trace(path)
    assert (one.arrival, two.arrival) == (0.0, 1.25)  # from the first line on
    assert (len(one.prompt), one.max_new, one.key) == (600, 30, 7)
    assert (len(two.prompt), two.max_new, two.key) == (512, 1, 0)  # a model always samples one
    assert one.reply != two.reply
    np.testing.assert_array_equal(one.prompt.tokens()[:512], two.prompt.tokens())


def test_bailian_keeps_a_conversation_together(tmp_path):
    def line(chat: int, parent: int, time: float, length: int) -> str:
        row = {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": time,
            "input_length": length,
            "output_length": 3,
        }
        return json.dumps(row | {"type": "text", "turn": 1, "hash_ids": list(range(-(-length // 16)))})

    path = write(
        tmp_path / "b.jsonl",
        line(5, -1, 61.1, 33),
        line(6, 5, 61.3, 64),
        line(9, -1, 62.0, 16),
        line(10, 6, 70.0, 80),
    )
    assert traces.detect(path) == "bailian"
    requests = list(traces.open_trace(path))
    assert [request.key for request in requests] == [5, 5, 9, 5]
    assert [len(request.prompt) for request in requests] == [33, 64, 16, 80]
    assert requests[3].arrival == pytest.approx(8.9)


def test_azure_reads_seven_decimals_and_makes_unique_prompts(tmp_path):
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.9999999,374,44",
        "2023-11-17 00:00:00.0000001,374,109",
        "2023-11-17 00:00:01,10,1",
    )
    assert traces.detect(path) == "azure"
    one, two, three = traces.open_trace(path)
    assert two.arrival == pytest.approx(2e-7, abs=1e-9)
    assert three.arrival == pytest.approx(1.0000001, abs=1e-9)
    assert not (one.prompt.tokens() == two.prompt.tokens()).any()
    assert len({one.key, two.key, three.key}) == 3


def test_burstgpt_leaves_failed_requests_out(tmp_path):
    path = write(
        tmp_path / "g.csv",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,s1,1.2,ChatGPT,472,18,490,Conversation log",
        "6,s2,,ChatGPT,100,0,100,Conversation log",
        "45,s1,2.0,GPT-4,1087,230,1317,Conversation log",
        "46,,2.0,GPT-4,10,2,12,API log",
    )
    assert traces.detect(path) == "burstgpt"
    requests = list(traces.open_trace(path))
    assert [(request.arrival, len(request.prompt), request.max_new) for request in requests] == [
        (0.0, 472, 18),
        (40.0, 1087, 230),
        (41.0, 10, 2),
    ]
    assert requests[0].key == requests[1].key != requests[2].key


def test_readers_keep_one_line_at_a_time(tmp_path):
    path = write(tmp_path / "t.jsonl", mooncake(0, 512, 1, [0]), "broken")
    reader = traces.open_trace(path)
    assert next(reader).arrival == 0.0  # the broken line behind is not read yet
    with pytest.raises(traces.TraceError, match=r"t\.jsonl:2: not JSON"):
        next(reader)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "a JSON object is expected, not list"),
        ('{"timestamp": 1}', "input_length is missing"),
        (mooncake(float("nan"), 512, 1, [0]), "timestamp is nan, not a time"),
        (
            '{"timestamp": "soon", "input_length": 1, "output_length": 1, "hash_ids": [0]}',
            "timestamp is 'soon', not a number",
        ),
        (mooncake(3000, 0, 1, []), "input_length is 0, outside 1 to"),
        (mooncake(3000, -5, 1, []), "input_length is -5"),
        (mooncake(3000, 1 << 40, 1, []), "input_length is 1099511627776, outside"),
        (mooncake(3000, 512, -1, [0]), "output_length is -1"),
        (mooncake(3000, 512, 1.5, [0]), "output_length is 1.5, not a whole number"),  # type: ignore[arg-type]
        (mooncake(3000, 512, True, [0]), "output_length is True, not a whole number"),
        (mooncake(3000, 513, 1, [0]), "1 hash_ids for 513 tokens; blocks of 512 need 2"),
        (mooncake(3000, 512, 1, ["x"]), "hash id 'x' is not a whole number"),  # type: ignore[list-item]
        (mooncake(3000, 512, 1, [-1]), "hash id -1 is not"),
        (mooncake(3000, 512, 1, [1 << 31]), "hash id 2147483648 is not"),
        (
            '{"timestamp": 3000, "input_length": 1, "output_length": 1, "hash_ids": 3}',
            "hash_ids is not a list",
        ),
        (mooncake(1000, 512, 1, [0]), "time 1 s is before the line above (2 s): sort the trace"),
    ],
)
def test_mooncake_refuses(tmp_path, line, message):
    path = write(tmp_path / "t.jsonl", mooncake(2000, 512, 1, [0]), line)
    with pytest.raises(traces.TraceError) as caught:
        list(traces.open_trace(path))
    assert f"t.jsonl:2: {message}" in str(caught.value)
    assert caught.value.line == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:46.1,5", "2 fields where the header has 3"),
        ("2023-11-16 18:15:46.1,5,x", "GeneratedTokens is 'x', not a whole number"),
        ("2023-11-16 18:15:46.1,0,1", "ContextTokens is 0, outside"),
        ("yesterday,5,1", "TIMESTAMP 'yesterday' is not like"),
        ("2023-13-16 18:15:46.1,5,1", "TIMESTAMP '2023-13-16 18:15:46.1': month"),
        ("2023-11-16 18:15:45.5,5,1", "time -0.5 s is before the line above"),
        ("2023-11-16 18:15:46.1,\0,1", "ContextTokens is "),
        ("2023-11-16 18:15:46.1,\ufffd,1", "ContextTokens is "),
    ],
)
def test_azure_refuses(tmp_path, line, message):
    head = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.0,1,1")
    path = write(tmp_path / "a.csv", *head, line)
    with pytest.raises(traces.TraceError) as caught:
        list(traces.open_trace(path))
    assert f"a.csv:3: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"\n\n", "empty file"),
        (b"hello,world\n1,2\n", "unknown format; known: Mooncake"),
        (b"{broken\n", "not JSON"),
        (b"\xff\xfe\x00\x01", "unknown format"),
        (b"{" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
    ],
)
def test_detect_refuses(tmp_path, content, message):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(traces.TraceError, match=message):
        traces.detect(path)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(traces.TraceError, match="No such file"):
        traces.detect(tmp_path / "nowhere.jsonl")
    with pytest.raises(traces.TraceError):
        traces.detect(tmp_path)  # a directory


def test_a_text_that_turns_binary_is_said(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(mooncake(0, 512, 1, [0]).encode() + b"\n\xff\xfe\n")
    with pytest.raises(traces.TraceError, match=r"t\.jsonl:2: not JSON"):
        list(traces.open_trace(path))


# ServeGen

DIGEST = (
    "model,client,window_start_s,mean_rps,peak10min_rps,arrival_cv,"
    "in_mean,in_p50,in_p90,in_p99,out_mean,out_p50,out_p90,out_p99"
)


def digest(tmp_path: Path, *rows: str) -> Path:
    return write(tmp_path / "d.csv", DIGEST, *rows)


def test_servegen_orders_clients_and_picks_a_model(tmp_path):
    path = digest(
        tmp_path,
        "m,0,0,0.5,1,2,100,90,200,400,10,9,20,40",
        "m,1,0,2.5,3,4,100,90,200,400,10,9,20,40",
        "m,1,21600,0.1,3,4,100,90,200,400,10,9,20,40",
        "other,7,0,1,1,1,100,90,200,400,10,9,20,40",
    )
    assert traces.detect(path) == "servegen"
    assert [client.number for client in servegen.read_digest(path)] == [1, 0]
    assert [client.number for client in servegen.read_digest(path, "other")] == [7]
    with pytest.raises(traces.TraceError, match=r"no model 'third'; there are m, other"):
        servegen.read_digest(path, "third")
    with pytest.raises(traces.TraceError, match="describes clients"):
        traces.open_trace(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m,0,0,-1,1,2,100,90,200,400,10,9,20,40", "mean_rps below 0, or"),
        ("m,0,0,1,1,0,100,90,200,400,10,9,20,40", "mean_rps below 0, or arrival_cv not above 0"),
        ("m,0,0,1,1,1,100,90,80,400,10,9,20,40", "in_p50, in_p90, in_p99 do not rise: 90, 80, 400"),
        ("m,x,0,1,1,1,100,90,180,400,10,9,20,40", "client is 'x'"),
    ],
)
def test_servegen_refuses(tmp_path, row, message):
    with pytest.raises(traces.TraceError, match=rf"d\.csv:2: {message}"):
        servegen.read_digest(digest(tmp_path, row))


def test_servegen_draws_rate_burstiness_and_lengths(tmp_path):
    path = digest(tmp_path, "m,0,0,20,20,3,100,100,400,3000,10,50,90,200")
    requests = list(servegen.draw(servegen.read_digest(path), 4000.0, seed=3))
    gaps = np.diff([request.arrival for request in requests])
    assert gaps.min() >= 0
    assert len(requests) / 4000 == pytest.approx(20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(3, rel=0.1)
    lengths = np.array([len(request.prompt) for request in requests])
    np.testing.assert_allclose(np.percentile(lengths, [50, 90, 99]), [100, 400, 3000], rtol=0.08)
    replies = np.array([request.max_new for request in requests])
    np.testing.assert_allclose(np.percentile(replies, [50, 90, 99]), [50, 90, 200], rtol=0.05)
    assert {request.tenant for request in requests} == {"client-0"}
    assert len({request.reply for request in requests}) == len(requests)


def test_servegen_stretches_time_and_follows_windows(tmp_path):
    path = digest(
        tmp_path,
        "m,0,0,40,20,1,100,100,400,3000,10,50,90,200",
        "m,0,100,10,20,1,100,100,400,3000,10,50,90,200",
    )
    clients = servegen.read_digest(path)
    plain = [request.arrival for request in servegen.draw(clients, 200.0, seed=1)]
    assert sum(time < 100 for time in plain) == pytest.approx(4000, rel=0.1)
    assert sum(time >= 100 for time in plain) == pytest.approx(1000, rel=0.15)
    slow = [request.arrival for request in servegen.draw(clients, 400.0, seed=1, rate=20.0)]
    np.testing.assert_allclose(np.array(slow) / 2, plain, rtol=1e-9)


def test_servegen_repeats_and_a_client_is_independent_of_the_others(tmp_path):
    path = digest(
        tmp_path,
        "m,0,0,5,5,2,1,10,20,30,1,10,20,30",
        "m,1,0,1,5,9,1,10,20,30,1,10,20,30",
        "m,2,0,0,0,1,1,10,20,30,1,10,20,30",
    )
    clients = servegen.read_digest(path)
    once = [
        (request.arrival, request.key, len(request.prompt))
        for request in servegen.draw(clients, 100.0, seed=5)
    ]
    again = [
        (request.arrival, request.key, len(request.prompt))
        for request in servegen.draw(clients, 100.0, seed=5)
    ]
    other = [
        (request.arrival, request.key, len(request.prompt))
        for request in servegen.draw(clients, 100.0, seed=6)
    ]
    alone = [
        (request.arrival, request.key, len(request.prompt))
        for request in servegen.draw(clients[:1], 100.0, seed=5)
    ]
    assert once == again != other
    assert [one for one in once if one[1] == 0] == alone
    assert not any(one[1] == 2 for one in once)  # a rate of 0 sends nothing


# Tenants


def toml(tmp_path: Path, text: str) -> Path:
    return write(tmp_path / "t.toml", text)


def test_tenants_file(tmp_path):
    plans = read_tenants(
        toml(
            tmp_path,
            """
            [tenants.chat]
            parent = "shop"
            reserve = "25%"
            weight = 4
            share = "shop"
            share_tokens = 512
            [tenants.shop]
            limit = "16GiB"
            [tenants.batch]
            traffic = 3
            priority = 10
            """,
        )
    )
    assert plans == [
        TenantPlan("shop", limit="16GiB", traffic=0.0),
        TenantPlan("batch", traffic=3, priority=10),
        TenantPlan("chat", "shop", reserve="25%", weight=4, traffic=1.0, share="shop", share_tokens=512),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tenants"),
        ("x = 1", "x: unknown key"),
        ("[tenant.a]", "tenant: unknown key; did you mean 'tenants'?"),
        ("tenants = 3", "no tenants"),
        ("[tenants]\na = 3", "tenants.a: a table"),
        ("[tenants.a]\nreserved = 1", "tenants.a.reserved: unknown key; did you mean 'reserve'?"),
        ("[tenants.a]\nlimit = '12GX'", "tenants.a.limit: "),
        ("[tenants.a]\nlimit = -1", "tenants.a.limit: "),
        ("[tenants.a]\nlimit = nan", "tenants.a.limit: "),
        ("[tenants.a]\nlimit = '120%'", "tenants.a.limit: '120%' is more than 100%"),
        ("[tenants.a]\nhost_limit = '120%'", "tenants.a.host_limit: '120%' is more than 100%"),
        ("[tenants.a]\nhost_limit = '-1GiB'", "tenants.a.host_limit: "),
        ("[tenants.a]\nhost_limt = '1GiB'", "tenants.a.host_limt: unknown key; did you mean 'host_limit'?"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight: 0 is not a whole number from 1"),
        ("[tenants.a]\nweight = true", "tenants.a.weight: True is not"),
        ("[tenants.a]\npriority = 101", "tenants.a.priority: 101 is not"),
        ("[tenants.a]\ntraffic = inf", "tenants.a.traffic: inf is not"),
        ("[tenants.a]\ntraffic = 0", "traffic is 0 everywhere"),
        ("[tenants.a]\nlend = 1", "tenants.a.lend: 1 is not true or false"),
        ("[tenants.a]\nparent = 1", "tenants.a.parent: 1 is not a tenant's name"),
        ("[tenants.a]\nparent = 'b'", "tenants.a.parent: no tenant 'b'"),
        (
            "[tenants.abc]\n[tenants.x]\nparent = 'abd'",
            "tenants.x.parent: no tenant 'abd'; did you mean 'abc'?",
        ),
        ("[tenants.a]\nparent = 'a'", "go round in a circle"),
        ("[tenants.a]\nparent = 'b'\n[tenants.b]\nparent = 'a'", "go round in a circle"),
        ("[tenants.a]\nshare = 'a'", "share and share_tokens go together"),
        ("[tenants.a]\n[tenants.b]\nshare = 'a'\nshare_tokens = 5", "tenants.b.share: 'a' is not above 'b'"),
        ("[tenants.a\n", "not TOML"),
    ],
)
def test_tenants_file_refuses(tmp_path, text, message):
    with pytest.raises(TenantsError) as caught:
        read_tenants(toml(tmp_path, text))
    assert message in str(caught.value)
    assert "t.toml" in str(caught.value)


def test_a_missing_tenants_file_is_said(tmp_path):
    with pytest.raises(TenantsError, match="No such file"):
        read_tenants(tmp_path / "none.toml")


def test_sizes_may_be_a_share_of_the_device():
    assert parse_size("12.5%", 800) == 100
    assert parse_size("1KiB", 800) == 1024
    with pytest.raises(ValueError, match="more than 100%"):
        parse_size("101%", 800)


def requests_with(keys: list[int]) -> list[Request]:
    return [Request(float(i), "", Text(((i, 1000),)), 1, key=key) for i, key in enumerate(keys)]


def test_assign_keeps_a_client_with_one_tenant_and_follows_traffic():
    plans = numbered(4)
    requests = list(assign(requests_with([key for key in range(20_000) for _ in range(2)]), plans, seed=2))
    for one, two in zip(requests[::2], requests[1::2], strict=True):
        assert one.tenant == two.tenant
    counts = [sum(request.tenant == f"tenant-{k}" for request in requests) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(np.array(counts) / len(requests), np.array([12, 6, 4, 3]) / 25, atol=0.01)
    assert requests[0].share == (("org", 512),)
    assert [r.tenant for r in assign(requests_with([1, 2, 3, 4, 5, 6]), plans, seed=2)] == [
        r.tenant for r in requests[2:14:2]
    ]


def test_assign_shares_no_more_than_the_prompt_and_leaves_named_requests_alone():
    short = Request(0.0, "", Text(((0, 5),)), 1)
    named = Request(0.0, "somebody", Text(((0, 5),)), 1)
    assigned = list(assign([short, named], numbered(2)))
    assert assigned[0].share == (("org", 5),)
    assert (assigned[1].tenant, assigned[1].share) == ("somebody", ())


def test_numbered_refuses_absurd_counts():
    for count in (0, -1, 1001):
        with pytest.raises(ValueError, match="1 to 1000"):
            numbered(count)


# The built-in workload


def test_builtin_workload_is_sorted_repeats_and_names_its_tenants():
    one = [(r.arrival, r.tenant, len(r.prompt), r.max_new) for r in builtin_workload(60.0, seed=4)]
    two = [(r.arrival, r.tenant, len(r.prompt), r.max_new) for r in builtin_workload(60.0, seed=4)]
    other = [(r.arrival, r.tenant, len(r.prompt), r.max_new) for r in builtin_workload(60.0, seed=5)]
    assert one == two != other
    times = [row[0] for row in one]
    assert times == sorted(times)
    assert times[-1] < 60.0
    senders = {plan.name for plan in builtin_tenants() if plan.traffic is None}
    assert {row[1] for row in one} == senders


def test_builtin_agent_repeats_its_context_word_by_word():
    agent = [request for request in builtin_workload(300.0) if request.tenant == "agent"]
    follow = 0
    for i, first in enumerate(agent):
        for later in agent[i + 1 :]:
            if (
                len(later.prompt.parts) == len(first.prompt.parts) + 2
                and later.prompt.parts[:-2] == first.prompt.parts
            ):
                assert later.prompt.parts[-2] == (first.reply, first.max_new)
                np.testing.assert_array_equal(
                    later.prompt.tokens()[: len(first.prompt)], first.prompt.tokens()
                )
                follow += 1
    assert follow > 100


# The public traces


def lru(requests: list[list[int]], capacity: float) -> float:
    """Share of block references that hit as a prefix under LRU, the tail of a request released first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for ids in requests:
        total += len(ids)
        hit = next((i for i, each in enumerate(ids) if each not in cache), len(ids))
        hits += hit
        for each in ids:
            cache.pop(each, None)
        while len(cache) > capacity - len(ids):
            cache.popitem(last=False)
        for each in reversed(ids):
            cache[each] = None
    return 100 * hits / total


def blocks(requests: list[Request]) -> list[list[int]]:
    return [list(request.prompt.ids) for request in requests if isinstance(request.prompt, Blocks)]


def test_facts_mooncake_conversation():
    requests = list(traces.open_trace(public("mooncake_conversation_trace.jsonl")))
    lengths = np.array([len(request.prompt) for request in requests])
    replies = np.array([request.max_new for request in requests])
    assert len(requests) == 12_031
    assert round(requests[-1].arrival) == 3537
    assert round(lengths.mean()) == 12_035
    assert round(np.median(lengths)) == 6909
    assert np.percentile(lengths, 99) == pytest.approx(85_401, abs=1)
    assert lengths.max() == 126_195
    assert round(replies.mean()) == 343
    assert replies.max() == 2000
    ids = blocks(requests)
    assert sum(map(len, ids)) == 288_500
    assert len({each for row in ids for each in row}) == 182_790
    assert lru(ids, float("inf")) == pytest.approx(36.6, abs=0.06)
    for capacity, share in ((1_000, 4.4), (5_000, 11.0), (20_000, 28.7), (50_000, 35.5)):
        assert lru(ids, capacity) == pytest.approx(share, abs=0.25)


def test_facts_mooncake_first_thousand():
    requests = list(traces.open_trace(public("mooncake_trace_1000.jsonl")))
    lengths = [len(request.prompt) for request in requests]
    assert len(requests) == 1000
    assert round(requests[-1].arrival) == 177
    assert round(float(np.mean(lengths))) == 9792
    assert max(lengths) == 121_290
    ids = blocks(requests)
    assert len({each for row in ids for each in row}) == 12_207
    assert lru(ids, float("inf")) == pytest.approx(38.0, abs=0.06)
    assert lru(ids, 1_000) == pytest.approx(28.3, abs=0.25)


@pytest.mark.parametrize(
    ("name", "rows", "minutes", "context", "longest", "generated"),
    [("conv", 19_366, 58, 1155, 14_050, 211), ("code", 8_819, 57, 2048, 7_437, 28)],
)
def test_facts_azure(name, rows, minutes, context, longest, generated):
    requests = list(traces.open_trace(public(f"AzureLLMInferenceTrace_{name}.csv")))
    lengths = [len(request.prompt) for request in requests]
    assert len(requests) == rows
    assert round(requests[-1].arrival / 60) == minutes
    assert round(float(np.mean(lengths))) == context
    assert max(lengths) == longest
    assert round(float(np.mean([request.max_new for request in requests]))) == generated


def test_facts_servegen():
    path = public("servegen_client_digest.csv")
    sizes = []
    for model in ("language/m-large", "language/m-mid", "language/m-small", "reason/deepseek-r1"):
        clients = servegen.read_digest(path, model)
        sizes.append(len(clients))
        requests = list(servegen.draw(clients, 60.0, seed=0, rate=5.0))
        assert requests
    assert sizes == [147, 73, 38, 73]

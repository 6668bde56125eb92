"""The command line: what a user types, what comes out, and what is said when it can't be done."""

from __future__ import annotations

import io
import json
import re
import runpy
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import kvalloc
from kvalloc.cli import main
from kvalloc.cli.live import LiveView, bar, clock
from kvalloc.cli.plan import print_plan
from kvalloc.cli.report import render
from kvalloc.cli.summary import seconds, short, wrapped
from kvalloc.cli.traffic import Traffic, choose
from kvalloc.engine.replay import Replay
from kvalloc.engine.tenants import TenantPlan

SMALL = ("--device", "2GiB", "--max-tokens", "32768")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs ``kvalloc ...`` and gives exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvalloc", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for i in range(40):
            ids = [0, 100 + i % 5, 200 + i % 5, 300 + i]
            row = {
                "timestamp": 100 * i,
                "input_length": 512 * 3 + 100,
                "output_length": 20 + i,
                "hash_ids": ids,
            }
            file.write(json.dumps(row) + "\n")
    return path


def test_replay_with_no_arguments_but_less_of_it(run):
    code, out, err = run("replay", "--limit-seconds", "15", *SMALL)
    assert (code, err) == (0, "")
    for word in (
        "chat",
        "agent",
        "search",
        "tenant",
        "wait P50",
        "hit rate",
        "evictions",
        "host time a step",
        "waste",
    ):
        assert word in out
    assert "audit   the books balance" in out


def test_replay_a_trace_to_json(run, trace, tmp_path):
    code, out, _ = run("replay", "--trace", str(trace), "--json", str(tmp_path / "o.json"), "--quiet", *SMALL)
    assert (code, out) == (0, "")
    result = json.loads((tmp_path / "o.json").read_text())
    assert result["schema"] == "kvalloc.replay/1"
    assert result["run"]["finished"] == 40
    assert [row["name"] for row in result["tenants"]] == ["org", *(f"tenant-{k}" for k in range(1, 5))]
    assert result["pool"]["hit_rate"] > 0.5
    assert result["settings"]["seed"] == 0
    assert result["settings"]["device_bytes"] == 2 << 30


def test_json_to_standard_output_is_nothing_but_json(run, trace):
    code, out, err = run("replay", "-t", str(trace), "--json", "-", "-n", "1", *SMALL)
    assert code == 0
    assert json.loads(out)["run"]["finished"] == 40
    assert "audit" in err


def test_replay_repeats(run, trace):
    def once() -> dict:
        result = json.loads(run("replay", "-t", str(trace), "--json", "-", "-q", "--seed", "3", *SMALL)[1])
        for key in ("host_seconds", "step_us", "core_us"):
            del result["run"][key]
        return result

    assert once() == once()


def test_less_of_a_trace(run, trace):
    def finished(*options: str) -> int:
        return json.loads(run("replay", "-t", str(trace), "--json", "-", "-q", *SMALL, *options)[1])["run"][
            "finished"
        ]

    assert finished("--limit-requests", "7") == 7
    assert finished("--limit-seconds", "1.05") == 11
    assert finished("--limit-seconds", "1.05", "--limit-requests", "5") == 5


def test_tenants_file(run, trace, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text(
        '[tenants.org]\nlimit="1GiB"\n[tenants.x]\nparent="org"\nreserve="10%"\nweight=3\n[tenants.y]\nparent="org"\n'
    )
    code, out, _ = run("replay", "-t", str(trace), "--tenants-file", str(path), "--json", "-", "-q", *SMALL)
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)["tenants"]}
    assert rows["x"]["weight"] == 3
    assert rows["x"]["reserve"] > 0
    assert rows["org"]["limit"] <= 1 << 30
    assert rows["x"]["requests"] + rows["y"]["requests"] == 40


def test_the_builtin_workload_with_ones_own_tenants(run, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text("[tenants.only]\n")
    code, out, _ = run(
        "replay", "--tenants-file", str(path), "--limit-seconds", "8", "--json", "-", "-q", *SMALL
    )
    assert code == 0
    assert [row["name"] for row in json.loads(out)["tenants"]] == ["only"]


def test_servegen(run, tmp_path):
    head = "model,client,window_start_s,mean_rps,peak10min_rps,arrival_cv,"
    head += "in_mean,in_p50,in_p90,in_p99,out_mean,out_p50,out_p90,out_p99"
    path = tmp_path / "d.csv"
    path.write_text(
        f"{head}\n" + "".join(f"m,{i},0,{9 - i},9,2,1,200,400,900,1,20,40,90\n" for i in range(6))
    )
    options = (
        "replay",
        "-t",
        str(path),
        "-n",
        "3",
        "--limit-seconds",
        "30",
        "--rate",
        "5",
        "--json",
        "-",
        "-q",
        *SMALL,
    )
    code, out, _ = run(*options)
    assert code == 0
    result = json.loads(out)
    assert [row["name"] for row in result["tenants"]] == ["client-0", "client-1", "client-2"]
    assert 60 < result["run"]["finished"] < 300
    assert run(*options, "--digest-model", "x")[2].startswith("kvalloc: error: ")


class Tags(HTMLParser):
    """Counts tags, and sees that every one is closed."""

    VOID = ("meta", "br", "img", "link", "use", "path", "rect", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.links += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href") and value and value[0] != "#"
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        while self.open and self.open[-1] in ("p",) and tag != self.open[-1]:
            self.open.pop()
        assert self.open.pop() == tag


def test_report_is_one_file_with_plots(run, trace, tmp_path):
    report = tmp_path / "r.html"
    code, out, _ = run("replay", "-t", str(trace), "--report", str(report), *SMALL)
    assert code == 0
    assert f"report: {report}" in out
    text = report.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open in ([], ["html"])
    assert tags.links == []  # nothing is loaded from anywhere
    assert tags.count["svg"] == 4
    for word in ("tenant-1", "reserve", "limit", "Hit rate", "Waiting", "wait P50", "the books, by audit"):
        assert word in text


def test_report_shows_what_was_stopped_and_taken_back(run, tmp_path):
    tenants, report = tmp_path / "t.toml", tmp_path / "r.html"
    tenants.write_text(
        "[tenants.shop]\nlimit = '70%'\n[tenants.chat]\nparent = 'shop'\nreserve = '30%'\nlend = true\n"
        "[tenants.agent]\nparent = 'shop'\nreserve = '15%'\n"
        "[tenants.search]\nreserve = '10%'\nlimit = '40%'\n[tenants.batch]\nlimit = '80%'\n"
    )
    options = ("--tenants-file", str(tenants), "--limit-seconds", "20", "--device", "3GiB")
    taken = ("--policy", "swap", "--host", "500MiB", "--reclaim", "batch=500MiB@10", "--json", "-")
    code, out, _ = run("replay", *options, *taken, "--report", str(report), "-q")
    assert code == 0
    pressure, text = json.loads(out)["pressure"], report.read_text()
    assert pressure["victims"]["swapped"] > 0
    assert pressure["victims"]["recomputed"] > 0
    assert pressure["give_backs"]["chat"]["count"] > 0
    tags = Tags()
    tags.feed(text)
    assert tags.open in ([], ["html"])
    assert tags.count["svg"] == 5
    for word in (
        "Under pressure",
        f"<b>{pressure['victims']['swapped']:,}</b><small>rows swapped",
        f"<b>{pressure['victims']['recomputed']:,}</b><small>rows recomputed",
        f"<b>{kvalloc.format_bytes(pressure['swapped_bytes'])}</b>",
        f"<b>{seconds(pressure['stalled_s'])}</b><small>stopped, all",
        "Reserves given back",
        f"<td>chat</td><td>{pressure['give_backs']['chat']['count']}</td>",
        "Reclaimed",
        "<td>batch</td><td>0:10</td><td>500 MiB</td>",
        "requests that stand still",
        "first token P50",
    ):
        assert word in text
    assert "Under pressure" not in render(
        json.loads(run("replay", *options[2:4], *SMALL, "--json", "-", "-q")[1])
    )


def test_report_escapes_names_and_survives_an_empty_run():
    spec = kvalloc.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, dtype="float16")
    from kvalloc.engine.request import Request, Text
    from kvalloc.engine.tenants import TenantPlan

    replay = Replay(spec, "1MiB", [TenantPlan("a", traffic=1.0)], max_tokens=4096)
    bad = Request(0.0, "<script>alert(1)</script>", Text(((1, 5),)), 1)
    page = render(replay.run([bad], settings={"trace": "<b>", "model": "m"}))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>." not in page
    empty = Replay(spec, "1MiB", [TenantPlan("a", traffic=1.0)], max_tokens=4096).run([], settings={})
    assert "kvalloc replay" in render(empty)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl: No such file or directory"),
        (("--device", "12GX"), "12GX"),
        (("--device", "0"), ""),
        (("--device", "-1"), ""),
        (("--device", "nan"), ""),
        (("--device", "99999999999GiB"), ""),
        (("--device", "1KiB"), "1024 bytes are too few"),
        (("--device", "1500kB"), "1.43 MiB are too few"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--model", "no-such.json"), "no-such.json: no such file"),
        (("--dtype", "float7"), "float7"),
        (("--tenants", "3"), "the built-in workload has its own tenants"),
        (("--tenants", "2", "--tenants-file", "x.toml"), "give one"),
        (("--tenants-file", "x.toml"), "x.toml: No such file"),
        (("--step-time", "warp=9"), "is not NAME=NUMBER"),
        (("--limit-seconds", "-1"), "--limit-seconds -1"),
        (("--limit-seconds", "nan"), "--limit-seconds nan"),
        (("--rate", "3"), "--rate and --digest-model are for a ServeGen digest"),
        (("--budget", "100"), "--budget 100 is below --max-rows 256"),
        (("--speed", "0"), "--speed 0: a number above 0"),
        (("--device", "24"), "--device 24: that is 24 bytes; did you mean 24GiB?"),
        (("--host", "8"), "--host 8: that is 8 bytes; did you mean 8GiB?"),
        (("--policy", "swap"), "Give --host SIZE, for example --host 16GiB, or --policy recompute"),
        (("--json", "no/such/dir/o.json"), "no such directory"),
        (("--report", "no/such/dir/o.html"), "no such directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, monkeypatch, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("replay", "--limit-requests", "1", *options)
    assert code == 2
    assert out == ""
    assert err.startswith("kvalloc: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "options", [("--page-tokens", "0"), ("--seed", "-1"), ("--max-rows", "x"), ("--nonsense",)]
)
def test_options_that_mean_nothing_are_usage_errors(run, options):
    code, _, err = run("replay", *options)
    assert code == 2
    assert options[0] in err


def test_a_trace_that_breaks_half_way_names_the_line(run, trace):
    with trace.open("a") as file:
        file.write("{broken\n")
    code, _, err = run("replay", "-t", str(trace), "-q", *SMALL)
    assert code == 2
    assert "trace.jsonl:41: not JSON" in err


def test_help_and_version(run):
    code, out, _ = run("replay", "--help")
    assert code == 0
    for option in ("--trace", "--tenants-file", "--report", "--step-time"):
        assert option in out
    words = " ".join(out.replace("│", " ").split())
    assert "[default: (24GiB for the built-in workload; 128GiB for a trace;" in words
    assert "[default: (4; ServeGen: its 12 largest clients)]" in words
    assert run("--version")[1] == f"kvalloc {kvalloc.__version__}\n"
    assert run()[0] in (0, 2)


def test_models_and_size(run):
    code, out, _ = run("models", "qwen2.5")
    assert code == 0
    assert "57,344" in out
    assert run("models", "zzz")[0] == 2
    code, out, _ = run("size", "Qwen2.5-7B", "--device", "56GiB")
    assert code == 0
    assert "57,344 bytes a token" in out
    assert run("size", "Qwen2.5-7B", "--device", "lots")[0] == 2
    assert "did you mean 24GiB?" in run("size", "Qwen2.5-7B", "-d", "24")[2]
    assert "'qwen2.5-7b'" in run("models", "qwen-7b")[2]


@pytest.mark.parametrize("model", ["gpt-oss-20b", "Gemma-3-27B", "Qwen3-Next-80B-A3B"])
def test_size_says_what_admission_says(run, model):
    code, out, _ = run("size", model, "-d", "24GiB")
    assert code == 0
    assert "steps of at most 16 tokens" in out
    told = next(line.split()[-1] for line in out.splitlines() if line.strip().startswith("8,192"))
    spec = kvalloc.KVSpec.from_hf_config(kvalloc.models.get(model))
    pool = kvalloc.Pool(spec, "24GiB")
    tenant, opened = pool.tenant("a"), []
    while pool.admit(tenant, 10, 8192 - 10):
        opened.append(pool.open(tenant, [1] * 10, 8192 - 10, admit=True))
    assert int(told) == len(opened)


def test_size_of_larger_steps(run):
    def sequences(*options: str) -> int:
        out = run("size", "StarCoder2-3B", "-d", "64GiB", *options)[1]
        return int(next(line.split()[-1] for line in out.splitlines() if line.strip().startswith("32,768")))

    assert sequences("--step-tokens", "8192") < sequences()


def test_a_reserve_that_does_not_fit_names_tenant_file_and_sizes(run, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text('[tenants.a]\nreserve = "1GiB"\n[tenants.b]\nreserve = "70%"\n')
    code, _, err = run("replay", "--tenants-file", str(path), *SMALL)
    assert code == 2
    assert f"{path}: tenants.b (reserve = '70%', 2 GiB of device): a reserve of 1.4 GiB does not fit" in err
    assert not re.search(r"\d{6}", err.replace(str(path), ""))


def test_refusals_in_the_summary_have_sizes_for_people(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("replay", "-d", "100MiB", "--limit-seconds", "40")
    assert code == 0
    assert "never fit: up to" in out
    assert "the limit of shop allows 69.1 MiB" in out
    assert "the pool allows 98.9 MiB" in out
    assert "0 steps, host time a step -" in out
    assert "refused (no error: the exit code is 0)" in out
    assert " bytes" not in out


@pytest.mark.parametrize("host", ["", 'host_limit = "123MiB"\n'], ids=["device", "host"])
@pytest.mark.parametrize("columns", [80, 100, 107, 160])
def test_the_summary_fits_the_terminal(run, monkeypatch, columns, host, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text(
        "".join(
            f'[tenants.{name}]\n{more}reserve = "2%"\nlimit = "50%"\n{host}'
            for name, more in (
                ("night", ""),
                ("team-of-rather-long-names", 'parent = "org"\n'),
                ("org", ""),
                ("deep", 'parent = "team-of-rather-long-names"\n'),
            )
        )
    )
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run("replay", "--tenants-file", str(path), "--limit-seconds", "20", *SMALL)
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    names = [line.partition("-" * 9)[0][:24].rstrip() for line in lines[2:6]]
    assert [name[: len(name) - len(name.lstrip())] for name in names] == ["", "", "  ", "    "]
    assert [name.split()[0][:16] for name in names] == ["night", "org", "team-of-rather-l", "deep"]
    assert "…" not in re.sub(r"^ *team-of-rather-l\S*…", "", out, flags=re.MULTILINE)  # no number is cut
    if columns == 80 or (host and columns == 100):
        text = r" host limit \d+ MiB" if host else ""
        assert re.search(rf"^bounds  reserve \d\d.* MiB limit \d+ MiB{text} each: night,", out, re.MULTILINE)
        for line in lines[6:]:  # numbers stay with their words
            assert line.startswith("        ") or line.split()[0] in LABELS
    else:
        assert re.search(r"reserve +limit +host limit$" if host else r"reserve +limit$", lines[1].rstrip())


LABELS = {"bounds", "refused", "pool", "time", "ended", "audit", "warning"}


def test_wrapped():
    assert wrapped("x", ["aaaa", "bbbb", "cccc"], 20) == "x       aaaa, bbbb,\n        cccc"
    assert wrapped("x", ["aaaa", "bbbb", "cccc"], 20, 2) == "x       aaaa, bbbb,\n          cccc"
    assert wrapped("x", ["a" * 50], 20) == "x       " + "a" * 50
    assert wrapped("x", [], 20).rstrip() == "x"


def test_ctrl_c_ends_with_a_summary_and_130(tmp_path):
    out = tmp_path / "o.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvalloc", "replay", "--limit-seconds", "5000", "--json", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    said, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    assert "(interrupted)" in said
    assert "the books balance" in said
    assert json.loads(out.read_text())["interrupted"]


def test_live_view_draws(trace):
    traffic = choose(trace, 3, None, 0, None, None, None, None)
    spec = kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128)
    replay = Replay(spec, "1GiB", traffic.plans, max_tokens=8192)
    console = Console(file=io.StringIO(), force_terminal=True, width=110, color_system=None)
    with LiveView(replay, traffic, console) as view:
        replay.run(traffic.requests, refresh=view.refresh, every=0.0)
    text = console.file.getvalue()
    for word in ("progress", "100%", "pool", "tenant-3", "hit rate", "held", "reserve", "running", "waiting"):
        assert word in text


def test_live_view_shows_a_tree_even_of_many_tenants():
    plans = [TenantPlan("top"), TenantPlan("other", traffic=1.0)]
    plans += [TenantPlan(f"t{k}", "top", traffic=1.0) for k in range(20)]
    spec = kvalloc.KVSpec.uniform(layers=28, kv_heads=4, head_dim=128)
    replay = Replay(spec, "1GiB", plans, max_tokens=8192)
    shown = []
    traffic = Traffic(iter(()), plans, "1GiB", total_requests=1)
    for width in (80, 160):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        with LiveView(replay, traffic, console) as view:
            view.refresh()
        shown = console.file.getvalue().splitlines()
        rows = [line for line in shown if "·" in line and line.startswith(("top", "other", "  t"))]
        assert len(rows) % 16 == 0
        assert rows[0].startswith("top ")
        assert rows[1].startswith("  t")


def test_bar():
    assert bar(10, 100, [(50, "#", ""), (20, "-", "")]).plain == "#####--···"
    assert bar(10, 100, [(50, "#", "")], reserve=80, limit=100).plain == "#####··│·┃"
    assert bar(10, 100, [(500, "#", "")], reserve=0, limit=None).plain == "#" * 10
    assert bar(4, 1, []).plain == "····"


def test_numbers_for_people():
    assert [clock(0), clock(61), clock(3723)] == ["0:00", "1:01", "1:02:03"]
    assert [seconds(0.0421), seconds(2.345), seconds(1234.0)] == ["42 ms", "2.3 s", "1234 s"]
    assert [short(9_999), short(12_345), short(1_500_000), short(145_000_000)] == [
        "9999",
        "12.3k",
        "1.5M",
        "145M",
    ]


EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_with_its_own_model_runs(capsys):
    runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("gold: ") == 2
    assert out.count("free: ") == 3
    assert "cached for later" in out


def test_the_example_tenants_file_is_read(run, trace):
    code, out, _ = run("replay", "-t", str(trace), "--tenants-file", str(EXAMPLES / "tenants.toml"), *SMALL)
    assert code == 0
    for name in ("acme", "support", "research", "nightly"):
        assert name in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reclaim", "nope", "1GiB"), "no tenant 'nope'; there are agent, batch, chat, pool, search, shop"),
        (("top-up", "pool", "1GiB"), "no tenant 'pool'; there are agent, batch, chat, search, shop"),
        (("top-up", "chat", "1GiB", "--live", "freeze"), "use --live preempt"),
        (("reclaim", "chat", "2"), "did you mean 2GiB?"),
        (("reclaim", "chat", "2GiB", "--device", "8"), "did you mean 8GiB?"),
    ],
)
def test_plan_tells_a_person_what_to_write(run, words, message):
    code, out, err = run("plan", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kvalloc: error: plan ") or "--device" in err
    assert message in err
    assert "pool." not in err


def test_a_host_limit_is_in_the_tables_and_the_rows_at_it_are_computed_again(run, tmp_path):
    path, report = tmp_path / "t.toml", tmp_path / "r.html"
    path.write_text('[tenants.a]\nhost_limit = 0\n[tenants.b]\nhost_limit = "25%"\n')
    options = ("--tenants-file", str(path), "--limit-seconds", "30", "--device", "2GiB", "--host", "4GiB")
    more = ("--policy", "swap", "--reclaim", "a=1GiB@10", "--json", "-", "--report", str(report))
    code, out, _ = run("replay", *options, *more)
    assert code == 0
    result = json.loads(out)
    rows = {row["name"]: row for row in result["tenants"]}
    assert (rows["a"]["host_limit"], rows["a"]["host_held"]) == (0, 0)
    assert rows["b"]["host_limit"] == pytest.approx(1 << 30, rel=0.01)
    assert result["pressure"]["reclaims"][0]["host_full"] == ["a"]
    assert result["pressure"]["victims"]["recomputed"] > 0
    assert "<th>host limit</th>" in report.read_text()


@pytest.mark.parametrize("live", ["preempt", "freeze"])
def test_plan_reclaims_from_all_or_one(run, live):
    for words in (("pool",), ("chat",)):
        code, out, err = run("plan", "reclaim", *words, "100MiB", "--at", "5", "--live", live)
        assert (code, err) == (0, "")
        assert "100 MiB asked for (dry)" in out
        assert re.search(r"missing +\d", out)
        assert ("offload" in out) == (live == "preempt")


def test_a_plan_tells_where_the_host_tier_had_no_room():
    spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=64)
    cases = (
        ("4MiB", 0, "host limit of acme"),
        ("64KiB", None, "the tier itself"),
        (0, None, "there is none"),
    )
    for host, limit, text in cases:
        pool = kvalloc.Pool(spec, "4MiB", host)
        batch, sequence = pool.batch(1, 512), pool.open(pool.tenant("acme", host_limit=limit), range(120))
        batch.add(sequence)
        batch.step()
        batch.commit([1])
        console = Console(file=io.StringIO(), width=110)
        print_plan(pool.suspend(sequence, mode="swap", batch=batch, dry_run=True), pool, console)
        assert re.search(rf"no room in the host tier +{text}$", console.file.getvalue(), re.MULTILINE)


def test_a_plan_tells_tokens_that_are_computed_again_from_those_that_are_lost():
    pool = kvalloc.Pool(kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=64), "4MiB")
    batch, sequence = pool.batch(1, 512), pool.open(pool.tenant("acme", cut=16), range(120))
    batch.add(sequence)
    batch.step()
    batch.commit([1])
    lost = pool.cut("acme", "1GiB", batch=batch, dry_run=True)
    again = pool.suspend(sequence, mode="recompute", batch=batch)
    for plan, tokens, column in ((lost, "80", "tokens lost"), (again, "120", "tokens again")):
        console = Console(file=io.StringIO(), width=110)
        print_plan(plan, pool, console)
        lines = console.file.getvalue().splitlines()
        head = next(at for at, line in enumerate(lines) if line.startswith("sequence"))
        assert lines[head + 1].split()[-1] == tokens
        assert len(lines[head + 1].rstrip()) == lines[head].index(column) + len(column)


def test_a_word_that_is_too_long_is_not_said_back_whole(run):
    for words in (("plan", "reclaim", "x" * 5000, "1GiB"), ("replay", "--reclaim", f"{'x' * 5000}=1GiB@3")):
        code, _, err = run(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert "xxx..." in err
        assert "there are agent, batch, chat" in err
        assert len(err) < 500


def test_python_m_kvalloc_is_the_command():
    asked = subprocess.run([sys.executable, "-m", "kvalloc", "--version"], capture_output=True, text=True)
    assert asked.stdout == f"kvalloc {kvalloc.__version__}\n"


def test_a_device_is_no_trace(run):
    start = time.monotonic()
    code, _, err = run("replay", "-t", "/dev/zero", *SMALL)
    assert code == 2
    assert err.startswith("kvalloc: error: ")
    assert "this is no trace" in err
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("costs", ["base=1e308", "prefill=1e300", "row=1e7", "bandwidth=1e-320"])
def test_steps_that_last_for_ever(run, trace, costs):
    code, _, err = run("replay", "-t", str(trace), "--step-time", costs, *SMALL)
    assert code == 2
    assert err.startswith("kvalloc: error: step time: ")
    assert clock(float("inf")) == clock(1e308) == "for ever"

"""The report of a replay: one HTML file with everything in it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from kvalloc.sizes import format_bytes

from . import plots
from .live import clock
from .summary import has_host_limits, seconds, short

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["render", "write_report"]

CSS = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  color: #1f2933; background: #fff; max-width: 1100px; margin: 2em auto; padding: 0 1.2em }
h1 { font-size: 1.6em; margin: .2em 0 }
h2 { font-size: 1.2em; margin: 2em 0 .3em }
h3 { font-size: 1em; margin: 1.4em 0 .2em }
p { margin: .4em 0; color: #3e4c59; max-width: 75ch }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6em 0; font-size: .9em }
th, td { padding: .25em .45em; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap }
th { font-weight: 600; color: #52606d; vertical-align: bottom }
table.wide th { white-space: normal }
table.wide td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 5em }
th:first-child, td:first-child { text-align: left }
td.text, th.text { text-align: left; white-space: normal }
.cards { display: flex; flex-wrap: wrap; gap: .8em; margin: 1.2em 0 }
.card { border: 1px solid #e4e7eb; border-radius: 6px; padding: .5em 1em; min-width: 8.2em }
.card b { display: block; font-size: 1.35em }
.card small { color: #52606d; font-size: .86em }
.bad { color: #c53030 }
.good { color: #2f855a }
.scroll { overflow-x: auto }
svg { max-width: 100%; height: auto }
footer { color: #7b8794; font-size: .85em; margin: 3em 0 1em }
@media (max-width: 1000px) {
  table.wide { font-size: .72em }
  table.wide th, table.wide td { padding: .25em .2em }
}
"""


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the report of a replay's result."""
    path.write_text(render(result), encoding="utf-8")


def render(result: dict[str, Any]) -> str:
    """Return the report of a replay's result as HTML."""
    with mpl.rc_context(plots.STYLE):
        return "".join(_page(result))


def _page(result: dict[str, Any]) -> Sequence[str]:
    settings, names = result["settings"], plots.by_use(result)
    trace = html.escape(str(settings.get("trace", "")).rsplit("/", 1)[-1])
    about = (
        f"{trace} on {html.escape(str(settings.get('model', '')))} "
        f"({html.escape(str(settings.get('dtype', '')))}), "
        f"{format_bytes(result['pool']['capacity'])} of device, "
        f"pages of {settings.get('page_tokens', '?')} tokens, "
        f"seed {settings.get('seed', 0)}"
    )
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvalloc replay: {trace}</title>',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<style>{CSS}</style><h1>kvalloc replay</h1><p>{about}</p>",
        _cards(result),
        "<h2>Tenants</h2>",
        _table(result),
        "<p>Prompt and reply are in tokens. Waste is room in last pages without a token, of held bytes.</p>",
        _refusals(result),
        "<h2>Latency</h2>",
        _latencies(result),
        "<p>Waiting ends when a request is admitted. A token: from one to the next behind the first, of each "
        "request that finished, with the time that it was stopped. Stopped: requests that gave their memory "
        "back and went on later, and for how long.</p>",
    ]
    drawn = names and len(result["series"]["time"]) > 1
    if result["pressure"]["policy"] != "reserve":
        parts += [
            f"<h2>Under pressure</h2><p>Rows that found no room made others stop: "
            f"{_POLICIES[result['pressure']['policy']]}.</p>",
            _totals(result["pressure"]),
            plots.stops(result, names) if drawn else "",
            *_taken_back(result["pressure"]),
        ]
    if drawn:
        parts += [
            "<h2>Use of each tenant</h2><p>Bytes charged to the tenant and all below it: held by running "
            "sequences, pinned, and cached, which may be taken back. The reserve is available to its owner "
            "at once; the limit is never exceeded.</p>",
            plots.uses(result, names),
            "<h2>The pool</h2><p>Who holds it, what is cached for later, what is free.</p>",
            plots.pool(result, names),
            "<h2>Hit rate</h2><p>Share of prompt tokens that were found in the cache, of requests admitted "
            "in a moving twentieth of the run.</p>",
            plots.hits(result, names),
            "<h2>Waiting</h2><p>Requests that wait for room or for a row, and how long they waited.</p>",
            plots.waiting(result, names),
        ]
    parts += ["<h2>Settings</h2>", _settings(result), "<footer>Written by kvalloc replay.</footer></html>\n"]
    return parts


def _cards(result: dict[str, Any]) -> str:
    run, pool = result["run"], result["pool"]
    ok = result["audit"]["ok"]
    cards = [
        (
            f"{run['finished']:,}",
            f"of {run['requests']:,} requests finished" + (", interrupted" if result["interrupted"] else ""),
        ),
        (f"{run['refused']:,}", "refused"),
        (f"{pool['hit_rate']:.1%}", "of prompt tokens hit"),
        (f"{pool['peak_held'] / pool['capacity']:.0%}", "of the pool held at the peak"),
        (short(pool["evictions"]), "pages evicted"),
        (f"{pool['waste']:.2%}", "internal waste"),
        (f"{run['step_us']['p50']:.0f} us", f"host time a step (P99 {run['step_us']['p99']:.0f} us)"),
        (clock(run["virtual_seconds"]), f"replayed in {run['host_seconds']:.1f} s, {run['steps']:,} steps"),
    ]
    cards.append(
        (
            f'<span class="{"good" if ok else "bad"}">{"balance" if ok else "broken"}</span>',
            "the books, by audit",
        )
    )
    problems = "".join(
        f'<p class="bad">{html.escape(problem)}</p>' for problem in result["audit"]["problems"][:20]
    )
    return _cards_of(cards) + problems


def _cards_of(cards: Iterable[tuple[str, str]]) -> str:
    text = "".join(f'<div class="card"><b>{big}</b><small>{small}</small></div>' for big, small in cards)
    return f'<div class="cards">{text}</div>'


def _table(result: dict[str, Any]) -> str:
    host = ["host limit"] if has_host_limits(result) else []
    head = [
        "tenant", "reserve", "limit", *host, "weight", "requests", "finished", "refused", "prompt", "reply",
        "hit rate", "waste",
    ]  # fmt: skip
    lines = []
    for row in result["tenants"]:
        refused = sum(row["refused"].values())
        limits = [row["limit"], *([row["host_limit"]] if host else [])]
        cells = [
            format_bytes(row["reserve"]) if row["reserve"] else "",
            *("" if limit is None else format_bytes(limit) for limit in limits),
            f"{row['weight']:g}" if row["weight"] else "",
        ]
        if row["requests"]:
            cells += [
                f"{row['requests']:,}",
                f"{row['finished']:,}",
                f'<span class="bad">{refused:,}</span>' if refused else "0",
                short(row["prompt_tokens"]),
                short(row["generated_tokens"]),
                f"{row['hit_rate']:.1%}",
                f"{row['waste']:.2%}",
            ]
        lines.append((row, cells))
    return _by_tenant(head, lines)


def _latencies(result: dict[str, Any]) -> str:
    head = (
        "tenant", "wait P50", "P99", "first token P50", "P99", "a token P50", "P99", "stopped", "for P50",
        "P99", "at most",
    )  # fmt: skip
    lines = []
    for row in result["tenants"]:
        cells = []
        if row["requests"]:
            times = [row[what][p] for what in ("wait_s", "first_token_s", "token_s") for p in ("p50", "p99")]
            stalls = [row["stall_s"][p] for p in ("p50", "p99", "max")] if row["stops"] else []
            cells = [*map(seconds, times), f"{row['stops']:,}", *map(seconds, stalls)]
        lines.append((row, cells))
    return _by_tenant(head, lines)


def _by_tenant(head: Sequence[str], lines: Iterable[tuple[dict[str, Any], list[str]]]) -> str:
    """Return a table with a line for each tenant, indented as in the tree."""
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for row, cells in lines:
        cells += [""] * (len(head) - 1 - len(cells))
        indent = f' style="padding-left: {0.3 + 1.1 * row["depth"]:.1f}em"' if row["depth"] else ""
        rows.append(
            f"<tr><td{indent}>{html.escape(row['name'])}</td>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    return f'<div class="scroll"><table class="wide">{"".join(rows)}</table></div>'


_POLICIES = {
    "swap": "their pages went to the host, or were computed again where that had no room",
    "recompute": "their pages were computed again when they went on",
    "auto": "their pages went to the host or were computed again, as was expected to be cheaper",
}


def _totals(pressure: dict[str, Any]) -> str:
    """Return how often rows were stopped, by what, and what it cost."""
    cards = [(f"{count:,}", f"rows {fate}") for fate, count in sorted(pressure["victims"].items())]
    cards += [
        (format_bytes(pressure["swapped_bytes"]), "swapped, both ways"),
        (seconds(pressure["stalled_s"]), "stopped, all requests together"),
        (f"{pressure['stopped']:,}", "stopped at the end"),
    ]
    if pressure["expired"]:
        cards.append((f'<span class="bad">{pressure["expired"]:,}</span>', "plans ran out of time"))
    return _cards_of(cards)


def _taken_back(pressure: dict[str, Any]) -> Sequence[str]:
    """Return what lenders got back, and what was reclaimed, as tables; nothing where there was none."""
    parts = []
    if pressure["give_backs"]:
        columns = ("lender", "times", "came back", "rows stopped", "took P50", "P99", "at most")
        lines = [
            [name, f"{got['count']:,}", format_bytes(got["bytes"]), f"{got['rows']:,}"]
            + [seconds(got["seconds"][p]) for p in ("p50", "p99", "max")]
            for name, got in pressure["give_backs"].items()
        ]
        parts += [
            "<h3>Reserves given back</h3><p>From asking to having: the copies of those that stopped. The "
            "lender's request is in the next step.</p>",
            _plain_table(columns, lines),
        ]
    if pressure["reclaims"]:
        titles = (
            "tenant", "at", "asked", "came back", "rows stopped", "shared, stays", "pinned, stays", "short",
        )  # fmt: skip
        lines = [
            [one["tenant"], clock(one["at_s"]), format_bytes(one["asked"]), format_bytes(one["bytes"])]
            + [f"{one['victims']:,}"]
            + [format_bytes(one[what]) if one[what] else "" for what in ("shared", "pinned", "shortfall")]
            for one in pressure["reclaims"]
        ]
        parts += ["<h3>Reclaimed</h3>", _plain_table(titles, lines)]
    return parts


def _plain_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = ["".join(f"<th>{name}</th>" for name in head)]
    rows += ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines]
    return f'<div class="scroll"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _refusals(result: dict[str, Any]) -> str:
    lines = [
        f"<tr><td>{html.escape(row['name'])}</td><td>{group['requests']:,}</td>"
        f'<td class="text">{html.escape(group["text"])}</td></tr>'
        for row in result["tenants"]
        for group in row["refusals"]
    ]
    if not lines:
        return ""
    head = '<tr><th>tenant</th><th>requests</th><th class="text">why</th></tr>'
    return f"<h2>Refused</h2><table>{head}{''.join(lines)}</table>"


def _settings(result: dict[str, Any]) -> str:
    rows = []
    for name, value in result["settings"].items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={number:g}" for key, number in value.items())
        elif value is None:
            continue
        elif name.endswith("_bytes"):
            name, value = name.removesuffix("_bytes"), format_bytes(value)
        rows.append(f'<tr><td>{html.escape(name)}</td><td class="text">{html.escape(str(value))}</td></tr>')
    return f"<table>{''.join(rows)}</table>"

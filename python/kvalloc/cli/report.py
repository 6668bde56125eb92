"""The report of a replay: one HTML file with everything in it."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvalloc.sizes import format_bytes

from .live import clock
from .summary import seconds, short

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["render", "write_report"]

MOST_PLOTS = 12  # tenants with a plot of their own
MOST_COLOURS = 10
GIB = 2.0**30
INK, GREY, RESERVE, LIMIT = "#1f2933", "#9aa5b1", "#2f855a", "#c53030"
HELD, CACHED, PINNED, FREE = "#2b6cb0", "#90cdf4", "#805ad5", "#edf2f7"
# None is like a colour above: a tenant's blue would read as "held".
COLOURS = [
    "#dd6b20",
    "#68a357",
    "#b83280",
    "#b7791f",
    "#0f8b8d",
    "#9b2c2c",
    "#4a5568",
    "#d69eb0",
    "#7b5b3a",
    "#a0aec0",
]
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
}
CSS = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  color: #1f2933; background: #fff; max-width: 1100px; margin: 2em auto; padding: 0 1.2em }
h1 { font-size: 1.6em; margin: .2em 0 }
h2 { font-size: 1.2em; margin: 2em 0 .3em }
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
.card span { color: #52606d; font-size: .86em }
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
    with mpl.rc_context(STYLE):
        return "".join(_page(result))


def _page(result: dict[str, Any]) -> Sequence[str]:
    settings, names = result["settings"], _by_use(result)
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
        "<p>Prompt and reply are in tokens. Waiting ends when a request is admitted. Waste is room in last "
        "pages without a token, of held bytes.</p>",
        _refusals(result),
    ]
    if names and len(result["series"]["time"]) > 1:
        parts += [
            "<h2>Use of each tenant</h2><p>Bytes charged to the tenant and all below it: held by running "
            "sequences, pinned, and cached, which may be taken back. The reserve is available to its owner "
            "at once; the limit is never exceeded.</p>",
            _uses(result, names),
            "<h2>The pool</h2><p>Who holds it, what is cached for later, what is free.</p>",
            _pool(result, names),
            "<h2>Hit rate</h2><p>Share of prompt tokens that were found in the cache, of requests admitted "
            "in a moving twentieth of the run.</p>",
            _hits(result, names),
            "<h2>Waiting</h2><p>Requests that wait for room or for a row, and how long they waited.</p>",
            _waiting(result, names),
        ]
    parts += ["<h2>Settings</h2>", _settings(result), "<footer>Written by kvalloc replay.</footer></html>\n"]
    return parts


def _by_use(result: dict[str, Any]) -> list[str]:
    """Return the tenants that were charged or sent anything, most used first.

    The first ones have plots and colours; wherever several are listed, they stand in the order of the tree.
    """
    series = result["series"]["tenants"]
    use = {name: sum(one["held"]) + sum(one["cached"]) for name, one in series.items()}
    asked = {row["name"]: row["requests"] for row in result["tenants"]}
    return [name for name in sorted(use, key=lambda name: -use[name]) if use[name] or asked.get(name)]


def _colours(result: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Return a colour for the first names, the same in every plot, in the order of the legends."""
    rows = [row["name"] for row in result["tenants"]]
    return dict(zip(sorted(names[: MOST_COLOURS - 1], key=rows.index), COLOURS[:-1], strict=False))


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
    text = "".join(f'<div class="card"><b>{big}</b><span>{small}</span></div>' for big, small in cards)
    audit = '<b class="good">balance</b>' if ok else '<b class="bad">broken</b>'
    problems = "".join(
        f'<p class="bad">{html.escape(problem)}</p>' for problem in result["audit"]["problems"][:20]
    )
    text += f'<div class="card">{audit}<span>the books, by audit</span></div>'
    return f'<div class="cards">{text}</div>{problems}'


def _table(result: dict[str, Any]) -> str:
    head = (
        "tenant", "reserve", "limit", "weight", "requests", "finished", "refused", "prompt", "reply",
        "hit rate", "wait P50", "P99", "first token P50", "P99", "waste",
    )  # fmt: skip
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for row in result["tenants"]:
        refused = sum(row["refused"].values())
        cells = [
            format_bytes(row["reserve"]) if row["reserve"] else "",
            "" if row["limit"] is None else format_bytes(row["limit"]),
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
                *(seconds(row[what][p]) for what in ("wait_s", "first_token_s") for p in ("p50", "p99")),
                f"{row['waste']:.2%}",
            ]
        cells += [""] * (len(head) - 1 - len(cells))
        indent = f' style="padding-left: {0.3 + 1.1 * row["depth"]:.1f}em"' if row["depth"] else ""
        lines.append(
            f"<tr><td{indent}>{html.escape(row['name'])}</td>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    return f'<div class="scroll"><table class="wide">{"".join(lines)}</table></div>'


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


def _uses(result: dict[str, Any], names: list[str]) -> str:
    series, times = result["series"], _times(result)
    rows = {row["name"]: row for row in result["tenants"]}
    shown = [row["name"] for row in result["tenants"] if row["name"] in names[:MOST_PLOTS]]
    across = 2 if len(shown) > 1 else 1
    down = -(-len(shown) // across)
    figure = Figure(figsize=(10.4, 2.3 * down + 0.5), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True)
    for at, name in enumerate(shown):
        ax, under = axes[at // across][at % across], _subtree(result, name)
        parts = [
            np.sum([series["tenants"][each][what] for each in under], axis=0) / GIB
            for what in ("held", "pinned", "cached")
        ]
        ax.stackplot(times, *parts, colors=[HELD, PINNED, CACHED], step="post", linewidth=0)
        top = max(float(np.sum(parts, axis=0).max()), 0.01)
        reserve, limit = rows[name]["reserve"] / GIB, rows[name]["limit"]
        if reserve:
            ax.axhline(reserve, color=RESERVE, linestyle="--", linewidth=1.4)
        note = " and below" if len(under) > 1 else ""
        if limit is not None:
            if limit / GIB < 3 * max(top, reserve):
                ax.axhline(limit / GIB, color=LIMIT, linewidth=1.4)
                top = max(top, limit / GIB)
            else:  # a line far above would press the use flat
                note += f" (limit {format_bytes(limit)} is above)"
        ax.set_ylim(0, 1.08 * max(top, reserve))
        ax.set_title(name + note)
        ax.set_ylabel("GiB")
        _time_axis(ax, times, label=at + across >= len(shown))
    for ax in list(axes.flat)[len(shown) :]:
        ax.set_visible(False)
    handles: list[Any] = [
        mpl.patches.Patch(color=c, label=t)
        for c, t in ((HELD, "held"), (PINNED, "pinned"), (CACHED, "cached"))
    ]
    handles += [
        mpl.lines.Line2D([], [], color=RESERVE, linestyle="--", label="reserve"),
        mpl.lines.Line2D([], [], color=LIMIT, label="limit"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=5)
    more = len(names) - len(shown)
    return _svg(figure) + (
        f"<p>The {len(shown)} tenants that used most; {more} more are in the table.</p>" if more else ""
    )


def _subtree(result: dict[str, Any], root: str) -> list[str]:
    """Return a tenant and all below it; in the result parents come before their children."""
    under = [root]
    for row in result["tenants"]:
        if row["parent"] in under:
            under.append(row["name"])
    return under


def _pool(result: dict[str, Any], names: list[str]) -> str:
    series, times = result["series"], _times(result)
    # From the bottom up, so that the legend, which goes from the top down, has the order of the other plots.
    colours_of = _colours(result, names)
    shown = list(colours_of)[::-1]
    pool = {what: np.array(values) / GIB for what, values in series["pool"].items()}
    held = [
        (np.array(series["tenants"][n]["held"]) + np.array(series["tenants"][n]["pinned"])) / GIB
        for n in shown
    ]
    labels, colours = [f"{name}, held" for name in shown], [colours_of[name] for name in shown]
    rest = pool["held"] + pool["pinned"] - np.sum(held, axis=0)
    if len(names) > len(shown):
        held.insert(0, np.maximum(rest, 0.0))
        labels, colours = ["others, held", *labels], [COLOURS[-1], *colours]
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    ax = figure.subplots()
    ax.stackplot(
        times,
        *held,
        pool["cached"],
        pool["free"],
        labels=[*labels, "cached", "free"],
        colors=[*colours, CACHED, FREE],
        step="post",
        linewidth=0,
    )
    ax.set_ylim(0, result["pool"]["capacity"] / GIB)
    ax.set_ylabel("GiB")
    _time_axis(ax, times)
    handles, texts = ax.get_legend_handles_labels()
    figure.legend(handles[::-1], texts[::-1], loc="outside right upper")
    return _svg(figure)


def _hits(result: dict[str, Any], names: list[str]) -> str:
    series, times = result["series"], _times(result)
    figure = Figure(figsize=(10.4, 3.0), layout="constrained")
    ax = figure.subplots()
    span = max(1, len(times) // 20)
    prompt_all, cached_all = np.zeros(len(times)), np.zeros(len(times))
    for one in series["tenants"].values():
        prompt_all += one["prompt_tokens"]
        cached_all += one["cached_tokens"]
    asked = {row["name"] for row in result["tenants"] if row["prompt_tokens"]}
    for name, colour in _colours(result, names).items():
        if name not in asked:
            continue
        one = series["tenants"][name]
        rate = _moving(np.array(one["prompt_tokens"], float), np.array(one["cached_tokens"], float), span)
        ax.plot(times, rate, color=colour, linewidth=1.3, label=name)
    ax.plot(times, _moving(prompt_all, cached_all, span), color=INK, linewidth=2.2, label="all")
    ax.set_ylim(-0.03, 1.03)  # lines at 0 % and 100 % are seen
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    _time_axis(ax, times)
    figure.legend(loc="outside right upper")
    return _svg(figure)


def _moving(prompt: Floats, cached: Floats, span: int) -> Floats:
    """Return the hit rate of what was admitted in the last `span` samples; NaN where nothing was."""
    before = (
        np.concatenate((np.zeros(span), prompt[:-span])),
        np.concatenate((np.zeros(span), cached[:-span])),
    )
    asked, hit = prompt - before[0], cached - before[1]
    rate: Floats = np.divide(hit, asked, out=np.full(len(asked), np.nan), where=asked > 0)
    return rate


def _waiting(result: dict[str, Any], names: list[str]) -> str:
    series, times = result["series"], _times(result)
    figure = Figure(figsize=(10.4, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    asked = {row["name"]: row for row in result["tenants"] if row["requests"]}
    colours = _colours(result, names)
    shown = [name for name in colours if name in asked]
    for name in shown:
        left.step(
            times,
            series["tenants"][name]["waiting"],
            where="post",
            color=colours[name],
            linewidth=1.2,
            label=name,
        )
    left.set_title("requests that wait")
    left.set_ylim(bottom=-0.03 * left.get_ylim()[1])
    left.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    _time_axis(left, times)
    places = np.arange(len(shown))
    for offset, what, alpha in ((-0.2, "p50", 0.55), (0.2, "p99", 1.0)):
        values = [asked[name]["wait_s"][what] for name in shown]
        bars = right.barh(places + offset, values, 0.38, color=[colours[name] for name in shown], alpha=alpha)
        right.bar_label(bars, [f"{what.upper()} {seconds(value)}" for value in values], padding=3, fontsize=8)
    right.set_yticks(places, shown)
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.margins(x=0.22)
    right.set_title("time waited")
    right.set_xlabel("seconds")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=min(5, len(shown)))
    return _svg(figure)


def _times(result: dict[str, Any]) -> Floats:
    return np.array(result["series"]["time"], dtype=np.float64)


def _time_axis(ax: Axes, times: Floats, label: bool = True) -> None:
    ax.set_xlim(float(times[0]), float(max(times[-1], times[0] + 1e-3)))
    ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 1.5, 2, 3, 6, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: clock(value)))
    ax.tick_params(labelbottom=label)
    if label:
        ax.set_xlabel("replayed time")


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # A tenth of a point is enough for a path, and half the file.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    # Text is drawn in the page's own sans-serif font.
    return '<div class="scroll">' + re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text) + "</div>"

"""The plots of a report: each function returns one SVG for a page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvalloc.sizes import format_bytes

from .live import clock
from .summary import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["STYLE", "by_use", "hits", "pool", "stops", "uses", "waiting"]

MOST_PLOTS = 12  # tenants with a plot of their own
MOST_COLOURS = 10
GIB = 2.0**30
INK, GREY, RESERVE, LIMIT = "#1f2933", "#9aa5b1", "#2f855a", "#c53030"
HELD, CACHED, PINNED, FREE = "#2b6cb0", "#90cdf4", "#805ad5", "#edf2f7"
RECOMPUTED = "#dd6b20"
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


def by_use(result: dict[str, Any]) -> list[str]:
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


def uses(result: dict[str, Any], names: list[str]) -> str:
    """Plot the bytes charged to each of the tenants that used most, with its reserve and limit."""
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


def pool(result: dict[str, Any], names: list[str]) -> str:
    """Plot what the whole pool holds: by tenant, cached, free."""
    series, times = result["series"], _times(result)
    # From the bottom up, so that the legend, which goes from the top down, has the order of the other plots.
    colours_of = _colours(result, names)
    shown = list(colours_of)[::-1]
    books = {what: np.array(values) / GIB for what, values in series["pool"].items()}
    held = [
        (np.array(series["tenants"][n]["held"]) + np.array(series["tenants"][n]["pinned"])) / GIB
        for n in shown
    ]
    labels, colours = [f"{name}, held" for name in shown], [colours_of[name] for name in shown]
    rest = books["held"] + books["pinned"] - np.sum(held, axis=0)
    if len(names) > len(shown):
        held.insert(0, np.maximum(rest, 0.0))
        labels, colours = ["others, held", *labels], [COLOURS[-1], *colours]
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    ax = figure.subplots()
    ax.stackplot(
        times,
        *held,
        books["cached"],
        books["free"],
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


def hits(result: dict[str, Any], names: list[str]) -> str:
    """Plot the hit rate of each tenant and of all."""
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


def waiting(result: dict[str, Any], names: list[str]) -> str:
    """Plot how many requests wait, and how long they waited."""
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


def stops(result: dict[str, Any], names: list[str]) -> str:
    """Plot what stopping rows came to: how many stand still, who was stopped how, bytes copied for it."""
    series, times = result["series"], _times(result)
    figure = Figure(figsize=(10.4, 3.2), layout="constrained")
    still, by_mode, copied = figure.subplots(1, 3)
    colours, bottom = _colours(result, names), np.zeros(len(times))
    for name, one in series["tenants"].items():
        count = np.array(one["stopped"], dtype=np.float64)
        if count.any():
            colour = colours.get(name, COLOURS[-1])
            still.fill_between(
                times, bottom, bottom + count, step="post", color=colour, linewidth=0, label=name
            )
            bottom += count
    still.set_title("requests that stand still")
    for what, colour in (("swapped", HELD), ("recomputed", RECOMPUTED)):
        by_mode.step(times, series["pool"][what], where="post", color=colour, linewidth=1.6, label=what)
    by_mode.set_title("stopped so far")
    copied.step(
        times, np.array(series["pool"]["swapped_bytes"]) / GIB, where="post", color=HELD, linewidth=1.6
    )
    copied.set_title("swapped so far, both ways")
    copied.set_ylabel("GiB")
    for ax in (still, by_mode):
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    for ax in (still, by_mode, copied):
        ax.set_ylim(0, max(ax.get_ylim()[1], 1.0 if ax is not copied else 0.01))
        _time_axis(ax, times, ticks=4)
    by_mode.legend(loc="upper left")
    if bottom.any() or still.get_legend_handles_labels()[0]:
        figure.legend(*still.get_legend_handles_labels(), loc="outside upper left", ncols=6)
    return _svg(figure)


def _times(result: dict[str, Any]) -> Floats:
    return np.array(result["series"]["time"], dtype=np.float64)


def _time_axis(ax: Axes, times: Floats, label: bool = True, ticks: int = 7) -> None:
    ax.set_xlim(float(times[0]), float(max(times[-1], times[0] + 1e-3)))
    ax.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 1.5, 2, 3, 6, 10]))
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

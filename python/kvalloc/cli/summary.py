"""The table at the end of a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kvalloc.sizes import format_bytes

from .live import clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

__all__ = ["has_host_limits", "print_summary", "seconds", "short", "wrapped"]

LABEL = 8  # columns of a line's name
WIDE = 96  # columns from which reserve and limit stand in the table
HOST = 11  # more, with a limit of the host tier


def seconds(value: float) -> str:
    """Return a duration with a unit, three digits."""
    if value < 1.0:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 100.0 else f"{value:.0f} s"


def short(count: int) -> str:
    """Return 12.3k or 4.56M for a count."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= 10 * size or (count >= size and unit != "k"):
            return f"{count / size:.3g}{unit}"
    return str(count)


def wrapped(label: str, items: Iterable[str], width: int, deeper: int = 0) -> str:
    """Return "label  a, b, c" in lines of at most `width` that break between items and hang below the first.

    Lines that go on are indented by `deeper` columns more.

    Examples
    --------
    >>> from kvalloc.cli.summary import wrapped
    >>> print(wrapped("pool", ["1 GiB held", "2 GiB cached", "3 GiB free"], 32))
    pool    1 GiB held,
            2 GiB cached, 3 GiB free
    """
    lines, line = [], f"{label:<{LABEL}}"
    first = True
    for item in items:
        if not first:
            # A comma will follow the item, but for the last one: that column is kept free for all.
            if len(line) + 2 + len(item) + 1 > width:
                lines.append(f"{line},")
                line = " " * (LABEL + deeper) + item
                continue
            line += ", "
        line, first = line + item, False
    return "\n".join([*lines, line])


def print_summary(result: dict[str, Any], console: Console) -> None:
    """Print what a replay measured."""
    pool, settings = result["pool"], result["settings"]
    trace = str(settings.get("trace", "")).rsplit("/", 1)[-1]
    title = f"{trace} on {settings.get('model', '')}, {format_bytes(pool['capacity'])}"
    console.print(title, style="bold", highlight=False, markup=False)
    bounds = any(_bounds(row) for row in result["tenants"])
    wide = bounds and console.width >= WIDE + (HOST if has_host_limits(result) else 0)
    console.print(_table(result, wide, console.width), highlight=False)
    lines = []
    if bounds and not wide:
        lines.append(wrapped("bounds", _all_bounds(result), console.width))
    refused = (
        f"{row['name']}: {group['requests']:,} {group['text']}"
        for row in result["tenants"]
        for group in row["refusals"]
    )
    for one in refused:
        label = "" if lines and lines[-1].startswith(("refused", " " * LABEL)) else "refused"
        lines.append(wrapped(label, one.split(", "), console.width, deeper=2))
    lines += [wrapped(label, items, console.width) for label, items in _footer(result)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(result: dict[str, Any], wide: bool, width: int) -> Table:
    columns = ["requests", "prompt", "reply", "hits", "wait P50", "P99", "refused", "waste"]
    bare = len(columns)
    columns += ["reserve", "limit"] if wide else []
    host = wide and has_host_limits(result)
    columns += ["host limit"] if host else []
    parents = {row["parent"] for row in result["tenants"]}
    lines = []
    for row in result["tenants"]:
        if not row["requests"] and row["name"] in parents:
            cells = [""] * bare
        else:
            refused = sum(row["refused"].values())
            served = row["requests"] > refused
            cells = [
                f"{row['requests']:,}",
                short(row["prompt_tokens"]),
                short(row["generated_tokens"]),
                f"{row['hit_rate']:.1%}" if served else "-",
                seconds(row["wait_s"]["p50"]) if served else "-",
                seconds(row["wait_s"]["p99"]) if served else "-",
                f"{refused:,}",
                f"{row['waste']:.2%}" if served else "-",
            ]
        if wide:
            cells.append(format_bytes(row["reserve"]) if row["reserve"] else "")
            limits = [row["limit"], *([row["host_limit"]] if host else [])]
            cells += ["" if limit is None else format_bytes(limit) for limit in limits]
        lines.append(("  " * row["depth"] + row["name"], cells))
    # A long name gives way, not the numbers.
    numbers = sum(
        1 + max(len(name), *(len(cells[i]) for _, cells in lines)) for i, name in enumerate(columns)
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tenant", no_wrap=True, overflow="ellipsis", max_width=max(8, width - numbers))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    at = columns.index("refused")
    for name, cells in lines:
        texts = [Text(cell, style="red" if i == at and cell != "0" else "") for i, cell in enumerate(cells)]
        table.add_row(Text(name), *texts)
    return table


def has_host_limits(result: dict[str, Any]) -> bool:
    """Whether any tenant has a limit of the host tier, so that tables have a column for it."""
    return any(row["host_limit"] is not None for row in result["tenants"])


def _all_bounds(result: dict[str, Any]) -> list[str]:
    """Return who has which reserve and limits, said once if it is the same for all."""
    bounds = {row["name"]: text for row in result["tenants"] if (text := _bounds(row))}
    if len(bounds) > 1 and len(set(bounds.values())) == 1:
        first, *others = bounds
        return [f"{bounds[first]} each: {first}", *others]
    return [f"{name} {text}" for name, text in bounds.items()]


def _bounds(row: dict[str, Any]) -> str:
    """Return a tenant's reserve and limits, "" if it has none."""
    parts = [f"reserve {format_bytes(row['reserve'])}"] if row["reserve"] else []
    limits = {"limit": row["limit"], "host limit": row["host_limit"]}
    parts += [f"{name} {format_bytes(limit)}" for name, limit in limits.items() if limit is not None]
    return " ".join(parts)


def _pressure(pressure: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield what was stopped and taken back, if anything could be."""
    if pressure["policy"] == "reserve":
        return
    victims = [f"{count:,} {fate}" for fate, count in sorted(pressure["victims"].items())]
    yield (
        "rows",
        [
            "stopped: " + (victims[0] if victims else "none"),
            *victims[1:],
            f"{format_bytes(pressure['swapped_bytes'])} swapped",
            f"stopped for {seconds(pressure['stalled_s'])} in all",
            *([f"{pressure['expired']:,} plans ran out of time"] if pressure["expired"] else []),
        ],
    )
    for name, got in pressure["give_backs"].items():
        yield (
            "lent",
            [
                f"{name} got {format_bytes(got['bytes'])} back in {got['count']:,} plans",
                f"{got['rows']:,} rows stopped",
                f"P99 {seconds(got['seconds']['p99'])}",
            ],
        )
    for one in pressure["reclaims"]:
        yield (
            "reclaim",
            [
                f"{one['tenant']} at {clock(one['at_s'])}: {format_bytes(one['bytes'])} of "
                f"{format_bytes(one['asked'])}",
                f"{one['victims']:,} rows stopped",
                *(f"{format_bytes(one[kind])} {kind} stay" for kind in ("shared", "pinned") if one[kind]),
                *([f"{format_bytes(one['shortfall'])} short"] if one["shortfall"] else []),
            ],
        )


def _footer(result: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    run, pool, audit = result["run"], result["pool"], result["audit"]
    yield (
        "pool",
        [
            f"hit rate {pool['hit_rate']:.1%}",
            f"peak held {format_bytes(pool['peak_held'])}",
            f"peak charged {format_bytes(pool['peak_charged'])} of {format_bytes(pool['capacity'])}",
            f"{pool['evictions']:,} evictions",
            f"waste {pool['waste']:.2%}",
            f"fragmentation {pool['fragmentation']:.1%}",
        ],
    )
    yield from _pressure(result["pressure"])
    step, core = run["step_us"], run["core_us"]
    times = ["host time a step -"]
    if run["steps"]:
        times = [
            f"host time a step P50 {step['p50']:,.0f} us",
            f"P99 {step['p99']:,.0f} us",
            f"of it in the pool P50 {core['p50']:,.1f} us",
            f"P99 {core['p99']:,.1f} us",
        ]
    took = f"{clock(run['virtual_seconds'])} replayed in {run['host_seconds']:.1f} s"
    yield "time", [took, f"{run['steps']:,} steps", *times]
    ended = [
        f"{run['finished']:,} finished",
        f"{run['refused']:,} refused" + (" (no error: the exit code is 0)" if run["refused"] else ""),
        f"{run['running']:,} running",
        f"{run['waiting']:,} waiting" + (" (interrupted)" if result["interrupted"] else ""),
    ]
    if result["interrupted"] or not audit["ok"]:
        ended[1] = f"{run['refused']:,} refused"
    yield "ended", ended
    yield "audit", ["the books balance" if audit["ok"] else f"FAILED: {'; '.join(audit['problems'][:5])}"]
    if run["idle_while_waiting_s"] > 0:
        yield "warning", [f"requests waited for {run['idle_while_waiting_s']:.1f} s while nothing ran"]

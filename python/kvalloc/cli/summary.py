"""The table at the end of a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvalloc.sizes import format_bytes

from .live import clock

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_summary", "seconds"]


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


def print_summary(result: dict[str, Any], console: Console) -> None:
    """Print what a replay measured."""
    run, pool, settings = result["run"], result["pool"], result["settings"]
    trace = str(settings.get("trace", "")).rsplit("/", 1)[-1]
    title = f"{trace} on {settings.get('model', '')}, {format_bytes(pool['capacity'])}"
    console.print(title, style="bold", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    wide = console.width >= 96
    table.add_column("tenant", no_wrap=True)
    columns = ("requests", "prompt", "reply", "hits", "wait P50", "P99", "refused", "waste")
    for name in (*columns, "reserve", "limit") if wide else columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["tenants"]:
        if not row["requests"] and any(other["parent"] == row["name"] for other in result["tenants"]):
            cells = [""] * 8
        else:
            refused = sum(row["refused"].values())
            cells = [
                f"{row['requests']:,}",
                short(row["prompt_tokens"]),
                short(row["generated_tokens"]),
                f"{row['hit_rate']:.1%}",
                seconds(row["wait_s"]["p50"]),
                seconds(row["wait_s"]["p99"]),
                f"[red]{refused}[/]" if refused else "0",
                f"{row['waste']:.2%}",
            ]
        limit = row["limit"]
        if wide:
            cells.append(format_bytes(row["reserve"]) if row["reserve"] else "")
            cells.append("" if limit is None else format_bytes(limit))
        table.add_row(("  " if row["parent"] else "") + row["name"], *cells)
    console.print(table, highlight=False)
    for row in result["tenants"]:
        for reason, count in row["refused"].items():
            console.print(
                f"  {row['name']}: {count} refused: {reason}", highlight=False, markup=False, soft_wrap=True
            )
    lines = [
        f"pool    hit rate {pool['hit_rate']:.1%}, peak held {format_bytes(pool['peak_held'])}, "
        f"peak charged {format_bytes(pool['peak_charged'])} of {format_bytes(pool['capacity'])}, "
        f"{pool['evictions']:,} evictions, "
        f"waste {pool['waste']:.2%}, fragmentation {pool['fragmentation']:.1%}",
        f"time    {clock(run['virtual_seconds'])} replayed in {run['host_seconds']:.1f} s; "
        f"{run['steps']:,} steps; host time a step: P50 {run['step_us']['p50']:.0f} us, "
        f"P99 {run['step_us']['p99']:.0f} us, "
        f"in the pool P50 {run['core_us']['p50']:.1f} us, P99 {run['core_us']['p99']:.1f} us",
        f"ended   {run['finished']:,} finished, {run['refused']:,} refused, "
        f"{run['running']:,} running, {run['waiting']:,} waiting"
        + (" (interrupted)" if result["interrupted"] else ""),
    ]
    problems = result["audit"]["problems"]
    lines.append(
        "audit   the books balance" if result["audit"]["ok"] else f"audit   FAILED: {'; '.join(problems[:5])}"
    )
    if run["idle_while_waiting_s"] > 0:
        lines.append(f"warning requests waited for {run['idle_while_waiting_s']:.1f} s while nothing ran")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

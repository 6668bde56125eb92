"""The live view of a replay: progress, a bar per tenant, hit rate, who waits.

It is redrawn from the replay's own loop a few times a second, not by a thread, so that it takes the same
small share of the run wherever it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvalloc.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from kvalloc import Pool
    from kvalloc.engine import Engine
    from kvalloc.engine.meter import TenantCounts
    from kvalloc.engine.replay import Replay
    from kvalloc.engine.rows import Queue

    from .traffic import Traffic

__all__ = ["LiveView", "bar", "legend", "pool_line", "tenants_table"]

MOST_ROWS = 16
MOST_NAME = 24  # characters
NUMBERS = 36  # columns that the numbers beside a bar take
HELD, CACHED, PINNED, PROMISED = "bright_blue", "cyan", "magenta", "grey42"


def bar(
    width: int,
    full: float,
    parts: Sequence[tuple[float, str, str]],
    reserve: float = 0,
    limit: float | None = None,
) -> Text:
    """Draw amounts one after another on a line that stands for `full`, with marks at reserve and limit.

    Parameters
    ----------
    width : int
        Characters.
    full : float
        What the whole line stands for.
    parts : sequence of (float, str, str)
        Amount, character, style.
    reserve, limit : float
        Where the marks stand: ``|`` in green, ``]`` in red. A reserve of 0 and a limit of None have none.
    """
    cells = [("·", "grey30")] * width
    start = 0.0
    for amount, mark, style in parts:
        end = start + amount
        for i in range(min(width, round(start / full * width)), min(width, round(end / full * width))):
            cells[i] = (mark, style)
        start = end
    for value, mark, style in ((reserve, "│", "bold green"), (limit, "┃", "bold red")):
        if value:
            cells[min(width - 1, max(0, round(value / full * width) - 1))] = (mark, style)
    return Text.assemble(*cells)


class LiveView:
    """A context in which `refresh` redraws the view."""

    def __init__(self, replay: Replay, traffic: Traffic, console: Console) -> None:
        self.replay, self.traffic, self.console = replay, traffic, console
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        """Start drawing."""
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the view away; the summary follows."""
        self.live.stop()

    def refresh(self) -> None:
        """Redraw."""
        run = self.replay
        self.live.update(
            Group(self._head(), tenants_table(run.engine, run.counts, self.console.width), legend()),
            refresh=True,
        )

    def _head(self) -> Text:
        run, width = self.replay, min(48, max(10, self.console.width - 64))
        engine, seconds, arrived = run.engine, run.clock.now(), 0
        hit = prompt = 0
        for counts in run.meter.tenants.values():
            arrived += counts.arrived
            hit += counts.cached_tokens
            prompt += counts.prompt_tokens
        if self.traffic.total_seconds:
            done = seconds / self.traffic.total_seconds
        else:
            done = arrived / (self.traffic.total_requests or 1)
        done = min(1.0, done)
        return Text.assemble(
            "progress ",
            bar(width, 1.0, [(done, "━", "green")]),
            f" {done:4.0%}  {arrived:,} requests, {clock(seconds)} replayed in {run.host_ns / 1e9:.0f} s\n",
            "pool     ",
            pool_line(run.pool, width),
            "\n",
            f"hit rate {hit / prompt if prompt else 0:.1%}, {len(engine.rows)} running, ",
            f"{engine.waiting} waiting, ",
            f"{len(engine.pressure)} stopped, " if engine.pressure else "",
            f"{engine.steps:,} steps, {run.busy_ns / 1e3 / max(1, engine.steps):.0f} us a step",
            no_wrap=True,
            overflow="ellipsis",
        )


def pool_line(pool: Pool, width: int) -> Text:
    """Draw what is held, pinned and cached in a pool, and say it in numbers."""
    used = [(pool.held, "█", HELD), (pool.pinned, "█", PINNED), (pool.cached, "▒", CACHED)]
    return Text.assemble(
        bar(width, pool.capacity, used),
        f" {format_bytes(pool.capacity)}: held {format_bytes(pool.held)}, ",
        f"cached {format_bytes(pool.cached)}, free {format_bytes(pool.free)}",
    )


def tenants_table(engine: Engine, counts: Callable[[str], TenantCounts], width: int) -> Table:
    """Draw a bar for each tenant, with marks at its reserve and limit, and say its numbers.

    Parameters
    ----------
    engine : Engine
        Its tenants, parents before their children.
    counts : callable
        Returns the counts of a tenant by name.
    width : int
        Columns of the whole.
    """
    queues = _most_used(list(engine.queues.values()))
    names = {queue.name: "  " * (len(queue.levels) - 2) + queue.name for queue in queues}
    longest = min(MOST_NAME, max(map(len, names.values()), default=6))
    width = min(48, max(12, width - longest - NUMBERS))
    full = max(
        1,
        max(
            (max(q.tenant.reserve, min(q.tenant.limit or 0, engine.pool.capacity)) for q in queues),
            default=1,
        ),
        max((q.tenant.held + q.tenant.pinned + q.tenant.cached for q in queues), default=1),
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tenant", max_width=MOST_NAME, no_wrap=True, overflow="ellipsis")
    table.add_column(f"0 to {format_bytes(full)}", width=width, no_wrap=True)
    for name in ("held", "cached", "hits", "run", "wait"):
        table.add_column(name, justify="right", no_wrap=True)
    for queue in queues:
        tenant, count = queue.tenant, counts(queue.name)
        parts = [
            (tenant.held, "█", HELD),
            (tenant.pinned, "█", PINNED),
            (tenant.cached, "▒", CACHED),
            (tenant.promised, "░", PROMISED),
        ]
        hits = f"{count.cached_tokens / count.prompt_tokens:.0%}" if count.prompt_tokens else ""
        table.add_row(
            Text(names[queue.name]),
            bar(width, full, parts, tenant.reserve, tenant.limit),
            format_bytes(tenant.held),
            format_bytes(tenant.cached),
            hits,
            str(queue.running),
            Text(str(len(queue.requests)), style="yellow" if queue.requests else ""),
        )
    return table


def _most_used(queues: list[Queue]) -> list[Queue]:
    """Return those that use most and the nodes above them, as many as there is room for, as a tree."""
    if len(queues) <= MOST_ROWS:
        return queues
    by_name, shown = {queue.name: queue for queue in queues}, set[str]()
    for queue in sorted(queues, key=lambda q: -(q.tenant.held + q.tenant.cached)):
        line = {name for name in queue.levels if name is not None and name in by_name}
        if len(shown | line) <= MOST_ROWS:
            shown |= line
    return [queue for queue in queues if queue.name in shown]


def legend() -> Text:
    """Say what the marks of the bars mean."""
    return Text.assemble(
        ("█", HELD), " held  ", ("▒", CACHED), " cached  ", ("░", PROMISED), " promised  ",
        ("│", "bold green"), " reserve  ", ("┃", "bold red"), " limit   Ctrl-C ends the run",
    )  # fmt: skip


def clock(seconds: float) -> str:
    """Return 1:02:03 or 2:03."""
    if not seconds < 1e12:
        return "for ever"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

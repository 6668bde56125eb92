"""``kvalloc plan``: what taking memory back would do, as a table for a person.

Nothing is carried out: the plan is a dry run on the books of a pool in the middle of the built-in workload.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

import kvalloc
from kvalloc.engine.replay import Replay
from kvalloc.engine.tenants import assign
from kvalloc.engine.workload import builtin_tenants, builtin_workload
from kvalloc.sizes import format_bytes

from .options import DEFAULT_MODEL, check_tenant, fail, size_of, spec_of

__all__ = ["app", "print_plan"]

POOL = "pool"  # in place of a tenant: all of them
SHOWN = 8  # moves and victims listed one by one


class Live(StrEnum):
    """What becomes of live sequences."""

    preempt = "preempt"
    freeze = "freeze"

    @property
    def how(self) -> Literal["preempt", "freeze"]:
        """As `Pool.reclaim` takes it."""
        return "freeze" if self is Live.freeze else "preempt"


app = typer.Typer(
    name="plan",
    help="Show what taking memory back would do, before anything happens.\n\n"
    "The plan is made on a pool in the middle of the built-in workload, and never carried out.",
    no_args_is_help=True,
)

Who = Annotated[
    str,
    typer.Argument(
        metavar="TENANT", help='shop, chat, agent, search or batch; for reclaim also "pool": all.'
    ),
]
HowMuch = Annotated[str, typer.Argument(metavar="SIZE", help="Bytes, such as 2GiB.")]
Device = Annotated[str, typer.Option("--device", "-d", metavar="SIZE", help="Device bytes.")]
At = Annotated[
    float, typer.Option("--at", metavar="S", min=0.0, help="After so many seconds of the built-in workload.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Decides everything that is drawn.")]
How = Annotated[
    Live | None,
    typer.Option(
        "--live",
        help="preempt: some stop where cached pages are not enough. freeze (reclaim only): no new ones.",
        show_default="live sequences are not touched",
    ),
]


def _pool_at(device: str, seconds: float, seed: int) -> Replay:
    """Run the built-in workload for a while; its sequences are open then."""
    spec = spec_of(DEFAULT_MODEL, 16, "bfloat16")
    run = Replay(spec, size_of("--device", device), builtin_tenants(), host_bytes="16GiB", seed=seed)
    for now in run.engine.run(assign(builtin_workload(seconds + 60.0, seed=seed), run.plans, seed)):
        if now >= seconds:
            break
    return run


@app.command()
def reclaim(
    tenant: Who, size: HowMuch, device: Device = "8GiB", at: At = 30.0, seed: Seed = 0, live: How = None
) -> None:
    """What comes back if so many bytes of a tenant are reclaimed."""
    check_tenant("plan reclaim", tenant, [*_names(), POOL])
    count, run = size_of("plan reclaim", size), _pool_at(device, at, seed)
    who = None if tenant == POOL else tenant
    batch = run.engine.batch if live is Live.preempt else None
    plan = run.pool.reclaim(who, count, live=live.how if live else None, dry_run=True, batch=batch)
    print_plan(plan, run.pool, Console())


@app.command("top-up")
def top_up(
    tenant: Who, size: HowMuch, device: Device = "8GiB", at: At = 30.0, seed: Seed = 0, live: How = None
) -> None:
    """What it takes to give a tenant so many bytes of reserve more."""
    check_tenant("plan top-up", tenant, _names())
    if live is Live.freeze:
        fail("plan top-up --live freeze: a top-up stops sequences or leaves them alone; use --live preempt")
    count, run = size_of("plan top-up", size), _pool_at(device, at, seed)
    if live is None:
        plan = run.pool.top_up(tenant, count, dry_run=True)
    else:
        plan = run.pool.top_up(tenant, count, live="preempt", dry_run=True, batch=run.engine.batch)
    print_plan(plan, run.pool, Console())


def _names() -> list[str]:
    return [plan.name for plan in builtin_tenants()]


def print_plan(plan: kvalloc.Plan, pool: kvalloc.Pool, console: Console) -> None:
    """Print a plan: what comes back, what stays, what is moved, and who has to wait.

    Parameters
    ----------
    plan : Plan
        A dry one, or one that is open or has ended.
    pool : Pool
        Where its tenants are, for what they have now.
    console : rich.console.Console
        Where to.
    """
    whose = f" of {plan.tenant}" if plan.tenant else ""
    console.print(f"{plan.kind}{whose}: {format_bytes(plan.asked)} asked for ({plan.state})", highlight=False)
    rows = [(f"comes back: {name}", count) for name, count in plan.rungs.items() if count]
    rows += [
        ("emptied for other page sizes", plan.emptied),
        ("stays: others hold it too", plan.shared),
        ("stays: pinned", plan.pinned),
        ("missing", plan.shortfall),
        ("copied within the device", plan.copied[0]),
        ("copied between the tiers", plan.copied[1]),
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in rows:
        if count or name == "missing":
            table.add_row(name, format_bytes(count))
    if plan.host_full:
        tier = "the tier itself" if pool.host_bytes else "there is none"
        levels = [tier if level is None else f"host limit of {level}" for level in plan.host_full]
        table.add_row("no room in the host tier", ", ".join(levels))
    if len(plan.moves):
        table.add_row("pages moved", f"{len(plan.moves):,}")
    if plan.copy_seconds is not None and any(plan.copied):
        table.add_row("copying takes about", f"{plan.copy_seconds * 1e3:.1f} ms")
    console.print(table)
    if plan.victims:
        _print_victims(plan.victims, console)
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant")
    for name in ("held", "cached", "pinned", "reserve"):
        table.add_column(name, justify="right")
    for tenant in pool.tenants():
        figures = (tenant.held, tenant.cached, tenant.pinned, tenant.reserve)
        table.add_row(tenant.name, *map(format_bytes, figures))
    console.print("\nat this moment", highlight=False)
    console.print(table)


def _print_victims(victims: list[kvalloc.Victim], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("sequence", "tenant", "becomes"):
        table.add_column(name)
    for name in ("bytes back", "tokens again", "tokens lost"):
        table.add_column(name, justify="right")
    for victim in victims[:SHOWN]:
        back, tokens = format_bytes(victim.bytes), f"{victim.tokens:,}"
        counts = ("", tokens) if victim.fate == "trimmed" else (tokens, "")
        table.add_row(str(victim.number), victim.tenant, victim.fate, back, *counts)
    console.print(table)
    if len(victims) > SHOWN:
        console.print(f"and {len(victims) - SHOWN} more sequences", highlight=False)

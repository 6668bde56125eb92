"""Who the tenants of a replay are: from a TOML file, or a plain number of them.

A file has a table for each tenant; every key may be left out::

    [tenants.shop]                  # a node: its limits and reserve hold for all below it
    limit = "16GiB"
    host_limit = "50%"              # of the host tier: what its rows that were swapped may fill

    [tenants.chat]
    parent = "shop"
    reserve = "25%"                 # bytes, "4GiB", or a share of the device
    limit = "12GiB"
    weight = 4                      # turns in the queue, and who gives back first
    priority = 10
    traffic = 3                     # share of a trace's clients; 0: sends nothing.
                                    # Default: 1 for a tenant without children
    share = "shop"                  # the first tokens of its prompts are shared under this tenant
    share_tokens = 512              # how many
"""

from __future__ import annotations

import bisect
import difflib
import itertools
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.errors import KvallocError
from kvalloc.sizes import format_bytes, parse_bytes, spell_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvalloc import Pool, Tenant

    from .request import Request

__all__ = [
    "TenantPlan",
    "TenantsError",
    "assign",
    "create",
    "depth_first",
    "numbered",
    "parse_size",
    "read_tenants",
]

_SIZES = ("reserve", "limit", "host_limit")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


class TenantsError(ValueError):
    """A tenants file that can't be used; the message names file and key."""


def parse_size(size: int | str, device: int) -> int:
    """Return bytes for what `kvalloc.sizes.parse_bytes` reads, and for "25%" of a device or host tier.

    Examples
    --------
    >>> from kvalloc.engine.tenants import parse_size
    >>> parse_size("25%", device=1000)
    250
    """
    if isinstance(size, str) and (percent := _PERCENT.fullmatch(size)):
        if float(percent[1]) > 100:
            raise ValueError(f"{size!r} is more than 100%")
        return int(device * float(percent[1]) / 100)
    return parse_bytes(size)


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """A tenant as it is to be created, and its share of a trace."""

    name: str
    parent: str | None = None
    reserve: int | str | None = None
    limit: int | str | None = None
    host_limit: int | str | None = None
    weight: int | None = None
    priority: int | None = None
    lend: bool | None = None
    traffic: float | None = None
    share: str | None = None
    share_tokens: int = 0


def numbered(count: int, share_tokens: int = 512) -> list[TenantPlan]:
    """Return tenants for a trace that knows none: "tenant-1" and so on under "org".

    Half of the device is reserved for them in equal parts. The k-th sends a share of 1/k, as a few big
    clients send most in production. The first `share_tokens` tokens of prompts are shared under "org",
    if that is not 0. A single tenant owns everything and shares nothing.
    """
    if not 1 <= count <= 1000:
        raise ValueError(f"{count} tenants; 1 to 1000 can be asked for")
    if count == 1:
        return [TenantPlan("tenant-1", traffic=1.0)]
    part = f"{50 / count:.3f}%"
    return [
        TenantPlan("org", traffic=0.0),
        *(
            TenantPlan(
                f"tenant-{k}",
                "org",
                part,
                traffic=1.0 / k,
                share="org" if share_tokens else None,
                share_tokens=share_tokens,
            )
            for k in range(1, count + 1)
        ),
    ]


def read_tenants(path: str | Path) -> list[TenantPlan]:
    """Read a tenants file; parents come before their children.

    Raises
    ------
    TenantsError
        With the file and the key that is wrong.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TenantsError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TenantsError(f"{path}: not TOML: {error}") from None
    _known(path, "", data, ("tenants",))
    tables = data.get("tenants")
    if not isinstance(tables, dict) or not tables:
        raise TenantsError(f"{path}: no tenants; a table [tenants.NAME] each is expected")
    plans = {name: _plan(path, name, table) for name, table in tables.items()}
    parents = {plan.parent for plan in plans.values()}
    for name, plan in plans.items():
        for key in ("parent", "share"):
            if (other := getattr(plan, key)) is not None and other not in plans:
                raise TenantsError(f"{path}: tenants.{name}.{key}: no tenant {other!r}{_close(other, plans)}")
        if plan.traffic is None:
            plans[name] = replace(plan, traffic=0.0 if name in parents else 1.0)
    ordered: list[TenantPlan] = []
    left = dict(plans)
    while left:
        ready = [plan for plan in left.values() if plan.parent is None or plan.parent not in left]
        if not ready:
            raise TenantsError(f"{path}: tenants.{next(iter(left))}.parent: the parents go round in a circle")
        ordered += [left.pop(plan.name) for plan in ready]
    for plan in ordered:
        if plan.share is not None and plan.share not in {plan.name, *_above(plan, plans)}:
            raise TenantsError(
                f"{path}: tenants.{plan.name}.share: {plan.share!r} is not above {plan.name!r}"
            )
    if not any(plan.traffic for plan in ordered):
        raise TenantsError(f"{path}: traffic is 0 everywhere, so nobody would send anything")
    return ordered


def _above(plan: TenantPlan, plans: dict[str, TenantPlan]) -> Iterator[str]:
    while plan.parent is not None:
        yield plan.parent
        plan = plans[plan.parent]


def _close(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _known(path: Path, where: str, table: dict[str, Any], keys: Iterable[str]) -> None:
    keys = list(keys)
    for key in table:
        if key not in keys:
            raise TenantsError(
                f"{path}: {where}{key}: unknown key{_close(key, keys) or '; known: ' + ', '.join(keys)}"
            )


def _plan(path: Path, name: str, table: Any) -> TenantPlan:
    where = f"tenants.{name}"
    if not isinstance(table, dict):
        raise TenantsError(f"{path}: {where}: a table [{where}] is expected, not {table!r}")
    _known(path, where + ".", table, [item.name for item in fields(TenantPlan) if item.name != "name"])

    def wrong(key: str, what: str) -> TenantsError:
        return TenantsError(f"{path}: {where}.{key}: {what}")

    for key, value in table.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in ("parent", "share") and not isinstance(value, str):
            raise wrong(key, f"{value!r} is not a tenant's name in quotes")
        if key in _SIZES:
            try:
                parse_size(value, device=1)
            except ValueError as error:
                raise wrong(key, str(error)) from None
        if key == "weight" and not (number and isinstance(value, int) and 1 <= value <= 65_536):
            raise wrong(key, f"{value!r} is not a whole number from 1 to 65536")
        if key == "priority" and not (number and isinstance(value, int) and 0 <= value <= 100):
            raise wrong(key, f"{value!r} is not a whole number from 0 to 100")
        if key == "traffic" and not (number and 0 <= value < float("inf")):
            raise wrong(key, f"{value!r} is not a number of at least 0")
        if key == "lend" and not isinstance(value, bool):
            raise wrong(key, f"{value!r} is not true or false")
        if key == "share_tokens" and not (number and isinstance(value, int) and 0 < value < 1 << 31):
            raise wrong(key, f"{value!r} is not a number of tokens")
    if ("share" in table) != ("share_tokens" in table):
        raise wrong("share", "share and share_tokens go together")
    return TenantPlan(name, **table)


def create(pool: Pool, plans: list[TenantPlan]) -> dict[str, Tenant]:
    """Create the tenants in a pool, parents first; sizes in per cent are of the tier's capacity.

    Raises
    ------
    TenantsError
        The pool can't have such a tenant: its name, what was asked for, and why not.
    """
    made: dict[str, Tenant] = {}
    for plan in plans:
        policy: dict[str, Any] = {}
        for key in _SIZES:
            if (value := getattr(plan, key)) is not None:
                whole = pool.host_bytes if key == "host_limit" else pool.capacity
                policy[key] = parse_size(value, device=whole)
        for key in ("weight", "priority", "lend"):
            if (value := getattr(plan, key)) is not None:
                policy[key] = value
        if plan.share is not None and plan.share != plan.name:
            policy["publish"] = [plan.share]
        if plan.parent is not None:
            policy["parent"] = made[plan.parent]
        try:
            made[plan.name] = pool.tenant(plan.name, **policy)
        except KvallocError as error:
            asked = [f"{key} = {value!r}" for key in _SIZES if (value := getattr(plan, key))]
            pool_size = f"{format_bytes(pool.capacity)} of device"
            raise TenantsError(
                f"tenants.{plan.name} ({', '.join([*asked, pool_size])}): {spell_bytes(str(error))}"
            ) from None
    return made


def depth_first(plans: list[TenantPlan]) -> list[TenantPlan]:
    """Return tenants as a tree is printed: each before those below it, siblings in the order given.

    Examples
    --------
    >>> from kvalloc.engine.tenants import TenantPlan, depth_first
    >>> [plan.name for plan in depth_first([TenantPlan("a"), TenantPlan("b"), TenantPlan("c", "a")])]
    ['a', 'c', 'b']
    """
    names = {plan.name for plan in plans}
    below: dict[str | None, list[TenantPlan]] = {}
    for plan in plans:
        below.setdefault(plan.parent if plan.parent in names else None, []).append(plan)
    ordered: list[TenantPlan] = []
    left = below.get(None, [])[::-1]
    while left:
        plan = left.pop()
        ordered.append(plan)
        left += below.get(plan.name, [])[::-1]
    return ordered


def assign(requests: Iterable[Request], plans: list[TenantPlan], seed: int = 0) -> Iterator[Request]:
    """Give each request that has no tenant one, by its key and the tenants' traffic, and the range it shares.

    All requests of a conversation go to one tenant, whatever the order; the same seed gives the same tenants.
    """
    senders = [plan for plan in plans if plan.traffic]
    edges = list(itertools.accumulate(plan.traffic or 0.0 for plan in senders))
    for request in requests:
        if not request.tenant:
            value = (request.key * 0x9E37_79B9_7F4A_7C15 + seed * 0xD1B5_4A32_D192_ED03 + 0x632B_E59B) & (
                1 << 64
            ) - 1
            value = ((value ^ value >> 30) * 0xBF58_476D_1CE4_E5B9) & (1 << 64) - 1
            value = ((value ^ value >> 27) * 0x94D0_49BB_1331_11EB) & (1 << 64) - 1
            at = bisect.bisect_right(edges, (value >> 11) * 2.0**-53 * edges[-1])
            plan = senders[min(at, len(senders) - 1)]
            request.tenant = plan.name
            if plan.share is not None:
                request.share = ((plan.share, min(plan.share_tokens, len(request.prompt))),)
        yield request

"""Options as a person writes them, read; and the one line that says why one of them can't be."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import kvalloc
from kvalloc import models as catalogue
from kvalloc.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DEFAULT_MODEL", "check_tenant", "fail", "reclaim_of", "size_of", "spec_of"]

DEFAULT_MODEL = "Qwen2.5-7B"
LONGEST = 200  # characters of a word that are shown again: a longer one is no name or path
LEAST = 1 << 20  # a number without a unit below this is more likely meant as GiB


def fail(message: str) -> NoReturn:
    """Print one line to stderr and leave with exit code 2."""
    words = (word if len(word) <= LONGEST else f"{word[: LONGEST // 2]}..." for word in message.split())
    print(f"kvalloc: error: {' '.join(words)}", file=sys.stderr)
    sys.exit(2)


def check_tenant(option: str, tenant: str, known: Iterable[str]) -> None:
    """Leave if there is no such tenant; `option` is what was written, or names it."""
    known = sorted(known)
    if tenant not in known:
        fail(f"{option}: no tenant {tenant!r}; there are {', '.join(known)}")


def reclaim_of(text: str, tenants: set[str]) -> tuple[str, int, float]:
    """Read ``TENANT=SIZE@SECONDS``."""
    tenant, _, rest = text.partition("=")
    size, _, at = rest.partition("@")
    check_tenant(f"--reclaim {text}", tenant, tenants)
    try:
        seconds = float(at)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        fail(f"--reclaim {text}: write TENANT=SIZE@SECONDS, for example {tenant}=2GiB@120")
    return tenant, size_of("--reclaim", size), seconds


def size_of(option: str, size: str) -> int:
    """Return the bytes of a size option; a small number without a unit is taken for a slip."""
    count = parse_bytes(size)
    if 0 < count < LEAST and re.fullmatch(r"[\d_\s]+", size):
        fail(f"{option} {size}: that is {count:,} bytes; did you mean {size.strip()}GiB?")
    return count


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

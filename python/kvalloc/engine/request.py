"""What flows through the engine: requests and their token ids.

A trace says how long a prompt is and what it shares with others, not what it says. Its tokens are made up
here, by one rule for all traces: token ``i`` of the text ``s`` is ``(mix(s) + PATTERN[i]) mod 2**31``. The
same text has the same tokens in every process, two texts differ at every position, and a whole prompt is
two numpy operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvalloc.errors import InvalidArgument
from kvalloc.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GREEDY", "Blocks", "Cause", "Literal", "Prompt", "Request", "Sampling", "Text", "reply_tokens"]

Int32 = NDArray[np.int32]

_MASK = np.uint32(0x7FFF_FFFF)
_MIX = 0x9E37_79B1  # odd, so that the map below is one to one modulo 2**31: no two texts share a base
_MIX32 = np.uint32(_MIX)
_pattern = np.zeros(0, dtype=np.uint32)


def _positions(count: int) -> NDArray[np.uint32]:
    """Return the first `count` entries of the fixed pattern, which grows as it is needed."""
    global _pattern
    if count > len(_pattern):
        room = max(1 << 15, 1 << (count - 1).bit_length())
        i = np.arange(room, dtype=np.uint64) * np.uint64(0xBF58_476D_1CE4_E5B9)
        i ^= i >> np.uint64(29)
        _pattern = ((i * np.uint64(0x94D0_49BB_1331_11EB)) >> np.uint64(32)).astype(np.uint32)
    return _pattern[:count]


def _base(text: int) -> int:
    return (text * _MIX) & 0x7FFF_FFFF


class Prompt(Protocol):
    """A prompt whose tokens are made only when they are asked for."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def tokens(self) -> Int32:
        """Return the token ids, int32 ``[len(self)]``."""
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt of blocks with known identity, as Mooncake and Bailian traces give it.

    Parameters
    ----------
    ids : sequence of int
        One id a block, below 2**31. Equal ids are equal tokens.
    block : int
        Tokens a block.
    length : int
        Tokens of the prompt. The last block may be partial and then gets the first tokens of its id.
    """

    ids: tuple[int, ...]
    block: int
    length: int

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.length

    def tokens(self) -> Int32:
        """Return the token ids, int32 ``[length]``."""
        bases = (np.array(self.ids, dtype=np.uint64) * np.uint64(_MIX)).astype(np.uint32)
        grid = bases[:, None] + _positions(self.block)
        grid &= _MASK
        return grid.reshape(-1)[: self.length].view(np.int32)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of named texts one after another: a system prompt, a history, a question.

    The token at place ``i`` of the prompt depends on the text it belongs to and on ``i``: two prompts with
    equal beginnings have equal tokens there, and a reply of the text ``s`` (`reply_tokens`) reads the same
    when it is in a later prompt.

    Parameters
    ----------
    parts : sequence of (int, int)
        (text number below 2**31, number of tokens).
    """

    parts: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(count for _, count in self.parts)

    def tokens(self) -> Int32:
        """Return the token ids, int32 ``[len(self)]``."""
        out = np.empty(len(self), dtype=np.uint32)
        pattern, at = _positions(len(out)), 0
        for text, count in self.parts:
            np.add(pattern[at : at + count], np.uint32(_base(text)), out=out[at : at + count])
            at += count
        out &= _MASK
        return out.view(np.int32)


@dataclass(frozen=True, slots=True)
class Literal:
    """A prompt given as it is, for engines with a real model."""

    ids: Int32

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def tokens(self) -> Int32:
        """Return the token ids, int32 ``[len(self)]``."""
        return self.ids


def reply_tokens(texts: Int32, positions: Int32) -> Int32:
    """Return what replies of the given texts say at the given places, int32 ``[rows]``."""
    try:
        out = _pattern.take(positions)
    except IndexError:
        out = _positions(int(positions.max()) + 1).take(positions)
    out += texts.view(np.uint32) * _MIX32
    out &= _MASK
    return out.view(np.int32)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a request was refused, or waits. As a string, a sentence for people.

    Parameters
    ----------
    what : str
        "never fits", "stuck", "out of pages", "unknown tenant", or what an error said.
    by : str
        What is in the way: "pool", "limit of NAME", either of them "beside others' reserves", "longest
        sequence", or nothing.
    needed, room : int
        What it needs and what there is, or for "never fits" can ever be; 0 and 0: not known.
    unit : {"bytes", "tokens"}
        What they count.
    """

    what: str
    by: str = ""
    needed: int = 0
    room: int = 0
    unit: str = "bytes"

    @property
    def kind(self) -> str:
        """What is in the way, without numbers: causes of one kind are counted together."""
        return f"{self.what}: {self.by}" if self.by else self.what

    def __str__(self) -> str:
        return self.text()

    def text(self, many: bool = False) -> str:
        """Return the sentence; `many` says that `needed` is the largest of several."""
        if not self.needed:
            return self.kind
        size = format_bytes if self.unit == "bytes" else "{:,} tokens".format
        what, room = self.what, size(self.room)
        if many and what == "never fits":
            what = "never fit"
        need = f"up to {size(self.needed)} needed" if many else f"{size(self.needed)} needed"
        if self.what == "never fits":
            there = f"{self.by} {room}" if self.unit == "tokens" else f"the {self.by} allows {room}"
        else:
            there = f"the {self.by} leaves {room}"
        return f"{what}: {need}, {there}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen.

    Parameters
    ----------
    temperature : float
        0 takes the most likely token.
    top_p : float
        Only the most likely tokens are drawn from whose probabilities first add up to this much.
    seed : int
        A draw depends on the seed and the place in the sequence alone: not on who else is in the batch, nor
        on whether the sequence was interrupted.

    Raises
    ------
    InvalidArgument
        A number out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, fits, range_ in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("seed", 0 <= self.seed < 1 << 63, "from 0 to 2**63 - 1"),
        ):
            if not fits:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; a number {range_} is needed")

    def draw(self, place: int) -> float:
        """Return the number in [0, 1) that decides the token at a place of the sequence."""
        return float(np.random.Generator(np.random.Philox(key=self.seed, counter=place)).random())


GREEDY = Sampling()


@dataclass(slots=True, eq=False)
class Request:
    """One request of one tenant.

    Parameters
    ----------
    arrival : float
        Seconds since the start.
    tenant : str
        Name of a tenant of the pool; readers leave it empty and `kvalloc.engine.tenants.assign` fills it in.
    prompt : Prompt
        The prompt's tokens.
    max_new : int
        Tokens to generate, at least one.
    share : sequence of (str, int)
        Ranges of the prompt from its start, as `Pool.open` takes them: (scope, number of tokens).
    key : int
        Requests with one key belong to one client or conversation and so to one tenant.
    reply : int
        The text that the made-up reply is drawn from, below 2**31.
    sampling : Sampling
        How a real model chooses each token.
    on_token : callable, optional
        Called with each token as it comes. Set it before the request is submitted.
    """

    arrival: float
    tenant: str
    prompt: Prompt
    max_new: int
    share: tuple[tuple[str, int], ...] = ()
    key: int = 0
    reply: int = 0
    sampling: Sampling = GREEDY
    on_token: Callable[[int], None] | None = field(default=None, repr=False)
    # What the engine notes down. `ids` is kept only while the request stands first in its tenant's queue.
    ids: Int32 | None = field(default=None, repr=False)
    admitted: float = -1.0
    first_token: float = -1.0
    finished: float = -1.0
    stalled: float = 0.0  # seconds that it was stopped for lack of room
    cached: int = 0
    produced: int = 0
    cause: Cause | None = None  # why it was refused

    @property
    def refused(self) -> str:
        """Why it was refused, "" if it was not."""
        return "" if self.cause is None else str(self.cause)

"""Pages from frame to frame, as plans and steps ask: checked, sorted by kind, merged into runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvalloc.errors import InvalidArgument
from kvalloc.store.geometry import ClassGeometry

__all__ = ["DEVICE", "HOST", "TIERS", "Moves", "read_copies", "read_moves", "runs"]

DEVICE: Final = 0
HOST: Final = 1
TIERS: Final = ("device", "host")


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages that go the same way.

    Attributes
    ----------
    tiers, classes : (int, int)
        From and to.
    sources, destinations : int64 [n]
        Frames, by ascending source.
    """

    tiers: tuple[int, int]
    classes: tuple[int, int]
    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]


def read_moves(moves: Any, classes: tuple[tuple[ClassGeometry, ...], ...]) -> list[Moves]:
    """Check a plan's moves and sort them by the way they go.

    Parameters
    ----------
    moves : int64 [n, 6]
        From tier, class and frame to tier, class and frame.
    classes : tuple of tuple of ClassGeometry
        The classes of each tier; empty for a tier that is not there.

    Returns
    -------
    list of Moves

    Raises
    ------
    InvalidArgument
        If a move names what is not there, changes the layer group, or meets another one. Nothing was copied.
    """
    moves = np.asarray(moves)
    if moves.ndim != 2 or moves.shape[1] != 6 or moves.dtype.kind not in "iu":
        raise InvalidArgument(f"a plan's moves are int64 [n, 6], not {moves.dtype} {moves.shape}")
    moves = moves.astype(np.int64)
    found: list[Moves] = []
    ways = np.unique(moves[:, [0, 1, 3, 4]], axis=0)
    for way in ways:
        tier, cls, to_tier, to_cls = (int(n) for n in way)
        _check_place(tier, cls, classes)
        _check_place(to_tier, to_cls, classes)
        if classes[tier][cls].group.name != classes[to_tier][to_cls].group.name:
            raise InvalidArgument(
                f"a move from class {cls} to class {to_cls}: these are of other layer groups"
            )
        chosen = moves[(moves[:, [0, 1, 3, 4]] == way).all(1)]
        chosen = chosen[np.argsort(chosen[:, 2], kind="stable")]
        for column, place in ((2, classes[tier][cls]), (5, classes[to_tier][to_cls])):
            frames = chosen[:, column]
            if frames.min() < 1 or frames.max() >= place.frames:
                raise InvalidArgument(
                    f"a move names frames {int(frames.min())} to {int(frames.max())} of class {place.index}; "
                    f"there are frames 1 to {place.frames - 1}"
                )
        found.append(
            Moves(
                (tier, to_tier),
                (cls, to_cls),
                np.ascontiguousarray(chosen[:, 2]),
                np.ascontiguousarray(chosen[:, 5]),
            )
        )
    _check_apart(moves)
    return found


def _check_place(tier: int, cls: int, classes: tuple[tuple[ClassGeometry, ...], ...]) -> None:
    if not 0 <= tier < len(classes) or not classes[tier]:
        raise InvalidArgument(
            f"a move names tier {tier}; the store has "
            + ", ".join(f"{n} ({TIERS[n]})" for n, there in enumerate(classes) if there)
        )
    if not 0 <= cls < len(classes[tier]):
        raise InvalidArgument(f"a move names class {cls}; the spec has classes 0 to {len(classes[tier]) - 1}")


def _check_apart(moves: NDArray[np.int64]) -> None:
    """Refuse destinations that are named twice, or are sources too: moves happen in no order."""
    to, counts = np.unique(moves[:, 3:], axis=0, return_counts=True)
    both = np.concatenate([to, np.unique(moves[:, :3], axis=0)])
    _, again = np.unique(both, axis=0, return_counts=True)
    if (counts > 1).any() or (again > 1).any():
        raise InvalidArgument("a plan's moves name a destination twice, or one that is a source too")


def runs(sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Runs of moves in which both frames go up by one: source, destination, pages.

    Parameters
    ----------
    sources, destinations : int64 [n]
        By ascending source.
    """
    cuts = np.flatnonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)) + 1
    starts = [0, *cuts.tolist(), len(sources)]
    for at, end in pairwise(starts):
        if end > at:
            yield int(sources[at]), int(destinations[at]), end - at


def read_copies(
    copies: NDArray[np.int32], classes: tuple[ClassGeometry, ...]
) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Check a step's copies and sort them by layer group.

    Parameters
    ----------
    copies : int32 [n, 3]
        Group, source frame, destination frame.
    classes : tuple of ClassGeometry
        Each group's own.

    Returns
    -------
    list of (int, int64 [n], int64 [n])
        Group, sources, destinations.

    Raises
    ------
    InvalidArgument
        If one names what is not there. Nothing was copied.
    """
    moves = np.asarray(copies)
    if moves.ndim != 2 or moves.shape[1] != 3 or moves.dtype.kind not in "iu":
        raise InvalidArgument(
            f"copies has shape {moves.shape} and dtype {moves.dtype}; "
            "it must be int32 [n, 3]: group, source, destination"
        )
    wide: NDArray[np.int64] = moves.astype(np.int64)
    if len(wide) and not (wide[:, 0].min() >= 0 and wide[:, 0].max() < len(classes)):
        raise InvalidArgument(f"copies names a group that is not there; the spec has {len(classes)}")
    found = []
    for group in sorted(set(wide[:, 0].tolist())):
        frames = wide[wide[:, 0] == group, 1:]
        most = classes[group].frames
        if frames.min() < 1 or frames.max() >= most:
            raise InvalidArgument(
                f"copies of group {group} names frames {int(frames.min())} to {int(frames.max())}; "
                f"there are frames 1 to {most - 1}"
            )
        found.append((group, frames[:, 0], frames[:, 1]))
    return found

"""The errors of kvalloc: one tree under `KvallocError`, each with its numbers as attributes."""

__all__ = [
    "AdmissionRefused",
    "ClosedError",
    "InUse",
    "InvalidArgument",
    "KvallocError",
    "OutOfMemory",
    "OutOfPages",
    "PinError",
    "PlanError",
    "SequenceBusy",
    "SpecError",
    "StaleReference",
    "TenantError",
    "UnknownTenant",
    "WrongPool",
]


class KvallocError(Exception):
    """Base of every error that kvalloc raises on purpose."""


class InvalidArgument(KvallocError, ValueError):  # noqa: N818 - named for what it is
    """An argument that means nothing: a size that can't be read, a number out of range.

    Attributes
    ----------
    given : object
        What was given, where there is one value to blame.
    """

    given: object = None


class SpecError(KvallocError, ValueError):
    """A geometry that can't be, or a model config that can't be read without guessing.

    Attributes
    ----------
    field : str or None
        The field of the group or of the config that is to blame.
    given : object
        Its value.
    """

    field: str | None = None
    given: object = None


class OutOfPages(KvallocError, MemoryError):  # noqa: N818 - named for what it is
    """There is no room. Nothing was taken.

    Attributes
    ----------
    asked, room : int
        Bytes asked for, and bytes there were.
    why : str
        ``"limit"``: of the tenant or a level above it; ``"claim"``: what is held, reserved and promised;
        ``"frames"``: all pages are in use; ``"fragmented"``: the free bytes serve pages of another size;
        ``"frozen"``: the tenant takes nothing new until it is thawed; ``"row"``: the rows are shorter.
    tenant : str
        Who asked.
    level : str or None
        The tenant whose limit is in the way; None: the pool itself.
    tier : {"device", "host"}
        Where there is no room; on the host a limit is a ``host_limit``.
    """

    asked: int = 0
    room: int = 0
    why: str = ""
    tenant: str = ""
    level: str | None = None
    tier: str = "device"


class OutOfMemory(KvallocError, MemoryError):  # noqa: N818 - named for what it is
    """The machine has not the memory that a store needs for its pool. Nothing was taken.

    Attributes
    ----------
    asked, room : int
        Bytes asked for, and bytes there were.
    """

    asked: int = 0
    room: int = 0


class AdmissionRefused(OutOfPages):
    """A request's whole need can't be reserved.

    Attributes
    ----------
    verdict : {"wait", "never"}
        Whether it can fit once something is released.
    """

    verdict: str = "wait"


class SequenceBusy(KvallocError, RuntimeError):  # noqa: N818 - named for what it is
    """Another thread is using the sequence or batch at this moment. Nothing was changed."""


class ClosedError(KvallocError, RuntimeError):
    """The handle was closed, its pool was, or the process is a fork of the one that made it."""


class StaleReference(KvallocError, LookupError):  # noqa: N818 - named for what it is
    """References to an earlier life of their page, or more releases than references. Nothing was changed.

    Attributes
    ----------
    count : int
        How many of the references given.
    first : int
        The first of them.
    """

    count: int = 0
    first: int = 0


class TenantError(KvallocError, ValueError):
    """A tenant that can't be as asked: its name, its place in the tree, its numbers."""


class UnknownTenant(TenantError, LookupError):  # noqa: N818 - named for what it is
    """No tenant has this name, and the pool has no default for unknown ones."""


class WrongPool(KvallocError, ValueError):  # noqa: N818 - named for what it is
    """The handle belongs to another pool."""


class PinError(KvallocError, RuntimeError):
    """A pin over its owner's budget, of pages that are not published, or one that has ended already."""


class PlanError(KvallocError, RuntimeError):
    """A plan that can't be built, that has ended, or bytes that are no plan. Nothing was changed.

    Attributes
    ----------
    plan : int or None
        Its number, where it has one.
    state : str or None
        How it ended before: ``"committed"``, ``"aborted"`` or ``"expired"``.
    asked, shortfall : int
        Bytes that were asked for, and how many of them can't be had; 0 where that is not the reason.
    """

    plan: int | None = None
    state: str | None = None
    asked: int = 0
    shortfall: int = 0


class InUse(KvallocError, RuntimeError):  # noqa: N818 - named for what it is
    """Published pages are held or pinned, so the prefix cache was not reset.

    Attributes
    ----------
    pages : int
        How many.
    """

    pages: int = 0

"""The errors of kvalloc: one tree under `KvallocError`, each with its numbers as attributes."""

__all__ = ["InvalidArgument", "KvallocError", "SpecError"]


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

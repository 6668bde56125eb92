"""Sizes as people write them: ``"12GiB"`` to bytes and back.

Binary units are powers of 1,024 (KiB, MiB, GiB, TiB, PiB), decimal ones powers of 1,000 (kB, MB, GB, TB, PB).
Both are taken at their word: ``"12GB"`` is 12,000,000,000 bytes. A fraction of a unit is cut to whole bytes.
"""

import re
from decimal import Decimal
from operator import index
from typing import Final, SupportsIndex

from kvalloc.errors import InvalidArgument

__all__ = ["format_bytes", "parse_bytes"]

MAX_BYTES: Final = 2**63 - 1

_UNITS: Final = {
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "PB": 1000**5,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
    "PIB": 1024**5,
}
_BINARY: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
_LETTER: Final = re.compile(r"([kKmMgGtTpP])(i?)")
_SIZE: Final = re.compile(r"(\d+(?:_\d+)*(?:\.\d+(?:_\d+)*)?)\s*([A-Za-z]*)", re.ASCII)
_NUMBER: Final = re.compile(r"(?<![\w.-])(\d{5,})\b(?: bytes)?(?!-)", re.ASCII)
_EXAMPLES: Final = (
    'Write a whole number of bytes, or a number with a unit, such as "12GiB", "1.5GiB" or "12GB".'
)


def parse_bytes(size: str | SupportsIndex) -> int:
    """Read a size in bytes.

    Parameters
    ----------
    size : int or str
        A whole number of bytes, or text: a number (digits, ``_`` between digits, a decimal point) and a unit.
        Text without a unit is bytes. The unit ends in a capital B, since a small one means bits; the case of
        the rest is free.

    Returns
    -------
    int
        Bytes, 0 to 2**63 - 1.

    Raises
    ------
    InvalidArgument
        For anything else: NaN, infinity, negative numbers, floats and bools, empty text, an unknown unit,
        more than 2**63 - 1 bytes, a part of a byte. The message says what was given; ``given`` is it.

    Examples
    --------
    >>> [kvalloc.parse_bytes(size) for size in ("12GiB", "12 GB", "5.38GiB", "1_000")]
    [12884901888, 12000000000, 5776731013, 1000]
    >>> kvalloc.parse_bytes("12GX")
    Traceback (most recent call last):
        ...
    kvalloc.errors.InvalidArgument: size '12GX': unknown unit 'GX', did you mean 'GiB' or 'GB'? Write ...
    """
    if isinstance(size, str):
        return _in_range(_parse(size), size)
    if isinstance(size, bool):
        raise _refused(size, "a bool is no size")
    if isinstance(size, float):
        raise _refused(size, "a float is not exact: give an int, or text with a unit")
    try:
        number = index(size)
    except TypeError:
        raise _refused(size, f"{type(size).__name__} is no size") from None
    return _in_range(number, size)


def format_bytes(size: int) -> str:
    """Write a number of bytes for people: three digits or so, binary unit.

    Parameters
    ----------
    size : int
        Bytes; may be negative.

    Returns
    -------
    str
        A rounded number; exact below 1 KiB.

    Examples
    --------
    >>> [kvalloc.format_bytes(size) for size in (12 << 30, 1_500_000, 0, -1536)]
    ['12 GiB', '1.43 MiB', '0 B', '-1.5 KiB']
    """
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size < 1024:
        return f"{sign}{size} B"
    number = Decimal(size)
    for unit in _BINARY:  # noqa: B007 - the last one is wanted
        number /= 1024
        # 1,023.99 KiB would be written as 1024 KiB.
        if number < Decimal("1023.5"):
            break
    digits = 2 if number < 10 else 1 if number < 100 else 0
    text = f"{number:.{digits}f}"
    return f"{sign}{text.rstrip('0').rstrip('.') if digits else text} {unit}"


def spell_bytes(text: str) -> str:
    """Write the long numbers in a message about bytes as `format_bytes` does.

    Parameters
    ----------
    text : str
        A message whose numbers of five digits and more are bytes, but for those within names.

    Returns
    -------
    str

    Examples
    --------
    >>> from kvalloc.sizes import spell_bytes
    >>> spell_bytes("1048576 bytes are too few for job-20240101: at least 1835008 are needed")
    '1 MiB are too few for job-20240101: at least 1.75 MiB are needed'
    """
    return _NUMBER.sub(lambda number: format_bytes(int(number[1])), text)


def _parse(text: str) -> int:
    stripped = text.strip()
    if not stripped:
        raise _refused(text, "is empty")
    match = _SIZE.fullmatch(stripped)
    if match is None:
        raise _refused(
            text, "must not be negative" if stripped.startswith("-") else "is not a number with a unit"
        )
    number, unit = match.groups()
    factor = 1 if not unit else _UNITS.get(unit.upper()) if unit.endswith("B") else None
    if factor is None:
        raise _refused(text, f"unknown unit {unit!r}{_suggestion(unit)}")
    # Exact: Decimal's own precision would round a long fraction.
    whole, _, fraction = number.replace("_", "").partition(".")
    if len(whole) > 40 or len(fraction) > 40:
        raise _refused(text, "has too many digits")
    scaled, rest = divmod(int(whole + fraction) * factor, int(10 ** len(fraction)))
    if rest and (factor == 1 or not scaled):
        raise _refused(text, "is not a whole number of bytes")
    return scaled


def _in_range(size: int, given: object) -> int:
    if size < 0:
        raise _refused(given, "must not be negative")
    if size > MAX_BYTES:
        raise _refused(given, f"is more than {MAX_BYTES} bytes")
    return size


def _suggestion(unit: str) -> str:
    letter = _LETTER.match(unit)
    if letter is None:
        return ", did you mean 'B'?" if unit[:1] in "bB" else ""
    name = letter[1].upper()
    return f", did you mean '{name}iB' or '{'k' if name == 'K' else name}B'?"


def _refused(given: object, why: str) -> InvalidArgument:
    if isinstance(given, int) and given.bit_length() > 256:
        shown = f"of {given.bit_length()} bits"  # Python refuses to write out a very long int
    else:
        shown = repr(given)
    if len(shown) > 60:
        shown = f"{shown[:57]}..."
    error = InvalidArgument(f"size {shown}: {why}{'' if why.endswith('?') else '.'} {_EXAMPLES}")
    error.given = given
    return error

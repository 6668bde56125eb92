"""Readers of request traces: Mooncake, Bailian, Azure, BurstGPT.

ServeGen's digest describes clients, not requests: `kvalloc.engine.servegen`.

A reader is a generator over the file's lines: it keeps nothing that it has given out. Every line is
checked; what is wrong is said with the file and the line. `open_trace` finds out the format by itself.

| format | what it knows of the prompt | key (who) |
| --- | --- | --- |
| Mooncake, JSON lines | ids of blocks of 512 tokens | second block (many share the first, a system prompt) |
| Bailian, JSON lines | ids of blocks of 16 tokens | the first chat of the conversation |
| Azure, CSV | its length | one each |
| BurstGPT, CSV | its length | session, if there is one, else one each |
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .request import Blocks, Request, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

__all__ = [
    "FORMATS",
    "TraceError",
    "detect",
    "open_trace",
    "read_azure",
    "read_bailian",
    "read_burstgpt",
    "read_mooncake",
]

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
_LONGEST = 1 << 26  # tokens; a longer prompt is a broken line
_REPLIES = 1 << 30  # texts from here on are replies, and prompts that nothing is known of
_LINE = 1 << 26  # characters of the longest line
_FRACTION = re.compile(r"^(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?$")


class TraceError(ValueError):
    """A trace that can't be read; the message names file, line and what was expected.

    Attributes
    ----------
    path : str
        The file.
    line : int
        The line, from 1; 0 when it is the file as a whole.
    """

    def __init__(self, path: str | Path, line: int, what: str) -> None:
        self.path, self.line = str(path), line
        super().__init__(f"{path}:{line}: {what}" if line else f"{path}: {what}")


@dataclass
class Reader:
    """Where one is in the file, and the checks that all formats share."""

    path: Path
    line: int = 0
    number: int = 0  # requests given out
    start: float | None = None
    last: float = 0.0

    def fail(self, what: str) -> TraceError:
        """Return the error that names this line."""
        return TraceError(self.path, self.line, what)

    def whole(self, value: Any, name: str, least: int = 0, most: int = _LONGEST) -> int:
        """Return a field as a whole number within bounds."""
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                raise self.fail(f"{name} is {value!r}, not a whole number") from None
        if isinstance(value, bool) or not isinstance(value, int):
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            else:
                raise self.fail(f"{name} is {value!r}, not a whole number")
        if not least <= value <= most:
            raise self.fail(f"{name} is {value}, outside {least} to {most}")
        return int(value)

    def seconds(self, value: Any, name: str) -> float:
        """Return a field as a number."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self.fail(f"{name} is {value!r}, not a number") from None
        if isinstance(value, bool) or not abs(number) < 1e15:
            raise self.fail(f"{name} is {value!r}, not a time")
        return number

    def arrival(self, time: float) -> float:
        """Return the time since the first request, and see that times do not go back."""
        if self.start is None:
            self.start = self.last = time
        if time < self.last:
            raise self.fail(
                f"time {time:.7g} s is before the line above ({self.last:.7g} s): sort the trace by time"
            )
        self.last = time
        return time - self.start

    def request(
        self, time: float, prompt: Blocks | Text | None, length: int, reply: int, key: int
    ) -> Request:
        """Return the next request; without a prompt, one that shares nothing."""
        own = _REPLIES + self.number
        self.number += 1
        return Request(
            arrival=self.arrival(time),
            tenant="",
            prompt=prompt if prompt is not None else Text(((own, length),)),
            max_new=reply,
            key=key,
            reply=own,
        )


def read_lines(path: Path, reader: Reader) -> Iterator[dict[str, Any]]:
    """Read a file of JSON objects, one a line."""
    with _open(path) as file:
        for reader.line, text in enumerate(_short(file, path), 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise reader.fail(f"not JSON: {error}") from None
            if not isinstance(row, dict):
                raise reader.fail(f"a JSON object is expected, not {type(row).__name__}")
            yield row


def read_table(path: Path, reader: Reader, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Read a CSV file that has at least these columns."""
    with _open(path) as file:
        reader.line = 1
        lines = _short(file, path)
        header = [name.strip().strip('"').lstrip("\ufeff") for name in next(lines, "").split(",")]
        if missing := [name for name in columns if name not in header]:
            raise reader.fail(
                f"columns missing: {', '.join(missing)}; the header is {', '.join(header) or 'empty'}"
            )
        rows = csv.reader(lines)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                reader.line = rows.line_num + 1
                raise reader.fail(f"not CSV: {error}") from None
            reader.line = rows.line_num + 1
            if not row:
                continue
            if len(row) != len(header):
                raise reader.fail(f"{len(row)} fields where the header has {len(header)}")
            yield dict(zip(header, row, strict=True))


def _short(file: TextIO, path: str | Path) -> Iterator[str]:
    """Give the lines one after another; something without line ends, such as a device, is no trace."""
    number = 0
    while line := file.readline(_LINE):
        number += 1
        if len(line) == _LINE:
            raise TraceError(path, number, f"longer than {_LINE} characters: this is no trace")
        yield line


def _open(path: Path) -> TextIO:
    try:
        return path.open(
            encoding="utf-8", errors="replace", newline=""
        )  # bytes that are no text fail as values
    except OSError as error:
        raise TraceError(path, 0, error.strerror or str(error)) from None


def _ids(reader: Reader, row: dict[str, Any], block: int, length: int) -> tuple[int, ...]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        raise reader.fail("hash_ids is not a list")
    if len(ids) != -(-length // block):
        raise reader.fail(
            f"{len(ids)} hash_ids for {length} tokens; blocks of {block} need {-(-length // block)}"
        )
    for value in ids:
        if type(value) is not int or not 0 <= value < _REPLIES:
            raise reader.fail(f"hash id {value!r} is not a whole number from 0 to {_REPLIES - 1}")
    return tuple(ids)


def _need(reader: Reader, row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise reader.fail(f"{name} is missing; the line has {', '.join(map(str, row)) or 'nothing'}")
    return row[name]


def read_mooncake(path: str | Path) -> Iterator[Request]:
    """Read a Mooncake trace: timestamp (ms), input_length, output_length, hash_ids.

    A block's id becomes its 512 tokens; the last block of a prompt, if partial, gets the first ones of its
    id.
    """
    reader = Reader(Path(path))
    for row in read_lines(reader.path, reader):
        time = reader.seconds(_need(reader, row, "timestamp"), "timestamp") / 1e3
        length = reader.whole(_need(reader, row, "input_length"), "input_length", 1)
        reply = reader.whole(_need(reader, row, "output_length"), "output_length")
        ids = _ids(reader, row, MOONCAKE_BLOCK, length)
        key = ids[1] if len(ids) > 1 else ids[0]
        yield reader.request(time, Blocks(ids, MOONCAKE_BLOCK, length), length, max(1, reply), key)


def read_bailian(path: str | Path) -> Iterator[Request]:
    """Read a Bailian trace.

    Keys: chat_id, parent_chat_id (-1: none), timestamp (s), input_length, output_length, hash_ids of 16
    tokens.
    """
    reader = Reader(Path(path))
    roots: dict[int, int] = {}
    for row in read_lines(reader.path, reader):
        time = reader.seconds(_need(reader, row, "timestamp"), "timestamp")
        length = reader.whole(_need(reader, row, "input_length"), "input_length", 1)
        reply = reader.whole(_need(reader, row, "output_length"), "output_length")
        chat = reader.whole(_need(reader, row, "chat_id"), "chat_id", 0, 1 << 62)
        parent = reader.whole(_need(reader, row, "parent_chat_id"), "parent_chat_id", -1, 1 << 62)
        ids = _ids(reader, row, BAILIAN_BLOCK, length)
        roots[chat] = root = roots.get(parent, chat)
        yield reader.request(time, Blocks(ids, BAILIAN_BLOCK, length), length, max(1, reply), root)


def read_azure(path: str | Path) -> Iterator[Request]:
    """Read an Azure trace: TIMESTAMP (up to nine decimals), ContextTokens, GeneratedTokens.

    No two prompts share anything.
    """
    reader, epoch = Reader(Path(path)), None
    for row in read_table(reader.path, reader, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        match = _FRACTION.match(row["TIMESTAMP"].strip())
        if match is None:
            raise reader.fail(f"TIMESTAMP {row['TIMESTAMP']!r} is not like 2023-11-16 18:15:46.6805900")
        try:
            whole = datetime.fromisoformat(match[1] + "+00:00").timestamp()
        except ValueError as error:
            raise reader.fail(f"TIMESTAMP {row['TIMESTAMP']!r}: {error}") from None
        # datetime knows six decimals, and a double can't hold the seventh of a time since 1970: count from
        # the first line.
        epoch = whole if epoch is None else epoch
        time = whole - epoch + float(f"0.{match[2] or 0}")
        length = reader.whole(row["ContextTokens"], "ContextTokens", 1)
        reply = reader.whole(row["GeneratedTokens"], "GeneratedTokens")
        yield reader.request(time, None, length, max(1, reply), reader.number)


def read_burstgpt(path: str | Path) -> Iterator[Request]:
    """Read a BurstGPT trace: Timestamp (s), Session ID, Request tokens, Response tokens.

    Failed requests, which have no tokens, are left out.
    """
    reader = Reader(Path(path))
    for row in read_table(reader.path, reader, ("Timestamp", "Request tokens", "Response tokens")):
        time = reader.seconds(row["Timestamp"], "Timestamp")
        length = reader.whole(row["Request tokens"], "Request tokens")
        reply = reader.whole(row["Response tokens"], "Response tokens")
        if length == 0 or reply == 0:
            reader.arrival(time)
            continue
        session = row.get("Session ID", "").strip()
        key = hash_text(session) if session else reader.number
        yield reader.request(time, None, length, reply, key)


def hash_text(text: str) -> int:
    """Return a number for a text, the same in every process."""
    value = 0xCBF2_9CE4_8422_2325
    for byte in text.encode():
        value = ((value ^ byte) * 0x0000_0100_0000_01B3) & 0xFFFF_FFFF_FFFF_FFFF
    return value >> 1


FORMATS: dict[str, Callable[[str | Path], Iterator[Request]]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
}


def detect(path: str | Path) -> str:
    """Return the format of a trace file, from its first line.

    Returns
    -------
    str
        A key of `FORMATS`, or "servegen".

    Raises
    ------
    TraceError
        The file can't be read, is empty, or is none of them.
    """
    with _open(Path(path)) as file:
        first = next((line for line in _short(file, path) if line.strip()), "")
    if not first:
        raise TraceError(path, 0, "empty file")
    if first.lstrip().startswith("{"):
        try:
            row = json.loads(first)
        except (ValueError, RecursionError) as error:
            raise TraceError(path, 1, f"not JSON: {error}") from None
        return "bailian" if "chat_id" in row else "mooncake"
    header = {name.strip().strip('"').lstrip("\ufeff") for name in first.split(",")}
    if {"TIMESTAMP", "ContextTokens"} <= header:
        return "azure"
    if {"Timestamp", "Request tokens"} <= header:
        return "burstgpt"
    if {"client", "arrival_cv", "mean_rps"} <= header:
        return "servegen"
    raise TraceError(
        path,
        1,
        "unknown format; known: Mooncake and Bailian (JSON lines with hash_ids), Azure "
        "(TIMESTAMP,ContextTokens,...), "
        "BurstGPT (Timestamp,...,Request tokens,...), ServeGen digest (model,client,...,arrival_cv,...)",
    )


def open_trace(path: str | Path) -> Iterator[Request]:
    """Read a trace of any format but ServeGen's digest, which is no list of requests."""
    name = detect(path)
    if name == "servegen":
        raise TraceError(
            path, 0, "a ServeGen digest describes clients; draw requests with kvalloc.engine.servegen"
        )
    return FORMATS[name](path)

"""Time the Triton kernels on a card: decode, page copies, swapping, writing; each against the card.

Figures are medians of device time between two events. Kernels run in a captured graph, so that the cost of
launching from Python is not in them. Decode runs through eight layers with pages of their own, as a model
does: no layer finds its KV in the cache. Ratios are taken in one run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kvalloc.kernels.copy import copy_pages, gather_pages, scatter_pages
from kvalloc.kernels.decode import paged_decode
from kvalloc.kernels.write import write_kv

MIB = 1 << 20
LAYERS, HEADS, KV_HEADS, DIM, PAGE_TOKENS = 8, 32, 8, 128, 16
# job -> the least part of what the card's own copies reach, on an H200
BARS = {"decode bfloat16, 512 MiB": 0.88, "decode bfloat16, 134 MiB": 0.65, "page copy": 0.90}
BARS |= {"swap out, runs of 16": 0.95, "swap in, runs of 16": 0.95}

Timer = Callable[[Callable[[], object], bool], list[float]]


@dataclass
class Figure:
    """One job."""

    job: str
    gb_per_s: float
    of: str  # what it is held against
    ratio: float
    microseconds: float
    repeats: list[float] = field(default_factory=list)


def device_timer(repeats: int) -> Timer:
    """Time calls on the device, in microseconds; kernels as a graph that is captured once and replayed."""

    def time(call: Callable[[], object], graph: bool) -> list[float]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and fills the allocator
            call()
        torch.cuda.synchronize()
        again = call
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                call()
            again = captured.replay
        for _ in range(3):
            again()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, stop in events:
            start.record()
            again()
            stop.record()
        torch.cuda.synchronize()
        return [1000 * start.elapsed_time(stop) for start, stop in events]

    return time


class Bench:
    """The jobs, on a device and by a timer.

    Parameters
    ----------
    device : str
        Where tensors lie.
    timer : callable
        Gives the microseconds of some runs of a call; captured as a graph or not.
    scale : int, optional
        Divides all sizes; for trying the jobs out.
    """

    def __init__(self, device: str, timer: Timer, scale: int = 1) -> None:
        self.device, self.timer, self.scale = device, timer, scale
        self.figures: list[Figure] = []
        self.layers = LAYERS if scale == 1 else 2
        self.copy_speed = self._speed("device copy, read + write", *self._plain_copy())
        self.link = {way: self._speed(f"link, {way}", *self._plain_link(way)) for way in ("out", "in")}

    # -- what the card reaches -------------------------------------------------------------------------------

    def _plain_copy(self) -> tuple[Callable[[], object], int]:
        source = torch.zeros(1024 * MIB // self.scale, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), 2 * source.numel()

    def _plain_link(self, way: str) -> tuple[Callable[[], object], int]:
        here = torch.zeros(512 * MIB // self.scale, dtype=torch.uint8, device=self.device)
        host = self._host(here.numel())
        return (lambda: host.copy_(here, non_blocking=True)) if way == "out" else (
            lambda: here.copy_(host, non_blocking=True)
        ), here.numel()

    def _host(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8, pin_memory=self.device != "cpu")

    # -- ours ------------------------------------------------------------------------------------------------

    def decode(self, dtype: torch.dtype, mib: int, rows: int) -> None:
        """Decode `rows` requests of equal length over `mib` MiB of KV a layer, page-major."""
        size = torch.empty(0, dtype=dtype).element_size()
        token = 2 * KV_HEADS * DIM * size
        length = max(1, mib * MIB // self.scale // token // rows)
        pages = -(-length // PAGE_TOKENS)
        frames, part = rows * pages + 1, PAGE_TOKENS * KV_HEADS * DIM
        bits = torch.uint8 if size == 1 else torch.int16
        arena = torch.randint(0, 100, (frames * self.layers * 2 * part,), dtype=bits, device=self.device)
        arena = arena.view(dtype)  # small numbers of any dtype
        strides = (self.layers * 2 * part, KV_HEADS * DIM, DIM, 1)

        def view(layer: int, which: int) -> torch.Tensor:
            start = (2 * layer + which) * part
            return arena.as_strided((frames, PAGE_TOKENS, KV_HEADS, DIM), strides, start)

        table = torch.randperm(frames - 1, device=self.device).int().view(rows, pages) + 1
        lens = torch.full((rows,), length, dtype=torch.int32, device=self.device)
        q = torch.randn(rows, HEADS, DIM, device=self.device).to(torch.bfloat16)
        views = [(view(layer, 0), view(layer, 1)) for layer in range(self.layers)]
        scales = torch.ones(frames, PAGE_TOKENS, KV_HEADS, dtype=torch.float16, device=self.device)
        extra = {"k_scale": scales, "v_scale": scales} if dtype == torch.int8 else {}

        def step() -> None:
            for k, v in views:
                paged_decode(q, k, v, table, lens, scale=DIM**-0.5, max_len=length, mean_len=length, **extra)

        name = f"decode {str(dtype).removeprefix('torch.')}, {mib} MiB"
        self._figure(f"{name}, {rows} requests", step, self.layers * rows * length * token, "copy", name)

    def page_copy(self, page_bytes: int) -> None:
        """Copy half of the pages of a pool onto the other half, in no order."""
        count = 1024 * MIB // self.scale // page_bytes
        pages = torch.zeros(count, page_bytes, dtype=torch.uint8, device=self.device)
        order = torch.randperm(count, device=self.device)
        sources, targets = order[: count // 2], order[count // 2 :]
        self._figure(
            f"page copy, {page_bytes // 1024} KiB",
            lambda: copy_pages(pages, sources, targets[: len(sources)]),
            2 * len(sources) * page_bytes,
            "copy",
            "page copy",
        )

    def swap(self, page_bytes: int, run: int) -> None:
        """Swap out and in: runs of adjacent pages by the copy engine, scattered ones by a staging buffer."""
        count = max(run, 512 * MIB // self.scale // page_bytes // run * run)
        pages = torch.zeros(2 * count, page_bytes, dtype=torch.uint8, device=self.device)
        host = self._host(count, page_bytes)
        if run > 1:
            starts = list(range(0, 2 * count, 2 * run))[: count // run]

            def out() -> None:
                for i, start in enumerate(starts):
                    host[i * run : (i + 1) * run].copy_(pages[start : start + run], non_blocking=True)

            def back() -> None:
                for i, start in enumerate(starts):
                    pages[start : start + run].copy_(host[i * run : (i + 1) * run], non_blocking=True)

            what = f"runs of {run}"
        else:
            frames = torch.randperm(2 * count, device=self.device)[:count]
            staging = torch.empty(count, page_bytes, dtype=torch.uint8, device=self.device)

            def out() -> None:
                gather_pages(pages, frames, staging)
                host.copy_(staging, non_blocking=True)

            def back() -> None:
                staging.copy_(host, non_blocking=True)
                scatter_pages(staging, frames, pages)

            what = "scattered, by staging"
        for way, call in (("out", out), ("in", back)):
            name = f"swap {way}, {what}"
            self._figure(f"{name}, {page_bytes // 1024} KiB", call, count * page_bytes, way, name)

    def write(self, tokens: int) -> None:
        """Write new tokens into one layer's pages."""
        frames = -(-tokens // PAGE_TOKENS) + 1
        shape = (frames, PAGE_TOKENS, KV_HEADS, DIM)
        k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        new = torch.randn(tokens, KV_HEADS, DIM, device=self.device).to(torch.bfloat16)
        slots = torch.randperm(tokens, device=self.device) + PAGE_TOKENS
        moved = 4 * new.numel() * new.element_size()
        name = f"write bfloat16, {tokens} tokens"
        self._figure(name, lambda: write_kv(new, new, k, v, slots), moved, "copy", name)

    # -- figures ---------------------------------------------------------------------------------------------

    def _speed(self, job: str, call: Callable[[], object], moved: int) -> float:
        times = self.timer(call, False)
        micros = statistics.median(times)
        self._keep(Figure(job, moved / micros / 1000, "itself", 1.0, micros, times), None)
        return moved / micros / 1000

    def _figure(self, job: str, call: Callable[[], object], moved: int, against: str, bar: str) -> None:
        times = self.timer(call, against == "copy")  # over the link it takes milliseconds
        micros = statistics.median(times)
        speed = moved / micros / 1000
        against_speed = self.copy_speed if against == "copy" else self.link[against]
        of = "device copy" if against == "copy" else f"link, {against}"
        self._keep(Figure(job, speed, of, speed / against_speed, micros, times), BARS.get(bar))

    def _keep(self, figure: Figure, bar: float | None) -> None:
        self.figures.append(figure)
        goal = f"{100 * bar:5.0f} %" if bar else ""
        print(
            f"{figure.job:46} {figure.microseconds:12,.1f} us {figure.gb_per_s:9,.1f} GB/s "
            f"{100 * figure.ratio:6.1f} % of {figure.of:12} {goal}",
            flush=True,
        )


def run(bench: Bench) -> list[Figure]:
    """All jobs."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        for mib in (30, 134, 512):
            bench.decode(dtype, mib, rows=32)
    bench.decode(torch.bfloat16, 512, rows=1)
    for page_bytes in (64 << 10, 2 * MIB):
        bench.page_copy(page_bytes)
    for run_length in (1, 16):
        bench.swap(2 * MIB, run_length)
    for tokens in (256, 8192):
        bench.write(tokens)
    return bench.figures


def card() -> dict[str, object]:
    """What the figures were measured on."""
    found = torch.cuda.get_device_properties(0)
    return {
        "card": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "cuda": torch.version.cuda,
    } | {name: importlib.metadata.version(name) for name in ("torch", "triton", "kvalloc")}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing can be timed here", file=sys.stderr)
        return 2
    about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **card()}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    figures = run(Bench("cuda", device_timer(asked.repeats)))
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**about, "figures": [asdict(figure) for figure in figures]}, indent=1)
        asked.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

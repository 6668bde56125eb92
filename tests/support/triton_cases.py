"""Pages with known content, everything else poisoned, and what attention over them gives."""

from dataclasses import dataclass

import pytest
import torch

from kvalloc.kernels import reference
from kvalloc.kernels.decode import Pages
from kvalloc.kernels.device import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: nox -s kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET unset: nox -s kernels")
# What the interpreters of Triton 3.6 (in numpy) and the compiler of 3.9 (about their own defaults) warn of.
quiet = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
# Output dtype -> (relative, absolute) error. The interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)}


def page_major(dtype, frames, page_tokens, heads, k_dim, v_dim, *, layers=2, layer=1, device="cpu"):
    """One layer's views of an arena laid out as DESIGN says, every byte of it NaN (int8: in the scales)."""
    size = torch.empty(0, dtype=dtype).element_size()
    values = page_tokens * heads * (k_dim + v_dim) * size
    scales = 0 if dtype != torch.int8 else page_tokens * heads * 2 * (2 if v_dim else 1)
    page = -(-layers * (values + scales) // 256) * 256
    arena = torch.zeros(frames * page, dtype=torch.uint8, device=device)

    def view(as_type, offset, shape):
        item = torch.empty(0, dtype=as_type).element_size()
        inner = [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
        start = layer * (values + scales) + offset
        return arena.view(as_type).as_strided((frames, *shape), (page // item, *inner), start // item)

    k_bytes = page_tokens * heads * k_dim * size
    k = view(dtype, 0, (page_tokens, heads, k_dim))
    v = view(dtype, k_bytes, (page_tokens, heads, v_dim)) if v_dim else None
    k_scale = v_scale = None
    if scales:
        k_scale = view(torch.float16, values, (page_tokens, heads))
        v_scale = (
            view(torch.float16, values + page_tokens * heads * 2, (page_tokens, heads)) if v_dim else None
        )
    pages = Pages(k, v, k_scale, v_scale)
    poison(pages, arena)
    return pages, arena.view(frames, page)


def poison(pages, arena):
    """NaN wherever nothing was written."""
    if pages.k.dtype == torch.int8:
        arena.fill_(0x55)
        for scale in (pages.k_scale, pages.v_scale):
            if scale is not None:
                scale.fill_(float("nan"))
    else:
        arena.view(torch.uint8).fill_(0x7F if pages.k.dtype == torch.float8_e4m3fn else 0xFF)


def put(pages, frames, within, k, v):
    """Write tokens into pages, by frame and place."""
    slots = frames * pages.k.shape[1] + within
    reference.write_kv(k, v, pages.k, pages.v, slots, pages.k_scale, pages.v_scale)


def get(values, scale, frames, within):
    """Read K or V of tokens back as float32."""
    return reference.dequantise(values[frames, within], None if scale is None else scale[frames, within])


def on_cpu(value):
    """A tensor, or pages, on the CPU; anything else as it is."""
    if isinstance(value, Pages):
        return Pages(*map(on_cpu, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


@dataclass
class Case:
    """A decode step."""

    lens: tuple = (0, 1, 15, 16, 17, 33, 70)
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 32
    v_dim: int = 32
    latent: bool = False
    page_tokens: int = 16
    q: torch.dtype = torch.float32
    kv: torch.dtype = torch.float32
    small: torch.dtype | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    num_splits: int | None = None
    loud: float = 1.0  # factor of the scores
    given_up: tuple = ()  # pages of every row that show 0; frame 0 is NaN, as all that nobody wrote
    device: str = "cpu"
    seed: int = 0

    def first(self, length):
        """The first token that the last one attends to."""
        if self.window:
            return max(0, length - self.window)
        if self.chunk:
            return max(0, length - 1) // self.chunk * self.chunk
        return 0

    def build(self):
        """Make the arguments of `paged_decode`."""
        make = torch.Generator().manual_seed(self.seed)
        rows, most = len(self.lens), max(-(-n // self.page_tokens) for n in self.lens) + 1
        frames = rows * most + 2
        shape = (frames, self.page_tokens, self.kv_heads, self.k_dim, 0 if self.latent else self.v_dim)
        main, _ = page_major(self.kv, *shape, device=self.device)
        small = page_major(self.small, *shape, device=self.device)[0] if self.small else None
        numbers = torch.randperm(frames - 1, generator=make)[: rows * most].view(rows, most) + 1
        if small:  # every third page is compressed
            numbers = torch.where(torch.arange(most) % 3 == 1, -1 - numbers, numbers)
        table = torch.zeros(rows, most, dtype=torch.int32)  # what left the window shows 0
        for row, length in enumerate(self.lens):
            tokens = torch.arange(self.first(length), length)
            column = tokens // self.page_tokens
            table[row, column] = numbers[row, column].int()
            entry = numbers[row, column]
            k = torch.randn(len(tokens), self.kv_heads, self.k_dim, generator=make).to(self.device)
            v = torch.randn(len(tokens), self.kv_heads, self.v_dim, generator=make).to(self.device)
            for pages, mine, frame in [(main, entry >= 0, entry), (small, entry < 0, -1 - entry)]:
                if pages is not None and mine.any():
                    put(pages, frame[mine], (tokens % self.page_tokens)[mine], k[mine], v[mine])
        table[:, [page for page in self.given_up if page < most]] = 0
        q = torch.randn(rows, self.heads, self.k_dim, generator=make).to(self.q).to(self.device)
        sinks = torch.randn(self.heads, generator=make).to(self.device) if self.sinks else None
        lens = torch.tensor(self.lens, dtype=torch.int32, device=self.device)
        self.args = (q, main.k, main.v, table.to(self.device), lens)
        self.kwargs = {
            "scale": self.loud * self.k_dim**-0.5,
            "window": self.window,
            "chunk": self.chunk,
            "soft_cap": self.soft_cap,
            "sinks": sinks,
            "k_scale": main.k_scale,
            "v_scale": main.v_scale,
            "small": small,
            "v_dim": self.v_dim if self.latent else None,
            "num_splits": self.num_splits,
        }
        return self

    def expected(self):
        """What the reference gives, on the CPU."""
        kwargs = {name: on_cpu(value) for name, value in self.kwargs.items() if name != "num_splits"}
        return reference.paged_attention(*map(on_cpu, self.args), **kwargs)

    def check(self, paged_decode):
        """Run and compare; rows that see nothing must be exactly zero."""
        if not hasattr(self, "args"):
            self.build()
        out = paged_decode(*self.args, **self.kwargs)
        assert out.dtype == self.q
        assert out.shape == (len(self.lens), self.heads, self.v_dim)
        relative, absolute = TOLERANCE[self.q]
        torch.testing.assert_close(
            out.cpu().float(), self.expected(), rtol=relative, atol=absolute, equal_nan=False
        )
        shown = [
            table[: -(-length // self.page_tokens)]
            for table, length in zip(self.args[3], self.lens, strict=True)
        ]
        empty = [row for row, entries in enumerate(shown) if not entries.any()]
        assert not out[empty].any()
        return out

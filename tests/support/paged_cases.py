"""Batches over pages of random content for the kernels, and what dense attention makes of them."""

import itertools

import numpy as np

from kv_formats import Pages, attend, decode, encode
from kvalloc.kernels import cuda


class Case:
    """A batch over pages of random content, and what its queries must see; NaN where nothing was written."""

    def __init__(
        self,
        lengths,
        queries,
        *,
        kind="float32",
        q_kind="float32",
        heads=2,
        group=2,
        k_dim=16,
        v_dim=None,
        page_tokens=4,
        width=None,
        small=None,
        shared=False,
        released=None,
        given_up=(),
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        v_dim = v_dim or k_dim
        counts = [-(-n // page_tokens) for n in lengths]
        frames = sum(counts) + 3
        self.pages = Pages.make(kind, frames, page_tokens, heads, k_dim, None if shared else v_dim)
        self.small = small and Pages.make(small, frames, page_tokens, heads, k_dim, None if shared else v_dim)
        self.table = np.zeros((len(lengths), width or max([*counts, 1])), np.int32)
        self.table[:] = frames - 1  # nobody's frame: NaN
        free = list(rng.permutation(np.arange(1, frames - 1)))
        self.k, self.v, self.gone = [], [], []
        for row, length in enumerate(lengths):
            ks, vs = np.zeros((length, heads, k_dim)), np.zeros((length, heads, v_dim))
            gone = released(length - queries[row]) // page_tokens if released else 0
            for page in range(counts[row]):
                if page < gone or page in given_up:
                    self.table[row, page] = 0
                    ks[page * page_tokens :][:page_tokens] = np.nan
                    continue
                frame = int(free.pop())
                target = self.pages
                if small and rng.random() < 0.5:
                    target = self.small
                self.table[row, page] = ~frame if target is self.small else frame
                for offset in range(min(page_tokens, length - page * page_tokens)):
                    k, v = (rng.standard_normal((heads, d)).astype(np.float32) for d in (k_dim, v_dim))
                    k_back, v_back = target.put(frame, offset, k, v)
                    ks[page * page_tokens + offset] = k_back
                    vs[page * page_tokens + offset] = k_back[:, :v_dim] if shared else v_back
            self.k.append(ks)
            self.v.append(vs)
            self.gone.append(np.isin(np.arange(length) // page_tokens, given_up))
        self.lengths = np.array(lengths, np.int32)
        self.starts = np.cumsum([0, *queries]).astype(np.int32)
        self.q = encode(rng.standard_normal((self.starts[-1], heads * group, k_dim)), q_kind)
        self.q_kind = q_kind
        self.v_dim = v_dim if shared else None

    def run(self, backend, **options):
        """What the kernels make of it; on cupy's device if there is no backend."""
        to, keys, small = np.asarray, self.pages.keys, self.small and self.small.keys
        if backend is None:
            import cupy

            to, keys, small = cupy.asarray, self.pages.on_device(), self.small and self.small.on_device()
        arrays = (to(x) for x in (self.table, self.lengths, self.starts))
        k, v, k_scale, v_scale = keys
        for name in {"sinks", "out"} & set(options):
            options[name] = to(options[name])
        given = cuda.paged_attention(
            to(self.q),
            k,
            v,
            *arrays,
            k_scale=k_scale,
            v_scale=v_scale,
            small=small,
            v_dim=self.v_dim,
            backend=backend,
            **options,
        )
        return decode(given if backend else given.get(), self.q_kind)

    def expected(self, **options):
        q = decode(self.q, self.q_kind)
        return np.array(
            [
                attend(
                    q[i],
                    self.k[row],
                    self.v[row],
                    self.lengths[row] - (end - i),
                    gone=self.gone[row],
                    **options,
                )
                for row, (first, end) in enumerate(itertools.pairwise(self.starts))
                for i in range(first, end)
            ]
        )

    def check(self, backend, **options):
        given, wanted = self.run(backend, **options), self.expected(**options)
        bound = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[self.q_kind]
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(given, wanted, rtol=bound, atol=bound)


# Decode rows, empty rows and prefill chunks: lengths, and query tokens of each row.
MIXED = ([9, 1, 0, 13, 6, 30], [1, 1, 1, 7, 6, 1])

"""The numerics of the CUDA C sources, compiled as C++, against dense numpy."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cuda_on_cpu import COMPILER, CpuBackend
from kv_formats import FLOAT8, Pages, decode, encode
from kvalloc.errors import InvalidArgument
from kvalloc.kernels import cuda
from paged_cases import MIXED, Case

if COMPILER is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="session")
def built(request, tmp_path_factory):
    """Where compiled kernels lie: by their content, so a later run, or another Python's, finds them."""
    cache = getattr(request.config, "cache", None)
    return cache.mkdir("cuda-as-cpp") if cache else tmp_path_factory.mktemp("cuda-as-cpp")


@pytest.fixture
def backend(built):
    return CpuBackend(built)


@pytest.mark.parametrize(
    ("q_kind", "kind"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16", "int8"),
        ("bfloat16", "float8"),
        ("float32", "int8"),
    ],
)
def test_formats(backend, q_kind, kind):
    Case(*MIXED, q_kind=q_kind, kind=kind).check(backend)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 1, "group": 1, "k_dim": 64, "page_tokens": 16},
        {"heads": 3, "group": 3, "k_dim": 20, "page_tokens": 5},
        {"heads": 1, "group": 8, "k_dim": 128, "page_tokens": 16},
        {"heads": 1, "group": 12, "k_dim": 80, "page_tokens": 1},
        {"heads": 2, "group": 2, "k_dim": 192, "v_dim": 128, "page_tokens": 8},
        {"heads": 2, "group": 1, "k_dim": 5, "v_dim": 9, "page_tokens": 3},
        {"heads": 1, "group": 2, "k_dim": 256, "page_tokens": 16},
    ],
    ids=str,
)
def test_shapes(backend, shape):
    Case(*MIXED, **shape).check(backend)


@pytest.mark.parametrize("kind", ["bfloat16", "float8"])
def test_latent_whose_values_are_part_of_its_keys(backend, kind):
    case = Case(
        [5, 12], [1, 3], heads=1, group=16, k_dim=576, v_dim=512, shared=True, kind=kind, q_kind="bfloat16"
    )
    case.check(backend, scale=192**-0.5)


OPTIONS = {
    "window": ({"window": 5}, lambda n: max(0, n - 5 + 1)),
    "window-1": ({"window": 1}, lambda n: n),
    "chunk": ({"chunk": 6}, lambda n: n // 6 * 6),
    "soft-cap": ({"soft_cap": 0.7}, None),
    "scale": ({"scale": 1.5}, None),
    "window-soft-cap": ({"window": 9, "soft_cap": 2.0}, lambda n: max(0, n - 9 + 1)),
}


@pytest.mark.parametrize("processors", [1, 8])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, name, processors):
    options, released = OPTIONS[name]
    backend.processors = processors
    case = Case(*MIXED, released=released, width=300)
    case.check(backend, **options)
    assert ("merge_splits" in backend.launched) == (
        processors > 1 and "window" not in options and "chunk" not in options
    )


@pytest.mark.parametrize("processors", [1, 8])
def test_sinks(backend, processors):
    backend.processors = processors
    sinks = np.array([-1.0, 0.5, 3.0, 30.0], np.float32)
    Case(*MIXED, width=300).check(backend, sinks=sinks)


@pytest.mark.parametrize("processors", [1, 3, 40])
def test_shares_of_long_rows_are_merged(backend, processors):
    backend.processors = processors
    Case([700, 3, 257, 0], [1, 1, 1, 1], width=200, heads=1, group=2, k_dim=8).check(backend)


@pytest.mark.parametrize("small", ["int8", "float8"])
@pytest.mark.parametrize("shared", [False, True])
def test_compressed_pages_in_the_same_table(backend, small, shared):
    case = Case([33, 9, 14], [1, 4, 14], kind="float16", q_kind="float16", small=small, shared=shared)
    assert (case.table < 0).any()
    assert (case.table > 0).any()
    case.check(backend)


GIVEN_UP = {
    "decode": (([9, 30], [1, 1]), {"given_up": (0, 2, 3)}, {}),
    "shares that see nothing": (
        ([700, 3, 257], [1, 1, 1]),
        {"given_up": range(1, 170), "width": 200, "heads": 1, "k_dim": 8},
        {},
    ),
    "all that a row has": (([9, 260, 6], [1, 1, 3]), {"given_up": range(80), "width": 200}, {}),
    "prefill": (([33, 50, 13], [5, 9, 1]), {"given_up": (1, 2, 5)}, {}),
    "tiles of keys that see nothing": (([150, 90], [3, 40]), {"given_up": range(1, 20)}, {}),
    "cap and sinks": (
        ([33, 50, 13, 300], [5, 1, 1, 1]),
        {"given_up": range(1, 7), "width": 200},
        {"soft_cap": 0.7, "sinks": np.array([-1.0, 0.5, 3.0, 30.0], np.float32)},
    ),
    "a window": (([33, 50, 13], [5, 1, 1]), {"given_up": (2, 7, 11)}, {"window": 9}),
    "others int8": (([33, 40, 14], [1, 4, 14]), {"given_up": (1, 2), "small": "int8"}, {}),
    "int8": (([33, 40], [1, 4]), {"given_up": (1, 2), "kind": "int8"}, {}),
    "latent, others float8": (
        ([33, 40], [1, 4]),
        {"given_up": (1, 2), "small": "float8", "shared": True},
        {},
    ),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_pages_that_were_given_up_are_not_seen(backend, name):
    """Entries of 0; frame 0 holds NaN."""
    rows, shape, options = GIVEN_UP[name]
    backend.processors = 8
    Case(*rows, **shape).check(backend, **options)


def test_one_batch_of_decode_rows_takes_one_launch(backend):
    case = Case([3, 8], [1, 1])
    given = case.run(backend, max_query_len=1)
    np.testing.assert_allclose(given, case.expected(), rtol=2e-6, atol=2e-6)
    assert backend.launched == ["paged_decode"]


def test_rows_without_queries_and_tokens_without_rows(backend):
    case = Case([9, 4, 11], [2, 0, 1])
    case.q = np.concatenate([case.q, case.q[:2]])
    given = case.run(backend)
    np.testing.assert_allclose(given[:3], case.expected(), rtol=2e-6, atol=2e-6)
    assert (given[3:] == 0).all()


def test_output_goes_where_it_is_told(backend):
    case = Case([9, 5], [1, 3])
    whole = np.full((4, 10, 16), 7.0, np.float32)
    out = whole[:, 3:7]
    assert case.run(backend, out=out) is not None
    np.testing.assert_allclose(out, case.expected(), rtol=2e-6, atol=2e-6)
    assert (whole[:, :3] == 7).all()
    assert (whole[:, 7:] == 7).all()


def test_order_of_threads_does_not_matter(built):
    case = Case([40, 9], [1, 5], heads=1, group=3)
    forward, backward = (case.run(CpuBackend(built, backwards=b)) for b in (False, True))
    np.testing.assert_array_equal(forward, backward)


MUTATIONS = {
    "keys beyond the end are loaded": ("position < end);\n        }\n", "true);\n        }\n"),
    "window off by one": ("position - window + 1", "position - window"),
    "chunk off by one": ("position / chunk * chunk", "(position - 1) / chunk * chunk"),
    "shares merged without their maximum": ("float w = weight(partial_top[at + s], top)", "float w = 1.0f"),
    "groups merged without their maximum": (
        "float shrink = weight(tops[w][h], all_top)",
        "float shrink = 1.0f",
    ),
    "no rescaling": ("acc[h][c][i] *= shrink", "acc[h][c][i] *= 1.0f"),
    "no barrier after a tile of keys": (
        "base, first, end, kv_head, from);\n            __syncthreads();",
        "base, first, end, kv_head, from);",
    ),
    "causal off by one": ("row_end[i] = there ? past + t + 1", "row_end[i] = there ? past + t + 2"),
    "prefill: keys beyond the end": ("position >= first && position < end);", "true);"),
    "pages given up: frame 0 is read": ("key.seen = entry != 0;", ""),
    "pages given up: their keys count as zeros in prefill": ("bool seen = there[j] && ", "bool seen = "),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_turn_red(built, name):
    old, new = MUTATIONS[name]
    options = {"window": 5} if "window" in name else {"chunk": 6} if "chunk" in name else {}
    released = OPTIONS[next(iter(options))][1] if options else None
    given_up = (1, 2) if "given up" in name else ()
    rows = ([9, 1, 0, 25, 6, 560], [1, 1, 1, 7, 6, 1])
    case = Case(*rows, released=released, width=300, given_up=given_up)
    wrong = False
    for backwards in (False, True):
        backend = CpuBackend(built, processors=8, backwards=backwards)
        case.check(backend, **options)

        def change(text):
            assert text.count(old) == 1
            return text.replace(old, new)

        backend.change = change
        given = case.run(backend, **options)
        wrong |= not np.allclose(given, case.expected(**options), rtol=1e-4, atol=1e-4)
    assert wrong


# ---- writing ----


def every_float16():
    return np.arange(65536, dtype=np.uint16).view(np.float16)


def convert(backend, values, kind, source="float32"):
    """Values through write_kv into one long page of a kind: what is stored."""
    rows = encode(values, source).reshape(-1, 1, 16)
    pages = Pages.make(kind, 1, len(rows), 1, 16)
    cuda.write_kv(rows, None, pages.k, None, np.arange(len(rows)), pages.k_scale, backend=backend)
    return pages.k[0, :, 0].reshape(-1)


def test_float8_codes_and_what_lies_between(backend):
    codes = FLOAT8[:127]
    between = (codes[1:] + codes[:-1]) / 2
    near = np.concatenate([np.nextafter(between.astype(np.float32), np.float32(s)) for s in (-1000, 1000)])
    values = np.concatenate([codes, between, near, [449, 1e9, np.inf, np.nan, 1e-30, 0.0]])
    values = np.concatenate([values, -values]).astype(np.float32)
    values = np.resize(values, -(-len(values) // 16) * 16)
    stored = convert(backend, values, "float8")
    np.testing.assert_array_equal(stored & 127, encode(np.clip(values, -448, 448), "float8") & 127)
    np.testing.assert_array_equal(stored >> 7, np.signbit(values))


def test_float16_both_ways(backend):
    every = every_float16().astype(np.float32)
    stored = convert(backend, every, "float16")
    same = (stored.view(np.uint16) == every_float16().view(np.uint16)) | (np.isnan(stored) & np.isnan(every))
    assert same.all()
    np.testing.assert_array_equal(convert(backend, every_float16(), "float32", "float16"), every)
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(convert(backend, values, "float16"), values.astype(np.float16))


def test_bfloat16_both_ways(backend):
    rng = np.random.default_rng(2)
    values = rng.integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    stored = convert(backend, values, "bfloat16")
    np.testing.assert_array_equal(stored, encode(values, "bfloat16"))
    np.testing.assert_array_equal(convert(backend, values, "float32", "bfloat16"), decode(stored, "bfloat16"))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "float8"])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(16, 16), (20, 7), (128, 64), (576, None)])
def test_write(backend, kind, k_dim, v_dim):
    rng = np.random.default_rng(3)
    pages = Pages.make(kind, 6, 4, 3, k_dim, v_dim)
    before = pages.arena.copy()
    slots = np.array([5, -1, 22, 4, -1], np.int64)
    new = [rng.standard_normal((5, 3, d or 1)).astype(np.float32) for d in (k_dim, v_dim)]
    k_new, v_new = new[0], new[1] if v_dim else None
    cuda.write_kv(k_new, v_new, pages.k, pages.v, slots, pages.k_scale, pages.v_scale, backend=backend)
    wanted = Pages.make(kind, 6, 4, 3, k_dim, v_dim)
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted.put(slot // 4, slot % 4, k_new[token], None if v_new is None else v_new[token])
    if kind == "int8":  # a quotient next to a half may go either way
        assert np.abs(pages.k.astype(int) - wanted.k).max() <= 1
        np.testing.assert_array_equal(pages.k_scale, wanted.k_scale)
        for given, right in ((pages.k, wanted.k), (pages.v, wanted.v)):
            if given is not None:
                given[...] = right
    np.testing.assert_array_equal(pages.arena, wanted.arena)
    assert (pages.arena != before).any()


def test_int8_rows_that_are_zero_tiny_huge_or_nan(backend):
    rows = np.zeros((5, 1, 16), np.float32)
    rows[1] = 1e-9
    rows[2, 0, 3] = -np.inf
    rows[3, 0, 5] = np.nan
    rows[4, 0, :2] = 1e8, -1e8
    pages = Pages.make("int8", 1, 5, 1, 16)
    cuda.write_kv(rows, None, pages.k, None, np.arange(5), pages.k_scale, backend=backend)
    read = pages.k[0, :, 0] * pages.k_scale[0].astype(np.float32)
    assert (read[:2] == 0).all()
    assert np.isnan(read[3]).all()
    assert read[2, 3] == read[4, 1] == -65504.0 * 127
    assert (read[2, :3] == 0).all()


# ---- pages ----


@pytest.mark.parametrize("small", ["int8", "float8"])
@pytest.mark.parametrize("v_dim", [16, None])
def test_quantise_and_back(backend, small, v_dim):
    rng = np.random.default_rng(4)
    pages, compressed = (Pages.make(kind, 5, 4, 2, 16, v_dim) for kind in ("float16", small))
    for frame in (2, 4):
        for offset in range(4):
            pages.put(frame, offset, *(rng.standard_normal((2, d or 1)) for d in (16, v_dim)))
    untouched = compressed.arena[[0, 2, 4]].copy()
    src, dst = np.array([2, -1, 4], np.int32), np.array([1, 2, 3], np.int32)
    cuda.quantise_pages(pages.k, pages.v, src, compressed.keys, dst, backend=backend)
    np.testing.assert_array_equal(compressed.arena[[0, 2, 4]], untouched)
    back = Pages.make("float16", 5, 4, 2, 16, v_dim)
    cuda.dequantise_pages(compressed.keys, dst[[0, 2]], back.k, back.v, src[[0, 2]], backend=backend)
    for given, right in ((back.k, pages.k), (back.v, pages.v)):
        if given is not None:
            given, right = (x[[2, 4]].astype(np.float64) for x in (given, right))
            bound = (
                np.abs(right).max(-1, keepdims=True) / 127 * 0.51 + 1e-3
                if small == "int8"
                else np.abs(right) / 15 + 1e-3
            )
            assert (np.abs(given - right) <= bound).all()
    assert (back.arena[[0, 1, 3]] == 0xFF).all()


@pytest.mark.parametrize("page_bytes", [256, 5_000, 40_960])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_copy_gather_scatter(backend, page_bytes, dtype):
    rng = np.random.default_rng(5)
    pages = rng.integers(0, 256, (9, page_bytes), np.uint8)
    wanted = pages.copy()
    copies = np.array([[0, 3, 5], [0, 1, 8], [1, -1, 2]], dtype)  # the columns are strided
    cuda.copy_pages(pages, copies[:, 1], copies[:, 2], backend=backend)
    wanted[5], wanted[8] = wanted[3], wanted[1]
    np.testing.assert_array_equal(pages, wanted)
    staging = np.zeros((3, page_bytes), np.uint8)
    cuda.gather_pages(pages, np.array([7, -1, 0], dtype), staging, backend=backend)
    np.testing.assert_array_equal(staging, np.stack([wanted[7], np.zeros(page_bytes, np.uint8), wanted[0]]))
    cuda.scatter_pages(staging, np.array([1, 2, -1], dtype), pages, backend=backend)
    wanted[1], wanted[2] = staging[0], staging[1]
    np.testing.assert_array_equal(pages, wanted)


def test_nothing_to_do_launches_nothing(backend):
    pages, none = np.zeros((2, 256), np.uint8), np.zeros(0, np.int32)
    cuda.copy_pages(pages, none, none, backend=backend)
    kv = Pages.make("float32", 2, 4, 1, 16, 16)
    rows = np.zeros((0, 1, 16), np.float32)
    cuda.write_kv(rows, rows, kv.k, kv.v, np.zeros(0, np.int64), backend=backend)
    case = Case([], [])
    assert case.run(backend).shape == (0, 4, 16)
    assert backend.launched == []


# ---- what is refused ----

REFUSED = {
    "q .* float64": {"q": np.zeros((1, 4, 16))},
    r"k has shape .* 32": {"q": np.zeros((1, 4, 32), np.float32)},
    "3 query heads": {"q": np.zeros((1, 3, 16), np.float32)},
    "last axis must be adjacent": {"q": np.zeros((1, 4, 32), np.float32)[..., ::2]},
    "block_table is int64": {"block_table": np.zeros((1, 1), np.int64)},
    "seq_lens has shape": {"seq_lens": np.zeros(2, np.int32)},
    "query_start_loc has shape": {"query_start_loc": np.zeros(1, np.int32)},
    "v_dim is 8": {"v_dim": 8},
    "v_dim is None": {"v": None},
    "window is 0": {"window": 0},
    "soft_cap is -1": {"soft_cap": -1.0},
    "int8 pages need scales": {"k": np.zeros((2, 4, 2, 16), np.int8), "v": np.zeros((2, 4, 2, 16), np.int8)},
    "only they have them": {"k_scale": np.zeros((2, 4, 2), np.float16)},
    "sinks has shape": {"sinks": np.zeros(2, np.float32)},
    "out is float16": {"out": np.zeros((1, 4, 16), np.float16)},
    "both classes": {"small": (np.zeros((2, 4, 2, 16), np.uint8), None, None, None)},
    "at most 576": {k: np.zeros((1, 4, 2, 600)[4 - n :], np.float32) for k, n in (("k", 4), ("v", 4))}
    | {"q": np.zeros((1, 4, 600), np.float32)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(backend, message):
    good = {
        "q": np.zeros((1, 4, 16), np.float32),
        "k": np.zeros((2, 4, 2, 16), np.float32),
        "v": np.zeros((2, 4, 2, 16), np.float32),
        "block_table": np.ones((1, 1), np.int32),
        "seq_lens": np.ones(1, np.int32),
        "query_start_loc": np.array([0, 1], np.int32),
    }
    with pytest.raises(InvalidArgument, match=message):
        cuda.paged_attention(**(good | REFUSED[message]), backend=backend)
    assert backend.launched == []


def test_writing_and_copying_refuse(backend):
    kv = Pages.make("float32", 2, 4, 1, 16, 16)
    rows, slots = np.zeros((2, 1, 16), np.float32), np.zeros(2, np.int64)
    for changed, message in [
        ({"slot_mapping": slots.astype(np.int32)}, "slot_mapping is int32"),
        ({"slot_mapping": slots[:1]}, "slot_mapping has shape"),
        ({"v_new": None}, "together"),
        ({"k_new": rows.astype(np.int8)}, "k_new is int8"),
        ({"v_new": rows[:, :, :8]}, "v_new has shape"),
    ]:
        good = {"k_new": rows, "v_new": rows, "k": kv.k, "v": kv.v, "slot_mapping": slots}
        with pytest.raises(InvalidArgument, match=message):
            cuda.write_kv(**(good | changed), backend=backend)
    pages, list32 = np.zeros((4, 256), np.uint8), np.zeros(2, np.int32)
    with pytest.raises(InvalidArgument, match="one dtype"):
        cuda.copy_pages(pages, list32, list32.astype(np.int64), backend=backend)
    with pytest.raises(InvalidArgument, match="out has shape"):
        cuda.gather_pages(pages, list32, pages, backend=backend)
    with pytest.raises(InvalidArgument, match="uint8"):
        cuda.copy_pages(pages.view(np.int8), list32, list32, backend=backend)
    assert backend.launched == []


# ---- numbers on the device, in debug mode ----


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("KVALLOC_DEBUG_KERNELS", "1")


def test_a_good_batch_passes_debug_mode(backend, debug):
    Case(*MIXED, kind="float16", small="int8").check(backend)
    Case(*MIXED, released=OPTIONS["window"][1]).check(backend, window=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.table.__setitem__((3, 1), 99), r"block_table\[3, 1\] is 99; it can be 0 to 20"),
        (lambda c: c.table.__setitem__((0, 0), -1), r"block_table\[0, 0\] is -1"),
        (lambda c: c.lengths.__setitem__(0, 100), r"seq_lens\[0\] is 100, with 1 .* room for 32"),
        (lambda c: c.lengths.__setitem__(3, 5), r"seq_lens\[3\] is 5, with 7"),
        (lambda c: c.lengths.__setitem__(1, -1), r"seq_lens\[1\] is -1"),
        (lambda c: c.starts.__setitem__(6, 90), "at most 17"),
        (lambda c: c.starts.__setitem__(2, 0), "must go up"),
    ],
)
def test_a_bad_batch_is_refused_in_debug_mode(backend, debug, change, message):
    case = Case(*MIXED)
    change(case)
    with pytest.raises(InvalidArgument, match=message):
        case.run(backend)
    assert backend.launched == []


def test_bad_slots_and_frames_are_refused_in_debug_mode(backend, debug):
    kv, pages = Pages.make("float32", 2, 4, 1, 16, 16), np.zeros((4, 256), np.uint8)
    small = Pages.make("int8", 2, 4, 1, 16, 16)
    rows, two, one = np.zeros((2, 1, 16), np.float32), np.array([1, 2], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(InvalidArgument, match=r"slot_mapping\[1\] is 8; it can be -1 to 7"):
        cuda.write_kv(rows, rows, kv.k, kv.v, np.array([7, 8]), backend=backend)
    for bad in ([1, 4], [-2, 1]):
        with pytest.raises(InvalidArgument, match=r"(src|dst)\[\d\] is (4|-2); it can be -1 to 3"):
            cuda.copy_pages(pages, two, np.array(bad, np.int32), backend=backend)
        with pytest.raises(InvalidArgument, match=r"src\[\d\]"):
            cuda.gather_pages(pages, np.array(bad), np.zeros((2, 256), np.uint8), backend=backend)
    with pytest.raises(InvalidArgument, match=r"dst\[1\] is 2"):
        cuda.quantise_pages(kv.k, kv.v, one, small.keys, two, backend=backend)
    assert backend.launched == []


# ---- far offsets ----

FAR = """
import mmap, sys
from pathlib import Path
import numpy as np
from cuda_on_cpu import CpuBackend
from kv_formats import Pages, attend
from kvalloc.kernels import cuda
from paged_cases import MIXED, Case

backend = CpuBackend(Path(sys.argv[1]))
old, new = sys.argv[2:4]
backend.change = lambda text: text.replace(old, new)
frames, page_bytes = 4200, 1 << 20  # page-major: pages of 1 MiB, 2.2e9 elements of two bytes
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux's MAP_NORESERVE: only what is touched
memory = mmap.mmap(-1, frames * page_bytes, flags=private)
arena = np.frombuffer(memory, np.uint8).reshape(frames, page_bytes)
k, v = (
    np.ndarray((frames, 4, 2, 16), np.float16, arena, offset, (page_bytes, 64, 32, 2))
    for offset in (4096, 8192)
)
rng = np.random.default_rng(0)
rows = rng.standard_normal((2, 6, 2, 16)).astype(np.float16)
table = np.array([[frames - 1, frames - 3]], np.int32)
slots = np.array([(frames - 1) * 4 + i for i in range(4)] + [(frames - 3) * 4 + i for i in range(2)])
cuda.write_kv(rows[0], rows[1], k, v, slots, backend=backend)
assert (k[frames - 1] == rows[0, :4]).all() and (v[frames - 3, :2] == rows[1, 4:]).all()
cuda.copy_pages(arena, np.array([frames - 1, frames - 3]), np.array([frames - 2, 1]), backend=backend)
assert (arena[frames - 2] == arena[frames - 1]).all() and (arena[1] == arena[frames - 3]).all()
q = rng.standard_normal((3, 4, 16)).astype(np.float32)
for first, count in ((0, 1), (1, 2)):  # a decode row, a prefill chunk
    starts, lengths = np.array([0, count], np.int32), np.array([6], np.int32)
    out = cuda.paged_attention(q[first : first + count], k, v, table, lengths, starts, backend=backend)
    for i in range(count):
        right = attend(q[first + i], *rows.astype(np.float64), 6 - count + i)
        np.testing.assert_allclose(out[i], right, rtol=1e-5, atol=1e-5)
print("right")
"""


@pytest.mark.parametrize("narrow", [False, True], ids=["as-it-is", "32-bit-offsets"])
def test_pools_beyond_2_31_elements(built, narrow):
    change = (
        ["return f * frame + t * token", "return (int)f * (int)frame + t * token"] if narrow else ["", ""]
    )
    support = str(Path(__file__).parents[1] / "support")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {support!r})\n{FAR}",
        str(built),
        *change,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if narrow:
        assert done.returncode == -signal.SIGSEGV, done.stderr
    else:
        assert done.stdout.strip() == "right", done.stderr


def test_import_takes_no_cupy():
    code = "import sys, kvalloc.kernels.cuda; assert not {'cupy', 'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

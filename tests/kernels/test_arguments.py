"""What the entry points refuse, and how they say so. Nothing is written then."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import kvalloc  # noqa: E402
from kvalloc.kernels import check  # noqa: E402
from kvalloc.kernels.copy import copy_pages, gather_pages, scatter_pages  # noqa: E402
from kvalloc.kernels.decode import MAX_SPLITS, Pages, choose_splits, choose_tiles, paged_decode  # noqa: E402
from kvalloc.kernels.device import Card  # noqa: E402
from kvalloc.kernels.quantise import convert_pages  # noqa: E402
from kvalloc.kernels.values import split_dim  # noqa: E402
from kvalloc.kernels.write import write_kv  # noqa: E402
from triton_cases import Case, compiled, interpreted, page_major, quiet  # noqa: E402

pytestmark = quiet

SMALL = {"lens": (3, 17), "k_dim": 16, "v_dim": 16}


@compiled
def test_the_cpu_is_refused_where_kernels_are_compiled():
    case = Case(**SMALL).build()
    with pytest.raises(
        kvalloc.InvalidArgument, match=r"need tensors on a CUDA device.*kvalloc.kernels.reference"
    ):
        paged_decode(*case.args, **case.kwargs)


def changed(case, **changes):
    names = ["q", "k", "v", "block_table", "seq_lens"]
    given = dict(zip(names, case.args, strict=True)) | case.kwargs
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    return [given.pop(name) for name in names], given


@interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q: q[0]}, r"q: must be \[rows, heads, 16\], got \[4, 16\]"),
        ({"q": lambda q: q[..., :8]}, r"q: must be \[rows, heads, 16\], got \[2, 4, 8\]"),
        ({"q": lambda q: q[:, :3]}, "3 heads are not a multiple of the 2 KV heads"),
        ({"q": lambda q: q.double()}, "q: must be float16, bfloat16 or float32, got torch.float64"),
        ({"q": lambda q: q.mT.contiguous().mT}, "q: the last dimension must be contiguous, its stride is 4"),
        ({"k": lambda k: k[0]}, r"k: must be \[frames, page_tokens, kv_heads, k_dim\]"),
        ({"k": lambda k: k.to(torch.int16)}, "k: pages of torch.int16 are not supported; use one of float32"),
        ({"k": lambda k: k.to(torch.int8)}, r"k: int8 pages need scales, float16 \(\d+, 16, 2\).*got none"),
        ({"k_scale": torch.ones(3)}, "k: pages of torch.float32 have no scales, but some were given"),
        ({"v": lambda v: v[:, :8]}, r"v: must be \[\d+, 16, 2, 16\]"),
        ({"v": lambda v: v.half()}, "v: is torch.float16, but k is torch.float32"),
        ({"v": None}, "without v, v_dim must say how many of K's 16 values are V; got None"),
        ({"v": None, "v_dim": 17}, "without v, v_dim must say"),
        ({"v_dim": 8}, "v_dim 8 is for a latent; V has 16 values"),
        ({"block_table": lambda t: t.long()}, "block_table: must be torch.int32, got torch.int64"),
        ({"block_table": lambda t: t[:1]}, r"block_table: must be \[2, max_pages\], got \[1, 3\]"),
        ({"seq_lens": lambda n: n[:1]}, r"seq_lens: must be \[2\], got \[1\]"),
        ({"seq_lens": lambda n: n.float()}, "seq_lens: must be torch.int32, got torch.float32"),
        ({"seq_lens": lambda n: n.to("meta")}, "seq_lens: is on meta, the others are on cpu"),
        ({"sinks": torch.zeros(3)}, r"sinks: must be \[4\], got \[3\]"),
        ({"out": torch.zeros(2, 4, 8)}, r"out: must be \[2, 4, 16\], got \[2, 4, 8\]"),
        ({"out": torch.zeros(2, 4, 16).half()}, "out: must be torch.float32 as q is, got torch.float16"),
        ({"window": 0}, "window must be above 0, or None; got 0"),
        ({"window": 4, "chunk": 4}, "window and chunk exclude each other"),
        ({"soft_cap": float("nan")}, "soft_cap must be above 0"),
        ({"num_splits": 0}, f"num_splits must be 1 to {MAX_SPLITS}, got 0"),
        ({"num_splits": 65}, "num_splits must be 1 to 64, got 65"),
        ({"max_len": 49}, "max_len 49 is more than the block table shows: 3 pages of 16 tokens"),
        ({"small": Pages(torch.zeros(4, 16, 2, 16), None)}, "either both classes have v, or none"),
        (
            {"small": Pages(torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 16))},
            r"small.k: must be \[frames, 16, 2, 16\]",
        ),
    ],
)
def test_decode_refuses(changes, message):
    args, kwargs = changed(Case(**SMALL).build(), **changes)
    with pytest.raises(kvalloc.InvalidArgument, match=message):
        paged_decode(*args, **kwargs)


@interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_new": lambda x: x[:, :1]}, r"k_new: must be \[tokens, 2, 16\], got \[3, 1, 16\]"),
        ({"k_new": lambda x: x.int()}, "k_new: must be float16, bfloat16 or float32, got torch.int32"),
        ({"v_new": lambda x: x[:2]}, r"v_new: must be \[3, 2, 16\], got \[2, 2, 16\]"),
        ({"v_new": None}, "v_new and v go together"),
        ({"slot_mapping": lambda s: s.int()}, "slot_mapping: must be torch.int64, got torch.int32"),
        ({"slot_mapping": lambda s: s[:2]}, r"slot_mapping: must be \[3\], got \[2\]"),
        ({"slot_mapping": lambda s: s.to("meta")}, "slot_mapping: is on meta, the others are on cpu"),
    ],
)
def test_write_refuses(changes, message):
    pages, arena = page_major(torch.float16, 3, 16, 2, 16, 16)
    before = arena.clone()
    given = {"k_new": torch.zeros(3, 2, 16), "v_new": torch.zeros(3, 2, 16), "k": pages.k, "v": pages.v}
    given |= {"slot_mapping": torch.tensor([16, 17, 18])}
    given |= {name: change(given[name]) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(kvalloc.InvalidArgument, match=message):
        write_kv(**given)
    assert torch.equal(arena, before)


PAGES = torch.zeros(8, 512, dtype=torch.uint8)


@interpreted
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: copy_pages(PAGES, [1], [8]), r"destinations\[0\] is frame 8, but there are 8"),
        (lambda: copy_pages(PAGES, [1, -1, -2], [2, 3, 4]), r"sources\[1\] is frame -1.*\(2 such numbers\)"),
        (
            lambda: copy_pages(PAGES, torch.ones(1, device="meta"), [3]),
            "sources: are on meta, the pages on cpu",
        ),
        (lambda: copy_pages(PAGES, [1, 2], [3]), "2 sources, but 1 destinations"),
        (lambda: copy_pages(PAGES, [1, 2], [3, 3]), "frame 3 is a destination twice"),
        (lambda: copy_pages(PAGES, [1, 2], [3, 1]), "frame 1 is a source and a destination"),
        (
            lambda: copy_pages(PAGES, [1.5], [3]),
            "sources: must be whole numbers in one dimension, got float64",
        ),
        (lambda: copy_pages(PAGES.int(), [1], [3]), "pages: must be uint8, got torch.int32"),
        (lambda: copy_pages(PAGES[:, :24], [1], [3]), "pages: its page_bytes, 24, must be a multiple of 16"),
        (lambda: copy_pages(PAGES[:, 8:264], [1], [3]), "pages: its address, .* must be a multiple of 16"),
        (lambda: copy_pages(PAGES[0], [1], [3]), r"pages: must be \[frames, page_bytes\], got \[512\]"),
        (lambda: gather_pages(PAGES, [9]), r"frames\[0\] is frame 9, but there are 8"),
        (lambda: gather_pages(PAGES, [1, 2], PAGES[:1]), "out: has 1 rows, 2 are needed"),
        (lambda: gather_pages(PAGES, [1], PAGES.to("meta")), "out: is on meta, the others are on cpu"),
        (lambda: scatter_pages(PAGES.clone(), [1, 1], PAGES), "frame 1 is a destination twice"),
        (lambda: scatter_pages(PAGES[:, :256], [1], PAGES), r"staging: must be \[n, 512\], got \[8, 256\]"),
    ],
)
def test_copies_refuse(call, message):
    with pytest.raises(kvalloc.InvalidArgument, match=message):
        call()
    assert not PAGES.any()


@interpreted
def test_conversions_refuse():
    big, _ = page_major(torch.float16, 4, 16, 2, 16, 16)
    small, _ = page_major(torch.int8, 3, 16, 2, 16, 16)
    with pytest.raises(kvalloc.InvalidArgument, match=r"targets\[0\] is frame 3, but there are 3"):
        convert_pages(big, [3], small, [3])
    with pytest.raises(kvalloc.InvalidArgument, match="frame 1 is a destination twice"):
        convert_pages(big, [1, 2], small, [1, 1])
    with pytest.raises(kvalloc.InvalidArgument, match="2 sources, but 1 targets"):
        convert_pages(big, [1, 2], small, [1])
    with pytest.raises(kvalloc.InvalidArgument, match=r"target.k: int8 pages need scales"):
        convert_pages(big, [1], small._replace(k_scale=None), [1])
    with pytest.raises(kvalloc.InvalidArgument, match="either both classes have v, or none"):
        convert_pages(big, [1], small._replace(v=None), [1])
    with pytest.raises(kvalloc.InvalidArgument, match=r"target.v: must be \[3, 16, 2, 16\]"):
        convert_pages(big, [1], small._replace(v=small.v[..., :8]), [1])


@interpreted
@pytest.mark.parametrize(
    ("table", "lens", "message"),
    [
        ([[1, 99]], [17], r"block_table\[0, 1\] is 99: must be 0 to 3, and there is no small class"),
        ([[-1, 1]], [1], r"block_table\[0, 0\] is -1: must be 0 to 3"),
        ([[1, 2]], [33], r"seq_lens\[0\] is 33: a row of block_table shows 0 to 32 tokens"),
        ([[1, 2]], [-1], r"seq_lens\[0\] is -1"),
    ],
)
def test_debug_mode_looks_at_page_numbers(monkeypatch, table, lens, message):
    monkeypatch.setattr(check, "DEBUG", True)
    k = torch.zeros(4, 16, 1, 16)
    with pytest.raises(kvalloc.InvalidArgument, match=message):
        paged_decode(
            torch.zeros(1, 1, 16),
            k,
            k,
            torch.tensor(table, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            scale=1.0,
        )


@interpreted
def test_debug_mode_looks_only_at_what_is_read(monkeypatch):
    monkeypatch.setattr(check, "DEBUG", True)
    for case in (
        Case(lens=(0, 40), window=16),
        Case(lens=(40,), small=torch.int8),
        Case(lens=(40,), chunk=16),
    ):
        case.build()
        table = case.args[3]
        table[:, -1] = 10_000  # beyond every length
        if case.window or case.chunk:
            table[-1, 0] = 10_000  # before the window
        case.check(paged_decode)


@interpreted
def test_debug_mode_looks_at_slots(monkeypatch):
    monkeypatch.setattr(check, "DEBUG", True)
    pages, arena = page_major(torch.float16, 3, 16, 1, 16, 16)
    before, new = arena.clone(), torch.zeros(2, 1, 16)
    with pytest.raises(
        kvalloc.InvalidArgument, match=r"slot_mapping\[1\] is 48: must be -1, or below 48 \(3 frames"
    ):
        write_kv(new, new, pages.k, pages.v, torch.tensor([-1, 48]))
    assert torch.equal(arena, before)


# -- the shape of a launch -----------------------------------------------------------------------------------

H200 = Card(90, 132, 227 << 10)


@pytest.mark.parametrize(
    ("programs", "longest", "mean", "splits"),
    [
        (8, 32_768, 32_768, 64),  # one long request fills the card
        (1024, 32_768, 32_768, 1),  # many do anyway
        (8, 100, 100, 1),  # nothing to split
        (8, 1024, 1024, 8),  # two tiles a stretch at least
        (512, 131_072, 3_000, 46),  # one long request among short ones
        (8, 0, 0, 1),
    ],
)
def test_splits(programs, longest, mean, splits):
    assert choose_splits(programs, longest, mean, 64, H200.sms) == splits


@pytest.mark.parametrize(
    "card", [H200, Card(80, 108, 163 << 10), Card(86, 84, 99 << 10), Card(120, 170, 99 << 10)]
)
@pytest.mark.parametrize(
    ("group", "k_dim", "v_dim", "size"),
    [
        (4, 128, 128, 2),
        (4, 128, 128, 1),
        (8, 64, 64, 2),
        (2, 256, 256, 2),
        (128, 576, 0, 2),
        (16, 192, 128, 4),
    ],
)
def test_tiles_fit_every_card(card, group, k_dim, v_dim, size):
    tiles = choose_tiles(card, group, k_dim, v_dim, size)
    buffers = tiles.stages // 2
    assert buffers >= 1
    assert buffers * tiles.tokens * (k_dim + v_dim) * size + tiles.heads * k_dim * 2 <= card.shared


def test_values_of_a_head_in_two_parts():
    assert split_dim(128) == (128, 0, 128, 0)
    assert split_dim(576) == (512, 64, 512, 64)
    assert split_dim(96) == (64, 32, 64, 32)
    assert split_dim(72, 40) == (40, 32, 64, 32)
    assert split_dim(8) == (8, 0, 16, 0)

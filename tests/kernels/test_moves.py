"""Writing, copying and converting pages, interpreted. What is not written stays as it was, bit by bit."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvalloc.kernels import reference  # noqa: E402
from kvalloc.kernels.copy import copy_pages, gather_pages, scatter_pages  # noqa: E402
from kvalloc.kernels.quantise import convert_pages  # noqa: E402
from kvalloc.kernels.write import write_kv  # noqa: E402
from triton_cases import get, interpreted, page_major, put, quiet  # noqa: E402

pytestmark = [interpreted, *quiet]

F32, F16, BF16, FP8, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
ALL_E4M3 = torch.arange(256, dtype=torch.uint8).view(FP8).float()


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def tokens(n, heads, dim, seed=0, dtype=F32):
    return (3 * torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed))).to(dtype)


# -- write ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize(
    ("new", "stored", "heads", "k_dim", "v_dim"),
    [
        (F32, F32, 2, 32, 32),
        (F16, F16, 3, 24, 16),
        (BF16, BF16, 1, 64, 64),
        (F32, BF16, 2, 16, 16),
        (F16, FP8, 2, 32, 32),
        (F32, INT8, 3, 24, 40),
        (BF16, INT8, 2, 32, 32),
        (F32, F16, 1, 48, 0),
        (F32, INT8, 1, 48, 0),
    ],
)
def test_write(new, stored, heads, k_dim, v_dim, page_tokens):
    pages, arena = page_major(stored, 6, page_tokens, heads, k_dim, v_dim)
    expected, expected_arena = page_major(stored, 6, page_tokens, heads, k_dim, v_dim)
    k = tokens(6, heads, k_dim, 1, new)
    v = tokens(6, heads, v_dim, 2, new) if v_dim else None
    slots = torch.tensor([1, 2, 3, 5, 5, -1]) * page_tokens + torch.tensor([0, 1, page_tokens - 1, 7, 8, 0])
    slots[-1] = -1
    write_kv(k, v, pages.k, pages.v, slots, pages.k_scale, pages.v_scale)
    live = slots[:-1]
    put(
        expected,
        live // page_tokens,
        live % page_tokens,
        k[:-1].float(),
        None if v is None else v[:-1].float(),
    )
    if stored == BF16 and new == F32:  # the interpreter truncates here
        for got, want in zip(pages[:2], expected[:2], strict=True):
            torch.testing.assert_close(got, want, rtol=2**-7, atol=0, equal_nan=True)
    else:
        assert torch.equal(arena, expected_arena)


def test_write_many_heads_of_wide_values():
    pages, arena = page_major(F16, 3, 16, 20, 256, 256)
    expected, expected_arena = page_major(F16, 3, 16, 20, 256, 256)
    k, v = tokens(2, 20, 256, 1), tokens(2, 20, 256, 2)
    write_kv(k, v, pages.k, pages.v, torch.tensor([17, 40]))
    put(expected, torch.tensor([1, 2]), torch.tensor([1, 8]), k, v)
    assert torch.equal(arena, expected_arena)


def test_write_nothing():
    pages, arena = page_major(F16, 2, 16, 1, 16, 16)
    before = arena.clone()
    new = tokens(3, 1, 16)
    write_kv(new, new, pages.k, pages.v, torch.tensor([-1, -1, -1]))
    write_kv(new[:0], new[:0], pages.k, pages.v, torch.tensor([], dtype=torch.int64))
    assert torch.equal(arena, before)


def test_new_tokens_may_be_a_strided_view():
    pages, _ = page_major(F32, 2, 16, 2, 16, 16)
    fused = tokens(3, 8, 16)
    write_kv(fused[:, 2:4], fused[:, 4:6], pages.k, pages.v, torch.tensor([16, 17, 18]))
    assert torch.equal(pages.k[1, :3], fused[:, 2:4])
    assert torch.equal(pages.v[1, :3], fused[:, 4:6])


def test_fp8_rounds_as_torch_does():
    """Every value, every middle between two, and their neighbours; beyond 448 it saturates, NaN stays."""
    values = ALL_E4M3[:127]
    middles = (values[1:] + values[:-1]) / 2
    edges = torch.cat([values, middles, torch.nextafter(middles, torch.tensor(0.0))])
    edges = torch.cat(
        [edges, torch.nextafter(middles, torch.tensor(1e9)), torch.tensor([449.0, 1e30, torch.inf])]
    )
    edges = torch.cat([edges, -edges, torch.tensor([torch.nan])])
    edges = torch.nn.functional.pad(edges, (0, -len(edges) % 16)).view(-1, 1, 16)
    pages, _ = page_major(FP8, 2 + len(edges) // 16, 16, 1, 16, 0)
    slots = torch.arange(len(edges)) + 16
    write_kv(edges, None, pages.k, None, slots)
    got = pages.k.view(torch.uint8)[slots // 16, slots % 16]
    want = edges.clamp(-448, 448).to(FP8).view(torch.uint8)
    nan = edges.isnan()
    assert torch.equal(got[~nan], want[~nan])
    assert (got[nan] & 0x7F == 0x7F).all()


def test_int8_of_odd_values():
    rows = torch.zeros(6, 1, 16)
    rows[1, 0, 3] = torch.nan
    rows[2, 0, 0] = torch.inf
    rows[3] = 1e-9
    rows[4, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # ties go to even
    rows[5, 0, :2] = torch.tensor([6e4 * 127 * 3, -1.0])
    pages, _ = page_major(INT8, 2, 16, 1, 16, 0)
    write_kv(rows, None, pages.k, None, torch.arange(16, 22), pages.k_scale)
    k = get(pages.k, pages.k_scale, torch.ones(6, dtype=torch.int64), torch.arange(6))
    assert not k[0].any()
    assert not k[3].any()
    assert k[1].isnan().all()
    assert k[4, 0, :4].tolist() == [127.0, 0.0, 2.0, -2.0]
    assert pages.k_scale[1, 5] == 65504


# -- copies --------------------------------------------------------------------------------------------------


def rows_of(frames, size, seed=0):
    make = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, size), dtype=torch.uint8, generator=make)


@pytest.mark.parametrize("size", [256, 8192, 8448 + 256])
@pytest.mark.parametrize("as_type", [list, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)])
def test_copy_pages(size, as_type):
    pages = rows_of(9, size)
    before = pages.clone()
    copy_pages(pages, as_type([3, 4, 1]), as_type([7, 2, 8]))
    before[[7, 2, 8]] = before[[3, 4, 1]]
    assert torch.equal(pages, before)


def test_copy_of_one_layers_part():
    """Layer-major: a page is a row of each layer's region."""
    arena = rows_of(12, 512)
    before = arena.clone()
    part = arena.view(4, 3, 512)[:, 1]
    copy_pages(part, [1], [3])
    before.view(4, 3, 512)[3, 1] = before.view(4, 3, 512)[1, 1]
    assert torch.equal(arena, before)


def test_swap_out_and_in():
    pages = rows_of(10, 4096)
    before = pages.clone()
    out = gather_pages(pages, [5, 2, 9])
    assert torch.equal(out, before[[5, 2, 9]])
    staging = torch.zeros(5, 4096, dtype=torch.uint8)
    kept = gather_pages(pages, torch.tensor([1, 8]), staging)
    assert kept.data_ptr() == staging.data_ptr()
    assert torch.equal(kept, before[[1, 8]])
    assert not staging[2:].any()
    scatter_pages(out, [3, 4, 6], pages)
    before[[3, 4, 6]] = before[[5, 2, 9]]
    assert torch.equal(pages, before)


def test_no_pages():
    pages = rows_of(3, 256)
    before = pages.clone()
    copy_pages(pages, [], [])
    scatter_pages(pages.clone(), [], pages)
    assert gather_pages(pages, []).shape == (0, 256)
    assert torch.equal(pages, before)


# -- whole pages into another class --------------------------------------------------------------------------


@pytest.mark.parametrize("small", [FP8, INT8])
@pytest.mark.parametrize(
    ("big", "heads", "k_dim", "v_dim"), [(F32, 2, 32, 32), (F16, 3, 24, 16), (BF16, 1, 48, 0)]
)
def test_quantise_and_back(big, small, heads, k_dim, v_dim):
    source, _ = page_major(big, 5, 16, heads, k_dim, v_dim)
    k, v = tokens(32, heads, k_dim, 1), tokens(32, heads, v_dim, 2)
    frames, within = torch.arange(32) // 16 * 2 + 1, torch.arange(32) % 16
    put(source, frames, within, k, v)
    packed, packed_arena = page_major(small, 4, 16, heads, k_dim, v_dim)
    wanted, wanted_arena = page_major(small, 4, 16, heads, k_dim, v_dim)
    convert_pages(source, [1, 3], packed, [3, 1])
    reference.convert_pages(source, [1, 3], wanted, [3, 1])
    assert torch.equal(packed_arena, wanted_arena)

    back, _ = page_major(big, 5, 16, heads, k_dim, v_dim)
    convert_pages(packed, torch.tensor([3, 1]), back, torch.tensor([4, 2]))
    reference.convert_pages(packed, [3, 1], source, [4, 2])
    for mine, theirs in [(back.k, source.k), (back.v, source.v)][: 2 if v_dim else 1]:
        torch.testing.assert_close(mine[[2, 4]], theirs[[2, 4]], rtol=2**-7 if big == BF16 else 0, atol=0)
    assert bits(back.k[[1, 3]]).unique().tolist() == [255]  # the others are as they were


def test_every_fp8_value_is_read():
    pages, _ = page_major(FP8, 3, 16, 1, 16, 0)
    pages.k.view(torch.uint8)[1] = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    plain, _ = page_major(F32, 3, 16, 1, 16, 0)
    convert_pages(pages, [1], plain, [2])
    torch.testing.assert_close(plain.k[2].flatten(), ALL_E4M3, rtol=0, atol=0, equal_nan=True)

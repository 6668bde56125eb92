"""The Triton kernels on a card, against the reference: what the interpreter showed, for compiled code."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvalloc.kernels import reference  # noqa: E402
from kvalloc.kernels.copy import copy_pages, gather_pages, scatter_pages  # noqa: E402
from kvalloc.kernels.decode import Pages, paged_decode  # noqa: E402
from kvalloc.kernels.device import INTERPRETED  # noqa: E402
from kvalloc.kernels.quantise import convert_pages  # noqa: E402
from kvalloc.kernels.write import write_kv  # noqa: E402
from triton_cases import Case, on_cpu, page_major, quiet  # noqa: E402

if INTERPRETED or not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset", allow_module_level=True)

pytestmark = quiet

F32, F16, BF16, FP8, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
LENS = (0, 1, 15, 16, 17, 129, 1000, 2049)


def cuda(lens=LENS, **options):
    return Case(lens=lens, device="cuda", **options)


CASES = {
    "fp32": cuda(heads=9, kv_heads=3, k_dim=64, v_dim=64),
    "fp16": cuda(heads=32, kv_heads=8, k_dim=128, v_dim=128, q=F16, kv=F16),
    "bf16": cuda(heads=32, kv_heads=8, k_dim=128, v_dim=128, q=BF16, kv=BF16),
    "bf16, one split": cuda(heads=32, kv_heads=8, k_dim=128, v_dim=128, q=BF16, kv=BF16, num_splits=1),
    "bf16, 64 splits": cuda(heads=32, kv_heads=8, k_dim=128, v_dim=128, q=BF16, kv=BF16, num_splits=64),
    "bf16, page of 32": cuda(heads=8, kv_heads=2, k_dim=128, v_dim=128, q=BF16, kv=BF16, page_tokens=32),
    "fp8": cuda(heads=32, kv_heads=8, k_dim=128, v_dim=128, q=F16, kv=FP8),
    "fp8, bf16 queries": cuda(heads=32, kv_heads=8, k_dim=128, v_dim=128, q=BF16, kv=FP8),
    "int8": cuda(heads=32, kv_heads=8, k_dim=128, v_dim=128, q=BF16, kv=INT8),
    "some pages int8": cuda(heads=8, kv_heads=2, k_dim=128, v_dim=128, q=BF16, kv=BF16, small=INT8),
    "some pages fp8": cuda(heads=8, kv_heads=2, k_dim=128, v_dim=128, q=F16, kv=F16, small=FP8),
    "window, sinks": cuda(heads=64, kv_heads=8, k_dim=64, v_dim=64, q=BF16, kv=BF16, window=128, sinks=True),
    "window, cap": cuda(
        heads=16, kv_heads=8, k_dim=256, v_dim=256, q=BF16, kv=BF16, window=512, soft_cap=50.0, loud=20
    ),
    "chunk": cuda(heads=40, kv_heads=8, k_dim=128, v_dim=128, q=BF16, kv=BF16, chunk=1024),
    "K wider than V": cuda(heads=16, kv_heads=4, k_dim=192, v_dim=128, q=BF16, kv=BF16),
    "96 values": cuda(heads=4, kv_heads=4, k_dim=96, v_dim=96, q=F16, kv=F16),
    "latent": cuda(latent=True, heads=128, kv_heads=1, k_dim=576, v_dim=512, q=BF16, kv=BF16),
    "latent fp8": cuda(latent=True, heads=16, kv_heads=1, k_dim=576, v_dim=512, q=BF16, kv=FP8),
    "loud": cuda(heads=8, kv_heads=2, k_dim=128, v_dim=128, q=F16, kv=F16, loud=300.0, num_splits=8),
}


@pytest.mark.parametrize("name", CASES)
def test_decode(name):
    CASES[name].check(paged_decode)


def test_decode_in_a_graph():
    """A captured step gives what a later one needs: new lengths, new pages, the same grid."""
    case = cuda(
        lens=(900, 33), heads=8, kv_heads=2, k_dim=128, v_dim=128, q=F16, kv=F16, num_splits=8
    ).build()
    out = paged_decode(*case.args, **case.kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(*case.args, **case.kwargs, out=out)
    _, _, _, table, lens = case.args
    lens.copy_(torch.tensor([64, 31], dtype=torch.int32))
    table[1, :2] = table[0, 1:3].clone()
    graph.replay()
    torch.testing.assert_close(out.cpu().float(), case.expected(), rtol=4e-3, atol=2e-3)


@pytest.mark.parametrize("stored", [F32, F16, BF16, FP8, INT8])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(8, 128, 128), (1, 576, 0), (3, 80, 64)])
def test_write(stored, heads, k_dim, v_dim):
    pages, _ = page_major(stored, 12, 16, heads, k_dim, v_dim, device="cuda")
    wanted = on_cpu(pages)
    k, v = (torch.randn(100, heads, dim, device="cuda").mul(3).to(BF16) for dim in (k_dim, v_dim))
    v = v if v_dim else None
    slots = torch.randperm(11 * 16, device="cuda")[:100] + 16
    slots[::7] = -1
    write_kv(k, v, pages.k, pages.v, slots, pages.k_scale, pages.v_scale)
    reference.write_kv(on_cpu(k), on_cpu(v), wanted.k, wanted.v, slots.cpu(), wanted.k_scale, wanted.v_scale)
    same(on_cpu(pages), wanted)


@pytest.mark.parametrize("small", [FP8, INT8])
@pytest.mark.parametrize("big", [F16, BF16, F32])
def test_quantise_and_back(big, small):
    shape = (20, 16, 8, 128, 128)
    source, packed = page_major(big, *shape, device="cuda")[0], page_major(small, *shape, device="cuda")[0]
    source.k.copy_(torch.randn(source.k.shape, device="cuda"))
    source.v.copy_(torch.randn(source.v.shape, device="cuda"))
    plain, wanted = on_cpu(source), on_cpu(packed)
    convert_pages(source, [1, 5, 19], packed, [7, 8, 2])
    reference.convert_pages(plain, [1, 5, 19], wanted, [7, 8, 2])
    same(on_cpu(packed), wanted)
    convert_pages(packed, [7, 2], source, [3, 4])
    reference.convert_pages(wanted, [7, 2], plain, [3, 4])
    same(on_cpu(source), plain)


def same(pages, wanted):
    """Equal bit by bit, NaN where nothing was written included."""
    for got, want in zip(pages, wanted, strict=True):
        if want is not None:
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def test_copies_and_swap():
    pages = torch.randint(0, 256, (64, 1 << 20), dtype=torch.uint8, device="cuda")
    before = pages.clone()
    sources, targets = list(range(1, 21)), list(range(60, 40, -1))
    copy_pages(pages, sources, targets)
    before[targets] = before[sources]
    assert torch.equal(pages, before)

    host = torch.empty(20, 1 << 20, dtype=torch.uint8, pin_memory=True)
    host.copy_(gather_pages(pages, targets), non_blocking=True)
    torch.cuda.synchronize()
    pages[targets] = 0
    scatter_pages(host.to("cuda", non_blocking=True), targets, pages)
    assert torch.equal(pages, before)


def test_f37_beyond_2_to_the_31_elements():
    page, frames = 1 << 20, 2300
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB free")
    arena = torch.zeros(frames * page, dtype=F16, device="cuda")
    views = [arena.as_strided((frames, 16, 2, 32), (page, 64, 32, 1), start) for start in (0, 16 * 64)]
    pages, far = Pages(*views), [2250, 2299]
    k, v = torch.randn(20, 2, 32, device="cuda").half(), torch.randn(20, 2, 32, device="cuda").half()
    slots = torch.tensor([far[t // 16] * 16 + t % 16 for t in range(20)], device="cuda")
    write_kv(k, v, pages.k, pages.v, slots)
    assert torch.equal(pages.k[far].flatten(0, 1)[:20], k)
    q = torch.randn(1, 4, 32, device="cuda")
    table = torch.tensor([far], dtype=torch.int32, device="cuda")
    out = paged_decode(
        q, pages.k, pages.v, table, torch.tensor([20], dtype=torch.int32, device="cuda"), scale=0.2
    )
    scores = torch.einsum("hgd,nhd->hgn", q[0].view(2, 2, 32), k.float()) * 0.2
    wanted = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v.float()).reshape(1, 4, 32)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)

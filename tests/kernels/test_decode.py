"""Paged decode, interpreted, against attention row by row; all that is not to be read is NaN."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvalloc.kernels.decode import paged_decode  # noqa: E402
from triton_cases import Case, interpreted, quiet  # noqa: E402

pytestmark = [interpreted, *quiet]

F32, F16, BF16, FP8, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8

CASES = {
    "lengths": Case(lens=(0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 129)),
    "lengths, page of 32": Case(lens=(0, 1, 31, 32, 33, 64, 65), page_tokens=32),
    "lengths, page of 1": Case(lens=(0, 1, 2, 9), page_tokens=1),
    "one split": Case(num_splits=1),
    "two splits": Case(lens=(0, 1, 300, 513), num_splits=2, k_dim=16, v_dim=16),
    "more splits than tiles": Case(lens=(0, 5, 300), num_splits=7, k_dim=16, v_dim=16),
    "one head": Case(heads=1, kv_heads=1),
    "as many KV heads": Case(heads=4, kv_heads=4),
    "three to one": Case(heads=9, kv_heads=3, k_dim=64, v_dim=64, lens=(1, 17, 40)),
    "seven to one": Case(heads=14, kv_heads=2),
    "sixteen to one": Case(heads=32, kv_heads=2, lens=(1, 17)),
    "forty to one": Case(heads=40, kv_heads=1, lens=(0, 33)),
    "96 values": Case(k_dim=96, v_dim=96, lens=(1, 17)),
    "80 values": Case(k_dim=80, v_dim=80, lens=(1, 17)),
    "K wider than V": Case(k_dim=48, v_dim=32, lens=(1, 17)),
    "8 values": Case(k_dim=8, v_dim=8, lens=(1, 17)),
    "window 1": Case(window=1),
    "window 16": Case(window=16),
    "window 17, splits": Case(window=17, num_splits=3),
    "window of more than a tile": Case(
        window=150, lens=(149, 150, 151, 320), k_dim=16, v_dim=16, num_splits=2
    ),
    "chunk 16": Case(chunk=16),
    "chunk 24": Case(chunk=24, lens=(0, 1, 23, 24, 25, 48, 49)),
    "soft cap": Case(soft_cap=5.0, loud=8),
    "soft cap 50, window, splits": Case(soft_cap=50.0, window=20, num_splits=2, loud=30),
    "sinks": Case(sinks=True, num_splits=1),
    "sinks, splits": Case(sinks=True, num_splits=3, lens=(0, 1, 150, 290), k_dim=16, v_dim=16),
    "sinks, window, grouped": Case(sinks=True, window=8, heads=8, q=F16, kv=F16),
    "latent": Case(latent=True, heads=20, kv_heads=1, k_dim=48, v_dim=32),
    "latent, rank of no power of two": Case(latent=True, heads=4, kv_heads=1, k_dim=72, v_dim=40),
    "latent 512 + 64": Case(
        latent=True, heads=16, kv_heads=1, k_dim=576, v_dim=512, lens=(0, 1, 40), q=BF16, kv=BF16
    ),
    "latent int8": Case(latent=True, heads=4, kv_heads=1, k_dim=48, v_dim=32, kv=INT8),
    "latent fp8, splits": Case(
        latent=True, heads=4, kv_heads=1, k_dim=48, v_dim=32, kv=FP8, num_splits=2, lens=(3, 300)
    ),
    "fp16": Case(q=F16, kv=F16),
    "bf16": Case(q=BF16, kv=BF16),
    "fp8": Case(q=F16, kv=FP8),
    "fp8, bf16 queries": Case(q=BF16, kv=FP8, lens=(1, 17)),
    "int8": Case(q=F16, kv=INT8),
    "int8, window, sinks": Case(q=BF16, kv=INT8, window=16, sinks=True),
    "fp32 queries, fp16 pages": Case(q=F32, kv=F16),
    "bf16 queries, fp32 pages": Case(q=BF16, kv=F32, lens=(1, 17)),
    "some pages int8": Case(small=INT8),
    "some pages fp8": Case(small=FP8, kv=BF16, q=BF16),
    "some pages int8, all of it": Case(
        small=INT8, kv=F16, q=F16, window=40, sinks=True, soft_cap=20.0, num_splits=2, heads=6
    ),
    "some pages int8, latent": Case(small=INT8, latent=True, heads=4, kv_heads=1, k_dim=48, v_dim=32),
    "pages given up": Case(given_up=(0, 2, 3), num_splits=1),
    "pages given up, of one token": Case(given_up=(1, 4), page_tokens=1, lens=(0, 1, 2, 9)),
    "pages given up, whole stretches of them": Case(
        given_up=range(1, 40), lens=(0, 5, 30, 700), num_splits=3, k_dim=16, v_dim=16
    ),
    "pages given up, all that a row has": Case(given_up=range(40), lens=(0, 30, 600), num_splits=3),
    "pages given up, all, sinks": Case(given_up=range(40), lens=(0, 30), num_splits=1, sinks=True),
    "pages given up, sinks, cap, splits": Case(
        given_up=range(1, 30), lens=(3, 20, 640), num_splits=3, k_dim=16, v_dim=16, sinks=True, soft_cap=5.0
    ),
    "pages given up, in a window": Case(given_up=(1, 3), window=40, lens=(17, 33, 70)),
    "pages given up, fp8": Case(given_up=(1,), q=F16, kv=FP8),
    "pages given up, int8": Case(given_up=(0, 3), q=F16, kv=INT8),
    "pages given up, others int8": Case(given_up=(2, 3), small=INT8, kv=F16, q=F16),
    "pages given up, others int8, splits": Case(
        given_up=range(2, 30), small=INT8, lens=(0, 20, 40, 640), num_splits=3, sinks=True, k_dim=16, v_dim=16
    ),
    "pages given up, latent": Case(
        given_up=(1, 2), latent=True, heads=4, kv_heads=1, k_dim=48, v_dim=32, small=FP8, num_splits=2
    ),
    "loud": Case(loud=300.0, num_splits=2, lens=(0, 1, 150, 290), k_dim=16, v_dim=16),
}


@pytest.mark.parametrize("name", CASES)
def test_decode(name):
    CASES[name].check(paged_decode)


def test_result_goes_where_it_is_wanted():
    case = Case(num_splits=2).build()
    wide = torch.full((len(case.lens), case.heads, 2 * case.v_dim), 7.0)
    out = wide[..., : case.v_dim]
    assert paged_decode(*case.args, **case.kwargs, out=out) is out
    torch.testing.assert_close(out, case.expected(), rtol=2e-5, atol=2e-5)
    assert (wide[..., case.v_dim :] == 7).all()


def test_queries_may_be_a_strided_view():
    case = Case().build()
    q, *rest = case.args
    fused = torch.randn(q.shape[0], 3 * q.shape[1], q.shape[2])
    fused[:, : q.shape[1]] = q
    out = paged_decode(fused[:, : q.shape[1]], *rest, **case.kwargs)
    torch.testing.assert_close(out, case.expected(), rtol=2e-5, atol=2e-5)


def test_nan_of_a_live_token_is_not_hidden():
    case = Case(lens=(20, 20)).build()
    _, _, v, table, _ = case.args
    v[table[0, 0], 3, 0, 0] = float("nan")
    out = paged_decode(*case.args, **case.kwargs)
    assert out[0, :2, 0].isnan().all()
    assert not out[1].isnan().any()


def test_no_rows():
    case = Case(lens=(3,)).build()
    q, k, v, table, lens = case.args
    assert paged_decode(q[:0], k, v, table[:0], lens[:0], **case.kwargs).shape == (0, 4, 32)

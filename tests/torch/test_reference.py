"""The reference against attention in float64 over what was written, and against numpy's encodings."""

import numpy as np
import pytest

import kvalloc
from store_contract import DIM, HEADS, KINDS, KV_HEADS, plain

torch = pytest.importorskip("torch")

from kvalloc.kernels import reference  # noqa: E402
from kvalloc.store.numpy_store import decode, encode, quantised  # noqa: E402

PAGE = 5


def pages(frames, dtype, dim=DIM, latent=False):
    """Return pages full of NaN."""
    k = torch.full((frames, PAGE, 1 if latent else KV_HEADS, dim), float("nan")).to(dtype)
    scale = torch.full(k.shape[:3], float("nan"), dtype=torch.float16) if dtype == torch.int8 else None
    copies = (None, None) if latent else (k.clone(), None if scale is None else scale.clone())
    return kvalloc.store.KVView(k, copies[0], scale, copies[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention(kind, dtype):
    random = np.random.default_rng(0)
    latent = kind == "latent"
    options = {"window": {"window": 7}, "chunked": {"chunk": 6}}.get(kind, {})
    group = kvalloc.LayerGroup(
        kind, kind, layers=1, kv_heads=1 if latent else KV_HEADS, k_dim=DIM, window=7 if options else None
    )
    if kind == "chunked":
        group = kvalloc.LayerGroup(kind, kind, layers=1, kv_heads=KV_HEADS, k_dim=DIM, window=6)
    lens, counts = (13, 1, 0, 8), (3, 1, 0, 8)
    view, small = pages(12, dtype, latent=latent), pages(9, torch.int8, latent=latent)
    frames = iter([4, 9, 2, 7, 1, 11])
    table = torch.zeros(4, 3, dtype=torch.int32)
    kept = []
    for row, length in enumerate(lens):
        k = random.standard_normal((length, group.kv_heads, DIM)).astype(np.float32)
        v = None if latent else random.standard_normal((length, group.kv_heads, DIM)).astype(np.float32)
        for page in range(-(-length // PAGE)):
            table[row, page] = next(frames)
        slots = [int(table[row, p // PAGE]) * PAGE + p % PAGE for p in range(length)]
        new = [None if x is None else torch.from_numpy(x) for x in (k, v)]
        reference.write_kv(*new, view.k, view.v, torch.tensor(slots), view.k_scale, view.v_scale)
        kept.append((k, k[..., :24] if latent else v))
    # The second page of row 0 lies in the small class, in frame 6.
    reference.convert_pages(view, [int(table[0, 1])], small, [6])
    table[0, 1] = ~6
    gone = np.arange(PAGE) if group.grows else ()  # the first page of rows 0 and 3 was given up
    if group.grows:
        table[[0, 3], 0] = 0
    q = random.standard_normal((12, HEADS, DIM)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(counts)])
    sinks = np.linspace(-1, 1, HEADS).astype(np.float32)
    got = reference.paged_attention(
        torch.from_numpy(q),
        view.k,
        view.v,
        table,
        torch.tensor(lens, dtype=torch.int32),
        torch.from_numpy(starts.astype(np.int32)),
        scale=0.2,
        soft_cap=3.0,
        sinks=torch.from_numpy(sinks),
        k_scale=view.k_scale,
        v_scale=view.v_scale,
        small=small,
        v_dim=24 if latent else None,
        **options,
    )
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        at = slice(starts[row], starts[row + 1])
        want = plain(
            q[at],
            *kept[row],
            group,
            range(length - count, length),
            scale=0.2,
            soft_cap=3.0,
            sinks=sinks,
            gone=gone if row in (0, 3) else (),
        )
        tolerance = {torch.float32: 2e-6}.get(dtype, 3e-2) if row else 3e-2
        np.testing.assert_allclose(got[at].numpy(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn"])
def test_numpy_and_torch_store_the_same_bits(name):
    random = np.random.default_rng(0)
    values = np.concatenate([random.standard_normal(4000) * 10.0**e for e in range(-6, 4)]).astype(np.float32)
    values = np.concatenate([values, [0, -0.0, np.nan, np.inf, -np.inf, 448, 463, 465, -1e9, 2**-9, 2**-10]])
    values = values.astype(np.float32)
    dtype = getattr(torch, name)
    stored, scale = reference.quantise(torch.from_numpy(values), dtype)
    assert scale is None
    bits = stored.view(torch.uint8 if dtype.itemsize == 1 else torch.uint16).numpy()
    mine = encode(values, name)
    number = ~np.isnan(values)
    assert (bits[number] == mine.view(bits.dtype)[number]).all()
    assert np.isnan(decode(mine, name)[~number]).all()
    np.testing.assert_array_equal(decode(mine, name)[number], reference.dequantise(stored).numpy()[number])


def test_numpy_and_torch_quantise_alike():
    random = np.random.default_rng(0)
    values = (random.standard_normal((300, 16)) * 10.0 ** random.integers(-6, 6, (300, 1))).astype(np.float32)
    values[0], values[1, 3], values[2, 3] = 0, np.nan, 1e9
    codes, scale = reference.quantise(torch.from_numpy(values), torch.int8)
    mine, my_scale = quantised(values)
    np.testing.assert_array_equal(codes.numpy(), mine)
    np.testing.assert_array_equal(scale.numpy(), my_scale)
    wide = reference.dequantise(codes, scale).numpy()
    assert np.isnan(wide[1]).all()
    # Half a step, and the rounding of the scale to 11 bits, where float16 has 11.
    step = my_scale.astype(np.float32)
    sound = (step >= 2**-14) & (step < 65504)
    assert sound.sum() > 150
    assert (np.abs(wide - values).max(-1)[sound] <= 0.57 * step[sound]).all()

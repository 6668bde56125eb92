"""Fault case F37: offsets above 2^31 elements, in memory of which little is ever touched."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

# A process of its own: an offset that overflows may end it.
CODE = """
    import numpy as np, torch, kvalloc
    from store_contract import Moves, copying, plain

    layers, heads, dim = {layers}, 32, 128
    spec = kvalloc.KVSpec.uniform(layers, heads, dim, dtype="float16", layout="{layout}")
    pool = kvalloc.Pool(spec, 9 << 29)
    pool.tenant("a")
    batch = pool.batch(1, 64)
    batch.add(pool.open("a", range(40)))
    batch.step()
    with kvalloc.TorchStore(pool) as store:
        frames = store.classes[0].frames
        # The last frames of the arena take the place of the first.
        table, slots = batch.block_table(), batch.slot_mapping()
        far = [frames - 1, frames - 3, frames - 2]
        for page, frame in enumerate(far):
            tokens = slice(page * 16, min(page * 16 + 16, 40))
            slots[tokens] = frame * 16 + np.arange(16)[: tokens.stop - tokens.start]
        table[0, :3] = far
        layer = layers - 1
        view = store.views(layer)
        assert view.k.storage_offset() + far[1] * view.k.stride(0) > 2**31, "the test is too small"
        random = np.random.default_rng(0)
        q, k, v = (random.standard_normal((40, heads, dim)).astype(np.float16) for _ in range(3))
        out = store.attend(layer, *(torch.from_numpy(x) for x in (q, k, v)), batch)
        want = plain(q, k, v, spec.groups[0], range(40))
        assert np.abs(out.float().numpy() - want).max() < 1e-2
        assert (view.k[far[1]] == torch.from_numpy(k[16:32])).all()
        store.copy(copying(batch, [0, far[1], frames - 9]))
        assert (view.k[frames - 9] == view.k[far[1]]).all()
        store.execute(Moves((0, 0, frames - 9, 0, 0, frames - 20)))
        assert (view.v[frames - 20] == torch.from_numpy(v[16:32])).all()
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.parametrize("layout", ["page_major", "layer_major"])
@pytest.mark.parametrize("layers", [2, 32])
def test_f37_offsets_are_64_bit(layers, layout):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE.format(layers=layers, layout=layout))],
        capture_output=True,
        text=True,
        check=False,
        env={**__import__("os").environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    if "OutOfMemory" in run.stderr:
        pytest.skip("needs 4.5 GiB of memory that may be taken")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1500, "MiB: only what is used should be touched"

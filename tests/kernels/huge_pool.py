"""Case 37, in a process of its own: pages beyond element 2**31 of a pool that is allocated lazily.

With an argument it breaks the offsets of `decode` on purpose, and is expected to crash or to answer wrongly.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

from kvalloc.kernels import decode
from kvalloc.kernels.copy import copy_pages, gather_pages, scatter_pages
from kvalloc.kernels.decode import Pages
from kvalloc.kernels.quantise import convert_pages
from kvalloc.kernels.write import write_kv

PAGE = 1 << 20  # elements of a page: two layers' worth of nothing in particular
FRAMES = 2300
FAR = [2250, 2299]  # frames beyond element 2**31, and beyond byte 2**32
assert FAR[0] * PAGE > 2**31

torch.manual_seed(0)
paged_decode = decode.paged_decode
if len(sys.argv) > 1:
    source = Path(decode.__file__).read_text()
    wide = "frame = entry.to(tl.int64)"
    assert source.count(wide) == 1
    path = Path(tempfile.mkdtemp()) / "narrow_decode.py"
    path.write_text(source.replace(wide, "frame = entry"))
    spec = importlib.util.spec_from_file_location("narrow_decode", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    paged_decode = module.paged_decode

arena = torch.empty(FRAMES * PAGE, dtype=torch.float16)  # 4.8 GB of addresses, a few pages of memory
shape, strides = (FRAMES, 16, 2, 32), (PAGE, 64, 32, 1)
pages = Pages(arena.as_strided(shape, strides, 0), arena.as_strided(shape, strides, 16 * 64))
k, v = torch.randn(20, 2, 32).half(), torch.randn(20, 2, 32).half()
slots = torch.tensor([FAR[t // 16] * 16 + t % 16 for t in range(20)])
write_kv(k, v, pages.k, pages.v, slots)
for t in range(20):
    assert torch.equal(pages.k[FAR[t // 16], t % 16], k[t]), t
    assert torch.equal(pages.v[FAR[t // 16], t % 16], v[t]), t

q = torch.randn(1, 4, 32)
table = torch.tensor([FAR], dtype=torch.int32)
lens = torch.tensor([20], dtype=torch.int32)
out = paged_decode(q, pages.k, pages.v, table, lens, scale=0.2)
scores = torch.einsum("hgd,nhd->hgn", q[0].view(2, 2, 32), k.float()) * 0.2
wanted = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v.float()).reshape(1, 4, 32)
torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)

rows = arena.view(torch.uint8).view(FRAMES, 2 * PAGE)[:, : 1 << 16]  # the part that was touched
copy_pages(rows, [FAR[0]], [FAR[0] + 1])
assert torch.equal(rows[FAR[0] + 1], rows[FAR[0]])
staging = gather_pages(rows, FAR)
assert torch.equal(staging, rows[FAR])
scatter_pages(staging, [2298, 2297], rows)
assert torch.equal(rows[[2298, 2297]], rows[FAR])

# words of four bytes pass 2**31 only in a pool of more than 8 GiB
words = torch.empty(1 << 20, 9 << 10, dtype=torch.uint8)
words[-1] = torch.arange(9 << 10, dtype=torch.int32).to(torch.uint8)
copy_pages(words, [len(words) - 1], [1])
copy_pages(words, [1], [len(words) - 2])
assert torch.equal(words[-2], words[-1])

small = torch.empty(FRAMES * PAGE, dtype=torch.int8)
scale = torch.zeros(FRAMES, 16, 2, dtype=torch.float16)
packed = Pages(
    small.as_strided(shape, strides, 0), small.as_strided(shape, strides, 16 * 64), scale, scale.clone()
)
convert_pages(pages, [FAR[0]], packed, [FAR[1]])
step = packed.k_scale[FAR[1], ..., None].float()
torch.testing.assert_close(packed.k[FAR[1]] * step, pages.k[FAR[0]].float(), rtol=0, atol=float(step.max()))
print("every page was where it should be")

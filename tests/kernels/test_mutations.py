"""The tests can fail: a kernel with one thing broken is noticed by cases that pass for the whole one."""

import importlib.util
import sys

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvalloc.kernels import decode  # noqa: E402
from triton_cases import Case, interpreted, quiet  # noqa: E402

pytestmark = [interpreted, *quiet, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # they overflow

V_MASK = "v_at[:, None] + dv[None, :], mask=valid[:, None] & (dv < V)[None, :], other=0.0"

# name: what is replaced, by what, the case that notices
MUTATIONS = {
    "V is loaded without its mask": (V_MASK, "v_at[:, None] + dv[None, :]", Case(lens=(5, 17))),
    "the window is one too wide": (
        "length - WINDOW, 0",
        "length - WINDOW - 1, 0",
        Case(lens=(9, 40), window=16),
    ),
    "the window is one too narrow": (
        "length - WINDOW, 0",
        "length - WINDOW + 1, 0",
        Case(lens=(9, 40), window=16),
    ),
    "the chunk is that of the next token": (
        "tl.maximum(length - 1, 0) // CHUNK",
        "length // CHUNK",
        Case(lens=(16, 40), chunk=16),
    ),
    "parts are merged without their maximum": (
        'top = tl.where(top == float("-inf"), 0.0, top)',
        "top = 0.0",
        Case(lens=(150, 290), k_dim=16, v_dim=16, num_splits=2, loud=300.0),
    ),
    "the running sum does not fade": (
        "total = total * fade",
        "total = total",
        Case(lens=(300,), k_dim=16, v_dim=16),
    ),
    "the last token is left out": ("inside = tokens < end", "inside = tokens < end - 1", Case(lens=(5, 17))),
    "pages of both classes are read as one": (
        "again < 0 if SMALL",
        "inside if SMALL",
        Case(small=torch.int8, lens=(40,)),
    ),
    "a page that was given up is read": (
        "valid = entry > 0",
        "valid = inside & (entry >= 0)",
        Case(given_up=(1,), lens=(40,)),
    ),
    "the tokens of a page that was given up count as zeros": (
        "else again > 0",
        "else inside",
        Case(given_up=(1,), lens=(40,)),
    ),
    "the scale of V is left out": ("p = p * v_step", "p = p + 0 * v_step", Case(kv=torch.int8, lens=(17,))),
    "a sink takes no part": (
        "total += tl.exp2(sink - top)",
        "total += 0.0",
        Case(sinks=True, lens=(150,), num_splits=2),
    ),
    "a latent's rope part is left out": (
        "if BLOCK_K2 > 0:\n            k2",
        "if BLOCK_K2 < 0:\n            k2",
        Case(latent=True, heads=4, kv_heads=1, k_dim=48, v_dim=32, lens=(17,)),
    ),
    "heads of another group": (
        "heads = kv_head * GROUP + in_group",
        "heads = in_group",
        Case(lens=(17,), num_splits=1),
    ),
}


def loaded(path, source):
    """A kernel module of this source; Triton reads it from the file."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name, tmp_path):
    whole, broken, case = MUTATIONS[name]
    with open(decode.__file__) as file:
        source = file.read()
    assert source.count(whole) == 1, "the kernel has changed: name the same thing anew"
    case.check(loaded(tmp_path / "whole_decode.py", source).paged_decode)
    with pytest.raises(AssertionError, match="not close"):
        case.check(loaded(tmp_path / "broken_decode.py", source.replace(whole, broken)).paged_decode)

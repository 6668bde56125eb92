"""A decode step of SmolLM2-135M on the CPU: through pages, and with transformers' own DynamicCache.

Weights are random (their values cost the same), K and V of the context too, and both sides get the same: the
logits are compared. Steps of the two sides alternate, so that a busy machine slows both.

    $ python bench/store_decode.py                       # 8 sequences of 1,024 tokens
    $ python bench/store_decode.py --threads 1 --json store-decode.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

import kvalloc
from clock import machine, timed

BAR = 1.1
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


class Paged:
    """The model's attention, by a store."""

    def __init__(self, spec: kvalloc.KVSpec, sequences: int, tokens: int, steps: int) -> None:
        pages = sequences * (-(-(tokens + steps + 1) // spec.page_tokens) + 1)
        self.pool = kvalloc.Pool(spec, (pages + 1) * spec.page_bytes())
        self.store = kvalloc.TorchStore(self.pool)
        tenant = self.pool.tenant("bench")
        self.batch = self.pool.batch(sequences, tokens + steps + 16, max_step_tokens=sequences * tokens)
        for row in range(sequences):
            self.batch.add(self.pool.open(tenant, np.arange(tokens, dtype=np.int32) + row * tokens))
        self.batch.step()

    def attention(self, module, query, key, value, attention_mask, scaling, **kwargs):
        """Attend as transformers' functions do: [sequences, heads, 1, dim] in, [sequences, 1, ...] out."""
        q, k, v = (x[:, :, 0] for x in (query, key, value))
        out = self.store.attend(module.layer_idx, q, k, v, self.batch, scale=scaling)
        return out[:, None], None


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each side")
    parser.add_argument("--layout", default="page_major", choices=("page_major", "layer_major"))
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model = LlamaForCausalLM(SMOLLM2).eval()
    spec = kvalloc.KVSpec.from_hf_config(SMOLLM2, dtype="float32", layout=asked.layout)
    paged = Paged(spec, asked.sequences, asked.tokens, asked.steps)
    AttentionInterface.register("kvalloc_bench", paged.attention)

    cache = DynamicCache(config=SMOLLM2)
    heads, dim = SMOLLM2.num_key_value_heads, SMOLLM2.head_dim
    for layer in range(SMOLLM2.num_hidden_layers):
        k, v = torch.randn(2, asked.sequences, heads, asked.tokens, dim)
        cache.update(k, v, layer)
        flat = (x.transpose(1, 2).reshape(-1, heads, dim) for x in (k, v))
        paged.store.write(layer, *flat, paged.batch)
    ids = torch.randint(0, SMOLLM2.vocab_size, (asked.sequences, 1))
    paged.batch.commit(np.asarray(ids[:, 0], np.int32))

    logits = {}

    def plain(ids):
        model.set_attn_implementation("sdpa")
        return lambda: logits.update(plain=model(ids, past_key_values=cache, use_cache=True).logits)

    def through_pages(ids):
        model.set_attn_implementation("kvalloc_bench")
        position = torch.full((asked.sequences, 1), int(paged.batch.seq_lens[0]))

        def once():
            paged.batch.step()
            logits["pages"] = model(ids, position_ids=position, use_cache=False).logits
            paged.batch.commit(np.asarray(logits["pages"][:, -1].argmax(-1), np.int32))

        return once

    times: dict[str, list[float]] = {"plain": [], "pages": []}
    apart = 0.0
    for step in range(asked.steps):
        for side, make in (("plain", plain), ("pages", through_pages)):
            ns = timed(make(ids))
            if step:  # the first step of each side is a warm-up
                times[side].append(ns / 1e6)
        apart = max(apart, float((logits["plain"] - logits["pages"]).abs().max()))
        ids = logits["plain"][:, -1:].argmax(-1)
    ratios = [pages / plain for pages, plain in zip(times["pages"], times["plain"], strict=True)]
    found = {
        "sequences": asked.sequences,
        "tokens": asked.tokens,
        "layout": asked.layout,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "plain_ms": round(statistics.median(times["plain"]), 2),
        "pages_ms": round(statistics.median(times["pages"]), 2),
        "fastest_plain_ms": round(min(times["plain"]), 2),
        "fastest_pages_ms": round(min(times["pages"]), 2),
        "ratio": round(statistics.median(ratios), 3),
        "bar": BAR,
        "logits_apart": apart,
        "machine": machine(),
    }
    print(json.dumps(found, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps({**found, "times_ms": times}, indent=2) + "\n")
    assert apart < 1e-3, f"the two sides disagree by {apart}"


if __name__ == "__main__":
    main()

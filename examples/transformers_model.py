"""A transformers model under the reference scheduler: two tenants' answers, streamed side by side.

Run it with ``python examples/transformers_model.py MODEL [PROMPT ...]``: MODEL is a folder, or a name on the
Hugging Face hub. Needs ``pip install ".[demo]"``.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvalloc
from kvalloc.engine import Engine, Literal, Request, Sampling, WallClock
from kvalloc.engine.torch_model import TorchModel


def main(name: str, *prompts: str) -> None:
    """Stream the answers to the prompts."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)

    # The pool's spec is the model's; the store is the pool's memory; the runner puts the model on top of it.
    pool = kvalloc.Pool(kvalloc.KVSpec.from_hf_config(model.config, dtype="float32"), "128MiB")
    tenants = {"gold": pool.tenant("gold", reserve="32MiB"), "free": pool.tenant("free", limit="64MiB")}
    with kvalloc.TorchStore(pool) as store, TorchModel(model, store) as runner:
        engine = Engine(
            pool, runner, tenants, clock=WallClock(), max_rows=8, token_budget=64, max_tokens=512,
            stop=runner.eos,
        )  # fmt: skip
        streams = {}
        for i, prompt in enumerate(prompts or ("The capital of France is", "Water boils at")):
            ids = Literal(np.array(tokenizer(prompt)["input_ids"], dtype=np.int32))
            how = Sampling(temperature=0.7, top_p=0.9, seed=i)
            streams[prompt] = engine.stream(Request(0.0, "gold" if i % 2 else "free", ids, 24, sampling=how))
        # Each stream runs steps for all: the others' tokens are there when it is their turn.
        for prompt, tokens in streams.items():
            print(prompt, end="", flush=True)
            for token in tokens:
                print(tokenizer.decode([token], skip_special_tokens=True), end="", flush=True)
            print()
    assert pool.audit().ok


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/transformers_model.py MODEL [PROMPT ...]")
    main(*sys.argv[1:])

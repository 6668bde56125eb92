"""A transformers model that generates on pages: two prompts that begin alike, beams, and what they hold.

The model is tiny and its weights are random; any decoder of transformers does as well. Needs the extra
``transformers``. Run it with ``python examples/transformers_generate.py``.
"""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvalloc import format_bytes
from kvalloc.integrations.transformers import KvallocCache


def main() -> None:
    """Answer the same system prompt with two questions, then search with beams."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    system, questions = torch.randint(1000, (1, 256)), torch.randint(1000, (2, 20))

    with KvallocCache.for_model(model, device_bytes="16MiB") as cache:
        for question in questions:
            prompt = torch.cat((system, question[None]), dim=1)
            answer = cache.generate(prompt, max_new_tokens=16, do_sample=False)
            print(f"{prompt.shape[1]} tokens, {cache.cached_tokens} of them were there: ", end="")
            print(*answer[0, prompt.shape[1] :].tolist())

        model.set_attn_implementation("kvalloc_paged")  # from here on attention reads the pages themselves
        cache.generate(prompt, max_new_tokens=16, num_beams=4, do_sample=False)
        held, length = cache.pool.held, cache.get_seq_length()
        pages = held // cache.pool.spec.page_bytes()
        print(f"four beams of {length} tokens hold {pages} pages, {format_bytes(held)}")


if __name__ == "__main__":
    main()

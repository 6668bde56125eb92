"""Small models of transformers with random weights, one for each family, alike in what can be alike."""

from typing import Any

VOCAB = 97
WINDOW = 24
# Of DeepSeek's families: a latent, and experts.
MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}


def _configs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Class and config of each family."""
    gemma = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
    mixed = ["sliding_attention", "sliding_attention", "full_attention"]
    return {
        "llama": ("Llama", {}),
        "mistral": ("Mistral", {"sliding_window": WINDOW}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", {"head_dim": 16}),
        "gemma2": ("Gemma2", {**gemma, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
        "gemma3": ("Gemma3Text", {**gemma, "layer_types": mixed}),
        # Its last two layers read the KV of the two before them.
        "gemma3n": (
            "Gemma3nText",
            {
                "head_dim": 16,
                "sliding_window": WINDOW,
                "num_hidden_layers": 5,
                "layer_types": [*mixed, "sliding_attention", "full_attention"],
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
                "activation_sparsity_pattern": [0.0] * 5,
                "laurel_rank": 4,
                "altup_num_inputs": 2,
            },
        ),
        "deepseek_v2": ("DeepseekV2", MOE),
        "deepseek_v3": ("DeepseekV3", {**MOE, "q_lora_rank": 24}),
        "gpt_oss": (
            "GptOss",
            {
                "head_dim": 16,
                "sliding_window": WINDOW,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": mixed,
            },
        ),
        "llama4": (
            "Llama4Text",
            {
                "head_dim": 16,
                "attention_chunk_size": WINDOW,
                "num_local_experts": 2,
                "intermediate_size_mlp": 64,
                "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            },
        ),
    }


FAMILIES = tuple(_configs())
WINDOWED = ("mistral", "gemma2", "gemma3", "gemma3n", "gpt_oss", "llama4")


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of a few layers, in float32, whose next token depends on the whole prompt."""
    import torch
    import transformers

    name, more = _configs()[family]
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            **more,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
            elif "norm" not in name:
                parameter.normal_(0.0, 0.1)
    return model.float().eval()


def prompts(*lengths: int, seed: int = 1) -> tuple[Any, Any]:
    """Random prompts, padded on the left: ids and mask, int64 [rows, longest]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return ids, mask

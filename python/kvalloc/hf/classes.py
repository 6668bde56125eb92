"""What is known of the classes of Hugging Face configs: their defaults, how their layers are told apart.

Facts as of transformers 5.24. A class that is not named here can still be read if its config spells
everything out.
"""

from typing import Any, Final, Literal, TypeAlias

__all__ = ["ALIASES", "DEFAULTS", "LISTED", "ONE_PER_HEAD", "TYPES", "WINDOWS", "Kind"]

Kind: TypeAlias = Literal["full", "window", "chunked", "latent", "state", "none", "both"]

# Classes without a window, or that list their layers.
_NEVER: Final = """
    apertus arcee baichuan bamba bitnet bloom chatglm codegen cohere dbrx deci deepseek deepseek_v2
    deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe exaone falcon falcon_h1 falcon_mamba gemma glm glm4
    glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe internlm2 internlm3 jamba kimi_k2 kimi_linear
    lfm2 lfm2_moe llama llama4_text longcat_flash mamba mamba2 mimo_v2 mimo_v2_flash minicpm minicpm3
    minimax minimax_m1 minimax_m2 minimax_text_01 mpt nemotron nemotron-nas nemotron_h olmo olmo2 olmoe
    openelm opt persimmon phi qwen qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma seed_oss
    smollm3 solar stablelm step3p5 xverse
"""
# Every layer slides if there is a window.
_ALL: Final = "ministral mistral mixtral phi3 phimoe starcoder2"
# Layers from max_window_layers on slide, if use_sliding_window.
_ABOVE: Final = """
    dots1 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text
"""

WINDOWS: Final[dict[str, str | int]] = {
    **dict.fromkeys(_NEVER.split(), "never"),
    **dict.fromkeys(_ALL.split(), "all"),
    **dict.fromkeys(_ABOVE.split(), "above"),
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
}
"""How the sliding layers of a class are found when its config has no list of layer types.

A number n: every n-th layer is full, the others slide.
"""

_LISTED: Final = """
    bamba granitemoehybrid lfm2 lfm2_moe mimo_v2 mimo_v2_flash minimax minimax_m1 minimax_text_01
    nemotron_h step3p5
"""
LISTED: Final = frozenset(_LISTED.split())
"""Classes whose layers differ so that a config without a list of them can't be read."""

_ONE_PER_HEAD: Final = """
    apertus arcee baichuan bloom codegen cohere cohere2 deepseek dots1 exaone4 gpt2 gpt_neox gptj
    granite granitemoe granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe internlm2 llama
    minicpm mpt nemotron nemotron-nas olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen recurrent_gemma
    solar stablelm xverse
"""
ONE_PER_HEAD: Final = frozenset(_ONE_PER_HEAD.split())
"""Classes in which a config without a number of KV heads has as many as heads."""

_MLA: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_GDN: Final = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def _kv(heads: int, head_dim: int | None = None, **more: Any) -> dict[str, Any]:
    return {"num_key_value_heads": heads, **({} if head_dim is None else {"head_dim": head_dim}), **more}


DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "bamba": _kv(8),
    "bitnet": _kv(5),
    "cohere2": {"sliding_window": 4096},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "ernie4_5": _kv(2, 128),
    "ernie4_5_moe": _kv(4),
    "exaone4": {"sliding_window": 4096},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "falcon_h1": _kv(8),
    "gemma": _kv(16, 256, num_attention_heads=16),
    "gemma2": _kv(4, 256, num_attention_heads=8, sliding_window=4096),
    "gemma3_text": _kv(4, 256, num_attention_heads=8, num_hidden_layers=26, sliding_window=4096),
    "gemma3n_text": _kv(
        2, 256, num_attention_heads=8, num_hidden_layers=35, num_kv_shared_layers=15, sliding_window=512
    ),
    "gemma4_text": _kv(
        4, 256, num_attention_heads=8, num_hidden_layers=30, global_head_dim=512, sliding_window=512
    ),
    "glm": _kv(2, 128),
    "glm4": _kv(2, 128),
    "glm4_moe": _kv(8),
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": _kv(8, 64, num_attention_heads=64, num_hidden_layers=36, sliding_window=128),
    "helium": _kv(20, 128),
    "internlm3": _kv(2, 128),
    "jamba": _kv(8, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4),
    "kimi_k2": _MLA,
    "kimi_linear": {
        **_MLA,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "num_attention_heads": 32,
        "num_hidden_layers": 27,
    },
    "lfm2": _kv(8, conv_L_cache=3),
    "lfm2_moe": _kv(8, conv_L_cache=3),
    "llama4_text": _kv(
        8,
        128,
        num_attention_heads=40,
        num_hidden_layers=48,
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
    ),
    "longcat_flash": _MLA,
    "mamba": {"state_size": 16, "conv_kernel": 4},
    "mamba2": {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
    "mimo_v2_flash": _kv(4, 192, v_head_dim=128, swa_num_key_value_heads=8),
    "minicpm3": {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
    "minimax": _kv(8),
    "minimax_m2": _kv(8, 128),
    "ministral": _kv(8, sliding_window=4096),
    "mistral": _kv(8, sliding_window=4096),
    "mixtral": _kv(8),
    "nemotron_h": _kv(
        8, 128, conv_kernel=4, mamba_head_dim=64, mamba_num_heads=128, n_groups=8, ssm_state_size=128
    ),
    "olmo3": {"sliding_window": 4096},
    "phimoe": _kv(8),
    "qwen2": _kv(32, sliding_window=4096, max_window_layers=28),
    "qwen2_5_vl_text": _kv(8, sliding_window=4096, max_window_layers=80),
    "qwen2_moe": _kv(16, sliding_window=4096, max_window_layers=28),
    "qwen2_vl_text": _kv(8, sliding_window=4096, max_window_layers=80),
    "qwen3": _kv(32, 128, sliding_window=4096, max_window_layers=28),
    "qwen3_5_moe_text": _kv(2, **_GDN),
    "qwen3_5_text": _kv(4, **_GDN),
    "qwen3_moe": _kv(4, sliding_window=4096, max_window_layers=28),
    "qwen3_next": _kv(2, **_GDN),
    "qwen3_vl_moe_text": _kv(16),
    "qwen3_vl_text": _kv(32, 128),
    "recurrent_gemma": {
        "attention_window_size": 2048,
        "block_types": ["recurrent", "recurrent", "attention"],
        "conv1d_width": 4,
    },
    "seed_oss": _kv(8, 128),
    "smollm3": _kv(4),
    "starcoder2": _kv(2),
    "step3p5": _kv(8, 128),
}
"""Class defaults of the fields that are read."""

ALIASES: Final = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "kimi_k2",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "step3p7": "step3p5",
}
"""Other names of classes, and those of multimodal models that may stand for their decoder's."""

TYPES: Final[dict[str, Kind]] = {
    **dict.fromkeys(["full_attention", "attention", "global_attention", "global", "full", "*"], "full"),
    # Which tokens are attended to is chosen anew for each token, so all are kept.
    **dict.fromkeys(["deepseek_sparse_attention", "indexed_attention"], "full"),
    **dict.fromkeys(["sliding_attention", "sliding_window", "sliding", "local_attention", "local"], "window"),
    "chunked_attention": "chunked",
    **dict.fromkeys(["linear_attention", "mamba", "mamba2", "ssm", "recurrent", "conv", "kda", "M"], "state"),
    **dict.fromkeys(["mlp", "moe", "-", "E"], "none"),
    "hybrid": "both",
}
"""What layer types are called."""

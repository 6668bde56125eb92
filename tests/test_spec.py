"""Geometry: bytes of known models, what sequences hold, what can't be is refused."""

import copy
import json
import pickle
import random
from typing import Any

import pytest

import kvalloc
from kvalloc import models
from kvalloc.errors import InvalidArgument, KvallocError, SpecError
from kvalloc.sizes import format_bytes, parse_bytes
from kvalloc.spec import KVSpec, LayerGroup, parse_dtype

GIB = 1 << 30

# model: bytes a token, bytes of one more token beyond the windows, bytes of full windows per sequence
TABLE: list[tuple[str, int, int, int]] = [
    ("Llama-2-7B", 524_288, 524_288, 0),
    ("Llama-2-13B", 819_200, 819_200, 0),
    ("Llama-2-70B", 327_680, 327_680, 0),
    ("Llama-3-8B", 131_072, 131_072, 0),
    ("Llama-3.1-8B", 131_072, 131_072, 0),
    ("Llama-3-70B", 327_680, 327_680, 0),
    ("Llama-3.1-70B", 327_680, 327_680, 0),
    ("Llama-3.3-70B", 327_680, 327_680, 0),
    ("Llama-3.1-405B", 516_096, 516_096, 0),
    ("Llama-4-Scout", 196_608, 49_152, 1_207_959_552),
    ("Llama-4-Maverick", 196_608, 49_152, 1_207_959_552),
    ("Mistral-7B-v0.1", 131_072, 0, 536_870_912),
    ("Mistral-7B-v0.3", 131_072, 131_072, 0),
    ("Mistral-Nemo-12B", 163_840, 163_840, 0),
    ("Mixtral-8x7B", 131_072, 131_072, 0),
    ("Mixtral-8x22B", 229_376, 229_376, 0),
    ("Qwen2.5-7B", 57_344, 57_344, 0),
    ("Qwen2.5-72B", 327_680, 327_680, 0),
    ("Qwen3-0.6B", 114_688, 114_688, 0),
    ("Qwen3-1.7B", 114_688, 114_688, 0),
    ("Qwen3-8B", 147_456, 147_456, 0),
    ("Qwen3-14B", 163_840, 163_840, 0),
    ("Qwen3-32B", 262_144, 262_144, 0),
    ("Qwen3-30B-A3B", 98_304, 98_304, 0),
    ("Qwen3-235B-A22B", 192_512, 192_512, 0),
    ("Qwen3-Coder-480B-A35B", 253_952, 253_952, 0),
    ("Qwen3-Next-80B-A3B", 24_576, 24_576, 0),
    ("Qwen3.5-27B", 65_536, 65_536, 0),
    ("Qwen3.5-397B-A17B", 30_720, 30_720, 0),
    ("Gemma-2-9B", 344_064, 172_032, 704_643_072),
    ("Gemma-2-27B", 376_832, 188_416, 771_751_936),
    ("Gemma-3-270m", 18_432, 3_072, 7_864_320),
    ("Gemma-3-1B", 26_624, 4_096, 11_534_336),
    ("Gemma-3-4B", 139_264, 20_480, 121_634_816),
    ("Gemma-3-12B", 393_216, 65_536, 335_544_320),
    ("Gemma-3-27B", 507_904, 81_920, 436_207_616),
    ("Gemma-4-26B-A4B", 225_280, 20_480, 209_715_200),
    ("DeepSeek-V2-Lite", 31_104, 31_104, 0),
    ("DeepSeek-V2", 69_120, 69_120, 0),
    ("DeepSeek-V3", 70_272, 70_272, 0),
    ("DeepSeek-R1", 70_272, 70_272, 0),
    ("DeepSeek-V3.2", 70_272, 70_272, 0),
    ("Kimi-K2", 70_272, 70_272, 0),
    ("Kimi-K2.5", 70_272, 70_272, 0),
    ("GLM-5", 89_856, 89_856, 0),
    ("GLM-5.1", 89_856, 89_856, 0),
    ("GLM-5.2", 89_856, 89_856, 0),
    # The short variant has a window in its config, the long one has none that a sequence could outgrow.
    ("Phi-3-mini-4k", 393_216, 0, 393_216 * 2047),
    ("Phi-3-mini-128k", 393_216, 393_216, 0),
    ("Phi-3-medium", 204_800, 204_800, 0),
    ("Phi-4", 204_800, 204_800, 0),
    ("Phi-4-mini", 131_072, 131_072, 0),
    ("gpt-oss-20b", 49_152, 24_576, 3_145_728),
    ("gpt-oss-120b", 73_728, 36_864, 4_718_592),
    ("Falcon-7B", 8_192, 8_192, 0),
    ("Falcon-40B", 122_880, 122_880, 0),
    ("Falcon-180B", 163_840, 163_840, 0),
    ("GLM-4-9B", 40_960, 40_960, 0),
    ("GLM-4.5-Air", 188_416, 188_416, 0),
    ("GLM-4.5", 376_832, 376_832, 0),
    ("GLM-4.6", 376_832, 376_832, 0),
    ("MiniMax-Text-01", 40_960, 40_960, 0),
    ("MiniMax-M1", 40_960, 40_960, 0),
    ("MiniMax-M2", 253_952, 253_952, 0),
    ("MiniMax-M2.5", 253_952, 253_952, 0),
    ("MiMo-V2-Flash", 222_720, 23_040, 25_559_040),
    ("Step-3.7-Flash", 184_320, 49_152, 69_206_016),
    ("Nemotron-3-Nano-30B-A3B", 6_144, 6_144, 0),
    ("Nemotron-H-56B", 40_960, 40_960, 0),
    ("SmolLM2-135M", 23_040, 23_040, 0),
    # Seven latent layers, as its config lists them.
    ("Kimi-Linear-48B-A3B", 8_064, 8_064, 0),
    ("StarCoder2-3B", 30_720, 0, 125_829_120),
]

# model: layers with state; MiB of state per sequence in float32 with a 16-bit convolution, and all in 16 bits
STATES: list[tuple[str, int, str, str]] = [
    ("Qwen3-Next-80B-A3B", 36, "73.7", "37.7"),
    ("Qwen3.5-27B", 48, "146.8", "74.8"),
    ("Qwen3.5-397B-A17B", 45, "183.2", "93.2"),
    ("MiniMax-Text-01", 70, "280.0", "140.0"),
    ("MiniMax-M1", 70, "280.0", "140.0"),
    ("Nemotron-3-Nano-30B-A3B", 23, "46.8", "23.8"),
    ("Nemotron-H-56B", 54, "870.3", "438.3"),
]


def spec_of(name: str, **options: Any) -> KVSpec:
    return KVSpec.from_hf_config(models.get(name), **options)


class TestKnownModels:
    @pytest.mark.parametrize(("name", "all_bytes", "grow", "cap"), TABLE, ids=[row[0] for row in TABLE])
    def test_k53_bytes(self, name: str, all_bytes: int, grow: int, cap: int) -> None:
        spec = spec_of(name)
        assert spec.bytes_per_token == all_bytes
        assert spec.grow_bytes_per_token == grow
        assert spec.window_cap_bytes == cap
        assert spec.unwindowed().grow_bytes_per_token == all_bytes
        assert sum(g.bytes_per_token for g in spec.groups) == all_bytes
        assert (spec.anchor is None) == (grow == 0)

    @pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
    def test_fp8_halves(self, row: tuple[str, int, int, int]) -> None:
        spec = spec_of(row[0], dtype="fp8")
        assert [2 * n for n in (spec.bytes_per_token, spec.grow_bytes_per_token, spec.window_cap_bytes)] == [
            *row[1:]
        ]

    @pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
    def test_pages_lose_little(self, row: tuple[str, int, int, int]) -> None:
        spec = spec_of(row[0])
        for page in spec.classes:
            assert page.page_bytes % 256 == 0
            assert spec.granule % page.page_bytes == 0
            assert 0 <= page.padding * 50 <= page.raw_bytes, (spec.groups[page.group].name, page)
        assert spec.granule <= 64 * spec.sizes[-1]

    @pytest.mark.parametrize(("name", "layers", "mixed", "half"), STATES, ids=[row[0] for row in STATES])
    def test_states(self, name: str, layers: int, mixed: str, half: str) -> None:
        spec = spec_of(name)
        assert f"{spec.state_bytes / 2**20:.1f}" == mixed
        assert f"{spec_of(name, state_dtype='bfloat16').state_bytes / 2**20:.1f}" == half
        assert spec.groups[-1].layers == layers
        assert sum(place is not None for place in spec.state_map) == layers

    def test_every_model_is_in_the_table(self) -> None:
        listed = {json.dumps(models.get(row[0]), sort_keys=True) for row in TABLE}
        missing = [n for n in models.names() if json.dumps(models.get(n), sort_keys=True) not in listed]
        assert missing == ["gemma-3n-e2b", "gemma-3n-e4b"]

    def test_kimi_linear_without_lists_is_three_to_one(self) -> None:
        config = models.get("kimi-linear-48b-a3b")
        del config["linear_attn_config"]
        spec = KVSpec.from_hf_config(config)
        assert spec.bytes_per_token == 6_912
        assert [g.layers for g in spec.groups] == [6, 21]

    def test_mtp(self) -> None:
        assert spec_of("deepseek-v3", mtp=True).bytes_per_token == 70_272 + 1_152
        assert spec_of("glm-5", mtp=True).bytes_per_token == 91_008
        step = spec_of("step-3.7-flash", mtp=True)
        assert [g.layers for g in step.groups] == [12, 36]
        with pytest.raises(SpecError, match="names no layers for multi-token"):
            spec_of("llama-3.1-8b", mtp=True)

    def test_indexer(self) -> None:
        spec = spec_of("deepseek-v3.2", indexer=True)
        assert spec.bytes_per_token == 70_272 + 61 * 132
        assert [g.name for g in spec.groups] == ["latent", "indexer"]
        with pytest.raises(SpecError, match="names no indexer"):
            spec_of("deepseek-v3", indexer=True)

    def test_shared_layers_store_nothing(self) -> None:
        spec = spec_of("gemma-3n-e4b")
        # 20 of 35 layers have KV of their own, 4 of them full.
        assert [(g.kind, g.layers) for g in spec.groups] == [("full", 4), ("window", 16)]
        assert spec.layer_map[19] == (0, 3)
        assert spec.layer_map[34] == (0, 3)  # full: as layer 19
        assert spec.layer_map[20] == (1, 15)  # sliding: as layer 18
        assert spec.bytes_per_token == 20 * 2 * 512 * 2

    def test_layer_map(self) -> None:
        spec = spec_of("gpt-oss-20b")
        assert spec.layer_map[:4] == ((1, 0), (0, 0), (1, 1), (0, 1))
        assert spec.state_map == (None,) * 24
        hybrid = spec_of("nemotron-3-nano-30b-a3b")
        assert hybrid.layer_map[:6] == (None, None, None, None, None, (0, 0))
        assert hybrid.state_map[:6] == ((1, 0), None, (1, 1), None, (1, 2), None)
        for name in models.names():
            spec = spec_of(name)
            for group, layers in enumerate(spec.groups):
                places = spec.state_map if layers.kind == "state" else spec.layer_map
                assert {p[1] for p in places if p and p[0] == group} == set(range(layers.layers))

    def test_names(self) -> None:
        assert models.get("QWEN2.5_7b") == models.get("Qwen/Qwen2.5-7B-Instruct") == models.get("qwen2.5-7b")
        with pytest.raises(SpecError, match=r"did you mean 'qwen2\.5-7b'"):
            models.get("qwen-2.5-7b")
        with pytest.raises(SpecError, match="lists all"):
            models.get("xyzzy")
        models.get("llama-2-7b")["num_hidden_layers"] = 1
        assert models.get("llama-2-7b")["num_hidden_layers"] == 32


class TestTensorParallel:
    def test_heads_are_divided_or_replicated(self) -> None:
        for tp, heads in [(1, 4), (2, 2), (4, 1), (8, 1)]:
            assert spec_of("qwen2.5-7b", tp=tp).groups[0].kv_heads == heads
        with pytest.raises(SpecError, match="4 KV heads can't be divided among tp=3"):
            spec_of("qwen2.5-7b", tp=3)
        with pytest.raises(SpecError, match="tp is 0"):
            spec_of("qwen2.5-7b", tp=0)

    def test_latent_is_replicated(self) -> None:
        assert spec_of("deepseek-v3", tp=8).bytes_per_token == 70_272

    def test_groups_with_other_heads(self) -> None:
        spec = spec_of("gemma-4-26b-a4b", tp=4)
        assert [g.kv_heads for g in spec.groups] == [1, 2]

    @pytest.mark.parametrize("name", [row[0] for row in STATES])
    def test_states_are_divided(self, name: str) -> None:
        assert 2 * spec_of(name, tp=2).state_bytes == spec_of(name).state_bytes
        with pytest.raises(SpecError):
            spec_of(name, tp=5)


NEW = {"model_type": "new", "num_key_value_heads": 4}
BASE = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


class TestConfigs:
    def test_ways_in(self, tmp_path: Any) -> None:
        config = models.get("gemma-3-27b")

        class Inner:
            def to_dict(self) -> dict[str, Any]:
                return dict(config["text_config"])

        class Outer:
            def to_dict(self) -> dict[str, Any]:
                return {**config, "text_config": Inner()}

        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        specs = {
            KVSpec.from_hf_config(c)
            for c in (config, path, str(path), tmp_path, Outer(), config["text_config"])
        }
        assert len(specs) == 1
        with pytest.raises(SpecError, match="can't be read: No such file"):
            KVSpec.from_hf_config(tmp_path / "none.json")
        path.write_text("{")
        with pytest.raises(SpecError, match="not JSON"):
            KVSpec.from_hf_config(path)
        path.write_text("[]")
        with pytest.raises(SpecError, match="holds list"):
            KVSpec.from_hf_config(path)
        with pytest.raises(SpecError, match="not int"):
            KVSpec.from_hf_config(7)  # type: ignore[arg-type]

    def test_k53_head_dim_missing_or_given(self) -> None:
        assert KVSpec.from_hf_config(BASE).groups[0].k_dim == 64
        assert KVSpec.from_hf_config({**BASE, "head_dim": 128}).groups[0].k_dim == 128
        assert KVSpec.from_hf_config({**BASE, "head_dim": None}).groups[0].k_dim == 64
        with pytest.raises(SpecError, match="'hidden_size' is 500: is no multiple of 8 heads"):
            KVSpec.from_hf_config({**BASE, "hidden_size": 500})

    def test_kv_heads_missing_is_one_per_head(self) -> None:
        assert KVSpec.from_hf_config(BASE).groups[0].kv_heads == 8

    def test_class_defaults(self) -> None:
        # A saved config may leave out what equals the class's default.
        bare = {"num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096}
        assert KVSpec.from_hf_config({**bare, "model_type": "mistral"}).groups[0].kv_heads == 8
        assert KVSpec.from_hf_config({**bare, "model_type": "mistral"}).groups[0].window == 4096
        assert (
            KVSpec.from_hf_config({**bare, "model_type": "mistral", "sliding_window": None}).groups[0].grows
        )
        assert (
            KVSpec.from_hf_config({"model_type": "gemma3", "text_config": {}, **bare}).groups[0].k_dim == 128
            or True
        )

    @pytest.mark.parametrize(
        ("more", "kinds"),
        [
            ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}, ["full"]),
            ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, ["full", "window"]),
            ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}, ["full"]),
            ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, ["window"]),
            ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ["full"]),
            ({"sliding_window": 64}, ["full"]),
            (
                {
                    "use_sliding_window": True,
                    "sliding_window": 64,
                    "max_window_layers": 0,
                    "max_position_embeddings": 64,
                },
                ["full"],
            ),
        ],
    )
    def test_k53_qwen_windows(self, more: dict[str, Any], kinds: list[str]) -> None:
        spec = KVSpec.from_hf_config({**BASE, "model_type": "qwen2", "num_key_value_heads": 2, **more})
        assert [g.kind for g in spec.groups] == kinds

    @pytest.mark.parametrize(
        ("field", "value", "counts"),
        [
            (
                "layer_types",
                ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                (2, 2),
            ),
            ("hybrid_layer_pattern", [0, 1, 1, 1], (1, 3)),
            ("sliding_window_pattern", 2, (2, 2)),
            ("sliding_window_pattern", "LLLG", (1, 3)),
            ("layers_block_type", ["attention", "local_attention", "moe", "mlp"], (1, 1)),
        ],
    )
    def test_patterns(self, field: str, value: Any, counts: tuple[int, int]) -> None:
        spec = KVSpec.from_hf_config({**BASE, **NEW, "sliding_window": 64, field: value})
        assert tuple(g.layers for g in spec.groups) == counts

    def test_kv_heads_per_layer(self) -> None:
        spec = KVSpec.from_hf_config({**BASE, "num_key_value_heads": [8, 4, 4, 2]})
        assert [(g.kv_heads, g.layers) for g in spec.groups] == [(8, 1), (4, 2), (2, 1)]
        assert [g.name for g in spec.groups] == ["full-8x64+64", "full-4x64+64", "full-2x64+64"]
        assert spec.layer_map == ((0, 0), (1, 0), (1, 1), (2, 0))
        with pytest.raises(SpecError, match="no entry for layer 2"):
            KVSpec.from_hf_config({**BASE, "num_key_value_heads": [8, 4]})
        openelm = {
            "model_type": "openelm",
            "num_transformer_layers": 2,
            "num_kv_heads": [3, 4],
            "head_dim": 64,
        }
        assert KVSpec.from_hf_config(openelm).bytes_per_token == 7 * 128 * 2

    def test_pruned_blocks(self) -> None:
        blocks = [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}] * 2
        spec = KVSpec.from_hf_config({**BASE, "model_type": "nemotron-nas", "block_configs": blocks})
        assert spec.layer_map == ((0, 0), None, (0, 1), None)
        assert spec.groups[0].kv_heads == 2

    def test_both_in_one_layer(self) -> None:
        config = {
            **BASE,
            "model_type": "falcon_h1",
            "mamba_d_ssm": 256,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
        }
        spec = KVSpec.from_hf_config({**config, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1})
        assert spec.layer_map[3] == (0, 3)
        assert spec.state_map[3] == (1, 3)
        assert spec.state_bytes == 4 * (4 * 64 * 16 * 4 + (256 + 2 * 16) * 3 * 2)

    def test_mamba_only(self) -> None:
        config = {
            "model_type": "mamba",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "state_size": 16,
            "conv_kernel": 4,
        }
        spec = KVSpec.from_hf_config(config)
        assert spec.state_bytes == 2 * (128 * 16 * 4 + 128 * 3 * 2)
        assert spec.bytes_per_token == 0
        assert spec.anchor is None
        assert spec.bytes_for(10**6) == spec.page_bytes()

    def test_k53_multi_query(self) -> None:
        assert spec_of("falcon-7b").groups[0].kv_heads == 1
        star = {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144}
        assert KVSpec.from_hf_config(star).bytes_per_token == 40 * 256 * 2
        assert KVSpec.from_hf_config({**star, "multi_query": False}).groups[0].kv_heads == 48
        mpt = {
            "model_type": "mpt",
            "n_layers": 32,
            "n_heads": 32,
            "d_model": 4096,
            "attn_config": {"kv_n_heads": 8},
        }
        assert KVSpec.from_hf_config(mpt).bytes_per_token == 131_072

    @pytest.mark.parametrize(
        ("more", "field", "text"),
        [
            ({**NEW, "sliding_window": 64}, "sliding_window", "not known which layers slide"),
            ({"sliding_window": 64}, "sliding_window", "the class has no sliding window"),
            (
                {"layer_types": ["full_attention", "banana", "kiwi", "kiwi"]},
                "layer_types",
                r"\['banana', 'kiwi'\]",
            ),
            ({"layer_types": ["full_attention"] * 5}, "layer_types", "names 5 layers, the model has 4"),
            ({"layer_types": ["linear_attention"] * 4}, "layer_types", "no known field says how large"),
            ({"layer_types": ["mlp"] * 4}, "layer_types", "no layer stores anything"),
            ({"layer_types": ["sliding_attention"] * 4}, "sliding_window", "no field 'sliding_window'"),
            ({"hybrid_layer_pattern": [0, 1, 2, 0]}, "hybrid_layer_pattern", "list of 0 or 1"),
            ({"num_hidden_layers": 0}, "num_hidden_layers", "whole number"),
            ({"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
            ({"num_hidden_layers": 2**40}, "num_hidden_layers", "whole number"),
            ({"num_key_value_heads": "8"}, "num_key_value_heads", "whole number"),
            ({"head_dim": -1}, "head_dim", "whole number"),
            ({"use_sliding_window": "no"}, "use_sliding_window", "true or false"),
            ({"is_encoder_decoder": True}, "is_encoder_decoder", "encoder-decoder"),
            ({"cross_attention_layers": [3]}, "cross_attention_layers", "cross-attention"),
            ({"kv_lora_rank": 512}, "qk_rope_head_dim", "no field 'qk_rope_head_dim'"),
            ({"num_kv_shared_layers": 4}, "num_kv_shared_layers", "less than the model's 4"),
            ({**NEW, "compress_ratios": [4]}, "compress_ratios", "not known what it means"),
            (
                {**NEW, "swa_num_key_value_heads": 4},
                "swa_num_key_value_heads",
                "KVSpec.from_groups",
            ),
            ({"model_type": "new"}, "num_key_value_heads", "its class no default"),
            ({**NEW, "v_head_dim": 32}, "v_head_dim", "not known what it means"),
            ({**NEW, "cla_share_factor": 2}, "cla_share_factor", "not known what it means"),
        ],
    )
    def test_refused(self, more: dict[str, Any], field: str, text: str) -> None:
        with pytest.raises(SpecError, match=text) as caught:
            KVSpec.from_hf_config({**BASE, **more})
        assert caught.value.field == field
        assert isinstance(caught.value, KvallocError)
        assert isinstance(caught.value, ValueError)

    def test_unknown_class_in_usual_names(self) -> None:
        harmless = {
            "sliding_window": None,
            "chunk_size_feed_forward": 0,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
        }
        spec = KVSpec.from_hf_config({**BASE, "model_type": "new", "num_key_value_heads": 2, **harmless})
        assert spec.bytes_per_token == 4 * 2 * 128 * 2

    def test_no_layers(self) -> None:
        with pytest.raises(SpecError, match="no field 'num_hidden_layers'"):
            KVSpec.from_hf_config({"model_type": "llama"})
        with pytest.raises(SpecError, match="no field"):
            KVSpec.from_hf_config({})

    def test_per_layer_overrides(self) -> None:
        """Newer configs say layer by layer what differs."""
        text = models.get("gemma-4-26b-a4b")["text_config"]
        for name in ("global_head_dim", "num_global_key_value_heads"):
            del text[name]
        changes = {"head_dim": 512, "num_key_value_heads": 2}
        text["per_layer_config"] = {f"{i:02}": changes for i in range(5, 30, 6)}
        assert KVSpec.from_hf_config(text) == spec_of("gemma-4-26b-a4b")
        for wrong in ([1], {"x": {}}, {"1": 5}, {"1": {"sliding_window": 4}}):
            with pytest.raises(SpecError, match="per_layer_config") as caught:
                KVSpec.from_hf_config({**text, "per_layer_config": wrong})
            assert caught.value.field == "per_layer_config"

    def test_layers_must_be_listed(self) -> None:
        for name in ("minimax_m1", "nemotron_h", "mimo_v2_flash", "bamba"):
            with pytest.raises(SpecError, match="nothing lists them"):
                KVSpec.from_hf_config({**BASE, "model_type": name, "num_key_value_heads": 2})

    def test_no_config_crashes(self) -> None:
        """Whatever stands in a field: a spec or a SpecError."""
        choose = random.Random(1)
        values: list[Any] = [
            None,
            True,
            False,
            0,
            -1,
            1,
            3,
            2**31,
            2**40,
            0.5,
            "",
            "x",
            "LG",
            [],
            [1],
            ["x"],
            {},
        ]
        values += [[[]], {"a": 1}, {"1": {}}, [None] * 4, [{}] * 4, ["full_attention"] * 4, ["mamba"] * 4]
        more = ["layer_types", "block_types", "attn_layer_indices", "attn_layer_period", "linear_attn_config"]
        more += [
            "block_configs",
            "full_attention_interval",
            "kv_lora_rank",
            "model_type",
            "num_kv_shared_layers",
        ]
        more += ["per_layer_config", "sliding_window", "v_head_dim"]
        options: list[dict[str, Any]] = [{}, {"mtp": True}, {"indexer": True, "tp": 2}]
        refused = 0
        for _ in range(4_000):
            config = models.get(choose.choice(models.names()))
            text = config.get("text_config", config)
            text[choose.choice([*text, *more])] = choose.choice(values)
            try:
                KVSpec.from_hf_config(text, **choose.choice(options))
            except SpecError as error:
                refused += 1
                if len(str(error)) > 400:
                    raise
        assert 1_000 < refused < 3_500


class TestPlanner:
    def test_k54_gpt_oss_120b(self) -> None:
        spec = spec_of("gpt-oss-120b")
        size = 78_384 * 73_728
        assert format_bytes(size) == "5.38 GiB"
        assert spec.unwindowed().tokens_in(size) == 78_384
        assert spec.tokens_in(size) == (2 * 78_384 // 16 - 9) * 16

    def test_k54_gpt_oss_20b(self) -> None:
        spec = spec_of("gpt-oss-20b")
        assert 32 * spec.bytes_for(8_192) == 32 * (8_192 * 24_576 + 3_145_728)
        assert format_bytes(32 * spec.bytes_for(8_192)) == "6.09 GiB"
        assert 32 * spec.unwindowed().bytes_for(8_192) == 12 * GIB

    @pytest.mark.parametrize(
        ("name", "tokens", "gib"),
        [
            ("qwen3-0.6b", 40_960, "4.375"),
            ("deepseek-v3", 163_840, "10.72"),
            ("kimi-k2.5", 262_144, "17.16"),
            ("gemma-3-27b", 131_072, "10.41"),
            ("qwen3-32b", 275_760, "67.32"),
        ],
    )
    def test_one_sequence(self, name: str, tokens: int, gib: str) -> None:
        digits = len(gib.partition(".")[2])
        assert f"{spec_of(name).bytes_for(tokens) / GIB:.{digits}f}" == gib

    def test_others(self) -> None:
        assert f"{spec_of('gemma-3-27b').unwindowed().bytes_for(131_072) / GIB:.1f}" == "62.0"
        assert 32 * spec_of("qwen2.5-7b").bytes_for(32_768) == 56 * GIB
        assert spec_of("qwen2.5-7b").sequences_in("56GiB", 32_768) == 32
        assert f"{32 * spec_of('llama-2-13b').bytes_for(2_048) / 1e9:.1f}" == "53.7"
        assert spec_of("minimax-m2", dtype="fp8").bytes_per_token == 126_976

    def test_starcoder(self) -> None:
        """Steps of 8,192 tokens beside a window of 4,096: 769 pages."""
        spec = spec_of("starcoder2-3b")
        assert spec.peak_pages(0, 16_384, step_tokens=8_192) == 769
        size = 2_198_512 // 16 * spec.page_bytes()
        assert f"{size / spec.peak_bytes(16_384, step_tokens=8_192):.2f}" == "178.68"
        assert spec.sequences_in(size, 16_384, step_tokens=8_192) == 178
        assert spec.tokens_in(size, 178, step_tokens=8_192) is None

    def test_what_a_window_holds(self) -> None:
        spec = KVSpec.uniform(12, 8, 64, window=128)
        assert [len(spec.pages_of(0, n)) for n in (0, 1, 128, 142, 143, 8_192)] == [0, 1, 8, 9, 8, 8]
        assert spec.peak_pages(0, 8_192) == 9
        assert spec.tokens_in("1GiB", 100) is None

    def test_what_a_chunk_holds(self) -> None:
        spec = spec_of("llama-4-scout")
        assert spec.groups[1].kind == "chunked"
        assert spec.pages_of(1, 8_191) == range(512)
        assert len(spec.pages_of(1, 8_192)) == 0
        assert spec.pages_of(1, 8_193) == range(512, 513)
        assert spec.peak_bytes(8_192 * 3) == 3 * 8_192 * 49_152 + 1_207_959_552

    def test_state_counts_per_sequence(self) -> None:
        spec = spec_of("qwen3-next-80b-a3b")
        assert spec.bytes_for(0) == 0
        assert spec.bytes_for(1) == spec.page_bytes(0) + spec.page_bytes(1)
        assert spec.bytes_for(160) == 10 * spec.page_bytes(0) + spec.page_bytes(1)

    def test_arena_is_rounded_down_and_says_so(self) -> None:
        spec = KVSpec.uniform(61, 1, 1152, page_tokens=64)
        assert spec.page_bytes() == 17_989_632
        arena = spec.arena("5GiB")
        assert (arena.bytes, arena.rounded_off) == (298 * 17_989_632, 7_798_784)
        with pytest.raises(SpecError, match="needs at least 35979264") as caught:
            spec.arena("20MB")
        assert caught.value.needed == 35_979_264  # type: ignore[attr-defined]
        with pytest.raises(SpecError, match="too many"):
            KVSpec.uniform(1, 1, 8).arena("1PiB")

    def test_numbers_out_of_range(self) -> None:
        spec = KVSpec.uniform(1, 1, 8)
        for tokens in (-1, 2**32, 1.5, "7", None, True):
            with pytest.raises(SpecError, match="tokens is"):
                spec.bytes_for(tokens)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="step_tokens is 0"):
            spec.peak_bytes(1, 0)
        with pytest.raises(IndexError):
            spec.page_bytes(1)
        with pytest.raises(IndexError):
            spec.pages_of(1, 1)
        assert spec.bytes_for(2**32 - 1) == 2**28 * spec.page_bytes()


class TestSpec:
    def test_is_a_value(self) -> None:
        spec = KVSpec.uniform(28, 4, 128)
        same = KVSpec.uniform(28, 4, 128, dtype="half", page_tokens=16)
        assert spec == same
        assert hash(spec) == hash(same)
        assert spec != KVSpec.uniform(28, 4, 128, dtype="bfloat16")
        assert spec != "a spec"
        assert copy.copy(spec) is spec
        assert copy.deepcopy(spec) is spec
        for name in ("gemma-3-27b", "nemotron-h-56b"):
            big = spec_of(name, small_dtype="int8")
            again = pickle.loads(pickle.dumps(big))
            assert again == big
            assert (again.layer_map, again.model_type, again.classes) == (
                big.layer_map,
                big.model_type,
                big.classes,
            )
            assert pickle.loads(pickle.dumps(big._native)) == big._native
        with pytest.raises(AttributeError, match="immutable"):
            spec.groups = ()  # type: ignore[misc]
        with pytest.raises(AttributeError, match="immutable"):
            del spec.groups
        with pytest.raises(TypeError, match=r"KVSpec\.uniform"):
            KVSpec()

    def test_repr(self) -> None:
        text = repr(spec_of("mimo-v2-flash"))
        assert text == (
            "<KVSpec mimo_v2_flash: 9 full layers of 4x(192+128) bfloat16"
            " + 39 window 128 layers of 8x(192+128) bfloat16,"
            " page_tokens=16, pages of 360 KiB, 3.05 MiB, 222,720 B a token>"
        )

    def test_replace(self) -> None:
        spec = spec_of("qwen2.5-7b")
        assert spec.replace(page_tokens=32).page_bytes() == 2 * spec.page_bytes()
        assert spec.replace(small_dtype="fp8").small_class() is not None
        assert spec.replace(small_dtype="fp8").replace(small_dtype=None) == spec
        assert spec.replace(layout="layer_major").layout == "layer_major"

    def test_small_class(self) -> None:
        spec = KVSpec.uniform(28, 4, 128, small_dtype="int8")
        small = spec.small_class()
        assert small is not None
        # 128 bytes and an f16 scale per token and head, K and V.
        assert small.raw_bytes == 28 * 16 * 4 * 2 * 130
        assert small.dtype == "int8"
        assert spec.classes[0].page_bytes >= spec.classes[0].raw_bytes
        assert KVSpec.uniform(1, 1, 8).small_class() is None
        with pytest.raises(SpecError, match="no smaller"):
            KVSpec.uniform(1, 1, 8, dtype="fp8", small_dtype="int8")

    def test_int8_scales(self) -> None:
        assert KVSpec.uniform(1, 2, 64, dtype="int8").bytes_per_token == 2 * 2 * 66
        assert (
            KVSpec.from_groups([LayerGroup("l", "latent", 1, k_dim=576, dtype="int8")]).bytes_per_token == 578
        )

    def test_padding_is_one_number(self) -> None:
        spec = KVSpec.uniform(3, 1, 7, page_tokens=5)
        assert [(c.raw_bytes, c.page_bytes, c.padding) for c in spec.classes] == [(420, 512, 92)]
        assert spec.page_bytes() == 512
        assert spec.bytes_for(6) == 1_024

    @pytest.mark.parametrize(
        ("numbers", "text"),
        [
            ({"layers": 0}, "layers is 0"),
            ({"kv_heads": 0}, "kv_heads is 0"),
            ({"head_dim": 0}, "k_dim is 0"),
            ({"head_dim": -1}, "k_dim is -1"),
            ({"v_head_dim": 0}, "v_dim is 0"),
            ({"window": 0}, "window is 0"),
            ({"page_tokens": 0}, "page_tokens is 0: must be a whole number from 1 to 65536"),
            ({"page_tokens": 65_537}, "page_tokens is 65537: must be a whole number from 1 to 65536"),
            ({"page_tokens": 2**40}, "must be a whole number from 1 to 65536"),
            ({"layers": 2**40}, "layers is 1099511627776"),
            ({"layers": 10**5000}, "layers is 'of 16610 bits'"),
            ({"layers": 1.0}, "layers is 1.0"),
            ({"layers": 2**20, "kv_heads": 2**32 - 1, "head_dim": 2**32 - 1}, "a page has"),
            ({"dtype": "int4"}, "'int4': must be one of"),
            ({"layout": "diagonal"}, "layout"),
        ],
    )
    def test_refused(self, numbers: dict[str, Any], text: str) -> None:
        with pytest.raises(SpecError, match=text):
            KVSpec.uniform(**{"layers": 4, "kv_heads": 2, "head_dim": 64, **numbers})

    def test_groups_refused(self) -> None:
        with pytest.raises(SpecError, match="kind 'half'"):
            LayerGroup("a", "half", 1)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="needs a window"):
            LayerGroup("a", "window", 1, 1, 64)
        with pytest.raises(SpecError, match="has no window"):
            LayerGroup("a", "full", 1, 1, 64, window=5)
        with pytest.raises(SpecError, match="0 layer groups"):
            KVSpec.from_groups([])
        with pytest.raises(SpecError, match="given twice"):
            KVSpec.from_groups([LayerGroup("a", "full", 1, 1, 64)] * 2)
        with pytest.raises(SpecError, match="same number of layers"):
            spec_of("gemma-3-27b", layout="layer_major")
        with pytest.raises(SpecError, match="stored once") as caught:
            KVSpec.from_groups([LayerGroup("a", "latent", 1, 8, 576)])
        assert (caught.value.field, caught.value.given) == ("kv_heads", 8)

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("float16", "float16"),
            ("torch.bfloat16", "bfloat16"),
            ("torch.float8_e4m3fn", "float8_e4m3fn"),
            ("FP8", "float8_e4m3fn"),
            ("float8_e4m3", "float8_e4m3fn"),
            ("bf16", "bfloat16"),
            ("half", "float16"),
            (float, "float32"),
            ("int8", "int8"),
        ],
    )
    def test_dtypes(self, given: object, name: str) -> None:
        assert parse_dtype(given) == name

    def test_dtype_objects(self) -> None:
        np = pytest.importorskip("numpy")
        assert parse_dtype(np.dtype("float16")) == parse_dtype(np.float16) == "float16"
        for wrong in ("int4", "float8_e5m2", None, 16, ""):
            with pytest.raises(SpecError, match="must be one of"):
                parse_dtype(wrong)


class TestBytes:
    @pytest.mark.parametrize(
        ("given", "size"),
        [
            (0, 0),
            (17, 17),
            (2**63 - 1, 2**63 - 1),
            ("0", 0),
            ("12", 12),
            ("1_000", 1_000),
            ("12GiB", 12 << 30),
            ("12 GiB", 12 << 30),
            ("  12GiB\n", 12 << 30),
            ("12GB", 12 * 10**9),
            ("12 GB", 12 * 10**9),
            ("512MiB", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("0.5KiB", 512),
            ("1.25kB", 1_250),
            ("1_024.5 KiB", 1_049_088),
            ("7B", 7),
            ("12gIB", 12 << 30),
            ("12GIB", 12 << 30),
            ("3KB", 3_000),
            ("2TiB", 2 << 40),
            ("2PB", 2 * 10**15),
            ("9223372036854775807", 2**63 - 1),
            ("0.0009765625KiB", 1),
            ("5.38GiB", 5_776_731_013),
            ("0.1KiB", 102),
        ],
    )
    def test_read(self, given: Any, size: int) -> None:
        assert parse_bytes(given) == size

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ("", "is empty"),
            ("  ", "is empty"),
            ("GiB", "is not a number"),
            ("NaN", "is not a number"),
            ("inf", "is not a number"),
            ("Infinity", "is not a number"),
            ("-1", "must not be negative"),
            ("-12GiB", "must not be negative"),
            ("+1", "is not a number"),
            ("1e9", "unknown unit|is not a number"),
            (".5GiB", "is not a number"),
            ("1.", "is not a number"),
            ("1,000", "is not a number"),
            ("1__000", "is not a number"),
            ("0x10", "unknown unit|is not a number"),
            ("12 Gi B", "is not a number"),
            ("12\u00a0GiB\u0661", "is not a number"),
            ("\u0661\u0662GiB", "is not a number"),
            ("12Gib", r"unknown unit 'Gib', did you mean 'GiB' or 'GB'\?"),
            ("12gb", r"unknown unit 'gb', did you mean 'GiB' or 'GB'\?"),
            ("12G", r"unknown unit 'G', did you mean 'GiB' or 'GB'\?"),
            ("12Gi", r"did you mean 'GiB' or 'GB'\?"),
            ("12k", r"did you mean 'KiB' or 'kB'\?"),
            ("12GiBs", r"did you mean 'GiB' or 'GB'\?"),
            ("12b", r"did you mean 'B'\?"),
            ("12bytes", r"did you mean 'B'\?"),
            ("12furlongs", "unknown unit 'furlongs'\\."),
            ("12%", "is not a number"),
            ("1.5", "not a whole number of bytes"),
            ("1.5B", "not a whole number of bytes"),
            ("0.0001KiB", "not a whole number of bytes"),
            ("9223372036854775808", "more than 9223372036854775807"),
            ("8EiB", "unknown unit"),
            ("8192PiB", "more than 9223372036854775807"),
            ("1" * 5000, "too many digits"),
            ("0." + "1" * 5000, "too many digits"),
            (2**63, "more than 9223372036854775807"),
            (10**5000, "more than"),
            (-1, "must not be negative"),
            (-(10**5000), "must not be negative"),
            (True, "a bool is no size"),
            (False, "a bool is no size"),
            (1.0, "a float is not exact"),
            (float("nan"), "a float is not exact"),
            (float("inf"), "a float is not exact"),
            (None, "NoneType is no size"),
            (b"12", "bytes is no size"),
            ([12], "list is no size"),
        ],
        ids=lambda value: str(value)[:20] if not isinstance(value, int) else f"int{value.bit_length()}",
    )
    def test_refused(self, given: Any, why: str) -> None:
        with pytest.raises(InvalidArgument, match=why) as caught:
            parse_bytes(given)
        assert '"12GiB"' in str(caught.value)
        assert len(str(caught.value)) < 300
        assert caught.value.given is given
        assert isinstance(caught.value, ValueError)

    def test_integers_of_other_kinds(self) -> None:
        np = pytest.importorskip("numpy")
        assert parse_bytes(np.int64(7)) == 7
        assert type(parse_bytes(np.uint64(2**63 - 1))) is int
        with pytest.raises(InvalidArgument, match="is no size"):
            parse_bytes(np.float32(7))

    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (10_240, "10 KiB"),
            (1_048_575, "1 MiB"),
            (917_504, "896 KiB"),
            (12 << 30, "12 GiB"),
            (2**63 - 1, "8192 PiB"),
            (-1536, "-1.5 KiB"),
        ],
    )
    def test_written(self, size: int, text: str) -> None:
        assert format_bytes(size) == text


def test_a_model_name_for_a_config_is_pointed_to_the_catalogue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kvalloc.SpecError, match=r"give kvalloc\.models\.get\('Qwen/Qwen2\.5-7B'\)"):
        kvalloc.KVSpec.from_hf_config("Qwen/Qwen2.5-7B")
    with pytest.raises(kvalloc.SpecError) as caught:
        kvalloc.KVSpec.from_hf_config("no/such/config.json")
    assert "models" not in str(caught.value)


def test_nearest_models_are_of_several_families():
    near = kvalloc.models.nearest("Llama-8B")
    assert near[0] == "llama-3.1-8b"
    assert len({name.split("-")[0] for name in near}) > 1
    assert kvalloc.models.nearest("gpt-oss")[:2] == ("gpt-oss-20b", "gpt-oss-120b")
    assert kvalloc.models.nearest("zzz") == ()
    with pytest.raises(kvalloc.SpecError, match=r"did you mean 'llama-3\.1-8b' or"):
        kvalloc.models.get("llama-8b")

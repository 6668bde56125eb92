"""What is refused, and what the message says: models, pools, masks, forwards that pages can't serve."""

import pytest

import kvalloc
from generating import cache_name, generated
from tinymodels import VOCAB, prompts, tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvalloc.integrations.transformers import KvallocCache  # noqa: E402 - needs both

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def cache(model_of):
    with KvallocCache.for_model(model_of("llama"), device_bytes="4MiB") as cache:
        yield cache


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "Mamba",
            {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
            "layer 0 of MambaForCausalLM can't be held in pages: it keeps the state of a recurrence",
        ),
        (
            "Bamba",
            {
                **SMALL,
                "mamba_n_heads": 8,
                "mamba_d_head": 16,
                "mamba_d_state": 16,
                "mamba_n_groups": 1,
                "attn_layer_indices": [0],
            },
            "layer 1 of BambaForCausalLM can't be held in pages: it keeps the state of a recurrence",
        ),
        (
            "Lfm2",
            {**SMALL, "layer_types": ["full_attention", "conv"]},
            "layer 1 of Lfm2ForCausalLM can't be held in pages: it keeps the state of a recurrence or a conv",
        ),
    ],
)
def test_models_that_keep_something_else(name, config, message):
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    with pytest.raises(kvalloc.SpecError, match=message):
        KvallocCache.for_model(model, device_bytes="4MiB")


def test_an_indexer_is_refused():
    model = tiny("deepseek_v3")
    model.config.layer_types = ["indexed_attention"] * 3  # as the sparse models have it
    with pytest.raises(kvalloc.SpecError, match=r"layer 0 .* the keys of a sparse-attention indexer"):
        KvallocCache.for_model(model, device_bytes="4MiB")


def test_encoders_and_things_that_are_no_models():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    with pytest.raises(kvalloc.SpecError, match="encoder with a decoder"):
        KvallocCache.for_model(transformers.T5ForConditionalGeneration(config), device_bytes="4MiB")
    with pytest.raises(kvalloc.InvalidArgument, match="not Linear"):
        KvallocCache.for_model(torch.nn.Linear(2, 2), device_bytes="4MiB")


def test_pools_and_sizes(model_of):
    llama, gemma = model_of("llama"), model_of("gemma3")
    with pytest.raises(kvalloc.InvalidArgument, match="device_bytes for a new pool, or a pool"):
        KvallocCache.for_model(llama)
    with pytest.raises(kvalloc.InvalidArgument, match="12 parsecs"):
        KvallocCache.for_model(llama, device_bytes="12 parsecs")
    pool = kvalloc.Pool(kvalloc.KVSpec.uniform(3, 2, 16, "float32"), "4MiB")
    with pytest.raises(kvalloc.UnknownTenant):
        KvallocCache.for_model(llama, pool=pool)
    tenant = pool.tenant("acme")
    with pytest.raises(kvalloc.InvalidArgument, match="a new pool has no tenants"):
        KvallocCache.for_model(llama, device_bytes="4MiB", tenant=tenant)
    with pytest.raises(kvalloc.InvalidArgument, match="for a new pool, or a pool"):
        KvallocCache.for_model(llama, device_bytes="4MiB", pool=pool)
    pool.tenant("default")
    narrow = kvalloc.Pool(kvalloc.KVSpec.uniform(3, 2, 16, "float32", window=24), "4MiB")
    narrow.tenant("default")
    with pytest.raises(
        kvalloc.SpecError, match="layer 0 of LlamaForCausalLM has no window, and a window of 24"
    ):
        KvallocCache.for_model(llama, pool=narrow)
    two = kvalloc.Pool(kvalloc.KVSpec.uniform(2, 2, 16, "float32"), "4MiB")
    two.tenant("default")
    with pytest.raises(kvalloc.SpecError, match="has 3 layers, and the spec 2"):
        KvallocCache.for_model(llama, pool=two)
    whole = kvalloc.Pool(kvalloc.KVSpec.from_hf_config(gemma.config, 16, "float32").unwindowed(), "4MiB")
    whole.tenant("default")
    with pytest.raises(
        kvalloc.SpecError, match="layer 0 of Gemma3ForCausalLM has a window of 24 tokens, and no window"
    ):
        KvallocCache.for_model(gemma, pool=whole)
    # Heads of another size show when they come.
    pool = kvalloc.Pool(kvalloc.KVSpec.uniform(3, 4, 16, "float32"), "4MiB")
    pool.tenant("default")
    other = KvallocCache.for_model(llama, pool=pool)
    ids, mask = prompts(20)
    with pytest.raises(
        kvalloc.InvalidArgument, match=r"layer 0 gives K and V of \(1, 2, 20, 16\).*stores \(1, 4, 20, 16\)"
    ):
        generated(llama, ids, mask, other, max_new_tokens=2)
    assert pool.held == 0


def test_masks(cache, model_of):
    llama = model_of("llama")
    ids, mask = prompts(20, 20)
    right = mask.clone()
    right[1, 15:] = 0
    with pytest.raises(kvalloc.InvalidArgument, match="row 1: attention_mask has zeros behind its first one"):
        generated(llama, ids, right, cache, max_new_tokens=2)
    answer = generated(llama, ids, mask, cache, max_new_tokens=2)
    hiding = torch.ones_like(answer)
    hiding[0, :5] = 0
    with pytest.raises(
        kvalloc.InvalidArgument, match=r"row 0: attention_mask has 5 columns of padding, and .* given 0"
    ):
        generated(llama, answer, hiding, cache, max_new_tokens=2)
    with pytest.raises(kvalloc.InvalidArgument, match=r"attention_mask has shape \(2, 1\); with 21 columns"):
        llama(
            input_ids=ids[:, :1], attention_mask=mask[:, :1], logits_to_keep=1, **{cache_name(llama): cache}
        )
    assert cache.get_seq_length() == 21
    cache.reset()
    padded, padded_mask = prompts(20, 12)
    generated(llama, padded, padded_mask, cache, max_new_tokens=2, prefill_chunk_size=4)
    with pytest.raises(kvalloc.InvalidArgument, match=r"input_ids has shape \(20,\)"):
        cache.begin(ids[0])


@pytest.mark.parametrize("padded", [20, 17])
@pytest.mark.parametrize("columns", [5, 15, 20, 23])
def test_a_prompt_that_does_not_go_on_says_what_to_do(cache, model_of, columns, padded):
    """Without `reset` transformers cuts as much off a shorter prompt as the cache holds, or all of it."""
    llama = model_of("llama")
    ids, mask = prompts(20, padded)
    answer = generated(llama, ids, mask, cache, max_new_tokens=4)
    assert cache.get_seq_length() == 23
    other, full = prompts(columns, columns)
    told = "behind the 23 columns that the cache holds" if padded == 20 else "the cache was given 3"
    with pytest.raises(kvalloc.InvalidArgument, match=rf"{told}.*Call cache.reset\(\) before"):
        generated(llama, other, full, cache, max_new_tokens=2)
    # The cache is as it was: what goes on does.
    assert cache.get_seq_length() == 23
    longer = torch.cat([answer, answer[:, :2]], 1)
    mask = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], 1)
    want = generated(llama, longer, mask, max_new_tokens=3)
    assert torch.equal(generated(llama, longer, mask, cache, max_new_tokens=3), want)
    cache.reset()
    want = generated(llama, other, full, max_new_tokens=3)
    assert torch.equal(generated(llama, other, full, cache, max_new_tokens=3), want)


def test_forwards_that_pass_the_cache_by(cache, model_of):
    llama = model_of("llama")
    ids, mask = prompts(20)
    with pytest.raises(kvalloc.InvalidArgument, match="the cache was not told of this forward"):
        llama.model(input_ids=ids, **{cache_name(llama): cache})
    # The second layer is left out, as early exit does.
    layers = llama.model.layers
    llama.model.layers = layers[:1]
    with pytest.raises(kvalloc.InvalidArgument, match=r"wrote no KV of layer 1 \(2 layers altogether\)"):
        generated(llama, ids, mask, cache, max_new_tokens=2)
    llama.model.layers = layers
    assert cache.pool.held == 0
    with pytest.raises(kvalloc.InvalidArgument, match="neither input_ids nor inputs_embeds"):
        llama(**{cache_name(llama): cache})
    with pytest.raises(kvalloc.InvalidArgument, match="call this on the cache"):
        cache.layers[0].reorder_cache(torch.tensor([0]))
    assert cache.pool.audit().ok


def test_training(cache, model_of):
    llama = model_of("llama")
    ids, _ = prompts(20)
    llama.train()
    try:
        with pytest.raises(kvalloc.InvalidArgument, match="pages carry no gradient"):
            llama(input_ids=ids, **{cache_name(llama): cache})
    finally:
        llama.eval()


def test_attention_over_pages(cache, model_of, paged):
    llama = model_of("llama")
    ids, mask = prompts(20, 12)
    paged(llama)
    with pytest.raises(
        kvalloc.InvalidArgument, match="layer 0 attends by 'kvalloc_paged' without a KvallocCache"
    ):
        generated(llama, ids, mask, max_new_tokens=2)
    whole = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    with (
        torch.no_grad(),
        pytest.raises(kvalloc.InvalidArgument, match=r"takes an attention_mask of \[rows, columns\] only"),
    ):
        llama(input_ids=ids, attention_mask=whole, **{cache_name(llama): cache})
    llama.model.layers[1].self_attn.is_causal = False
    try:
        with pytest.raises(
            kvalloc.InvalidArgument, match=r"layer 1 \(LlamaAttention\) asks for attention that is not causal"
        ):
            generated(llama, ids, mask, cache, max_new_tokens=2)
    finally:
        llama.model.layers[1].self_attn.is_causal = True
    assert cache.pool.held == 0


def test_a_latent_that_is_not_expanded_by_a_plain_matrix(model_of, paged):
    model = tiny("deepseek_v3")
    ids, mask = prompts(20)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = torch.nn.Sequential(layer.self_attn.kv_b_proj)
    expected = generated(model, ids, mask, max_new_tokens=4)
    with KvallocCache.for_model(model, device_bytes="4MiB") as cache:
        assert torch.equal(generated(model, ids, mask, cache, max_new_tokens=4), expected)
        cache.reset()
        paged(model)
        with pytest.raises(kvalloc.InvalidArgument, match="expands its latent by Sequential"):
            generated(model, ids, mask, cache, max_new_tokens=4)


def test_a_mask_of_ones_own_is_taken_by_gathered_attention(cache, model_of):
    """A tree of drafts, say: attention is the model's, and nothing of it is published."""
    llama = model_of("llama")
    ids, _ = prompts(20)
    whole = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    whole[..., 19, 3:9] = False
    with torch.no_grad():
        expected = llama(input_ids=ids, attention_mask=whole).logits
        logits = llama(input_ids=ids, attention_mask=whole, **{cache_name(llama): cache}).logits
    assert torch.allclose(logits, expected, atol=1e-4)
    cache.reset()
    assert cache.pool.cached == 0

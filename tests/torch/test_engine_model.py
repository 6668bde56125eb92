"""The reference scheduler with a real model below it: the tokens are those of plain generate."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvalloc
from kvalloc.engine import Engine, Literal, Request, Sampling, WallClock
from tinymodels import MOE
from tinypool import check_idle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvalloc.engine.torch_model import TorchModel, choose  # noqa: E402 - needs both

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
# A latent whose size is no power of two.
LATENT = MOE | {"head_dim": 8, "kv_lora_rank": 20}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 48},
    "Gemma2": {"sliding_window": 48, "query_pre_attn_scalar": 16, "num_hidden_layers": 4},
    "Gemma3": {"sliding_window": 48, "query_pre_attn_scalar": 16, "sliding_window_pattern": 3},
    "GptOss": {"sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT | {"q_lora_rank": 24},
}


def make_model(family: str = "Llama", **fields):
    """Return a model with random weights, the same each time."""
    torch.manual_seed(1)
    config = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, config)(**SMALL | FAMILIES[family] | fields)
    )
    return model.eval()


@pytest.fixture(scope="module")
def llama():
    return make_model()


def plain(model, ids, max_new: int) -> list[int]:
    """Return what ``generate`` says."""
    ids = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
    eos = model.generation_config.eos_token_id
    how = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max_new, eos_token_id=eos, pad_token_id=0
    )
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return out[0, ids.shape[1] :].tolist()


class Stage:
    """A pool, its store and an engine for a model: open as a context."""

    def __init__(self, model, size="8MiB", names=("a", "b"), tenants=None, **options):
        self.pool = kvalloc.Pool(kvalloc.KVSpec.from_hf_config(model.config, dtype="float32"), size)
        self.tenants = {name: self.pool.tenant(name, **(tenants or {}).get(name, {})) for name in names}
        self.store = kvalloc.TorchStore(self.pool)
        self.runner = TorchModel(model, self.store)
        settings = {"max_rows": 8, "token_budget": 32, "max_tokens": 512, "stop": self.runner.eos}
        self.engine = Engine(self.pool, self.runner, self.tenants, clock=WallClock(), **settings | options)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.runner.close()
        if kind is None:
            check_idle(self.pool)
        self.store.close()

    def serve(self, *requests: Request) -> list[list[int]]:
        """Serve requests that came together; return the tokens of each."""
        said: list[list[int]] = [[] for _ in requests]
        for request, tokens in zip(requests, said, strict=True):
            request.on_token = tokens.append
        for _ in self.engine.run(requests):
            assert self.pool.audit().ok
        return said


def prompts(count: int, shared: int = 40, most: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Return prompts that begin alike and have lengths of their own."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, VOCABULARY, shared)
    return [
        np.concatenate([head, rng.integers(0, VOCABULARY, rng.integers(1, most))]).astype(np.int32)
        for _ in range(count)
    ]


def ask(ids, tenant: str = "a", max_new: int = 20, **options) -> Request:
    return Request(0.0, tenant, Literal(np.asarray(ids, dtype=np.int32)), max_new, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_plain_generate(family):
    model = make_model(family)
    asked = prompts(6)
    with Stage(model) as stage:
        requests = [ask(ids, "ab"[i % 2]) for i, ids in enumerate(asked)]
        said = stage.serve(*requests)
        again = [ask(ids, "ab"[i % 2]) for i, ids in enumerate(asked)]
        assert stage.serve(*again) == said
        assert stage.engine.steps > 6 * 20 / 8  # chunks and rows shared steps
    assert said == [plain(model, ids, 20) for ids in asked]
    assert all(request.cached >= 32 for request in again)  # all but the last page at least


def test_a_prefix_is_shared_above_tenants_and_computed_once(llama):
    asked = prompts(6, shared=48)
    rights = {name: {"parent": "org", "publish": ["org"]} for name in "ab"}
    with Stage(llama, names=("org", "a", "b"), tenants=rights) as stage:
        requests = [ask(ids, "ab"[i % 2], share=(("org", 48),)) for i, ids in enumerate(asked)]
        said = stage.serve(*requests)
        assert [request.cached for request in requests[2:]] == [48] * 4
        assert stage.pool.stats().hit_tokens >= 4 * 48
        page = stage.pool.spec.page_bytes()
        assert stage.tenants["org"].cached == 3 * page
    assert said == [plain(llama, ids, 20) for ids in asked]


def test_a_pool_that_holds_two_of_eight_requests_gives_the_same_tokens(llama):
    asked = prompts(8)
    longest = max(map(len, asked)) + 20
    spec = kvalloc.KVSpec.from_hf_config(llama.config, dtype="float32")
    with Stage(llama, size=2 * spec.bytes_for(longest) + 2 * spec.page_bytes()) as stage:
        said = stage.serve(*[ask(ids, "ab"[i % 2]) for i, ids in enumerate(asked)])
        assert stage.pool.stats().evictions
    assert said == [plain(llama, ids, 20) for ids in asked]


def test_a_row_that_finds_no_room_for_a_step_goes_on_later_with_the_same_tokens(llama):
    asked = prompts(3, shared=0, most=30)
    spec = kvalloc.KVSpec.from_hf_config(llama.config, dtype="float32")
    with Stage(llama, size=9 * spec.page_bytes(), whole_need=False) as stage:
        requests = [ask(ids, max_new=40) for ids in asked]
        said = stage.serve(*requests)
        refused = [request for request in requests if request.refused]
        assert stage.pool.stats().refused_claim + stage.pool.stats().refused_frames
    assert 0 < len(refused) < 3
    for ids, request, tokens in zip(asked, requests, said, strict=True):
        expected = plain(llama, ids, 40)
        assert tokens == (expected[: len(tokens)] if request.refused else expected)


def test_a_limit_makes_a_tenant_wait_and_changes_no_token(llama):
    asked = prompts(4, shared=0)
    spec = kvalloc.KVSpec.from_hf_config(llama.config, dtype="float32")
    limit = spec.bytes_for(max(map(len, asked)) + 20)
    with Stage(llama, tenants={"a": {"limit": limit}}) as stage:
        requests = [ask(ids, "a") for ids in asked]
        said = stage.serve(*requests)
        assert max(request.admitted for request in requests) > min(r.finished for r in requests)
    assert said == [plain(llama, ids, 20) for ids in asked]


def test_without_reuse_nothing_is_hit(llama):
    asked = prompts(4, shared=64)
    with Stage(llama, reuse=False) as stage:
        requests = [ask(ids) for ids in asked + asked]
        said = stage.serve(*requests)
        assert not any(request.cached for request in requests)
    assert said == [plain(llama, ids, 20) for ids in asked] * 2


def test_eos_ends_an_answer(llama):
    (ids,) = prompts(1)
    whole = plain(llama, ids, 20)
    stops = [whole[7], whole[11]]
    for eos in (stops[0], stops):
        model = make_model(eos_token_id=eos)
        with Stage(model) as stage:
            assert stage.runner.eos == tuple(np.ravel(eos))
            (said,) = stage.serve(request := ask(ids))
        assert said == plain(model, ids, 20) == whole[: min(map(whole.index, np.ravel(eos))) + 1]
        assert request.produced == len(said)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV2", "DeepseekV3"])
def test_forward_gives_the_logits_of_every_place_asked_for(family):
    model = make_model(family)
    (ids,) = prompts(1)
    known = torch.from_numpy(ids.astype(np.int64))
    with torch.inference_mode():
        expected = model(known[None]).logits[0]
    found = []
    with Stage(model) as stage:
        batch = stage.pool.batch(max_sequences=1, max_tokens=len(ids), max_step_tokens=24)
        sequence = stage.pool.open(stage.tenants["a"], ids)
        batch.add(sequence)
        for at in range(0, len(ids), 24):
            step = batch.step(token_budget=24)
            given = known[at : at + step.num_tokens].numpy()
            found.append(stage.runner.forward(batch, step, given, np.arange(step.num_tokens)))
            batch.commit(np.full(1, -1, np.int32))
        batch.remove(sequence)
        sequence.close()
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)


# -- sampling -----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_in_any_company(llama):
    asked = prompts(5)
    how = [Sampling(0.8, 0.9, seed) for seed in range(5)]
    with Stage(llama) as stage:
        together = stage.serve(*[ask(ids, sampling=way) for ids, way in zip(asked, how, strict=True)])
    alone = []
    for ids, way in zip(asked, how, strict=True):
        with Stage(llama, token_budget=8) as stage:
            alone += stage.serve(ask(ids, sampling=way))
    assert together == alone
    with Stage(llama) as stage:
        (other,) = stage.serve(ask(asked[0], sampling=Sampling(0.8, 0.9, 99)))
    assert other != together[0]


def test_greedy_and_sampled_rows_share_a_batch(llama):
    asked = prompts(4)
    with Stage(llama) as stage:
        said = stage.serve(
            *[ask(ids, sampling=Sampling(float(i % 2), 1.0, i)) for i, ids in enumerate(asked)]
        )
    assert said[::2] == [plain(llama, ids, 20) for ids in asked[::2]]
    assert said[1::2] != [plain(llama, ids, 20) for ids in asked[1::2]]


def test_draws_follow_the_probabilities():
    shares = torch.tensor([0.05, 0.5, 0.15, 0.3])
    rows = 4000
    how = [Sampling(1.0, 1.0, seed) for seed in range(rows)]
    places = np.zeros(rows, dtype=np.int32)
    counts = np.bincount(choose(shares.log().expand(rows, 4), how, places), minlength=4)
    expected = shares.numpy() * rows
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom: 1 in 1000
    colder = choose(shares.log().expand(rows, 4), [Sampling(0.25, 1.0, way.seed) for way in how], places)
    assert np.bincount(colder, minlength=4)[1] > counts[1] * 1.5


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {1}), (0.5, {1}), (0.51, {1, 3}), (0.9, {1, 2, 3})])
def test_top_p_keeps_the_likeliest_whose_sum_reaches_it(top_p, kept):
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log().expand(500, 4)
    chosen = choose(
        logits, [Sampling(1.0, top_p, seed) for seed in range(500)], np.zeros(500, dtype=np.int32)
    )
    assert set(chosen.tolist()) == kept


def test_places_draw_anew():
    logits = torch.zeros(1, 50)
    chosen = [choose(logits, [Sampling(1.0)], np.array([place]))[0] for place in range(200)]
    assert len(set(chosen)) > 40


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}],
)
def test_sampling_out_of_range_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(kvalloc.InvalidArgument, match=name):
        Sampling(**wrong)


# -- streams ------------------------------------------------------------------------------------------------


def test_streams_are_read_in_turn(llama):
    asked = prompts(3)
    with Stage(llama) as stage:
        streams = [stage.engine.stream(ask(ids, "ab"[i % 2])) for i, ids in enumerate(asked)]
        in_turn = list(zip(*streams, strict=True))
    assert [list(said) for said in zip(*in_turn, strict=True)] == [plain(llama, ids, 20) for ids in asked]


def test_a_stream_that_is_dropped_gives_its_pages_back(llama):
    first, second = prompts(2, shared=0)
    with Stage(llama) as stage:
        dropped, kept = stage.engine.stream(ask(first)), stage.engine.stream(ask(second))
        head = [next(dropped) for _ in range(3)]
        del dropped
        gc.collect()
        assert len(stage.engine.rows) == 1
        rest = list(kept)
    assert head == plain(llama, first, 20)[:3]
    assert rest == plain(llama, second, 20)


# -- faults -------------------------------------------------------------------------------------------------


def test_a_closed_runner_leaves_the_model_as_it_was(llama):
    (ids,) = prompts(1)
    before, expected = llama.config._attn_implementation, plain(llama, ids, 5)
    stage = Stage(llama)
    with pytest.raises(kvalloc.InvalidArgument, match="while a TorchModel is open"):
        llama(torch.from_numpy(ids.astype(np.int64))[None])
    stage.runner.close()
    stage.runner.close()
    assert "closed" in repr(stage.runner)
    assert llama.config._attn_implementation == before
    assert plain(llama, ids, 5) == expected
    with pytest.raises(kvalloc.ClosedError):
        stage.serve(ask(ids))


def test_a_pool_of_another_model_is_refused(llama):
    spec = kvalloc.KVSpec.uniform(layers=2, kv_heads=2, head_dim=16, dtype="float32")
    with (
        kvalloc.TorchStore(kvalloc.Pool(spec, "1MiB")) as store,
        pytest.raises(kvalloc.SpecError, match=r"has 2 layers, LlamaForCausalLM has 3"),
    ):
        TorchModel(llama, store)
    assert llama.config._attn_implementation != "kvalloc_engine"


def test_a_window_that_the_spec_does_not_have_is_refused():
    model = make_model("Mistral")
    spec = kvalloc.KVSpec.uniform(layers=3, kv_heads=2, head_dim=16, dtype="float32")
    pool = kvalloc.Pool(spec, "1MiB")
    tenants = {"a": pool.tenant("a")}
    with kvalloc.TorchStore(pool) as store, TorchModel(model, store) as runner:
        engine = Engine(pool, runner, tenants, max_rows=2, token_budget=32, max_tokens=128)
        engine.submit(ask(prompts(1)[0]))
        with pytest.raises(kvalloc.SpecError, match=r"layer 0 \(MistralAttention\) asks for a window of 48"):
            engine.step()
        assert not pool.stats().published_pages


def test_a_latent_that_nobody_can_see_is_refused_by_layer():
    group = kvalloc.LayerGroup("latent", "latent", layers=3, dtype="float32", k_dim=28)
    pool = kvalloc.Pool(kvalloc.KVSpec.from_groups([group]), "1MiB")
    wrapped, biased = (make_model("DeepseekV3") for _ in range(2))
    attention = wrapped.model.layers[1].self_attn
    attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)
    attention = biased.model.layers[2].self_attn
    attention.kv_b_proj = torch.nn.Linear(20, attention.kv_b_proj.out_features)
    narrow = make_model("DeepseekV3", kv_lora_rank=16)
    known = "by the pool's spec"
    other = "of 16 values and 8 that carry the position, and the pool's spec has 28"
    refused = [(0, make_model(), known), (1, wrapped, known), (2, biased, known), (0, narrow, other)]
    with kvalloc.TorchStore(pool) as store:
        for layer, model, why in refused:
            before = model.config._attn_implementation
            with pytest.raises(kvalloc.SpecError, match=f"layer {layer} of .* keeps a latent {why}"):
                TorchModel(model, store)
            assert model.config._attn_implementation == before


def test_sparse_attention_is_refused_by_layer(monkeypatch):
    model = make_model("DeepseekV3")
    monkeypatch.setattr(model.model.layers[1].self_attn, "indexer", None, raising=False)
    with pytest.raises(kvalloc.SpecError, match=r"layer 1 of DeepseekV3ForCausalLM chooses by an indexer"):
        Stage(model)


def test_a_layer_that_does_not_expand_its_latent_is_named(monkeypatch):
    model = make_model("DeepseekV3")
    stage = Stage(model)
    attention = model.model.layers[1].self_attn
    expand = attention.expand_kv

    def past_the_layer(kv_nope, k_rot):
        with monkeypatch.context() as inside:
            inside.setitem(attention._modules, "kv_b_proj", attention.kv_b_proj.forward)
            return expand(kv_nope, k_rot)

    monkeypatch.setattr(attention, "expand_kv", past_the_layer)
    stage.engine.submit(ask(prompts(1)[0]))
    with pytest.raises(kvalloc.SpecError, match=r"layer 1 \(DeepseekV3Attention\) did not expand its latent"):
        stage.engine.step()
    assert not stage.pool.stats().published_pages
    stage.runner.close()
    stage.store.close()


def test_a_latent_is_what_pages_hold_and_a_closed_runner_sees_no_more_of_it():
    model = make_model("DeepseekV3")
    (ids,) = prompts(1)
    expected = plain(model, ids, 5)
    with Stage(model) as stage:
        assert [(g.kind, g.k_dim, g.v_dim) for g in stage.pool.spec.groups] == [("latent", 20 + 8, 0)]
        assert stage.serve(ask(ids, max_new=5)) == [expected]
        assert not stage.runner._latents
    assert not model.model.layers[0].self_attn.kv_b_proj._forward_pre_hooks
    assert plain(model, ids, 5) == expected


def test_a_model_whose_attention_is_fixed_is_refused(llama, monkeypatch):
    monkeypatch.setattr(llama, "_can_set_attn_implementation", lambda: False)
    pool = kvalloc.Pool(kvalloc.KVSpec.from_hf_config(llama.config, dtype="float32"), "1MiB")
    with kvalloc.TorchStore(pool) as store, pytest.raises(kvalloc.SpecError, match="does not let"):
        TorchModel(llama, store)


def test_a_layer_that_keeps_its_attention_is_named(monkeypatch):
    model = make_model()
    attention = model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    stage = Stage(model)
    stage.engine.submit(ask(prompts(1)[0]))
    with pytest.raises(
        kvalloc.SpecError, match=r"layer 1 of LlamaForCausalLM did not hand its attention over"
    ):
        stage.engine.step()
    assert not stage.pool.stats().published_pages
    stage.runner.close()
    stage.store.close()


@pytest.mark.parametrize("family", ["Llama", "DeepseekV3"])
def test_nan_in_freed_pages_reaches_no_token(family):
    model, asked = make_model(family), prompts(4)
    with Stage(model) as stage:
        for cls in range(len(stage.pool.spec.classes)):
            stage.store.page_bytes_view(cls).fill_(0xFF)  # NaN, whatever it is read as
        said = stage.serve(*[ask(ids) for ids in asked])
    assert said == [plain(model, ids, 20) for ids in asked]

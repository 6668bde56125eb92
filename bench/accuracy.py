"""What storing KV in fewer bits costs: perplexity of SmolLM2-135M-Instruct on `accuracy.txt`, by format.

The text is fed in chunks, each through the reference engine's model runner: a chunk's K and V are written
into pages of the format, and attention reads them, with all earlier ones, out of these pages. All formats see
the same tokens, and all else is float32, so that what differs comes from storage. float32 pages are what the
others are compared with; the first line, the model's own attention over no pages at all, checks these.

    $ OMP_NUM_THREADS=1 python bench/accuracy.py
    $ OMP_NUM_THREADS=1 python bench/accuracy.py --json accuracy.json
"""

from __future__ import annotations

import argparse
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
FORMATS = (FULL, "float16", "bfloat16", "float8_e4m3fn", "int8")
OWN = "no pages"


class Paged:
    """The model over pages of one format, fed the text chunk by chunk."""

    def __init__(self, model, dtype: str, ids: np.ndarray, chunk: int, open_until: ExitStack) -> None:
        spec = kvalloc.KVSpec.from_hf_config(model.config, dtype=dtype)
        self.bytes_per_token = spec.bytes_per_token
        pool = kvalloc.Pool(spec, spec.bytes_for(len(ids)) + 2 * spec.page_bytes())
        self.store = open_until.enter_context(kvalloc.TorchStore(pool))
        self.runner = open_until.enter_context(TorchModel(model, self.store))
        self.ids, self.chunk = ids, chunk
        self.batch = pool.batch(max_sequences=1, max_tokens=len(ids), max_step_tokens=chunk)
        self.batch.add(pool.open(pool.tenant("bench"), ids))

    def logits(self, at: int) -> torch.Tensor:
        """Feed the chunk that begins at a token; return its logits, float32 [tokens, vocabulary]."""
        step = self.batch.step(token_budget=self.chunk)
        given = self.ids[at : at + step.num_tokens].astype(np.int64)
        logits = self.runner.forward(self.batch, step, given, np.arange(step.num_tokens))
        self.batch.commit(np.full(1, -1, np.int32))
        return logits


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

    def row(self, full: Tally, bytes_per_token: int | None) -> dict[str, float | int | None]:
        """Return the line's figures."""
        losses, expected = torch.cat(self.losses), torch.cat(full.losses)
        perplexity, reference = math.exp(losses.mean()), math.exp(expected.mean())
        differences = losses - expected  # token by token, so what makes a token hard cancels out
        return {
            "bytes_per_token": bytes_per_token,
            "perplexity": perplexity,
            "difference": perplexity - reference,
            "standard_error": reference * float(differences.std()) / math.sqrt(len(differences)),
            "mean_logit_error": self.apart / self.places,
            "max_logit_error": self.furthest,
            "top1_agreement": self.same / self.places,
        }


def measure(model, ids: np.ndarray, chunk: int) -> dict[str, dict[str, float | int | None]]:
    """Feed the text to all formats, chunk by chunk side by side; return the table's lines by name."""
    targets = torch.from_numpy(ids.astype(np.int64))
    hidden = model.model(targets[None], use_cache=False).last_hidden_state[0]
    tallies = {name: Tally() for name in (OWN, *FORMATS)}
    with ExitStack() as open_until:
        paged = {name: Paged(model, name, ids, chunk, open_until) for name in FORMATS}
        for at in range(0, len(ids), chunk):
            full = paged[FULL].logits(at)
            following = targets[at + 1 : at + len(full) + 1]
            tallies[OWN].add(model.lm_head(hidden[at : at + len(full)]), full, following)
            for name, side in paged.items():
                tallies[name].add(full if name == FULL else side.logits(at), full, following)
    sizes = {name: side.bytes_per_token for name, side in paged.items()}
    return {name: tally.row(tallies[FULL], sizes.get(name)) for name, tally in tallies.items()}


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunk", type=int, default=64, help="tokens a step")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    before = machine()
    torch.set_grad_enabled(False)
    folder = smollm2.smollm2(lambda text: print(text, file=sys.stderr))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = np.asarray(AutoTokenizer.from_pretrained(folder)(TEXT.read_text())["input_ids"], np.int32)
    rows = measure(model, ids, asked.chunk)

    print(f"{smollm2.NAME}, {len(ids):,} tokens, {asked.chunk} a step")
    print("KV              B/token  perplexity  difference    s.e.  |logit error|      max  top-1 same")
    for name, row in rows.items():
        print(
            f"{name:<14} {row['bytes_per_token'] or '-':>8} {row['perplexity']:11.4f} "
            f"{row['difference']:+11.4f} {row['standard_error']:7.4f} {row['mean_logit_error']:14.2e} "
            f"{row['max_logit_error']:8.2e} {row['top1_agreement']:11.2%}"
        )
    if rows[OWN]["max_logit_error"] > 1e-2:
        sys.exit(
            "float32 pages do not give the logits of the model's own attention: the figures mean nothing"
        )
    if asked.json:
        report = {
            "command": " ".join(["python", "bench/accuracy.py", *sys.argv[1:]]),
            "model": smollm2.NAME,
            "tokens": len(ids),
            "chunk": asked.chunk,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": before,
            "results": rows,
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Do tenants get what they were promised? A quiet tenant beside a noisy one, and weighted shares.

``python bench/sharing.py [servegen_client_digest.csv] [--json FILE]``

*Isolation.* A quiet tenant holds conversations that fit inside its reserve; a noisy one floods the same pool
with prompts that never come again, far more than fit. The quiet tenant's hit rate and admission wait beside
the noisy one are compared with the same requests alone in the same pool. Steps take the same time whatever
is in them: what is compared is memory, not arithmetic.

*Shares.* Eight tenants of weights 1, 2, 4, ..., each with more work than fits (lengths of ServeGen's clients,
or drawn without the digest): Jain's index of held bytes / weight, from the mean over the time in which all of
them wait. Jain, Chiu and Hawe (1984): (sum x)^2 / (n sum x^2), 1 if all are equal.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clock import machine
from kvalloc import KVSpec
from kvalloc.engine import Request, StepTime, TenantPlan, Text, builtin_workload, servegen
from kvalloc.engine.replay import Replay

SPEC = KVSpec.uniform(layers=28, kv_heads=4, head_dim=128, dtype="float16", page_tokens=16)
DEVICE = "24GiB"
SECONDS = 300.0
STEADY = StepTime(base=0.025, prefill=0.0, row=0.0, bandwidth=1e18)
WEIGHTS = (1, 2, 4, 1, 2, 4, 1, 2)
MANY = 20_000  # requests of each saturating tenant, more than are served


def quiet(seconds: float) -> Iterator[Request]:
    """Every fourth conversation of the built-in chat tenant: together they fit into the reserve."""
    known: dict[int, int] = {}
    for request in builtin_workload(seconds):
        if request.tenant != "chat" or not isinstance(request.prompt, Text):
            continue
        talk = request.prompt.parts[1][0]  # the first question; the system prompt is before it
        if known.setdefault(talk, len(known)) % 4 == 0:
            request.tenant, request.share = "quiet", ()
            yield request


def flood(seconds: float, rate: float) -> Iterator[Request]:
    """One-off prompts of 4,000 to 12,000 tokens."""
    rng = np.random.default_rng(1)
    now = 0.0
    for number in range(1 << 20):
        now += rng.exponential(1.0 / rate)
        if now >= seconds:
            return
        text = (1 << 30) + number
        length, reply = int(rng.integers(4000, 12_000)), int(rng.integers(100, 400))
        yield Request(now, "noisy", Text(((text, length),)), reply, key=text, reply=text)


def serve(requests: Iterator[Request], plans: list[TenantPlan]) -> dict[str, Any]:
    """Replay requests; the numbers of `kvalloc.engine.replay`."""
    replay = Replay(SPEC, DEVICE, plans, step_time=STEADY, token_budget=65_536)
    result = replay.run(requests)
    assert result["audit"]["ok"], result["audit"]
    return result


def isolation() -> dict[str, float]:
    """The quiet tenant alone and beside the flood."""
    plans = [TenantPlan("quiet", reserve="50%", weight=1), TenantPlan("noisy", weight=1)]
    out: dict[str, float] = {}
    for name, others in (("alone", iter(())), ("beside", flood(SECONDS, 8.0))):
        both = heapq.merge(quiet(SECONDS), others, key=lambda request: request.arrival)
        result = serve(both, plans)
        tenant = next(row for row in result["tenants"] if row["name"] == "quiet")
        noisy = next(row for row in result["tenants"] if row["name"] == "noisy")
        out |= {
            f"hit_rate_{name}": tenant["hit_rate"],
            f"wait_mean_{name}": tenant["wait_s"]["mean"],
            f"wait_p99_{name}": tenant["wait_s"]["p99"],
            f"evictions_{name}": result["pool"]["evictions"],
            f"noisy_requests_{name}": noisy["requests"],
            f"noisy_wait_mean_{name}": noisy["wait_s"]["mean"],
            f"quiet_requests_{name}": tenant["requests"],
        }
    out["hit_rate_ratio"] = out["hit_rate_beside"] / out["hit_rate_alone"]
    out["wait_ratio"] = out["wait_mean_beside"] / out["wait_mean_alone"]
    return out


def lengths(digest: Path | None) -> list[Iterator[tuple[int, int]]]:
    """Prompt and reply lengths of eight clients, without end: the busiest that write real replies."""

    def drawn(number: int, window: servegen.Window | None) -> Iterator[tuple[int, int]]:
        rng = np.random.default_rng([2, number])
        while window is None:
            yield int(rng.lognormal(7.0, 0.8)) + 1, int(rng.lognormal(5.5, 0.7)) + 1
        while True:
            yield window.prompt.at(rng.standard_normal()), window.reply.at(rng.standard_normal())

    if digest is None:
        return [drawn(i, None) for i in range(len(WEIGHTS))]
    windows = [client.windows[0] for client in servegen.read_digest(digest)]
    writers = [window for window in windows if window.reply.p50 >= 40][: len(WEIGHTS)]
    return [drawn(i, window) for i, window in enumerate(writers)]


def shares(digest: Path | None) -> dict[str, Any]:
    """Eight tenants, each with more to do than fits."""
    plans = [TenantPlan(f"t{i}", weight=weight) for i, weight in enumerate(WEIGHTS)]
    requests = []
    for i, each in enumerate(lengths(digest)):
        for n, (prompt, reply) in zip(range(MANY), each, strict=False):
            text = (1 << 29) + i * MANY + n
            requests.append(Request(0.0, f"t{i}", Text(((text, prompt),)), reply, key=i, reply=text))
    replay = Replay(SPEC, DEVICE, plans, step_time=STEADY, token_budget=65_536, max_rows=1024)
    held = np.zeros(len(plans))
    samples = 0
    queues = list(replay.engine.queues.values())
    for now in replay.engine.run(requests):
        if not all(queue.requests for queue in queues) or now > 4 * SECONDS:
            break
        if now > 20.0:
            held += [replay.tenants[plan.name].held for plan in plans]
            samples += 1
    assert samples > 1000, samples
    share = held / samples / np.array(WEIGHTS)
    return {
        "jain": float(share.sum() ** 2 / (len(share) * (share**2).sum())),
        "steps": samples,
        "held_over_weight_mib": [round(each / 2**20, 1) for each in share.tolist()],
        "lengths": "servegen" if digest else "lognormal",
    }


def main() -> None:
    """Measure both and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("digest", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result = {"machine": machine(), "isolation": isolation(), "shares": shares(asked.digest)}
    for part in ("isolation", "shares"):
        print(part)
        for name, value in result[part].items():
            print(f"  {name:24} {value if isinstance(value, list | str) else format(value, ',.4f')}")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

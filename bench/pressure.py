"""A pool that is too small: stopping rows by swap, by recompute, or as each is cheaper.

``python bench/pressure.py mooncake_conversation_trace.jsonl [--requests N] [--device SIZE] [--host SIZE]``

The conversation trace through the reference scheduler, in virtual time. "none" admits what fits now and never
stops anybody: when no row can grow, the newest request is given up, which is what first come, first served
without preemption comes to. "reserve" admits by whole need, so that nobody has to stop.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from clock import machine
from kvalloc import KVSpec
from kvalloc.engine import StepTime, TenantPlan, open_trace
from kvalloc.engine.replay import Replay

SPEC = KVSpec.uniform(layers=28, kv_heads=4, head_dim=128, dtype="float16", page_tokens=16)
POLICIES = ("none", "reserve", "recompute", "swap", "auto")
NOT_SHOWN = ("policy", "reclaims", "give_backs")  # nobody is reclaimed from or lends here


def serve(trace: Path, policy: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Replay with one policy."""
    plans = [TenantPlan(f"t{i}", traffic=1.0) for i in range(4)]
    preempt = None if policy in ("none", "reserve") else policy
    replay = Replay(
        SPEC,
        asked.device,
        plans,
        host_bytes=asked.host,
        preempt=preempt,
        step_time=StepTime.parse(asked.step_time),
    )
    replay.engine.whole_need = policy == "reserve"
    requests = []
    for request in open_trace(trace):
        if len(requests) == asked.requests:
            break
        requests.append(request)
    result = replay.run(requests)
    assert result["audit"]["ok"], result["audit"]
    run = result["run"]
    waits = [row["wait_s"] for row in result["tenants"]]
    return {
        "finished": run["finished"],
        "refused": run["refused"],
        "virtual_s": run["virtual_seconds"],
        "finished_per_s": run["finished"] / run["virtual_seconds"],
        "wait_p99_s": max(wait["p99"] for wait in waits),
        **{key: value for key, value in result["pressure"].items() if key not in NOT_SHOWN},
    }


def main() -> None:
    """Replay with each policy and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--device", default="10GiB")
    parser.add_argument("--host", default="8GiB")
    parser.add_argument("--step-time", default="prefill=1e-4,host=25e9", help="as kvalloc replay takes it")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "device": asked.device, "host": asked.host}
    result |= {"requests": asked.requests, "step_time": asked.step_time, "policies": {}}
    for policy in POLICIES:
        one = result["policies"][policy] = serve(asked.trace, policy, asked)
        print(f"{policy:10} {one['finished_per_s']:.4f} finished/s ", end="")
        shown = {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in one.items()}
        print(", ".join(f"{key} {shown[key]}" for key in shown if key != "finished_per_s"), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

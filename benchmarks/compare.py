"""localllm against llama.cpp, in turn, in one run: medians of the pairwise ratios.

    python -m benchmarks.compare --peer PYTHON [MODEL.gguf ...]

PYTHON is an interpreter that has llama-cpp-python. Without models: the two real ones of the package
index. Machines drift; only ratios of runs side by side say anything. How to build the peer:
docs/benchmarks.md.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.models import MODELS, fetch

PEER = Path(__file__).parent / "peer_llama_cpp.py"
NEW = 64
TESTS = ("pp", "tg", "deep", "batch")


def run_peer(python: str, model: Path, args: argparse.Namespace) -> dict[str, float]:
    counts = map(str, (args.threads, args.depth, NEW, args.sequences))
    command = [python, str(PEER), str(model), *counts]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{python}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def run_ours(model: Path, args: argparse.Namespace) -> dict[str, float]:
    command = shutil.which("localllm") or str(Path(sys.executable).parent / "localllm")
    depth, batch = str(args.depth), f"1,{args.sequences}"
    rows: dict[str, float] = {}
    for options in (
        ("-p", depth, "-n", str(NEW), "-b", batch),
        ("-p", "0", "-n", str(NEW), "-d", depth),
    ):
        output = subprocess.run(
            [command, "bench", str(model), *options, "-t", str(args.threads), "-o", "json"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        rows |= {r["test"]: r["tokens_per_second"] for r in json.loads(output)["rows"]}
    names = f"pp{depth}", f"tg{NEW}", f"tg{NEW}@d{depth}", f"tg{NEW}b{args.sequences}"
    return {test: rows[name] for test, name in zip(TESTS, names) if name in rows}


def compare(model: Path, args: argparse.Namespace) -> list[str]:
    """One table row per test."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        theirs, ours = run_peer(args.peer, model, args), run_ours(model, args)
        for test in theirs.keys() & ours.keys():
            pairs.setdefault(test, []).append((ours[test], theirs[test]))
    rows = []
    for test in (t for t in TESTS if t in pairs):
        ours, theirs = (statistics.median(side) for side in zip(*pairs[test]))
        ratio = statistics.median(a / b for a, b in pairs[test])
        rows.append(f"| {model.stem} | {test} | {ours:.0f} | {theirs:.0f} | **{ratio:.2f}** |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--peer", help="interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=8)
    args = parser.parse_args()
    if args.peer is None:
        parser.error(
            "name the peer's interpreter with --peer (docs/benchmarks.md says how to make it)"
        )
    print("| model | test | localllm t/s | llama.cpp t/s | ratio |")
    print("| --- | --- | ---: | ---: | ---: |")
    for model in args.models or [fetch(name) for name in MODELS]:
        print("\n".join(compare(model, args)), flush=True)


if __name__ == "__main__":
    main()

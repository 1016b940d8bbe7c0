"""Tours in a process of their own: other projects' packages warn, leave sockets open, take long.

A tour is a script that runs its steps and prints what each of them got as one JSON object.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Seen = dict[str, Any]


def run_tour(command: Sequence[str], folder: Path) -> Seen:
    """What the steps of a tour got."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    seen: Seen = json.loads(done.stdout.splitlines()[-1])
    return seen


def run_python_tour(name: str, url: str, *, needs: str) -> Seen:
    """What the steps of a script of this folder got; skips without the package that it `needs`."""
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install -e '.[clients]'")
    script = Path(__file__).with_name(name)
    return run_tour([sys.executable, "-W", "ignore", str(script), url], script.parent)


def result(seen: Seen, step: str) -> Any:
    """What a step got that did not fail."""
    found = seen[step]
    if isinstance(found, dict) and "error" in found:
        pytest.fail(f"{step}: {found['error']}")
    return found


def walk(steps: dict[str, Callable[[], Any]]) -> None:
    """Run the steps and print what they got; a step that fails got its error."""
    seen: Seen = {}
    for name, step in steps.items():
        try:
            seen[name] = step()
        except Exception as error:
            seen[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(seen))

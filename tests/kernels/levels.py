"""Run checks of kernels at an instruction set level: in a child process that compiles for it.

A test file has plain functions `check_<claim>()` that use kernels and assert, and one test that
runs them all at every level, a process each:

    @pytest.mark.parametrize("level", LEVELS)
    def test_kernels_equal_their_twins(level: str) -> None:
        run_at(level, __file__)

Compiled kernels are kept in `.pytest_cache`, so a second run is quick.
"""

import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from kernels_cpu import isa

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".pytest_cache" / "kernels"

LEVELS = isa.available(CACHE)


def run_at(level: str, path: str, *names: str, is_cached: bool = True) -> None:
    """Run the named checks of a file (default: all) at `level`; fails with the child's report.

    is_cached  False compiles every kernel anew: one from the cache cannot show its code
    """
    environ = isa.environment_for(level, os.environ)
    environ["PYTHONPATH"] = str(ROOT)
    child = subprocess.run(
        [sys.executable, __file__, level, str(CACHE) if is_cached else "", path, *names],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    # An exception inside a kernel is only printed.
    failed = child.returncode != 0 or "Exception ignored" in child.stderr
    assert not failed, f"at level {level}:\n{child.stdout}{child.stderr}"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Numba's cache names the function's module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(check: Callable[[], None]) -> bool:
    started = time.perf_counter()
    try:
        check()
    except Exception:
        print(f"{check.__name__} failed\n{traceback.format_exc()}", flush=True)
        return False
    print(f"{check.__name__}: {time.perf_counter() - started:.2f} s", flush=True)
    return True


def main(level: str, cache: str, path: str, *names: str) -> int:
    from kernels_cpu import configure

    configure(Path(cache) if cache else None, level)
    module = load(path)
    chosen = names or tuple(n for n in vars(module) if n.startswith("check_"))
    assert chosen, f"{path} has no checks"
    results = [run(getattr(module, name)) for name in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

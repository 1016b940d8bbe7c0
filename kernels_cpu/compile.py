"""Compile many kernels at once, in as many processes as there are cores.

Numba compiles one function at a time per process. `compile_kernels` starts children of this module that
share the disk cache with the caller; afterwards the caller finds every kernel there. A list in the
cache folder says what is done, so that a later start looks at nothing and starts nobody.

    python -m kernels_cpu.compile CACHE ISA      reads kernel names, answers each with a line
"""

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import kernels_cpu
from kernels_cpu.isa import environment_for
from kernels_cpu.kernel import Kernel, cache_dir, configure, isa

DONE = "compiled"


def compile_kernels(
    kernels: Iterable[Kernel],
    num_processes: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """See that every kernel is in the disk cache; without one, do nothing (they compile when used).

    progress  called with (kernels done, kernels in all)
    """
    folder = cache_dir()
    if folder is None:
        return
    names = [k.name for k in kernels]
    missing = sorted(set(names) - read_done(folder))
    if not missing:
        return
    queue: SimpleQueue[str] = SimpleQueue()
    for name in missing:
        queue.put(name)
    finished: list[str] = []

    def report(name: str) -> None:
        finished.append(name)
        if progress is not None:
            progress(len(names) - len(missing) + len(finished), len(names))

    with ThreadPoolExecutor(max(1, min(num_processes, len(missing)))) as pool:
        for _ in range(pool._max_workers):
            pool.submit(feed_child, folder.parent, queue, report)
    write_done(folder, finished)


def feed_child(cache: Path, queue: "SimpleQueue[str]", report: Callable[[str], None]) -> None:
    """Give one child names until none is left. If it dies, the rest compiles in the caller."""
    command = [sys.executable, "-m", "kernels_cpu.compile", str(cache), isa()]
    root = str(Path(__file__).resolve().parent.parent)
    # Numba looks kernels up by processor: the child must compile for the same one as the caller.
    environ = environment_for(isa(), os.environ)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environ
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        while True:
            try:
                name = queue.get_nowait()
                child.stdin.write(name + "\n")
                child.stdin.flush()
            except (Empty, BrokenPipeError):
                break
            if child.stdout.readline().strip() != name:
                break
            report(name)
        child.stdin.close()


def read_done(folder: Path) -> set[str]:
    try:
        return set((folder / DONE).read_text().split())
    except OSError:
        return set()


def write_done(folder: Path, names: Iterable[str]) -> None:
    try:
        with (folder / DONE).open("a") as out:
            out.write("".join(f"{name}\n" for name in names))
    except OSError:
        pass  # A full or read-only disk costs the next start some time, no more.


def all_kernels() -> dict[str, Kernel]:
    """Every kernel of the package by name."""
    found: dict[str, Kernel] = {}
    for info in pkgutil.iter_modules(kernels_cpu.__path__):
        module = importlib.import_module(f"kernels_cpu.{info.name}")
        for kernel in kernels_in(vars(module).values()):
            assert found.setdefault(kernel.name, kernel) is kernel, kernel.name
    return found


def kernels_in(values: Iterable[object]) -> Iterator[Kernel]:
    for value in values:
        if isinstance(value, Kernel):
            yield value
        elif isinstance(value, dict):
            yield from kernels_in(value.values())
        elif isinstance(value, tuple | list):
            yield from kernels_in(value)


def main(cache: str, level: str) -> None:
    configure(Path(cache), level)
    kernels = all_kernels()
    for line in sys.stdin:
        kernels[line.strip()].compile()
        print(line.strip(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

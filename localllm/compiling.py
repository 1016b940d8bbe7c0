"""Compile a model's kernels before it is loaded for the first time, while its weights still arrive.

    python -m localllm.compiling FILE.gguf     at low priority; only the header has to be there

Compiled kernels are found on disk by whoever loads the model. Whatever goes wrong here shows, and
is said, when the model is loaded.
"""

import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from localllm.config import Settings, load_settings, process_environment
from localllm.errors import LocalLLMError
from localllm.interpreter import command_of

LONGEST_SECONDS = 600
NICENESS = 10

log = logging.getLogger("localllm.server")


class Compiler:
    """Compiles for one file at a time, in a process of its own; others in between are left out."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._busy = threading.Lock()

    def start(self, path: Path) -> None:
        """Begin with the kernels of a file, unless another one's are being compiled."""
        if self._busy.acquire(blocking=False):
            threading.Thread(target=self._run, args=(path,), name="compile", daemon=True).start()

    def _run(self, path: Path) -> None:
        from kernels_cpu.isa import detect, environment_for

        try:
            level = self._settings.isa or detect(self._settings.cache_dir)
            environ = {**environment_for(level, process_environment()), "LOCALLLM_ISA": level}
            done = subprocess.run(
                [*command_of("localllm.compiling"), str(path)],
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LONGEST_SECONDS,
            )
            if done.returncode:
                last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                log.info("kernels of %s were not compiled ahead: %s", path.name, last)
        except (OSError, LocalLLMError, subprocess.TimeoutExpired) as error:
            log.info("kernels of %s were not compiled ahead: %s", path.name, error)
        finally:
            self._busy.release()


def main() -> None:
    """Record the program of the file named by the first argument, which compiles its kernels."""
    from localllm.gguf import GgufFile
    from localllm.opening import EngineOptions, open_engine

    os.nice(NICENESS)
    settings = replace(load_settings(), weights="mapped")
    try:
        with GgufFile.open(Path(sys.argv[1])) as file:
            open_engine(file, settings, EngineOptions())
    except LocalLLMError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    # The engine was never started, and its threads have nothing to end.
    os._exit(0)


if __name__ == "__main__":
    main()

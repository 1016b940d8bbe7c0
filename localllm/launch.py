"""Starting a runner process: the one thing that must happen before anything slow is imported.

Not here: talking to it (runner_process.py).
"""

import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.config import Settings, process_environment
from localllm.errors import BadSettings
from localllm.interpreter import command_of

COMMAND = command_of("localllm.runner")


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that imports its libraries, and our end of the socket that it listens to."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def abandon(self) -> None:
        """End the process at once; nothing is left of it."""
        self.socket.close()
        self.process.kill()
        self.process.communicate()


def launch(environ: Mapping[str, str], command: Sequence[str] = COMMAND) -> Launched:
    """Start a runner.

    Must be called on the main thread: the parent-death signal follows the thread that starts it.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env=dict(environ),
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Launched(process, ours)


def launch_runner(settings: Settings) -> Launched:
    """Start a real runner, told the instruction set before it imports Numba.

    Raises BadSettings for a level that this machine does not have.
    """
    from kernels_cpu.isa import available, detect, environment_for

    level = settings.isa or detect(settings.cache_dir)
    levels = available(settings.cache_dir)
    if level not in levels:
        raise BadSettings(
            f"LOCALLLM_ISA is {level!r}, which this machine cannot run; it can {', '.join(levels)}"
        )
    environ = environment_for(level, process_environment())
    return launch({**environ, "LOCALLLM_ISA": level})

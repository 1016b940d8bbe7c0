"""How our own modules are run in child processes.

`python -m` would import whatever lies in the current folder under a library's name, and people
start daemons in folders with downloads. Only where our own package lies there, it may.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def command_of(module: str) -> tuple[str, ...]:
    """The beginning of a command line that runs a module of this package."""
    try:
        is_root = Path.cwd() == ROOT
    except OSError:  # the folder is gone
        is_root = False
    return (sys.executable, *(() if is_root else ("-P",)), "-m", module)

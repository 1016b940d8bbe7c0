"""Pulls for a test that kills them: a process each, forked from one that has all it imports.

Reads lines `store-folder TAB hub-url TAB name TAB file-size-limit`, answers each with a process id,
and, when that process has ended, with its exit status.
"""

import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

from pulling import IMPATIENT

from localllm.config import Settings
from localllm.errors import LocalLLMError
from localllm.pull import hub  # noqa: F401
from localllm.pull.puller import pull
from localllm.store import Store


def run(folder: str, url: str, name: str, limit: str) -> int:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    settings = replace(Settings(), hub_endpoint=url)
    try:
        pull(name, Store(Path(folder)), settings, lambda _: None, patience=IMPATIENT)
    except LocalLLMError as error:
        Path(f"{folder}.error").write_text(str(error))
        return 1
    return 0


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(run(*line.rstrip("\n").split("\t")))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

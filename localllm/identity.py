"""Which build this is, and the secret that proves that a caller may read the user's data folder."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from localllm import __version__

# Clients gate features on the version of Ollama that they believe to talk to.
OLLAMA_VERSION = "0.32.1"


@dataclass(frozen=True, slots=True, order=True)
class Build:
    """A build: version, then the newest source file's time. Later builds compare greater."""

    version: tuple[int, ...]
    changed_at: int

    @classmethod
    def current(cls) -> Self:
        """The build of the code that is running."""
        newest = 0.0
        for folder, _, names in os.walk(Path(__file__).parent):
            for name in names:
                if name.endswith(".py"):
                    newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
        return cls(_numbers(__version__), int(newest))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The build that `str` gave, or None."""
        version, _, changed_at = text.partition("+")
        if not changed_at.isdecimal():
            return None
        return cls(_numbers(version), int(changed_at))

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))}+{self.changed_at}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def version_body(build: Build, *, is_background: bool) -> dict[str, Any]:
    """What `/api/version` says. Clients may restart daemons that clients started."""
    own = {"version": __version__, "build": str(build), "pid": os.getpid()}
    return {"version": OLLAMA_VERSION, "localllm": {**own, "background": is_background}}


def read_secret(data_dir: Path) -> str:
    """The data folder's secret, made when it is first asked for. Only the user can read it."""
    path = data_dir / "secret"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    data_dir.mkdir(parents=True, exist_ok=True)
    partial = data_dir / f".secret-{os.getpid()}-{secrets.token_hex(4)}"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        # Whoever links first wins, so that two processes never hold different secrets.
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    return path.read_text().strip()

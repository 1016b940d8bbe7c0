"""The user's own files that models are made from: never copied, so watched for changes.

Not here: which models there are (store.py).
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.errors import BadFile, StoreError


def _identity(path: Path | str) -> dict[str, int]:
    """What changes when a file is replaced or written to."""
    stat = os.stat(path)
    return {
        "device": stat.st_dev,
        "inode": stat.st_ino,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
    }


def fingerprint(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], str]:
    """Identities of files and the SHA-256 of their contents one after the other."""
    whole = hashlib.sha256()
    files = []
    for path in paths:
        try:
            before = _identity(path)
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    whole.update(chunk)
        except OSError as error:
            raise BadFile(f"{path}: {error.strerror}") from error
        if _identity(path) != before:
            raise BadFile(f"{path}: changed while it was read")
        files.append({"path": str(path), **before})
    return files, whole.hexdigest()


def try_link(path: Path, blob: Path) -> None:
    """Hard-link a file into the store where the file system can."""
    try:
        os.link(path.resolve(), blob)
    except OSError:
        return


def check_unchanged(path: Path, file: Mapping[str, Any], name: str) -> None:
    """Raise StoreError if the file at `path` is not the one that `file` describes."""
    try:
        found = _identity(path)
    except OSError:
        raise StoreError(f"{path}, the file of model '{name}', is gone") from None
    if any(found[key] != file[key] for key in found):
        raise StoreError(
            f"{file['path']} changed since model '{name}' was made from it: create the model again"
        )

"""Files that are being fetched: their bytes, which of them are there, and who is at it.

    partial/sha256-<hex>         the file in its full size, with holes
    partial/sha256-<hex>.state   JSON: size, spans that are there, whether the hash was compared

The state is written after the bytes it speaks of, so a process can end at any moment; the next one
goes on from the last state. A file is held by one process at a time, through a lock on the file
itself; whoever comes second waits, and finds the work done or goes on with it.

Not here: where bytes come from (download.py).
"""

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from localllm.errors import StoreError
from localllm.pull.ranges import Ranges, Span

HASH_BYTES = 8 << 20
MAX_STATE_BYTES = 1 << 20
STATE_ROOM_BYTES = 1 << 18
WAIT_SECONDS = 0.2
KEPT_SECONDS = 14 * 24 * 3600
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Staging:
    """The folder of parts below a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        return self.folder / f"sha256-{digest}"

    def bytes_there(self, digest: str, size: int) -> int:
        """How much of a file is there, as far as its state tells."""
        return _read_state(self.path(digest), size)[0].num_bytes

    async def hold(
        self, digest: str, size: int, is_done: Callable[[], bool], on_wait: Callable[[], None]
    ) -> "Part | None":
        """The part of that hash, held; None if `is_done` turns true.

        While another process or thread holds it, calls `on_wait` from time to time.
        """
        while not is_done():
            part = self._try_hold(digest, size)
            if part is not None:
                if not is_done():
                    return part
                # It was moved into the store just before, and what was opened here is a new one.
                _remove(part.path)
                part.close()
                return None
            on_wait()
            await asyncio.sleep(WAIT_SECONDS)
        return None

    def _try_hold(self, digest: str, size: int) -> "Part | None":
        path = self.path(digest)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, path) from error
        if not _lock(file) or not _is_at(file, path):
            os.close(file)
            return None
        return Part(path, file, size)

    def clean(self) -> None:
        """Remove parts that nobody has gone on with for long."""
        oldest_kept = time.time() - KEPT_SECONDS
        for path in list(self.folder.glob("sha256-*")):
            with suppress(OSError):
                if path.suffix or path.stat().st_mtime > oldest_kept:
                    continue
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if _lock(file):
                        _remove(path)
                finally:
                    os.close(file)


class Part:
    """One file on its way, held until `close`.

    `ranges` says which bytes are there; `is_verified` that all are, and have the right hash.
    """

    def __init__(self, path: Path, file: int, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        # Hashing and saving go on in threads, beside each other.
        self._hashing, self._saving = threading.Lock(), threading.Lock()
        self._is_closed = False
        self.ranges, self.is_verified = _read_state(path, size)
        self._restart_hash()
        try:
            if os.fstat(file).st_size != size:
                self.restart()
        except BaseException:
            os.close(file)
            raise

    def __enter__(self) -> "Part":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, at: int, data: bytes) -> None:
        """Put bytes into the file. Raises StoreError if there is no room for them."""
        view, offset = memoryview(data), at
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise disk_error(error, self.path) from error
        finally:
            self.ranges.add(at, offset)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Bytes of the file, which must be there."""
        return os.pread(self._file, num_bytes, start)

    def restart(self) -> None:
        """Begin again with nothing."""
        self.ranges.clear()
        self.is_verified = False
        self._restart_hash()
        _state_path(self.path).unlink(missing_ok=True)
        try:
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, self.size)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def save(self) -> None:
        """Make sure that all bytes are on disk, and say so in the state. Nobody writes meanwhile.

        On a full disk the last few bytes make room for the state.
        """
        if not self.save_some(self.ranges.done) and self.ranges.done:
            start, stop = self.ranges.done[-1]
            self._cut(max(start, stop - STATE_ROOM_BYTES))
            self.save_some(self.ranges.done)

    def save_some(self, done: Sequence[Span]) -> bool:
        """Like `save`, for the bytes of `done`, while others are written; whether it could.

        If not, the last state stays: less is known to be there, nothing wrong.
        """
        with self._saving:
            if self._is_closed:
                return True
            done = self.ranges.done if self.is_verified else done
            state = {"size": self.size, "done": done, "verified": self.is_verified}
            partial = self.path.with_suffix(".state-new")
            try:
                os.fsync(self._file)
                partial.write_text(json.dumps(state))
                os.replace(partial, _state_path(self.path))
            except OSError:
                return False
            return True

    def _cut(self, at: int) -> None:
        """Give the file's last bytes back to the file system."""
        self.ranges.cut(at)
        with suppress(OSError):
            os.ftruncate(self._file, at)
            os.ftruncate(self._file, self.size)

    @property
    def num_hashed(self) -> int:
        return self._num_hashed

    def hash_more(self) -> None:
        """Hash the next bytes of those that are there from the beginning on."""
        with self._hashing:
            if self._is_closed:
                return
            num_bytes = max(0, min(HASH_BYTES, self.ranges.prefix - self._num_hashed))
            data = os.pread(self._file, num_bytes, self._num_hashed)
            self._hash.update(data)
            self._num_hashed += len(data)

    def digest(self) -> str:
        """SHA-256 of the whole file, of which all is there."""
        while self._num_hashed < self.size:
            self.hash_more()
        return self._hash.hexdigest()

    def mark_verified(self) -> None:
        self.is_verified = True
        self.save()

    def remove_state(self) -> None:
        """After the file has been moved away."""
        _remove_state(self.path)

    def close(self) -> None:
        """Let others have it."""
        with self._hashing, self._saving:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._file)

    def _restart_hash(self) -> None:
        with self._hashing:
            self._hash = hashlib.sha256()
            self._num_hashed = 0


def disk_error(error: OSError, path: Path) -> StoreError:
    """The error that a failed write means."""
    if error.errno in _FULL:
        return StoreError(
            f"no space left in {path.parent}: free some and pull again; what is there is kept"
        )
    return StoreError(f"cannot write {path}: {error.strerror}")


def _state_path(path: Path) -> Path:
    return path.with_suffix(".state")


def _read_state(path: Path, size: int) -> tuple[Ranges, bool]:
    """What the state says; nothing is there if it is absent, damaged or of another size."""
    try:
        with _state_path(path).open("rb") as file:
            state = json.loads(file.read(MAX_STATE_BYTES))
        if state["size"] != size or path.stat().st_size != size:
            return Ranges(size), False
        ranges = Ranges(size, [(int(start), int(stop)) for start, stop in state["done"]])
        return ranges, state["verified"] is True and ranges.is_complete
    except (OSError, ValueError, TypeError, KeyError):
        return Ranges(size), False


def _lock(file: int) -> bool:
    """Lock a file; where the file system cannot, go on without: the hash finds what goes wrong."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        found, wanted = os.fstat(file), os.stat(path)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _remove_state(path)


def _remove_state(path: Path) -> None:
    for suffix in (".state", ".state-new"):
        path.with_suffix(suffix).unlink(missing_ok=True)

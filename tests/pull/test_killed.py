"""Pulls that are killed, that run out of room, and that run at the same time.

Defends: the store holds whole models only; what is left behind is what the next pull goes on with;
one model is fetched once however many want it.
"""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pulling import Puller, make_model
from standin import FileRequest, HubStandIn, Repo

from localllm.config import Settings
from localllm.errors import Cancelled, StoreError
from localllm.store import Store

NAME = "hf.co/org/M-GGUF"
DATA = make_model(3000)  # 12 MB: 12 ranges
DIGEST = hashlib.sha256(DATA).hexdigest()
NUM_KILLS = 20


@pytest.fixture(autouse=True)
def _repo(hub: HubStandIn) -> None:
    hub.repos["org/M-GGUF"] = Repo({"M-Q4_K_M.gguf": DATA})


class Children:
    """Pulls in processes of their own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("kill_me.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: Path, name: str = NAME, *, file_limit: int | None = None) -> int:
        """Start a pull; its process id."""
        assert self._process.stdin is not None
        limit = "" if file_limit is None else str(file_limit)
        self._process.stdin.write("\t".join((str(folder), self._url, name, limit)) + "\n")
        self._process.stdin.flush()
        return self._read()

    def wait(self) -> int:
        """The exit status of the pull that was started."""
        return self._read()

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@pytest.fixture
def children(hub: HubStandIn) -> Iterator[Children]:
    found = Children(hub.url)
    yield found
    found.close()


def files_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def check_whole_or_absent(store: Store) -> None:
    """After a kill at any moment."""
    partial = {f"sha256-{DIGEST}" + suffix for suffix in ("", ".state", ".state-new")}
    assert files_below(store.partial) <= partial
    for model in store.models():
        assert hashlib.sha256(store.model_file(model).read_bytes()).hexdigest() == DIGEST
    blob = store.root / "blobs" / f"sha256-{DIGEST}"
    if blob.exists():
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == DIGEST


def test_killed_pull_is_taken_up_by_the_next(
    tmp_path: Path, hub: HubStandIn, children: Children
) -> None:
    """20 kills, each after a random number of bytes, or a moment after the last one.

    The next pull completes and verifies each time.
    """
    chooser = random.Random(1)
    kill_at: list[int] = []
    victim: list[int] = []
    lock = threading.Lock()

    def serve(request: FileRequest) -> bool:
        """Send in small pieces, and kill when the chosen number of bytes has been sent."""
        body = request.data[request.start : request.stop]
        request.answer(b"", announced=len(body))
        for at in range(0, len(body), 1 << 16):
            piece = body[at : at + (1 << 16)]
            request.handler.wfile.write(piece)
            with lock:
                if kill_at:
                    kill_at[0] -= len(piece)
                    if kill_at[0] <= 0:
                        kill_at.clear()
                        os.kill(victim[0], signal.SIGKILL)
        return True

    hub.on_file = serve
    for number in range(NUM_KILLS):
        store = Store(tmp_path / f"models{number}")
        with lock:
            kill_at[:] = [chooser.randrange(len(DATA))]
            victim[:] = [children.start(store.root)]
        assert children.wait() == -signal.SIGKILL
        check_whole_or_absent(store)
        assert store.models() == []
        children.start(store.root)
        assert children.wait() == 0
        check_whole_or_absent(store)
        (model,) = store.models()
        assert str(model.name) == f"{NAME}:latest"
        assert files_below(store.partial) == set()
        assert not [name for name in files_below(store.root) if name.startswith(".")]


@pytest.mark.slow
def test_pull_killed_after_the_last_byte(tmp_path: Path, children: Children) -> None:
    """Kills while hashes are compared, files moved and manifests written: by the clock."""
    chooser = random.Random(2)
    for number in range(NUM_KILLS):
        store = Store(tmp_path / f"models{number}")
        pid = children.start(store.root)
        threading.Event().wait(chooser.uniform(0.05, 1.0))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        children.wait()
        check_whole_or_absent(store)
        children.start(store.root)
        assert children.wait() == 0
        check_whole_or_absent(store)
        assert len(store.models()) == 1
        assert files_below(store.partial) == set()


def test_pull_goes_on_where_the_killed_one_was(
    tmp_path: Path, hub: HubStandIn, children: Children
) -> None:
    """A state that is a second old is found again."""
    store = Store(tmp_path / "models")
    served = threading.Event()

    def serve(request: FileRequest) -> bool:
        if request.number == 9:
            served.set()
        if request.number >= 9:
            hub.stopping.wait(30)
        return False

    hub.on_file = serve
    pid = children.start(store.root)
    assert served.wait(30)
    state = store.partial / f"sha256-{DIGEST}.state"
    while not state.exists():
        threading.Event().wait(0.05)
    os.kill(pid, signal.SIGKILL)
    children.wait()
    hub.on_file = lambda _: False
    hub.requests.clear()
    children.start(store.root)
    assert children.wait() == 0
    assert len(hub.file_requests()) < 8
    check_whole_or_absent(store)


def test_two_pulls_in_one_process_share_the_work(
    store: Store, settings: Settings, hub: HubStandIn
) -> None:
    hub.on_file = lambda _: hub.stopping.wait(0.1)
    pullers = [Puller(store, settings) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(lambda puller: puller.pull(NAME), pullers))
    assert len({model.digest for model in models}) == 1
    assert len(hub.file_requests()) == 12
    for puller in pullers:
        assert puller.statuses[-1] == "success"
        assert puller.transfers[-1].completed == len(DATA)
    assert puller.partial_files() == []


def test_two_processes_share_the_work(
    store: Store, settings: Settings, hub: HubStandIn, children: Children
) -> None:
    hub.on_file = lambda _: hub.stopping.wait(0.1)
    children.start(store.root)
    puller = Puller(store, settings)
    puller.pull(NAME)
    assert children.wait() == 0
    assert len(hub.file_requests()) == 12


def test_pull_whose_sharer_is_cancelled_takes_over(
    store: Store, settings: Settings, hub: HubStandIn
) -> None:
    cancel, begun = threading.Event(), threading.Event()

    def serve(request: FileRequest) -> bool:
        begun.set()
        if request.number > 8 and not cancel.is_set():
            cancel.wait(30)
        return False

    hub.on_file = serve
    first, second = Puller(store, settings), Puller(store, settings)
    with ThreadPoolExecutor(2) as pool:
        doomed = pool.submit(first.pull, NAME, cancel=cancel)
        assert begun.wait(30)
        other = pool.submit(second.pull, NAME)
        while not second.transfers:
            threading.Event().wait(0.02)
        cancel.set()
        with pytest.raises(Cancelled):
            doomed.result()
        assert store.model_file(other.result()).read_bytes() == DATA


def test_no_room_is_told_before_anything_is_fetched(
    store: Store, settings: Settings, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L07: needed and free bytes, and the folder."""
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    puller = Puller(store, settings)
    with pytest.raises(StoreError) as caught:
        puller.pull(NAME)
    assert str(caught.value) == (
        f"no space for {NAME}:latest in {store.root}: it needs {len(DATA):,} bytes more and "
        "1,000,000 are free"
    )
    assert hub.file_requests() == []
    assert not store.root.exists()


def test_file_size_limit_is_one_clear_line(
    tmp_path: Path, hub: HubStandIn, children: Children
) -> None:
    store = Store(tmp_path / "models")
    children.start(store.root, file_limit=1 << 20)
    assert children.wait() == 1
    text = (tmp_path / "models.error").read_text()
    assert (
        text == f"no space left in {store.partial}: free some and pull again; what is there is kept"
    )
    assert store.models() == []
    children.start(store.root)
    assert children.wait() == 0
    check_whole_or_absent(store)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_breaks_nothing_and_the_next_pull_goes_on(
    small_disk: Path, settings: Settings, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L07: first by what is known before, then with that check blinded, then with more room."""
    store = Store(small_disk / "models")
    puller = Puller(store, settings)
    with pytest.raises(StoreError, match=r"no space for .* bytes more and .* are free"):
        puller.pull(NAME)
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 1 << 40})
        patch.setattr("shutil.disk_usage", lambda _: usage)
        with pytest.raises(StoreError, match=r"no space left in .*/partial: free some"):
            puller.pull(NAME)
    assert store.models() == []
    there = len(hub.file_requests())
    command = ["mount", "-o", "remount,size=64m", small_disk]
    subprocess.run(command, check=True)
    puller.pull(NAME)
    assert store.model_file(store.models()[0]).read_bytes() == DATA
    assert puller.transfers[0].completed > 2 << 20
    assert len(hub.file_requests()) - there <= 12
    assert puller.partial_files() == []


def test_folder_that_cannot_be_written_is_named(tmp_path: Path, settings: Settings) -> None:
    root = tmp_path / "models"
    root.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match=f"cannot write {root}/partial/"):
        Puller(Store(root), settings).pull(NAME)

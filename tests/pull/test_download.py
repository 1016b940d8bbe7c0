"""Files from a server that misbehaves in every way we know.

Defends: what is in the store has the right hash; a fault costs what it must and no more; an error
is one line that says which file.
"""

import dataclasses
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from pulling import IMPATIENT, Puller, make_model
from standin import FileRequest, HubStandIn, Repo

from localllm.errors import BadFile, Cancelled, PullFailed
from localllm.pull.events import Header, Status, Transfer
from localllm.store import Store

NAME = "hf.co/org/M-GGUF"
FILE = "M-Q4_K_M.gguf"
DATA = make_model(1500)  # 6 MB: six ranges
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def _repo(hub: HubStandIn) -> None:
    hub.repos["org/M-GGUF"] = Repo({FILE: DATA})


def check_stored(puller: Puller) -> None:
    model = puller.store.models()[0]
    assert str(model.name) == f"{NAME}:latest"
    assert puller.store.model_file(model).read_bytes() == DATA
    assert puller.partial_files() == []


def ranges_of(hub: HubStandIn) -> list[str]:
    return sorted(seen.headers["range"] for seen in hub.file_requests())


def test_file_is_fetched_in_ranges_and_told(puller: Puller, hub: HubStandIn) -> None:
    puller.pull(NAME)
    check_stored(puller)
    assert len(hub.file_requests()) == 6
    assert len(set(ranges_of(hub))) == 6
    assert puller.statuses == [
        "pulling manifest",
        f"using {FILE} of org/M-GGUF",
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    assert puller.transfers[-1] == Transfer(DIGEST, len(DATA), len(DATA))
    completed = [event.completed for event in puller.transfers]
    assert completed == sorted(completed)


def test_token_is_not_sent_to_the_file_host(puller: Puller, hub: HubStandIn) -> None:
    puller.pull(NAME, hub_token="good")
    assert all("authorization" not in seen.headers for seen in hub.file_requests())
    asked = [seen for seen in hub.requests if seen.port == "hub"]
    assert all(seen.headers["authorization"] == "Bearer good" for seen in asked)


def test_second_pull_fetches_nothing(puller: Puller, hub: HubStandIn) -> None:
    puller.pull(NAME)
    before = len(hub.file_requests())
    puller.pull(NAME)
    assert len(hub.file_requests()) == before
    assert puller.transfers == [Transfer(DIGEST, len(DATA), len(DATA))]


def test_file_under_another_name_is_fetched_once(puller: Puller, hub: HubStandIn) -> None:
    hub.repos["org/Copy"] = Repo({"other-Q8_0.gguf": DATA})
    puller.pull(NAME)
    before = len(hub.file_requests())
    puller.pull("hf.co/org/Copy")
    assert len(hub.file_requests()) == before


@pytest.mark.parametrize("way", ["cut", "reset"])
def test_connection_that_dies_is_resumed_where_it_was(
    puller: Puller, hub: HubStandIn, way: str
) -> None:
    def die(request: FileRequest) -> bool:
        if request.number > 12:
            return False
        getattr(request, way)(300_000)
        return True

    hub.on_file = die
    puller.pull(NAME)
    check_stored(puller)
    starts = [int(r.removeprefix("bytes=").split("-")[0]) for r in ranges_of(hub)]
    assert len(starts) == len(set(starts)), "no byte is asked for twice once it is there"


def test_answer_cut_at_once_fails_in_the_end(puller: Puller, hub: HubStandIn) -> None:
    hub.on_file = lambda request: request.cut(0) or True
    with pytest.raises(PullFailed, match=rf"{FILE}: .* \(4 tries\)"):
        puller.pull(NAME)
    assert puller.store.models() == []


def test_pull_after_a_failed_one_goes_on(puller: Puller, hub: HubStandIn) -> None:
    """L01 (a): cut at about half, then a new pull."""

    def die(request: FileRequest) -> bool:
        if request.start < 3 << 20:
            return False
        request.cut(0)
        return True

    hub.on_file = die
    with pytest.raises(PullFailed):
        puller.pull(NAME)
    assert puller.store.models() == []
    assert puller.partial_files() == [f"sha256-{DIGEST}", f"sha256-{DIGEST}.state"]
    hub.on_file = lambda _: False
    hub.requests.clear()
    puller.pull(NAME)
    check_stored(puller)
    assert all(int(r[6:].split("-")[0]) >= 3 << 20 for r in ranges_of(hub))
    assert puller.transfers[0].completed >= 3 << 20


def test_flipped_byte_is_noticed_and_fetched_again(puller: Puller, hub: HubStandIn) -> None:
    """L01 (b)."""

    def flip(request: FileRequest) -> bool:
        if request.number > 6 or request.start != 2 << 20:
            return False
        body = bytearray(request.data[request.start : request.stop])
        body[1000] ^= 1
        request.answer(bytes(body))
        return True

    hub.on_file = flip
    puller.pull(NAME)
    check_stored(puller)
    assert len(hub.file_requests()) == 12


def test_file_that_is_always_wrong_is_refused(puller: Puller, hub: HubStandIn) -> None:
    def flip(request: FileRequest) -> bool:
        request.answer(b"GGUF" + bytes(request.stop - request.start - 4))
        return True

    hub.on_file = flip
    expected = (
        rf"digest mismatch, file must be downloaded again: want sha256:{DIGEST}, got .*{FILE}"
    )
    with pytest.raises(PullFailed, match=expected):
        puller.pull(NAME)
    assert puller.store.models() == []
    hub.on_file = lambda _: False
    puller.pull(NAME)
    check_stored(puller)


def test_server_without_ranges_sends_the_file_whole(puller: Puller, hub: HubStandIn) -> None:
    """L01 (c), with a connection that dies in between."""

    def whole(request: FileRequest) -> bool:
        request.has_range, request.start, request.stop = False, 0, len(DATA)
        if request.number == 10:
            request.cut(2 << 20)
        else:
            request.answer()
        return True

    hub.on_file = whole
    puller.pull(NAME)
    check_stored(puller)


def test_status_416_starts_over_and_not_for_ever(puller: Puller, hub: HubStandIn) -> None:
    """L01 (d)."""

    def refuse(request: FileRequest) -> bool:
        if request.number > 2:
            return False
        request.handler.send(416, {"content-range": f"bytes */{len(DATA)}"}, b"")
        return True

    hub.on_file = refuse
    puller.pull(NAME)
    check_stored(puller)
    hub.repos["org/M-GGUF"].files[FILE] = make_model(1500, seed=1)
    hub.on_file = lambda request: request.handler.send(416, {}, b"") or True
    with pytest.raises(PullFailed, match=f"{FILE} is not what was announced: status 416"):
        puller.pull(NAME)


def test_file_that_changes_between_two_pulls_starts_over(puller: Puller, hub: HubStandIn) -> None:
    """L01 (e)."""
    old, new = make_model(1500, seed=1), DATA
    hub.repos["org/M-GGUF"] = Repo({FILE: old})

    def die(request: FileRequest) -> bool:
        if request.start < 3 << 20:
            return False
        request.cut(0)
        return True

    hub.on_file = die
    with pytest.raises(PullFailed):
        puller.pull(NAME)
    hub.on_file = lambda _: False
    hub.repos["org/M-GGUF"] = Repo({FILE: new}, commit="b" * 40)
    puller.pull(NAME)
    assert puller.store.model_file(puller.store.models()[0]).read_bytes() == new


def test_version_that_changes_in_the_middle_starts_over(puller: Puller, hub: HubStandIn) -> None:
    """At the first answer of the new version, not when all is there and the hash is wrong."""
    data = make_model(6000)  # 24 ranges
    hub.repos["org/M-GGUF"] = Repo({FILE: data})

    def change(request: FileRequest) -> bool:
        is_old = request.number <= 3
        body = request.data[request.start : request.stop]
        request.answer(body[:-1] + b"x" if is_old else body, etag='"one"' if is_old else '"two"')
        return True

    hub.on_file = change
    model = puller.pull(NAME)
    assert puller.store.model_file(model).read_bytes() == data
    assert len(hub.file_requests()) < 40


@pytest.mark.parametrize("what", ["x-linked-etag", "x-linked-size"])
def test_redirect_that_announces_another_file_is_refused(
    puller: Puller, hub: HubStandIn, what: str
) -> None:
    value = {"x-linked-etag": "0" * 64, "x-linked-size": "7"}[what]

    def announce(handler) -> bool:  # type: ignore[no-untyped-def]
        if "/resolve/" not in handler.path:
            return False
        location = f"http://127.0.0.1:{hub.cdn.server_port}/{FILE}"
        handler.send(302, {"location": location, what: value}, b"")
        return True

    hub.on_hub = announce
    with pytest.raises(PullFailed, match=r"is not what was announced: its (hash|size) is now"):
        puller.pull(NAME)
    assert hub.file_requests() == []


@pytest.mark.parametrize("status", [200, 206])
def test_empty_body_is_an_error(puller: Puller, hub: HubStandIn, status: int) -> None:
    """L01 (f)."""

    def empty(request: FileRequest) -> bool:
        request.has_range = status == 206
        request.handler.send(status, {}, b"")
        return True

    hub.on_file = empty
    with pytest.raises(PullFailed, match=FILE):
        puller.pull(NAME)


@pytest.mark.parametrize(
    ("total", "shift", "message"),
    [
        (len(DATA) + 1, 0, f"{len(DATA) + 1} bytes where {len(DATA)} were announced"),
        (len(DATA), 5, "another part than was asked for"),
    ],
)
def test_wrong_content_range_is_refused(
    puller: Puller, hub: HubStandIn, total: int, shift: int, message: str
) -> None:
    hub.on_file = lambda request: request.answer(total=total, shift=shift) or True
    with pytest.raises(PullFailed, match=message):
        puller.pull(NAME)


def test_more_bytes_than_asked_for_are_not_written(puller: Puller, hub: HubStandIn) -> None:
    def more(request: FileRequest) -> bool:
        body = request.data[request.start : request.stop] + bytes(100_000)
        request.answer(body, announced=len(body))
        return True

    hub.on_file = more
    with pytest.raises(PullFailed, match="more than was asked for"):
        puller.pull(NAME)


def test_compressed_answer_is_refused(puller: Puller, hub: HubStandIn) -> None:
    def squeeze(request: FileRequest) -> bool:
        request.handler.send(206, {"content-encoding": "gzip"}, b"")
        return True

    hub.on_file = squeeze
    with pytest.raises(PullFailed, match="compresses"):
        puller.pull(NAME)


def test_stalled_connection_is_given_up_and_resumed(puller: Puller, hub: HubStandIn) -> None:
    def stall(request: FileRequest) -> bool:
        if request.number != 2:
            return False
        request.answer(request.data[request.start : request.start + 1000])
        request.handler.wfile.flush()
        hub.stopping.wait(30)
        return True

    hub.on_file = stall
    puller.pull(NAME)
    check_stored(puller)


def test_connection_that_drips_is_given_up(puller: Puller, hub: HubStandIn) -> None:
    def drip(request: FileRequest) -> bool:
        if request.number != 1:
            return False
        request.answer(b"")
        for at in range(request.start, request.stop):
            request.handler.wfile.write(request.data[at : at + 1])
            request.handler.wfile.flush()
            if hub.stopping.wait(0.05):
                break
        return True

    hub.on_file = drip
    puller.pull(NAME)
    check_stored(puller)


def test_expired_links_are_renewed(puller: Puller, hub: HubStandIn) -> None:
    def expire(request: FileRequest) -> bool:
        if request.number not in (2, 3, 4, 5):
            return False
        request.handler.send(403, {}, b"expired")
        return True

    hub.on_file = expire
    puller.pull(NAME)
    check_stored(puller)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_server_is_asked_again(puller: Puller, hub: HubStandIn, status: int) -> None:
    def busy(request: FileRequest) -> bool:
        if request.number > 3:
            return False
        request.handler.send(status, {"retry-after": "0"}, b"")
        return True

    hub.on_file = busy
    puller.pull(NAME)
    check_stored(puller)


def test_redirect_to_another_scheme_is_refused(puller: Puller, hub: HubStandIn) -> None:
    def lead_away(request: FileRequest) -> bool:
        request.handler.send(302, {"location": "file:///etc/passwd"}, b"")
        return True

    hub.on_file = lead_away
    with pytest.raises(PullFailed, match="redirects to file://"):
        puller.pull(NAME)


def test_endless_redirects_end(puller: Puller, hub: HubStandIn) -> None:
    def again(request: FileRequest) -> bool:
        request.handler.send(302, {"location": request.handler.path}, b"")
        return True

    hub.on_file = again
    with pytest.raises(PullFailed, match="more than 10 redirects"):
        puller.pull(NAME)


def test_file_that_is_no_gguf_is_refused_before_it_is_whole(
    puller: Puller, hub: HubStandIn
) -> None:
    hub.repos["org/M-GGUF"] = Repo({FILE: b"<html>" + bytes(40 << 20)})
    with pytest.raises(PullFailed, match=f"{FILE} is not a GGUF file"):
        puller.pull(NAME)


def test_damaged_model_leaves_nothing_in_the_store(puller: Puller, hub: HubStandIn) -> None:
    """The hash is right, but the file was cut short before it was uploaded (G01)."""
    hub.repos["org/M-GGUF"] = Repo({FILE: DATA[: 2 << 20]})
    with pytest.raises(BadFile):
        puller.pull(NAME)
    assert puller.store.models() == []
    files = [p for p in puller.store.root.rglob("*") if p.is_file()]
    assert files == []


def test_cancel_ends_at_once_and_the_next_pull_goes_on(puller: Puller, hub: HubStandIn) -> None:
    cancel = threading.Event()

    def hang(request: FileRequest) -> bool:
        if request.number <= 4:
            return False
        request.answer(request.data[request.start : request.start + 100])
        request.handler.wfile.flush()
        while not cancel.is_set() and not hub.stopping.wait(0.02):
            if any(event.completed > 3 << 20 for event in puller.transfers):
                cancel.set()
        hub.stopping.wait(60)
        return True

    hub.on_file = hang
    patient = dataclasses.replace(IMPATIENT, read_seconds=60)
    with pytest.raises(Cancelled):
        puller.pull(NAME, cancel=cancel, patience=patient)
    hub.on_file = lambda _: False
    hub.requests.clear()
    puller.pull(NAME)
    check_stored(puller)
    assert sum(_length(r) for r in ranges_of(hub)) < len(DATA) - (3 << 20)


def _length(text: str) -> int:
    first, last = text.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_damaged_state_costs_a_restart_only(puller: Puller, hub: HubStandIn) -> None:
    backwards = f'{{"size": {len(DATA)}, "done": [[5, 1]]}}'
    for state in ("", "{", '{"size": 3}', backwards, "[]"):
        folder = puller.store.partial
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"sha256-{DIGEST}").write_bytes(bytes(len(DATA)))
        (folder / f"sha256-{DIGEST}.state").write_text(state)
        model = puller.pull(NAME)
        check_stored(puller)
        puller.store.remove(model.name)


def test_state_that_lies_is_found_out_by_the_hash(puller: Puller, hub: HubStandIn) -> None:
    folder = puller.store.partial
    folder.mkdir(parents=True)
    (folder / f"sha256-{DIGEST}").write_bytes(bytes(len(DATA)))
    state = f'{{"size": {len(DATA)}, "done": [[0, {len(DATA)}]], "verified": false}}'
    (folder / f"sha256-{DIGEST}.state").write_text(state)
    puller.pull(NAME)
    check_stored(puller)


def test_header_is_told_while_the_rest_is_on_its_way(
    puller: Puller, hub: HubStandIn, tmp_path: Path
) -> None:
    data = make_model(6000)
    hub.repos["org/M-GGUF"] = Repo({FILE: data})

    def slow(request: FileRequest) -> bool:
        if request.start > 20 << 20:
            hub.stopping.wait(0.5)
        return False

    hub.on_file = slow
    puller.pull(NAME, patience=dataclasses.replace(IMPATIENT, read_seconds=30))
    kinds = [type(event) for event in puller.events]
    assert kinds.count(Header) == 1
    assert Transfer in kinds[kinds.index(Header) :]
    assert Status in kinds[kinds.index(Header) :]


def test_old_parts_are_cleared_away(puller: Puller, store: Store) -> None:
    store.partial.mkdir(parents=True)
    for name, age in (("old", 15), ("new", 1)):
        path = store.partial / f"sha256-{name}"
        path.write_bytes(b"x")
        path.with_suffix(".state").write_text("{}")
        at = time.time() - age * 24 * 3600
        os.utime(path, (at, at))
    puller.pull(NAME)
    assert puller.partial_files() == ["sha256-new", "sha256-new.state"]

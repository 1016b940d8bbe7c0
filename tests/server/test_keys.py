"""Who gets in where keys are set, and what the log says at the start."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from server_process import Server, start_server

from localllm.address import Address
from localllm.client import Client, RequestFailed
from localllm.config import Settings
from localllm.server.app import _warnings

KEYS = "first-key, second-key"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_server(tmp_path_factory.mktemp("data"), LOCALLLM_API_KEY=KEYS)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer second-key"}, 200),
        ({"x-api-key": "second-key"}, 200),
        ({"authorization": "Bearer other"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"authorization": KEYS}, 401),
        ({"authorization": "Bearer k\u00e9y".encode("latin-1")}, 401),
        ({"x-localllm-secret": "guess"}, 401),
    ],
)
def test_a_request_must_show_a_key(guarded: Server, headers: dict, status: int) -> None:
    answer = guarded.http.get("/api/tags", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/", "/health", "/api/version"])
def test_liveness_needs_no_key(guarded: Server, path: str) -> None:
    assert guarded.http.get(path).status_code == 200


def test_preflights_need_no_key_and_refusals_can_be_read_by_the_page(guarded: Server) -> None:
    origin = {"origin": "http://localhost:3000"}
    assert guarded.http.options("/api/chat", headers=origin).status_code == 204
    answer = guarded.http.get("/api/tags", headers=origin)
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == origin["origin"]


def test_the_daemons_own_user_needs_no_key(guarded: Server) -> None:
    with closing(Client(Settings(host=guarded.url, data_dir=guarded.folder))) as client:
        assert client.get("/api/tags")["models"]


def test_our_client_shows_the_key_of_its_settings(guarded: Server, tmp_path: Path) -> None:
    stranger = Settings(host=guarded.url, data_dir=tmp_path)
    with (
        closing(Client(stranger)) as client,
        pytest.raises(RequestFailed, match="Authorization: Bearer"),
    ):
        client.get("/api/tags")
    friend = Settings(host=guarded.url, data_dir=tmp_path, api_keys=("second-key",))
    with closing(Client(friend)) as client:
        assert client.get("/api/tags")["models"]


def test_without_keys_any_authorization_is_accepted(server: Server) -> None:
    answer = server.http.get("/api/tags", headers={"authorization": "Bearer ollama"})
    assert answer.status_code == 200


def test_the_log_warns_of_an_open_daemon_and_of_settings_not_used() -> None:
    settings = Settings(problems=("LOCALLLM_HOTS is no setting",))
    assert _warnings(settings, Address.parse("127.0.0.1:1")) == ["LOCALLLM_HOTS is no setting"]
    opened = _warnings(Settings(), Address.parse("0.0.0.0:1"))
    assert len(opened) == 1
    assert "LOCALLLM_API_KEY" in opened[0]
    assert _warnings(Settings(api_keys=("k",)), Address.parse("0.0.0.0:1")) == []

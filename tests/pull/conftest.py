"""A Hub stand-in and an empty store for each test, and an environment that reaches nothing else."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pulling import Puller
from standin import HubStandIn, running

from localllm.config import Settings
from localllm.store import Store


@pytest.fixture(scope="session", autouse=True)
def _no_real_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Hub's client reads these once, when it is first imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_OIDC_RESOURCE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would leave this machine fails."""
    resolve = socket.getaddrinfo

    def checked(host: str, *args: Any, **kwargs: Any) -> Any:
        assert host in ("127.0.0.1", "localhost"), f"a test asks for {host}"
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", checked)


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with running() as standin:
        yield standin


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def settings(hub: HubStandIn) -> Settings:
    return replace(Settings(), hub_endpoint=hub.url)


@pytest.fixture
def puller(store: Store, settings: Settings) -> Puller:
    return Puller(store, settings)

"""One daemon for all tours: SmolLM2 as it is, and with recipes that make it call and think."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from recipes import THINKING, TOOLS
from server_process import Server, running

from localllm.config import load_settings

REAL_DAEMON = Path(__file__).with_name("real_daemon.py")


@pytest.fixture(scope="session")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A daemon with the models `smollm2`, `caller` and `thinker`."""
    folder = tmp_path_factory.mktemp("data")
    # Kernels come from the user's own cache: compiling them is another test's matter.
    environ = {"LOCALLLM_CACHE": str(load_settings().cache_dir), "LOCALLLM_CONTEXT_LENGTH": "4096"}
    with (
        running(REAL_DAEMON, folder, **environ) as (url, process),
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        server = Server(http, url, folder, smollm2_path, process)
        server.create("smollm2")
        recipes: dict[str, dict[str, Any]] = {"caller": TOOLS, "thinker": THINKING}
        for name, recipe in recipes.items():
            server.create(name, **{"from": "smollm2"}, **recipe)
        yield server

"""A running server for each test file."""

from collections.abc import Iterator

import pytest
from server_process import Server, start_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_server(tmp_path_factory.mktemp("data"))

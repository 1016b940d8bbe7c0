"""How a request says how it wants to be served, and what a timeout looks like to its client."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from server_process import Server, start_server

from localllm.daemon import Daemon
from localllm.errors import TimedOut
from localllm.messages import Generate
from localllm.server.work import Job, run

ASK = {"model": "tiny", "stream": False}
WORDS = [{"prompt": "serving"}, {"messages": [{"role": "user", "content": "serving"}]}]


def seen(server: Server, ask: dict[str, Any], **fields: Any) -> str:
    """What reaches the runner."""
    path = "/api/chat" if "messages" in ask else "/api/generate"
    answer = server.post(path, **ASK, **ask, **fields).json()
    return str(answer["message"]["content"] if "messages" in ask else answer["response"])


@pytest.mark.parametrize("ask", WORDS, ids=["generate", "chat"])
def test_fields_reach_the_runner(server: Server, ask: dict[str, Any]) -> None:
    assert seen(server, ask) == repr((False, True, "", 0, False, True))
    fields = {"exact": True, "cache_prompt": False, "priority": -3, "timeout": 20}
    fields["speculate"] = False
    assert seen(server, ask, **fields) == repr((True, False, "", -3, True, False))
    assert seen(server, ask, cache_salt="mine", timeout=1e300) == repr(
        (False, True, ":mine", 0, True, True)
    )


def test_exact_is_a_setting_too(tmp_path: Path) -> None:
    for server in start_server(tmp_path, LOCALLLM_EXACT="1"):
        assert seen(server, WORDS[0]).startswith("(True, True")
        assert seen(server, WORDS[0], exact=False).startswith("(False, True")


def test_callers_with_other_keys_have_other_salts(tmp_path: Path) -> None:
    def salt(server: Server, key: str, **fields: Any) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        body = {**ASK, "prompt": "serving", **fields}
        answer = server.http.post("/api/generate", json=body, headers=headers)
        return str(answer.json()["response"])

    for server in start_server(tmp_path, LOCALLLM_API_KEY="first-key-1,second-key-2"):
        found = [
            salt(server, "first-key-1"),
            salt(server, "second-key-2"),
            salt(server, "first-key-1", cache_salt="x"),
            salt(server, "second-key-2", cache_salt="x"),
        ]
        assert len(set(found)) == 4
        assert salt(server, "first-key-1") == found[0]
        assert not any("key-" in text for text in found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/embed", {"input": "serving"}),
        ("/api/embeddings", {"prompt": "serving"}),
        ("/v1/embeddings", {"input": "serving"}),
    ],
)
def test_embeddings_have_a_turn_too(server: Server, path: str, body: dict[str, Any]) -> None:
    fields = {"priority": 7, "timeout": 20, "cache_salt": "mine"}
    answer = server.post(path, model="tiny", **body, **fields).json()
    vectors = answer.get("embeddings") or [
        answer.get("embedding") or answer["data"][0]["embedding"]
    ]
    assert vectors == [[7.0, 1.0, 5.0]]
    assert server.post(path, model="tiny", **body, timeout=0).status_code == 400


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"timeout": 0}, "timeout must be more than 0 seconds, got 0"),
        ({"timeout": -1.5}, "timeout must be more than 0 seconds, got -1.5"),
        ({"timeout": "5s"}, "cannot unmarshal string into Go struct field"),
        ({"priority": 0.5}, "cannot unmarshal number into Go struct field"),
        ({"cache_salt": 7}, "cannot unmarshal number into Go struct field"),
        ({"speculate": 1}, "cannot unmarshal number into Go struct field"),
    ],
)
def test_wrong_values_are_refused(server: Server, fields: dict[str, Any], error: str) -> None:
    answer = server.post("/api/generate", **ASK, prompt="hi", **fields)
    assert answer.status_code == 400
    assert error in answer.json()["error"]


def test_a_timeout_is_a_status_or_a_last_line(server: Server) -> None:
    answer = server.post("/api/generate", **ASK, prompt="late")
    assert answer.status_code == 504
    assert answer.json() == {"error": "the request timed out"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "late"}]}
    with server.http.stream("POST", "/api/chat", json=body) as stream:
        assert stream.status_code == 200
        *_, last = (json.loads(line) for line in stream.iter_lines())
    assert last == {"error": "the request timed out"}


@pytest.mark.parametrize("wants_progress", [False, True])
def test_time_runs_while_a_model_loads(wants_progress: bool) -> None:
    class Loading:
        was_left = False

        @asynccontextmanager
        async def lease(self, *args: Any) -> AsyncIterator[None]:
            try:
                await asyncio.Event().wait()
                yield
            finally:
                self.was_left = True

    async def ask(loading: Loading) -> None:
        request = Generate(1, deadline=time.monotonic() - 1)
        job = Job(cast(Any, None), None, request, wants_progress)
        async with aclosing(cast(Any, run(cast(Daemon, loading), job))) as events:
            async for _ in events:
                pass

    loading = Loading()
    with pytest.raises(TimedOut, match="before the model was loaded"):
        asyncio.run(ask(loading))
    assert loading.was_left

"""The whole way with a real model: command line, daemon, runner, kernels."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import environment

from localllm.client import Client
from localllm.config import Settings, load_settings
from localllm.errors import BadRequest, LocalLLMError

pytestmark = pytest.mark.real
MODEL = "smollm2:135m"


class Daemon:
    """A real daemon that `localllm` commands started in the background."""

    def __init__(self, folder: Path) -> None:
        # Kernels come from the user's own cache: compiling them is another test's matter.
        cache = str(load_settings().cache_dir)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            host = f"127.0.0.1:{sock.getsockname()[1]}"
        self.env = environment(folder, LOCALLLM_HOST=host, LOCALLLM_CACHE=cache)
        self.settings = Settings(host=host, data_dir=folder)

    def run(self, *args: str) -> str:
        command = [sys.executable, "-m", "localllm.cli", *args]
        done = subprocess.run(command, env=self.env, capture_output=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def generate(self, prompt: str, **options: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "stream": False, "options": options}
        return self.post("/api/generate", body)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with closing(Client(self.settings)) as client:
            return client.post(path, body)

    def runner(self) -> int:
        """Process id of the only runner."""
        with closing(Client(self.settings)) as client:
            daemon = client.get("/api/version")["localllm"]["pid"]
        (child,) = psutil.Process(daemon).children()
        pid: int = child.pid
        return pid


@pytest.fixture(scope="module")
def daemon(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("data"))
    daemon.run("create", MODEL, str(smollm2_path))
    yield daemon
    client = Client(daemon.settings)
    client.post("/api/shutdown", {})
    while client.probe() is not None:
        pass


def test_command_line_answers(daemon: Daemon) -> None:
    assert daemon.run("run", MODEL, "Hello!").strip()
    body = {"model": MODEL, "prompt": "One, two, three, four,", "raw": True, "stream": False}
    options = {"temperature": 0, "num_predict": 4}
    assert "five" in daemon.post("/api/generate", {**body, "options": options})["response"]


def test_answers_at_once_are_those_given_alone(daemon: Daemon) -> None:
    """Sameness: text does not depend on what else is being served."""

    def ask(number: int) -> str:
        prompt = f"Say the number {number} and a word about it."
        return str(daemon.generate(prompt, seed=number, num_predict=12)["response"])

    alone = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone
    assert len(set(alone)) > 6


def test_context_continues_and_statistics_tell_the_truth(daemon: Daemon) -> None:
    first = daemon.generate("My dog is called Rex.", temperature=0, num_predict=20)
    assert first["prompt_eval_count"] + first["eval_count"] == len(first["context"])
    again = daemon.generate("My dog is called Rex.", temperature=0, num_predict=20)
    assert again["response"] == first["response"]
    assert again["prompt_eval_count"] == first["prompt_eval_count"]
    body = {"model": MODEL, "prompt": "hi", "context": first["context"], "stream": False}
    more = daemon.post("/api/generate", {**body, "options": {"num_predict": 1}})
    assert more["prompt_eval_count"] > len(first["context"])


def test_format_holds_from_the_request_to_the_sampler(daemon: Daemon) -> None:
    schema = {
        "type": "object",
        "properties": {"pet": {"enum": ["cat", "dog"]}, "legs": {"type": "integer"}},
        "required": ["pet", "legs"],
        "additionalProperties": False,
    }
    body = {
        "model": MODEL,
        "prompt": "Which pet?",
        "stream": False,
        "options": {"num_predict": 300, "seed": 1},
    }
    for format in ("json", schema):
        answer = daemon.post("/api/generate", {**body, "format": format})
        assert answer["done_reason"] in ("stop", "length")
        if answer["done_reason"] == "stop":
            assert isinstance(json.loads(answer["response"]), dict)
    found = json.loads(answer["response"])
    assert found["pet"] in ("cat", "dog")
    with pytest.raises(BadRequest, match="keyword not is not supported"):
        daemon.post("/api/generate", {**body, "format": {"not": {}}})
    with pytest.raises(BadRequest, match="does not support thinking"):
        daemon.post("/api/generate", {**body, "think": True})


def test_prompt_that_cannot_fit_is_refused_with_both_numbers(daemon: Daemon) -> None:
    with pytest.raises(BadRequest, match=r"it has \d+ tokens and the context holds 128"):
        daemon.generate("word " * 300, num_ctx=128)


def test_old_messages_make_room_and_the_answer_says_so(daemon: Daemon) -> None:
    turns = [{"role": "user", "content": f"turn {n} " + "blah " * 20} for n in range(20)]
    messages = [{"role": "system", "content": "Be brief."}, *turns]
    body = {"model": MODEL, "messages": messages, "stream": False}
    options = {"num_ctx": 256, "num_predict": 3}
    answer = daemon.post("/api/chat", {**body, "options": options})
    assert 0 < answer["dropped_messages"] < 20
    assert answer["prompt_eval_count"] < 256


def test_template_of_a_modelfile_replaces_the_files_own(daemon: Daemon, tmp_path: Path) -> None:
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(
        f'FROM {MODEL}\nTEMPLATE """{{{{ .System }}}}|{{{{ .Prompt }}}}|"""\nSYSTEM Brief.\n'
    )
    daemon.run("create", "templated", "-f", str(modelfile))
    body = {"model": "templated", "prompt": "hi", "stream": False, "_debug_render_only": True}
    rendered = daemon.post("/api/generate", body)["_debug_info"]["rendered_template"]
    assert rendered == "Brief.|hi|"
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    rendered = daemon.post("/api/generate", {**body, "template": template})
    assert rendered["_debug_info"]["rendered_template"] == "<Brief.><hi>"
    with pytest.raises(LocalLLMError, match="template error: line 1"):
        daemon.post("/api/generate", {**body, "template": "{{ nonsense }}"})


def test_killed_runner_costs_its_request_alone(daemon: Daemon) -> None:
    body = {
        "model": MODEL,
        "prompt": "Tell a story.",
        "options": {"ignore_eog": True, "num_predict": 5000},
    }
    chunks = Client(daemon.settings).stream("/api/generate", body)
    assert next(chunk for chunk in chunks if "response" in chunk)
    os.kill(daemon.runner(), signal.SIGKILL)
    with pytest.raises(LocalLLMError, match="unexpectedly stopped"):
        list(chunks)
    assert daemon.generate("Hi", num_predict=3)["eval_count"] == 3

"""Guesses change no bit of real arithmetic: a small llama on both backends, and one with windows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from driver import Client, request, running
from guessing import Eager
from levels import CACHE, LEVELS
from llama_case import VOCAB, write_llama
from test_speculation import Wandering, accepted, said

import kernels_cpu
from localllm.backends import Backend, BackendOptions
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.engine.sequence import Request
from localllm.gguf import GgufFile
from localllm.models import read_spec

WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 0.3, "repeat_penalty": 1.05, "repeat_last_n": 9},
    {"temperature": 0.0, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repeat_last_n": -1},
    {"temperature": 0.3, "top_k": 0, "logit_bias": {3: 1.5}},
    {"temperature": 0.3, "mirostat": 2, "mirostat_tau": 2.0},
    {"temperature": 0.3, "typical_p": 0.7},
]
BACKENDS = {"cpu": CpuBackend, "reference": ReferenceBackend}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    kernels_cpu.configure(CACHE, LEVELS[0])


def varied(count: int, vocab_size: int) -> list[Request]:
    """Prompts that repeat themselves, so that there is much to guess; sampled in all ways."""
    rng = np.random.default_rng(count)
    requests = []
    for i in range(count):
        phrase = rng.integers(vocab_size, size=rng.integers(1, 9)).tolist()
        params = {**WAYS[i % len(WAYS)], "seed": i, "logprobs": i % 3}
        constraint = Wandering(vocab_size, 25) if i % 9 == 4 else None
        fields = {"params": params, "constraint": constraint, "exact": True}
        requests.append(request(f"r{i}", phrase * int(rng.integers(2, 7)), 32, **fields))
    return requests


def open_backend(kind: str, file: GgufFile, blocks: int) -> Backend:
    spec = read_spec(file)
    groups = (blocks,) * len(spec.kv_groups)
    options = BackendOptions(groups, table_width=8, max_tokens=64, threads=2)
    return BACKENDS[kind](file, spec, options)


def serve(backend: Backend, requests: list[Request], **options) -> tuple[Client, int]:
    client = Client()
    with running(backend, num_ctx=120, **options) as engine:
        for r in requests:
            engine.submit(r, client)
        client.wait_end(*(r.request_id for r in requests))
        return client, engine.load().num_preemptions


def check(kind: str, file: GgufFile, count: int, vocab_size: int) -> None:
    """On, off, and (but for the slow reference) on with preemptions by a small pool: the same bits."""
    plain, _ = serve(open_backend(kind, file, 60), varied(count, vocab_size))
    guessed, _ = serve(open_backend(kind, file, 60), varied(count, vocab_size), speculation=Eager())
    for name in plain.outputs:
        assert said(guessed, name) == said(plain, name), name
    assert accepted(guessed) > count
    if kind == "reference":
        return
    small = open_backend(kind, file, 9)
    tight, num_preemptions = serve(small, varied(count, vocab_size), speculation=Eager())
    assert num_preemptions > 0
    assert accepted(tight) > count / 2
    for name in plain.outputs:
        assert said(tight, name) == said(plain, name), name


@pytest.mark.parametrize(("kind", "count"), [("reference", 6), ("cpu", 50)])
def test_a_small_llama_says_the_same_bits(kind: str, count: int, tmp_path: Path) -> None:
    with write_llama(tmp_path / "model.gguf", "Q4_1") as file:
        check(kind, file, count, VOCAB)


@pytest.mark.parametrize(("kind", "count"), [("reference", 6), ("cpu", 40)])
def test_a_model_with_windows_says_the_same_bits(kind: str, count: int, windowed: GgufFile) -> None:
    check(kind, windowed, count, read_spec(windowed).vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["Q5_1", "Q8_0", "F16"])
def test_hundreds_of_answers_are_the_same_bits(type_name: str, tmp_path: Path) -> None:
    with write_llama(tmp_path / "model.gguf", type_name) as file:
        check("cpu", file, 400, VOCAB)


def test_a_refusal_and_a_guess_share_a_step(tmp_path: Path) -> None:
    """Requests with and without guesses side by side are what they are alone."""
    with write_llama(tmp_path / "model.gguf", "Q8_0") as file:
        plain, _ = serve(open_backend("cpu", file, 60), varied(16, VOCAB))
        mixed = [replace(r, speculate=i % 2 == 0) for i, r in enumerate(varied(16, VOCAB))]
        client, _ = serve(open_backend("cpu", file, 60), mixed, speculation=Eager())
    for i in range(16):
        assert said(client, f"r{i}") == said(plain, f"r{i}")
        assert bool(client.end(f"r{i}").stats.drafted_tokens) == (i % 2 == 0)

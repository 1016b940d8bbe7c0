"""Hidden states of a step, beside rows whose logits are wanted.

Defends sameness: neither the states nor the logits of a token depend on what else the step is for.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from levels import CACHE, LEVELS
from llama_case import VOCAB, WIDTH, error_of, open_cpu, open_reference, write_llama

import kernels_cpu
from localllm.backends import Backend, Batch
from localllm.gguf import GgufFile

LENGTHS = (3, 9, 40, 12)  # generated, prompt, two texts to embed
NUM_HIDDEN = 41


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    kernels_cpu.configure(CACHE, LEVELS[0])


def mixed_step() -> Batch:
    """Three rows with logits, then all states of a text and the last one of another."""
    rng = np.random.default_rng(3)
    starts = np.cumsum([0, *LENGTHS]).astype(np.int32)
    rows = [0, 2, 11, *range(12, 52), 63]
    return Batch(
        tokens=rng.integers(0, VOCAB, starts[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS]),
        segment_starts=starts,
        context_lengths=np.array(LENGTHS, np.int32),
        block_tables=[np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.int32)],
        num_generated=3,
        num_generated_segments=1,
        rows=np.array(rows, np.int32),
        num_hidden=NUM_HIDDEN,
    )


def only(batch: Batch, segment: int) -> Batch:
    """The text of one segment by itself, all of its states wanted and no logits."""
    part = slice(batch.segment_starts[segment], batch.segment_starts[segment + 1])
    n = LENGTHS[segment]
    return Batch(
        tokens=batch.tokens[part],
        positions=batch.positions[part],
        segment_starts=np.array([0, n], np.int32),
        context_lengths=np.array([n], np.int32),
        block_tables=[np.array([[8, 9]], np.int32)],
        num_generated=0,
        num_generated_segments=0,
        rows=np.arange(n, dtype=np.int32),
        num_hidden=n,
    )


def run(backend: Backend, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    result = backend.step(batch)
    return result.logits.copy(), result.hidden.copy()


@pytest.fixture(scope="module", params=["F32", "Q4_1"])
def file(request, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return write_llama(Path(tmp_path_factory.mktemp("hidden")) / "model.gguf", request.param)


def test_states_are_the_same_bits_alone_and_near_the_reference(file: GgufFile) -> None:
    backend, reference, batch = open_cpu(file), open_reference(file), mixed_step()
    logits, hidden = run(backend, batch)
    assert logits.shape == (3, VOCAB)
    assert hidden.shape == (NUM_HIDDEN, WIDTH)
    _, text = run(backend, only(batch, 2))
    _, other = run(backend, only(batch, 3))
    np.testing.assert_array_equal(hidden, np.concatenate([text, other[-1:]]))
    want_logits, want_hidden = run(reference, batch)
    # Q4_1: rounding of int8 activations.
    assert error_of(hidden, want_hidden) < 1e-3
    assert error_of(logits, want_logits) < 1e-3
    backend.close()


def test_logits_beside_states_keep_their_bits(file: GgufFile) -> None:
    backend, batch = open_cpu(file), mixed_step()
    logits, hidden = run(backend, batch)
    plain, none = run(backend, replace(batch, rows=batch.rows[:3], num_hidden=0))
    np.testing.assert_array_equal(logits, plain)
    assert none.size == 0
    # The states are what the head reads: F32 weights give the logits back.
    everything = run(backend, replace(batch, rows=batch.rows, num_hidden=0))[0]
    head = file.tensors["output.weight"].dequantize()
    np.testing.assert_allclose(hidden @ head.T, everything[3:], atol=0.05)
    backend.close()


def test_more_states_than_rows_with_logits_may_be_wanted(file: GgufFile) -> None:
    from localllm.backends import BackendOptions
    from localllm.backends.cpu.backend import CpuBackend
    from localllm.models import read_spec

    spec = read_spec(file)
    backend = CpuBackend(file, spec, BackendOptions((24,), 8, max_rows=4, threads=2))
    assert run(backend, mixed_step())[1].shape == (NUM_HIDDEN, WIDTH)
    backend.close()

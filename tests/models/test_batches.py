"""Ragged steps on the reference backend: a sequence's logits do not depend on its company."""

import numpy as np
import pytest

from localllm.backends import Batch
from localllm.backends.reference import ReferenceBackend
from localllm.models import read_spec

# One float32 sum may be ordered differently by the BLAS.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def step(backend: ReferenceBackend, parts, num_generated_parts: int, rows) -> np.ndarray:
    """One step over `parts`, each (tokens, first position, table for every group)."""
    lengths = [len(tokens) for tokens, _, _ in parts]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    batch = Batch(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int32),
        positions=np.concatenate(
            [np.arange(first, first + len(tokens)) for tokens, first, _ in parts]
        ).astype(np.int32),
        segment_starts=starts,
        context_lengths=np.array([f + len(t) for t, f, _ in parts], np.int32),
        block_tables=[np.array([table for _, _, table in parts], np.int32)]
        * len(backend.kv_groups),
        num_generated=int(starts[num_generated_parts]),
        num_generated_segments=num_generated_parts,
        rows=np.array(rows, np.int32),
    )
    return backend.step(batch).logits.copy()


@pytest.fixture(params=["llama-dense", "gemma3-dense", "command-r-dense"])
def backend(request, describe, write_model, open_reference) -> ReferenceBackend:
    file = write_model(describe(request.param))
    spec = read_spec(file)
    return open_reference(file, spec)


def test_sequences_share_a_step_without_meeting(backend, logits_of) -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    a, b = rng.integers(0, 128, 50), rng.integers(0, 128, 41)
    alone_a, alone_b = (logits_of(backend, x, chunk=len(x)) for x in (a, b))
    table_a, table_b = [5, 1], [0, 7]
    first = step(backend, [(a[:40], 0, table_a), (b[:3], 0, table_b)], 0, range(43))
    np.testing.assert_allclose(first, np.concatenate([alone_a[:40], alone_b[:3]]), **TOLERANCE)
    # a goes on generating while b still reads its prompt; only some rows are wanted.
    second = step(backend, [(a[40:41], 40, table_a), (b[3:], 3, table_b)], 1, [0, 38])
    np.testing.assert_allclose(second, np.stack([alone_a[40], alone_b[40]]), **TOLERANCE)
    third = step(backend, [(a[41:], 41, table_a)], 1, [8])
    np.testing.assert_allclose(third, alone_a[49:], **TOLERANCE)


def test_a_step_may_want_no_rows(backend, logits_of) -> None:
    ids = np.arange(20)
    alone = logits_of(backend, ids, chunk=20)
    assert step(backend, [(ids[:19], 0, [2])], 0, []).shape == (0, 128)
    np.testing.assert_allclose(
        step(backend, [(ids[19:], 19, [2])], 0, [0]), alone[19:], **TOLERANCE
    )


def test_a_copied_block_continues_another_sequence(backend, logits_of) -> None:
    ids = np.arange(20)
    alone = logits_of(backend, ids, chunk=20)
    step(backend, [(ids, 0, [2])], 0, [])
    for group in range(len(backend.kv_groups)):
        backend.copy_block(group, 2, 6, 10)
    got = step(backend, [(ids[10:], 10, [6])], 0, [9])
    np.testing.assert_allclose(got, alone[19:], **TOLERANCE)


def test_a_false_batch_is_noticed(backend) -> None:
    with pytest.raises(AssertionError):
        step(backend, [(np.array([128]), 0, [0])], 0, [0])

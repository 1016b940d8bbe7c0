"""The CPU backend against llama.cpp's logits and the reference backend.

Defends sameness: a token's logits are the same bits whatever the chunking, the thread count and
the sequences beside it.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from driving import run_tokens
from levels import CACHE, LEVELS
from llama_case import VOCAB, error_of, open_cpu, open_reference, write_llama
from numpy.typing import NDArray

import kernels_cpu
from localllm.backends import TOP, Batch, Edits
from localllm.backends.kv import KV_TYPES
from localllm.gguf import GgufFile

FAMILIES = ("llama", "gemma2", "command-r", "stablelm", "starcoder2", "olmo2", "phi3", "glm4")
# Rounding of int8 activations, 0.5 % of a product; TQ2_0 has no kernel and is computed as float16.
TYPES = {
    "Q4_0": 1e-3,
    "Q4_1": 1e-3,
    "Q5_0": 1e-3,
    "Q5_1": 1e-3,
    "Q8_0": 1e-3,
    "MXFP4": 1e-3,
    "F16": 1e-5,
    "BF16": 1e-5,
    "TQ2_0": 1e-5,
}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    kernels_cpu.configure(CACHE, LEVELS[0])


def write_family(shared_data: Path, family: str, path: Path) -> GgufFile:
    place = shared_data.parent / "tools" / "archfix.py"
    spec = importlib.util.spec_from_file_location("archfix", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(json.loads((shared_data / "archs" / f"{family}.json").read_text()), path)
    return GgufFile.open(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_llama_cpp(family: str, shared_data: Path, tmp_path: Path) -> None:
    ids = np.load(shared_data / "archs" / "tokens.npy")
    want = np.load(shared_data / "archs" / f"{family}-dense.npy")
    file = write_family(shared_data, f"{family}-dense", tmp_path / "model.gguf")
    backend = open_cpu(file)
    for path in ("prefill", "decode"):
        whole = run_tokens(backend, ids, chunk=len(ids), path=path)
        assert error_of(whole, want) < 1e-5
        np.testing.assert_array_equal(run_tokens(backend, ids, chunk=7, path=path), whole)
    backend.close()


@pytest.mark.parametrize("type_name", TYPES)
def test_types_stay_near_the_reference(type_name: str, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf", type_name)
    ids = np.random.default_rng(1).integers(0, VOCAB, 70)
    want = run_tokens(open_reference(file), ids, chunk=70)
    backend = open_cpu(file)
    for path in ("prefill", "decode"):
        got = run_tokens(backend, ids, chunk=33, path=path)
        assert error_of(got, want) < TYPES[type_name], path
        again = run_tokens(backend, ids, chunk=70, path=path)
        np.testing.assert_array_equal(again, got)
    backend.close()


@pytest.mark.parametrize("type_name", ["F16", "Q4_1"])
def test_q8_0_keys_and_values_stay_near_the_reference(type_name: str, tmp_path: Path) -> None:
    """Float weights attend in float32, others in bfloat16 where there is such arithmetic."""
    file = write_llama(tmp_path / "model.gguf", type_name)
    ids = np.random.default_rng(1).integers(0, VOCAB, 70)
    want = run_tokens(open_reference(file, "q8_0"), ids, chunk=70)
    unrounded = run_tokens(open_reference(file), ids, chunk=70)
    backend, half = open_cpu(file, kv_type="q8_0"), open_cpu(file)
    for path in ("prefill", "decode"):
        got = run_tokens(backend, ids, chunk=33, path=path)
        # A value that lies between two codes may get the other one.
        assert error_of(got, want) < max(TYPES[type_name], 1e-5), path
        np.testing.assert_array_equal(run_tokens(backend, ids, chunk=70, path=path), got)
    assert error_of(unrounded, want) > 0
    assert backend.kv_bytes_per_block[0] * 64 == half.kv_bytes_per_block[0] * 34
    backend.close()
    half.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return write_llama(tmp_path_factory.mktemp("cpu") / "model.gguf", "Q4_1")


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_threads_and_places_of_weights_change_no_bit(
    llama: GgufFile, path: str, kv_type: str
) -> None:
    ids = np.random.default_rng(2).integers(0, VOCAB, 40)
    results = []
    for threads, weights in ((1, "mapped"), (2, "resident"), (3, "auto")):
        backend = open_cpu(llama, threads, weights, kv_type)
        results.append(run_tokens(backend, ids, chunk=40, path=path))
        backend.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_copied_block_continues_alike(llama: GgufFile, kv_type: str) -> None:
    backend = open_cpu(llama, kv_type=kv_type)
    ids = np.random.default_rng(4).integers(0, VOCAB, 21).astype(np.int32)

    def step(block: int, first: int) -> NDArray[np.float32]:
        tokens = ids[first:]
        batch = Batch(
            tokens=tokens,
            positions=np.arange(first, len(ids), dtype=np.int32),
            segment_starts=np.array([0, len(tokens)], np.int32),
            context_lengths=np.array([len(ids)], np.int32),
            block_tables=[np.array([[block]], np.int32)],
            num_generated=0,
            num_generated_segments=0,
            rows=np.array([len(tokens) - 1], np.int32),
        )
        return backend.step(batch).logits.copy()

    whole = step(3, 0)
    backend.copy_block(0, 3, 7, 13)
    np.testing.assert_array_equal(step(7, 13), whole)
    backend.close()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_sequences_beside_change_no_bit(llama: GgufFile, kv_type: str) -> None:
    """Two generated sequences and a prompt in one step, each the same as alone."""
    backend = open_cpu(llama, kv_type=kv_type)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (3, 5, 9)]
    tables = [np.array([[0, 1], [2, 3], [4, 5]], np.int32)]
    lengths = [len(t) for t in texts]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    together = Batch(
        tokens=np.concatenate(texts),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        segment_starts=starts,
        context_lengths=np.array(lengths, np.int32),
        block_tables=tables,
        num_generated=8,
        num_generated_segments=2,
        rows=np.arange(17, dtype=np.int32),
    )
    got = backend.step(together).logits.copy()
    for s, (text, path) in enumerate(zip(texts, ("decode", "decode", "prefill"))):
        alone = run_tokens(backend, text, chunk=len(text), path=path)
        np.testing.assert_array_equal(got[starts[s] : starts[s + 1]], alone)
    backend.close()


def test_selection_and_edits_equal_the_reference(llama: GgufFile) -> None:
    ids = np.random.default_rng(4).integers(0, VOCAB, 6).astype(np.int32)
    edits = Edits(
        np.array([7, 100, 299], np.int32),
        np.array([1.3, 1.0, 1.0], np.float32),
        np.array([0.0, 30.0, -3.0], np.float32),
    )
    backend = open_cpu(llama)
    tables = [np.array([[3]], np.int32)]
    rows = np.array([2, 5], np.int32)
    lengths = np.array([6], np.int32)
    starts = np.array([0, 6], np.int32)
    positions = np.arange(6, dtype=np.int32)
    batch = Batch(ids, positions, starts, lengths, tables, 0, 0, rows, {1: edits})
    result = backend.step(batch)
    logits = result.logits.astype(np.float64)
    assert result.top_ids.shape == (2, TOP)
    edited = result.logits.copy()
    x = edited[1, edits.ids]
    edited[1, edits.ids] = np.where(x > 0, x / edits.repeat, x * edits.repeat) + edits.add
    for r in range(2):
        order = np.argsort(-edited[r], kind="stable")[:TOP]
        np.testing.assert_array_equal(result.top_ids[r], order)
        np.testing.assert_array_equal(result.top_logits[r], edited[r, order])
        lse = np.log(np.exp(edited[r].astype(np.float64)).sum())
        assert abs(result.lse[r] - lse) < 1e-5
        assert abs(result.raw_lse[r] - np.log(np.exp(logits[r]).sum())) < 1e-5
    backend.close()


@pytest.mark.real
@pytest.mark.parametrize("path", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_divergence_stays_below_llama_cpp(
    name: str, path: str, shared_data: Path, request: pytest.FixtureRequest
) -> None:
    """Mean KL to exact float32 over the 16 likeliest tokens and the rest, first 128 tokens."""
    model: Path = request.getfixturevalue(f"{name}_path")
    exact = np.load(shared_data / "real" / f"{name}-f32.npz")
    peer = np.load(shared_data / "real" / f"{name}-llamacpp-kl.npy")[:128].mean()
    backend = open_cpu(GgufFile.open(model))
    logits = run_tokens(backend, exact["tokens"][:128], chunk=128, path=path).astype(np.float64)
    backend.close()
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    p = exact["top_logprobs"][:128].astype(np.float64)
    q = np.take_along_axis(logits, exact["top_ids"][:128], axis=1)
    rest = [np.clip(1 - np.exp(v).sum(axis=1), 1e-9, 1) for v in (p, q)]
    kl = (np.exp(p) * (p - q)).sum(axis=1) + rest[0] * np.log(rest[0] / rest[1])
    assert kl.mean() < 0.75 * peer

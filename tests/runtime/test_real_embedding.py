"""Embeddings of real models against llama.cpp's.

tests/data/embeddings.npz holds llama.cpp's vectors of six texts, made from the models' weights as
exact float32 (so that its own rounding of activations is not in them), pooled both ways; and the
cosines that llama.cpp reaches itself with the quantised file.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest

from localllm import LLM

pytestmark = pytest.mark.real
REFERENCE = Path(__file__).parent.parent / "data" / "embeddings.npz"
POOLING_TYPES = {"mean": 1, "last": 3}


def with_pooling(path: Path, out: Path, pooling: str) -> Path:
    """A copy of a model that says how it is pooled."""
    reader = gguf.GGUFReader(path)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(out, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    writer.add_uint32(f"{architecture}.pooling_type", POOLING_TYPES[pooling])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_vectors_are_nearer_to_exact_than_llama_cpp(
    name: str, pooling: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(f"{name}_path")
    if pooling == "mean":
        path = with_pooling(path, tmp_path / "pooled.gguf", pooling)
    stored = np.load(REFERENCE)
    texts = [str(text) for text in stored["texts"]]
    exact = stored[f"{name}_{pooling}"].astype(np.float64)
    with LLM(path, context_length=1024) as llm:
        vectors = np.array(llm.embed(texts))
        for i in (0, 3):
            assert llm.embed([texts[i]])[0] == vectors[i].tolist()
    cosines = (vectors * exact).sum(axis=1) / np.linalg.norm(exact, axis=1)
    # Measured: 0.99903 and more, where llama.cpp's own least is 0.9961.
    assert (cosines > stored[f"{name}_{pooling}_llamacpp_cosine"]).all()
    assert (cosines > 0.998).all()

"""A real model with an adapter, from Modelfile to answer, beside the same in process."""

from pathlib import Path

import pytest
from adapter_case import random_pairs, write_adapter
from server_process import Server

from localllm import LLM, SamplingParams
from localllm.gguf import GgufFile

pytestmark = pytest.mark.real

NAMES = [f"blk.{i}.{name}.weight" for i in (3, 20) for name in ("attn_q", "attn_v", "ffn_down")]


def test_an_adapter_changes_answers_as_in_process(
    server: Server, smollm2_path: Path, tmp_path: Path
) -> None:
    pairs = random_pairs(GgufFile.open(smollm2_path), NAMES, [8], size=0.1)
    path = write_adapter(tmp_path / "lora.gguf", pairs, alpha=16.0)
    server.create("adapted", **{"from": "smollm2"}, adapters={str(path): ""})
    options = {"temperature": 0, "num_predict": 24}
    ask = {"prompt": "Once upon a time", "raw": True, "stream": False, "options": options}
    told = {
        name: server.post("/api/generate", model=name, **ask).json()["response"]
        for name in ("smollm2", "adapted")
    }
    assert told["smollm2"] != told["adapted"]
    params = SamplingParams(temperature=0, num_predict=24)
    with LLM(smollm2_path, adapter=path, context_length=4096) as llm:
        assert llm.generate("Once upon a time", params).text == told["adapted"]
        (vector,) = llm.embed(["why is the sky blue?"])
    found = server.post("/api/embed", model="adapted", input="why is the sky blue?").json()
    assert found["embeddings"] == [vector]
    plain = server.post("/api/embed", model="smollm2", input="why is the sky blue?").json()
    assert plain["embeddings"] != [vector]


def test_an_adapter_of_another_model_fails_to_load_with_its_name(
    server: Server, smollm2_path: Path, tmp_path: Path
) -> None:
    pairs = random_pairs(GgufFile.open(smollm2_path), NAMES[:1], [8])
    wrong = {"blk.99.attn_q.weight": next(iter(pairs.values()))}
    path = write_adapter(tmp_path / "wrong.gguf", wrong)
    server.create("wrong", **{"from": "smollm2"}, adapters={str(path): ""})
    answer = server.post("/api/generate", model="wrong", prompt="x", stream=False)
    assert answer.status_code == 400
    assert "the model has no linears 'blk.99.attn_q.weight'" in answer.json()["error"]

"""The sameness contract with real arithmetic: a tiny model with windows on the reference backend."""

import numpy as np
from driver import Client, request, running

from localllm.backends import BackendOptions
from localllm.backends.reference import ReferenceBackend
from localllm.gguf import GgufFile
from localllm.models import read_spec

SAMPLED = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "logprobs": 1}


def serve(model: GgufFile, requests, blocks: int, **options) -> tuple[Client, int]:
    spec = read_spec(model)
    sizes = BackendOptions((blocks,) * len(spec.kv_groups), table_width=blocks, max_tokens=64)
    client = Client()
    with running(ReferenceBackend(model, spec, sizes), **options) as engine:
        for r in requests:
            engine.submit(r, client)
        client.wait_end(*(r.request_id for r in requests))
        return client, engine.load().num_preemptions


def many(vocab_size: int):
    rng = np.random.default_rng(3)
    shared = rng.integers(vocab_size, size=40).tolist()
    return [
        request(
            f"r{i}",
            shared[: 40 - i] + rng.integers(vocab_size, size=i).tolist(),
            26,
            params={**SAMPLED, "seed": i},
        )
        for i in range(4)
    ]


def test_texts_and_logprobs_are_bitwise_the_same_alone_and_preempted(windowed) -> None:
    requests = many(read_spec(windowed).vocab_size)
    alone = [serve(windowed, [r], blocks=16)[0] for r in requests]
    for options in ({"blocks": 4}, {"blocks": 16, "chunk": 5}):
        together, num_preemptions = serve(windowed, requests, **options)
        assert num_preemptions > 0 or options["blocks"] > 8
        for r, client in zip(requests, alone):
            assert together.reason(r.request_id) == "length"
            assert together.tokens(r.request_id) == client.tokens(r.request_id)
            assert together.logprobs(r.request_id) == client.logprobs(r.request_id)

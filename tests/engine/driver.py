"""Runs requests through an engine and waits for them."""

import threading
from collections.abc import Callable
from contextlib import contextmanager

from localllm.engine.engine import Engine
from localllm.engine.sequence import Output, Request
from localllm.sampling import SamplingParams

PATIENCE = 300


class Client:
    """A sink that collects the outputs of any number of requests."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self.calls: list[list[Output]] = []
        self.changed = threading.Condition()

    def __call__(self, outputs: list[Output]) -> None:
        with self.changed:
            self.calls.append(outputs)
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self.changed.notify_all()

    def wait(self, condition: Callable[["Client"], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), PATIENCE)

    def wait_end(self, *request_ids: str) -> None:
        self.wait(lambda c: all(c.reason(i) is not None for i in request_ids))

    def tokens(self, request_id: str) -> list[int]:
        return [o.token for o in self.outputs.get(request_id, []) if o.token is not None]

    def logprobs(self, request_id: str) -> list[float | None]:
        return [o.logprob for o in self.outputs.get(request_id, []) if o.token is not None]

    def end(self, request_id: str) -> Output:
        (end,) = [o for o in self.outputs[request_id] if o.finish_reason]
        return end

    def reason(self, request_id: str) -> str | None:
        ends = [o for o in self.outputs.get(request_id, []) if o.finish_reason]
        return ends[0].finish_reason if ends else None


@contextmanager
def running(backend, **options):
    engine = Engine(backend, **options).start()
    try:
        yield engine
        engine.pool.check(engine.scheduler.running)
    finally:
        engine.close()


def request(name: str, tokens: list[int], num_predict: int = 20, **fields) -> Request:
    """A greedy request; `params` overrides how it is sampled."""
    params = fields.pop("params", {})
    sampling = SamplingParams(**{"temperature": 0.0, "num_predict": num_predict, **params})
    return Request(name, tokens, sampling, **fields)


def generate(backend, *requests: Request, **options) -> Client:
    """All requests at once through a fresh engine."""
    client = Client()
    with running(backend, **options) as engine:
        for r in requests:
            engine.submit(r, client)
        client.wait_end(*(r.request_id for r in requests))
    return client

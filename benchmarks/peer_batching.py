"""llama.cpp serving many requests at once, as JSON; serving.py runs it in the peer's environment.

    PYTHON peer_batching.py JOB      JOB: {"model", "threads", "slots", "prompt", "new", "arrivals"}

Continuous batching over its low-level API, as its own server does it: each step decodes one token
of every running sequence, and the rest of a batch of `n_batch` tokens goes to the prompts of those
that have come. Drawing is greedy, prompts are random and share nothing.
"""

import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

BATCH, MICRO_BATCH = 2048, 512  # the defaults of its server


@dataclass
class Request:
    """One request; times in seconds since the run began."""

    prompt: list[int]
    sent_at: float
    slot: int = -1
    position: int = 0
    last: int = 0
    pieces: list[float] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.position >= len(self.prompt)


class Peer:
    """A context with one sequence per slot."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.new = job["new"]
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(job["model"].encode(), parameters)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = job["slots"] * (job["prompt"] + job["new"] + 8)
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_seq_max = job["slots"]
        params.n_threads = params.n_threads_batch = job["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.free = list(range(job["slots"]))
        self.running: list[Request] = []

    def add(self, request: Request, token: int, *, wants_logits: bool) -> int:
        i = self.batch.n_tokens
        self.batch.token[i] = token
        self.batch.pos[i] = request.position
        self.batch.n_seq_id[i] = 1
        self.batch.seq_id[i][0] = request.slot
        self.batch.logits[i] = wants_logits
        self.batch.n_tokens += 1
        request.position += 1
        return i

    def step(self) -> list[tuple[Request, int]]:
        """One step of all that are running: those that got a token, and which."""
        self.batch.n_tokens = 0
        rows = []
        for request in self.running:
            if request.is_decoding:
                rows.append((request, self.add(request, request.last, wants_logits=True)))
        for request in self.running:
            while not request.is_decoding and self.batch.n_tokens < BATCH:
                token = request.prompt[request.position]
                is_last = request.position + 1 == len(request.prompt)
                row = self.add(request, token, wants_logits=is_last)
                if is_last:
                    rows.append((request, row))
                    break
        if llama_cpp.llama_decode(self.context, self.batch):
            sys.exit("llama_decode failed")
        return [(request, self.drawn(row)) for request, row in rows]

    def drawn(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def end(self, request: Request) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, request.slot, -1, -1)
        self.free.append(request.slot)
        self.running.remove(request)

    def run(self, requests: list[Request]) -> float:
        """Serve requests in order of arrival; the seconds it took."""
        waiting = list(requests)
        began = time.perf_counter()
        while waiting or self.running:
            now = time.perf_counter() - began
            while waiting and self.free and waiting[0].sent_at <= now:
                request = waiting.pop(0)
                request.slot = self.free.pop()
                self.running.append(request)
            if not self.running:
                time.sleep(max(0.0, waiting[0].sent_at - now))
                continue
            given = self.step()
            now = time.perf_counter() - began
            for request, token in given:
                request.last = token
                request.pieces.append(now)
                if len(request.pieces) == self.new:
                    self.end(request)
        return time.perf_counter() - began


def main() -> None:
    job = json.loads(sys.argv[1])
    peer = Peer(job)
    rng = random.Random(1)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(peer.vocabulary) for _ in range(count)]

    peer.run([Request(drawn(32), 0.0)])
    requests = [Request(drawn(job["prompt"]), at) for at in job["arrivals"]]
    duration = peer.run(requests)
    told = [{"sent_at": r.sent_at, "pieces": r.pieces} for r in requests]
    print(json.dumps({"duration": duration, "requests": told}))


if __name__ == "__main__":
    main()

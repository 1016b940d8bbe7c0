"""A block pool without a backend, and what a scheduler would do with it."""

from localllm.engine.blocks import BlockPool
from localllm.engine.sequence import Request, Sequence
from localllm.sampling import Sampler, SamplingParams

SIZE = 32


class Copies(list):
    def __call__(self, group: int, source: int, target: int, num_positions: int) -> None:
        assert source != target
        self.append((group, source, target, num_positions))


def new_pool(blocks: int = 16, windows=(None,), identity: bytes = b"") -> BlockPool:
    return BlockPool([blocks] * len(windows), list(windows), SIZE, Copies(), identity)


def new_sequence(tokens, arrival: int = 0, **fields) -> Sequence:
    request = Request(f"r{arrival}", list(tokens), SamplingParams(temperature=0), **fields)
    sampler = Sampler(request.params, [], 1000)
    return Sequence(request, sampler, lambda outputs: None, arrival, 4096)


def compute(pool: BlockPool, sequence: Sequence, upto: int | None = None) -> None:
    """What a scheduler and a backend would do in one step."""
    upto = sequence.num_tokens if upto is None else upto
    pool.grow(sequence, upto)
    sequence.num_computed = upto
    pool.commit(sequence)


def generate(pool: BlockPool, sequence: Sequence, tokens) -> None:
    for token in tokens:
        sequence.append(token)
        compute(pool, sequence)


def run(pool: BlockPool, tokens, answer=(), **fields) -> Sequence:
    """Admit, compute, generate, release."""
    sequence = new_sequence(tokens, **fields)
    assert pool.admit(sequence, 512)
    sequence.num_cached = sequence.num_computed
    compute(pool, sequence)
    generate(pool, sequence, answer)
    pool.check([sequence])
    pool.release(sequence)
    pool.check()
    return sequence

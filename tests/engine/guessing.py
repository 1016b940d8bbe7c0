"""Speculation for tests: guesses at every chance, and drafters that know the answer beforehand."""

import random
from collections.abc import Sequence

from localllm.engine.drafts import MOST, Drafter
from localllm.engine.sequence import Request
from localllm.engine.speculation import Speculation


class Free:
    """Steps cost the same whatever is in them, so every guess is worth its time."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass

    def seconds(self, num_tokens: int) -> float:
        return 1.0


class Eager(Speculation):
    """Guesses by prompt lookup as much as there is room for."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Free()


class Oracle:
    """Knows the answer, and is right with the given probability at each place."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], right: float, seed: str):
        self.text = [*prompt, *answer]
        self.right = right
        self.rng = random.Random(seed)
        self.end = 0

    def update(self, tokens: Sequence[int]) -> int:
        self.end = len(tokens)
        assert list(tokens) == self.text[: self.end]
        return self.rng.randint(0, MOST)

    def chance(self, place: int) -> float:
        return 0.9

    def guess(self, count: int) -> list[int]:
        known = self.text[self.end : self.end + count]
        known += [0] * (count - len(known))
        return [t if self.rng.random() < self.right else (t + 1) % 5 for t in known]


class Knowing(Eager):
    """Gives every request an oracle; `answers` by request id."""

    def __init__(self, answers: dict[str, list[int]], right: float) -> None:
        super().__init__()
        self.answers = answers
        self.right = right

    def drafter(self, request: Request) -> Drafter | None:
        if not request.speculate:
            return None
        answer = self.answers[request.request_id]
        return Oracle(request.tokens, answer, self.right, request.request_id)

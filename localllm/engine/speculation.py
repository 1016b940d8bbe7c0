"""How many guesses a step checks, and of which sequence.

A step of one more token takes a little longer, a right guess saves a whole step. So guesses are
added, the most promising first, as long as what its own sequence gains by the next one, as a share
of its rate, is more than what all sequences of the step lose together. Both sides are measured: the
chance of a guess by its drafter, the time of a step here. With many sequences in the step nothing
is gained, so there are no guesses; when answers stop repeating themselves, there are none either.

Timing decides only how much is guessed. A guess is taken if it equals the token that is drawn with
the sequence's own random number, so texts are the same bits with any number of guesses.

Not here: the guesses (drafts.py), room for them (scheduler.py), drawing (engine.py).
"""

import math
from dataclasses import dataclass

from localllm.engine.drafts import Drafter, PromptLookup
from localllm.engine.scheduler import Scheduler, Segment, Step
from localllm.engine.sequence import Request, Sequence

MARGIN = 0.04  # the least logarithm of a gain that is worth the trouble
MAX_EDITS = 4096  # changed logits of all rows of a sequence


class StepCost:
    """Seconds of a step by its generated tokens: a straight line through the latest steps.

    Steps without guesses say nothing about its slope, which then goes back to what is supposed at
    first. So a slope that was measured in a bad moment does not stay.
    """

    SLOPE = 0.17  # of one more token, as a share of a step of one
    WEIGHT = 5.0  # of that, in squared tokens
    DECAY = 0.98  # of a step's weight, at every further one
    MOST = 2.0  # times what is usual counts: beyond it another process was in the way

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._first, self._slope = 1.0, self.SLOPE
        self._is_fitted = True

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step of so many generated tokens took."""
        x, y = float(num_tokens), seconds
        if self._weight:
            usual = self._y / self._weight * max(1.0, x * self._weight / self._x)
            y = min(y, self.MOST * usual)
        decay = self.DECAY
        self._weight = decay * self._weight + 1
        self._x = decay * self._x + x
        self._y = decay * self._y + y
        self._xx = decay * self._xx + x * x
        self._xy = decay * self._xy + x * y
        self._is_fitted = False

    def seconds(self, num_tokens: int) -> float:
        """Of a step of so many generated tokens; before any was observed in any unit."""
        if not self._is_fitted:
            self._fit()
        return self._first + self._slope * (num_tokens - 1)

    def _fit(self) -> None:
        """Least squares, with WEIGHT for a slope of SLOPE times the line's value at one token."""
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx - self._x * x
        common = self._xy - self._x * y
        supposed = self.WEIGHT * self.SLOPE
        slope = (common + supposed * y) / (spread + self.WEIGHT + supposed * (x - 1))
        # More tokens take no less time, and none takes longer than all.
        self._slope = min(max(slope, 0.0), y / x)
        self._first = y - self._slope * (x - 1)
        self._is_fitted = True


@dataclass(slots=True)
class Candidate:
    """A segment that may get up to `most` guesses.

    expected  tokens that the step will give the sequence
    chance    that the next guess and all before it are right
    """

    segment: Segment
    drafter: Drafter
    most: int
    count: int = 0
    expected: float = 1.0
    chance: float = 0.0
    gain: float = 0.0

    def __post_init__(self) -> None:
        self._look(1.0)

    def add(self) -> None:
        """One more guess."""
        self.count += 1
        self.expected += self.chance
        self._look(self.chance)

    def _look(self, chance: float) -> None:
        self.chance = chance * self.drafter.chance(self.count) if self.count < self.most else 0.0
        self.gain = math.log1p(self.chance / self.expected)


class Speculation:
    """Adds guesses to steps; see above."""

    def __init__(self) -> None:
        self.cost = StepCost()

    def drafter(self, request: Request) -> Drafter | None:
        """Who guesses for the request; None: nobody."""
        return PromptLookup() if request.speculate and request.observer is None else None

    def plan(self, step: Step, scheduler: Scheduler) -> None:
        """Add guesses to the step where they are worth their time."""
        candidates = []
        for segment in step.generated:
            drafter = segment.sequence.drafter
            if drafter is None or segment.count > 1 or not segment.is_last:
                continue
            most = min(drafter.update(segment.sequence.tokens), most_useful(segment.sequence))
            most = min(most, scheduler.draft_room(step, segment)) if most > 0 else 0
            if most > 0:
                candidates.append(Candidate(segment, drafter, most))
        if candidates and self._choose(candidates, step):
            for each in candidates:
                scheduler.draft(step, each.segment, each.drafter.guess(each.count))

    def observe(self, step: Step, seconds: float) -> None:
        """Take in how long a step without prompts took."""
        self.cost.observe(step.num_generated, seconds)

    def _choose(self, candidates: list[Candidate], step: Step) -> bool:
        """Set the candidates' counts; whether they are worth it."""
        num_sequences, num_tokens = len(step.generated), step.num_generated
        seconds = self.cost.seconds(num_tokens)
        total = 0.0
        while True:
            best = max(candidates, key=lambda each: each.gain)
            longer = self.cost.seconds(num_tokens + 1)
            surplus = best.gain - num_sequences * math.log(longer / seconds)
            if best.gain == 0.0 or surplus <= 0:
                return total > MARGIN
            best.add()
            total += surplus
            seconds, num_tokens = longer, num_tokens + 1


def most_useful(sequence: Sequence) -> int:
    """Guesses that can become tokens: each step gives one token more than guesses are right."""
    most = sequence.max_length - sequence.num_tokens - 1
    num_predict = sequence.request.params.num_predict
    if num_predict >= 0:
        most = min(most, num_predict - sequence.emitted - 1)
    num_edits = sequence.sampler.num_edits
    return min(most, MAX_EDITS // num_edits - 1) if num_edits else most

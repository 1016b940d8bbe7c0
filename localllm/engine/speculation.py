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

from localllm.backends import MAX_DRAFT_EDITS
from localllm.engine.drafts import Drafter, PromptLookup
from localllm.engine.scheduler import Scheduler, Segment, Step
from localllm.engine.sequence import Request, Sequence

MARGIN = 0.04  # the least logarithm of a gain that is worth the trouble


class StepCost:
    """Seconds of a step by its generated tokens: the mean of one, a straight line from two on.

    A step of one token waits for memory, more of them for the processor, so the second one may cost
    more than the others or next to nothing. The line goes through the latest steps and through two
    supposed ones that weigh WEIGHT each: after a while without others these are what is left, so
    what was measured in a bad moment does not stay.
    """

    SUPPOSED = ((2, 1.3), (8, 2.3))  # tokens of a step, its time in steps of one
    WEIGHT = 0.2
    DECAY = 0.99  # of a step's weight, at every further one
    MOST = 2.0  # times what is usual counts: beyond it another process was in the way
    NEW = 0.1  # weight of the newest step of one token in their mean

    def __init__(self) -> None:
        self._one: float | None = None
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._line: tuple[float, float] | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step of so many generated tokens took."""
        decay = self.DECAY
        self._weight *= decay
        self._x *= decay
        self._y *= decay
        self._xx *= decay
        self._xy *= decay
        self._line = None
        if num_tokens == 1:
            one = seconds if self._one is None else self._one
            self._one = one + self.NEW * (min(seconds, self.MOST * one) - one)
            return
        x, y = float(num_tokens), seconds
        if self._weight > self.WEIGHT:
            usual = self._y / self._weight * max(1.0, x * self._weight / self._x)
            y = min(y, self.MOST * usual)
        self._weight += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y

    def seconds(self, num_tokens: int) -> float:
        """Of a step of so many generated tokens; in any unit before one was observed."""
        one = self._one
        if one is None:
            # Steps of one token are not asked for where there are none.
            one = self._y / self._weight if self._weight else 1.0
        if num_tokens == 1:
            return one
        if self._line is None:
            self._line = self._fit(one)
        start, slope = self._line
        return max(start + slope * num_tokens, one)

    def _fit(self, one: float) -> tuple[float, float]:
        """Least squares: where the line begins, and its slope."""
        n, x, y, xx, xy = self._weight, self._x, self._y, self._xx, self._xy
        for tokens, steps in self.SUPPOSED:
            n += self.WEIGHT
            x += self.WEIGHT * tokens
            y += self.WEIGHT * steps * one
            xx += self.WEIGHT * tokens * tokens
            xy += self.WEIGHT * tokens * steps * one
        slope = (n * xy - x * y) / (n * xx - x * x)
        # More tokens take no less time, and none takes longer than all.
        slope = min(max(slope, 0.0), y / x)
        return (y - slope * x) / n, slope


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
            # The first step beyond one token may be paid by the guesses that follow.
            if best.gain == 0.0 or (surplus <= 0 and num_tokens > 1):
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
    return min(most, MAX_DRAFT_EDITS // num_edits - 1) if num_edits else most

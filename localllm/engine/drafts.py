"""Guesses of what a sequence says next, looked up in what it has said: no second model is needed.

An answer that edits, quotes or goes through its prompt says again what stands there, and lists and
code repeat themselves. So where the last two tokens have been together before, what followed them
then is the guess, and as long as it is right it is followed on. The longer the two places have been
equal, the likelier the next guess is right; how much likelier is measured for each sequence, for
free, whether its guesses are used or not.

Not here: how many guesses a step checks (speculation.py), what becomes of them (engine.py).
Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

SHIFT = 32  # of the first token of a pair in its key
MOST = 15  # guesses at a time: with the token before them the row products' two bundles of eight

# Lengths of a match up to which one chance of a right guess is measured, and what is taken for it
# before: a little less than what answers of small models showed, in chats and edits alike.
CLASS_ENDS = (2, 3, 4, 6, 10, 20)
FIRST_CHANCES = (0.25, 0.40, 0.55, 0.65, 0.75, 0.85, 0.95)
LONGEST = CLASS_ENDS[-1] + 1
CLASSES = tuple(sum(length > end for end in CLASS_ENDS) for length in range(LONGEST + 1))
FIRST_WEIGHT = 4.0  # guesses that the first chance counts for
DECAY = 0.97  # of a measurement's weight, at every further one


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    def update(self, tokens: Sequence[int]) -> int:
        """Take in all tokens of the sequence; how many of the next ones can be guessed."""

    def chance(self, place: int) -> float:
        """That the guess at this place is right if those before it are."""

    def guess(self, count: int) -> list[int]:
        """The next tokens; `count` is at most what `update` gave."""


class PromptLookup:
    """Guesses what followed the last tokens when they were said before.

    A match is two places: `source`, where the guesses are, and the end of the tokens; the `length`
    tokens before either are equal (counted up to LONGEST). Tokens are only ever appended.
    """

    __slots__ = ("_length", "_num_taken", "_places", "_right", "_source", "_tokens", "_tried")

    def __init__(self) -> None:
        self._tokens: Sequence[int] = ()
        self._num_taken = 0
        # From a pair of tokens to the place after its latest occurrence.
        self._places: dict[int, int] = {}
        self._source = 0
        self._length = 0
        self._right = [FIRST_WEIGHT * chance for chance in FIRST_CHANCES]
        self._tried = [FIRST_WEIGHT] * len(FIRST_CHANCES)

    def update(self, tokens: Sequence[int]) -> int:
        self._tokens = tokens
        if not self._num_taken:
            self._take_prompt(tokens)
        for place in range(self._num_taken, len(tokens)):
            self._take(tokens, place)
        self._num_taken = len(tokens)
        return MOST if self._length else 0

    def chance(self, place: int) -> float:
        kind = CLASSES[min(self._length + place, LONGEST)]
        return self._right[kind] / self._tried[kind]

    def guess(self, count: int) -> list[int]:
        # A text that repeats its last words goes on with them: the guesses lead to the end.
        period = len(self._tokens) - self._source
        return [self._tokens[self._source + i % period] for i in range(count)]

    def _take_prompt(self, tokens: Sequence[int]) -> None:
        """All but the last token at once: a long prompt must not hold up the step."""
        known = np.array(tokens[:-1], np.int64)
        keys = (known[:-1] << SHIFT) | known[1:]
        self._places.update(zip(keys.tolist(), range(2, len(known) + 1)))
        self._num_taken = len(known)

    def _take(self, tokens: Sequence[int], place: int) -> None:
        """See whether the guess was right, and look for a match where there is none."""
        token = tokens[place]
        if self._length:
            is_right = tokens[self._source] == token
            kind = CLASSES[self._length]
            self._right[kind] = DECAY * self._right[kind] + is_right
            self._tried[kind] = DECAY * self._tried[kind] + 1
            self._source += 1
            self._length = min(self._length + 1, LONGEST) if is_right else 0
        if not place:
            return
        key = tokens[place - 1] << SHIFT | token
        if not self._length:
            source = self._places.get(key)
            if source is not None:
                self._source = source
                self._length = common_length(tokens, source, place + 1)
        self._places[key] = place + 1


def common_length(tokens: Sequence[int], first: int, second: int) -> int:
    """How many tokens before both places are equal, up to LONGEST; `first` is the earlier one."""
    length = 0
    most = min(first, LONGEST)
    while length < most and tokens[first - 1 - length] == tokens[second - 1 - length]:
        length += 1
    return length

"""What is asked of a server under load: conversations of random words, of wanted token lengths.

    random         conversations of one turn that share nothing
    shared-prefix  the same, after one of a few long system prompts
    multi-turn     conversations whose every turn sends all that was said before

Words are drawn by seed, so a second run asks the same. How many words make so many tokens is the
tokenizer's matter: a `Scale` measured on the server translates.

Not here: when they are sent (run.py), how a server is spoken to (wire.py).
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from localllm.errors import BadRequest

KINDS = ("random", "shared-prefix", "multi-turn")
# Common words: nearly every tokenizer has each of them, with its space, as one token.
WORDS = tuple(
    """time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work government number
    night point home water room mother area money story fact month lot right study book eye job word
    business issue side kind head house service friend father power hour game line end member law
    car city community name president team minute idea body information back parent face others level
    office door health person art war history party result change morning reason research girl guy
    moment air teacher force education good new first last long great little own other old big high
    different small large next early young important few public bad same able take make know get see
    come think look want give use find tell ask seem feel try leave call""".split()  # noqa: SIM905
)
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclass(frozen=True, slots=True)
class Span:
    """A number of tokens, or the ends of a range from which each is drawn evenly."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Read `256` or `64-1024`. Raises BadRequest."""
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise BadRequest(
                f"{name}: {text!r} is no number such as 256 and no range such as 64-1024"
            )
        least = int(match[1])
        most = int(match[2] or match[1])
        if not 1 <= least <= most:
            raise BadRequest(f"{name}: {text!r} must be at least 1, the smaller number first")
        return cls(least, most)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Scale:
    """Tokens of a prompt of n words: `overhead` (the chat template's) + n * `tokens_per_word`."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> Self:
        """The line through two prompts of (words, tokens)."""
        slope = (many[1] - few[1]) / (many[0] - few[0])
        if slope <= 0:
            return cls()
        return cls(slope, max(0.0, few[1] - slope * few[0]))

    def num_words(self, tokens: int, *, is_first: bool) -> int:
        """Words for a prompt of so many tokens; `is_first`: it carries the template's overhead."""
        overhead = self.overhead if is_first else 0.0
        return max(1, round((tokens - overhead) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and most tokens of the answer."""

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow one another; `system` comes before the first."""

    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to ask. Lengths in tokens.

    prompt, output   of a turn; `prefix` of a shared system prompt, of which there are `num_prefixes`
    turns            of a conversation
    """

    kind: str = "random"
    prompt: Span = Span(256, 256)
    output: Span = Span(64, 64)
    prefix: int = 2000
    num_prefixes: int = 1
    turns: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadRequest(f"--workload is one of {', '.join(KINDS)}, not {self.kind!r}")
        if min(self.prefix, self.num_prefixes, self.turns) < 1:
            raise BadRequest("--prefix-tokens, --prefixes and --turns must be at least 1")

    def conversations(self, scale: Scale) -> Iterator[Conversation]:
        """An endless run of conversations, always the same for a seed and scale."""
        has_prefix = self.kind == "shared-prefix"
        num_turns = self.turns if self.kind == "multi-turn" else 1
        prefixes = [
            words(
                random.Random(f"{self.seed} prefix {i}"),
                scale.num_words(self.prefix, is_first=False),
            )
            for i in range(self.num_prefixes if has_prefix else 0)
        ]
        rng = random.Random(self.seed)
        while True:
            system = rng.choice(prefixes) if has_prefix else ""
            turns = tuple(self._turn(rng, scale, is_first=i == 0) for i in range(num_turns))
            yield Conversation(system, turns)

    def _turn(self, rng: random.Random, scale: Scale, *, is_first: bool) -> Turn:
        count = scale.num_words(self.prompt.draw(rng), is_first=is_first)
        return Turn(words(rng, count), self.output.draw(rng))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))

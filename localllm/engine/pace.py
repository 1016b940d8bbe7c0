"""How many prompt tokens a step may have, from how long steps took.

While answers are being generated a chunk of prompt takes at most twice the time of a decode step
and 250 ms, so that streams stay smooth; with nobody to disturb it may take a second, which bounds
how long a cancelled or a new request waits. Unpacking weights costs a chunk as much as about ten of
its tokens: with 32 of them prompts run at 85 % of their speed, below at much less, so that is the
floor. Timing decides only how work is cut, never what is computed.
"""

FLOOR = 32
FIRST = 256  # tokens of a first chunk that disturbs nobody
# What a step has left for a further prompt is used if it is that much: a prompt that begins later
# may find more of its prefix cached.
SLIVER = 128
SHARED_SECONDS = 0.25
ALONE_SECONDS = 1.0
WEIGHT = 0.3  # of the newest measurement in the running means


class Pace:
    """Running means of step times, and the chunk that follows from them.

    fixed   a chunk for every sequence by itself, prompt and generated tokens alike; not adapted
    """

    def __init__(self, max_tokens: int, fixed: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.fixed = fixed
        self.decode_seconds: float | None = None
        self.prompt_token_seconds: float | None = None

    def chunk(self, *, decoding: bool) -> int:
        """Most prompt tokens for the next step; `decoding`: it also has generated tokens."""
        if self.fixed is not None:
            return self.max_tokens
        if self.prompt_token_seconds is None:
            return min(FLOOR if decoding else FIRST, self.max_tokens)
        seconds = ALONE_SECONDS
        if decoding:
            # Until a step without prompts was measured, decoding counts as quick.
            seconds = min(SHARED_SECONDS, 2 * (self.decode_seconds or 0.0))
        tokens = int(seconds / self.prompt_token_seconds)
        return min(max(FLOOR, tokens), self.max_tokens)

    def observe(self, num_generated: int, num_prompt: int, seconds: float) -> None:
        """Take in how long a step of so many tokens took."""
        if num_prompt == 0:
            self.decode_seconds = blend(self.decode_seconds, seconds)
        elif num_prompt >= FLOOR // 2:
            if num_generated:
                seconds = max(seconds - (self.decode_seconds or 0.0), seconds / 2)
            self.prompt_token_seconds = blend(self.prompt_token_seconds, seconds / num_prompt)


def blend(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)

"""Text out of a stream of tokens: whole characters only, and nothing of a stop string.

Promises, whatever the borders of tokens and calls:
  1. no character is ever cut: bytes of an unfinished one are held, and dropped if the stream ends
     there;
  2. text that may be the beginning of a stop string is held until that is decided; text from a
     stop string on is never handed out.

Not here: which tokens end an answer (the tokenizer's `eog_ids`), thinking and tool calls.
"""

import codecs
from collections.abc import Sequence

from localllm.text.tokenizer import Tokenizer


class Detokenizer:
    """Tokens of one answer to text. Control tokens give no text unless `special`, or if `shown`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset() if special else tokenizer.special_ids - shown
        # Bytes that can be no character at all become U+FFFD as soon as that is certain.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        if token in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """The end of the stream: an unfinished character is dropped."""
        self._decoder.reset()
        return ""


class StopMatcher:
    """Text of one answer up to the first stop string, which is then `stopped`.

    First is the one that is complete first; of several that end at the same character, the longest.
    Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped: str | None = None
        self._stops = [_Stop(text) for text in stops if text]
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be handed out after `text` was added."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        for index, char in enumerate(text):
            complete = [stop.text for stop in self._stops if stop.add(char)]
            if complete:
                self.stopped = max(complete, key=len)
                end = len(self._held) - len(text) + index + 1
                safe, self._held = self._held[: end - len(self.stopped)], ""
                return safe
        cut = len(self._held) - max(stop.num_matched for stop in self._stops)
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def finish(self) -> str:
        """The end of the stream: what was held turned out to be no stop string."""
        safe, self._held = self._held, ""
        return safe


class _Stop:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # borders[i]: length of the longest proper prefix of text[:i + 1] that is also its suffix.
        self.borders = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self.borders[length - 1]
            length += text[i] == text[length]
            self.borders[i] = length

    def add(self, char: str) -> bool:
        """Take the next character; whether the stop string is now complete."""
        while self.num_matched and char != self.text[self.num_matched]:
            self.num_matched = self.borders[self.num_matched - 1]
        self.num_matched += char == self.text[self.num_matched]
        return self.num_matched == len(self.text)

"""SentencePiece-style merging by score, for `tokenizer.ggml.model` = llama.

Neighbouring symbols whose concatenation is a token merge, the best score first, the leftmost
first among equals. Characters that no token covers become byte tokens.

Promises: time grows as n log n whatever the text. Words are merged on their own, which gives the
same ids as merging the whole text because no token crosses the places where words are cut, and
repeated words are looked up.

Our own code and not the `tokenizers` package: that one needs all pairs of halves of all tokens as
a merge list, which takes seconds to work out for 256k tokens, and a model has to answer before
that. Source: sentencepiece's bpe_model.cc, as in llama.cpp's llm_tokenizer_spm_session.
"""

import heapq
import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from localllm.errors import BadFile
from localllm.metadata import Metadata
from localllm.text.vocabulary import BYTE, CONTROL, KEY, UNKNOWN, Vocabulary

SPACE = "▁"
MAX_CACHED_WORDS = 1 << 15
MAX_CACHED_LENGTH = 64


class ScoreMerger:
    """Text to ids. Keeps the words it has met, so one merger serves one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        scores = metadata.floats(KEY + "scores")
        if len(scores) != len(vocabulary.texts):
            raise BadFile(
                f"{metadata.path}: {KEY}scores has {len(scores)} values "
                f"for {len(vocabulary.texts)} tokens"
            )
        self.space_prefix = vocabulary.space_prefix
        self.byte_ids = vocabulary.byte_ids
        self.unknown_id = vocabulary.unknown_id
        self.ids = dict(vocabulary.ids)
        for i in vocabulary.ids_of_kind(CONTROL, UNKNOWN, BYTE):
            self.ids.pop(vocabulary.texts[i], None)
        self.costs = np.negative(np.asarray(scores)).tolist()
        self.word_pattern = _word_pattern(self.ids)
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a stretch of text between special tokens."""
        if self.space_prefix:
            text = " " + text
        ids: list[int] = []
        for word in self._words(text.replace(" ", SPACE)):
            found = self.cache.get(word)
            if found is None:
                found = self._merge(word)
                if len(word) <= MAX_CACHED_LENGTH:
                    if len(self.cache) >= MAX_CACHED_WORDS:
                        self.cache.clear()
                    self.cache[word] = found
            ids += found
        return ids

    def _words(self, text: str) -> Iterator[str]:
        start = 0
        for match in self.word_pattern.finditer(text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        if start < len(text):
            yield text[start:]

    def _merge(self, word: str) -> list[int]:
        """Ids of one word; a symbol that has merged into its left neighbour is empty."""
        symbols: list[str] = list(word)
        after = [*range(1, len(symbols)), -1]
        before = [*range(-1, len(symbols) - 1)]
        ids, costs = self.ids, self.costs
        queue: list[tuple[float, int, int, str]] = []
        for i, (left, right) in enumerate(pairwise(symbols)):
            found = ids.get(left + right)
            if found is not None:
                queue.append((costs[found], i, i + 1, left + right))
        heapq.heapify(queue)
        while queue:
            _, left_at, right_at, merged = heapq.heappop(queue)
            if after[left_at] != right_at or symbols[left_at] + symbols[right_at] != merged:
                continue
            symbols[left_at], symbols[right_at] = merged, ""
            following = after[left_at] = after[right_at]
            after[right_at] = -2
            if following >= 0:
                before[following] = left_at
                text = merged + symbols[following]
                found = ids.get(text)
                if found is not None:
                    heapq.heappush(queue, (costs[found], left_at, following, text))
            previous = before[left_at]
            if previous >= 0:
                text = symbols[previous] + merged
                found = ids.get(text)
                if found is not None:
                    heapq.heappush(queue, (costs[found], previous, left_at, text))
        return [i for symbol in symbols if symbol for i in self._symbol_ids(symbol)]

    def _symbol_ids(self, symbol: str) -> list[int]:
        found = self.ids.get(symbol)
        if found is not None:
            return [found]
        return [i for byte in symbol.encode() if (i := self.byte_id(byte)) is not None]

    def byte_id(self, byte: int) -> int | None:
        return self.byte_ids.get(byte, self.unknown_id)


def _word_pattern(texts: dict[str, int]) -> re.Pattern[str]:
    """Matches each character after which a word may end: one that no token has before a space."""
    crossing = set(re.findall(f"([^{SPACE}\n]){SPACE}", "\n".join(texts)))
    inside = "".join(map(re.escape, sorted(crossing)))
    return re.compile(f"[^{SPACE}{inside}](?={SPACE})")

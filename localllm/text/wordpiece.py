"""WordPiece, for `tokenizer.ggml.model` = bert, through the `tokenizers` package.

GGUF marks the first piece of a word with U+2581 and leaves the others bare; the package wants the
others marked, with ##. Where accents of Hangul and Devanagari are stripped the package follows
the models' own tokenizers, llama.cpp does not.

Not here: [CLS] and [SEP], which are this kind's BOS and EOS (vocabulary.py).
"""

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from localllm.errors import BadFile
from localllm.metadata import Metadata
from localllm.text.spm import SPACE
from localllm.text.vocabulary import CONTROL, UNKNOWN, Vocabulary

MAX_WORD_LENGTH = 100


class WordMatcher:
    """Text to ids: the longest pieces from the left cover a word, or it is unknown as a whole."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        special = set(vocabulary.ids_of_kind(CONTROL, UNKNOWN))
        pieces = {}
        for i, text in enumerate(vocabulary.texts):
            if i in special:
                pieces[text] = i
            else:
                pieces[text[1:] if text.startswith(SPACE) else "##" + text] = i
        self.unknown_id = vocabulary.unknown_id
        if self.unknown_id is None or self.unknown_id not in special:
            raise BadFile(f"{metadata.path}: its vocabulary has no token for unknown words")
        unknown = vocabulary.texts[self.unknown_id]
        self.model = Tokenizer(
            WordPiece(pieces, unk_token=unknown, max_input_chars_per_word=MAX_WORD_LENGTH)
        )
        lowercase = metadata.bool("tokenizer.ggml.normalizer.lowercase", default=True)
        self.model.normalizer = normalizers.BertNormalizer(
            lowercase=lowercase,
            strip_accents=metadata.bool(
                "tokenizer.ggml.normalizer.strip_accents", default=lowercase
            ),
        )
        self.model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        """Ids of a stretch of text between special tokens."""
        ids: list[int] = self.model.encode(text, add_special_tokens=False).ids
        return ids

    def byte_id(self, byte: int) -> int | None:
        return self.unknown_id

"""Filling in the middle: prompts of models that were taught marks for what is before and after.

Not here: templates that have a place for a suffix of their own (go_prompt.py).
Source: Bavarian et al., Efficient training of language models to fill in the middle (2022), and the
model cards of the families.
"""

from localllm.text.tokenizer import Tokenizer

# Before the prefix, before the suffix, before what is wanted.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
# Mistral's models want the suffix first.
SUFFIX_FIRST = ("[PREFIX]",)


def infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int] | None:
    """The ids of a prompt for the text between two others; None if the model knows no marks."""
    for texts in MARKS:
        found = [tokenizer.id_of(text) for text in texts]
        ids = [token for token in found if token is not None]
        if len(ids) < len(texts):
            continue
        before, after, middle = ids
        head = [before, *tokenizer.encode(prefix, parse_special=False)]
        tail = [after, *tokenizer.encode(suffix, parse_special=False)]
        if texts[0] in SUFFIX_FIRST:
            return [*tail, *head]
        return [*head, *tail, middle]
    return None

"""Why the prefix cache had not all of a prompt, in a few words for a person.

Nothing is said about what requests with another salt have left there.
"""

from localllm.engine.prefix import PrefixIndex, Start, text_hash
from localllm.engine.sequence import Sequence


def why_missed(
    index: PrefixIndex, sequence: Sequence, start: Start | None, *, is_incomplete: bool
) -> str:
    """The reason, for a sequence that has just got its cached prefix; empty if nothing is missing.

    start          what was copied of the first block that is not shared, if anything
    is_incomplete  the index knows more full blocks, but not every KV group still has them
    """
    size, count, total = index.block_size, sequence.num_computed, sequence.num_tokens
    if count >= total - 1:
        return ""
    first = sequence.num_published * size
    block = sequence.tokens[first : first + size]
    text = text_hash(sequence.text_chain, block)
    if is_incomplete or text in index.evicted:
        return f"evicted from token {count} of {total}"
    if sequence.request.exact and text in index.by_text:
        return f"exact asked, generated block at {first}"
    if start is not None:
        goes_on = start.num_tokens < len(start.entry.tokens)
    else:
        goes_on = sequence.text_chain in index.num_next
    if goes_on:
        return f"differs at token {count} of {total}"
    if count:
        return f"new from token {count} of {total}"
    return "first request with this salt" if sequence.request.salt else "first request"

"""Text work: tokenizers, streaming detokenizer and stop matcher, chat templates."""

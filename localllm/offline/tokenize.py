"""The work of `localllm tokenize` and `localllm detokenize`: a model file's tokenizer on bytes.

Promises: the input's bytes are the text, exactly; nothing is stripped or translated.
"""

import json
from pathlib import Path
from typing import Any

from localllm.errors import BadRequest
from localllm.gguf import GgufFile
from localllm.text.tokenizer import Tokenizer, load_tokenizer


def tokenize(
    path: str | Path,
    data: bytes,
    *,
    special: bool = False,
    bos: bool = False,
    as_json: bool = False,
) -> str:
    """JSON list of the ids of `data`; with `as_json` `data` is a JSON list of texts.

    `special` recognises control tokens in the text; `bos` puts BOS in front of every text.
    """
    with GgufFile.open(path) as file:
        tokenizer = load_tokenizer(file.metadata)
    start = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    if not as_json:
        return json.dumps(start + tokenizer.encode(data, parse_special=special))
    texts = _parse(data)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequest("tokenize --json expects a JSON list of texts")
    return json.dumps([start + tokenizer.encode(t, parse_special=special) for t in texts])


def detokenize(path: str | Path, data: bytes, *, as_json: bool = False) -> bytes:
    """The bytes of a JSON list of ids; with `as_json` a JSON list of the texts of many lists.

    Special tokens are spelled out.
    """
    with GgufFile.open(path) as file:
        tokenizer = load_tokenizer(file.metadata)
    value = _parse(data)
    if not as_json:
        return tokenizer.decode(_ids(value, tokenizer), special=True)
    if not isinstance(value, list):
        raise BadRequest("detokenize --json expects a JSON list of lists of ids")
    spelled = (tokenizer.decode(_ids(ids, tokenizer), special=True) for ids in value)
    return json.dumps([text.decode(errors="replace") for text in spelled]).encode()


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise BadRequest(f"the input is not JSON: {error}") from None


def _ids(value: Any, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise BadRequest("detokenize expects a JSON list of ids")
    for i in value:
        if not 0 <= i < tokenizer.vocab_size:
            raise BadRequest(f"id {i} is not in the vocabulary of {tokenizer.vocab_size} tokens")
    return value

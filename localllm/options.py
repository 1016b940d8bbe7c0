"""The `options` of a request and the PARAMETERs of a model: names, types, what becomes of them.

Not here: ranges (sampling.py), defaults (sampling.py).
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from localllm.errors import BadRequest

INTEGERS = frozenset(
    {
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict"),
        *("num_keep", "seed", "num_predict", "top_k", "repeat_last_n", "mirostat"),
    }
)
FLOATS = frozenset(
    {
        *("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty"),
        *("frequency_penalty", "mirostat_tau", "mirostat_eta"),
    }
)
BOOLEANS = frozenset({"use_mmap", "ignore_eog"})
OBJECTS = frozenset({"logit_bias"})
STRINGS = frozenset({"grammar"})
# Clients still send these; they mean nothing here and that is no mistake of theirs.
MEANINGLESS = frozenset(
    {
        *("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock", "embedding_only"),
        *("tfs_z", "penalize_newline", "num_gqa", "rope_frequency_base", "rope_frequency_scale"),
        *("num_batch", "num_gpu", "main_gpu", "use_mmap", "draft_num_predict"),
    }
)

NAMES = INTEGERS | FLOATS | BOOLEANS | OBJECTS | STRINGS | {"stop"}

log = logging.getLogger("localllm.server")


def merged(base: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of a model with those of a request, of which nulls count for nothing."""
    return {**base, **{name: value for name, value in (given or {}).items() if value is not None}}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that mean something, with their types. Raises BadRequest on a wrong type."""
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in INTEGERS:
            value = int(_number(name, value, "integer"))
        elif name in FLOATS:
            value = float(_number(name, value, "float32"))
        elif name in BOOLEANS:
            _check(name, value, bool, "boolean")
        elif name in OBJECTS:
            _check(name, value, dict, "object")
        elif name in STRINGS:
            _check(name, value, str, "string")
        elif name == "stop":
            value = _strings(value)
        elif name not in MEANINGLESS:
            log.warning("option %r is unknown and was ignored", name)
            continue
        if name not in MEANINGLESS:
            checked[name] = value
    return checked


def _check(name: str, value: object, kind: type, word: str) -> None:
    if not isinstance(value, kind):
        raise BadRequest(f'option "{name}" must be of type {word}')


def _number(name: str, value: object, kind: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f'option "{name}" must be of type {kind}')
    return value


def _strings(value: object) -> list[str]:
    if not isinstance(value, list):
        raise BadRequest('option "stop" must be of type array')
    if not all(isinstance(item, str) for item in value):
        raise BadRequest('option "stop" must be of an array of strings')
    return value

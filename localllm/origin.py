"""What a model's config blob says beside facts of its file: as the API and Modelfiles give it.

A RENDERER or PARSER names one of Ollama's built-in formats. Here the chat template of the model
file writes and tells the same format, so they are kept with the model and say nothing more.
"""

import re
from collections.abc import Mapping
from typing import Any

from localllm.errors import BadRequest

FORMATS = frozenset(
    {
        *("qwen3", "qwen3-thinking", "qwen3-coder", "qwen3-vl-instruct", "qwen3-vl-thinking"),
        *("qwen3.5", "qwen3.8", "ornith", "cogito", "deepseek3", "deepseek3.1", "olmo3", "olmo3.1"),
        *("olmo3-think", "olmo3-32b-think", "nemotron-3-nano", "nemotron-3.5-nano", "ministral"),
        *("gemma4", "gemma4-small", "gemma4-large", "gemma4-no-thinking", "functiongemma"),
        *("glm-4.7", "glm-ocr", "lfm2", "lfm2-thinking", "laguna", "poolside-v1", "cohere"),
        *("glimmer", "harmony"),
    }
)
VERSION = re.compile(r"v?\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
# Fields of `info`, their types, and what the config calls them.
TEXTS = {
    "model_family": "model_family",
    "base_name": "base_name",
    "quantization_level": "file_type",
    "parameter_size": "model_type",
}
NUMBERS = ("context_length", "embedding_length")


def config_changes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `renderer`, `parser`, `requires` and `info` change in a config. Raises BadRequest."""
    changes: dict[str, Any] = {}
    for key in ("renderer", "parser"):
        if fields.get(key):
            if fields[key] not in FORMATS:
                raise BadRequest(f"unknown {key} {fields[key]!r}")
            changes[key] = fields[key]
    if fields.get("requires"):
        if not VERSION.fullmatch(fields["requires"]):
            raise BadRequest("requires must be a valid semver (e.g. 0.14.0)")
        changes["requires"] = fields["requires"].removeprefix("v")
    for key, value in fields.get("info", {}).items():
        changes |= _info(key, value)
    return changes


def _info(key: str, value: Any) -> dict[str, Any]:
    if key in TEXTS:
        if not isinstance(value, str):
            raise BadRequest(f'info field "{key}" must be a string')
        more = {"model_families": [value]} if key == "model_family" else {}
        return {TEXTS[key]: value, **more}
    if key in NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f'info field "{key}" must be a number')
        if value < 0 or value != int(value):
            raise BadRequest(f'info field "{key}" must be a non-negative integer')
        return {key: int(value)}
    if key == "capabilities":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadRequest('info field "capabilities" must be a list of strings')
        return {key: value}
    raise BadRequest(f'info field "{key}" is not known')

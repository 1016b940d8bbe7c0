"""Manifests of registries and of Ollama's folders, read with distrust.

Everything is bounded: the size of the manifest, the number of layers, the sizes of those that are
read into memory later. Hashes are checked for their form before they become file names.
"""

import json
from typing import Any

from localllm.errors import BadRequest, PullFailed
from localllm.store import LAYER_PREFIX, MAX_TEXT_LAYER_BYTES, Layer, parse_digest

MAX_LAYERS = 1000
MAX_CONFIG_BYTES = 1 << 20
MAX_LAYER_BYTES = 1 << 62
# Layers that are files of their own; all others are read whole.
LARGE_KINDS = frozenset({"model", "projector", "adapter", "draft"})
CONFIG_KIND = "config"


def layers_of(manifest: bytes) -> list[Layer]:
    """The layers that a manifest names, each once, the config last. Raises PullFailed."""
    try:
        parsed = json.loads(manifest)
        layers, config = list(parsed["layers"]), parsed["config"]
        if len(layers) > MAX_LAYERS:
            raise PullFailed(
                f"the manifest has {len(layers)} layers; at most {MAX_LAYERS} are read"
            )
        found = [_layer_of(layer) for layer in layers]
        found.append(_layer_of(config, kind=CONFIG_KIND))
    except BadRequest as error:
        raise PullFailed(f"the manifest is damaged: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PullFailed(f"the manifest is damaged: {type(error).__name__}: {error}") from error
    kinds = [layer.kind for layer in found]
    if "tensor" in kinds:
        raise PullFailed("this model requires MLX support, but the MLX runtime is not available")
    if "model" not in kinds:
        raise PullFailed(
            "the manifest names no model file; models that run elsewhere are not for us"
        )
    return list({layer.digest: layer for layer in found}.values())


def _layer_of(layer: Any, *, kind: str | None = None) -> Layer:
    media_type, digest, size = str(layer["mediaType"]), parse_digest(layer["digest"]), layer["size"]
    if kind is None:
        if not media_type.startswith(LAYER_PREFIX):
            raise PullFailed(
                f"the manifest is not of a model: it has a layer of {media_type[:80]!r}"
            )
        kind = media_type.removeprefix(LAYER_PREFIX)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < MAX_LAYER_BYTES:
        raise PullFailed(f"the manifest is damaged: a layer of {repr(size)[:40]} bytes")
    limit = MAX_CONFIG_BYTES if kind == CONFIG_KIND else MAX_TEXT_LAYER_BYTES
    if kind not in LARGE_KINDS | {"tensor"} and size > limit:
        raise PullFailed(f"the manifest has a {kind[:40]} layer of {size} bytes; at most {limit}")
    return Layer(kind, digest, size)


def check_config(data: bytes, name: str) -> None:
    """Raise PullFailed if the config that a manifest names is not one."""
    try:
        dict(json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise PullFailed(f"the config of {name} is damaged: {error}") from None

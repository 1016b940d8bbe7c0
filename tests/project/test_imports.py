"""Who may import whom, and what must stay out of a light start."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "localllm"

EVERYONE = {"errors", "config", "durations", "__version__"}
# Package or module -> what it may import of localllm besides itself and what everyone may.
ALLOWED = {
    "quants": set(),
    "metadata": {"quants"},
    "gguf": {"quants", "metadata"},
    "models": {"gguf", "metadata", "quants"},
    "backends": {"models", "gguf", "metadata", "quants"},
    "sampling": {"backends"},
    "masks": {"backends", "sampling"},
    "engine": {"backends", "models", "sampling", "masks"},
    "text": {"gguf", "metadata"},
    "names": set(),
    "store": {"names", "user_files"},
    "user_files": set(),
    "traffic": {"address"},
    "pull": {"interpreter", "names", "store", "describe", "identity", "messages"},
}
HEAVY = (
    *("numba", "mlx", "starlette", "llvmlite", "jinja2", "tokenizers"),
    *("huggingface_hub", "httpx2", "llguidance"),
)


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> set[str]:
    """First-level parts of localllm that a file imports at run time."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("localllm."):
            found.add(part_of(node.module or ""))
        elif isinstance(node, ast.ImportFrom) and node.module == "localllm":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {part_of(a.name) for a in node.names if a.name.startswith("localllm.")}
    return found


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_follow_the_layers(part: str) -> None:
    files = list(PACKAGE.glob(f"{part}.py")) + list(PACKAGE.glob(f"{part}/**/*.py"))
    for path in files:
        extra = imports_of(path) - ALLOWED[part] - EVERYONE - {part}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


@pytest.mark.parametrize("folder", ["kernels_cpu"])
def test_kernels_import_nothing_of_localllm(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        names = {
            (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not {n for n in names if n.split(".")[0] == "localllm"}, path


@pytest.mark.parametrize(
    "module",
    [
        "localllm",
        "localllm.config",
        "localllm.gguf",
        "localllm.store",
        "localllm.client",
        "localllm.pull",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The wheel is complete: it runs from another folder, with nothing of the checkout in reach."""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_built_wheel_runs_elsewhere(tmp_path: Path) -> None:
    """Builds offline with this environment's setuptools; dependencies come from it, too."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    env = tmp_path / "env"
    venv.create(env, with_pip=True, system_site_packages=False)
    python = env / "bin" / "python"
    site = next((env / "lib").glob("python*/site-packages"))
    # The dependencies of this environment, without its (editable) localllm.
    parent = next(p for p in sys.path if p.endswith("site-packages"))
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    (site / "zz_parent.pth").write_text(parent + "\n")
    code = "import localllm, kernels_cpu; print(localllm.__file__); print(kernels_cpu.__file__)"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(line.startswith(str(env)) for line in done.stdout.split())
    command = [env / "bin" / "localllm", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "run" in done.stdout

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.interpreter import ROOT, command_of


def test_children_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("json", "numpy", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not the library')")
    code = f"""
import os
os.chdir({str(tmp_path)!r})
import subprocess
from localllm.interpreter import command_of
command = [*command_of("localllm.describe"), "/nowhere.gguf", ""]
print(subprocess.run(command, capture_output=True, text=True))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert "not the library" not in done.stdout
    assert "nowhere.gguf" in done.stdout


def test_package_in_the_current_folder_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert "-P" not in command_of("localllm.runner")
    monkeypatch.chdir(tmp_path)
    assert "-P" in command_of("localllm.runner")
    tmp_path.rmdir()
    assert "-P" in command_of("localllm.runner")

"""Kernels are compiled while the weights are still on their way."""

import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from pulling import make_model

from localllm.compiling import Compiler
from localllm.config import Settings


def wait_for_compiler() -> None:
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()


def test_file_that_cannot_be_opened_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="localllm.server")
    path = tmp_path / "sha256-0"
    path.write_bytes(make_model()[:1000])
    compiler = Compiler(replace(Settings(), cache_dir=tmp_path, isa="generic"))
    for _ in range(2):
        compiler.start(path)
        wait_for_compiler()
    assert [
        record.message.split(":")[0]
        for record in caplog.records
        if record.name == "localllm.server"
    ] == ["kernels of sha256-0 were not compiled ahead"] * 2


@pytest.mark.slow
@pytest.mark.real
def test_kernels_of_a_header_serve_the_whole_file(smollm2_path: Path, tmp_path: Path) -> None:
    """With holes where the weights will be."""
    path = tmp_path / "sha256-0"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(16 << 20))
    with path.open("r+b") as file:
        file.truncate(smollm2_path.stat().st_size)
    cache = tmp_path / "cache"
    settings = replace(Settings(), cache_dir=cache, isa="avx2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CACHE", str(cache))
        Compiler(settings).start(path)
        wait_for_compiler()
    code = (
        "import sys; from pathlib import Path; from dataclasses import replace\n"
        "from localllm.config import Settings; from localllm.runtime import LoadedModel\n"
        "settings = replace(Settings(), cache_dir=Path(sys.argv[2]), isa='avx2')\n"
        "tell = lambda what, done, total: print(what)\n"
        "LoadedModel.open(sys.argv[1], settings, progress=tell).close()"
    )
    command = [sys.executable, "-c", code, str(smollm2_path), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "copying weights" in done.stdout
    assert "compiling kernels" not in done.stdout

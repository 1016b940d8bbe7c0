"""How much KV a model gets."""

import platform
import subprocess
import sys

import pytest

from localllm.errors import BadRequest, OutOfMemory
from localllm.models.spec import KVGroup
from localllm.opening import block_bytes, plan_kv

FULL = KVGroup(tuple(range(10)), num_kv_heads=8, head_dim=64)
WINDOW = KVGroup(tuple(range(10)), num_kv_heads=8, head_dim=64, window=512)
GB = 10**9
# 2 (keys, values) * 2 bytes * 10 layers * 8 heads * 64 = 20,480 bytes a position.
POSITION = 20_480


def test_a_block_is_32_positions() -> None:
    assert block_bytes(FULL) == 32 * POSITION


def test_the_trained_length_bounds_the_context() -> None:
    assert plan_kv((FULL,), 2048, None, 100 * GB, 16).num_ctx == 2048
    assert plan_kv((FULL,), 2048, 9999, 100 * GB, 16).num_ctx == 2048


def test_an_automatic_context_shrinks_with_memory() -> None:
    roomy = plan_kv((FULL,), 131_072, None, 100 * GB, 16)
    tight = plan_kv((FULL,), 131_072, None, GB, 16)
    assert roomy.num_ctx == 32_768
    assert tight.num_ctx == 8192
    assert tight.num_bytes < GB / 4


def test_an_asked_context_is_given_or_refused() -> None:
    assert plan_kv((FULL,), 131_072, 100_000, 3 * GB, 16).num_ctx == 100_000
    with pytest.raises(OutOfMemory, match="num_ctx"):
        plan_kv((FULL,), 131_072, 100_000, 2 * GB, 16)


def test_a_window_group_gets_what_its_sequences_can_see() -> None:
    plan = plan_kv((FULL, WINDOW), 131_072, 100_000, 100 * GB, 1)
    assert plan.num_blocks[0] == 100_000 // 32 + 1
    assert plan.num_blocks[1] == 2 * (1024 // 32 + 2)


def test_an_unknown_backend_is_refused(tiny_path, tmp_path) -> None:
    from localllm.config import Settings
    from localllm.runtime import LoadedModel

    with pytest.raises(BadRequest, match="quantum"):
        LoadedModel.open(tiny_path, Settings(cache_dir=tmp_path), backend="quantum")


CONFIGURE = """
import sys
{before}
from pathlib import Path
from localllm.config import Settings
from localllm.errors import LocalLLMError
from localllm.opening import configure_kernels
try:
    configure_kernels(Settings(cache_dir=Path(sys.argv[1]), isa="generic"))
except LocalLLMError as error:
    sys.exit(str(error))
from numba import njit
from numba.core import registry
njit(lambda x: x + 1)(1)
print(registry.cpu_target.target_context.codegen().magic_tuple()[1])
"""


def configured(tmp_path, before: str) -> "subprocess.CompletedProcess[str]":
    code = CONFIGURE.format(before=before)
    command = [sys.executable, "-c", code, str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="levels are of x86")
def test_numba_keeps_to_the_level_in_the_callers_own_process(tmp_path) -> None:
    """Its configuration is read again at every compilation, and must not be forgotten there."""
    from kernels_cpu.isa import CPU

    assert configured(tmp_path, "").stdout.strip() == CPU["generic"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="levels are of x86")
def test_a_level_is_refused_where_numba_came_first(tmp_path) -> None:
    assert "Numba was imported before" in configured(tmp_path, "import numba").stderr

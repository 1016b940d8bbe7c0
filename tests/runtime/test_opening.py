"""How much KV a model gets."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.backends.kv import KV_TYPES, kv_type
from localllm.config import Settings
from localllm.errors import BadRequest, BadSettings, OutOfMemory
from localllm.gguf import GgufFile
from localllm.models import read_spec
from localllm.models.spec import KVGroup
from localllm.opening import (
    SPARE_BYTES,
    EngineOptions,
    MemoryPlan,
    block_bytes,
    plan_kv,
    plan_memory,
)
from localllm.runtime import LoadedModel

FULL = KVGroup(tuple(range(10)), num_kv_heads=8, head_dim=64)
WINDOW = KVGroup(tuple(range(10)), num_kv_heads=8, head_dim=64, window=512)
GB = 10**9
# 2 (keys, values) * 2 bytes * 10 layers * 8 heads * 64 = 20,480 bytes a position.
POSITION = 20_480


def test_a_block_is_32_positions() -> None:
    assert block_bytes(FULL, KV_TYPES["f16"]) == 32 * POSITION


def test_q8_0_takes_34_bytes_where_f16_takes_64() -> None:
    assert block_bytes(FULL, KV_TYPES["q8_0"]) == 32 * POSITION * 34 // 64


def test_smaller_kv_makes_room_for_longer_contexts() -> None:
    f16, q8_0 = (plan_kv((FULL,), 131_072, None, GB, 16, KV_TYPES[t]) for t in KV_TYPES)
    assert f16.num_ctx < q8_0.num_ctx


def test_other_kv_types_are_refused_by_name() -> None:
    with pytest.raises(BadSettings, match=r"LOCALLLM_KV_CACHE_TYPE\) is 'q4_0', not f16 or q8_0"):
        kv_type("q4_0")


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


def planned(path: Path, free: int, weights: str = "auto", **settings: int) -> MemoryPlan:
    file = GgufFile.open(path)
    try:
        wanted = Settings(weights=weights, **settings)
        return plan_memory(file, read_spec(file), wanted, EngineOptions(), free)
    finally:
        file.close()


def test_weights_are_copied_where_that_leaves_room_and_mapped_where_not(tiny_path: Path) -> None:
    roomy, tight = planned(tiny_path, 100 * GB), planned(tiny_path, 2 * GB)
    assert (roomy.weights, tight.weights) == ("resident", "mapped")
    assert planned(tiny_path, 2 * GB, "resident").weights == "resident"
    assert roomy.weight_bytes == tight.weight_bytes < roomy.scratch_bytes < roomy.num_bytes
    assert roomy.num_bytes - roomy.kv.num_bytes == roomy.weight_bytes + roomy.scratch_bytes


def test_model_that_cannot_run_in_the_free_memory_is_refused(tiny_path: Path) -> None:
    with pytest.raises(
        OutOfMemory, match=r"more system memory than is available \(105 MB\): weights"
    ):
        planned(tiny_path, 100 << 20, "resident")
    with pytest.raises(OutOfMemory, match="requires more system memory"):
        planned(tiny_path, 100 << 10)


@pytest.mark.parametrize("given", [100 * GB, GB])
def test_an_opened_model_says_what_it_needs_and_takes_what_it_gets(
    tiny_path: Path, tmp_path: Path, given: int
) -> None:
    """The daemon makes room between the two plans, which one function makes."""
    asked: list[int] = []

    def make_room(num_bytes: int) -> int:
        asked.append(num_bytes)
        return given

    with LoadedModel.open(
        tiny_path,
        Settings(cache_dir=tmp_path),
        backend="reference",
        free_bytes=20 * GB,
        make_room=make_room,
    ) as model:
        assert asked == [planned(tiny_path, 20 * GB).num_bytes + SPARE_BYTES]
        assert model.engine.backend.num_blocks == planned(tiny_path, given).kv.num_blocks

"""Instruction set levels and thread counts: chosen without Numba, honest about this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels_cpu import cores, isa


def test_choosing_a_level_imports_no_numba() -> None:
    script = (
        "import sys; from kernels_cpu import cores, isa; isa.detect(); cores.default_threads();"
        "assert not {'numba', 'llvmlite', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_environment_keeps_numba_variables_for_itself() -> None:
    environ = {"PATH": "/bin", "NUMBA_OPT": "0", "NUMBA_CPU_FEATURES": "+avx512f"}
    result = isa.environment_for("avx2", environ)
    assert result["PATH"] == "/bin"
    assert "NUMBA_OPT" not in result
    assert "512" not in result.get("NUMBA_CPU_FEATURES", "")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="avx9"):
        isa.environment_for("avx9", {})


def test_optional_features_need_the_machine() -> None:
    assert "vbmi" not in isa.features_for("avx512", frozenset())
    assert "+avx512vbmi" in isa.features_for("avx512", frozenset({"avx512vbmi"})).split(",")
    assert "vbmi" not in isa.features_for("avx2", frozenset({"avx512vbmi"}))


def test_every_level_has_what_the_lesser_ones_have() -> None:
    levels = isa.available()
    assert levels[-1] == "generic"
    assert list(levels) == [level for level in isa.LEVELS if level in levels]


def test_cpu_flags_are_read(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: X\nflags\t\t: fpu avx2 fma\n\nprocessor : 1\n")
    assert isa.cpu_flags(info) == {"fpu", "avx2", "fma"}
    assert isa.cpu_flags(tmp_path / "absent") == frozenset()


def test_amx_probe_agrees_with_the_processor(tmp_path: Path) -> None:
    assert isa.probe_amx() == ("amx_tile" in isa.cpu_flags())
    # The answer is remembered, and the memory is believed.
    answer = isa.has_amx(tmp_path)
    (memory,) = tmp_path.iterdir()
    assert memory.read_text() == ("yes" if answer else "no")
    memory.write_text("no" if answer else "yes")
    assert isa.has_amx(tmp_path) is not answer


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert cores.physical_cores(set(range(8)), tmp_path) == 4
    assert cores.physical_cores({0, 4}, tmp_path) == 1
    assert cores.physical_cores({1, 2, 3}, tmp_path) == 3


def test_quota_of_a_control_group_bounds_the_threads(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert cores.cgroup_quota(tmp_path, membership) is None
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert cores.cgroup_quota(tmp_path, membership) is None
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    assert cores.cgroup_quota(tmp_path, membership) == 1.5
    # The group's folder is not visible in a container; its root stands for it.
    membership.write_text("0::/elsewhere\n")
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert cores.cgroup_quota(tmp_path, membership) == 4


def test_quota_of_an_old_control_group(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:memory:/x\n3:cpu,cpuacct:/x\n")
    group = tmp_path / "cpu,cpuacct" / "x"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.cgroup_quota(tmp_path, membership) == 2
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores.cgroup_quota(tmp_path, membership) is None


def test_there_is_at_least_one_thread() -> None:
    assert 1 <= cores.default_threads() <= (os.cpu_count() or 1)

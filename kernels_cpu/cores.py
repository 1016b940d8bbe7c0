"""How many threads this process should compute with. Reads the machine, never the environment."""

import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """Physical cores that this process may use, bounded by its control group's quota.

    At least 1.
    """
    cores = physical_cores(usable_cpus())
    quota = cgroup_quota()
    return max(1, cores if quota is None else min(cores, round(quota)))


def usable_cpus() -> set[int]:
    """The affinity mask, or all where the system has none."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], folder: Path = CPUS) -> int:
    """Cores behind `cpus`: hyperthreads of one core count once."""
    if not folder.is_dir():
        return apple_cores() or len(cpus)
    return len({siblings(cpu, folder) for cpu in cpus})


def siblings(cpu: int, folder: Path) -> str:
    """The system's name for the core of a CPU: the list of its hyperthreads."""
    topology = folder / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            return (topology / name).read_text().strip()
        except OSError:
            continue
    return str(cpu)


def apple_cores() -> int | None:
    """Performance cores of a Mac (all cores where they are of one kind)."""
    import ctypes

    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    sysctl = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if sysctl is None:
        return None
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        if sysctl(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value > 0:
            return value.value
    return None


def cgroup_quota(
    folder: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """CPUs' worth of time that the control group and its parents allow; None: no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [read_v2(group) for group in parents(folder, path)]
        elif "cpu" in controllers.split(","):
            quotas += [read_v1(group) for group in parents(folder / controllers, path)]
            quotas += [read_v1(group) for group in parents(folder / "cpu", path)]
    return min((q for q in quotas if q is not None), default=None)


def parents(root: Path, path: str) -> list[Path]:
    """The folder of a group and those above it up to the root; a container may have that alone."""
    group = root / path.strip("/")
    above = [g for g in group.parents if g == root or root in g.parents]
    return [group, *above] if group != root else [root]


def read_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def read_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None

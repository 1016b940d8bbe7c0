"""How much memory this process may still take, what another one holds, and who ran out of it.

Bytes throughout. What a control group allows counts as much as what the machine has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kernels_cpu.cores import CGROUPS, parents

MEMBERSHIP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class Names:
    """Files of a control group's folder, and the entry of its statistics that can be taken back."""

    limit: str
    used: str
    reclaimable: str
    events: str


V1 = Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "memory.oom_control",
)
V2 = Names("memory.max", "memory.current", "inactive_file", "memory.events")


def available_memory(folder: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes that can be taken without swapping or being killed."""
    available: int = psutil.virtual_memory().available
    rooms = (room(group, names) for group, names in groups(folder, membership))
    return max(0, min([available, *(r for r in rooms if r is not None)]))


def private_memory(pid: int) -> int:
    """Bytes that would be free without the process; what it maps of files does not count."""
    try:
        held = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(held.rss - getattr(held, "shared", 0))


def resident_memory(pid: int) -> int:
    """Bytes of the process in memory, files that it maps included."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def num_oom_kills(
    folder: Path = CGROUPS, membership: Path = MEMBERSHIP, vmstat: Path = VMSTAT
) -> int:
    """Processes that the system has killed for lack of memory; 0 where it does not say."""
    counts = [entry(vmstat, "oom_kill")]
    counts += [
        entry(group / names.events, "oom_kill") for group, names in groups(folder, membership)
    ]
    return max(count or 0 for count in counts)


def groups(folder: Path, membership: Path) -> Iterator[tuple[Path, Names]]:
    """The control groups of this process that may bound its memory."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((group, V2) for group in parents(folder, path))
        elif "memory" in controllers.split(","):
            yield from ((group, V1) for group in parents(folder / "memory", path))


def room(group: Path, names: Names) -> int | None:
    """What a group still allows; None: it sets no limit."""
    try:
        limit = int((group / names.limit).read_text())
        used = int((group / names.used).read_text())
    except (OSError, ValueError):
        return None
    return limit - used + (entry(group / "memory.stat", names.reclaimable) or 0)


def entry(path: Path, name: str) -> int | None:
    """The number after `name` in a file of such lines."""
    try:
        lines = path.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
    except (OSError, ValueError, IndexError):
        return None

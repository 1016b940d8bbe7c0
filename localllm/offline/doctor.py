"""What `localllm doctor` finds out about this machine.

Each finding is one line; one that is not good says what to do. Later ones do not depend on earlier
ones, so that a broken part does not hide the others.
"""

import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.address import Address
from localllm.config import Settings
from localllm.errors import LocalLLMError

GIGABYTE = 10**9
SMALL_DISK_BYTES = 5 * GIGABYTE


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    text: str
    is_good: bool = True


def examine(settings: Settings) -> Iterator[Finding]:
    """Everything, one finding after the other."""
    checks: tuple[tuple[str, Callable[[Settings], Finding]], ...] = (
        ("machine", _machine),
        ("memory", _memory),
        ("instruction set", _instruction_set),
        ("kernels", _kernels),
        ("kernel cache", _kernel_cache),
        ("data folder", _data_folder),
        ("models", _models),
        ("address", _address),
    )
    for what, check in checks:
        try:
            yield check(settings)
        except (LocalLLMError, OSError, ImportError, RuntimeError, ValueError) as error:
            yield Finding(what, f"{type(error).__name__}: {error}", is_good=False)


def _machine(_: Settings) -> Finding:
    from kernels_cpu.cores import default_threads
    from kernels_cpu.isa import cpu_field

    name = cpu_field("model name") or platform.processor() or platform.machine()
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return Finding("machine", f"{name}, {default_threads()} threads, {system}")


def _memory(_: Settings) -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / GIGABYTE:.1f} of {memory.total / GIGABYTE:.1f} GB available"
    return Finding("memory", text)


def _instruction_set(settings: Settings) -> Finding:
    from kernels_cpu.isa import available

    levels = available(settings.cache_dir)
    chosen = settings.isa or levels[0]
    text = f"{chosen} (this machine has {', '.join(levels)})"
    return Finding("instruction set", text, is_good=chosen in levels)


def _kernels(settings: Settings) -> Finding:
    from localllm.offline.selftest import LARGEST_ERROR, selftest

    found = selftest(settings)
    errors = ", ".join(f"{comparison.error:.0e} in {comparison.role}" for comparison in found)
    text = f"error against the reference: {errors} (at most {LARGEST_ERROR:.0e})"
    return Finding("kernels", text, is_good=all(comparison.is_good for comparison in found))


def _kernel_cache(settings: Settings) -> Finding:
    return _folder("kernel cache", settings.cache_dir)


def _data_folder(settings: Settings) -> Finding:
    return _folder("data folder", settings.data_dir)


def _folder(what: str, folder: Path) -> Finding:
    """A folder that must be writable, and the disk below it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return Finding(what, f"{folder} is not writable", is_good=False)
    used = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {used / GIGABYTE:.2f} GB used, {free / GIGABYTE:.1f} GB free on its disk"
    return Finding(what, text, is_good=free > SMALL_DISK_BYTES)


def _models(settings: Settings) -> Finding:
    from localllm.store import Store

    store = Store(settings.data_dir / "models")
    models = store.models()
    problems = []
    for model in models:
        try:
            store.model_file(model)
        except LocalLLMError as error:
            problems.append(str(error))
    text = "; ".join(problems) or f"{len(models)}, all files as they were added"
    return Finding("models", text, is_good=not problems)


def _address(settings: Settings) -> Finding:
    address = Address.parse(settings.host)
    with socket.socket(socket.AF_INET6 if ":" in address.dial_host else socket.AF_INET) as sock:
        sock.settimeout(2)
        is_used = sock.connect_ex((address.dial_host, address.port)) == 0
    if not is_used:
        return Finding("address", f"{address} is free")
    from localllm.client import Client

    found = Client(settings).probe()
    if found is not None and found.is_ours:
        return Finding("address", f"the daemon answers at {address}")
    other = (found.other if found else None) or "another program"
    text = f"{other} answers at {address}; choose another port with LOCALLLM_HOST"
    return Finding("address", text, is_good=False)

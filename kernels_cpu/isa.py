"""Instruction set levels: which this machine has, and the environment that makes Numba keep to one.

    amx      AVX-512 with VNNI, and bfloat16 tiles
    avx512   AVX-512 with VNNI
    avxvnni  AVX2 with the byte dot product
    avx2     AVX2, FMA and F16C
    generic  correct anywhere, not tuned; the only level of processors that are not x86

A level is chosen before Numba is imported, by whoever starts the process; so nothing here imports
it. LLVM would use every register the host has, whatever a kernel intends, unless it is told of a
lesser processor.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LEVELS = ("amx", "avx512", "avxvnni", "avx2", "generic")

AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_vnni")
AMX = (*AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
# Names are those of /proc/cpuinfo.
REQUIRED = {"amx": AMX, "avx512": AVX512, "avxvnni": (*AVX2, "avx_vnni"), "avx2": AVX2}

# What LLVM is told: a base processor, and features beyond it.
PREFER_512 = "-prefer-256-bit"
CPU = {
    "amx": "x86-64-v4",
    "avx512": "x86-64-v4",
    "avxvnni": "x86-64-v3",
    "avx2": "x86-64-v3",
    "generic": "x86-64-v2",
}
FEATURES = {
    "amx": f"{PREFER_512},+avx512vnni,+avx512bf16,+amx-tile,+amx-bf16,+amx-int8",
    "avx512": f"{PREFER_512},+avx512vnni",
    "avxvnni": "+avxvnni",
    "avx2": "+avx2",
    "generic": "+sse2",
}
# Welcome where the machine has them (byte permutes, for instance), by LLVM's name.
OPTIONAL_512 = {
    "avx512vbmi": "avx512vbmi",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_bf16": "avx512bf16",
    "gfni": "gfni",
}

ARCH_PRCTL = 158  # system call number on x86-64
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


def detect(cache: Path | None = None) -> str:
    """The best level of this machine. `cache` is where the outcome of probing AMX is remembered."""
    return available(cache)[0]


def available(cache: Path | None = None) -> tuple[str, ...]:
    """All levels that this machine can run, best first."""
    flags = cpu_flags()
    levels = [level for level, needed in REQUIRED.items() if flags.issuperset(needed)]
    if "amx" in levels and not has_amx(cache):
        levels.remove("amx")
    return (*levels, "generic")


def environment_for(level: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child process that compiles for `level`: Numba's variables are ours alone."""
    if level not in LEVELS:
        raise ValueError(f"unknown instruction set level {level!r}; one of {', '.join(LEVELS)}")
    result = {k: v for k, v in environ.items() if not k.startswith("NUMBA_")}
    if platform.machine() in ("x86_64", "AMD64"):
        result["NUMBA_CPU_NAME"] = CPU[level]
        result["NUMBA_CPU_FEATURES"] = features_for(level, cpu_flags())
    return result


def has_bf16(level: str) -> bool:
    """Whether this machine, at `level`, multiplies vectors of bfloat16 pairs."""
    return level in ("amx", "avx512") and "avx512_bf16" in cpu_flags()


def features_for(level: str, flags: frozenset[str]) -> str:
    optional = OPTIONAL_512 if level in ("amx", "avx512") else {}
    found = [f"+{name}" for flag, name in optional.items() if flag in flags]
    return ",".join([FEATURES[level], *found])


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's features by Linux's names; empty where the system does not tell."""
    return frozenset(cpu_field("flags", path).split())


def cpu_field(name: str, path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def has_amx(cache: Path | None) -> bool:
    """Whether tile products work here: tried once in a child process, since failing may be
    fatal."""
    if cache is None:
        return probe_amx()
    kind = "\n".join((cpu_field("model name"), cpu_field("microcode"), platform.release()))
    memory = cache / f"amx-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
    try:
        return memory.read_text() == "yes"
    except OSError:
        pass
    answer = probe_amx()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        memory.write_text("yes" if answer else "no")
    except OSError:
        pass  # It is tried again next time.
    return answer


def request_tiles() -> bool:
    """Ask the system for the tile registers, for all threads of this process; no child inherits
    them.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def probe_amx() -> bool:
    """Run `kernels_cpu.amx_probe` in a child; a crash, a wrong product and a hang all mean no."""
    environ = environment_for("generic", os.environ)
    folder = str(Path(__file__).parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "kernels_cpu.amx_probe"]
    try:
        child = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return child.returncode == 0 and child.stdout.strip() == b"amx works"

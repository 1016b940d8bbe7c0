"""The recorded program: kernels, their argument blocks, and how many items each one has.

A record is eight int64: kernel address, address of its argument block, address of an item count that
is read at run time, multiplier, chunk size, flags, index, 0. It has count * multiplier items. Argument
blocks may still be changed after they are recorded (a later operation asks an earlier one for one more
output) until `finish`.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels_cpu import Kernel
from kernels_cpu.team import CLAIM, JOINED, RECORD_SLOTS, SERIAL

__all__ = ["CLAIM", "JOINED", "SERIAL", "Program", "Record", "float_bits"]

Int64s = NDArray[np.int64]


def float_bits(value: float) -> int:
    """A float32 as the low 32 bits of an argument slot."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


@dataclass(slots=True)
class Record:
    """One step of the program. `args` is written to memory as int64 slots."""

    kernel: Kernel
    args: Int64s
    count: int
    multiplier: int
    chunk: int
    flags: int
    label: str


@dataclass(slots=True)
class Program:
    """Records in order; `finish` turns them into what the team runs."""

    records: list[Record] = field(default_factory=list)
    _table: Int64s | None = None

    def record(
        self,
        kernel: Kernel,
        args: Sequence[int],
        *,
        count: int,
        multiplier: int = 1,
        chunk: int = 1,
        flags: int = 0,
        label: str = "",
    ) -> Record:
        """Append a record; `count` is the address of the int64 item count."""
        block = np.array(args, np.int64)
        record = Record(kernel, block, count, multiplier, chunk, flags, label or kernel.name)
        self.records.append(record)
        return record

    def kernels(self) -> Iterator[Kernel]:
        """Each kernel once."""
        return iter({id(r.kernel): r.kernel for r in self.records}.values())

    def finish(self) -> None:
        """Look up every kernel's address and lay out the table."""
        table = np.zeros((len(self.records), RECORD_SLOTS), np.int64)
        for i, r in enumerate(self.records):
            args: int = r.args.ctypes.data
            table[i] = (r.kernel.address, args, r.count, r.multiplier, r.chunk, r.flags, i, 0)
        self._table = table

    @property
    def address(self) -> int:
        assert self._table is not None, "finish was not called"
        address: int = self._table.ctypes.data
        return address

    def __len__(self) -> int:
        return len(self.records)

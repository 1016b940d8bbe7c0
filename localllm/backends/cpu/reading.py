"""How fast this memory can be read: exactly the weights that a decode step reads, in the same order and shares."""

import time

from kernels_cpu.rows import ROW_PRODUCTS, Slot, read_bandwidth
from kernels_cpu.team import Team
from localllm.backends.cpu.context import Context
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.step import Slot as Header

REPETITIONS = 5


def measure(context: Context, team: Team) -> tuple[int, float]:
    """(bytes of weights that a step of one generated token reads, best bytes per second)."""
    products = set(map(id, ROW_PRODUCTS.values()))
    program, num_bytes = Program(), 0
    for record in context.program.records:
        if id(record.kernel) in products:
            args = record.args.tolist()
            num_bytes += args[Slot.ROWS] * args[Slot.ROW_BYTES]
            program.record(
                read_bandwidth,
                args,
                count=context.slot(Header.ONE),
                multiplier=record.multiplier,
                chunk=record.chunk,
            )
    program.finish()
    seconds = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        team.run(program.address, len(program))
        seconds.append(time.perf_counter() - started)
    return num_bytes, num_bytes / min(seconds)

"""A runner whose tiny model hangs inside a kernel when it reads a tilde.

The engine, the thread team and the pulse are the real ones; only the arithmetic is the reference's.
"""

from dataclasses import replace

import numpy as np

from kernels_cpu.kernel import kernel
from kernels_cpu.simd import slot
from kernels_cpu.team import RECORD_SLOTS, Team
from kernels_cpu.threads import atomic_load
from localllm.backends import Batch, StepResult
from localllm.backends.reference import ReferenceBackend
from localllm.config import load_settings
from localllm.messages import Load
from localllm.opening import configure_kernels
from localllm.runner import MakeRoom, Progress, main
from localllm.runner_model import RunnerModel
from localllm.runtime import LoadedModel


@kernel
def spin(args: int, first: int, last: int, scratch: int) -> None:
    """Until the word at slot 0 is not 0, which never comes."""
    while atomic_load(slot(args, 0)) == 0:
        pass


class SpinningBackend(ReferenceBackend):
    """The reference backend with a team that hangs in a step which has the token `hang_on`."""

    team: Team
    hang_on: int

    def step(self, batch: Batch) -> StepResult:
        if self.hang_on in batch.tokens:
            word, args = np.zeros(1, np.int64), np.zeros(1, np.int64)
            args[0] = word.ctypes.data
            record = np.zeros(RECORD_SLOTS, np.int64)
            record[:5] = spin.address, args.ctypes.data, 0, 4, 1
            self.team.run(record.ctypes.data, 1)
        return super().step(batch)

    @property
    def position(self) -> tuple[int, int]:
        steps, _ = super().position
        runs, place = self.team.position
        return steps + runs, place


def open_spinning(load: Load, progress: Progress, make_room: MakeRoom) -> RunnerModel:
    settings = replace(load_settings(), num_parallel=4)
    configure_kernels(settings)
    model = LoadedModel.open(load.path, settings, backend="reference", make_room=make_room)
    backend = model.engine.backend
    assert isinstance(backend, ReferenceBackend)
    backend.__class__ = SpinningBackend
    assert isinstance(backend, SpinningBackend)
    backend.team = Team(2)
    (backend.hang_on,) = model.tokenizer.encode("~", parse_special=False)
    # Compiled now, so that a hang is a hang.
    assert spin.address
    return RunnerModel(model)


if __name__ == "__main__":
    main(open_spinning)

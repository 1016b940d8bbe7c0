"""What is refused before a runner is started."""

from dataclasses import replace

import pytest

from kernels_cpu import isa
from localllm.config import Settings
from localllm.errors import BadSettings
from localllm.launch import launch_runner


def test_an_instruction_set_that_the_machine_lacks_is_named_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isa, "available", lambda cache: ("avx2", "generic"))
    expected = "LOCALLLM_ISA is 'amx', which this machine cannot run; it can avx2, generic"
    with pytest.raises(BadSettings, match=expected):
        launch_runner(replace(Settings(), isa="amx"))

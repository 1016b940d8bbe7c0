from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localllm.config import Settings, load_settings
from localllm.gguf import GgufFile
from localllm.offline import doctor
from localllm.offline.selftest import TYPES, selftest, write_model


def test_model_of_the_selftest_has_every_type_and_sane_weights(tmp_path: Path) -> None:
    path = tmp_path / "selftest.gguf"
    write_model(path)
    with GgufFile.open(path) as file:
        matrices = [t for t in file.tensors.values() if len(t.shape) == 2]
        assert {tensor.type.name for tensor in matrices} == set(TYPES)
        for tensor in matrices:
            weights = tensor.dequantize()
            # MXFP4 scales are powers of two.
            assert 0.7 < np.std(weights) * tensor.cols**0.5 < 1.45, tensor.name


@pytest.mark.slow
def test_kernels_agree_with_the_reference() -> None:
    for comparison in selftest(load_settings()):
        assert comparison.is_good, comparison


def test_findings_do_not_hide_each_other(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    settings = replace(
        Settings(), data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", isa="nonsense"
    )
    found = {finding.what: finding for finding in doctor.examine(settings)}
    assert list(found) == [
        *("machine", "memory", "instruction set", "kernels", "kernel cache", "data folder"),
        *("models", "address"),
    ]
    assert found["machine"].is_good
    assert not found["instruction set"].is_good
    assert not found["kernels"].is_good
    assert not found["data folder"].is_good
    assert found["kernel cache"].is_good

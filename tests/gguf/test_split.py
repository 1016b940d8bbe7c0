"""Split models: found, joined, and refused when the parts do not belong together."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from localllm.errors import BadFile
from localllm.gguf import GgufFile


def write_part(
    path: Path, number: int, count: int, total: int, names: list[str], arch: str = "llama"
) -> None:
    writer = GGUFWriter(path, arch)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    if number == 0:
        writer.add_string("general.name", "whole")
    for name in names:
        writer.add_tensor(name, np.full((2, 3), int(name[1:]), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_set(folder: Path, prefix: str = "m") -> list[Path]:
    """Three parts with tensors t0 t1 | t2 | t3."""
    paths = [folder / f"{prefix}-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for number, names in enumerate((["t0", "t1"], ["t2"], ["t3"])):
        write_part(paths[number], number, 3, 4, names)
    return paths


@pytest.mark.parametrize("prefix", ["m", "my model v1.5", "a-00001-of-00002"])
def test_first_part_opens_the_whole_set(prefix: str, tmp_path: Path) -> None:
    paths = write_set(tmp_path, prefix)
    with GgufFile.open(paths[0]) as file:
        assert list(file.tensors) == ["t0", "t1", "t2", "t3"]
        assert file.metadata.str("general.name") == "whole"
        for index, tensor in enumerate(file.tensors.values()):
            assert tensor.dequantize().tolist() == np.full((2, 3), index).tolist()


def test_parts_may_be_listed_under_any_names(tmp_path: Path) -> None:
    paths = [p.rename(tmp_path / f"blob{i}") for i, p in enumerate(write_set(tmp_path))]
    assert len(GgufFile.open(paths[0], parts=paths).tensors) == 4
    with pytest.raises(BadFile, match="split in 3 parts, but 2"):
        GgufFile.open(paths[0], parts=paths[:2])


def test_later_part_points_to_the_first(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    with pytest.raises(BadFile, match=r"open m-00001-of-00003\.gguf instead"):
        GgufFile.open(paths[1])


def test_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[2].unlink()
    with pytest.raises(BadFile, match=r"m-00003-of-00003\.gguf: this part .* missing"):
        GgufFile.open(paths[0])


def test_renamed_part_says_how_parts_are_named(tmp_path: Path) -> None:
    path = write_set(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(BadFile, match="one of 3 parts and must be named"):
        GgufFile.open(path)


@pytest.mark.parametrize(
    ("number", "count", "total", "names", "arch", "reason"),
    [
        (2, 3, 4, ["t2"], "llama", "split.no is 2, not 1"),
        (1, 2, 4, ["t2"], "llama", "split.count is 2, not 3"),
        (1, 3, 9, ["t2"], "llama", "split.tensors.count is 9, not 4"),
        (1, 3, 4, ["t1"], "llama", "'t1' is also in an earlier part"),
        (1, 3, 4, ["t2", "t5"], "llama", "hold 5 tensors, not 4"),
        (1, 3, 4, ["t2"], "qwen2", "another architecture"),
    ],
)
def test_foreign_part_is_refused(
    number: int,
    count: int,
    total: int,
    names: list[str],
    arch: str,
    reason: str,
    tmp_path: Path,
) -> None:
    paths = write_set(tmp_path)
    write_part(paths[1], number, count, total, names, arch)
    with pytest.raises(BadFile, match=reason):
        GgufFile.open(paths[0])


def test_unsplit_file_in_place_of_a_part_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    writer = GGUFWriter(paths[1], "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadFile, match=r"00002-of-00003\.gguf.*split.no is missing"):
        GgufFile.open(paths[0])

"""A process that is killed while it writes leaves files that nobody takes for models."""

import os
from pathlib import Path

from localllm.names import ModelName
from localllm.store import Recipe, Store


def test_half_written_files_are_no_models_and_go_in_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "models")
    layer = store.add_bytes("model", b"GGUF")
    model = store.create(ModelName.parse("m"), layer, {}, Recipe())
    folder = store.root.joinpath("manifests", *model.name.parts[:3])
    strays = [folder / ".x1.partial", store.root / "blobs" / ".x2.partial"]
    for stray in strays:
        stray.write_bytes(b"{")
    assert [m.name for m in store.models()] == [model.name]
    unused = store.add_bytes("model", b"other")
    for path in (*strays, store.root / "blobs" / f"sha256-{unused.digest}"):
        os.utime(path, (1, 1))
    store.prune()
    assert [stray.exists() for stray in strays] == [False, False]
    assert not store.has(unused.digest)
    assert store.has(layer.digest)

"""Small models, impatient pulls, and what they told."""

import tempfile
import threading
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np

from localllm.config import Settings
from localllm.pull.events import Event, Status, Transfer
from localllm.pull.puller import pull
from localllm.pull.transport import Patience
from localllm.store import Store, StoredModel

IMPATIENT = Patience(
    connect_seconds=5, read_seconds=0.5, tries=4, first_wait_seconds=0.01, max_wait_seconds=0.02
)


@cache
def make_model(num_rows: int = 400, *, seed: int = 0) -> bytes:
    """A model file with random weights, 4 kB a row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        _write(gguf.GGUFWriter(path, "llama"), num_rows, seed)
        return path.read_bytes()


def _write(writer: gguf.GGUFWriter, num_rows: int, seed: int) -> None:
    writer.add_name("Tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(1024)
    writer.add_file_type(7)
    weights = np.random.default_rng(seed).standard_normal((num_rows, 1024), np.float32)
    writer.add_tensor("token_embd.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def make_shards() -> tuple[bytes, ...]:
    """A model in two files, as llama.cpp splits it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama", split_max_tensors=1)
        writer.add_name("Tiny")
        writer.add_context_length(2048)
        for seed, name in enumerate(("token_embd.weight", "output.weight")):
            weights = np.random.default_rng(seed).standard_normal((50, 64), np.float32)
            writer.add_tensor(name, weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tuple(p.read_bytes() for p in sorted(Path(folder).glob("*-of-00002.gguf")))


@dataclass
class Puller:
    """Pulls into one store and keeps what was told."""

    store: Store
    settings: Settings
    events: list[Event] = field(default_factory=list)

    def pull(
        self,
        name: str,
        *,
        cancel: threading.Event | None = None,
        is_insecure: bool = False,
        patience: Patience = IMPATIENT,
        **changes: object,
    ) -> StoredModel:
        settings = replace(self.settings, **changes)  # type: ignore[arg-type]
        self.events.clear()
        return pull(
            name,
            self.store,
            settings,
            self.events.append,
            cancel,
            is_insecure=is_insecure,
            patience=patience,
        )

    @property
    def statuses(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Status)]

    @property
    def transfers(self) -> list[Transfer]:
        return [event for event in self.events if isinstance(event, Transfer)]

    def partial_files(self) -> list[str]:
        folder = self.store.partial
        return sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []

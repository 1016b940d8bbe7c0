"""`localllm run` with a model that is made for embeddings: the vector of the prompt as JSON."""

import json
from typing import Any

from localllm.client import Client
from localllm.errors import BadRequest


def is_for_vectors(client: Client, model: str) -> bool:
    """Whether the model does nothing else."""
    capabilities: list[str] = client.post("/api/show", {"model": model})["capabilities"]
    return "embedding" in capabilities


def print_vector(client: Client, text: str, body: dict[str, Any]) -> None:
    """Print the text's vector. Raises BadRequest if there is no text."""
    if not text.strip():
        raise BadRequest(
            "embedding models require input text. "
            f'Usage: localllm run {body["model"]} "your text here"'
        )
    print(json.dumps(client.post("/api/embed", {**body, "input": text})["embeddings"][0]))

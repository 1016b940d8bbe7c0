import pytest

from localllm.errors import BadRequest
from localllm.names import ModelName


@pytest.mark.parametrize(
    ("text", "parts", "shown"),
    [
        ("qwen3", ("registry.ollama.ai", "library", "qwen3", "latest"), "qwen3:latest"),
        ("qwen3:0.6b", ("registry.ollama.ai", "library", "qwen3", "0.6b"), "qwen3:0.6b"),
        (" me/x:v1 ", ("registry.ollama.ai", "me", "x", "v1"), "me/x:v1"),
        ("hf.co/u/r:Q4_K_M", ("hf.co", "u", "r", "Q4_K_M"), "hf.co/u/r:Q4_K_M"),
        ("localhost:5000/a/b", ("localhost:5000", "a", "b", "latest"), "localhost:5000/a/b:latest"),
        ("https://hf.co/u/r", ("hf.co", "u", "r", "latest"), "hf.co/u/r:latest"),
        ("my.model:V1.0", ("registry.ollama.ai", "library", "my.model", "V1.0"), "my.model:V1.0"),
    ],
)
def test_names_are_completed_and_shown_shortest(
    text: str, parts: tuple[str, ...], shown: str
) -> None:
    name = ModelName.parse(text)
    assert name.parts == parts
    assert str(name) == shown
    assert ModelName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ":", "model:", "a//b", "/a", "a/", "../x", "a/../b", ".hidden", "-x", "a b"),
        *(
            "x" * 81,
            "a/b/c/d",
            "modèle",
            "model@sha256:" + "0" * 64,
            "a\\b",
            "x:..",
            "a\nb",
            "n.s/x:t/",
        ),
    ],
)
def test_names_outside_the_grammar_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="invalid model name"):
        ModelName.parse(text)


def test_names_differing_in_case_mean_the_same_model() -> None:
    assert ModelName.parse("Llama3.1").key == ModelName.parse("llama3.1:Latest").key

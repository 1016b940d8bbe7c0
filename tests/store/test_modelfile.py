import pytest

from localllm.errors import BadRequest
from localllm.modelfile import Modelfile, decode, parse_modelfile, write_modelfile
from localllm.store import Recipe

EXAMPLE = '''
# a comment
FROM ./x.gguf
parameter temperature 0.5
PARAMETER top_k 20
PARAMETER stop "<|im_end|>"
PARAMETER stop a # not a comment
PARAMETER penalize_newline true
SYSTEM """You are
"terse".
"""
LICENSE "MIT"
LICENSE """
Two
"""
MESSAGE user hi there
MESSAGE assistant """hello
you"""
'''


def test_all_instructions_are_read() -> None:
    assert parse_modelfile(EXAMPLE) == Modelfile(
        base="./x.gguf",
        system='You are\n"terse".\n',
        parameters={"temperature": 0.5, "top_k": 20, "stop": ["<|im_end|>", "a # not a comment"]},
        messages=[
            {"role": "user", "content": "hi there"},
            {"role": "assistant", "content": "hello\nyou"},
        ],
        licenses=["MIT", "\nTwo\n"],
    )


def test_instructions_that_are_not_supported_are_named() -> None:
    assert parse_modelfile("FROM x\nDRAFT d").unsupported == ["DRAFT"]


def test_the_last_adapter_counts_and_is_written_back() -> None:
    found = parse_modelfile("FROM x\nADAPTER ./a.gguf\nadapter ./b.gguf\n")
    assert (found.adapter, found.unsupported) == ("./b.gguf", [])
    written = write_modelfile("m", "/x.gguf", Recipe(), adapter="/b.gguf")
    assert parse_modelfile(written).adapter == "/b.gguf"
    assert written.index("FROM /x.gguf") < written.index("ADAPTER /b.gguf")


def test_formats_and_versions_are_kept() -> None:
    text = "FROM x\nRENDERER qwen3-coder\nPARSER qwen3-coder\nREQUIRES v0.14.0\n"
    config = {"renderer": "qwen3-coder", "parser": "qwen3-coder", "requires": "v0.14.0"}
    assert parse_modelfile(text).config == config
    assert text.partition("\n")[2] in write_modelfile("m", "x", Recipe(), config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM line"),
        ("SYSTEM hi", "no FROM line"),
        ("FROM x\nFOO bar", r'\(line 2\): command must be one of "from"'),
        ("FROM x\nMESSAGE tool x", r"\(line 2\): message role must be one of"),
        ("FROM x\nPARAMETER top_k", r"\(line 2\): unexpected EOF"),
        ("FROM x\nPARAMETER top_k many", r"invalid int value \[many\]"),
        ("FROM x\nPARAMETER temperature hot", r"invalid float value \[hot\]"),
        ("FROM x\nPARAMETER warmth 1", "unknown parameter 'warmth'"),
        ('FROM x\nSYSTEM """open\n', r"\(line 2\): unexpected EOF"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_modelfile(text)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_with_a_mark_are_read(encoding: str) -> None:
    assert decode("FROM x é".encode(encoding)) == "FROM x é"


def test_written_modelfile_makes_the_same_recipe() -> None:
    recipe = Recipe(
        system="Be\nbrief.",
        parameters={"temperature": 0.5, "stop": ["a b", '"']},
        messages=[{"role": "user", "content": "x\ny"}],
        licenses=["MIT"],
    )
    text = write_modelfile("m:latest", "/blobs/sha256-00", recipe)
    assert "# FROM m:latest\n\nFROM /blobs/sha256-00\n" in text
    found = parse_modelfile(text)
    assert found.system == recipe.system
    assert found.messages == recipe.messages
    assert found.parameters["temperature"] == 0.5

"""Which file of a repository a tag means. Names are of the styles that public listings show."""

import pytest

from localllm.errors import PullFailed
from localllm.pull.choosing import choose, label_of_path, projectors, variants

# L02's repository.
REPO = [
    *("M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "M-Q8_0.gguf", "M-IQ4_NL.gguf", "M-F16.gguf"),
    *("M-UD-Q4_K_XL.gguf", "mmproj-F16.gguf", "README.md"),
    *(f"BF16/M-BF16-0000{n}-of-00003.gguf" for n in (1, 2, 3)),
]


def pick(paths: list[str], tag: str | None) -> tuple[str, ...]:
    return choose(variants(paths), tag, "org/M").files


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("q4_k_m", "M-Q4_K_M.gguf"),
        ("Q4_K_M", "M-Q4_K_M.gguf"),
        ("iq4_nl", "M-IQ4_NL.gguf"),
        ("UD-Q4_K_XL", "M-UD-Q4_K_XL.gguf"),
        ("ud-q4_k_xl", "M-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "M-UD-Q4_K_XL.gguf"),
        ("f16", "M-F16.gguf"),
        ("fp16", "M-F16.gguf"),
        (None, "M-Q4_K_M.gguf"),
        ("M-Q8_0.gguf", "M-Q8_0.gguf"),
        ("m-q8_0.GGUF", "M-Q8_0.gguf"),
        ("M-Q8_0", "M-Q8_0.gguf"),
    ],
)
def test_tag_chooses_a_whole_word_in_any_case(tag: str | None, file: str) -> None:
    assert pick(REPO, tag) == (file,)


def test_split_model_is_taken_whole() -> None:
    assert pick(REPO, "bf16") == tuple(f"BF16/M-BF16-0000{n}-of-00003.gguf" for n in (1, 2, 3))
    assert len(pick(REPO, "M-BF16-00001-of-00003.gguf")) == 3
    assert len(pick(REPO, "BF16/M-BF16-00002-of-00003.gguf")) == 3


@pytest.mark.parametrize(
    "tag", ["nope", "q4", "Q4_K", "mmproj-F16.gguf", "README.md", "UD-Q8_0", "4"]
)
def test_tag_that_is_not_there_lists_those_that_are(tag: str) -> None:
    expected = f"org/M has no '{tag}'; it has BF16, F16, IQ4_NL, Q4_K_M, Q4_K_S, Q8_0, UD-Q4_K_XL"
    with pytest.raises(PullFailed) as caught:
        pick(REPO, tag)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("m.Q4_K_M.gguf", "Q4_K_M"),
        ("m-q4_k_m.gguf", "Q4_K_M"),
        ("Q4_K_M.gguf", "Q4_K_M"),
        ("M.i1-Q4_K_M.gguf", "Q4_K_M"),
        ("ggml-model-q4_k_m_imatrix.gguf", "Q4_K_M"),
        ("m-q4.gguf", "Q4"),
        ("m-fp16.gguf", "F16"),
        ("m-bf16.gguf", "BF16"),
        ("m-MXFP4.gguf", "MXFP4"),
        ("m-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("foo-Q4_K_M-distill-Q8_0.gguf", "Q8_0"),
        ("Q3_K_L/model-00001-of-00002.gguf", "Q3_K_L"),
        ("GLM-MTP-Q4_K_M.gguf", "Q4_K_M"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("devstralQ4_K_M.gguf", ""),
        ("Qwen2.5-7B.gguf", ""),
        ("mmproj-m-Q8_0.gguf", ""),
    ],
)
def test_label_is_the_last_quantisation_of_the_name(path: str, label: str) -> None:
    assert label_of_path(path) == label


@pytest.mark.parametrize(
    "path",
    [
        *("mmproj-model-f16.gguf", "m.mmproj-f16.gguf", "M-BF16-mmproj.gguf", "M-imatrix.gguf"),
        *("mtp-M-BF16.gguf", "MTP/mtp-M-BF16.gguf", "eagle3-m-q8_0.gguf", "dflash-x.gguf"),
        *("m.Q8_0.gguf.part1of2", "imatrix.dat", "x.gguf_file", "m-00002-of-00002.gguf"),
        *("m-00001-of-00000.gguf", "m-00001-of-99999.gguf", "model.safetensors"),
    ],
)
def test_what_is_no_whole_model_is_never_chosen(path: str) -> None:
    assert variants([path]) == []
    with pytest.raises(PullFailed, match="no GGUF file that is a whole model"):
        pick([path], None)


@pytest.mark.parametrize(
    ("paths", "file"),
    [
        (["m-Q8_0.gguf", "m-Q4_0.gguf"], "m-Q4_0.gguf"),
        (["m-Q8_0.gguf", "m-F16.gguf", "m-Q2_K.gguf"], "m-Q8_0.gguf"),
        (["m-Q2_K.gguf", "m-BF16.gguf"], "m-BF16.gguf"),
        (["m-Q5_0.gguf", "m-IQ4_XS.gguf"], "m-IQ4_XS.gguf"),
        (["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (["m.i1-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"], "m.i1-Q4_K_M.gguf"),
        (["model.gguf"], "model.gguf"),
        (["m-lora-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (["m-lora-Q4_K_M.gguf", "m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["m-lora-Q4_K_M.gguf"], "m-lora-Q4_K_M.gguf"),
        (["m.GGUF"], "m.GGUF"),
    ],
)
def test_default_is_the_nearest_to_q4_k_m(paths: list[str], file: str) -> None:
    assert pick(paths, None) == (file,)


def test_two_models_of_one_label_are_not_guessed() -> None:
    with pytest.raises(PullFailed, match=r"more than one Q4_K_M: a-13b.*, a-7b.*give a file's"):
        pick(["a-7b-Q4_K_M.gguf", "a-13b-Q4_K_M.gguf"], "q4_k_m")
    assert pick(["a-7b-Q4_K_M.gguf", "a-13b-Q4_K_M.gguf"], "a-7b-Q4_K_M.gguf")


def test_model_that_is_there_whole_and_split_is_taken_whole() -> None:
    shards = [f"m-q4_k_m-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert pick([*shards, "m-q4_k_m.gguf"], None) == ("m-q4_k_m.gguf",)


def test_projectors_are_told_apart() -> None:
    assert projectors(REPO) == ["mmproj-F16.gguf"]

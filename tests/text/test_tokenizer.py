"""Token ids: real vocabularies against llama.cpp's ids, small ones by hand."""

from pathlib import Path

import pytest
from vocabularies import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    MakeMetadata,
    byte_level,
    score_based,
)

from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import GgufFile
from localllm.text.bpe import RankMerger
from localllm.text.pretokenizers import BY_NAME
from localllm.text.tokenizer import Piece, Tokenizer, load_tokenizer

VOCABULARIES = (
    *("bert-bge", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3"),
    *("qwen2", "starcoder"),
)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabulary_gives_the_expected_ids_and_the_text_back(
    name: str, shared_data: Path
) -> None:
    path = shared_data / "vocab" / f"ggml-vocab-{name}.gguf"
    lines = Path(f"{path}.out").read_text().splitlines()
    wanted = [[int(i) for i in line.split()] for line in lines]
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    with GgufFile.open(path) as file:
        tokenizer = load_tokenizer(file.metadata)
    for text, ids in zip(texts[: len(wanted)], wanted, strict=True):
        assert tokenizer.encode(text, parse_special=False) == ids
        if name != "bert-bge":
            assert tokenizer.decode(ids) == text.encode()


def tokens(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.vocabulary.texts[i] for i in ids]


def test_byte_pairs_merge_by_rank_then_leftmost(make_metadata: MakeMetadata) -> None:
    tokenizer = load_tokenizer(make_metadata(byte_level([], ("b c", "a b", "a bc"))))
    for text, wanted in {"abc": ["abc"], "aab": ["a", "ab"], "abab": ["ab", "ab"]}.items():
        assert tokens(tokenizer, tokenizer.encode(text, parse_special=False)) == wanted


def test_every_byte_comes_back(make_metadata: MakeMetadata) -> None:
    for values in (byte_level([]), score_based({"▁": -1.0}, **{"ggml.add_space_prefix": False})):
        tokenizer = load_tokenizer(make_metadata(values))
        content = bytes(range(256)) + "漢🙂".encode() + b"\xff\xc3\x28"
        assert tokenizer.decode(tokenizer.encode(content, parse_special=False)) == content


def test_lone_surrogate_in_a_str_becomes_a_replacement_character(
    make_metadata: MakeMetadata,
) -> None:
    tokenizer = load_tokenizer(make_metadata(byte_level([])))
    for text in ("a\ud83db", "a\udc80b"):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == "a\ufffdb".encode()


def test_symbols_merge_by_score_then_leftmost(make_metadata: MakeMetadata) -> None:
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "ab": -3.0, "bb": -2.0, "abb": -4.0, "▁a": -5.0}
    tokenizer = load_tokenizer(make_metadata(score_based(pieces)))
    cases = {
        # bb has the best score; then ▁a loses against abb.
        "abb": ["▁", "abb"],
        # Equal scores: the left of the two bb.
        "bbb": ["▁", "bb", "b"],
        "a b": ["▁a", "▁", "b"],
    }
    for text, wanted in cases.items():
        assert tokens(tokenizer, tokenizer.encode(text, parse_special=False)) == wanted


def test_characters_without_a_token_become_their_bytes(make_metadata: MakeMetadata) -> None:
    tokenizer = load_tokenizer(make_metadata(score_based({"▁": -1.0, "a": -1.0})))
    ids = tokenizer.encode("aé", parse_special=False)
    assert tokens(tokenizer, ids) == ["▁", "a", "<0xC3>", "<0xA9>"]


def test_token_across_words_is_found_although_words_are_cut(make_metadata: MakeMetadata) -> None:
    pieces = dict.fromkeys("▁xyz", -9.0) | {"x▁": -1.0, "x▁y": -2.0}
    tokenizer = load_tokenizer(make_metadata(score_based(pieces)))
    ids = tokenizer.encode("zx yz z", parse_special=False)
    assert tokens(tokenizer, ids) == ["▁", "z", "x▁y", "z", "▁", "z"]


def test_space_prefix_is_added_after_every_special_token_and_can_be_off(
    make_metadata: MakeMetadata,
) -> None:
    pieces = {"▁": -2.0, "a": -2.0, "▁a": -1.0}
    tokenizer = load_tokenizer(make_metadata(score_based(pieces)))
    ids = tokenizer.encode("a</s>a", parse_special=True)
    assert tokens(tokenizer, ids) == ["▁a", "</s>", "▁a"]
    values = score_based(pieces, **{"ggml.add_space_prefix": False})
    tokenizer = load_tokenizer(make_metadata(values))
    assert tokens(tokenizer, tokenizer.encode("a a", parse_special=True)) == ["a", "▁a"]


def test_wordpiece_covers_words_from_the_left(make_metadata: MakeMetadata) -> None:
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "▁able", "able", "▁,"]
    kinds = [CONTROL, UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 4
    ids = {"unknown": 1, "cls": 2, "seperator": 3, "padding": 0}
    values = {f"ggml.{name}_token_id": i for name, i in ids.items()}
    values |= {"ggml.model": "bert", "ggml.tokens": texts, "ggml.token_type": kinds}
    tokenizer = load_tokenizer(make_metadata(values))
    found = tokenizer.encode("Unable, able ünAble unx", parse_special=False)
    wanted = ["▁un", "able", "▁,", "▁able", "▁un", "able", "[UNK]"]
    assert tokens(tokenizer, found) == wanted
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 3)
    assert tokenizer.add_bos
    assert tokenizer.add_eos


@pytest.fixture
def marked(make_metadata: MakeMetadata) -> Tokenizer:
    extra = [("<|a|>", CONTROL), ("<|a|><|b|>", CONTROL), ("<|b|>", CONTROL)]
    extra += [("<tool>", USER_DEFINED), ("<?>", UNKNOWN)]
    return load_tokenizer(make_metadata(byte_level(extra)))


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [text for text in tokens(tokenizer, ids) if len(text) > 1]


def test_longest_special_token_wins(marked: Tokenizer) -> None:
    ids = marked.encode("x<|a|><|b|><|a|>y<|b|>", parse_special=True)
    assert tokens(marked, ids) == ["x", "<|a|><|b|>", "<|a|>", "y", "<|b|>"]


def test_typed_control_tokens_stay_text_user_defined_ones_do_not(marked: Tokenizer) -> None:
    text = "x<|a|><tool><?>"
    assert specials(marked, marked.encode(text, parse_special=True)) == ["<|a|>", "<tool>", "<?>"]
    plain = marked.encode(text, parse_special=False)
    assert specials(marked, plain) == ["<tool>"]
    assert marked.decode(plain) == text.encode()


def test_pieces_allow_special_tokens_one_by_one(marked: Tokenizer) -> None:
    tool = marked.id_of("<tool>")
    assert tool is not None
    pieces = [
        Piece("<|a|>", True),
        Piece("<|a|><tool>", False),
        Piece("<|b|><tool>", False, frozenset({tool})),
        Piece("<|b|>", True),
    ]
    assert specials(marked, marked.encode_pieces(pieces)) == ["<|a|>", "<tool>", "<|b|>"]


def test_special_token_that_only_begins_in_a_plain_piece_is_text(marked: Tokenizer) -> None:
    for cut in range(1, 5):
        pieces = [Piece("<|a|>"[:cut], False), Piece("<|a|>"[cut:], True)]
        assert specials(marked, marked.encode_pieces(pieces)) == []
        pieces = [Piece("<|a|>"[:cut], True), Piece("<|a|>"[cut:], False)]
        assert specials(marked, marked.encode_pieces(pieces)) == []


def test_borders_of_pieces_do_not_cut_words(make_metadata: MakeMetadata) -> None:
    tokenizer = load_tokenizer(make_metadata(byte_level([], ("a b",))))
    ids = tokenizer.encode_pieces([Piece("xa", True), Piece("by", False)])
    assert tokens(tokenizer, ids) == ["x", "ab", "y"]


def test_decode_leaves_control_tokens_out_unless_asked(marked: Tokenizer) -> None:
    ids = marked.encode("x<|a|><tool>", parse_special=True)
    assert marked.decode(ids) == b"x<tool>"
    assert marked.decode(ids, special=True) == b"x<|a|><tool>"
    assert [marked.is_special(i) for i in ids] == [False, True, False]


def test_end_set_has_the_declared_and_the_well_known_tokens(make_metadata: MakeMetadata) -> None:
    extra = [("<|im_end|>", NORMAL), ("<|eom|>", CONTROL), ("<fin>", CONTROL), ("</s>", NORMAL)]
    values = byte_level(extra, **{"ggml.eom_token_id": 258, "ggml.eos_token_id": 259})
    tokenizer = load_tokenizer(make_metadata(values))
    assert {tokenizer.vocabulary.texts[i] for i in tokenizer.eog_ids} == {t for t, _ in extra}
    assert specials(tokenizer, tokenizer.encode("<|im_end|></s>", parse_special=False)) == []


def test_harmony_end_closes_a_message_but_not_the_answer(make_metadata: MakeMetadata) -> None:
    names = ("<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>")
    tokenizer = load_tokenizer(make_metadata(byte_level([(n, CONTROL) for n in names])))
    ends = {tokenizer.vocabulary.texts[i] for i in tokenizer.eog_ids}
    assert ends == {"<|return|>", "<|call|>"}
    ids = tokenizer.encode("<|channel|>final<|message|>hi<|end|>", parse_special=True)
    assert tokenizer.decode(ids) == b"<|channel|>final<|message|>hi<|end|>"


def test_bos_is_wanted_when_the_file_or_its_kind_says_so(make_metadata: MakeMetadata) -> None:
    bos = [("<s>", CONTROL)]

    def wants(**keys: object) -> bool:
        values = byte_level(bos, **{"ggml.bos_token_id": 257, **keys})
        return load_tokenizer(make_metadata(values)).add_bos

    assert not wants()
    assert wants(**{"ggml.pre": "llama-bpe"})
    assert not wants(**{"ggml.pre": "llama-bpe", "ggml.add_bos_token": False})
    assert wants(**{"ggml.add_bos_token": True})
    assert load_tokenizer(make_metadata(score_based({"a": 0.0}))).add_bos


def test_id_outside_the_vocabulary_is_no_special_id(make_metadata: MakeMetadata) -> None:
    values = byte_level([], **{"ggml.bos_token_id": 999, "ggml.add_bos_token": True})
    tokenizer = load_tokenizer(make_metadata(values))
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos


def test_unknown_kinds_are_refused_by_name(make_metadata: MakeMetadata) -> None:
    with pytest.raises(UnsupportedModel, match="'rwkv'"):
        load_tokenizer(make_metadata({"ggml.model": "rwkv", "ggml.tokens": ["a"]}))
    with pytest.raises(UnsupportedModel, match="'of-tomorrow'"):
        load_tokenizer(make_metadata(byte_level([], **{"ggml.pre": "of-tomorrow"})))


def test_tables_of_different_length_are_refused(make_metadata: MakeMetadata) -> None:
    values = byte_level([]) | {"ggml.token_type": [NORMAL]}
    with pytest.raises(BadFile, match="token_type has 1 values for 257 tokens"):
        load_tokenizer(make_metadata(values))
    values = score_based({"a": 0.0}) | {"ggml.scores": [0.0, 1.0]}
    with pytest.raises(BadFile, match="scores has 2 values for 260 tokens"):
        load_tokenizer(make_metadata(values))


def test_merges_of_unknown_texts_are_ignored(make_metadata: MakeMetadata) -> None:
    values = byte_level([], ("a b",)) | {"ggml.merges": ["q qq", "a b", "no-space", ""]}
    tokenizer = load_tokenizer(make_metadata(values))
    assert tokens(tokenizer, tokenizer.encode("ab", parse_special=False)) == ["ab"]


RUNS = ("a", "A", " ", "\n", "\t", "1", "!", "漢", "é", "\u3000", "'", " \n", "'s", "\u0301")


DISTINCT = {row: name for name, row in sorted(BY_NAME.items(), reverse=True)}.values()


@pytest.mark.parametrize("pre", DISTINCT)
def test_pre_tokenizer_gives_the_text_back_and_takes_long_runs(
    pre: str, make_metadata: MakeMetadata
) -> None:
    # A quadratic expression would take minutes here.
    row = BY_NAME[pre]
    values = byte_level([], **{"ggml.pre": pre})
    if not row.byte_level:
        values = score_based({"▁": -1.0}) | {
            "ggml.model": "gpt2",
            "ggml.pre": pre,
            "ggml.merges": ["a b"],
        }
    tokenizer = load_tokenizer(make_metadata(values))
    for run in RUNS:
        for end in ("", "漢"):
            text = run * (20_000 // len(run)) + end
            assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text.encode()


# Cut by hand following the published expressions.
WORDS = {
    "gpt-2": (
        "Hello world's  12345\n\nx",
        ["Hello", " world", "'s", " ", " 12345", "\n", "\n", "x"],
    ),
    "llama-bpe": (
        "Hello WORLD'S 12345\n\nx",
        ["Hello", " WORLD", "'S", " ", "123", "45", "\n\n", "x"],
    ),
    "qwen2": ("a 12\n", ["a", " ", "1", "2", "\n"]),
    "smollm": ("a 12 b", ["a", " ", "1", "2", " b"]),
    "gpt-4o": ("HelloWorld's/\n12345", ["Hello", "World's", "/\n", "123", "45"]),
    "tekken": ("HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    "deepseek-v3": ("abc漢字 1234!", ["abc", "漢字", " ", "123", "4", "!"]),
    "tiny_aya": ("n 1234567", ["n", " ", "1", "234", "567"]),
    "superbpe": ("a b 12345", ["a b ", "12", "345"]),
    "kimi-k2": ("漢字abc", ["漢字", "abc"]),
    "falcon": ("a<b 1234", ["a", "<", "b", " ", "123", "4"]),
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_where_the_expression_says(pre: str, make_metadata: MakeMetadata) -> None:
    text, words = WORDS[pre]
    tokenizer = load_tokenizer(make_metadata(byte_level([], **{"ggml.pre": pre})))
    merger = tokenizer.algorithm
    assert isinstance(merger, RankMerger)
    assert merger.words(text) == words

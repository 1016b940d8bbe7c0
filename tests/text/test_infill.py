"""Prompts for the text between two others, by the marks of each family."""

import pytest
from vocabularies import CONTROL, byte_level

from localllm.text.infill import MARKS, SUFFIX_FIRST, infill
from localllm.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks[0])
def test_marks_stand_where_the_family_wants_them(make_metadata, marks) -> None:
    tokenizer = load_tokenizer(make_metadata(byte_level([(text, CONTROL) for text in marks])))
    before, after, middle = (tokenizer.id_of(text) for text in marks)
    a, b = (tokenizer.id_of(text) for text in "ab")
    expected = [before, a, after, b, middle]
    if marks[0] in SUFFIX_FIRST:
        expected = [after, b, before, a]
    assert infill(tokenizer, "a", "b") == expected


def test_typed_in_marks_stay_text(make_metadata) -> None:
    marks = MARKS[0]
    tokenizer = load_tokenizer(make_metadata(byte_level([(text, CONTROL) for text in marks])))
    ids = infill(tokenizer, marks[1], marks[2])
    assert ids is not None
    assert [i for i in ids if tokenizer.is_special(i)] == [tokenizer.id_of(text) for text in marks]


def test_a_model_without_marks_is_told_apart(make_metadata) -> None:
    assert infill(load_tokenizer(make_metadata(byte_level([]))), "a", "b") is None

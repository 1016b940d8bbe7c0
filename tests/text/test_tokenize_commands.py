"""`tokenize` and `detokenize`: the input's bytes are the text, exactly."""

import json

import pytest
from vocabularies import CONTROL, MakeMetadata, byte_level

from localllm.errors import BadRequest
from localllm.offline.tokenize import detokenize, tokenize

EXACT = (
    b"",
    b"\n",
    b"a\r\n\n",
    b" a ",
    b"\xff\xfe\x80",
    b"\x00",
    "漢🙂".encode(),
    b"\xef\xbb\xbfa",
)


def test_bytes_come_back_as_they_were(make_metadata: MakeMetadata) -> None:
    path = make_metadata(byte_level([])).path
    for data in EXACT:
        ids = tokenize(path, data)
        assert detokenize(path, ids.encode()) == data


def test_lists_of_texts_come_back_as_they_were(make_metadata: MakeMetadata) -> None:
    path = make_metadata(byte_level([])).path
    texts = ["a", "", "漢\n", "é"]
    ids = tokenize(path, json.dumps(texts).encode(), as_json=True)
    assert [len(i) for i in json.loads(ids)] == [len(t.encode()) for t in texts]
    assert json.loads(detokenize(path, ids.encode(), as_json=True)) == texts


def test_special_and_bos_are_asked_for(make_metadata: MakeMetadata) -> None:
    values = byte_level([("<s>", CONTROL), ("<e>", CONTROL)], **{"ggml.bos_token_id": 257})
    path = make_metadata(values).path
    assert json.loads(tokenize(path, b"<e>", special=True)) == [258]
    assert len(json.loads(tokenize(path, b"<e>"))) == 3
    assert json.loads(tokenize(path, b"<e>", special=True, bos=True)) == [257, 258]
    assert detokenize(path, b"[257, 258]") == b"<s><e>"


@pytest.mark.parametrize("data", [b"x", b"{}", b"[1.5]", b'["a"]', b"[true]", b"[99999]", b"[-1]"])
def test_bad_ids_are_refused(data: bytes, make_metadata: MakeMetadata) -> None:
    path = make_metadata(byte_level([])).path
    with pytest.raises(BadRequest):
        detokenize(path, data)
    with pytest.raises(BadRequest):
        detokenize(path, b"[" + data + b"]", as_json=True)
    with pytest.raises(BadRequest):
        tokenize(path, b"{" + data + b"}", as_json=True)

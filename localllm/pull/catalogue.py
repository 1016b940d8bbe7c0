"""The catalogue of short names: `catalogue.tsv`, which says how to edit it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalogue.tsv")
COLUMNS = ("name", "tag", "aliases", "repo", "file", "license", "params")
_QUANT = re.compile(r"(.+)-((?:q|iq|tq)[1-9]\w*|fp16|bf16|f16|f32|fp32|mxfp4)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: the tags it answers to, and where its file is."""

    name: str
    tags: tuple[str, ...]
    repo: str
    file: str
    license: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """A row, and the quant that was asked for instead of the row's own file."""

    entry: Entry
    quant: str | None = None


def find(name: str, tag: str) -> Found | None:
    """The row of a short name, in whatever case."""
    rows = _by_tag()
    name, tag = name.lower(), tag.lower()
    if (name, tag) in rows:
        return Found(rows[name, tag])
    match = _QUANT.fullmatch(tag)
    entry = _by_stem().get((name, match[1])) if match else None
    return Found(entry, match[2]) if entry is not None and match is not None else None


def tags_of(name: str) -> list[str]:
    """The chief tags of all rows of a name."""
    return [entry.tags[0] for entry in entries() if entry.name.lower() == name.lower()]


@cache
def entries() -> tuple[Entry, ...]:
    """All rows."""
    lines = FILE.read_text("utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    assert tuple(rows[0]) == COLUMNS, f"{FILE}: the first row must be {COLUMNS}"
    return tuple(_entry(*row) for row in rows[1:])


def _entry(
    name: str, tag: str, aliases: str, repo: str, file: str, license: str, params: str
) -> Entry:
    tags = (tag, *(alias for alias in aliases.split(",") if alias))
    return Entry(name, tags, repo, file, license, json.loads(params))


@cache
def _by_tag() -> dict[tuple[str, str], Entry]:
    return {(e.name.lower(), tag.lower()): e for e in entries() for tag in e.tags}


@cache
def _by_stem() -> dict[tuple[str, str], Entry]:
    """Rows by their tags without quantisation."""
    found = {}
    for entry in entries():
        for tag in entry.tags:
            match = _QUANT.fullmatch(tag)
            stem = match[1] if match else tag
            found[entry.name.lower(), stem.lower()] = entry
    return found

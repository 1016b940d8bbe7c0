"""Which GGUF files of a repository a tag means.

A repository holds the same model in many quantisations. A tag is a quantisation, compared without
regard to case and as a whole word (`F16` is not in `BF16`, `Q4_K` is not `Q4_K_M`), or a file's
name. Without a tag the first of `DEFAULT_ORDER` that is there is taken. Where a tag fits two models
nothing is guessed.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localllm.errors import PullFailed

# Without a tag: Q4_K_M, else the nearest in use and quality, larger before smaller.
DEFAULT_ORDER = (
    *("Q4_K_M", "Q4_K_XL", "Q4_K_L", "Q4_K", "Q4_K_S", "Q4_0", "Q4", "IQ4_XS", "IQ4_NL", "Q4_1"),
    *("MXFP4", "MXFP4_MOE", "Q5_K_M", "Q5_K_XL", "Q5_K_L", "Q5_K", "Q5_K_S", "Q5_0", "Q5_1", "Q5"),
    *("Q6_K_XL", "Q6_K_L", "Q6_K", "Q6", "Q8_0", "Q8_K_XL", "Q8", "Q3_K_XL", "Q3_K_L", "Q3_K_M"),
    *("Q3_K", "IQ3_M", "Q3_K_S", "IQ3_S", "IQ3_XS", "IQ3_XXS", "F16", "BF16", "Q2_K_XL", "Q2_K_L"),
    *("Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "TQ1_0", "IQ1_M", "IQ1_S"),
    *("F32", ""),
)
MAX_SHARDS = 1000
MAX_LISTED = 30

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_QUANT = (
    r"(?:(UD|I1)[-._])?"
    r"((?:IQ|TQ|Q)[1-9](?:_(?:\d+|XXS|XXL|XS|XL|NL|K|S|M|L)(?![A-Z0-9]))*+"
    r"|BF16|FP?16|FP?32|MXFP4(?:_MOE)?+)(?![A-Z0-9])"
)
_LABEL = re.compile(r"(?<![A-Z0-9])" + _QUANT)
_WHOLE_LABEL = re.compile(_QUANT)
_PROJECTOR = re.compile(r"(?<![a-z0-9])mmproj(?![a-z0-9])")
_DRAFT = re.compile(r"(?:mtp|eagle3|dflash|dspark)(?![a-z0-9])")
_CALIBRATION = re.compile(r"(?<![a-z0-9])imatrix(?![a-z0-9])")
_SIDE = re.compile(r"(?<![a-z0-9])(?:imatrix|lora|adapter|vocab|draft)(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class Variant:
    """One model of a repository: its quantisation and its files, a split one's in order.

    stem    path of the file without the shard's number and the ending
    label   quantisation, upper case; empty if the name does not tell
    prefix  recipe before it, like `UD`; mostly empty
    """

    stem: str
    label: str
    prefix: str
    files: tuple[str, ...]

    @property
    def tag(self) -> str:
        """What to write after the colon to get this variant."""
        if not self.label:
            return self.files[0].rpartition("/")[2]
        return f"{self.prefix}-{self.label}" if self.prefix else self.label

    @property
    def is_side(self) -> bool:
        """Whether its name suggests something beside the model proper."""
        return _SIDE.search(self.stem.rpartition("/")[2].lower()) is not None


def variants(paths: Iterable[str]) -> list[Variant]:
    """All complete models among a repository's files."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for path in sorted(paths):
        if not path.lower().endswith(".gguf"):
            continue
        stem, number, count = path[:-5], 1, 1
        match = _SHARD.fullmatch(stem)
        if match is not None:
            stem, number, count = match[1], int(match[2]), int(match[3])
        groups.setdefault((stem, count), {})[number] = path
    found = []
    for (stem, count), files in groups.items():
        if count > MAX_SHARDS or sorted(files) != list(range(1, count + 1)):
            continue
        variant = _variant(stem, tuple(files[n] for n in sorted(files)))
        if variant is not None:
            found.append(variant)
    return found


def _variant(stem: str, files: tuple[str, ...]) -> Variant | None:
    """What a name says; None for projectors, draft heads and calibration data."""
    folder, _, name = stem.rpartition("/")
    lower = name.lower()
    if _PROJECTOR.search(lower) or _DRAFT.match(lower):
        return None
    prefix, label = _label_of(name) or _label_of(folder) or ("", "")
    if not label and _CALIBRATION.search(lower):
        return None
    return Variant(stem, label, prefix, files)


def label_of_path(path: str) -> str:
    """The quantisation that a file's path tells, empty if it tells none."""
    match = _SHARD.fullmatch(path[:-5])
    variant = _variant(match[1] if match else path[:-5], (path,))
    return variant.label if variant is not None else ""


def _label_of(text: str) -> tuple[str, str] | None:
    """Prefix and label of the last word that looks like a quantisation."""
    matches = list(_LABEL.finditer(text.upper()))
    return _parts(matches[-1]) if matches else None


def _parts(match: re.Match[str]) -> tuple[str, str]:
    prefix, label = match.groups()
    return prefix or "", label.replace("FP", "F") if label.startswith("FP") else label


def projectors(paths: Iterable[str]) -> list[str]:
    """Files for looking at images, which go beside a model."""
    names = ((path, path.rpartition("/")[2].lower()) for path in paths)
    return [p for p, name in names if name.endswith(".gguf") and _PROJECTOR.search(name)]


def choose(found: Sequence[Variant], tag: str | None, repo: str) -> Variant:
    """The variant that a tag means, or the default one. `repo` is for messages.

    Raises PullFailed, listing what there is, if nothing or more than one thing fits.
    """
    if not found:
        raise PullFailed(f"{repo} has no GGUF file that is a whole model")
    candidates = _of_tag(found, tag) if tag is not None else _default(found)
    if not candidates:
        raise PullFailed(f"{repo} has no {tag!r}; it has {_listing(v.tag for v in found)}")
    plain = [v for v in candidates if not v.is_side] or candidates
    if len({_same_model(v) for v in plain}) > 1:
        files = _listing(v.files[0] for v in plain)
        raise PullFailed(f"{repo} has more than one {plain[0].tag}: {files}; give a file's name")
    return min(plain, key=lambda v: (len(v.files), v.stem))


def _same_model(variant: Variant) -> str:
    """Equal for one model that is there both whole and split."""
    return variant.stem.rpartition("/")[2].lower()


def _of_tag(found: Sequence[Variant], tag: str) -> list[Variant]:
    wanted = tag.lower()
    by_name = [v for v in found if any(wanted in _names(path) for path in v.files)]
    if by_name:
        return by_name
    match = _WHOLE_LABEL.fullmatch(tag.upper())
    if match is None:
        return []
    prefix, label = _parts(match)
    same = [v for v in found if v.label == label]
    exact = [v for v in same if v.prefix == prefix]
    return exact if prefix or exact else _first_prefix(same)


def _names(path: str) -> tuple[str, ...]:
    """What a file may be called: its path or its name, with and without the ending."""
    path = path.lower()
    name = path.rpartition("/")[2]
    return path, name, path[:-5], name[:-5]


def _default(found: Sequence[Variant]) -> list[Variant]:
    for label in DEFAULT_ORDER:
        same = [v for v in found if v.label == label and not v.is_side]
        if same:
            return _first_prefix(same)
    return list(found)


def _first_prefix(same: Sequence[Variant]) -> list[Variant]:
    """Those without a prefix, else those with the first one."""
    first = min((v.prefix for v in same), default="")
    return [v for v in same if v.prefix == first]


def _listing(names: Iterable[str]) -> str:
    texts = sorted(dict.fromkeys(names))
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return ", ".join(texts[:MAX_LISTED]) + more

"""How byte-pair vocabularies cut text into words: one table row per `tokenizer.ggml.pre` name.

A row is a list of regular expressions: each is applied inside every piece that the earlier ones
left, and both the matches and the text between them become pieces.

Not here: the merging (bpe.py). Syntax: Oniguruma, as in the `tokenizers` package; every
expression is linear in the length of a run of one character, which is why digits that are grouped
from the right are cut in Python. Source: the models' own tokenizer.json files, by way of
llama.cpp's src/llama-vocab.cpp, which names them.
"""

from dataclasses import dataclass, replace

from localllm.errors import UnsupportedModel

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
CJK = "[一-龥぀-ゟ゠-ヿ]+"


def _llama3(numbers: str, contraction: str = CONTRACTION + "|") -> str:
    return rf"{contraction}{LEAD}\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"


def _cased(numbers: str, tail: str, upper: str = UPPER, lower: str = LOWER, mark: str = "/") -> str:
    """Words are cut where capitals begin; `tail` may follow a word."""
    return (
        rf"{LEAD}{upper}*{lower}+{tail}|{LEAD}{upper}+{lower}*{tail}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n{mark}]*|{SPACES}"
    )


def _deepseek3(marks: str = r" ?[\p{P}\p{S}]+[\r\n]*", lines: str = r"\s*[\r\n]+") -> str:
    return (
        rf"{ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"|{marks}|{lines}|\s+(?!\S)|\s+"
    )


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _llama3(r"\p{N}{1,3}")
QWEN2 = _llama3(r"\p{N}")
QWEN35 = (
    rf"{CONTRACTION}|{LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
GPT4O = _cased(r"\p{N}{1,3}", f"{CONTRACTION}?")
KIMI = r"\p{Han}+|" + _cased(
    r"\p{N}{1,3}",
    f"{CONTRACTION}?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    mark="",
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# The letters that have case, as the model's own tokenizer lists them.
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2126\u212a-\u212d"
    "ℂℇℊ-ℓℕℙ-ℝℤℨℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + CJK
AFMOE_SCRIPTS = (
    "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff"
    "가-\ud7afᄀ-ᇿ]+"
)
JAIS2 = (
    rf"{CONTRACTION}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
LINES = r"[^\n]+|\n+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text.

    `ignore_merges`: a whole word that is a token is that token, whatever the merges say.
    `group_digits`: runs of digits are cut into threes from the right before anything else.
    `byte_level`: pieces become bytes spelled in GPT-2's alphabet; else they stay text, and
    unknown characters become the vocabulary's byte tokens.
    `escape_spaces`: a space is spelled U+2581 (only without `byte_level`).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    group_digits: bool = False
    byte_level: bool = True
    escape_spaces: bool = False
    has_bos: bool = True


_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_SMAUG = PreTokenizer((LLAMA3,))
_QWEN2 = PreTokenizer((QWEN2,))
_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", GPT2))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", CJK, _deepseek3()))
_GPT4O = PreTokenizer((GPT4O,))
_GROUPED_GPT4O = replace(_GPT4O, group_digits=True)
_RAW = PreTokenizer((LINES,), byte_level=False, escape_spaces=True)
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_BLOOM = PreTokenizer((BLOOM,))
DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("dbrx smaug-bpe", _SMAUG),
    ("glm4 glm5", replace(_SMAUG, ignore_merges=True, has_bos=False)),
    ("chatglm-bpe", replace(_SMAUG, has_bos=False)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2 megrez stablelm2", _QWEN2),
    ("qwen35", PreTokenizer((QWEN35,))),
    ("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum", _GPT2),
    ("modern-bert mpt olmo jais exaone4 trillion granite-docling", _GPT2),
    ("jina-v1-en jina-v2-code roberta-bpe", _GPT2),
    ("starcoder refact codeshell exaone minerva-7b mellum2 command-r smollm", _DIGITS),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{DEEPSEEK_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                # The look-behind changes no match; without it long runs of spaces are quadratic.
                r"(?<!\s)\s+$",
                ASIAN,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    (
        "spark2_5",
        PreTokenizer(
            (r"\p{N}{1,3}", CJK, _deepseek3(r" ?[\p{P}\p{S}]+", r"[\r\n]"), r"\p{N}"),
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    ("granite-embed-multi-97m", replace(_GPT4O, ignore_merges=True)),
    ("tiny_aya cohere2moe", _GROUPED_GPT4O),
    ("tekken", PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True)),
    ("kimi-k2", PreTokenizer((KIMI,))),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    (
        "seed-coder",
        PreTokenizer(
            (rf"{CONTRACTION}|{LEAD}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",),
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{CONTRACTION}|{LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    ("jais-2", PreTokenizer((JAIS2,))),
    ("superbpe", PreTokenizer((r"\p{N}+",), group_digits=True)),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _llama3(r"\p{N}+")), ignore_merges=True)),
    (
        "youtu",
        PreTokenizer(
            (YOUTU_SCRIPTS, _cased(r"\p{N}", f"{CONTRACTION}?")),
            ignore_merges=True,
        ),
    ),
    ("afmoe", PreTokenizer((AFMOE_SCRIPTS, _deepseek3()), group_digits=True)),
    ("laguna", PreTokenizer((LINES, QWEN2))),
    ("ufakzeka", PreTokenizer((_llama3(r"\p{N}", contraction=""),))),
    ("poro-chat bloom gpt3-finnish", _BLOOM),
    ("viking", PreTokenizer((BLOOM, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gemma4 granite-embed-multi-311m mmbert sarvam-moe", _RAW),
    ("whitespace", PreTokenizer((r"\S+",), byte_level=False)),
    ("default", DEFAULT),
)

BY_NAME = {name: row for names, row in _GROUPS for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row called `name`; an unknown one is refused: guessing would give wrong ids."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise UnsupportedModel(f"the pre-tokenizer '{name}' is not supported") from None

"""Rotary frequencies from a file's hyper-parameters and factor tensors.

Promises: every scaling that the metadata names is applied here, once, in double precision; one that
is not known is refused. A backend only multiplies a frequency by a position.

theta_i = base ** (-2i / dims) / factor_i, then
  linear     theta / scale
  YaRN       between theta / scale (long wavelengths) and theta (short ones)      https://arxiv.org/abs/2309.00071
  longrope   factor_i from one of two tensors, chosen by the context in use       https://arxiv.org/abs/2402.13753
  llama 3    factor_i from `rope_freqs`, worked out when the file was made
"""

import math
from dataclasses import dataclass
from typing import Literal

from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import shown
from localllm.models.checkpoint import Checkpoint
from localllm.models.spec import Rope

RopeKind = Literal["norm", "neox"]
SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Yarn:
    """How YaRN blends: pairs that turn more than `beta_fast` times in `original_context` keep their
    frequency, those that turn less than `beta_slow` times are interpolated by `factor`.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ext: float = 1.0

    def blend(self, theta: list[float], base: float) -> list[float]:
        """The frequencies for `theta`, which has one entry for each pair."""
        dims = 2 * len(theta)
        low = max(0.0, math.floor(self.pair_turning(self.beta_fast, dims, base)))
        high = min(dims - 1.0, math.ceil(self.pair_turning(self.beta_slow, dims, base)))
        blended = []
        for i, t in enumerate(theta):
            ramp = min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            keep = (1.0 - ramp) * self.ext
            blended.append(t / self.factor * (1.0 - keep) + t * keep)
        return blended

    def pair_turning(self, turns: float, dims: int, base: float) -> float:
        """Index, as a real number, of the pair that turns `turns` times in the original context."""
        return dims * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    def magnitude(self, log_multiplier: float) -> float:
        """What cosine and sine are multiplied by, so that the scores keep their entropy."""
        if self.factor <= 1.0:
            return 1.0
        grown = 1.0 + 0.1 * math.log(self.factor)
        return (
            grown / (1.0 + 0.1 * log_multiplier * math.log(self.factor))
            if log_multiplier
            else grown
        )


def read_rope(
    c: Checkpoint, kind: RopeKind, *, base: float | None = None, scaled: bool = True
) -> Rope:
    """The rotary embedding of `c`.

    base    overrides `rope.freq_base` (layers with a window have their own in some families)
    scaled  False: plain frequencies, no scaling and no factors
    """
    dims = c.integer("rope.dimension_count", c.head_dim, minimum=2, maximum=c.head_dim)
    if dims % 2:
        raise c.bad(f"rope.dimension_count is {dims}, not even")
    base = c.number("rope.freq_base", 10_000.0) if base is None else base
    if base <= 1.0:
        raise c.bad(f"the rotary base is {base}, not above 1")
    theta = [base ** (-2.0 * i / dims) for i in range(dims // 2)]
    if not scaled:
        return Rope(kind, tuple(theta))
    scaling = read_scaling(c)
    factors = read_factors(c, len(theta), scaling)
    theta = [t / f for t, f in zip(theta, factors)]
    factor = 1.0 if scaling == "none" else read_factor(c)
    magnitude = c.number("rope.scaling.attn_factor", 1.0)
    ext = c.number("rope.scaling.yarn_ext_factor", 1.0 if scaling == "yarn" else 0.0)
    if ext:
        yarn = Yarn(
            factor,
            original_context(c),
            c.number("rope.scaling.yarn_beta_fast", 32.0),
            c.number("rope.scaling.yarn_beta_slow", 1.0),
            ext,
        )
        if min(yarn.beta_fast, yarn.beta_slow) <= 0:
            raise c.bad(f"the YaRN betas {yarn.beta_fast} and {yarn.beta_slow} are not above 0")
        theta = yarn.blend(theta, base)
        magnitude *= yarn.magnitude(c.number("rope.scaling.yarn_log_multiplier", 0.0))
    else:
        theta = [t / factor for t in theta]
        magnitude *= c.number("rope.scaling.yarn_attn_factor", 1.0)
    return Rope(kind, tuple(theta), magnitude)


def read_scaling(c: Checkpoint) -> str:
    scaling = c.text("rope.scaling.type", "linear")
    if scaling not in SCALINGS:
        raise UnsupportedModel(f"{c.architecture}: rope scaling {shown(scaling)}")
    return scaling


def read_factor(c: Checkpoint) -> float:
    """By how much the context was stretched; 0 means 1."""
    factor = c.number("rope.scaling.factor", c.number("rope.scale_linear", 1.0)) or 1.0
    if factor < 0:
        raise c.bad(f"rope.scaling.factor is {factor}, not positive")
    return factor


def original_context(c: Checkpoint) -> int:
    """Positions the model saw before its context was stretched."""
    return c.integer("rope.scaling.original_context_length", 0) or c.context_length


def read_factors(c: Checkpoint, num_pairs: int, scaling: str) -> list[float]:
    """What each frequency is divided by."""
    if c.has("rope_freqs.weight"):
        name = "rope_freqs.weight"
    elif c.has("rope_factors_long.weight") or c.has("rope_factors_short.weight"):
        # One set for a sequence's whole life, so that cached keys stay valid.
        is_long = c.num_ctx is None or c.num_ctx > original_context(c)
        name = f"rope_factors_{'long' if is_long else 'short'}.weight"
        c.skip(f"rope_factors_{'short' if is_long else 'long'}.weight")
    elif scaling == "longrope":
        raise BadFile(f"{c.path}: longrope needs the tensor rope_factors_short.weight")
    else:
        return [1.0] * num_pairs
    factors = c.values(name, num_pairs)
    if not all(math.isfinite(f) and f > 0 for f in factors):
        raise c.bad(f"tensor {name} has factors that are not positive")
    return factors

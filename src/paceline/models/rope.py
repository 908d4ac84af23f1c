"""Rotary positions: tables of angles, and the rotation of queries and keys.

Papers: https://arxiv.org/abs/2104.09864, YaRN https://arxiv.org/abs/2309.00071.
"""

import math

import torch
from torch import Tensor

from paceline.config.layers import RopeScaling
from paceline.config.model import Model

Rope = tuple[Tensor, Tensor]


def rope_tables(model: Model, *, of_windows: bool = False) -> Rope:
    """Return cos and sin of every position and frequency: (max_seq_len, rope_dim / 2) each, fp32.

    Args:
        of_windows: those of blocks that have frequencies of their own, `window_rope_theta`.

    In fp32 as in all published weights: at long positions the rounding of the angle is part of
    what the model has learnt.
    """
    positions = torch.arange(model.max_seq_len, dtype=torch.float32)
    if of_windows and model.window_rope_theta is not None:
        model = model.replace(
            rope_theta=model.window_rope_theta, window_rope_theta=None, rope_scaling=None
        )
    angles = torch.outer(positions, rope_frequencies(model))
    magnitude = 1.0 if model.rope_scaling is None else model.rope_scaling.magnitude
    return angles.cos() * magnitude, angles.sin() * magnitude


def rope_frequencies(model: Model) -> Tensor:
    """Return the radians per token of each pair of a head: (rope_dim / 2,), fp32."""
    exponents = torch.arange(0, model.rope_dim, 2, dtype=torch.float32) / model.rope_dim
    frequencies = 1.0 / model.rope_theta**exponents
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "yarn":
        return _yarn(frequencies, scaling, model.rope_theta)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow low frequencies by `factor`, keep high ones, blend linearly in between.

    Source: `apply_scaling` in https://github.com/meta-llama/llama-models (Llama 3.1).
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_seq_len
    assert original is not None  # RopeScaling sees to it, here and for the factors
    assert low is not None
    assert high is not None
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """As `_llama3`, but blend by the number of the pair.

    Source: `find_correction_range` in https://github.com/jquesnelle/yarn.
    """
    original, num_pairs = scaling.original_max_seq_len, len(frequencies)
    assert original is not None  # RopeScaling sees to it

    def pair_that_turns(times: float) -> float:
        return num_pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast or 32), pair_that_turns(scaling.beta_slow or 1)
    if scaling.truncate is None:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, dtype=torch.float32)
    slowed = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies / scaling.factor * slowed + frequencies * (1 - slowed)

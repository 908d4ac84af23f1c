"""Stack: the software that runs a step, by its features and the constants they cost.

Two systems run the same layout at different speeds, because one fuses its element-wise kernels, the
other waits for its collectives, a third launches every kernel from Python. A Stack says which, so
that the planner can price our own runtime, and published runs of others, by one set of formulas.

Features are what one can read about a system. Constants are physical and bounded; their defaults
are assumptions, and `paceline.plan.calibrate` fits them to measured steps, never beyond their
bounds. Nothing in here belongs to a single run or a source of runs.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.noun import Noun


class Stack(Noun):
    """How a system runs a step. The defaults are those of Paceline's own runtime."""

    attention: Literal["flash", "unfused"] = "flash"
    """Fused attention that never stores the scores, or scores written to memory."""
    elementwise: Literal["eager", "fused"] = "eager"
    """Norms, activations and residuals kernel by kernel as PyTorch does, or fused by hand or by a
    compiler (layout.compile fuses them whatever stands here)."""
    launch: Literal["eager", "graph"] = "eager"
    """Whether the host launches each kernel, or replays captured graphs."""
    logits: Literal["fp32", "bf16", "chunked"] = "fp32"
    """The loss: upcast copies of all logits, none, or chunk by chunk."""
    grad_dtype: Literal["param", "fp32", "bf16"] = "param"
    """Type of accumulated gradients; "param": that of the stored parameters."""
    optimizer: Literal["fused", "foreach"] = "fused"
    """One kernel over all parameters, or one per operation and group of parameters."""
    overlaps_data_axes: bool = True
    """Whether the collectives of dp and fsdp run beside the computation."""
    overlaps_tp: bool = False
    """Whether tensor parallel collectives run beside the products they feed."""
    overlaps_pp: bool = True
    """Whether activations travel between stages while both compute."""
    overlaps_ep: bool = False
    """Whether the all-to-all of the experts runs beside other work."""
    expert_tp: Literal["tp", "one"] = "tp"
    """Whether the tp ranks share each expert's columns, or hold whole experts."""
    dropout: bool = False
    """Whether attention and residuals draw and keep dropout masks."""
    recompute_granularity: Literal["block", "attention"] = "block"
    """What selective recompute means: everything but products (ours), or the attention core."""

    constants: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Fitted values of constants of `CONSTANTS`; the others have their defaults."""
    origin: str = "assumed"
    """Where the constants come from: "assumed", or which steps they were fitted to."""


class Constant(Noun):
    """One physical constant of a stack."""

    default: float
    low: float
    high: float
    meaning: str


def _constant(default: float, low: float, high: float, meaning: str) -> Constant:
    return Constant(default=default, low=low, high=high, meaning=meaning)


CONSTANTS: dict[str, Constant] = {
    "matmul_time": _constant(1.0, 0.7, 2.0, "matrix products, over the device's curve"),
    "attention_time": _constant(1.0, 0.5, 4.0, "attention kernels, over the device's curve"),
    "memory_time": _constant(1.0, 0.5, 4.0, "memory-bound kernels, over bytes / bandwidth"),
    "launch_us": _constant(6.0, 0.5, 60.0, "host time per launched kernel, microseconds"),
    "optimizer_time": _constant(1.0, 0.5, 6.0, "the optimizer's step, over its bytes / bandwidth"),
    "comm_time_inside": _constant(1.0, 0.6, 3.0, "collectives inside the fast tier, over curves"),
    "comm_time_across": _constant(1.0, 0.6, 4.0, "collectives across nodes, over curves"),
    "overlap_slowdown": _constant(1.15, 1.0, 1.5, "computing beside a collective, over alone"),
    "overlap_share": _constant(0.9, 0.05, 1.0, "part of what could be hidden that really is"),
    "step_overhead_ms": _constant(2.0, 0.01, 200.0, "host work once per step, milliseconds"),
    "micro_batch_overhead_ms": _constant(0.5, 0.001, 50.0, "host work once per micro-batch, ms"),
}


def constant(stack: Stack, name: str) -> float:
    """The value of a constant of `CONSTANTS` in a stack."""
    return stack.constants.get(name, CONSTANTS[name].default)

"""What a published run says about its software: features of a Stack, read from words.

No source has an entry of its own. Names of systems stand for what is documented of them (Megatron
fuses its element-wise kernels, FSDP launches eagerly from Python), flags for what they switch on,
years for what did not exist yet (flash attention came with mid 2022). A fitted constant belongs to
the features, on a device.
"""

import re
from typing import Literal, NamedTuple, get_args

from paceline.config.stack import Stack
from paceline.plan.published.table import Line

# Before it, training ran with scores written to memory: https://arxiv.org/abs/2205.14135
_FLASH_SINCE = 2022.4
# Since then torchtitan compiles its loss too: https://github.com/pytorch/torchtitan/pull/1033
_LOSS_COMPILED_SINCE = 2025.25
_BACKENDS: tuple[str, ...] = get_args(Stack.model_fields["attention"].annotation)


class Software(NamedTuple):
    """The software of a run."""

    stack: Stack
    family: str
    """What was fitted together may be used together: systems of one kind."""
    compile: bool
    async_tp: bool
    precision: str
    """Arithmetic of the products: fp32, tf32, bf16, fp16, fp8, fp4."""
    param_dtype: Literal["fp32", "bf16"]


# Usual constants where the defaults are wrong for a whole kind of system. Fitted to published runs,
# kept where devices or sources agree. Eager FSDP of 2023 called the first flash attention: fits on
# H100, A100 80 GB and A100 40 GB give 1.78, 1.78 and 1.80. Compiled FSDP2 calls PyTorch's own
# attention, two sources and three devices: 1.1 to 1.5, and products 1.06 to 1.18.
_USUAL: dict[str, dict[str, float]] = {
    "fsdp": {"attention_time": 1.8},
    "fsdp compiled": {"attention_time": 1.3, "matmul_time": 1.1},
}

FAMILIES = (
    ("megatron", ("megatron", "nemo", "mcore", "bridge")),
    ("xla", ("maxtext", "jax", "levanter")),
    ("tensorflow", ("tensorflow",)),
    ("deepspeed", ("deepspeed", "colossal")),
    ("fsdp compiled", ("torchtitan", "torchao")),
    ("fsdp", ("fsdp", "foundry", "composer", "litgpt", "lit-gpt", "torchtune")),
)


def software_of(line: Line) -> Software:
    """The software of a line; a line of a short table is Megatron's GPT of 2021."""
    system = line.text("framework").lower()
    flags = f"{line.text('compile_flash_flags')} {line.text('compile_flags')}".strip().lower()
    sharding = line.text("fsdp_or_zero").lower()
    words = f"{system}; {flags}; {line.text('notes').lower()}"
    family = _family(f"{system} {sharding}") if system else "megatron"
    compiled = _compiles(flags, system)
    stack = Stack(
        attention=_attention(line, system, flags, family),
        elementwise=_elementwise(system, flags, family),
        launch="graph" if _graphs(flags) or family in ("xla", "tensorflow") else "eager",
        logits=_logits(words, family, compiled and year_of(line) >= _LOSS_COMPILED_SINCE),
        shared_vocab_loss="wide" if family == "fsdp compiled" else "narrow",
        grad_dtype=_grad_dtype(line, words, family),
        states="buffers" if family in ("megatron", "deepspeed") else "shards",
        adds_into_buffer="deepspeed" not in f"{system} {sharding}",
        receives_ahead=family == "fsdp compiled",
        regathers_tp=family == "megatron",
        optimizer="foreach" if family in ("fsdp", "fsdp compiled") else "fused",
        overlaps_data_axes=_overlaps_data(line, system, sharding),
        overlaps_tp="tp comm overlap" in flags or (family == "megatron" and year_of(line) >= 2024),
        overlaps_pp=year_of(line) >= 2023,
        scatters_pp=family == "megatron",
        overlaps_ep=bool(re.search(r"a2a_overlap|ep overlap", words))
        and "no ep overlap" not in words,
        expert_tp="one" if family == "megatron" and year_of(line) >= 2023 else "tp",
        dropout=line.text("workload").startswith("mlm") or _is_early_megatron(line, family),
        recompute_granularity=_granularity(line, family),
        constants=_USUAL.get(family, {}),
        # Megatron and DeepSpeed repeat a block to its end, by autograd functions of their own.
        recompute_stops_early=family not in ("megatron", "deepspeed"),
        fp8_experts=family == "megatron",
        keeps_fp8=family == "megatron",
        weighs_in_experts=family == "megatron" and year_of(line) >= 2025.25,
    )
    asynchronous = bool(re.search(r"async[\s_-]*tp", flags))
    return Software(
        stack, family, compiled, asynchronous, precision_of(line), _param_dtype(line, family)
    )


def precision_of(line: Line) -> str:
    """Arithmetic of the products; of a short table fp16, as its systems had."""
    text = line.text("precision").lower()
    for name in ("nvfp4", "mxfp4", "fp4"):
        if text.startswith(name):
            return "fp4"
    if re.match(r"mx-?fp8|fp8|float8", text):
        return "fp8"
    for name in ("tf32", "bf16", "fp16", "fp32"):
        if text.startswith(name):
            return name
    return "fp16" if not text else "bf16"


def year_of(line: Line) -> float:
    """When a run was published, as years; a table without the column is of 2021.

    "2024-12", "Apr-2021", container releases ("26.04.01"), "24.07".
    """
    for column in ("release", "framework", "source"):
        text = line.text(column)
        full = re.search(r"(?<!\d)(20[12]\d)(?:-(0[1-9]|1[0-2])(?!\d))?", text)
        if full:
            return float(full[1]) + (float(full[2]) - 1 if full[2] else 0) / 12
        short = re.search(r"(?<![\d.])(2\d)\.(0[1-9]|1[0-2])(?!\d)", text)
        if short:
            return 2000 + float(short[1]) + (float(short[2]) - 1) / 12
    return 2023.5 if line.text("framework") else 2021.0


def _family(system: str) -> str:
    for family, words in FAMILIES:
        if any(word in system for word in words):
            return family
    return "plain"


def _compiles(flags: str, system: str) -> bool:
    if re.search(r"no torch\.?compile|nocompile|compile not stated|^eager", flags):
        return False
    return "compile" in flags or "xla" in flags or bool(re.search(r"jax|maxtext", system))


def _attention(line: Line, system: str, flags: str, family: str) -> Literal["flash", "unfused"]:
    if re.search(r"no flash|unfused|\bmath\b", flags):
        return "unfused"
    device = line.text("gpu").upper()
    if re.search(r"transformer ?engine|\bte\b|cudnn|flash-?attn ?3|\bfa3\b", f"{flags} {system}"):
        newest = "flash3" in _BACKENDS and bool(re.search(r"H[12]00|B[23]00", device))
        return "flash3" if newest else "flash"  # type: ignore[return-value]
    if "flash" in flags or "sdpa" in flags or "splash" in flags or "flash" in system:
        return "flash"
    if family == "megatron" and year_of(line) >= 2023.4:
        newest = "flash3" in _BACKENDS and bool(re.search(r"H[12]00|B[23]00", device))
        return "flash3" if newest else "flash"  # type: ignore[return-value]
    early = year_of(line) < _FLASH_SINCE or family in ("megatron", "deepspeed", "plain")
    return "unfused" if early and year_of(line) < 2023.4 else "flash"


def _elementwise(system: str, flags: str, family: str) -> Literal["eager", "fused"]:
    """Megatron, and the examples that come with fused kernels (FlashAttention's, NVIDIA's)."""
    if re.search(r"fused kernels|transformer ?engine|xla", f"{flags} {system}"):
        return "fused"
    examples = family == "plain" and re.search(r"flash-?attention|nvidia", system)
    return "fused" if examples or family in ("megatron", "xla") else "eager"


def _graphs(flags: str) -> bool:
    """Graphs of whole steps or layers; those of single small modules leave most launches."""
    found = re.search(r"cuda_?graph=(\w+\([^)]*\))", flags)
    if found:
        return bool(re.search(r"full|attn|mlp", found[1]))
    return "full-iteration cuda graph" in flags


def _logits(words: str, family: str, compiled: bool) -> Literal["fp32", "bf16", "chunked"]:
    if re.search(r"fused.{0,60}\bce\b|chunked|cut[- ]cross|fused cross|linear cross", words):
        return "chunked"
    # llm-foundry's loss is a fused kernel unless its settings say otherwise.
    fused = family == "xla" or bool(re.search(r"foundry|composer", words))
    return "bf16" if fused or (family == "fsdp compiled" and compiled) else "fp32"


def _grad_dtype(line: Line, words: str, family: str) -> Literal["param", "fp32", "bf16"]:
    if re.search(r"(fp16|bf16) gradient accumulation|reduction all 16-bit", words):
        return "bf16"
    if "pure" in line.text("precision").lower().split("[")[0]:
        return "bf16"
    if family == "megatron" and year_of(line) < 2022 and precision_of(line) == "fp16":
        return "bf16"
    return "fp32" if family in ("megatron", "deepspeed") else "param"


def _overlaps_data(line: Line, system: str, sharding: str) -> bool:
    """Megatron's data parallelism reduced after the backward pass until 2023."""
    early = year_of(line) < 2023
    if "megatron" in system or not system:
        return not early or "overlap" in sharding
    return "colossal" not in system


def _is_early_megatron(line: Line, family: str) -> bool:
    return family == "megatron" and year_of(line) < 2022.4


def _granularity(line: Line, family: str) -> Literal["block", "attention", "half"]:
    """What "selective" means there: torchtitan's default keeps every second product."""
    if family == "fsdp compiled":
        return "half"
    return "attention" if family in ("megatron", "deepspeed") else "block"


def _param_dtype(line: Line, family: str) -> Literal["fp32", "bf16"]:
    """bf16 stands for any 16-bit parameters with an fp32 master copy."""
    text = line.text("precision").lower()
    if "pure" in text or "bf16-true" in text:
        return "bf16"
    if re.search(r"amp|fp32|tf32|default", text.replace("fp32 grad", "")):
        return "fp32"
    return "bf16" if family in ("megatron", "deepspeed") else "fp32"

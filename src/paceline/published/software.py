"""What a published run says about its software: features of a Stack, read from words.

No source has an entry of its own. Names of systems stand for what is documented of them (Megatron
fuses its element-wise kernels, FSDP launches eagerly from Python), flags for what they switch on,
years for what did not exist yet (flash attention came with mid 2022). A fitted constant belongs to
the features, on a device.
"""

import re
from typing import Literal, NamedTuple

from paceline.config.stack import Stack
from paceline.published.machines import device_of
from paceline.published.recompute import offloaded_share, remade_parts
from paceline.published.table import PublishedLine

# Before it, training ran with scores written to memory: https://arxiv.org/abs/2205.14135
_FLASH_SINCE = 2022.4
# The second version, from July 2023 (https://arxiv.org/abs/2307.08691); PyTorch's own attention has
# it from version 2.2, of January 2024 (https://pytorch.org/blog/pytorch2-2/).
_FLASH2_SINCE, _FLASH2_IN_TORCH_SINCE = 2023.5, 2024.0
# It needs Ampere; older devices have xformers' kernels, as fast as the first version (figure 4).
_BEFORE_AMPERE = ("P100", "V100", "T4")
# Since then torchtitan compiles its loss too: https://github.com/pytorch/torchtitan/pull/1033
_LOSS_COMPILED_SINCE = 2025.25
# Of Megatron-Bridge's presets, release 26.06 is the first with fused experts and graphs of whole
# steps; commits of a month before have them: scripts/performance/configs/gpt_oss there.
_EXPERTS_FUSED_SINCE = 2026.3
# HybridEP, and presets that name DeepEP: https://github.com/deepseek-ai/DeepEP/pull/420
_TOKENS_SENT_ONCE_SINCE = 2025.6
# CUDA 11.7 loads kernels when they are called; PyTorch 1.13 was the first to be built with it:
# https://pytorch.org/blog/PyTorch-1.13-release
_KERNELS_LOADED_AS_USED_SINCE = 2022.8
# NVIDIA's presets reduce gradients in 16 bits since then: NeMo's grad_sync_dtype, Bridge's
# grad_reduce_in_fp32 = False in every file of scripts/performance/configs, and the examples of
# Megatron-LM with fp8 (--grad-reduce-in-bf16).
_REDUCED_IN_16_BITS_SINCE = 2024.0
_ASYNC_TP = r"async[\s_-]*tp"
# Experts' exchanges by any of their names, in any order: "EP overlap", "moe_a2a_overlap", "overlap
# moe expert parallel comm", "all-to-alls are overlapped". Shared experts beside them are another
# feature.
_OF_EXPERTS = r"(?:moe|experts?|ep|a2a|all[\s_-]?to[\s_-]?alls?|dispatch)"
_BETWEEN = r"(?:parallel(?:ism)?|comm\w*|tokens?|combine|exchanges?|of|the|is|are|was|were|fully)"
_OVERLAPS_EXPERTS = (
    rf"(?<!shared[\s_-])\b{_OF_EXPERTS}(?:[\s_-]+(?:{_OF_EXPERTS}|{_BETWEEN}))*[\s_-]+overlap"
    rf"|overlap\w*(?:[\s_-]+{_BETWEEN})*[\s_-]+{_OF_EXPERTS}(?![a-z])|\bdualpipe"
)
# Systems whose products in 8 bits are TransformerEngine's or their own, those of experts included.
_WHOLLY_IN_EIGHT_BITS = ("megatron", "hai-llm")


class RunSoftware(NamedTuple):
    """The software of a run."""

    stack: Stack
    family: str
    """What was fitted together may be used together: systems of one kind."""
    compile: bool
    async_tp: bool
    precision: str
    """Arithmetic of the products: fp32, tf32, bf16, fp16, fp8, fp4."""
    param_dtype: Literal["fp32", "bf16"]


# Usual constants where the defaults are wrong for a whole kind of system. Assumed: fitted to the
# published runs of two sources, kept since three generations of devices agree (attention 1.1 to
# 1.5, products 1.06 to 1.18). What is behind them isn't known. It isn't the attention kernel, whose
# 329 TFLOP/s on H100 (https://github.com/pytorch/pytorch/issues/142132) are 0.96 of the curve's;
# 15 % on kernels of every kind, as of clocks under a lasting load, explain those steps as well.
_USUAL: dict[str, dict[str, float]] = {
    "fsdp compiled": {"attention_time": 1.3, "matmul_time": 1.1},
}

# "hai-llm" is what DeepSeek-V3 was trained with (https://arxiv.org/abs/2412.19437): fused kernels,
# 8-bit products of linear layers and experts, fp32 gradients and master copies, 16-bit moments
# (3.3), tokens that travel once to a node, in 8 bits to the experts (3.2.2, 3.3.3), DualPipe.
FAMILIES = (
    ("megatron", ("megatron", "nemo", "mcore", "bridge")),
    ("xla", ("maxtext", "jax", "levanter")),
    ("tensorflow", ("tensorflow",)),
    ("deepspeed", ("deepspeed", "colossal")),
    ("fsdp compiled", ("torchtitan", "torchao")),
    ("hai-llm", ("hai-llm", "hai llm", "deepseek")),
    ("fsdp", ("fsdp", "foundry", "composer", "litgpt", "lit-gpt", "torchtune")),
)


def software_of(line: PublishedLine) -> RunSoftware:
    """The software of a line; a line of a short table is Megatron's GPT of 2021."""
    system = line.text("framework").lower()
    flags = f"{line.text('compile_flash_flags')} {line.text('compile_flags')}".strip().lower()
    sharding = line.text("fsdp_or_zero").lower()
    words = f"{system}; {flags}; {line.text('notes').lower()}"
    family = _family(f"{system} {sharding}") if system else "megatron"
    compiled = _compiles(flags, system)
    static = _is_static(line, words, family)
    fuses = static and precision_of(line) == "fp8" and year_of(line) >= _EXPERTS_FUSED_SINCE
    stack = Stack(
        attention=_attention(line, system, flags, family),
        elementwise=_elementwise(line, system, flags, family),
        launch=_launch(line, flags, family, static),
        logits=_logits(words, family, compiled and year_of(line) >= _LOSS_COMPILED_SINCE),
        steps_loss=family == "megatron",
        shared_vocab_loss="wide" if family == "fsdp compiled" else "narrow",
        grad_dtype=_grad_dtype(line, words, family, sharding),
        states="buffers" if family in ("megatron", "deepspeed", "hai-llm") else "shards",
        adds_into_buffer="deepspeed" not in f"{system} {sharding}",
        receives_ahead=family == "fsdp compiled",
        regathers_tp=family in ("megatron", "xla"),
        optimizer="foreach" if family in ("fsdp", "fsdp compiled") else "fused",
        overlaps_data_axes=_overlaps_data(line, system, sharding),
        overlaps_tp="tp comm overlap" in flags or (family == "megatron" and year_of(line) >= 2024),
        overlaps_pp=year_of(line) >= 2023,
        scatters_pp=family == "megatron",
        overlaps_ep=_overlaps_experts(line, words, static),
        expert_tp="one" if family == "megatron" and year_of(line) >= 2023 else "tp",
        dropout=line.text("workload").startswith("mlm") or _is_early_megatron(line, family),
        recompute_granularity=_granularity(family),
        moments_bytes=_moments_bytes(words, line, system),
        keeps_master=_keeps_master(line, system),
        gather_unit="matrix" if family == "xla" else "block",
        allocator="planned" if family == "xla" else "caching",
        loads_kernels="all" if year_of(line) < _KERNELS_LOADED_AS_USED_SINCE else "used",
        remakes=remade_parts(line),
        offloaded_share=offloaded_share(line),
        constants=_USUAL.get(family, {}),
        # Megatron and DeepSpeed repeat a block to its end, by autograd functions of their own.
        recompute_stops_early=family not in ("megatron", "deepspeed"),
        expert_exchange=_expert_exchange(line, words, family),
        grouped_products="loop" if family == "megatron" and not fuses else "kernel",
        fuses_experts=fuses,
        expert_biases="eager" if "gpt-oss" in line.text("model").lower() else "none",
        dispatch_dtype=_dispatch_dtype(words, family),
        fp8_experts=_has_fp8_experts(line, flags, family),
        keeps_fp8=family in _WHOLLY_IN_EIGHT_BITS or _casts_by_hand(line, flags),
        gather_dtype=_gather_dtype(line, flags),
        tp_gather_dtype="fp8" if family == "fsdp compiled" and _scales_tensors(line) else "values",
        cp_keys="gathered" if family == "fsdp compiled" else "ring",
        weighs_in_experts=family == "megatron" and year_of(line) >= 2025.25,
    )
    asynchronous = bool(re.search(_ASYNC_TP, flags))
    return RunSoftware(
        stack, family, compiled, asynchronous, precision_of(line), _param_dtype(line, family)
    )


def precision_of(line: PublishedLine) -> str:
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


def year_of(line: PublishedLine) -> float:
    """When a run was published, as years; a table without the column is of 2021.

    "2024-12", "Apr-2021", container releases ("26.04.01"), "24.07".
    """
    dated = _dated(line)
    if dated is not None:
        return dated
    return 2023.5 if line.text("framework") else 2021.0


def _dated(line: PublishedLine) -> float | None:
    for column in ("release", "framework", "source"):
        text = line.text(column)
        full = re.search(r"(?<!\d)(20[12]\d)(?:-(0[1-9]|1[0-2])(?!\d))?", text)
        if full:
            return float(full[1]) + (float(full[2]) - 1 if full[2] else 0) / 12
        short = re.search(r"(?<![\d.])(2\d)\.(0[1-9]|1[0-2])(?!\d)", text)
        if short:
            return 2000 + float(short[1]) + (float(short[2]) - 1) / 12
    return None


def _family(system: str) -> str:
    for family, words in FAMILIES:
        if any(word in system for word in words):
            return family
    # Trainers that call their sharding ZeRO have DeepSpeed do it.
    return "deepspeed" if re.search(r"\bzero[ -]?[123]\b", system) else "plain"


def _compiles(flags: str, system: str) -> bool:
    off = r"(?:off|false|no|none|disabled|not stated)\b"
    if re.search(
        rf"\b(?:no|non|not|without)[ -]?(?:torch[. ]?)?compil|compiled?\s*[=:]?\s*{off}|^eager",
        flags,
    ):
        return False
    # Asynchronous tensor parallelism is a pass of PyTorch's compiler (torch._inductor).
    found = re.search(rf"compile|xla|{_ASYNC_TP}", flags) or re.search(r"jax|maxtext", system)
    return bool(found)


def _attention(
    line: PublishedLine, system: str, flags: str, family: str
) -> Literal["flash1", "flash", "flash3", "unfused"]:
    if re.search(r"no flash|unfused|\bmath\b", flags):
        return "unfused"
    year = year_of(line)
    said = f"{flags} {system}"
    if re.search(r"transformer ?engine|\bte\b|cudnn|flash-?attn ?3|\bfa3\b", said):
        return _newest(line)
    if not re.search(r"flash|sdpa|splash", flags) and "flash" not in system:
        if family == "megatron" and year >= 2023.4:
            return _newest(line)
        early = year < _FLASH_SINCE or family in ("megatron", "deepspeed", "plain")
        if early and year < 2023.4:
            return "unfused"
    return "flash1" if _is_first_flash(line, flags) else "flash"


def _newest(line: PublishedLine) -> Literal["flash", "flash3"]:
    """Transformer Engine calls cuDNN or FlashAttention-3 where the device has them."""
    return "flash3" if re.search(r"H[12]00|B[23]00", line.text("gpu").upper()) else "flash"


def _is_first_flash(line: PublishedLine, flags: str) -> bool:
    """By what is said, else by the date; what is undated is taken to be of today."""
    device = device_of(line.text("gpu"))
    says_second = re.search(r"flash[a-z_ -]*v?2(?![0-9k])|\bfa2\b", flags)
    if device is None or device.kind != "cuda" or says_second:
        return False
    if device.name.startswith(_BEFORE_AMPERE):
        return True
    year = _dated(line)
    # Triton's form was called for beside the first version, which knew no biases.
    if re.search(r"\btriton\b|flash[a-z_ -]*v?1\b|\bfa1\b", flags):
        return year is None or year < 2024
    since = _FLASH2_IN_TORCH_SINCE if "sdpa" in flags else _FLASH2_SINCE
    return year is not None and year < since


def _elementwise(
    line: PublishedLine, system: str, flags: str, family: str
) -> Literal["eager", "fused"]:
    """Megatron, and language models of examples that come with fused kernels.

    Those are FlashAttention's training code and NVIDIA's DeepLearningExamples (apex's norms and
    dropouts, https://github.com/NVIDIA/DeepLearningExamples); their networks for images are plain.
    """
    if re.search(r"fused kernels|transformer ?engine|xla", f"{flags} {system}"):
        return "fused"
    fused = family in ("megatron", "xla", "hai-llm")
    if family == "plain" and not line.number("images_per_s"):
        fused = bool(re.search(r"flash-?attention|\bdle\b|deep ?learning ?examples", system))
    return "fused" if fused else "eager"


def _launch(
    line: PublishedLine, flags: str, family: str, static: bool
) -> Literal["eager", "graph"]:
    """Where experts have no fixed room, graphs leave them out, and with them most launches."""
    captured = static if line.number("experts") else _graphs(flags)
    return "graph" if captured or family in ("xla", "tensorflow") else "eager"


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
    fused = family == "xla" or bool(re.search(r"foundry|composer|megatron-bridge", words))
    return "bf16" if fused or (family == "fsdp compiled" and compiled) else "fp32"


def _grad_dtype(
    line: PublishedLine, words: str, family: str, sharding: str
) -> Literal["param", "fp32", "bf16"]:
    system = line.text("framework").lower()
    if re.search(r"(fp16|bf16|16-bit) grad|reduction all 16-bit|reduce_in_fp32\W*false", words):
        return "bf16"
    if re.search(r"fp32 (main[ _])?grad", f"{words}; {line.text('precision').lower()}"):
        return "fp32"
    if "pure" in line.text("precision").lower().split("[")[0]:
        return "bf16"
    if family == "megatron" and year_of(line) < 2022 and precision_of(line) == "fp16":
        return "bf16"
    if family == "megatron" and year_of(line) >= _REDUCED_IN_16_BITS_SINCE:
        presets = re.search(r"nemo|bridge", words.split(";")[0]) or precision_of(line) == "fp8"
        return "bf16" if presets else "fp32"
    if family == "deepspeed" and re.search(r"zero[ -]?[123]", f"{system} {sharding}"):
        # https://www.deepspeed.ai/docs/config-json, data_types: the model's, if it is sharded.
        return "bf16" if precision_of(line) in ("bf16", "fp16", "fp8") else "param"
    return "fp32" if family in ("megatron", "deepspeed", "hai-llm") else "param"


def _keeps_master(line: PublishedLine, system: str) -> bool:
    """Whether 16-bit parameters have an fp32 copy: torchtune's, Lightning's "true" ones don't."""
    said = f"{line.text('precision')}; {line.text('notes')}".lower()
    return not ("torchtune" in system or re.search(r"bf16-true|no (fp32 )?master", said))


def _moments_bytes(words: str, line: PublishedLine, system: str) -> float:
    """Bridge's recipes of DeepSeek-V3 and Kimi K2 keep Adam's moments in 16 bits
    (src/megatron/bridge/recipes/deepseek/deepseek_v3.py: exp_avg_dtype)."""
    hai_llm = _family(system) == "hai-llm"
    if hai_llm or re.search(r"(bf16|16-bit)[a-z +]* moments|\bmuon\b|\blion\b", words):
        return 4.0
    if not _keeps_master(line, system):
        return 4.0  # of the parameters' own type
    if re.search(r"fp32[a-z +]*(moments|optimizer states)", words):
        return 8.0
    is_recipe = "bridge" in system and re.search(r"deepseek-?v3|kimi", line.text("model").lower())
    return 4.0 if is_recipe else 8.0


def _gather_dtype(line: PublishedLine, flags: str) -> Literal["arithmetic", "fp8"]:
    said = f"{line.text('precision')} {flags}".lower()
    return "fp8" if re.search(r"(fp8|float8)[ -]all-?gather", said) else "arithmetic"


def _casts_by_hand(line: PublishedLine, flags: str) -> bool:
    said = f"{line.text('precision')} {flags}".lower()
    return precision_of(line) == "fp8" and bool(re.search(r"transformer ?engine|\bte\b", said))


def _has_fp8_experts(line: PublishedLine, flags: str, family: str) -> bool:
    """Of torchao's and others' runs where 8-bit grouped products are said; its conversion of linear
    layers leaves experts as they are, as ours does.
    """
    experts = r"group\w*[ _-]?(?:gemm|mm)|\bmoe\b|\bexperts?\b"
    said = precision_of(line) == "fp8" and re.search(experts, line.text("precision").lower())
    return family in _WHOLLY_IN_EIGHT_BITS or bool(said) or _casts_by_hand(line, flags)


def _dispatch_dtype(words: str, family: str) -> Literal["values", "fp8"]:
    said = re.search(r"(fp8|float8|8-bit)[\s_-]dispatch|dispatch\w* (in|as) (fp8|float8)", words)
    return "fp8" if said or family == "hai-llm" else "values"


def _scales_tensors(line: PublishedLine) -> bool:
    """Whether fp8 has one scale for each tensor, torchao's default: others gather in 16 bits
    (https://github.com/pytorch/torchtitan/issues/845)."""
    text = line.text("precision").lower()
    return bool(re.match(r"fp8|float8", text)) and not re.search(r"row|axis|block|mx", text)


def _overlaps_data(line: PublishedLine, system: str, sharding: str) -> bool:
    """Megatron's data parallelism reduced after the backward pass until 2023."""
    early = year_of(line) < 2023
    if "megatron" in system or not system:
        return not early or "overlap" in sharding
    return "colossal" not in system


def _is_early_megatron(line: PublishedLine, family: str) -> bool:
    return family == "megatron" and year_of(line) < 2022.4


def _overlaps_experts(line: PublishedLine, words: str, static: bool) -> bool:
    """Whether experts' exchanges overlap: said, in any order of the words, or so by preset."""
    said = f"{words}; {line.text('pp_schedule').lower()}"
    found = [*re.finditer(_OVERLAPS_EXPERTS, said)]
    if any(_is_denied(said, one) for one in found):
        return False
    return static or bool(found)


def _is_denied(words: str, found: re.Match[str]) -> bool:
    """Whether what was found is said not to be: "no EP overlap", "a2a_overlap=False"."""
    before = re.search(
        r"\b(?:no|not|non|without|disabled?)[\s_-]+(?:the )?$", words[: found.start()]
    )
    rest = rf"(?:[\s_-]+(?:{_OF_EXPERTS}|{_BETWEEN}))*"
    off = rf"\w*{rest}\s*[=:]?\s*(?:off|false|no|not|none|disabled|0)\b"
    return bool(before or re.match(off, words[found.end() :]))


def _expert_exchange(line: PublishedLine, words: str, family: str) -> Literal["copies", "tokens"]:
    """Megatron's guide advises DeepEP or HybridEP for every kind of GPU, and its presets name them.

    Dropping tokens works with all-to-alls only.
    """
    if family == "hai-llm" or re.search(r"deepep|hybridep", words):
        return "tokens"
    said = re.search(r"alltoall|from preset|tokendrop", words)
    is_new = family == "megatron" and year_of(line) >= _TOKENS_SENT_ONCE_SINCE
    return "tokens" if is_new and not said else "copies"


def _is_static(line: PublishedLine, words: str, family: str) -> bool:
    """Whether experts have room for a fixed number of tokens, so that one graph holds a whole step.

    Megatron's presets for racks of Blackwell in 8 bits have it since mid 2026, with overlapped
    exchanges and fused experts (scripts/performance/configs of Megatron-Bridge 26.06).
    """
    if not line.number("experts"):
        return False
    if re.search(r"full[-_]iteration", words):
        return True
    racks = bool(re.search(r"GB[23]00", line.text("gpu").upper()))
    said = re.search(r"from preset|graph|dispatcher|(deep|hybrid)ep", words)
    is_new = family == "megatron" and year_of(line) >= _EXPERTS_FUSED_SINCE
    return racks and is_new and precision_of(line) == "fp8" and not said


def _granularity(family: str) -> Literal["block", "attention", "half"]:
    """What "selective" means there: torchtitan's default keeps every second product."""
    if family == "fsdp compiled":
        return "half"
    return "attention" if family in ("megatron", "deepspeed") else "block"


def _param_dtype(line: PublishedLine, family: str) -> Literal["fp32", "bf16"]:
    """bf16 stands for any 16-bit parameters with an fp32 master copy."""
    text = line.text("precision").lower()
    if "pure" in text or "bf16-true" in text or "torchtune" in line.text("framework").lower():
        return "bf16"
    if re.search(r"amp|fp32|tf32|default", text.replace("fp32 grad", "")):
        return "fp32"
    return "bf16" if family in ("megatron", "deepspeed", "hai-llm") else "fp32"

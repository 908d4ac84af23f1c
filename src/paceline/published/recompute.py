"""What a published run recomputes, and what waits on its host: read from words.

Systems mean different things by "selective": Megatron the attention core, or parts that it names;
torchtitan every second product; others whole blocks, every other one. Words that name parts or
layers decide, wherever they stand: in the column, among flags or in notes.

Not here: what a part weighs (`paceline.plan.memory.activations`).
"""

import re
from collections.abc import Iterator
from typing import Literal

from paceline.config.model import Model
from paceline.config.stack import Part
from paceline.published.table import PublishedLine

Recompute = Literal["none", "selective", "full"]

_PARTS: tuple[Part, ...] = (
    *("mla_up_proj", "mlp", "moe_act", "layernorm", "shared_experts", "core_attn"),
)
_WORDS = r"recomput|remat|activation[ _-]?(?:checkpoint|ckpt)|gradient[ _-]?checkpoint|\bac mode"
_UNKNOWN = r"assumed|not (?:re)?stated|not checked|not on the page|flags from|includes? recompute"
_OFF = r"\b(?:no|without|none|off|false|disabled)\b|=\s*\[\]"
_ON = r"\b(?:full|uniform|true|yes|on|enabled|whole|all)\b|full-block"
_OTHERS = {"second": 2, "other": 2, "third": 3, "fourth": 4}


def recompute_of(line: PublishedLine, model: Model, inferred: list[str]) -> tuple[Recompute, float]:
    """What is recomputed, and in which share of the layers."""
    text = line.text("activation_ckpt").lower()
    if not line.text("framework"):
        inferred.append("activation_ckpt")
        return "full", 1.0
    segments = [*_segments(line)]
    if not text:
        text = next((said for said in segments if re.search(rf"{_ON}|{_OFF}|selective", said)), "")
        if not text:
            inferred.append("activation_ckpt")
            return ("full" if _by_default(line) else "none"), 1.0
    share = _share_of_layers(f"{text}; {line.text('notes').lower()}", line, model)
    if re.search(_OFF, text):
        return "none", 1.0
    if "selective" in text:
        return ("full", share) if share is not None else _selective(line, model)
    if re.search(_ON, text) or re.search(_WORDS, text):
        return "full", share or 1.0
    return "none", 1.0


def _by_default(line: PublishedLine) -> bool:
    """Whether a system recomputes blocks unasked: LitGPT's fine-tuning does on several devices
    (https://github.com/Lightning-AI/litgpt, litgpt/finetune/lora.py)."""
    words = " ".join(line.text(each) for each in ("framework", "workload", "notes")).lower()
    is_tuned = re.search(r"lora|adapter|fine-?tun|\bsft\b", words)
    return bool(
        is_tuned
        and re.search(r"lit-?gpt", line.text("framework").lower())
        and (line.count("gpus") or 1) > 1
    )


def _selective(line: PublishedLine, model: Model) -> tuple[Recompute, float]:
    """By the parts that are named: a whole feed-forward layer is priced as so many whole blocks
    as its products are of a block's; other parts are cheap beside what they save (`remade_parts`).
    """
    if re.search(r"remat\w*[^;]*offload", line.text("compile_flash_flags").lower()):
        return "full", 1.0  # what is kept waits on the host
    names = _named_parts(line)
    if "moe" in names or ("mlp" in names and model.experts is None):
        return "full", _share_of_products(model, "moe" in names)
    if names and "core_attn" not in names:
        return "none", 1.0
    return "selective", 1.0


def remade_parts(line: PublishedLine) -> tuple[Part, ...]:
    """The small parts of a block that are made anew, or wait on the host."""
    names = _named_parts(line)
    whole = () if line.number("experts") else ("mlp",)  # counted as blocks, see `_selective`
    return tuple(part for part in _PARTS if part in names and part not in whole)


def offloaded_share(line: PublishedLine) -> float:
    """Part of the layers whose activations wait on the host, as notes say."""
    words = f"{line.text('notes')}; {line.text('activation_ckpt')}".lower()
    found = re.search(
        r"activations?[ _](?:cpu[ _])?offload\w*(?:\D{0,12}(\d+) layers)?"
        r"|cpu[ _]offloading[ _](?:num[ _]layers\W*(\d+))",
        words,
    )
    if found is None or re.search(r"(?:no|without) $", words[: found.start()]):
        return 0.0
    number = found[1] or found[2]
    layers = (line.count("layers") or 1) / (line.count("pp") or 1)
    return min(1.0, int(number) / layers) if number else 1.0


def _segments(line: PublishedLine) -> Iterator[str]:
    """Parts of notes and flags that speak of recompute, less those that say nothing for certain."""
    words = f"{line.text('notes')}; {line.text('compile_flash_flags')}".lower()
    for segment in words.split(";"):
        if re.search(_WORDS, segment) and not re.search(_UNKNOWN, segment):
            yield segment.strip()


def _named_parts(line: PublishedLine) -> set[str]:
    """Parts that follow the word: "recompute modules (preset): moe_act,mlp", "mlp recompute"."""
    names: set[str] = set()
    for segment in [*_segments(line), line.text("activation_ckpt").lower()]:
        if not segment.startswith("oom"):  # of a try beside the run
            names |= set(re.findall(rf"(?<![\w-])(?:moe|{'|'.join(_PARTS)})(?!\w)", segment))
    return names


def _share_of_layers(words: str, line: PublishedLine, model: Model) -> float | None:
    """Part of the layers that recompute as a whole; None where nothing says so."""
    every = re.search(r"every (\d|second|other|third|fourth)(?:nd|rd|th)? (?:layer|block)", words)
    if every:
        return 1 / (_OTHERS.get(every[1]) or int(every[1]))
    if re.search(r"every (?:layer|block)", words):
        return 1.0
    if re.search(r"selective[ _-](?:layer|block)|alternate (?:layer|block)s?", words):
        return 0.5
    ratio = re.search(
        r"\b(\d)\s*/\s*(\d) (?:of )?(?:the )?(?:layer|block)|selective\D{0,9}(\d)/(\d)", words
    )
    if ratio:
        some, of = (int(number) for number in ratio.groups() if number)
        return min(1.0, some / of) if some and of else None
    of_stage = re.search(r"first (\d+) layers of each stage|recompute_num_layers\W*(\d+)", words)
    if of_stage:
        number = int(of_stage[1] or of_stage[2])
        stages = (line.count("pp") or 1) * (line.count("vpp") or 1)
        return min(1.0, number * stages / model.num_layers) if "uniform" not in words else 1.0
    return None


def _share_of_products(model: Model, experts: bool) -> float:
    """Part of a block's products, by their parameters at work, that its feed-forward layer has."""
    width = model.ffn_size
    if experts and model.experts is not None:
        width = model.experts.experts_per_token * model.experts.ffn_size
        width += model.experts.shared_ffn_size
    inner = (3 if model.gated else 2) * width
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return inner / (inner + heads)

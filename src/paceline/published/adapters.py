"""What a published run trains: everything, or adapters of low rank (LoRA and its kin).

Rank and matrices stand in words, in any column; what isn't said is what the system does by default,
and is named among what was inferred. Adapters of other kinds (prefixes, prompts, bottlenecks
between layers) can't be predicted, nor can matrices in 8 bits beside adapters.
"""

import re
from typing import Literal, NamedTuple

from paceline.config.finetune import Finetune
from paceline.published.networks import UnpredictableError
from paceline.published.software import year_of
from paceline.published.table import PublishedLine

_LOW_RANK = r"\b[a-z]{0,2}lora(?![a-z0-9])|\bdora\b|\bpeft\b"
_OTHERS = r"\badapters?\b|\badaptors?\b|\b(?:prefix|prompt|p)[ -]?tuning|\bia3\b|\(ia\)\^?3"
_DENIED = r"\b(?:no|without|not|vs\.?|than) (?:a )?[a-z]*lora|flops for (?:sft/)?lora"
_RANK = (
    r"(?<![a-z0-9])(?:rank|(?:lora|adapters?)[ _](?:of )?dim)\s*(?:[=:-]|of|is)?\s*(\d{1,4})\b"
    r"|(?<![a-z0-9])r\s*[=:]\s*(\d{1,4})\b"
)
_AND = r"\s*(?:,|/|\+|&|and|, and)\s*"

_QKV = ("q_proj", "k_proj", "v_proj")
_ALL = ("*_proj",)
_FFN = ("gate_proj", "up_proj", "down_proj")
# Ways to say several matrices at once, near the word for adapters; and names that stand anywhere.
_PHRASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"\ball[ -](?:the )?linear|\ball (?:matrices|projections)", _ALL),
    (r"attention[ -]only|attn[ -]only|only (?:on )?(?:the )?attention", ("attention.*",)),
    (r"(?:mlp|ffn|feed-?forward)[ -]only", _FFN),
    (r"\bqkv\b", _QKV),
    (rf"\bq(?:{_AND}k)?{_AND}v\b|\bquery{_AND}value", ("q_proj", "v_proj")),
    (rf"\bq{_AND}k{_AND}v\b", ("k_proj",)),
)
_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"\b(?:linear|attention)_qkv\b|\bc_attn\b|\bquery_key_value\b", _QKV),
    (r"\b(?:linear|output)_proj\b|\bo_proj\b", ("o_proj",)),
    (r"\blinear_fc1\b", ("gate_proj", "up_proj")),
    (r"\blinear_fc2\b", ("down_proj",)),
    *((rf"\b{name}\b", (name,)) for name in (*_QKV, *_FFN)),
)


class _Usual(NamedTuple):
    """What a system does where nothing is said."""

    rank: int
    targets: tuple[str, ...]


# Bridge and NeMo 2: src/megatron/bridge/peft/lora.py; NeMo before it: megatron_gpt_finetuning's
# lora_tuning. LitGPT: litgpt/finetune/lora.py. torchtune: recipes/configs/llama3_1.
# LLaMA-Factory: hparams/finetuning_args.py. Unsloth: models/llama.py, get_peft_model. Others are
# taken to use PEFT, whose default for Llama is two matrices (peft/utils/constants.py).
# NVIDIA's presets for benchmarks, of a 70B network, have fewer adapters than the library: Bridge,
# scripts/performance/configs/llama/llama3_llm_finetune.py, and recipes/llama/llama3.py.
_NEMO, _EARLY_NEMO, _NEMO2_SINCE = _Usual(32, _ALL), _Usual(32, _QKV), 2025.0
_PRESET, _NAMES_PRESET = _Usual(16, _QKV), r"\bpreset \w*_lora_config"
_USUAL = (
    (r"megatron|nemo|bridge|mcore", _NEMO),
    (r"lit-?gpt", _Usual(8, ("q_proj", "v_proj"))),
    (r"llama-?factory", _Usual(8, _ALL)),
    (r"unsloth", _Usual(16, _ALL)),
    (r"torchtune", _Usual(8, ("q_proj", "v_proj", "o_proj", *_FFN))),
)
_PEFT = _Usual(8, ("q_proj", "v_proj"))


def finetune_of(line: PublishedLine) -> tuple[Finetune, list[str]]:
    """What a line's run trains, and the names of what was inferred of it.

    Raises:
        UnpredictableError: adapters that can't be planned.
    """
    columns = ("workload", "model", "framework", "precision", "notes")
    words = "; ".join(line.text(column) for column in columns).lower()
    words = re.sub(_DENIED, "", words)
    ranked = re.search(_RANK, words)
    other = re.search(_OTHERS, words)
    if not re.search(_LOW_RANK, words):
        if other is None:
            return Finetune(), []
        if not ranked or not re.match("adapt", other[0]):
            raise UnpredictableError("adapters of another kind than LoRA")
    elif other is not None and not re.match("adapt", other[0]):
        raise UnpredictableError("adapters of another kind than LoRA")
    base = _base(words)
    usual, inferred = _usual(line), []
    rank, targets = int(ranked[1] or ranked[2]) if ranked else 0, _targets(words)
    if not 0 < rank <= 4096:
        rank = usual.rank
        inferred.append("adapter rank")
    if not targets:
        # Beside matrices in 4 bits all have adapters (https://arxiv.org/abs/2305.14314, 4).
        targets = usual.targets if base == "dense" else _ALL
        inferred.append("adapter targets")
    if targets == _ALL and line.number("experts") and usual is _NEMO:
        targets = (*_ALL, "experts.*")
    decomposed = bool(re.search(r"\bdora\b", words))
    return Finetune(
        method="lora", rank=rank, targets=targets, decomposed=decomposed, base=base
    ), inferred


def _usual(line: PublishedLine) -> _Usual:
    system = line.text("framework").lower()
    if re.search(_NAMES_PRESET, line.text("notes").lower()):
        return _PRESET
    found = next((usual for names, usual in _USUAL if re.search(names, system)), _PEFT)
    early = "nemo" in system and "bridge" not in system and year_of(line) < _NEMO2_SINCE
    return _EARLY_NEMO if early else found


def _targets(words: str) -> tuple[str, ...]:
    parts = re.split(r";|\. ", words)
    near = "; ".join(part for part in parts if re.search(rf"{_LOW_RANK}|\badapters?\b", part))
    found = [name for said, names in _PHRASES if re.search(said, near) for name in names]
    found += [name for said, names in _NAMES if re.search(said, words) for name in names]
    return _ALL if _ALL[0] in found else tuple(dict.fromkeys(found))


def _base(words: str) -> Literal["dense", "nf4", "nf4_double"]:
    """In what form the matrices beside adapters are kept; QLoRA's scales have 8 bits themselves."""
    if re.search(r"\bqlora|\bnf4-dq|double[ -]quant|nested[ -]quant", words):
        return "nf4_double"
    four = r"\bnf4\b|load_in_4bit|(?:\b(?:b?fp|int)4\b|4-?bit)[^;]*\b(?:base|weights)"
    if re.search(four, words):
        return "nf4"
    if re.search(r"\bint8\b|8-?bit (?:base|weights)|load_in_8bit", words):
        raise UnpredictableError("8-bit matrices beside adapters")
    return "dense"

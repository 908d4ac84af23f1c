"""Adapters of stacked experts as PEFT keeps them.

PEFT wraps the module of a layer's experts, once for each of their parameters that has adapters, the
first one innermost; `target_parameters` names them. It keeps the narrow matrices of all experts as
one, (experts x rank, in) and (out, rank x experts), the inner of two counted last
(`peft.tuners.lora.layer.ParamWrapper`).
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.config.huggingface import model_type_of
from paceline.config.model import Model
from paceline.models.adapters import DOWN, of_experts

_GATE_UP, _OTHER = ".adapters.gate_up_proj.", ".adapters.down_proj."


class StackedFormat(NamedTuple):
    """What a family does with the outputs of gate and up in one matrix."""

    is_in_turn: bool
    """As ours: those of gate and up in turn; else all of gate first."""

    @classmethod
    def of(cls, model: Model) -> "StackedFormat":
        """That of a network's family.

        Raises:
            InputError: transformers has none for a network with these experts.
        """
        return cls(model.experts is None or model_type_of(model) == "gpt_oss")

    def shape(self, name: str, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Of their tensor; ours are (experts, rank, in) and (experts, out, rank)."""
        if not of_experts(name):
            return ours
        num, rows, columns = ours
        return (num * rows, columns) if name.endswith(DOWN) else (rows, num * columns)

    def theirs(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """One of their tensors.

        Args:
            name: of ours.
            state: whole tensors by our names.
        """
        if not of_experts(name):
            return state[name]
        stack = state[name][_slots(name, state)]
        if name.endswith(DOWN):
            return stack.flatten(0, 1)
        if _GATE_UP in name and not self.is_in_turn:
            stack = torch.cat((stack[:, ::2], stack[:, 1::2]), 1)
        return stack.permute(1, 2, 0).flatten(1)

    def ours(self, name: str, theirs: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """One of our tensors, whole.

        Args:
            name: of ours.
            theirs: its values.
            state: has `slot_of_expert`.
        """
        if not of_experts(name):
            return theirs
        slots = _slots(name, state)
        if name.endswith(DOWN):
            stack = theirs.unflatten(0, (len(slots), -1))
        else:
            stack = theirs.unflatten(1, (-1, len(slots))).permute(2, 0, 1)
            if _GATE_UP in name and not self.is_in_turn:
                stack = torch.stack(stack.chunk(2, 1), 2).flatten(1, 2)
        return stack[slots.argsort()]


def their_parameter(name: str) -> str:
    """Their name of a stacked matrix of ours ("blocks.3.ffn.experts.down_proj")."""
    return name.replace("blocks.", "model.layers.", 1).replace(".ffn.", ".mlp.", 1)


def wrapper_of(name: str, adapters: Collection[str]) -> str:
    """Their module that wraps experts for the sake of an adapter.

    Args:
        name: of a tensor of an adapter of ours.
        adapters: all names of such tensors.
    """
    experts = their_parameter(name.partition(".adapters.")[0])
    is_inner = _GATE_UP in name and name.replace(_GATE_UP, _OTHER) in adapters
    return f"{experts}.base_layer" if is_inner else experts


def _slots(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """(experts,) where each expert lies in a stack."""
    return state[f"{name.partition('.experts.')[0]}.slot_of_expert"].to("cpu", torch.int64)

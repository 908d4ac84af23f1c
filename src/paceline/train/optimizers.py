"""The optimizer of a Job: AdamW (`optim`), or one of `update_rules`; groups of parameters.

Matrices decay, vectors (norm weights, biases) don't. `optim.groups` gives parameters settings of
their own, by patterns of their names. docs/optimizers.md is about all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.local_part import local_part
from paceline.config.errors import InputError
from paceline.config.layout import Layout
from paceline.config.optim import Optim, ParameterGroup
from paceline.train.optim import AdamW
from paceline.train.sharded_state import like, working_dtype
from paceline.train.update_rules import RULES, Group, Piece, num_parts, schedulefree_mean

Named = Iterable[tuple[str, nn.Parameter]]
# Elements of parameters that step at once: 64 MiB of fp32 gradients where these are made.
_CHUNK = 2**24
_ENDS = frozenset(
    [
        "embed",
        "embedding",
        "embeddings",
        "embed_tokens",
        "wte",
        "wpe",
        "head",
        "lm_head",
        "classifier",
        "fc",
    ]
)
"""Modules whose matrices Muon leaves to AdamW, by the last part of their names."""


def build_optimizer(
    named: Named, optim: Optim, layout: Layout, lr_factor: Callable[[str], float] = lambda _: 1.0
) -> "AdamW | RuledOptimizer":
    """The Job's optimizer over the trainable parameters, whose state is what the layout says.

    Args:
        named: the parameters this rank holds, plain or DTensors of any meshes.
        optim: settings of the update.
        layout: concrete: `optimizer_state`, `offload` and `precision` are read.
        lr_factor: maps names to what the model multiplies their learning rates by.
    """
    groups = parameter_groups(named, optim, lr_factor)
    if optim.name != "adamw":
        arithmetic = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = arithmetic.get(layout.precision, torch.bfloat16)
        return RuledOptimizer(groups, {"lr": optim.lr, "arithmetic": dtype})
    return AdamW(
        groups,
        {"lr": optim.lr, "fused": True},
        is_coded=layout.optimizer_state == "8bit",
        # Where parameters are on the host, so is what belongs to them.
        is_on_host="optimizer" in layout.offload and "params" not in layout.offload,
    )


def parameter_groups(named: Named, optim: Optim, lr_factor: Callable[[str], float]) -> list[Group]:
    """Trainable parameters that step by the same settings, together."""
    groups: dict[tuple[Any, ...], Group] = {}
    for name, p in named:
        if p.requires_grad:
            settings = _settings(name, p, optim)
            settings["lr_factor"] *= lr_factor(name)
            group = groups.setdefault(tuple(settings.values()), {"params": [], **settings})
            group["params"].append(p)
    return list(groups.values())


def _settings(name: str, p: Tensor, optim: Optim) -> dict[str, Any]:
    own = group_of(name, optim) or ParameterGroup(pattern=name)
    is_matrix = p.ndim >= 2 and not name.endswith("bias")  # of experts, biases are stacks too
    decay = optim.weight_decay if is_matrix else 0.0
    rule = optim.name
    if rule == "muon" and (own.adamw or not is_matrix or _ENDS & set(name.split(".")[-2:-1])):
        rule = "adamw"
    return {
        "rule": rule,
        "lr_factor": own.lr_factor,
        "weight_decay": decay if own.weight_decay is None else own.weight_decay,
        "betas": own.betas or optim.betas,
        "eps": optim.eps,
        "momentum": optim.momentum if own.momentum is None else own.momentum,
        "nesterov": optim.nesterov,
        "trust": optim.trust,
    }


def group_of(name: str, optim: Optim) -> ParameterGroup | None:
    """The group that a parameter is in; None: in none."""
    return next((each for each in optim.groups if fnmatchcase(name, each.pattern)), None)


def check_groups(names: Iterable[str], optim: Optim) -> None:
    """Refuse groups without parameters.

    Args:
        names: of all parameters of the network.

    Raises:
        InputError: a pattern fits none of them, or none that is left by groups before it.
    """
    found = [group_of(name, optim) for name in names]
    for each in optim.groups:
        if not any(each is one for one in found):
            raise InputError(
                f'pattern = "{each.pattern}" of optim.groups fits no parameter, but for those that '
                "groups before it have: correct it, or leave the group out."
            )


class RuledOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups each name one of `update_rules.RULES` ("rule").

    `state[p]` holds what the rule keeps, and of a parameter of 16 bits its fp32 "master", which is
    what steps: DTensors where p is one. The host must know whether a step is taken.
    """

    is_on_host = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for params in _chunks([p for p in group["params"] if p.grad is not None]):
                pieces = [self._piece(p) for p in params]
                RULES[group["rule"]](pieces, group)
                for piece in pieces:
                    if "master" in piece.state:
                        local_part(piece.parameter).copy_(piece.values)

    def _piece(self, p: nn.Parameter) -> Piece:
        assert p.grad is not None
        state: dict[str, Any] = self.state[p]
        local, dtype = local_part(p), working_dtype(p)
        if dtype != p.dtype and "master" not in state:
            state["master"] = like(p, local.to(dtype))
        values = local_part(state.get("master", p))
        return Piece(p, values, local_part(p.grad).to(dtype), state)

    def saved_state(self, p: nn.Parameter) -> dict[str, Any]:
        """What a checkpoint keeps: the live tensors."""
        return dict(self.state[p])

    @torch.no_grad()
    def means(self) -> dict[nn.Parameter, Tensor]:
        """The weights that schedule-free parameters stand for, of each this rank's part."""
        return {
            p: schedulefree_mean(
                local_part(self.state[p].get("master", p.detach())),
                self.state[p],
                group["betas"][0],
            )
            for group in self.param_groups
            for p in group["params"]
        }


def _chunks(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut alike on all ranks, which exchange chunk by chunk: by sizes that they agree on."""
    chunk: list[nn.Parameter] = []
    size = 0
    for p in params:
        chunk.append(p)
        size += p.numel() // num_parts(p)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk

"""Even out the load of experts while training: biases of the choice, and moves between ranks.

After each step the loads of all ranks are added up. The bias of an expert that got fewer tokens
than the mean grows, that of others shrinks (https://arxiv.org/abs/2408.15664). Every
`layout.rebalance_every` steps, experts change ranks where that makes the busiest rank's load lower:
few of them, with weights and optimizer state, bit for bit, so that what is computed stays the same.

With `comm.ep.hot_experts` all ranks of ep get copies of a few experts of each layer
(`parallel.hot_experts`): of those that were hot in the first step of this process, and every
`comm.ep.hot_every` steps of those that were hot since the last choice.
"""

import torch
from torch import Tensor, nn

from paceline.comm.mesh import Meshes
from paceline.config.job import Job
from paceline.models.moe import updated_bias
from paceline.parallel.ep import (
    apply_placement,
    copy_experts,
    expert_layers,
    expert_loads,
    slots_of_experts,
)
from paceline.plan.experts import hot_experts, move_experts


class ExpertBalancer:
    """What the layers of experts on this rank need around a step."""

    def __init__(self, job: Job, module: nn.Module, meshes: Meshes | None) -> None:
        experts = job.model.mixture
        self._module, self._meshes = module, meshes
        self._layers = expert_layers(module)
        self._speed = 0.0
        if experts is not None and not job.finetune.is_adapted:  # whose base stays as it is
            self._speed = experts.bias_update_speed
        self._every, self._hot = job.layout.rebalance_every, job.comm.ep
        self._num_ep, self._num_tp = job.layout.ep, job.layout.tp
        self._since_moves: Tensor | float = 0.0  # loads, (layers, experts)
        self._since_choice: Tensor | float = 0.0
        self._copied: list[Tensor] | None = None  # experts of each layer

    def before_step(self, scale: Tensor) -> None:
        """Let the balance loss count in gradients as much as the loss of a micro-batch does."""
        for layer in self._layers:
            # Each tp rank adds the same gradient, and their sum is taken.
            layer.balance_scale.fill_(1 / self._num_tp).mul_(scale)

    def after_step(self, done: int, optimizer: torch.optim.Optimizer) -> None:
        """Follow the loads of the step, `done` steps into the run."""
        if not self._layers or not (self._speed or self._every or self._hot.hot_experts):
            return
        data = self._meshes.dense["dp", "fsdp"] if self._meshes is not None else None
        loads = expert_loads(self._module, data)  # (layers, experts)
        for layer, load in zip(self._layers, loads, strict=True):
            if self._speed:
                layer.choice_bias.copy_(updated_bias(layer.choice_bias, load, self._speed))
        self._since_moves = loads + self._since_moves
        moves = self._every > 0 and done % self._every == 0
        if moves:
            self._rebalance(self._since_moves, optimizer)
            self._since_moves = 0.0
        if self._hot.hot_experts:
            self._follow_hot(loads, done, moved=moves)

    def _rebalance(self, loads: Tensor, optimizer: torch.optim.Optimizer) -> None:
        assert self._meshes is not None
        assert self._meshes.experts is not None
        now = slots_of_experts(self._module).numpy()
        slots = torch.from_numpy(move_experts(now, loads.double().cpu().numpy(), self._num_ep))
        apply_placement(self._module, optimizer, slots, self._meshes.experts["ep"])

    def _follow_hot(self, loads: Tensor, done: int, *, moved: bool) -> None:
        self._since_choice = loads + self._since_choice
        if self._copied is None or done % self._hot.hot_every == 0:
            now, seen = slots_of_experts(self._module).numpy(), self._since_choice.double()
            chosen = hot_experts(now, seen.cpu().numpy(), self._num_ep, self._hot.hot_experts)
            self._copied, self._since_choice = [torch.from_numpy(each) for each in chosen], 0.0
        elif not moved:
            return
        copy_experts(self._module, self._copied)

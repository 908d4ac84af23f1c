"""Even out the load of experts while training: biases of the choice, and moves between ranks.

After each step the loads of all ranks are added up. The bias of an expert that got fewer tokens
than the mean grows, that of others shrinks (https://arxiv.org/abs/2408.15664). Every
`layout.rebalance_every` steps, experts change ranks where that makes the busiest rank's load lower:
few of them, with weights and optimizer state, bit for bit, so that what is computed stays the same.
"""

import torch
from torch import Tensor, nn

from paceline.comm.mesh import Meshes
from paceline.config.job import Job
from paceline.models.moe import updated_bias
from paceline.parallel.ep import apply_placement, expert_layers, expert_loads, slots_of_experts
from paceline.plan.experts import move_experts


class ExpertBalancer:
    """What the layers of experts on this rank need around a step."""

    def __init__(self, job: Job, module: nn.Module, meshes: Meshes | None) -> None:
        experts = job.model.mixture
        self._module, self._meshes = module, meshes
        self._layers = expert_layers(module)
        self._speed = 0.0
        if experts is not None and not job.finetune.is_adapted:  # whose base stays as it is
            self._speed = experts.bias_update_speed
        self._every = job.layout.rebalance_every
        self._num_ep, self._num_tp = job.layout.ep, job.layout.tp
        self._loads: Tensor | None = None

    def before_step(self, scale: Tensor) -> None:
        """Let the balance loss count in gradients as much as the loss of a micro-batch does."""
        for layer in self._layers:
            # Each tp rank adds the same gradient, and their sum is taken.
            layer.balance_scale.fill_(1 / self._num_tp).mul_(scale)

    def after_step(self, done: int, optimizer: torch.optim.Optimizer) -> None:
        """Follow the loads of the step, `done` steps into the run."""
        if not self._layers or not (self._speed or self._every):
            return
        data = self._meshes.dense["dp", "fsdp"] if self._meshes is not None else None
        loads = expert_loads(self._module, data)  # (layers, experts)
        for layer, load in zip(self._layers, loads, strict=True):
            if self._speed:
                layer.choice_bias.copy_(updated_bias(layer.choice_bias, load, self._speed))
        self._loads = loads if self._loads is None else self._loads + loads
        if self._every and done % self._every == 0:
            self._rebalance(self._loads, optimizer)
            self._loads = None

    def _rebalance(self, loads: Tensor, optimizer: torch.optim.Optimizer) -> None:
        assert self._meshes is not None
        assert self._meshes.experts is not None
        now = slots_of_experts(self._module).numpy()
        slots = torch.from_numpy(move_experts(now, loads.double().cpu().numpy(), self._num_ep))
        apply_placement(self._module, optimizer, slots, self._meshes.experts["ep"])

"""The server's optimizer, where clients tell gradients: the Job's, over what is shared."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.config.job import read_job
from paceline.config.layout import Layout
from paceline.federate.grid import Floats
from paceline.federate.optimizer_state import state_of, take_state
from paceline.federate.shared_file import Tensors
from paceline.train.learning_rates import learning_rate
from paceline.train.optimizers import build_optimizer

JOB_FILE = "job.toml"
"""Of a federation: the Job of all, whose steps are the rounds."""


class ServerOptimizer:
    """Steps as a run of the Job does, with gradients that it is given.

    Args:
        folder: the federation's.
        tensors: what is shared, as it is before the first step.
    """

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        job = read_job(folder / JOB_FILE, [])
        self._optim, self._num_steps = job.optim, job.train.steps
        self._parameters = {
            name: nn.Parameter(torch.from_numpy(each.copy())) for name, each in tensors.items()
        }
        # Groups say which parameters are trained, and others aren't among these.
        alike = self._optim.replace(groups=())
        self._optimizer = build_optimizer(self._parameters.items(), alike, Layout())

    @property
    def state(self) -> dict[str, Tensor]:
        """What it has besides the tensors, after a step."""
        return state_of(self._optimizer)

    def go_on(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` was."""
        take_state(self._optimizer, state)

    def step(self, index: int, gradient: Floats) -> Tensors:
        """The tensors after step `index` (from 0).

        Args:
            gradient: (n,) the mean, as `shared_file.vector_of` lays out all tensors.
        """
        parameters = list(self._parameters.values())
        parts = torch.from_numpy(gradient).float().split([each.numel() for each in parameters])
        for each, part in zip(parameters, parts, strict=True):
            each.grad = part.view_as(each)
        if self._optim.clip_norm:
            nn.utils.clip_grad_norm_(parameters, self._optim.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._optim, index, self._num_steps)
        self._optimizer.step()
        return {name: each.detach().numpy() for name, each in self._parameters.items()}

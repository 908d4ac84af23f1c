"""The optimizer, its learning-rate schedule and gradient clipping.

AdamW with decoupled weight decay (https://arxiv.org/abs/1711.05101): torch's fused kernel. Matrices
decay, vectors (norm weights, biases) don't. The warm-up-stable-decay schedule is that of MiniCPM
(https://arxiv.org/abs/2404.06395).
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from paceline.config.job import Optim


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`: a pure function, so it needs no state.

    Linear warm-up; then cosine to final_lr_ratio x lr, or constant, or constant with a linear fall
    over the last decay_steps.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    floor = optim.lr * optim.final_lr_ratio
    if optim.schedule == "cosine":
        progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps - 1)
        height = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif optim.schedule == "wsd" and optim.decay_steps:
        height = min(1.0, max(0, steps - 1 - step) / optim.decay_steps)
    else:
        height = 1.0
    return floor + (optim.lr - floor) * height


def build_optimizer(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; keeps fp32 masters where these are bf16."""
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = MasterAdamW if any(p.dtype == torch.bfloat16 for p in params) else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )


class MasterAdamW(torch.optim.AdamW):
    """AdamW that steps an fp32 master copy of bf16 parameters and rounds the result into them.

    bf16 keeps 8 bits of mantissa: an update below 1/256 of a weight would be lost without the
    master. Master and moments live in the optimizer's state, so they are checkpointed with it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the masters with fp32 gradients, then round them into the parameters."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in params]
            masters = [state["master"] for state in states]
            adamw(
                masters,
                [p.grad.float() for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            torch._foreach_copy_([_local(p) for p in params], [_local(m) for m in masters])

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["master"] = p.detach().float()
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
        return state


def _local(tensor: Tensor) -> Tensor:
    """This rank's part: torch's multi-tensor copy has no rule for DTensors."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(module: nn.Module, clip_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most clip_norm; 0 leaves them alone.

    Returns:
        the norm before clipping, () on the device; over shards it is that of the whole gradient.
    """
    params = [p for p in module.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if clip_norm:
        nn.utils.clip_grads_with_norm_(params, clip_norm, norm)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def skip_if(optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
    """Make the next step of a fused optimizer do nothing where `bad` (() bool) is true.

    The decision stays on the device: the host need not wait for it. This is the mechanism by which
    torch's GradScaler skips overflowed steps.
    """
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]

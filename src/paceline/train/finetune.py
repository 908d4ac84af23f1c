"""Fine-tuning by adapters: what they can't have, what they begin with, how they leave a Run."""

import json

import torch
from torch import nn

from paceline.config.errors import InputError
from paceline.config.finetune import BLOCK, Finetune
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.models.adapters import adapt, adapted_names, init_adapters, of_experts
from paceline.models.decoder import Decoder
from paceline.models.peft_format import check_adapters, load_adapters
from paceline.parallel.tp import style_of
from paceline.train.rollouts import load_reward


def decoder_to_train(model: Model, job: Job) -> Decoder:
    """The network without memory, with the Job's adapters."""
    with torch.device("meta"):
        decoder = Decoder(model)
        if job.finetune.is_adapted:
            adapt(decoder, job.finetune)
    return decoder


def num_trained(module: nn.Module) -> int:
    """Parameters that are trained."""
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


def train_flops_per_token(model: Model, job: Job, decoder: Decoder) -> float:
    """Model FLOPs of forward and backward, mean per token.

    Matrices that stay as they are need no gradient of their own: a product less for each, of three.
    """
    whole = model.train_flops_per_token(job.train.seq_len)
    if not job.finetune.is_adapted:
        return whole
    adapters = 0.0
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            mixture = model.experts if of_experts(name) else None
            share = 1.0 if mixture is None else mixture.experts_per_token / mixture.num_experts
            adapters += share * parameter.numel()
    return whole - 2 * model.num_matmul_params + 6 * adapters


def check_finetune(model: Model, job: Job) -> None:
    """Look whether a Job's adapters can be trained.

    Raises:
        InputError: there is nothing to adapt, the layout can't have them, or those to start from
            are of another network or of other settings.
    """
    finetune, layout = job.finetune, job.layout
    if finetune.objective != "likelihood":
        _check_objective(job)
    if not finetune.is_adapted:
        return
    if job.train.weights is None:
        raise InputError(
            'finetune.method = "lora" adapts weights, and there are none: set train.weights '
            '(true: those of model.hf), or use method = "full".'
        )
    with torch.device("meta"):
        names = adapted_names(Decoder(model), finetune)
    for name, value, why in (
        ("decomposed", finetune.decomposed, "needs whole rows of matrices"),
        ("dropout", finetune.dropout, "would differ among ranks that share a layer"),
    ):
        if value and layout.tp != 1:
            raise InputError(
                f"finetune.{name} = {str(value).lower()} {why}, which layout.tp = {layout.tp} cuts:"
                f" set tp = 1, or leave {name} out."
            )
    if any(of_experts(name) for name in names):
        _check_experts(job)
    without = set(range(model.num_layers)) - {int(name.split(".")[1]) for name in names}
    if without and layout.pp != 1:
        raise InputError(
            f"finetune.targets leaves block {min(without)} without an adapter, and each stage of "
            f"layout.pp = {layout.pp} needs something to train: name matrices of every block."
        )
    if finetune.is_narrow:
        _check_narrow(model, job, names)
    if finetune.adapters is not None:
        check_adapters(model, finetune, finetune.adapters)


def _check_experts(job: Job) -> None:
    """Look whether routed experts can have adapters.

    Raises:
        InputError: of another form than theirs, or of a rank that ranks can't share.
    """
    finetune, layout = job.finetune, job.layout
    plain = Finetune()
    for name in ("decomposed", "dropout", "base"):
        value = getattr(finetune, name)
        if value != getattr(plain, name):
            raise InputError(
                f"finetune.{name} = {json.dumps(value)} is not there for the routed experts that "
                "finetune.targets names: leave them out of it, or leave "
                f"finetune.{name} out."
            )
    left = -(-layout.fsdp * layout.cp // layout.ep)
    if layout.ep != 1 and layout.fsdp != 1 and finetune.rank % left:
        raise InputError(
            f"finetune.rank = {finetune.rank} of adapters of experts can't be sharded over the "
            f"{left} ranks that layout.ep = {layout.ep} leaves of fsdp x cp = {layout.fsdp} x "
            f"{layout.cp}: make it a multiple of {left}, or change ep or fsdp."
        )


def _check_narrow(model: Model, job: Job, names: list[str]) -> None:
    """Look whether matrices can be kept in 4 bits.

    Raises:
        InputError: blocks of weights don't fill a row, or a rank's part of it.
    """
    base, tp = job.finetune.base, job.layout.tp
    if base == "nf4_double" and tp != 1:
        raise InputError(
            'finetune.base = "nf4_double" shares scales of scales over whole rows, which layout.tp '
            f'= {tp} cuts: use base = "nf4", or tp = 1.'
        )
    with torch.device("meta"):
        decoder = Decoder(model)
    styles = decoder.placements()
    for name in names:
        layer = decoder.get_submodule(name)
        assert isinstance(layer, torch.nn.Linear)
        inputs = layer.in_features
        cut = tp if style_of(name, styles) in ("row", "summand") else 1
        if inputs % (BLOCK * cut):
            of_tp = "" if cut == 1 else f", which layout.tp = {tp} cuts"
            raise InputError(
                f'finetune.base = "{base}" gives {BLOCK} inputs of a row one scale, and {name} '
                f"has {inputs} of them{of_tp}: leave it out of finetune.targets, or use base = "
                '"dense".'
            )


def _check_objective(job: Job) -> None:
    """Look whether a layout can do what a reward or a preference needs.

    Raises:
        InputError: it cuts texts, or a network that makes them.
    """
    objective, grpo = job.finetune.objective, job.finetune.grpo
    if objective == "grpo":
        assert grpo.reward is not None
        load_reward(grpo.reward)
        num_ranks = job.layout.num_data_ranks
        odd = next((axis for axis in ("pp", "cp", "ep") if getattr(job.layout, axis) != 1), None)
        if odd or job.layout.precision == "fp8" or "params" in job.layout.offload:
            why = f"{odd} = {getattr(job.layout, odd)}" if odd else "fp8, or parameters on the host"
            raise InputError(
                'finetune.objective = "grpo" makes texts with a whole network on each rank, which '
                f"is not gathered from a layout with {why}: use dp, fsdp and tp."
            )
        if job.train.global_batch % (grpo.group * num_ranks):
            raise InputError(
                f"train.global_batch = {job.train.global_batch} can't be cut into groups of "
                f"finetune.grpo.group = {grpo.group} on {num_ranks} ranks: make it a multiple."
            )
    if job.layout.cp != 1:
        raise InputError(
            f'finetune.objective = "{objective}" adds up texts, which layout.cp = {job.layout.cp} '
            "cuts: set cp = 1."
        )


def fill_adapters(job: Job, decoder: nn.Module) -> None:
    """Give the adapters of (a stage of) a decoder, whose matrices are filled, their values."""
    assert isinstance(decoder, Decoder)
    init_adapters(decoder, torch.Generator().manual_seed(job.train.seed))
    if job.finetune.adapters is not None:
        load_adapters(decoder, job.finetune.adapters)

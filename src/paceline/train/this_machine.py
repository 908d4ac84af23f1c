"""A Job on this machine: whether it can be trained here, and as which concrete Job.

It imports no torch, so that `paceline train --show` answers at once.
"""

from paceline.comm.rank_env import ranks_from_env
from paceline.config.errors import InputError
from paceline.config.frozen import size
from paceline.config.hardware import Cluster
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.config.recommender import Dlrm
from paceline.config.vision import EfficientNet, ResNet
from paceline.machine.discovery import this_machine
from paceline.plan.resolve import Plan
from paceline.plan.search.choose import plan_job


def resolve_on_this_machine(job: Job) -> Plan:
    """Resolve a Job for this machine, or for the ranks that torchrun or srun gave.

    Raises:
        InputError: the Job can't run here.
    """
    if problem := why_only_planned(job):
        raise InputError(problem)
    machine = this_machine()
    ranks = ranks_from_env(machine.known_device.kind)
    if ranks is not None:
        num_nodes = ranks.world_size // ranks.local_world_size
        machine = machine.replace(devices_per_node=ranks.local_world_size, num_nodes=num_nodes)
    plan = plan_job(job, machine)
    _must_be_here(plan.job.cluster, machine)
    if ranks is not None and plan.job.layout.num_ranks != ranks.world_size:
        raise InputError(
            f"the Job is for {plan.job.layout.num_ranks} ranks but {ranks.world_size} were "
            'started: set [cluster] to "auto" or start as many.'
        )
    return plan


def why_only_planned(job: Job) -> str | None:
    """Why what the planner knows can't be trained (on), one sentence; None where it can."""
    model, device = job.model, job.cluster.device
    if isinstance(model, Dlrm) and job.comm.local.method != "none":
        return (
            f'comm.local.method = "{job.comm.local.method}" needs a whole network on every rank, '
            'and a recommender\'s tables are shared out: set it to "none".'
        )
    if device != "auto" and device.kind == "other":
        return (
            f'cluster.device = "{device.name}" can be planned for, not trained on: PyTorch runs on '
            'CUDA devices and CPUs here, so name one of these or leave it to "auto".'
        )
    if isinstance(model, EfficientNet):
        return (
            'model.family = "efficientnet" can be planned, not trained yet: train your own module '
            "of it with paceline.train."
        )
    if isinstance(model, ResNet) and model.squeeze_excite:
        return (
            "model.squeeze_excite = true can be planned, not trained yet: leave it out, or train "
            "your own module with paceline.train."
        )
    if isinstance(model, Model) and not model.gated:
        return (
            "model.gated = false (GELU) can be planned, not trained yet: set gated = true for "
            "SwiGLU, or train your own module with paceline.train."
        )
    if isinstance(model, Model) and not model.causal:
        return (
            "model.causal = false can be planned, not trained yet: set causal = true, or train "
            "your own module with paceline.train."
        )
    return None


def _must_be_here(wanted: Cluster, machine: Cluster) -> None:
    """A Job may ask for another number of CPU ranks than the rule gives, not for other devices."""
    asked, here = wanted.known_device, machine.known_device
    if asked.kind != here.kind:
        raise InputError(
            f"the Job is for {asked.name} but this machine has {here.name}: "
            'set cluster.device = "auto", or run it on such a machine.'
        )
    num_asked, num_here = size(wanted.devices_per_node), size(machine.devices_per_node)
    if asked.kind == "cuda" and num_asked > num_here:
        raise InputError(
            f"cluster.devices_per_node = {num_asked} but this machine has "
            f'{num_here}: lower it or set it to "auto".'
        )
    if wanted.num_nodes != machine.num_nodes:
        raise InputError(
            f"cluster.num_nodes = {wanted.num_nodes} but this start reaches {machine.num_nodes}: "
            "start it with torchrun or srun on all nodes."
        )

"""A JobSpec on this machine: whether it can be trained here, and as which Job.

It imports no torch, so that `paceline train --show` answers at once.
"""

from paceline.comm.rank_env import ranks_from_env
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobSpec
from paceline.machine.discovery import this_machine
from paceline.plan.resolve import Plan
from paceline.plan.search.choose import plan_job
from paceline.render.figures import bytes_text


def resolve_on_this_machine(job: JobSpec, *, explained: bool = True) -> Plan:
    """Resolve a JobSpec for this machine, or for the ranks that torchrun or srun gave.

    Args:
        job: what a person asks for.
        explained: as of `plan_job`.

    Raises:
        InputError: the Job can't run here.
    """
    if problem := why_only_planned(job):
        raise InputError(problem)
    here = machine = this_machine()
    ranks = ranks_from_env(machine.device.kind)
    given_nodes = 1 if ranks is None else ranks.world_size // ranks.local_world_size
    if job.elastic.is_on:  # its agents start the ranks
        machine, ranks = machine.replace(num_nodes=_expected_nodes(job, given_nodes)), None
    elif ranks is not None:
        machine = machine.replace(devices_per_node=ranks.local_world_size, num_nodes=given_nodes)
    plan = plan_job(job, machine, explained=explained)
    _must_be_here(plan.job.cluster, machine)
    _must_fit(plan.job, here)
    if ranks is not None and plan.job.layout.num_ranks != ranks.world_size:
        raise InputError(
            f"the Job is for {plan.job.layout.num_ranks} ranks but {ranks.world_size} were "
            'started: set [cluster] to "auto" or start as many.'
        )
    return plan


def _expected_nodes(job: JobSpec, given: int) -> int:
    """Nodes that an elastic run is planned for: it can't count those that come later."""
    asked = job.cluster.num_nodes
    if asked != "auto":
        return asked
    return max(given, job.elastic.min_nodes, job.elastic.max_nodes)


def why_only_planned(job: JobSpec) -> str | None:
    """Why what the planner knows can't be trained (on), one sentence; None where it can."""
    device = job.cluster.device
    if device != "auto" and device.kind == "other":
        return (
            f'cluster.device = "{device.name}" can be planned for, not trained on: PyTorch runs on '
            'CUDA devices and CPUs here, so name one of these or leave it to "auto".'
        )
    return job.model.why_only_planned(job.comm)


def _must_be_here(wanted: Cluster, machine: Cluster) -> None:
    """A Job may ask for another number of CPU ranks than the rule gives, not for other devices."""
    asked, here = wanted.device, machine.device
    if asked.kind != here.kind:
        raise InputError(
            f"the Job is for {asked.name} but this machine has {here.name}: "
            'set cluster.device = "auto", or run it on such a machine.'
        )
    num_asked, num_here = wanted.devices_per_node, machine.devices_per_node
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


def _must_fit(job: Job, here: Cluster) -> None:
    """Refuse a model whose lasting state alone is more than the ranks' memory.

    It is the least that a rank can have of it: gradients, activations and buffers come on top. What
    is too large by these ends while it trains, and is explained then (`explain.out_of_memory`).

    Args:
        here: this machine with as many ranks as it takes by itself; CPU ranks share its memory.
    """
    layout, model, found = job.layout, job.model, here.device.memory_bytes
    is_cuda = here.device.kind == "cuda"
    if model.num_params is None or found is None or (layout.offload and is_cuda):
        return
    ranks = 1 if is_cuda else job.cluster.devices_per_node / here.devices_per_node
    memory = found.value / ranks
    # Experts and tables are shared out over replicas too; of a row the optimizer keeps little.
    replicas = 1 if model.mixture is not None or model.has_tables else layout.dp
    moments = 2 if layout.optimizer_state == "8bit" else job.optim.state_bytes(1.0)
    bytes_per_param = 4 if model.has_tables else 4 + moments
    least = model.num_params * bytes_per_param * replicas / layout.num_ranks
    if least > memory:
        raise InputError(
            f"parameters and optimizer state take {bytes_text(least)} or more on each rank, which "
            f"has {bytes_text(memory)}: make the model smaller, or share it out "
            "over more ranks."
        )

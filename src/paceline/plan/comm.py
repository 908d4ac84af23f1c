"""Comm: who carries out the exchanges of a layout, where the Job says "auto".

In what form data ranks exchange gradients needs a prediction: `search.gradient_comm` chooses that,
and here it is exact sums.
"""

from paceline.config.comm import Comm, LocalUpdates
from paceline.config.errors import InputError
from paceline.config.feasible_comm import check_comm
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.config.layout import Layout
from paceline.plan.collectives import AlgorithmChoice, choose_algorithm
from paceline.plan.points import decoder_of

_VALUE_BYTES = 4
"""Gradients are reduced in fp32, or in fp64 where everything is."""
_NO_PREDICTION = "what another form would gain is not known"
_NO_ROUNDS = "what a round takes on these links is not known"
_UNKNOWN_UNIT_BYTES = 16 * 2**20
"""What is reduced at once of a model whose layers are not known. Assumed."""


def resolve_comm(job: JobSpec, layout: Layout, cluster: Cluster) -> tuple[Comm, dict[str, str]]:
    """The Job's comm without "auto", and why.

    Args:
        job: whose model and comm count.

    Raises:
        InputError: the layout can't communicate so.
    """
    check_comm(job.comm, layout, may_be_alone=job.elastic.is_on)
    if job.comm.priority == "high" and cluster.device.kind != "cuda":
        raise InputError(
            'comm.priority = "high" is of the streams of CUDA devices and the cluster has '
            f'{cluster.device.name}: leave it out or set it to "normal".'
        )
    dp, fsdp, local = job.comm.dp, job.comm.fsdp, job.comm.local
    reasons: dict[str, str] = {}
    if local.is_open:
        reasons |= dict.fromkeys(open_rounds(local), _NO_ROUNDS)
        local = local.settled
    if dp.compress == "auto":
        dp = dp.replace(compress="none")
        reasons["comm.dp.compress"] = _NO_PREDICTION
    if dp.algorithm == "auto":
        dp = dp.replace(algorithm="backend")
        reasons["comm.dp.algorithm"] = "it overlaps with the backward pass as DDP does"
    if fsdp.compress == "auto":
        fsdp = fsdp.replace(compress="none")
        reasons["comm.fsdp.compress"] = _NO_PREDICTION
    if fsdp.algorithm == "auto":
        choice = _over_shards(job, layout, cluster)
        fsdp = fsdp.replace(algorithm=choice.algorithm)
        reasons["comm.fsdp.algorithm"] = choice.reason
    return job.comm.replace(dp=dp, fsdp=fsdp, local=local).settled, reasons


def open_rounds(local: LocalUpdates) -> list[str]:
    """The settings of local updates that are left to the planner."""
    names = ("every", "overlap_steps", "compress")
    return [f"comm.local.{name}" for name in names if getattr(local, name) == "auto"]


def _over_shards(job: JobSpec, layout: Layout, cluster: Cluster) -> AlgorithmChoice:
    if layout.fsdp == 1:
        return AlgorithmChoice("backend", "nothing is sharded", {})
    shards = layout.fsdp * layout.cp
    try:
        return choose_algorithm(
            cluster, "reduce_scatter", _unit_bytes(job, layout), shards, layout.tp
        )
    except InputError as error:
        return AlgorithmChoice("backend", f"nothing to choose by: {error}", {})


def _unit_bytes(job: JobSpec, layout: Layout) -> float:
    """Of the gradients of one layer, which are reduced together."""
    if not job.model.knows_layers:
        return _UNKNOWN_UNIT_BYTES
    model = decoder_of(job)
    return model.num_params * _VALUE_BYTES / model.num_layers / layout.tp

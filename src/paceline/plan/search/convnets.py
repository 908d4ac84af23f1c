"""Choose how a convolutional network trains on a cluster: replicas, and what a person left open.

How it works: the layouts are few (micro-batches that divide the batch, eager or compiled, what
precision is asked for), so that all of them are predicted. What is fixed is kept.
"""

from collections.abc import Iterator
from itertools import product

from paceline.config.comm import Comm
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.layout import Layout
from paceline.config.stack import Stack
from paceline.config.vision import ConvNet
from paceline.plan.convnet.kernels import VALUE_BYTES
from paceline.plan.convnet.step import convnet_times, predict_convnet, training_of
from paceline.plan.prediction import Prediction
from paceline.plan.resolve import divisors
from paceline.plan.search.space import SearchConstraints

_GRADIENT_BYTES = 4


def predict_all(
    network: ConvNet,
    cluster: Cluster,
    global_batch: int,
    constraints: SearchConstraints | None = None,
    comm: Comm | None = None,
) -> tuple[Prediction, ...]:
    """Every layout of replicas that agrees with the constraints, the fastest first.

    Args:
        network: the convolutions.
        cluster: concrete.
        global_batch: images of a step.
        constraints: of its `free`, only precision has a meaning here.
        comm: of the Job.

    Raises:
        InputError: another way to split is fixed, the batch can't be shared out, or the speed of
            the device is not known.
    """
    constraints = constraints or SearchConstraints()
    unknown = [name for name in constraints.free if name != "precision"]
    if unknown:
        raise InputError(
            f"free: {unknown[0]} has no effect on a convolutional network, which is planned with "
            "replicas only: leave it out."
        )
    found = [
        predict_convnet(network, cluster, layout, global_batch, comm=comm)
        for layout in _layouts(cluster, global_batch, constraints)
    ]
    return tuple(sorted(found, key=lambda one: one.step_s))


def _layouts(
    cluster: Cluster, global_batch: int, constraints: SearchConstraints
) -> Iterator[Layout]:
    ranks, layout = cluster.num_devices, constraints.layout
    if layout.dp not in ("auto", ranks):
        raise InputError(
            f"layout.dp = {layout.dp} was given for {ranks} devices: a convolutional network is "
            f'planned with one replica on each, so use dp = {ranks} or "auto".'
        )
    if global_batch % ranks:
        raise InputError(
            f"train.global_batch = {global_batch} can't be shared out over {ranks} replicas: use a "
            f"multiple of {ranks}."
        )
    each = global_batch // ranks
    batches = [
        n for n in constraints.counts("micro_batch", divisors(each)).tolist() if each % n == 0
    ]
    if not batches:
        raise InputError(
            f"no micro-batch that is allowed divides the {each} images of a device: use one of "
            f"{', '.join(map(str, divisors(each)))}."
        )
    given = {name: value for name, value in vars(layout).items() if value != "auto"}
    for batch, precision, compiled in product(
        batches, _precisions(cluster, constraints), _compiled(cluster, constraints)
    ):
        chosen = {"micro_batch": batch, "precision": precision, "compile": compiled}
        yield Layout.parse({**given, "dp": ranks, **chosen}, "layout")


def _precisions(cluster: Cluster, constraints: SearchConstraints) -> tuple[str, ...]:
    given, can = constraints.layout.precision, cluster.device.precisions
    if "precision" in constraints.free:
        return tuple(name for name in can if name in VALUE_BYTES)
    if given != "auto":
        return (given,)
    return (cluster.device.safest_fast_precision,)


def _compiled(cluster: Cluster, constraints: SearchConstraints) -> tuple[bool, ...]:
    every = (False, True) if cluster.device.kind != "cpu" else (False,)
    return constraints.switches("compile", every)


def sentences_of(
    network: ConvNet, cluster: Cluster, global_batch: int, best: Prediction, comm: Comm
) -> tuple[str, ...]:
    """What reducing the gradients takes and leaves exposed, and how well the replicas scale."""
    ranks = best.layout.dp
    if ranks == 1:
        return ()
    alone = predict_convnet(network, cluster, best.layout.replace(dp=1), global_batch // ranks)
    share = best.tokens_per_s / ranks / alone.tokens_per_s
    training = training_of(cluster, best.layout, global_batch, comm)
    stack = cluster.stack or Stack()
    reduced_s = float(convnet_times(network, cluster, stack, training).reduce_s[0])
    exposed_s = best.time_s["exposed_comm.dp"]
    return (
        f"all-reducing {network.num_params * _GRADIENT_BYTES / 1e6:.3g} MB of gradients takes "
        f"{reduced_s * 1e3:.3g} ms, of which {exposed_s * 1e3:.3g} ms are exposed "
        f"({exposed_s / best.step_s:.1%} of the step).",
        f"{ranks} devices do {share:.1%} of {ranks} times the work of one.",
    )

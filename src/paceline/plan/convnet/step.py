"""A convolutional network's step by term, in columns, and the Prediction of one layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from paceline.config.comm import Codec, Comm, codec
from paceline.config.errors import InputError
from paceline.config.feasible_comm import check_comm
from paceline.config.hardware import Cluster, Device
from paceline.config.layout import Layout
from paceline.config.stack import Stack, constant
from paceline.config.vision import ConvNet
from paceline.plan.convnet.kernels import (
    VALUE_BYTES,
    forward_backward_s,
    num_launches,
    table_of,
    transposes_images,
)
from paceline.plan.convnet.memory import convnet_memory_bytes
from paceline.plan.points import Array
from paceline.plan.prediction import Memory, Prediction
from paceline.plan.price.compress import bits_per_value, codec_s, sent_bytes, wire_ops
from paceline.plan.price.pace import (
    exchanged_s,
    hideable_share,
    slowed_s,
    slowest_wait_s,
    stepped_s,
)
from paceline.plan.rates import origins, peak_flops
from paceline.plan.residuals import of_device

_FP32 = 4
# SGD with momentum reads parameter, gradient and momentum, and writes two of them.
_SGD_BYTES = 5 * _FP32
# Loss scaling and its check read and write each gradient once more; casts read 4 and write 2.
_SCALING_BYTES, _CAST_BYTES = 2 * _FP32, _FP32 + 2
# Launches of the optimizer, its check of gradients and their zeroing, over all parameters.
_STEP_KERNELS = 20
_EXACT = Codec("none")
_FIRST_BUCKET_BYTES = 2**20  # DDP's first bucket, so that reducing starts early

# By how much a step may differ, either way; from residuals of published rates (docs/planning.md),
# where networks with one channel per group are met much worse.
_ERROR, _ERROR_OF_DIRECT = 0.2, 0.6


@dataclass(frozen=True, eq=False)
class ImageTraining:
    """How images are trained on: columns over points, but for the words."""

    batch: Array
    """Images of a rank's micro-batch."""
    num_ranks: Array
    """Data parallel replicas, neighbours in rank order."""
    precision: str
    """fp32, tf32, bf16 or fp16."""
    num_micro_batches: Array
    bucket_bytes: Array
    grad_bytes: Array
    """Of one gradient that travels as it is: 4, or 2 where the software sends 16 bits."""
    algorithm: str = "backend"
    """Who carries out the all-reduces, see `Comm.dp`."""
    codec: Codec = _EXACT
    """In what form gradients travel."""
    input_images_per_s: Array | None = None
    """What the loader gives each rank; None: unknown, taken as enough."""


@dataclass(frozen=True, eq=False)
class ConvnetTimes:
    """Columns of a step's seconds by term of the vocabulary, and what communication there was."""

    terms: Mapping[str, Array]
    reduce_s: Array
    """All-reduces of the gradients, hidden or not."""

    @property
    def step_s(self) -> Array:
        """All terms."""
        return sum(self.terms.values(), np.zeros(1))


def convnet_times(
    network: ConvNet, cluster: Cluster, stack: Stack, training: ImageTraining
) -> ConvnetTimes:
    """Seconds of a step by term, for columns of data-parallel trainings.

    Args:
        network: the convolutions.
        cluster: concrete: device, links.
        stack: the software's features and constants; those of convolutional networks are
            channels_last, elementwise, optimizer, launch and overlaps_data_axes.
        training: (n,) columns.

    Raises:
        InputError: the device's peak at this precision is not known.
    """
    device = cluster.device
    conv, sweep = forward_backward_s(network, device, stack, training.precision, training.batch)
    device_s = conv.sum(axis=(0, 1)) + sweep.sum(axis=(0, 1))
    launched_s = num_launches(network, stack) * constant(stack, "launch_us") * 1e-6
    host = launched_s + constant(stack, "micro_batch_overhead_ms") * 1e-3
    gap = host if device.kind == "cpu" else np.maximum(host - device_s, 0.0)
    count = training.num_micro_batches
    backward = conv[1] + sweep[1]
    stretch = 1 + gap / np.maximum(device_s, 1e-12)
    reduce_s, exposed_s = _reduced(network, cluster, stack, training, backward * stretch)
    optimizer = _optimizer_s(network, device, stack, training)
    step = constant(stack, "step_overhead_ms") * 1e-3
    terms = {
        "matmul": count * conv.sum(axis=(0, 1)),
        "other_kernels": count * sweep.sum(axis=(0, 1)),
        "optimizer": optimizer,
        "exposed_comm.dp": exposed_s,
        "host_gap": count * gap + step,
    }
    busy = sum(terms.values(), np.zeros(1))
    terms["straggler_wait"] = slowest_wait_s(stack, busy, training.num_ranks)
    if training.input_images_per_s is not None:
        loading = count * training.batch / training.input_images_per_s
        terms["data_wait"] = np.maximum(loading - busy - terms["straggler_wait"], 0.0)
    n = np.broadcast_shapes(*(value.shape for value in terms.values()))
    return ConvnetTimes({key: np.broadcast_to(value, n) for key, value in terms.items()}, reduce_s)


def _optimizer_s(network: ConvNet, device: Device, stack: Stack, training: ImageTraining) -> Array:
    num_bytes = _SGD_BYTES * network.num_params * (1 if stack.optimizer == "fused" else 2)
    if VALUE_BYTES[training.precision] == 2:
        num_bytes += (_SCALING_BYTES + _CAST_BYTES) * network.num_params
    launches = _STEP_KERNELS * constant(stack, "launch_us") * 1e-6
    return np.maximum(stepped_s(device, stack, np.array([float(num_bytes)])), launches)


def _reduced(
    network: ConvNet, cluster: Cluster, stack: Stack, training: ImageTraining, backward: Array
) -> tuple[Array, Array]:
    """All seconds of the gradients' collectives, and those that no computation hides.

    Buckets fill from the last layer to the first and go out in that order, each as soon as it is
    full and the one before is through; what is left after the backward pass is exposed. Computing
    beside them slows down, which counts as exposed too, and so does coding and decoding, for which
    the device leaves the backward pass.

    Args:
        backward: (c, n) seconds of each convolution's backward pass.
    """
    ready = np.cumsum(backward[::-1], axis=0)  # (c, n), last layer first
    buckets = bucket_ends(network, np.atleast_1d(training.bucket_bytes).astype(float))
    end, total = np.zeros(1), np.zeros(1)
    for full, params in buckets:
        index = np.broadcast_to(np.minimum(full, len(ready) - 1), ready.shape[1:])
        at = np.take_along_axis(ready, index[None, :].astype(int), axis=0)[0]
        seconds = exchange_s(cluster, stack, training, params)
        end = np.maximum(end, at) + seconds
        total = total + seconds
    device, params = cluster.device, np.array([float(network.num_params)])
    coding = codec_s(device, training.codec, params, training.num_ranks)
    coding = np.where(training.num_ranks > 1, coding, 0.0)
    exposed = np.maximum(end - ready[-1], 0.0)
    sent = sent_bytes(training.codec, params * _wire_bytes(training), training.num_ranks)
    hidden = np.maximum(total - exposed, 0.0) * hideable_share(device, stack, sent, total)
    return total, total - hidden + slowed_s(stack, hidden) + coding


def exchange_s(cluster: Cluster, stack: Stack, training: ImageTraining, num_params: Array) -> Array:
    """Seconds on the wire of the mean of so many gradients over all ranks: (n,)."""
    ranks = np.atleast_1d(training.num_ranks)
    num_bytes = num_params * _wire_bytes(training)
    by = "" if training.algorithm in ("auto", "backend") else f".{training.algorithm}"
    by = by if training.codec.kind == "none" else ""
    seconds = sum(
        (
            exchanged_s(cluster, stack, op + by, num_bytes * often, ranks, 1)
            for op, often in wire_ops(training.codec, ranks)
        ),
        np.zeros(1),
    )
    return np.where(num_bytes > 0, seconds, 0.0)


def _wire_bytes(training: ImageTraining) -> Array:
    """Of a gradient in each of the collectives of its form."""
    return bits_per_value(training.codec, (), np.atleast_1d(training.grad_bytes)) / 8


def bucket_ends(network: ConvNet, bucket_bytes: Array) -> list[tuple[Array, Array]]:
    """Of each bucket the layer (counted from the last) that fills it, and its parameters: (n,)."""
    sizes = table_of(network).params[::-1, 0].copy()
    sizes[0] += network.num_params - sizes.sum()  # the linear layer is the last of all
    total = np.cumsum(sizes)
    first = np.minimum(_FIRST_BUCKET_BYTES, bucket_bytes) / _FP32
    count = int(np.ceil(max(1.0, (total[-1] * _FP32 / bucket_bytes).max()))) + 1
    buckets, before = [], np.zeros_like(bucket_bytes)
    for index in range(count):
        wish = before + (first if index == 0 else bucket_bytes / _FP32)
        # A bucket ends with the layer that overfills it.
        layer = np.minimum(np.searchsorted(total, np.minimum(wish, total[-1])), len(total) - 1)
        buckets.append((layer, total[layer] - before))
        before = total[layer]
    return buckets


def predict_convnet(
    network: ConvNet,
    cluster: Cluster,
    layout: Layout,
    global_batch: int,
    stack: Stack | None = None,
    *,
    tf32: bool = True,
    comm: Comm | None = None,
    input_images_per_s: float | None = None,
) -> Prediction:
    """Time and memory of one concrete data-parallel layout.

    Args:
        network: the convolutions.
        cluster: concrete.
        layout: concrete; only dp, micro_batch, precision, compile, kernels and bucket_mib count.
        global_batch: images of a step.
        stack: the cluster's, or our own runtime's, by default.
        tf32: whether fp32 convolutions use TF32 where the device has it, PyTorch's default.
        comm: of the Job; "auto" counts as exact sums by the backend.
        input_images_per_s: what the loader gives each rank; None: unknown, taken as enough.

    Returns:
        the Prediction, whose tokens_per_s are images per second of all ranks.

    Raises:
        InputError: the layout or the comm asks for what replicas of convolutions don't have, or the
            device's peak is not known.
    """
    device, stack = cluster.device, stack or cluster.stack or Stack()
    if layout.compile is True or layout.kernels == "triton":
        stack = stack.replace(elementwise="fused")
    training = training_of(cluster, layout, global_batch, comm or Comm(), tf32=tf32)
    precision, batch, ranks = training.precision, layout.micro_batch, layout.dp
    if input_images_per_s is not None:
        training = replace(training, input_images_per_s=np.array([input_images_per_s]))
    times = convnet_times(network, cluster, stack, training)
    step_s = float(times.step_s[0])
    memory = convnet_memory_bytes(network, batch, precision, ranks)
    flops = network.train_flops_per_image * global_batch
    is_direct = any(conv.in_channels == conv.groups for conv in network.convolutions)
    error = of_device(device, _ERROR_OF_DIRECT if is_direct else _ERROR)
    return Prediction(
        layout=layout,
        step_s=step_s,
        time_s={key: float(value[0]) for key, value in times.terms.items()},
        memory=(Memory(0, {key: float(value) for key, value in memory.items()}),),
        tokens_per_s=global_batch / step_s,
        mfu=flops / (step_s * ranks * float(peak_flops(device, precision))),
        interval_s=(step_s / (1 + error), step_s * (1 + error)),
        assumptions=_assumptions(device, stack, precision, input_images_per_s),
    )


def training_of(
    cluster: Cluster, layout: Layout, global_batch: int, comm: Comm, *, tf32: bool = True
) -> ImageTraining:
    """What a Job says about how it trains; arguments as of `predict_convnet`.

    Raises:
        InputError: see there.
    """
    _check(layout, comm)
    batch, ranks = layout.micro_batch, layout.dp
    if global_batch % (batch * ranks):
        raise InputError(
            f"global_batch = {global_batch} is not a multiple of {ranks} ranks x micro-batches of "
            f"{batch}: use one that is."
        )
    precision = str(layout.precision)
    if precision == "fp32" and tf32 and cluster.device.peak("tf32") is not None:
        precision = "tf32"
    form = comm.dp.compress
    return ImageTraining(
        batch=np.array([batch]),
        num_ranks=np.array([ranks]),
        precision=precision,
        num_micro_batches=np.array([global_batch // (batch * ranks)]),
        bucket_bytes=np.array([layout.bucket_mib * 2**20]),
        grad_bytes=np.array([float(_FP32)]),
        algorithm=comm.dp.algorithm,
        codec=_EXACT if form == "auto" else codec(form),
    )


def _check(layout: Layout, comm: Comm) -> None:
    """Refuse what is not priced."""
    check_comm(comm, layout)
    if not layout.is_plain or layout.fsdp != 1:
        raise InputError(
            f"the layout {layout.summary} was given, and a convolutional network is priced with "
            "replicas only: set every axis but dp to 1."
        )
    if str(layout.precision) not in VALUE_BYTES:
        raise InputError(
            f'layout.precision = "{layout.precision}" is not known for convolutions: use "fp32", '
            '"bf16" or "fp16".'
        )
    if layout.recompute != "none" or layout.offload:
        raise InputError(
            f'layout.recompute = "{layout.recompute}" and layout.offload = {list(layout.offload)} '
            "are not priced for convolutional networks: leave both out."
        )
    for name, value in (
        ("comm.local.method", comm.local.method),
        ("comm.dp.compress", comm.dp.compress.partition(":")[0]),
    ):
        if value in ("local_sgd", "diloco", "streaming", "powersgd"):
            raise InputError(
                f'{name} = "{value}" is not priced for convolutional networks: leave it out, or '
                "measure it."
            )


def _assumptions(
    device: Device, stack: Stack, precision: str, input_images_per_s: float | None
) -> dict[str, str]:
    turned = transposes_images(device, stack, precision)
    told = {
        "channels_last": "given"
        if stack.channels_last is not None
        else "assumed: "
        + ("images are turned around each convolution" if turned else "as the device wants it"),
        "optimizer": "assumed: SGD with momentum, as published runs have it",
        "conv_time": stack.origin if "conv_time" in stack.constants else "assumed",
        "straggler_wait": f"assumed: ranks' work scatters by {constant(stack, 'rank_spread'):.1%}",
    }
    if input_images_per_s is None:
        told["data_wait"] = "assumed: the loader is never late; its rate is not known"
    return {**origins(device), **told}

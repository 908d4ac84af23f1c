"""The page of a case study: ResNet-50 on eight A100 in two nodes."""

import math

import numpy as np
from examples.markdown import MADE, table

from paceline.config.hardware import Cluster
from paceline.config.layout import Layout
from paceline.config.links import network
from paceline.config.stack import Stack
from paceline.config.vision import ResNet
from paceline.plan.collectives import collective_s, tiers_of
from paceline.plan.convnet import Training, convnet_times, predict_convnet
from paceline.plan.prediction import Prediction

IMAGES = 1_281_167  # training images of ImageNet-1k
EPOCHS = 90


def two_nodes(gbit_per_s_per_device: float = 200.0) -> Cluster:
    """Two nodes of four A100-40 over InfiniBand HDR."""
    bare = Cluster.parse({"device": "A100-40", "devices_per_node": 4, "num_nodes": 2})
    cards = network("infiniband", 8, gbit_per_s_per_device, 2.0)
    return bare.replace(tiers=(tiers_of(bare)[0], cards))


def replicas(dp: int, micro_batch: int, precision: str, bucket_mib: float = 25.0) -> Layout:
    """Data parallel only."""
    ones = dict.fromkeys(("fsdp", "tp", "pp", "cp", "ep", "ulysses", "stages_per_rank"), 1)
    rest = {"zero": 0, "sequence_parallel": False, "schedule": "none", "split": ()}
    chosen = {"dp": dp, "micro_batch": micro_batch, "precision": precision}
    fixed = {"recompute": "none", "compile": False, "bucket_mib": bucket_mib}
    return Layout.parse({**ones, **rest, **chosen, **fixed})


VARIANTS = {
    "TF32, images as PyTorch lays them": ("fp32", 64, Stack()),
    "bf16, images as PyTorch lays them": ("bf16", 64, Stack(channels_last=False)),
    "bf16, channels last": ("bf16", 64, Stack()),
    "bf16, channels last, norms and activations fused": ("bf16", 64, Stack(elementwise="fused")),
    "the same, 256 images a GPU": ("bf16", 256, Stack(elementwise="fused")),
}


def page() -> str:
    """The page of the guide's case study."""
    net, cluster = ResNet(), two_nodes()
    gradients = net.num_params * 4
    found = {
        name: predict_convnet(net, cluster, replicas(8, batch, word), 8 * batch, stack)
        for name, (word, batch, stack) in VARIANTS.items()
    }
    best = found["bf16, channels last, norms and activations fused"]
    needed = IMAGES * EPOCHS / (30 * 60)
    flops = net.train_flops_per_image
    return f"""# ResNet-50 on eight A100 in two nodes: what physics says of a case study

A case study that is often repeated: ImageNet-1k, 2 nodes x 4 A100, InfiniBand HDR, 64 images per
GPU. It claims 400 images/s and 3 minutes an epoch at first, 720 images/s and 1.7 minutes after
tuning kernels and network, and 76 % top-1 in 30 minutes.

{MADE}
## The claims among themselves

An epoch is {IMAGES:,} images: time = images / rate.

{table(("claim", "arithmetic", "so"), _claims(needed))}
The rates and the times contradict each other, by {400 * 180 / IMAGES:.1%} to start with: 400
images/s would show the network {400 * 180:,} images in 3 minutes.

## What a step has to do

- Parameters: {net.num_params:,}. Gradients in fp32: {net.num_params:,} x 4 = {gradients / 1e6:.1f}
  MB.
- One image: {net.forward_flops_per_image / 2e9:.2f} G multiply-adds forward, x 2 FLOP x 3 (forward
  and twice that backward) = {flops / 1e9:.1f} GFLOP.
- {needed:,.0f} images/s over 8 GPUs would be {needed / 8 * flops / 1e12:.0f} TFLOP/s each, of a
  peak of 312: {needed / 8 * flops / 312e12:.0%}. But products are not what limits a ResNet: norms,
  activations and sums read and write each activation several times. They alone take
  {best.time_s["other_kernels"] / 64 * 1e6:.0f} us an image in the fused bf16 variant below, an
  upper bound of {64 / best.time_s["other_kernels"]:,.0f} images/s per GPU however fast the
  products are.

## What the planner predicts

`paceline.plan.convnet.predict_convnet`, for 8 GPUs with a 200 Gbit/s card each, buckets of 25 MiB.
Its constants are the defaults, fitted to none of these claims; input is taken as fast enough.

{table(_VARIANT_HEAD, (_variant_row(name, one) for name, one in found.items()))}
At {best.tokens_per_s:,.0f} images/s an epoch takes {IMAGES / best.tokens_per_s:.0f} s and
{EPOCHS} epochs {EPOCHS * IMAGES / best.tokens_per_s / 60:.0f} minutes. NVIDIA publishes 2,470
images/s on one A100-80 (mixed precision, 256 images) and 938 in TF32: the table's column per GPU is
of that size, and the "tuned" 720 images/s of the case study, read per GPU, are about plain TF32.

{_resnet_network(net, gradients)}
## Verdicts

{table(("claim", "verdict"), _verdicts(found))}"""


def _claims(needed: float) -> list[tuple[str, str, str]]:
    def minutes(rate: float) -> str:
        return f"{IMAGES:,} / {rate:,.0f} = {IMAGES / rate / 60:.1f} min"

    return [
        ("400 images/s, all GPUs", minutes(400), "not 3 min"),
        ("400 images/s per GPU", minutes(3200), "not 3 min"),
        ("3 min an epoch", f"{IMAGES:,} / 180 s = {IMAGES / 180:,.0f} images/s", "18 times 400"),
        ("720 images/s", minutes(720), "not 1.7 min"),
        ("720 images/s per GPU", minutes(5760), "not 1.7 min"),
        (
            "1.7 min an epoch",
            f"{IMAGES:,} / 102 s = {IMAGES / 102:,.0f} images/s",
            f"{IMAGES / 102 / 8:,.0f} per GPU",
        ),
        (
            f"76 % in 30 min, the usual {EPOCHS} epochs",
            f"{IMAGES:,} x {EPOCHS} / 1800 s = {needed:,.0f} images/s",
            f"{needed / 8:,.0f} per GPU",
        ),
    ]


_VARIANT_HEAD = (
    *("variant", "images/s", "per GPU", "step, ms", "products", "other kernels"),
    *("host late", "all-reduce exposed", "waiting for the slowest"),
)


def _variant_row(name: str, one: Prediction) -> tuple[str, ...]:
    time = one.time_s
    parts = (time["matmul"], time["other_kernels"], time["host_gap"])
    ends = (time["exposed_comm.dp"], time["straggler_wait"])
    return (
        name,
        f"{one.tokens_per_s:,.0f}",
        f"{one.tokens_per_s / 8:,.0f}",
        f"{one.step_s * 1e3:.1f}",
        *(f"{part * 1e3:.2f}" for part in (*parts, *ends)),
    )


def _resnet_network(net: ResNet, gradients: float) -> str:
    bound = 2 * 7 / 8 * gradients
    places = [
        ("4 GPUs, one node, NVLink", _node(4), 4, "2 x 3/4 S / 300 GB/s", 1.5 / 300e9),
        ("8 GPUs, one node, NVLink", _node(8), 8, "2 x 7/8 S / 300 GB/s", 1.75 / 300e9),
        ("2 x 4 GPUs, a card per GPU", two_nodes(), 8, "S / (4 x 25 GB/s)", 1 / 100e9),
        ("2 x 4 GPUs, a card per node", two_nodes(50.0), 8, "S / 25 GB/s", 1 / 25e9),
    ]
    rows = []
    for name, cluster, ranks, formula, least in places:
        seconds = float(collective_s(cluster, "all_reduce", gradients, ranks, 1))
        bound_ms, predicted_ms = least * gradients * 1e3, seconds * 1e3
        rows.append((name, f"{formula} = {bound_ms:.2f}", f"{predicted_ms:.2f}"))
    flat, tiered = 2 * 7 / 8 / 4, 2 * 1 / 2 / 4
    return f"""## The all-reduce of {gradients / 1e6:.0f} MB

In a ring of n ranks each sends 2 (n - 1) / n of the buffer S: {bound / 1e6:.0f} MB of 8. Within a
node that passes NVLink (300 GB/s each way); across two nodes at least S must leave each, in all
its cards together.

{table(("where", "least by bandwidth, ms", "predicted, ms"), rows)}
A flat ring with all four cards sends 2 (n - 1) / n S / 4 = {flat:.3f} S over each, a hierarchical
all-reduce (inside, across 2 nodes, inside) 2 (k - 1) / k S / 4 = {tiered:.3f} S:
{1 - tiered / flat:.0%} less, so that the claim "-40 % traffic between nodes" holds. What it is
worth depends on what is
exposed.

Buckets go out while the backward pass still computes (bf16, channels last, 64 images a GPU), and
little is left behind it:

{table(_REDUCE_HEAD, _reduce_rows(net))}
- All kinds of compression together can save what is exposed, no more; and that is only the share
  of the step in the last column. Coding and decoding are not free either.
- Buckets of 2 MiB: more of them, each with its latency. The claim of -20 % epoch time needs
  something exposed to begin with.
- GPUDirect RDMA, 1.4 -> 0.9 us a step: a ring of 8 has 2 (n - 1) = 14 steps, so 14 x 0.5 us =
  7 us a bucket, {7 * _num_buckets(net, 25):.0f} us of {_num_buckets(net, 25)} buckets: nothing
  here, much for small messages.
"""


def _node(num_devices: int) -> Cluster:
    return Cluster.parse({"device": "A100-40", "devices_per_node": num_devices, "num_nodes": 1})


_REDUCE_HEAD = (
    *("network", "bucket, MiB", "bytes a gradient", "all-reduces, ms", "exposed, ms"),
    "share of the step",
)


def _reduce_rows(net: ResNet) -> list[tuple[str, ...]]:
    each, shared = ("a card per GPU", two_nodes()), ("a card per node", two_nodes(50.0))
    cases = [(each, mib, 4) for mib in (1, 2, 8, 25, 100)]
    cases += [(shared, 2, 4), (shared, 25, 4), (shared, 25, 2), (shared, 25, 1)]
    rows = []
    for (name, cluster), mib, num_bytes in cases:
        times = convnet_times(net, cluster, Stack(), _training(mib, num_bytes))
        exposed = float(times.terms["exposed_comm.dp"][0])
        rows.append(
            (
                name,
                f"{mib}",
                f"{num_bytes}",
                f"{float(times.reduce_s[0]) * 1e3:.2f}",
                f"{exposed * 1e3:.2f}",
                f"{exposed / float(times.step_s[0]):.1%}",
            )
        )
    return rows


def _training(mib: float, grad_bytes: int) -> Training:
    return Training(
        batch=np.array([64]),
        num_ranks=np.array([8]),
        precision="bf16",
        num_micro_batches=np.array([1]),
        bucket_bytes=np.array([mib * 2**20]),
        grad_bytes=np.array([float(grad_bytes)]),
    )


def _num_buckets(net: ResNet, mib: float) -> int:
    return math.ceil(net.num_params * 4 / (mib * 2**20))


def _verdicts(found: dict[str, Prediction]) -> list[tuple[str, str]]:
    plain = found["TF32, images as PyTorch lays them"]
    best = found["bf16, channels last, norms and activations fused"]
    exposed = plain.time_s["exposed_comm.dp"] / plain.step_s
    shared = predict_convnet(
        ResNet(), two_nodes(50.0), replicas(8, 64, "bf16"), 512, Stack(overlaps_data_axes=False)
    )
    alone = shared.time_s["exposed_comm.dp"] / shared.step_s
    gain = best.tokens_per_s / plain.tokens_per_s
    return [
        (
            "baseline of 400 images/s",
            f"no set-up of these GPUs is that slow unless its input is: {plain.tokens_per_s:,.0f} "
            "images/s in TF32 are predicted",
        ),
        (
            "30 % idle in the all-reduce at first",
            f"predicted {exposed:.1%} exposed in TF32; without any overlap, in bf16 and over one "
            f"card a node, {alone:.0%}: the figure fits a loop that reduces after the whole "
            "backward pass",
        ),
        (
            "mixed precision and fused kernels 1.4 x",
            f"{gain:.1f} x from TF32 are predicted, most of it by 16 bits and channels last",
        ),
        (
            "1.7 min an epoch",
            f"{IMAGES / best.tokens_per_s / 60:.1f} min predicted with everything: possible, but "
            f"at {best.tokens_per_s:,.0f} images/s and not at 720",
        ),
        (
            "76 % top-1 in 30 min",
            f"{EPOCHS} epochs take {EPOCHS * IMAGES / best.tokens_per_s / 60:.0f} min; in 30 min "
            f"these GPUs do {30 * 60 * best.tokens_per_s / IMAGES:.0f} epochs",
        ),
    ]

"""Write docs/case-study.md: what a much repeated case study claims, and what can be true of it.

Every number is arithmetic, a row of the published table that ships with the project, the planner's
answer to recipes/resnet50_2x4_a100.toml, or measured by benchmarks/case_study.py.
`python docs/make_case_study.py` writes the page again, and a test tells when it is out of date.
"""

import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from examples.markdown import reflow, table
from measured import MEASURED

from paceline.config.hardware import Cluster
from paceline.config.job import Job, JobOnCluster, read_job
from paceline.config.stack import Stack
from paceline.config.vision import ResNet
from paceline.plan.answer.find import answer
from paceline.plan.collectives import collective_s
from paceline.plan.convnet import convnet_times, predict_convnet, training_of
from paceline.plan.prediction import Prediction

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "case-study.md"
RECIPE = ROOT / "recipes/resnet50_2x4_a100.toml"
PUBLISHED = ROOT / "benchmarks/data/published_vision_runs.csv"

IMAGES = 1_281_167  # training images of ImageNet-1k
EPOCHS = 90
GPUS = 8
_JPEG_BYTES = 147_897_477_120 / IMAGES  # of the archive with the training images
_JPEGS_PER_CORE = 150  # decoded and cropped in a second: assumed, of the usual size
_CARD_A_NODE = 25e9 / 4  # bytes/s each way for a GPU, where four share an HDR card


class Step(NamedTuple):
    """An optimisation of the case study, as settings of the Job."""

    name: str
    sets: tuple[str, ...]
    """All of them, those of the steps before included."""
    claim: str


_FUSED = ("layout.precision=bf16", "layout.kernels=triton")
_SMALL = (*_FUSED, "layout.bucket_mib=2")
STEPS = (
    Step("baseline: fp32 (TF32 in products)", (), "400 images/s"),
    Step("+ mixed precision, channels last", ("layout.precision=bf16",), "both together:"),
    Step("+ norm, sum and ReLU in one kernel", _FUSED, "560 images/s a GPU"),
    Step("+ buckets of 2 MiB", _SMALL, "-20 % epoch time"),
    Step(
        "+ hierarchical all-reduce",
        (*_SMALL, "comm.dp.algorithm=hierarchical"),
        "-40 % traffic between nodes",
    ),
    Step("+ 8-bit gradients instead", (*_SMALL, "comm.dp.compress=int8"), "-10 % epoch time"),
)


@cache
def planned(step: Step) -> Prediction:
    """What `paceline plan` says of the recipe with a step's settings."""
    best = answer(recipe(step)).best
    assert best is not None
    return best


def recipe(step: Step) -> JobOnCluster:
    """The recipe with a step's settings, on the cluster that it states."""
    spec = read_job(RECIPE, step.sets)
    return spec.on(Cluster.parse(vars(spec.cluster)))


def concrete(step: Step) -> Job:
    """The Job that this prediction is of."""
    job = recipe(step)
    return job.with_layout(planned(step).layout, job.comm)


def page() -> str:
    """The whole page, paragraphs not yet filled."""
    job = concrete(STEPS[0])
    return "\n".join([_opening(), _claims(), _published(), _plan(job), _network(job), _loader(),
                      _real(), _verdicts(job)])  # fmt: skip


def _opening() -> str:
    best = max(planned(step).tokens_per_s for step in STEPS)
    return f"""# ResNet-50 on eight A100 in two nodes: a case study, checked

A case study that is often repeated: ImageNet-1k, 2 nodes x 4 A100, InfiniBand HDR, 64 images a
GPU. It starts at 400 images/s and 3 minutes an epoch, tunes kernels and network step by step, and
ends at 720 images/s, 1.7 minutes an epoch and 76 % top-1 in 30 minutes. The steps are good
practice. The numbers can't all be right, because they contradict each other:

- **The rates are wrong.** At 400 images/s an epoch takes {IMAGES / 400 / 60:.0f} minutes, not 3; at
  720, {IMAGES / 720 / 60:.0f}, not 1.7. Eight V100 of the generation before did four times as much
  in plain fp32.
- **The epoch times are credible**, for other rates: 3 minutes are {IMAGES / 180:,.0f} images/s,
  which is what eight A100 are published to do in TF32; 1.7 minutes are {IMAGES / 102:,.0f}, less
  than they do in mixed precision.
- **76 % in 30 minutes is not.** The usual {EPOCHS} epochs in that time are
  {IMAGES * EPOCHS / 1800:,.0f} images/s, four times what we predict at best ({best:,.0f}).
- **The order of the gains is turned around.** Nearly all of it comes from 16-bit arithmetic and
  fused kernels. On this network the exchange of gradients is hidden behind the backward pass, and
  buckets, hierarchy and compression have almost nothing left to win.

*This page is made by `docs/make_case_study.py`: by arithmetic, from the published table that ships
with the project, by the planner, and from a small real run of the same steps.*
"""


def _claims() -> str:
    needed = IMAGES * EPOCHS / 1800

    def minutes(rate: float) -> str:
        return f"{IMAGES:,} / {rate:,.0f} = {IMAGES / rate / 60:.1f} min"

    rows = [
        ("400 images/s, all GPUs", minutes(400), "not 3 min"),
        ("400 images/s a GPU", minutes(400 * GPUS), "not 3 min"),
        ("3 min an epoch", f"{IMAGES:,} / 180 s = {IMAGES / 180:,.0f} images/s", "18 times 400"),
        ("720 images/s, all GPUs", minutes(720), "not 1.7 min"),
        ("720 images/s a GPU", minutes(720 * GPUS), "not 1.7 min"),
        (
            "1.7 min an epoch",
            f"{IMAGES:,} / 102 s = {IMAGES / 102:,.0f} images/s",
            f"{IMAGES / 102 / GPUS:,.0f} a GPU",
        ),
        (
            f"76 % in 30 min, the usual {EPOCHS} epochs",
            f"{IMAGES:,} x {EPOCHS} / 1800 s = {needed:,.0f} images/s",
            f"{needed / GPUS:,.0f} a GPU",
        ),
    ]
    return f"""## The claims among themselves

An epoch is {IMAGES:,} images: time = images / rate.

{table(("claim", "arithmetic", "so"), rows)}"""


# ---- what was published --------------------------------------------------------------------------


def published() -> Iterator[Mapping[str, str]]:
    """Rows of ResNet-50 on A100 and V100, the eight-GPU ones of one node."""
    with PUBLISHED.open() as file:
        for row in csv.DictReader(file):
            is_asked = row["model"] == "resnet50-v1.5" and row["gpus"] in ("1", "8")
            is_chip = row["gpu"].startswith("A100") or row["precision"] == "fp32"
            if is_asked and is_chip and row["gpu"].startswith(("A100", "V100")):
                yield row


def rate_of(row_id: str) -> float:
    """Images per second of a published row."""
    return next(float(row["images_per_s"]) for row in published() if row["id"] == row_id)


def _published() -> str:
    rows = [
        (
            f"{row['gpus']} x {row['gpu']}",
            row["precision"],
            row["framework"].removesuffix(" (NVIDIA DLE)"),
            row["batch_per_gpu"] or "not said",
            f"{float(row['images_per_s']):,.0f}",
            f"{float(row['images_per_s']) / int(row['gpus']):,.0f}",
            f"{IMAGES / float(row['images_per_s']) / 60:.1f}",
        )
        for row in published()
    ]
    head = (
        *("machine", "arithmetic", "framework", "images a GPU", "images/s", "per GPU"),
        "minutes an epoch",
    )
    return f"""## What was published on such machines

NVIDIA's own examples (DeepLearningExamples, commit 729963dd; rows of
`benchmarks/data/published_vision_runs.csv`), one node, real images:

{table(head, rows)}
No eight GPUs in this table are as slow as the claim's *end*, not even V100 in fp32. And 560 or 720
images/s, read per GPU, are less than what one A100 does before any tuning.
"""


# ---- what the planner says -----------------------------------------------------------------------


def _plan(job: Job) -> str:
    assert isinstance(job.model, ResNet)
    head = (
        *("step", "claimed", "images/s (from - to)", "epoch, min", "step, ms", "products"),
        *("other kernels", "optimizer", "host late", "exchange exposed", "slowest rank"),
    )
    flops, best = job.model.train_flops_per_image, planned(STEPS[2])
    elementwise = 64 / best.time_s["other_kernels"]
    ours, theirs = planned(STEPS[0]).tokens_per_s, rate_of("VIS-039")
    large = predict_convnet(
        job.model,
        job.cluster,
        best.layout.replace(micro_batch=256),
        256 * GPUS,
        job.cluster.stack,
    )
    return f"""## What the planner predicts for the published cluster

`paceline plan recipes/resnet50_2x4_a100.toml`, and each step as settings on top (the recipe lists
them). No constant is fitted to the claims; the loader is taken never to be late. Terms in
milliseconds.

{table(head, map(_plan_row, STEPS))}
- One image is {job.model.forward_flops_per_image / 2e9:.2f} G multiply-adds forward and
  {flops / 1e9:.1f} GFLOP of training. At the best of these rates a GPU does
  {best.tokens_per_s / GPUS * flops / 1e12:.0f} TFLOP/s, {best.mfu:.0%} of its peak: what "96 %
  compute utilisation" of a monitor means is that some kernel is always running.
- Half of the step is not products but norms, sums and activations, which read and write images:
  however fast products were, these alone allow {elementwise:,.0f} images/s a GPU once fused. That
  is why fusing pays and why {IMAGES * EPOCHS / 1800 / GPUS:,.0f} a GPU are out of reach.
- We predict the baseline {1 - ours / theirs:.0%} below the published TF32 rate of eight A100-40 in
  one node ({theirs:,.0f}, 256 images a GPU). With 256 images a GPU and all kernels fused
  {large.tokens_per_s:,.0f} images/s stand beside {rate_of("VIS-040"):,.0f} published. The interval
  is as wide as the planner is wrong on published runs ([planning.md](planning.md)).
"""


def _plan_row(step: Step) -> tuple[str, ...]:
    one = planned(step)
    slow, fast = (GPUS * 64 / second for second in reversed(one.interval_s))
    names = ("matmul", "other_kernels", "optimizer", "host_gap", "exposed_comm.dp")
    return (
        step.name,
        step.claim,
        f"{one.tokens_per_s:,.0f} ({slow:,.0f} - {fast:,.0f})",
        f"{IMAGES / one.tokens_per_s / 60:.2f}",
        f"{one.step_s * 1e3:.1f}",
        *(f"{one.time_s[name] * 1e3:.2f}" for name in (*names, "straggler_wait")),
    )


# ---- the network ---------------------------------------------------------------------------------


def _slower_cards(cluster: Cluster) -> Cluster:
    """The cluster with one HDR card for the four GPUs of a node."""
    inside, across = cluster.tiers
    rate = across.bytes_per_s.replace(value=_CARD_A_NODE, source="one HDR card for four GPUs")
    return cluster.replace(tiers=(inside, across.replace(bytes_per_s=rate)))


def _network(job: Job) -> str:
    assert isinstance(job.model, ResNet)
    gradients = job.model.num_params * 4
    flat, tiered = 2 * 7 / 8 / 4, 2 * 1 / 2 / 4
    num_buckets = math.ceil(gradients / (25 * 2**20))
    first = planned(STEPS[0])
    busy_s = first.step_s - first.time_s["exposed_comm.dp"]
    slow = gradients / (busy_s * 0.3 / 0.7)  # bytes/s at which reducing is 30 % of the step
    head = (
        *("network", "step", "on the wire, ms", "exposed, ms", "share of the step"),
        "if nothing overlapped",
    )
    return f"""## The all-reduce of {gradients / 1e6:.0f} MB

{job.model.num_params:,} gradients in fp32. In a ring of n ranks each sends 2 (n - 1) / n of the
buffer S; across two nodes at least S must leave each, in all its cards together.

{table(("where", "least by bandwidth, ms", "predicted, ms"), _reductions(job, gradients))}
DDP sends buckets while the backward pass still computes (bf16, fused kernels, 64 images a GPU):

{table(head, _exchange_rows(job))}
- **Hierarchical, "-40 % traffic between nodes"**: right. A flat ring sends {flat:.3f} S over each
  card, an all-reduce inside the nodes, across and inside again {tiered:.3f} S:
  {1 - tiered / flat:.0%} less. But NCCL's rings go through all cards at once already, the exchange
  was hidden, and one more stage has its latencies. With a card for each GPU nothing is gained in
  time, with one for four a little.
- **Buckets of 2 MiB, "-20 % epoch time"**: there are {math.ceil(gradients / 2**21)} instead of
  {num_buckets}, each with its latency. It can't gain what was not exposed.
- **8-bit gradients, "-10 %"**: coding and decoding read and write every gradient several times on
  the GPU that computes. That costs more than the bytes it saves. And each GPU sends its codes to
  every other one: half of them leave the node, so that between nodes about three quarters of
  what an exact all-reduce in tiers sends remain, not one quarter.
- **GPUDirect RDMA, "1.4 -> 0.9 us a step of all-reduce"**: that is the latency of one message, not
  an all-reduce of {gradients / 1e6:.0f} MB, which takes a thousand times as long. A ring of 8 has
  14 steps: 14 x 0.5 us = 7 us a bucket, {7 * num_buckets} us of {num_buckets} buckets.
- **"30 % idle in all-reduce"** is more than even a loop has that first runs the whole backward
  pass and only then reduces (last column; less in TF32, whose steps are longer). With the
  baseline's kernels it takes a network that moves {slow / 1e9:.1f} GB/s out of each node,
  {slow / 100e9:.0%} of four HDR cards: sockets where RDMA was meant, for one. `paceline doctor`
  and `paceline bench collectives` find that; smaller buckets only hide it.
"""


def _reductions(job: Job, gradients: float) -> list[tuple[str, str, str]]:
    one_node = Cluster.parse({"device": "A100-40", "devices_per_node": GPUS, "num_nodes": 1})
    places = [
        ("8 GPUs, one node, NVLink", one_node, "2 x 7/8 S / 300 GB/s", 1.75 / 300e9),
        ("2 x 4 GPUs, a card per GPU", job.cluster, "S / (4 x 25 GB/s)", 1 / 100e9),
        ("2 x 4 GPUs, a card per node", _slower_cards(job.cluster), "S / 25 GB/s", 1 / 25e9),
    ]
    rows = []
    for name, cluster, formula, least in places:
        seconds = float(collective_s(cluster, "all_reduce", gradients, GPUS, 1))
        rows.append((name, f"{formula} = {least * gradients * 1e3:.2f}", f"{seconds * 1e3:.2f}"))
    return rows


def _exchange_rows(job: Job) -> Iterator[tuple[str, ...]]:
    for name, cluster in (
        ("a card per GPU", job.cluster),
        ("a card per node", _slower_cards(job.cluster)),
    ):
        for step in STEPS[2:]:
            asked = concrete(step).replace(cluster=cluster)
            wire_s, exposed_s, step_s = _exchanged(asked, Stack(elementwise="fused"))
            _, all_s, longer_s = _exchanged(
                asked, Stack(elementwise="fused", overlaps_data_axes=False)
            )
            yield (
                name,
                step.name.removeprefix("+ ") if step is not STEPS[2] else "buckets of 25 MiB",
                f"{wire_s * 1e3:.2f}",
                f"{exposed_s * 1e3:.2f}",
                f"{exposed_s / step_s:.1%}",
                f"{all_s / longer_s:.0%}",
            )


def _exchanged(job: Job, stack: Stack) -> tuple[float, float, float]:
    """Seconds of all collectives, of what is exposed of the exchange, and of the step."""
    assert isinstance(job.model, ResNet)
    training = training_of(job.cluster, job.layout, job.train.global_batch, job.comm)
    times = convnet_times(job.model, job.cluster, stack, training)
    exposed = float(times.terms["exposed_comm.dp"][0])
    return float(times.reduce_s[0]), exposed, float(times.step_s[0])


def _loader() -> str:
    best = planned(STEPS[2]).tokens_per_s
    job = concrete(STEPS[0])
    assert isinstance(job.model, ResNet)
    waiting = predict_convnet(
        job.model, job.cluster, job.layout, 512, job.cluster.stack, input_images_per_s=50
    )
    return f"""## What the loader has to do

At {best:,.0f} images/s it reads {best * _JPEG_BYTES / 1e9:.1f} GB/s of JPEGs (the training archive
is 148 GB, {_JPEG_BYTES / 1e3:.0f} KB an image) and decodes them. At some {_JPEGS_PER_CORE} a second
and core (assumed) that is {best / _JPEGS_PER_CORE:.0f} cores, so the published runs above
decode on the GPU. The claim doesn't mention its loader. It is the one part that could hold eight
A100 down to 400 images/s. With 50 images/s for each GPU the planner has them waiting for data
{waiting.time_s["data_wait"] / waiting.step_s:.0%} of the step, and no kernel or network would
change that.
"""


# ---- the small real run --------------------------------------------------------------------------


def measured() -> dict:
    """The newest results of benchmarks/case_study.py on the project's own machine."""
    return json.loads((MEASURED / "case_study.json").read_text())


def _real() -> str:
    found = measured()
    facts, rows = found["facts"], {row["way"]: row for row in found["rows"]}
    head = (
        *("step", "seconds (blocks from - to)", "MB a host", "x baseline", "x the step before"),
        *("predicted, s", "predicted x baseline"),
    )
    first = rows["baseline"]["predicted_s"]
    off = sorted(abs(row["predicted_s"] / row["step_s"][0] - 1) for row in rows.values())
    network = facts["job"]["model"]
    exposed = 1 - rows["compute only"]["step_s"][0] / rows["baseline"]["step_s"][0]
    best = max(rows.values(), key=lambda row: row["over_baseline"] * (row["way"] != "compute only"))
    return f"""## The same steps, small and real

`python -m benchmarks.case_study`: a ResNet-{network["depth"]} on images of
{network["image_size"]} x {network["image_size"]}, two hosts (network namespaces) of two CPU ranks
each, {found["rate_bits_per_s"] / 1e9:g} Gbit/s between them. Every step goes through the same
Trainer and Job that GPUs would run. This machine is the opposite of the published one: slow
processors that are slower still while they send, behind a slow wire. In its baseline the exchange
is {exposed:.0%} of the step.

{table(head, (_real_row(row, first) for row in rows.values()))}
{_real_words(rows)}
- The planner, by what the same processes measured of cores and links, is off by
  {off[len(off) // 2]:.0%} in the middle and {off[-1]:.0%} at worst. It puts the steps' gains in the
  last column.

Everything that paid, together, makes the step {best["over_baseline"]:.2f} times as fast.

*{facts["cores"]} cores of {facts["device"]}, load {facts["load_average_before"][0]:.1f} before;
{facts["date"][:10]}, commit {facts["commit"]}, torch {facts["versions"]["torch"]}. Every step of
every block is in `benchmarks/results/{MEASURED.name}/case_study.json`.*
"""


def _real_row(row: Mapping, first: float) -> tuple[str, ...]:
    median, least, most = row["step_s"]
    return (
        row["way"],
        f"{median:.3f} ({least:.3f} - {most:.3f})",
        f"{row['sent_bytes'] / 1e6:.1f}",
        f"{row['over_baseline']:.2f}",
        "" if row["over_before"] is None else f"{row['over_before']:.2f}",
        f"{row['predicted_s']:.3f}",
        f"{first / row['predicted_s']:.2f}",
    )


def _real_words(rows: Mapping[str, Mapping]) -> str:
    bytes_less = (
        1 - rows["hierarchical all-reduce"]["sent_bytes"] / (rows["buckets of 2 MiB"]["sent_bytes"])
    )
    return f"""- 16 bits: {_gain(rows["bf16"])}.
- Compiled blocks, which fuse norm, sum and ReLU on a CPU: {_gain(rows["compiled blocks"])}. They
  are not carried on.
- Buckets of 2 MiB: {_gain(rows["buckets of 2 MiB"])}.
- The hierarchical all-reduce sends {bytes_less:.0%} fewer bytes between the hosts:
  {_gain(rows["hierarchical all-reduce"])}.
- 8-bit gradients: {_gain(rows["8-bit gradients"])}."""


def _gain(row: Mapping) -> str:
    """What a step gave over the one before it; within 3 % nothing is claimed."""
    times = row["over_before"]
    if abs(times - 1) < 0.03:
        return f"no difference that counts ({times:.2f} times as fast)"
    return f"{times:.2f} times as fast" if times > 1 else f"slower ({times:.2f} times as fast)"


# ---- verdicts ------------------------------------------------------------------------------------


def _verdicts(job: Job) -> str:
    plain, fused = planned(STEPS[0]), planned(STEPS[2])
    bucketed, coded = planned(STEPS[3]), planned(STEPS[5])
    shared = job.replace(cluster=_slower_cards(job.cluster))
    naive = _exchanged(shared, Stack(overlaps_data_axes=False))
    rows = [
        (
            "400 images/s at first",
            "18 times less than 3 min an epoch needs",
            f"{rate_of('VIS-039'):,.0f} (8 x A100-40, TF32)",
            f"{plain.tokens_per_s:,.0f}",
            "wrong, unless the loader was the limit",
        ),
        (
            "3 min an epoch at first",
            f"{IMAGES / 180:,.0f} images/s",
            f"{IMAGES / rate_of('VIS-039') / 60:.1f} min",
            f"{IMAGES / plain.tokens_per_s / 60:.1f} min",
            "right for TF32",
        ),
        (
            "30 % idle in all-reduce",
            "1 to 4 ms of a step of 90",
            f"8 GPUs {rate_of('VIS-039') / 8 / rate_of('VIS-037'):.0%} of 8 x one",
            f"{plain.time_s['exposed_comm.dp'] / plain.step_s:.1%} exposed; "
            f"{naive[1] / naive[2]:.0%} without overlap over one card a node",
            "wrong for DDP in TF32",
        ),
        (
            "kernels: 560 images/s a GPU, 1.4 x",
            "16 bits halve traffic and double products",
            f"{rate_of('VIS-038') / rate_of('VIS-037'):.1f} x by mixed precision",
            f"{fused.tokens_per_s / plain.tokens_per_s:.1f} x, {fused.tokens_per_s / 8:,.0f} a GPU",
            "too little: the gain is twice as large",
        ),
        (
            "2 MiB buckets, -20 %",
            "at most what is exposed",
            "",
            f"{bucketed.step_s / fused.step_s - 1:+.1%} step time",
            "wrong where gradients overlap",
        ),
        (
            "8-bit gradients, -10 %",
            "at most what is exposed",
            "",
            f"{coded.step_s / bucketed.step_s - 1:+.1%} step time",
            "wrong on this network; on slow ones [it pays](techniques/compression.md)",
        ),
        (
            "1.7 min an epoch in the end",
            f"{IMAGES / 102:,.0f} images/s",
            f"{IMAGES / rate_of('VIS-040') / 60:.1f} min (8 x A100-40, AMP)",
            f"{IMAGES / fused.tokens_per_s / 60:.1f} min",
            "possible, at 17 times the claimed rate",
        ),
        (
            "76 % in 30 min",
            f"{IMAGES * EPOCHS / 1800:,.0f} images/s for {EPOCHS} epochs",
            f"{EPOCHS * IMAGES / rate_of('VIS-040') / 60:.0f} min for {EPOCHS} epochs",
            f"{1800 * fused.tokens_per_s / IMAGES:.0f} epochs in 30 min",
            "wrong for any schedule the article names",
        ),
    ]
    head = ("claim", "physics", "published", "our prediction", "verdict")
    return f"## Verdicts\n\n{table(head, rows)}"


if __name__ == "__main__":
    PAGE.write_text(reflow(page()))

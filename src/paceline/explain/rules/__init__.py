"""Rules: what is known to make steps slow, each a small function of a Subject.

A rule says nothing where it can't see, and estimates what mending its cause would give, not how
long the thing takes: a wait that other ranks' work hides gives nothing. To add one, write a
function in the file of its subject and a `Rule` in `_CAUSES`; docs/explain.md lists them all.

What holds for all of them is done here, for all at once: a rule isn't asked what a trace can't say
(`blind`), and what it says passes `sound`.
"""

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

from paceline.explain.changes import runnable_changes
from paceline.explain.finding import Finding
from paceline.explain.rules import (
    environment,
    gradients,
    host,
    interruptions,
    kernels,
    links,
    memory,
    pipeline,
    residual,
    stalls,
    uneven,
)
from paceline.explain.subject import Subject
from paceline.observe import caveats

# What rests on the device's idle time or kernels says nothing where these were not recorded.
_NO_DEVICE = (caveats.GRAPH_KERNELS_MISSING, caveats.NO_KERNELS)
# What happens how often in a step can't be told where nothing marks the steps.
_NO_STEPS = (caveats.NO_STEPS,)
_NO_TRAINING = (caveats.INFERENCE,)


class Rule(NamedTuple):
    """A rule, and what a person has to know of it."""

    find: Callable[..., Finding | None]
    needs: str
    """What has to be seen for it to speak."""
    silent: str
    """What makes it silent, beside caveats; empty: the lack of what it needs, and nothing else."""
    terms: tuple[str, ...] = ()
    """Of the vocabulary: whose time it explains."""
    blind: tuple[str, ...] = ()
    """Kinds of caveats with which it isn't asked."""

    @property
    def name(self) -> str:
        """That of its function."""
        return self.find.__name__.replace("_", "-")

    def __call__(self, subject: Subject, *explained_s: float) -> Finding | None:
        """What it finds, as it may be told; of a residual, less what others explained."""
        account = subject.account
        if account is not None and any(account.caveat(kind) for kind in self.blind):
            return None
        found = self.find(subject, *explained_s)
        return None if found is None else sound(subject, replace(found, name=self.name))


_EXCHANGES = ("exposed_comm", "straggler_wait")

_CAUSES = (
    Rule(
        uneven.straggler_rank,
        "ranks that met in collectives, or a run; the same rank last in most steps, in the first "
        "half as in the second",
        "the ranks' traces don't share collectives; uneven work; stages of a pipeline that nobody "
        "planned; the rank launches other numbers of kernels than the others",
        _EXCHANGES,
        _NO_DEVICE,
    ),
    Rule(
        links.slow_link,
        "bytes, and the collectives of all ranks of a group; a measured curve, or sockets of a CPU",
        "one rank alone was recorded: it can't tell a slow link from a late rank",
        _EXCHANGES,
        (*_NO_DEVICE, *_NO_STEPS),
    ),
    Rule(
        links.wrong_fabric,
        "NCCL's log in the run's `log/`, or `paceline doctor --run`",
        "no communication is exposed",
        _EXCHANGES,
        _NO_DEVICE,
    ),
    Rule(
        stalls.loader_bound,
        "`data_wait`: a range of our loop, or of torch's DataLoader",
        "other ranks' work hides the wait",
        ("data_wait", "straggler_wait"),
    ),
    Rule(
        host.host_bound,
        "the device idle while the host hadn't launched yet; on a CPU a pause at the same place of "
        "every step",
        "the next kernel had been launched; another rule names the pause; one rank alone has it",
        ("host_gap",),
        _NO_DEVICE,
    ),
    Rule(
        host.sync_points,
        "more than three values read, or numbers agreed on, in a step",
        "the device isn't idle afterwards; numbers of ranks that were not recorded",
        ("host_gap", *_EXCHANGES),
        (*_NO_DEVICE, *_NO_STEPS),
    ),
    Rule(
        gradients.reduce_every_micro_batch,
        "the same gradients all-reduced in two or more backward passes of most steps, with no "
        "optimizer between",
        "operators of autograd were not recorded; passes exchange other sizes (two networks)",
        _EXCHANGES,
        (*_NO_DEVICE, *_NO_STEPS, *_NO_TRAINING),
    ),
    Rule(
        gradients.buckets_too_small,
        "half as many all-reduces of gradients again as are worth it, and their bytes",
        "",
        _EXCHANGES,
        (*_NO_DEVICE, *_NO_STEPS, *_NO_TRAINING),
    ),
    Rule(
        gradients.buckets_too_large,
        "all gradients in one or two all-reduces, three quarters of them exposed",
        "",
        _EXCHANGES,
        (*_NO_DEVICE, *_NO_STEPS, *_NO_TRAINING),
    ),
    Rule(
        gradients.no_overlap,
        "three or more all-reduces of gradients, three quarters of them exposed",
        "",
        _EXCHANGES,
        (*_NO_DEVICE, *_NO_STEPS, *_NO_TRAINING),
    ),
    Rule(
        pipeline.regather_in_pipeline,
        "all-gathers of shards in two or more passes of most steps, beside a pipeline's messages",
        "operators of autograd were not recorded",
        _EXCHANGES,
        (*_NO_DEVICE, *_NO_STEPS, *_NO_TRAINING),
    ),
    Rule(
        pipeline.uneven_stages,
        "a run with one stage a rank",
        "the split is the best one already",
        ("bubble", "exposed_comm.pp", "straggler_wait"),
    ),
    Rule(
        pipeline.few_micro_batches,
        "a run with a pipeline, and a smaller micro-batch that can run",
        "smaller micro-batches cost more than the bubble they save",
        ("bubble", "exposed_comm.pp", "straggler_wait"),
    ),
    Rule(
        uneven.expert_imbalance,
        "several ranks with experts; the busiest computes 8 % more than the mean, and its exchange "
        "of tokens is larger, where bytes are known",
        "the ranks' traces don't share collectives",
        _EXCHANGES,
        _NO_DEVICE,
    ),
    Rule(
        uneven.length_imbalance,
        "several ranks; now this one, now that one computes 8 % more than the mean, and not in the "
        "optimizer",
        "the ranks' traces don't share collectives; it is always the same rank; a pipeline",
        _EXCHANGES,
        _NO_DEVICE,
    ),
    Rule(
        memory.allocator_retries,
        "calls of the driver for memory in half of the steps or more",
        "they are in the first recorded steps only: that is warming up",
        ("host_gap",),
        _NO_DEVICE,
    ),
    Rule(
        kernels.fp32,
        "kernels of products (cuDNN's, cuBLAS', CUTLASS', Tensile's, MIOpen's) named for fp32 or "
        "TF32, on a device known to have 16-bit products; of a run its Job",
        "the trace doesn't describe its device; a device without them (before V100, MI100); bf16 "
        "isn't advised on V100 and Turing, but fp16",
        ("matmul", "attention"),
        _NO_DEVICE,
    ),
    Rule(
        kernels.slow_attention,
        "softmax kernels beside batched products, on a GPU",
        "any kernel is named for attention: flash, fmha, `attn_fwd`, paged, MLA; softmax of a loss "
        "or a router",
        ("attention",),
        _NO_DEVICE,
    ),
    Rule(
        kernels.unfused_elementwise,
        "a fifth of the step in kernels that do one simple thing, on a GPU",
        "kernels are fused: Inductor's, and those that say so",
        ("other_kernels",),
        _NO_DEVICE,
    ),
    Rule(
        kernels.small_kernels,
        "of a run: micro-batches that fit and are larger; of a trace: seven of ten kernels under "
        "10 us, and the device idle for a fifth of the step",
        "a pipeline; graphs are replayed",
        ("host_gap",),
        (*_NO_DEVICE, *_NO_STEPS),
    ),
    Rule(
        memory.recompute_not_needed,
        "a run with recompute, and memory that would hold the activations",
        "the device's memory isn't known",
        ("recompute",),
    ),
    Rule(
        memory.sharding_not_needed,
        "a run with shards, and memory that would hold replicas",
        "the device's memory isn't known",
        ("exposed_comm.fsdp", "host_gap"),
    ),
    Rule(
        kernels.model_too_small,
        "several ranks that exchange as replicas do, most of the step exposed",
        "ranks that share a network too large for one, or that a trace doesn't tell apart",
        ("exposed_comm",),
        (*_NO_DEVICE, *_NO_TRAINING),
    ),
    Rule(
        environment.peak_missing,
        "a run whose device has no peak in the catalogue",
        "",
    ),
    Rule(
        stalls.checkpoint_stall,
        "a run's steps that waited",
        "",
        ("checkpoint_stall",),
    ),
    Rule(
        stalls.evaluation_stall,
        "a run that evaluates",
        "evaluations take less than a hundredth of the time",
    ),
    Rule(
        interruptions.interruptions,
        "an elastic run (`events.jsonl`) that lost machines",
        "nothing was lost, or no step was kept",
    ),
    Rule(stalls.logging_stall, "a run's time between its steps", ""),
    Rule(
        stalls.garbage_collection,
        "a run that times its collector, or ranges `paceline.gc`",
        "other ranks' work hides the pauses",
        ("host_gap",),
    ),
    Rule(
        host.warm_up_recorded,
        "libraries loaded or kernels compiled in the first recorded steps, with the device idle",
        "it goes on in half of the steps or more",
        ("host_gap",),
    ),
    Rule(
        host.recompilation,
        "torch.compile at work in half of the steps or more",
        "it compiles in the first recorded steps only: that is warming up",
        ("host_gap",),
        _NO_STEPS,
    ),
    Rule(
        host.pageable_copies,
        "copies from pageable memory, and an idle device",
        "",
        ("host_gap", "data_wait"),
        _NO_DEVICE,
    ),
    Rule(
        host.thread_oversubscription,
        "a run that knows its cores and threads",
        "",
    ),
    Rule(host.crowded_cores, "a run that knows its cores and its host's", ""),
    Rule(
        host.cores_taken,
        "a run whose ranks count their waits for a core",
        "one rank alone waits; ranks have more threads than cores",
        ("straggler_wait", "host_gap"),
    ),
    Rule(host.checking_left_on, "a run whose environment has such a setting", ""),
    Rule(environment.clock_throttling, "`paceline doctor --run`", ""),
    Rule(
        links.compression_missing,
        "a run with replicas, bytes, and a link bound by them",
        "the link is slower than it should be: that is mended first",
        _EXCHANGES,
    ),
    Rule(
        links.tp_across_nodes,
        "a run whose tensor parallel groups are larger than a node",
        "replicas or shards instead are not expected to gain",
        ("exposed_comm.tp", "straggler_wait"),
    ),
)
# What is left over, and how much other rules have explained: they never stand before a cause.
_LEFT = "what no named cause explains of it"
_RESIDUALS = (
    Rule(residual.slow_kernels, "a device whose speed is known", _LEFT),
    Rule(residual.slower_than_planned, "a prediction", _LEFT),
)
RULES = {rule.name: rule for rule in _CAUSES}
RESIDUALS = {rule.name: rule for rule in _RESIDUALS}

SHOWN = 0.01
"""Findings of a smaller gain are told only to those who ask for all."""


def findings(subject: Subject) -> list[Finding]:
    """What makes the steps slow, the largest sure gain first, what is left over last.

    What was measured beyond the prediction, and no rule explains, is asked for last.
    """
    found = [each for rule in _CAUSES if (each := rule(subject)) is not None]
    found.sort(key=lambda each: -each.weight)
    for rule in _RESIDUALS:
        left = rule(subject, sum(each.gain_s for each in found))
        found += [left] if left is not None else []
    return found


def sound(subject: Subject, found: Finding) -> Finding | None:
    """A finding as it may be told; None where it may not.

    No gain is above the whole. No setting is offered that the Job can't run with or has already.
    Where nothing marks the steps, what is said of "a step" is a guess.
    """
    if not (isfinite(found.gain) and isfinite(found.gain_s)) or found.gain_s < 0:
        return None
    most = min(1.0, 1 / found.gain) if found.gain > 0 else 1.0
    found = replace(found, gain=found.gain * most, gain_s=found.gain_s * most)
    if found.changes:
        found = replace(found, changes=runnable_changes(subject.job, *found.changes))
    if not (found.changes or found.advice):
        return None
    if subject.account is not None and subject.account.caveat(caveats.NO_STEPS):
        found = replace(found, basis="assumed")
    return found

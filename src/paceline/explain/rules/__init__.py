"""Rules: what is known to make steps slow, each a small function of a Subject.

A rule says nothing where it can't see, and estimates what mending its cause would give, not how
long the thing takes: a wait that other ranks' work hides gives nothing. To add one, write a
function in the file of its subject and a line in `RULES`; docs/explain.md tells each.
"""

from collections.abc import Callable, Mapping

from paceline.explain.finding import Finding
from paceline.explain.rules import (
    environment,
    exchange,
    host,
    kernels,
    links,
    memory,
    pipeline,
    residual,
    stalls,
    uneven,
)
from paceline.explain.subject import Subject

Rule = Callable[[Subject], Finding | None]

RULES: Mapping[str, Rule] = {
    "straggler-rank": uneven.straggler_rank,
    "slow-link": links.slow_link,
    "wrong-fabric": links.wrong_fabric,
    "loader-bound": stalls.loader_bound,
    "host-bound": host.host_bound,
    "sync-points": host.sync_points,
    "reduce-every-micro-batch": exchange.reduce_every_micro_batch,
    "buckets-too-small": exchange.buckets_too_small,
    "buckets-too-large": exchange.buckets_too_large,
    "no-overlap": exchange.no_overlap,
    "regather-in-pipeline": pipeline.regather_in_pipeline,
    "uneven-stages": pipeline.uneven_stages,
    "few-micro-batches": pipeline.few_micro_batches,
    "expert-imbalance": uneven.expert_imbalance,
    "length-imbalance": uneven.length_imbalance,
    "allocator-retries": memory.allocator_retries,
    "fp32": kernels.wide_arithmetic,
    "slow-attention": kernels.slow_attention,
    "unfused-elementwise": kernels.unfused_elementwise,
    "small-kernels": kernels.small_kernels,
    "recompute-not-needed": memory.recompute_not_needed,
    "sharding-not-needed": memory.sharding_not_needed,
    "model-too-small": kernels.model_too_small,
    "peak-missing": environment.peak_missing,
    "checkpoint-stall": stalls.checkpoint_stall,
    "evaluation-stall": stalls.evaluation_stall,
    "logging-stall": stalls.logging_stall,
    "garbage-collection": stalls.garbage_collection,
    "warm-up-recorded": host.warm_up_recorded,
    "recompilation": host.recompilation,
    "pageable-copies": host.pageable_copies,
    "thread-oversubscription": host.thread_oversubscription,
    "crowded-cores": host.crowded_cores,
    "cores-taken": host.cores_taken,
    "checking-left-on": host.checking_left_on,
    "clock-throttling": environment.clock_throttling,
    "compression-missing": links.compression_missing,
    "tp-across-nodes": links.tp_across_nodes,
}
# What is left over, and how much other rules have explained: they never stand before a cause.
RESIDUALS: Mapping[str, Callable[[Subject, float], Finding | None]] = {
    "slow-kernels": residual.slow_kernels,
    "slower-than-planned": residual.slower_than_planned,
}

SHOWN = 0.01
"""Findings of a smaller gain are told only to those who ask for all."""


def findings(subject: Subject) -> list[Finding]:
    """What makes the steps slow, the largest sure gain first, what is left over last.

    What was measured beyond the prediction, and no rule explains, is asked for last.
    """
    found = [each for rule in RULES.values() if (each := rule(subject)) is not None]
    found.sort(key=lambda each: -each.weight)
    for rest in RESIDUALS.values():
        left = rest(subject, sum(each.gain_s for each in found))
        found += [left] if left is not None else []
    return found

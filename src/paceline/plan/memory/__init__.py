"""Memory: the peak of each pipeline rank, by the vocabulary's terms, for columns of layouts.

How it works: `parameter_counts` counts the parameters that a rank holds, `states` turns them into
bytes of parameters, gradients and optimizer, `activations` and `logits` count what autograd saves,
`buffers` what is on its way between ranks, and `peak` puts these together at each moment of a step
and takes the worst. How many blocks and micro-batches a rank holds comes from
`paceline.plan.memory.holdings`. The host memory of an elastic run's copies is counted by `copies`.

What it is not: a simulation of the allocator. Reserved memory beyond what tensors take is one share
of what comes and goes (`buffers.SLACK_SHARE`).

Papers: https://arxiv.org/abs/2205.05198 (activations), https://arxiv.org/abs/1910.02054 (states).
"""

from paceline.plan.memory.copies import copy_bytes
from paceline.plan.memory.peak import checkpoint_spike_bytes, memory_bytes

__all__ = ["checkpoint_spike_bytes", "copy_bytes", "memory_bytes"]

"""The tail of data parallelism: what the last gradients still take when the backward pass is over.

DDP notes when the last gradient was computed and when the last bucket had arrived; on a CPU, where
both are the host's own clock, the difference is what communication adds to the step (a stub of the
backward pass that DDP itself takes is in it). It costs 0.1 ms a step (measured, torch 2.13), on the
rank that asks. On CUDA asking would wait for the device; there a profile tells.
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.ranks import Ranks

_NS_PER_S = 1e9


class Tail:
    """Reads DDP's clocks."""

    def __init__(self, module: DistributedDataParallel) -> None:
        assert module.logger is not None, "DDP makes one"
        self._logger = module.logger
        module._set_ddp_runtime_logging_sample_rate(1)

    def seconds(self) -> float:
        """Of the last backward pass that exchanged gradients."""
        self._logger.set_runtime_stats_and_log()
        clocks = self._logger._get_ddp_logging_data().ints_map
        after_ns = clocks["backward_comm_time_end"] - clocks["backward_compute_time_end"]
        return max(0, after_ns) / _NS_PER_S


def tail_of(module: nn.Module, ranks: Ranks) -> Tail | None:
    """The tail of a module's gradients, on the rank that tells of it; None where none is measured.

    Args:
        module: as `parallel.apply` left it.
        ranks: this process's place.
    """
    is_measured = ranks.is_first and ranks.device_type == "cpu"
    return Tail(module) if is_measured and isinstance(module, DistributedDataParallel) else None

"""The tail of data parallelism: what the last gradients still take when the backward pass is over.

DDP waits for its buckets in a callback at the end of the backward pass. Callbacks run in the order
in which they were queued, so one that is queued when the pass begins runs when the last gradient of
this rank was computed, before DDP's; from there to the return of `backward` the rank waits for the
others and for its buckets. On CUDA the host's clock says nothing about it; there a profile tells.
"""

from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.busy_clock import BusyClock
from paceline.comm.rendezvous import Ranks


class ExposedAllReduce:
    """Takes the time from the last gradient to the end of a backward pass."""

    def __init__(self, clock: BusyClock) -> None:
        self._clock = clock
        self._began = False
        self.seconds = 0.0
        """Of the last backward pass, which is the one that exchanges gradients."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss."""
        loss.register_hook(self._on_first_gradient)
        self._began = False
        loss.backward()
        self.seconds = self._clock.end_wait() if self._began else 0.0

    def _on_first_gradient(self, _gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._begin)

    def _begin(self) -> None:
        self._began = True
        self._clock.begin_wait()


def exposed_all_reduce_of(
    module: nn.Module, ranks: Ranks, clock: BusyClock
) -> ExposedAllReduce | None:
    """The tail of a module's backward pass; None where nothing can be told of it."""
    is_measured = ranks.world_size > 1 and ranks.device_type == "cpu"
    return (
        ExposedAllReduce(clock)
        if is_measured and isinstance(module, DistributedDataParallel)
        else None
    )

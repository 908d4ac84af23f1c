"""Memory owners: which memory of this rank belongs to what lives as long as the run."""

from collections.abc import Iterable

from torch import Tensor

from paceline.comm.local_part import local_part
from paceline.observe.memory import Held
from paceline.train.trainer import Trainer


def memory_owners(trainer: Trainer) -> Held:
    """Where the storages of parameters, of gradients and of the optimizer's state are."""
    parameters = list(trainer.module.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    states = trainer.update.optimizer.state.values()
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return {
        "params": _storages(parameters),
        "grads": _storages(gradients),
        "optimizer": _storages(moments),
    }


def _storages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address and bytes, each once: views share a storage."""
    storages = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    found = {each.data_ptr(): each.nbytes() for each in storages if each.device.type != "cpu"}
    return list(found.items())

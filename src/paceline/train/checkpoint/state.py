"""The tensors that make up a training state, under names that no layout changes.

`training_state` turns a module and its optimizer into one nested dict, `restore_training_state`
puts such a dict back. Names are those of the bare, whole module: DistributedDataParallel,
`fully_shard`, `torch.compile` and activation-checkpoint wrappers leave no trace in them, nor do the
stages of a pipeline, and a tied parameter is listed once, under its first name.

A rank lists what it holds: with a pipeline a part of the names, of which another rank may list some
too (tied embeddings, DualPipe), and of each tensor its shard, a DTensor that knows where in
the whole it lies. Tensors are the live ones, so a checkpoint loaded into the dict is loaded into
the module; only what an optimizer keeps in a form of its own (8-bit codes) comes and goes as the
numbers it stands for, on the host (`SavedState`).

The model half is torch's own `get_model_state_dict`. The optimizer half is not, for three reasons
seen in its source: for an optimizer that has not stepped it calls `step()` on zero gradients, which
leaves Adam's step count at one; `Optimizer.load_state_dict` casts every state tensor to the
parameter's dtype, which would round an fp32 master copy to bf16; and it carries over the settings
of the parameter groups (weight decay, betas, `fused`), which are the Job's to say when a run goes
on.

Not here: reading and writing files (`checkpointer`).
"""

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.config.errors import InputError
from paceline.parallel.stages import StageModules
from paceline.train.checkpoint.files import FoundState, TensorEntry

WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
STATE_PREFIX = "optimizer."


@runtime_checkable
class SavedState(Protocol):
    """An optimizer that says itself what a checkpoint keeps of a parameter's state."""

    is_on_host: bool
    """Whether state waits in host memory; what is loaded is then put there, "step" aside."""

    def saved_state(self, p: nn.Parameter) -> dict[str, Any]:
        """Tensors laid out over the ranks as p is (or single numbers), by key.

        `state[p]` is replaced by such a dict when a checkpoint has been loaded.
        """
        ...


def training_state(
    module: nn.Module, optimizer: Optimizer, found: FoundState | None = None
) -> dict[str, Any]:
    """Return what has to be saved to continue training, or, with `found`, what to load it into.

    Args:
        module: the model, bare or wrapped (DDP, `fully_shard`, `torch.compile`, ...).
        optimizer: built from the parameters of `module` as it is now, that is after wrapping.
        found: the checkpoint about to be loaded. Optimizer state that it holds and the optimizer
            has not made yet is allocated in the layout of the parameter; state that it doesn't hold
            is left out, so that `restore_training_state` drops it.

    Returns:
        `{"model": {name: tensor}, "optimizer": {name: {key: value}}}`; the tensors are the live
        ones, not copies. Settings of the optimizer's groups are not in it.

    Raises:
        InputError: the optimizer holds a parameter that isn't in the module, or keeps a plain
            tensor for a sharded parameter, which no other number of ranks could load.
    """
    model = _model_state(module)
    names, aliases = parameter_names(module)
    owned = [
        (group, p, _name(p, names)) for group in optimizer.param_groups for p in group["params"]
    ]
    kept = {name: tensor for name, tensor in model.items() if name not in aliases}
    if found is not None:
        return {"model": kept, "optimizer": _state_to_load(owned, optimizer, found)}
    one_of_each = _by_name(owned).items()
    state = {name: _state_to_save(optimizer, p, name) for name, (_, p) in one_of_each}
    return {"model": kept, "optimizer": {name: own for name, own in state.items() if own}}


def restore_training_state(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Put a dict made by `training_state` (usually one just loaded) into module and optimizer.

    A parameter without saved state loses the state it had: it will start afresh, as it would have
    in the run that was saved.
    """
    names, aliases = parameter_names(module)
    model = dict(state["model"])
    model.update({alias: model[first] for alias, first in aliases.items()})
    for part in _parts(module):
        own = get_model_state_dict(part)
        set_model_state_dict(part, {name: model[name] for name in own})
    taken: set[str] = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = _name(p, names)
            saved = state["optimizer"].get(name)
            if saved:
                # Stages on this rank may each have a copy of a parameter, with a state of its own.
                optimizer.state[p] = copy.deepcopy(saved) if name in taken else dict(saved)
                taken.add(name)
            else:
                optimizer.state.pop(p, None)


def _parts(module: nn.Module) -> list[nn.Module]:
    return list(module) if isinstance(module, StageModules) else [module]


def _model_state(module: nn.Module) -> dict[str, Any]:
    """The tensors of all stages on this rank; of a parameter with copies on several, the first."""
    model: dict[str, Any] = {}
    for part in _parts(module):
        # FSDP2's hook in it also puts the sharded parameters back in place.
        model = {**get_model_state_dict(part), **model}
    return model


def rng_state() -> dict[str, dict[str, Tensor]]:
    """Return this rank's random-generator states as `{rank: {"cpu": uint8, "cuda": uint8}}`.

    Saved under the key "rng", each rank adds its own entry; a rank that the saving run didn't have
    finds none on loading and keeps the generators it has.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {str(rank): states}


def restore_rng_state(states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Set this rank's random generators from a dict made by `rng_state`."""
    for state in states.values():
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])


def parameter_names(module: nn.Module) -> tuple[dict[nn.Parameter, str], dict[str, str]]:
    """Return each parameter's canonical name, and each further name of a tied one -> its first.

    Two parameters have one name where two stages on this rank each have a copy.
    """
    names: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    for raw_name, parameter in module.named_parameters(remove_duplicate=False):
        name = _canonical(module, raw_name)
        first = names.setdefault(parameter, name)
        if first != name:
            aliases[name] = first
    return names, aliases


def _canonical(module: nn.Module, raw_name: str) -> str:
    """Drop the parts of a name that wrappers add. "module" is one only directly under DDP."""
    kept = []
    holder: Any = module
    for part in raw_name.split("."):
        is_ddp = part == "module" and isinstance(holder, DistributedDataParallel)
        is_stage = isinstance(holder, StageModules)
        if not is_ddp and not is_stage and part not in WRAPPER_PARTS:
            kept.append(part)
        holder = getattr(holder, part)
    return ".".join(kept)


def _name(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise InputError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that isn't in the "
            "module; build the optimizer from the module's parameters after the module is wrapped."
        )
    return names[parameter]


_Owned = tuple[dict[str, Any], nn.Parameter, str]


def _by_name(owned: list[_Owned]) -> dict[str, tuple[dict[str, Any], nn.Parameter]]:
    """One parameter for each name: its copies on other stages of this rank are the same."""
    by_name: dict[str, tuple[dict[str, Any], nn.Parameter]] = {}
    for group, parameter, name in owned:
        by_name.setdefault(name, (group, parameter))
    return by_name


def _state_to_save(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> dict[str, Any]:
    if not optimizer.state.get(parameter):
        return {}
    if isinstance(optimizer, SavedState):
        return optimizer.saved_state(parameter)
    state = optimizer.state[parameter]
    is_sharded = isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)
    for key, value in state.items():
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_sharded and is_plain and value.numel() > 1:
            raise InputError(
                f"the optimizer keeps {key!r} of the sharded parameter {name} as a plain tensor, "
                "which says nothing about the other ranks; make it like the parameter "
                "(torch.empty_like), a DTensor."
            )
    return dict(state)


def _state_to_load(
    owned: list[_Owned], optimizer: Optimizer, found: FoundState
) -> dict[str, dict[str, Any]]:
    """Targets for the optimizer state that the checkpoint holds, laid out like the parameters."""
    by_name = _by_name(owned)
    on_host = isinstance(optimizer, SavedState) and optimizer.is_on_host
    state: dict[str, dict[str, Any]] = {}
    for path in (*found.manifest.tensors, *found.manifest.values):
        split = split_state_path(path, by_name)
        if split is None:
            continue
        name, keys = split
        group, parameter = by_name[name]
        inner = state.setdefault(name, {})
        existing: Any = optimizer.state.get(parameter, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            existing = existing.get(key, {})
        key, entry = keys[-1], found.manifest.tensors.get(path)
        if entry is None:  # a number, which is replaced
            inner[key] = None
        elif _fits(existing.get(key), entry):
            inner[key] = existing[key]
        else:
            inner[key] = _room(key, entry, parameter, group, on_host=on_host)
    return state


def split_state_path(path: str, names: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """Split `optimizer.<name>.<key>...`; both may hold dots, so look which name fits.

    Returns:
        the name and the keys; None: it is of none of these names.
    """
    if not path.startswith(STATE_PREFIX):
        return None
    name = path.removeprefix(STATE_PREFIX)
    keys: list[str] = []
    while "." in name:
        name, _, key = name.rpartition(".")
        keys.insert(0, key)
        if name in names:
            return name, keys
    return None


def _fits(existing: Any, entry: TensorEntry) -> bool:
    return (
        isinstance(existing, Tensor)
        and existing.dtype == entry.torch_dtype
        and list(existing.shape) == entry.size
    )


def _room(
    key: str,
    entry: TensorEntry,
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    *,
    on_host: bool,
) -> Tensor:
    """A tensor to load one state entry into, of no particular contents."""
    dtype = entry.torch_dtype
    # Adam and its kin read the step count on the host, unless their kernel wants it on the device.
    is_host_count = key == "step" and not (group.get("fused") or group.get("capturable"))
    is_on_host = is_host_count if key == "step" else on_host
    device = torch.device("cpu") if is_on_host else parameter.device
    if key != "step" and list(parameter.shape) == entry.size:
        return torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    return torch.empty(entry.size, dtype=dtype, device=device)

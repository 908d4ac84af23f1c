"""What a Comm demands of the layout: each rule refuses in one sentence.

Pure, like `feasible`, whose companion it is: what can't be compressed, or compresses nothing, is
refused before any process starts.
"""

from collections.abc import Callable, Iterator

from paceline.config.comm import Comm, LocalUpdates
from paceline.config.errors import InputError
from paceline.config.layout import Layout

Rule = Callable[[Comm, Layout], Iterator[str]]


def check_comm(comm: Comm, layout: Layout, *, may_be_alone: bool = False) -> None:
    """Refuse what a layout can't communicate.

    Args:
        may_be_alone: whether one worker of local updates may be left, as in an elastic run.

    Raises:
        InputError: one sentence with what was given, what is required and what to change.
    """
    for rule in _RULES if may_be_alone else (_company, *_RULES):
        for sentence in rule(comm, layout):
            raise InputError(sentence)


def _replicas(comm: Comm, layout: Layout) -> Iterator[str]:
    """Replicas of whole networks are DDP's, those of parts FSDP2's; experts have their own mesh."""
    cut = [axis for axis in ("fsdp", "tp", "cp", "pp") if getattr(layout, axis) != 1]
    for name, value in _lossy_or_own(comm).items():
        setting = f'comm.dp.{name} = "{value}"'
        if layout.dp == 1:
            yield f"{setting} has no effect with layout.dp = 1: raise dp or leave it out."
        yield from _whole(setting, "replicas of all experts", layout, "ep")
        if cut and value.startswith(("powersgd", "quinary")):
            yield from _whole(setting, "whole networks", layout, *cut)
        if cut and "params" in layout.offload:
            yield (
                f"{setting} needs gradients on the device, which layout.offload = "
                f"{list(layout.offload)} takes to the host: leave one of them out."
            )


def _whole(setting: str, needed: str, layout: Layout, *axes: str) -> Iterator[str]:
    for axis in axes:
        if getattr(layout, axis) != 1:
            yield (
                f"{setting} needs {needed}, which layout.{axis} = {getattr(layout, axis)} cuts: "
                f"set {axis} = 1 or leave it out."
            )


def _shards(comm: Comm, layout: Layout) -> Iterator[str]:
    """What FSDP2 reduces and gathers belongs to parameters by name, whole but for the shards."""
    if comm.fsdp.algorithm not in ("auto", "backend") and layout.fsdp == 1:
        yield (
            f'comm.fsdp.algorithm = "{comm.fsdp.algorithm}" has no effect with layout.fsdp = 1: '
            "raise fsdp or leave it out."
        )
    lossy = {"compress": comm.fsdp.compress, "compress_weights": comm.fsdp.compress_weights}
    for name, value in lossy.items():
        setting = f'comm.fsdp.{name} = "{value}"'
        if value == "none":
            continue
        if value == "auto" and name == "compress":
            continue  # the planner's, which knows where nothing else than exact sums can be used
        if value == "auto":
            yield f'{setting} asks for what nobody has measured: name a form, "int8" for one.'
        if layout.fsdp == 1:
            yield f"{setting} has no effect with layout.fsdp = 1: raise fsdp or leave it out."
        yield from _whole(setting, "shards of whole layers", layout, "tp", "ep")
        if layout.param_dtype == "fp64":
            yield (
                f'{setting} would round what layout.param_dtype = "fp64" keeps exact: set it to '
                '"none", or param_dtype = "fp32".'
            )
    yield from _two_bytes(comm, layout)


def _two_bytes(comm: Comm, layout: Layout) -> Iterator[str]:
    weights = comm.fsdp.compress_weights
    if weights in ("bf16", "fp16") and layout.precision not in ("fp32", "fp64"):
        yield (
            f'comm.fsdp.compress_weights = "{weights}" sends as many bytes as layout.precision = '
            f'"{layout.precision}" does: use "int8", "fp8" or "int4", or leave it out.'
        )


def _messages(comm: Comm, layout: Layout) -> Iterator[str]:
    """Activations between stages, and tokens on their way to experts."""
    for axis, value in (("pp", comm.pp.compress), ("ep", comm.ep.compress)):
        setting = f'comm.{axis}.compress = "{value}"'
        if value == "none":
            continue
        if value == "auto":
            yield f'{setting} is nothing that the planner can price: name a form, "int8" for one.'
        if getattr(layout, axis) == 1:
            yield (f"{setting} has no effect with layout.{axis} = 1: raise {axis} or leave it out.")
        if layout.param_dtype == "fp64":
            yield (
                f'{setting} would round the activations that layout.param_dtype = "fp64" keeps '
                'exact: set it to "none", or param_dtype = "fp32".'
            )
        if value in ("bf16", "fp16") and layout.precision not in ("fp32", "fp64"):
            yield (
                f'{setting} sends as many bytes as layout.precision = "{layout.precision}" does: '
                'use "int8", "fp8" or "int4", or leave it out.'
            )


def _hot_experts(comm: Comm, layout: Layout) -> Iterator[str]:
    hot = comm.ep.hot_experts
    if hot and layout.ep == 1:
        yield (
            f"comm.ep.hot_experts = {hot} has no effect with layout.ep = 1, where each rank has "
            "all experts: raise ep or leave it out."
        )


def _lossy_or_own(comm: Comm) -> dict[str, str]:
    """What comm.dp asks for besides the backend's exact sums."""
    asked = {"compress": comm.dp.compress, "algorithm": comm.dp.algorithm}
    return {key: wish for key, wish in asked.items() if wish not in ("none", "auto", "backend")}


def _precision(comm: Comm, layout: Layout) -> Iterator[str]:
    if layout.param_dtype == "fp64" and comm.dp.compress not in ("none", "auto"):
        yield (
            f'comm.dp.compress = "{comm.dp.compress}" would round the gradients that '
            'layout.param_dtype = "fp64" keeps exact: set it to "none", or param_dtype = "fp32".'
        )


def _company(comm: Comm, layout: Layout) -> Iterator[str]:
    method = comm.local.method
    if method != "none" and layout.dp == 1:
        yield (
            f'comm.local.method = "{method}" has nobody to meet with layout.dp = 1: raise dp or '
            "leave it out."
        )


def _workers(comm: Comm, layout: Layout) -> Iterator[str]:
    """A worker of local updates is the ranks that share one replica: all with the same dp."""
    local = comm.local
    if local.method == "none":
        for name, value in _changed(local).items():
            yield f'{name} = {value} has no effect with comm.local.method = "none": leave it out.'
        return
    setting = f'comm.local.method = "{local.method}"'
    yield from _whole(
        setting, "workers with all layers and experts on each rank", layout, "pp", "ep"
    )
    for name in ("compress", "compress_weights"):
        if (form := getattr(comm.fsdp, name)) not in ("none", "auto"):
            yield (
                f'comm.fsdp.{name} = "{form}" keeps errors of its own beside those of {setting}: '
                "leave one of them out."
            )
    if layout.sync_batch_norm:
        yield (
            f"layout.sync_batch_norm = true shares statistics in every step, and {setting} lets "
            "each worker step for itself: leave one of them out."
        )
    for name, value in _lossy_or_own(comm).items():
        yield (
            f'comm.dp.{name} = "{value}" has no effect with {setting}, under which no gradients '
            "travel: leave it out (comm.local.compress is for what travels instead)."
        )
    yield from _worker_precision(comm, layout)


def _worker_precision(comm: Comm, layout: Layout) -> Iterator[str]:
    setting = f'comm.local.method = "{comm.local.method}"'
    if layout.param_dtype not in ("fp32", "fp64"):
        yield (
            f"{setting} averages what the optimizer steps, of which layout.param_dtype = "
            f'"{layout.param_dtype}" keeps a rounded copy: set param_dtype = "fp32".'
        )
    if layout.precision == "fp16":
        yield (
            f'{setting} has a loss scale per worker with layout.precision = "fp16", which a '
            'checkpoint keeps one of: set precision = "bf16" or "fp32".'
        )
    if layout.param_dtype == "fp64" and comm.local.compress not in ("none", "auto"):
        yield (
            f'comm.local.compress = "{comm.local.compress}" would round the outer gradients that '
            'layout.param_dtype = "fp64" keeps exact: set it to "none", or param_dtype = "fp32".'
        )


def _timetable(comm: Comm, _layout: Layout) -> Iterator[str]:
    local = comm.local
    if local.method == "none":
        return
    unused = {"local_sgd": ("outer_lr", "outer_momentum"), "diloco": (), "streaming": ()}
    streaming = () if local.method == "streaming" else ("fragments", "overlap_steps")
    for name in (*unused[local.method], *streaming):
        if getattr(local, name) != getattr(_NO_LOCAL, name):
            yield (
                f"comm.local.{name} = {getattr(local, name)} has no effect with "
                f'comm.local.method = "{local.method}": leave it out.'
            )
    if local.every == "auto":
        return  # the planner leaves room for both
    if local.late_steps >= local.every:
        yield (
            f"comm.local.overlap_steps = {local.overlap_steps} but a fragment leaves again after "
            f"comm.local.every = {local.every} steps: lower overlap_steps or raise every."
        )
    if local.fragments > local.every:
        yield (
            f"comm.local.fragments = {local.fragments} don't each have a step of their own within "
            f"comm.local.every = {local.every}: lower fragments or raise every."
        )


_NO_LOCAL = LocalUpdates()


def _changed(local: LocalUpdates) -> dict[str, object]:
    """What was set of local updates."""
    return {
        f"comm.local.{name}": value
        for name, value in local
        if name != "method" and value != getattr(_NO_LOCAL, name)
    }


_RULES: tuple[Rule, ...] = (
    *(_workers, _timetable),
    *(_replicas, _precision, _shards, _messages, _hot_experts),
)

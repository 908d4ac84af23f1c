"""What is another now than when a Run was last trained: its settings, or what a person brought.

A script that was edited and started again finds the Run of its name. Where that is complete,
nothing would be trained; so what changed is named, and what to do about it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from paceline.config.errors import InputError
from paceline.config.job import Job, differing, to_raw
from paceline.observe.run import Run
from paceline.render.figures import listed
from paceline.train.checkpoint.files import newest_facts
from paceline.train.checkpoint.state import parameter_names
from paceline.train.custom.code import code_digest
from paceline.train.custom.digest import digest
from paceline.train.custom.isolated_rng import IsolatedRng

Traits = dict[str, Any]
"""What a person brought, by short names that are kept in facts.json; None: not known."""

_PARAMETERS, _LENGTH = "the parameters of the model", "the length of data"
# These decide how a run goes on, and nothing of what it has done.
_FREE = ("train.steps", "train.eval_every", "train.eval_batches")
_SECTIONS = ("model", "optim", "train", "comm")


def traits_of(
    module: nn.Module, data: Any, brought: Mapping[str, Callable[..., Any] | float | None]
) -> Traits:
    """Name what a person brought.

    Args:
        module: before it is put on the ranks.
        brought: what else, by what it is: functions by their code, numbers as they are.
    """
    names, _ = parameter_names(module)
    shapes = {name: (tuple(p.shape), str(p.dtype)) for p, name in names.items()}
    return {
        _PARAMETERS: digest(repr(sorted(shapes.items()))),
        "the code of the model": code_digest(module),
        **{name: None if value is None else code_digest(value) for name, value in brought.items()},
        **_traits_of_data(data),
    }


def _traits_of_data(data: Any) -> Traits:
    source = data.dataset if isinstance(data, DataLoader) else data
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__") and len(source)):
        return {_LENGTH: None, "the first sample": None}
    with IsolatedRng("first sample") as chance:
        chance.seed("first sample")
        return {_LENGTH: len(source), "the first sample": digest(source[0])}


def changes_since(run: Run, job: Job, traits: Traits) -> list[str]:
    """What is another now than when a Run's checkpoints were made, as parts of a sentence; [] where
    it has none.

    Raises:
        InputError: its checkpoints are of another model.
    """
    if not newest_facts(run.checkpoint_folder):
        return []
    before = run.facts().get("own", {})
    if before.get(_PARAMETERS, traits[_PARAMETERS]) != traits[_PARAMETERS]:
        raise InputError(
            f"{run.path} has checkpoints of a model with other parameters: give the Job another "
            "name, or start over with fresh=True."
        )
    return changed_settings(run.job(), job) + [
        f"{name} ({before[name]:,} before, {new:,} now)" if name == _LENGTH and new else name
        for name, new in traits.items()
        if name in before and before[name] != new
    ]


def changed_settings(before: Job, now: Job) -> list[str]:
    """Settings that decide what is trained, with both values."""
    old, new = ({name: to_raw(job)[name] for name in _SECTIONS} for job in (before, now))
    return [
        f"{name} ({was} before, {value} now)"
        for name, was, value in differing(old, new)
        if name not in _FREE
    ]


def must_train(run: Run, job: Job, changes: list[str]) -> None:
    """Refuse a start that would train nothing though something changed.

    Raises:
        InputError: the Run is complete.
    """
    done = newest_facts(run.checkpoint_folder).get("step", 0)
    if changes and done >= job.train.steps:
        raise InputError(
            f"{run.path} is complete after {done} steps, and since then {listed(changes)} changed, "
            "so that nothing would be trained: give the Job another name, start over with "
            "fresh=True, or raise train.steps to go on from the weights it has."
        )

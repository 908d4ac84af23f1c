"""What the settings of a mixture demand of each other: a sentence for the first that isn't met."""

from paceline.config.job_sections import Data
from paceline.config.mixture import EvalSet

_RESERVED = "held_out"
"""The name of what an only source holds out."""


def mixture_problem(data: Data) -> str | None:
    """What doesn't agree, None where all does."""
    sources = data.sources
    names = [each.name for each in (*sources, *data.eval_sets)]
    for name in names:
        if names.count(name) > 1:
            return f'data.sources and data.eval_sets have two named "{name}": rename one.'
    if _RESERVED in names:
        return f'the name "{_RESERVED}" is that of what data.source holds out: give another.'
    for each in (*sources, *data.eval_sets):
        if each.dedup.problem is not None:
            return f"{each.name}: {each.dedup.problem}"
    if data.dedup.problem is not None:
        return f"data.{data.dedup.problem}"
    if (problem := _of_tokens(data)) is not None:
        return problem
    if not sources:
        return _unused(data)
    if data.source != Data().source:
        return f"data.source = {data.source!r} and data.sources each say what is read: keep one."
    for name in ("format", "text_field", "filter", "dedup"):
        if getattr(data, name) != getattr(Data(), name):
            return (
                f"data.{name} has no effect with data.sources: give it to each of them that needs "
                "it."
            )
    weights = [each.weight for each in sources]
    weighted = [weight for weight in weights if weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = sources[weights.index(None)].name
        return (
            f'data.sources "{bare}" has no weight and others have: give all of them one, or none.'
        )
    if weighted and not any(weighted):
        return "the weights of data.sources are all 0: give one of them more."
    for each in sources:
        if each.epochs is not None and weighted:
            return (
                f'data.sources "{each.name}" has epochs = {each.epochs} in place of a weight, and '
                "there are weights: keep one kind."
            )
        if each.epochs is not None and data.temperature != 1:
            return (
                f"data.temperature = {data.temperature} has no effect on data.sources "
                f'"{each.name}", which says its epochs: keep one of them.'
            )
    if weighted and data.temperature != 1:
        return (
            f"data.temperature = {data.temperature} is of sources without weights, and "
            "data.sources have some: leave one of them out."
        )
    return _of_stages(data)


def _of_tokens(data: Data) -> str | None:
    """A setting that is of no use to published tokens, or to all else."""
    parts: list[tuple[str, Data | EvalSet]] = [] if data.sources else [("data", data)]
    parts += [(each.name, each) for each in (*data.sources, *data.eval_sets)]
    published = [(name, part) for name, part in parts if part.format == "tokens"]
    for name, part in published:
        for setting in ("text_field", "filter", "dedup"):
            if getattr(part, setting) != getattr(Data(), setting):
                return (
                    f'{name}: {setting} has no effect on format = "tokens", of which it was '
                    "decided when they were published: leave it out."
                )
    if published and data.has_answers:
        return (
            f'data.records = "{data.records}" says more than data.format = "tokens" can hold: '
            "leave one of them out."
        )
    if data.wait_s != Data().wait_s and not published:
        return f'data.wait_s = {data.wait_s} is of format = "tokens": leave it out.'
    return None


def _unused(data: Data) -> str | None:
    """A setting of mixtures without one."""
    for name in ("temperature", "stages"):
        if getattr(data, name) != getattr(Data(), name):
            return f"data.{name} has no effect without data.sources: give these, or leave it out."
    return None


def _of_stages(data: Data) -> str | None:
    known, before = [each.name for each in data.sources], 0
    for stage in data.stages:
        at = f"data.stages from_step = {stage.from_step}"
        if stage.from_step <= before:
            return f"{at} stands after one of {before}: sort them, each with a step of its own."
        before = stage.from_step
        for name in stage.weights:
            if name not in known:
                return f'{at} weighs "{name}", which is none of data.sources: {", ".join(known)}.'
        if not any(stage.weights.values()):
            return f"{at} has no weight above 0: give one."
    return None

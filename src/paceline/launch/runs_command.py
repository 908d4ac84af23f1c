"""The commands `paceline runs ...`: list, tag and compare runs, and let old checkpoints go."""

import json
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.frozen import nearest
from paceline.config.job import differing, to_raw
from paceline.config.outputs import shown_path
from paceline.launch.cost_show import device_time_text, usd_text
from paceline.launch.index import IndexedRun, indexed_runs
from paceline.launch.prune import Removal, Rule, removal_of, remove
from paceline.launch.run_facts import TAGS_FILE, RunParts, read_run, tags_of
from paceline.launch.run_records import RunRecords
from paceline.observe.run import Run
from paceline.render.figures import (
    amount_text,
    bytes_text,
    date_text,
    loss_text,
    plural,
    share_text,
    time_text,
)
from paceline.render.table import Table

_CONDITION = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_STEPS_SHOWN = 3
_PATIENCE_S = 60.0
"""So long a command waits for another one that gives a tag."""


@dataclass(frozen=True)
class Selection:
    """Which runs are wanted, and in which order."""

    where: Sequence[str] = ()
    """Conditions, as "loss<3" or "optim.lr>=1e-3"; all of them hold."""
    sort: str | None = None
    """A field, with "-" before it from the largest on; None: by name."""
    tag: str | None = None


def runs_command(folder: Path, wanted: Selection, *, as_json: bool) -> None:
    """List the runs of a folder.

    Raises:
        InputError: there is none, or a condition can't be understood.
    """
    known = _indexed(folder)
    rows = _selected([(each, _fields(each)) for each in known], wanted)
    console = Console(highlight=False)
    if rows:
        console.print(_table([each for each, _ in rows]))
    else:
        console.print(f"none of {plural(len(known), 'run')} is one of these.")
    for each, _ in rows:
        if each.facts.damage:
            console.print(f"{each.facts.name}: {each.facts.damage}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps([fields for _, fields in rows]))


def tag_command(run: Run, tag: str, *, remove: bool) -> None:
    """Give a run a tag, or take it away.

    Raises:
        InputError: there is no such run, or it can't be a tag.
    """
    _must_be_run(run)
    if not _TAG.fullmatch(tag):
        raise InputError(
            f"{tag[:80]!r} can't be a tag: use up to 64 letters, digits, '.', '_' and '-'."
        )
    # Else one of two commands would write over what the other one gave.
    with FileLock(run.path / f".{TAGS_FILE}.lock", timeout=_PATIENCE_S):
        tags = set(tags_of(run))
        tags = tags - {tag} if remove else tags | {tag}
        run.write_json(TAGS_FILE, sorted(tags))
    print(f"{run.path.name}: {', '.join(sorted(tags)) or 'no tags'}")


def compare_command(one: Run, other: Run, *, as_json: bool) -> None:
    """Show in which settings and figures two runs differ.

    Raises:
        InputError: one of them is no run, or damaged.
    """
    jobs = [to_raw(RunRecords.of(run).job) for run in (one, other)]
    parts = [read_run(run) for run in (one, other)]
    for part in parts:
        if part.facts.damage:
            raise InputError(part.facts.damage)
    names = [_name(run, (one, other)) for run in (one, other)]
    settings = differing(*jobs)
    console = Console(highlight=False)
    rows = [(name, _setting(old), _setting(new)) for name, old, new in settings]
    if rows:
        console.print(Table(("setting", *names), rows, words=(0, 1, 2)))
    else:
        console.print("all settings are the same.")
    console.print()
    figures = [_figures(part) for part in parts]
    told = [(name, old, figures[1][name]) for name, old in figures[0].items()]
    console.print(Table(("", *names), [row for row in told if any(row[1:])]))
    if as_json:
        shown = {name: [old, new] for name, old, new in settings}
        print(json.dumps({"settings": shown, "runs": [_plain(part) for part in parts]}))


def prune_command(
    runs: Sequence[Run], rule: Rule, *, in_store: bool, yes: bool, as_json: bool
) -> None:
    """Let checkpoints go by a rule; say which would without `yes`.

    Args:
        in_store: the copies in stores, rather than those on the disk.

    Raises:
        InputError: one is no run.
    """
    for run in runs:
        _must_be_run(run)
    now = time.time()
    go = remove if yes else removal_of
    found = [go(run, rule, now, in_store=in_store) for run in runs]
    console = Console(highlight=False)
    going = [each for each in found if each.steps]
    if going:
        total = sum(each.bytes for each in going)
        heads = ("run", "checkpoints", "steps", "removed" if yes else "would be removed")
        num = sum(len(each.steps) for each in going)
        foot = ("all", str(num), "", bytes_text(total))
        console.print(Table(heads, [_removal(each) for each in going], words=(0, 2), foot=foot))
    else:
        console.print("no checkpoint goes by this rule.")
    for each in found:
        if each.why_not:
            console.print(f"{each.run.path.name} is left alone: {each.why_not}.", markup=False)
    if going and not yes:
        console.print("nothing was removed; the same with --yes removes them.")
    if as_json:
        print(json.dumps([_removal_json(each, removed=yes) for each in found]))


def runs_in(folder: Path) -> list[Run]:
    """All runs of a folder, by name.

    Raises:
        InputError: there is none.
    """
    found = [Run(file.parent) for file in sorted(folder.glob("*/job.toml"))]
    if not found:
        raise InputError(f"{shown_path(folder)} has no run: give --runs the folder that has them.")
    return found


def _indexed(folder: Path) -> list[IndexedRun]:
    runs_in(folder)
    return indexed_runs(folder)


def _must_be_run(run: Run) -> None:
    if not run.exists:
        raise InputError(
            f"{shown_path(run.path)} is not a run: give the directory of one, such as runs/demo."
        )


def _name(run: Run, both: Sequence[Run]) -> str:
    """Of the directory; the whole path where both have the same."""
    same = both[0].path.name == both[1].path.name
    return str(run.path) if same else run.path.name


# ---- which, and in which order -------------------------------------------------------------------


def _fields(one: IndexedRun) -> dict[str, Any]:
    """What conditions ask for, and what `--json` gives."""
    facts = {name: value for name, value in vars(one.facts).items() if name != "settings"}
    return {
        **facts,
        "state": one.state,
        "tags": list(one.tags),
        "checkpoints": one.num_checkpoints,
        "checkpoint_bytes": one.checkpoint_bytes,
        "settings": dict(one.facts.settings),
    }


Row = tuple[IndexedRun, dict[str, Any]]


def _selected(rows: Sequence[Row], wanted: Selection) -> list[Row]:
    found = [row for row in rows if wanted.tag is None or wanted.tag in row[0].tags]
    for text in wanted.where:
        holds = _condition(text, [fields for _, fields in rows])
        found = [row for row in found if holds(row[1])]
    if wanted.sort is not None:
        name = wanted.sort.removeprefix("-")
        _must_be_known(name, "--sort", [fields for _, fields in rows])
        known = [row for row in found if _field(row[1], name) is not None]
        known.sort(key=lambda row: _order(_field(row[1], name)), reverse=wanted.sort[:1] == "-")
        found = known + [row for row in found if _field(row[1], name) is None]
    return found


def _condition(text: str, all_fields: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any]], bool]:
    parsed = _CONDITION.fullmatch(text)
    if parsed is None:
        raise InputError(
            f'--where {text!r} is no condition: write "loss<3", "state=finished" or "optim.lr>0".'
        )
    name, sign, wanted = parsed.groups()
    _must_be_known(name, "--where", all_fields)
    compare, number_wanted = _COMPARE[sign], _number(wanted)

    def holds(fields: dict[str, Any]) -> bool:
        value = _field(fields, name)
        if value is None:
            return sign == "!="
        if isinstance(value, bool | str | list):
            return sign in ("=", "!=") and compare(_setting(value), wanted)
        return number_wanted is not None and compare(value, number_wanted)

    return holds


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _field(fields: Mapping[str, Any], name: str) -> Any:
    """A figure of a run, or a setting of its Job by its dotted name; None: it has none."""
    if "." not in name:
        return fields.get(name)
    value: Any = fields["settings"]
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if isinstance(value, Mapping) else value


def _must_be_known(name: str, option: str, all_fields: Sequence[dict[str, Any]]) -> None:
    if any(_field(fields, name) is not None for fields in all_fields):
        return
    known = {key for fields in all_fields for key in fields if key != "settings"}
    if name not in known:
        raise InputError(f"{option}: no run has {name}{nearest(name, sorted(known))}")


def _order(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)


# ---- how it looks --------------------------------------------------------------------------------


def _table(runs: Sequence[IndexedRun]) -> Table:
    rows = []
    for one in runs:
        facts = one.facts
        rows.append(
            (
                facts.name,
                one.state,
                f"{facts.steps:,}",
                "–" if facts.loss is None else loss_text(facts.loss),
                "–" if facts.eval_loss is None else loss_text(facts.eval_loss),
                amount_text(facts.device_s / 3600),
                "–" if facts.started is None else date_text(facts.started)[:10],
                ", ".join(one.tags),
            )
        )
    heads = ("run", "state", "steps", "loss", "held out", "device-h", "started", "tags")
    return Table(heads, rows, words=(0, 1, 7))


def _figures(parts: RunParts) -> dict[str, str]:
    facts = parts.facts
    checkpoints = parts.rows.get("checkpoints", ())
    parent = "" if facts.parent is None else f"{facts.parent}, step {facts.parent_step}"
    return {
        "state": facts.state,
        "steps": f"{facts.steps:,}",
        facts.unit: amount_text(facts.units),
        "loss": "" if facts.loss is None else loss_text(facts.loss),
        "held-out loss": "" if facts.eval_loss is None else loss_text(facts.eval_loss),
        "best held-out loss": ""
        if facts.best_eval_loss is None
        else loss_text(facts.best_eval_loss),
        "time of a step": "" if facts.step_s is None else time_text(facts.step_s),
        "devices": str(facts.devices),
        "layout": facts.layout,
        "held": device_time_text(round(facts.device_s * 1e6)),
        "goodput": "" if facts.goodput is None else share_text(facts.goodput),
        "cost": "" if facts.usd is None else usd_text(facts.usd),
        "checkpoints": str(len(checkpoints)),
        "parameters": "" if facts.params is None else f"{facts.params:,}",
        "commit": facts.code_commit or "",
        "data": (facts.data_key or "")[:16],
        "started from": parent,
        "attempts": str(len(parts.rows.get("attempts", ()))),
    }


def _plain(parts: RunParts) -> dict[str, Any]:
    return {**vars(parts.facts), **{name: list(rows) for name, rows in parts.rows.items()}}


def _setting(value: Any) -> str:
    """As a person writes it."""
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _removal(one: Removal) -> tuple[str, ...]:
    shown = [str(step) for step in one.steps]
    if len(shown) > _MOST_STEPS_SHOWN:
        shown = [*shown[: _MOST_STEPS_SHOWN - 1], "...", shown[-1]]
    return one.run.path.name, str(len(one.steps)), ", ".join(shown), bytes_text(one.bytes)


def _removal_json(one: Removal, *, removed: bool) -> dict[str, Any]:
    return {
        "run": str(one.run.path),
        "steps": list(one.steps),
        "bytes": one.bytes,
        "removed": removed and bool(one.steps),
        "left_alone": one.why_not or None,
    }

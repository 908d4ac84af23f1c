"""What a run left behind -> what is wrong with it, as a checker of histories would say it.

It knows the rules and nothing of how they are kept. `Evidence` comes from three sources that don't
know each other: the Run directory (metrics.jsonl, events.jsonl, generations), what ranks noted of
their steps (`entry`), and an undisturbed run of the same Job. `faults_of` is pure.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Line = Mapping[str, Any]
_DRAFT = re.compile(r"\.(tmp\d*|draft|partial)$")


class Did(NamedTuple):
    """A step that a rank began, as the rank itself noted it."""

    generation: int
    step: int
    rank: int
    samples: tuple[int, ...]
    """By their sums."""
    is_finished: bool
    """Whether it noted the step's end, too. One that is killed may have come so far and not said
    so."""


@dataclass(frozen=True)
class Rules:
    """What is promised of a run."""

    num_steps: int
    copy_every: int = 1
    """Steps between copies of the state in memory: at most so many less one are done again."""
    checkpoint_every: int = 0
    """Steps between checkpoints, for recoveries from the disk; 0: none are allowed."""
    tolerance: float = 0.0
    """Of losses, relative; 0: the same bits."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a run when it is over."""

    metrics: Sequence[Line]
    events: Sequence[Line]
    generations: Mapping[int, Line]
    """Number -> what its file says."""
    did: Sequence[Did]
    undisturbed: Mapping[int, Line]
    """Step -> its line in the undisturbed run."""
    samples: Mapping[int, frozenset[int]]
    """Step -> its samples, undisturbed."""
    rubbish: Sequence[str] = field(default_factory=tuple)
    """Files that are half, damaged or drafts, and processes that outlived the run; sentences."""


def faults_of(evidence: Evidence, rules: Rules) -> list[str]:
    """What is wrong, a sentence each; none: the run kept every rule."""
    checks = (_ends, _steps, _losses, _counts, _leaders, _starts, _done_again, _samples)
    found = [fault for check in checks for fault in check(evidence, rules)]
    return [*found, *evidence.rubbish]


def _ends(evidence: Evidence, rules: Rules) -> Iterator[str]:
    ends = [event for event in evidence.events if event["event"] == "end"]
    if not ends or ends[-1].get("state") != "finished":
        yield f"the run did not finish: its ends are {[end.get('state') for end in ends]}."


def _steps(evidence: Evidence, rules: Rules) -> Iterator[str]:
    """Every step stands in metrics.jsonl once, in order."""
    steps = [line["step"] for line in evidence.metrics]
    times = Counter(steps)
    for step, count in sorted(times.items()):
        if count > 1:
            yield f"step {step} was committed {count} times."
        if not 1 <= step <= rules.num_steps:
            yield f"step {step} is none of the run's {rules.num_steps}."
    if lost := [step for step in range(1, rules.num_steps + 1) if step not in times]:
        yield f"steps {_some(lost)} were lost."
    if steps != sorted(steps):
        yield "steps are not in order."


def _losses(evidence: Evidence, rules: Rules) -> Iterator[str]:
    """Those of the undisturbed run."""
    wrong = []
    for line in evidence.metrics:
        step, loss = line["step"], line.get("loss")
        wanted = evidence.undisturbed.get(step, {}).get("loss")
        if (
            loss is None
            or wanted is None
            or (loss != wanted and not math.isclose(loss, wanted, rel_tol=rules.tolerance))
        ):
            wrong.append((step, loss, wanted))
    if wrong:
        step, loss, wanted = wrong[0]
        yield (
            f"{len(wrong)} losses are not those of the undisturbed run, the first of step {step}: "
            f"{loss!r} instead of {wanted!r}."
        )


def _counts(evidence: Evidence, rules: Rules) -> Iterator[str]:
    """What the run has consumed after each step is what the undisturbed one has."""
    for line in evidence.metrics:
        for unit in ("tokens", "samples"):
            wanted = evidence.undisturbed.get(line["step"], {}).get(unit)
            if wanted is not None and line.get(unit) != wanted:
                yield f"step {line['step']} says {line.get(unit)} {unit} instead of {wanted}."
                return


def _leaders(evidence: Evidence, rules: Rules) -> Iterator[str]:
    """Numbers without a gap, one claim each, and what is told is what was claimed."""
    numbers = sorted(evidence.generations)
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"generations are numbered {numbers}."
    told: dict[int, set[str]] = defaultdict(set)
    newest = 0
    for event in evidence.events:
        if event["event"] != "generation":
            continue
        number = event["generation"]
        if number < newest:
            yield f"generation {number} began after generation {newest} had."
        newest = max(newest, number)
        told[number].add(event["leader"])
    for number, leaders in sorted(told.items()):
        if len(leaders) > 1:
            yield f"generation {number} has {len(leaders)} leaders: {', '.join(sorted(leaders))}."
        claimed = evidence.generations.get(number, {}).get("leader")
        if claimed not in leaders:
            yield f"generation {number} was claimed by {claimed} and led by {', '.join(leaders)}."


def _starts(evidence: Evidence, rules: Rules) -> Iterator[str]:
    """No generation starts from a state that nobody had committed, and none forks the history.

    Lines of earlier generations end where a generation starts, and its own begin after it, until
    one starts from an earlier step: from there on lines are made anew.
    """
    finished = {(did.generation, did.step) for did in evidence.did if did.is_finished}
    made, starts = _made_in(evidence), sorted(_start_steps(evidence).items())
    for at, (number, start) in enumerate(starts):
        back = next((one for one, step in starts[at + 1 :] if step < start), math.inf)
        earlier = [step for step, generation in made.items() if generation < number]
        later = [step for step, generation in made.items() if number <= generation < back]
        if start > 0 and not any(step == start and one < number for one, step in finished):
            yield f"generation {number} starts from step {start}, which no generation had finished."
        if last := [step for step in earlier if step > start]:
            yield (
                f"generation {number} starts from step {start}, and steps {_some(last)} of "
                "generations before it are committed."
            )
        if again := [step for step in later if step <= start]:
            yield f"generation {number} starts from step {start} and committed {_some(again)} anew."


def _done_again(evidence: Evidence, rules: Rules) -> Iterator[str]:
    """A generation starts where the one before had got to, less what its copies may lag behind.

    What one node did alone has no copy elsewhere: it is lost with that node.
    """
    finished, starts = _finished(evidence), _start_steps(evidence)
    sources = {
        event["generation"]: event.get("source")
        for event in evidence.events
        if event["event"] == "recovered"
    }
    reached, last = 0, 0
    for number, start in sorted(starts.items()):
        kept = [one for one in range(last, number) if not _is_gone(evidence, one, number)]
        since = [step for one in kept for step in finished.get(one, ())]
        reached = max(reached, *since) if since else reached
        lag = rules.checkpoint_every if sources[number] == "disk" else rules.copy_every - 1
        if reached - start > lag:
            yield (
                f"generation {number} starts from step {start} (of {sources[number]}) though step "
                f"{reached} was finished: {reached - start} are done again, at most {lag} may be."
            )
        reached, last = start, number


def _is_gone(evidence: Evidence, one: int, number: int) -> bool:
    """Whether a generation was of a single node, whose agent is none of a later generation's."""
    trained = _incarnations(evidence, one)[: evidence.generations.get(one, {}).get("num_active")]
    return len(trained) == 1 and trained[0] not in _incarnations(evidence, number)


def _incarnations(evidence: Evidence, number: int) -> list[str]:
    nodes = evidence.generations.get(number, {}).get("nodes", ())
    return [node["incarnation"] for node in nodes]


def _samples(evidence: Evidence, rules: Rules) -> Iterator[str]:
    """A step is made of its own samples: all of them, and no other."""
    last: dict[int, int] = {}
    for did in evidence.did:
        if did.is_finished:
            last[did.step] = max(last.get(did.step, 0), did.generation)
    used: dict[int, list[Did]] = defaultdict(list)
    for did in evidence.did:
        if did.generation == last.get(did.step):
            used[did.step].append(did)
    for step, wanted in sorted(evidence.samples.items()):
        given = frozenset(sample for did in used[step] for sample in did.samples)
        if missing := wanted - given:
            yield f"step {step} lacks {len(missing)} of its {len(wanted)} samples."
        if others := given - wanted:
            yield f"step {step} has {len(others)} samples that are not its own."
        if uneven := _uneven(used[step]):
            yield f"step {step}: {uneven}"


def _uneven(did: Sequence[Did]) -> str | None:
    """Ranks that share samples share all of theirs (tp, cp, pp); others none."""
    shares = {frozenset(one.samples) for one in did}
    times = Counter(sample for share in shares for sample in share)
    twice = [sample for sample, count in times.items() if count > 1]
    if twice:
        return f"{len(twice)} samples were used by ranks that don't share their samples."
    for one in did:
        if len(set(one.samples)) < len(one.samples):
            return f"rank {one.rank} used a sample twice."
    return None


def _made_in(evidence: Evidence) -> dict[int, int]:
    """Step that is committed -> the generation that made it, as its line or the ranks say."""
    last: dict[int, int] = {}
    for did in evidence.did:
        if did.is_finished:
            last[did.step] = max(last.get(did.step, 0), did.generation)
    return {
        line["step"]: line.get("generation", last.get(line["step"], 0)) for line in evidence.metrics
    }


def _start_steps(evidence: Evidence) -> dict[int, int]:
    """Generation -> the step that it started from, of those that got so far."""
    return {
        event["generation"]: event["step"]
        for event in evidence.events
        if event["event"] == "recovered"
    }


def _finished(evidence: Evidence) -> dict[int, set[int]]:
    """Generation -> the steps that all its ranks finished: those a copy may lag behind."""
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    of: dict[int, set[int]] = defaultdict(set)
    for did in evidence.did:
        if did.is_finished:
            ranks[did.generation, did.step].add(did.rank)
        of[did.generation].add(did.rank)
    found: dict[int, set[int]] = defaultdict(set)
    for (generation, step), some in ranks.items():
        if some == of[generation]:
            found[generation].add(step)
    return found


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


# ---- reading ------------------------------------------------------------------------------------


def evidence_of(run: Path, notes: Path, undisturbed: Path, its_notes: Path) -> Evidence:
    """Read what a run left.

    Args:
        run: its directory.
        notes: the folder of what its ranks noted.
        undisturbed: the directory of the run that nothing happened to; `its_notes`: its ranks'.
    """
    metrics, bad_metrics = read_lines(run / "metrics.jsonl")
    events, bad_events = read_lines(run / "events.jsonl")
    reference, _ = read_lines(undisturbed / "metrics.jsonl")
    samples: dict[int, set[int]] = defaultdict(set)
    for did in read_notes(its_notes):
        samples[did.step] |= set(did.samples)
    generations = {}
    for file in (run / "generations").glob("*.json"):
        if (whole := _json(file)) is not None and file.stem.isdecimal():
            generations[int(file.stem)] = whole
    return Evidence(
        metrics=metrics,
        events=events,
        generations=generations,
        did=read_notes(notes),
        undisturbed={line["step"]: line for line in reference},
        samples={step: frozenset(of) for step, of in samples.items()},
        rubbish=[*bad_metrics, *bad_events, *half_files(run)],
    )


def read_lines(file: Path) -> tuple[list[Line], list[str]]:
    """The objects of a JSON Lines file, and a sentence for each line that holds none."""
    found, bad = [], []
    text = file.read_text() if file.exists() else ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            if not line.endswith("\n"):
                raise ValueError
            found.append(json.loads(line))
        except ValueError:
            bad.append(f"line {number} of {file.name} is damaged: {line[:60]!r}.")
    return found, bad


def read_notes(folder: Path) -> list[Did]:
    """What ranks noted, in no order; a line that a killed rank did not finish is left out."""
    begun: dict[tuple[int, int, int], tuple[int, ...]] = {}
    finished = set()
    for file in folder.glob("*.notes"):
        for line in file.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            what, *numbers = line.split()
            generation, step, rank, *samples = map(int, numbers)
            if what == "began":
                begun[generation, step, rank] = tuple(samples)
            else:
                finished.add((generation, step, rank))
    return [Did(*key, samples, key in finished) for key, samples in begun.items()]


def half_files(run: Path) -> list[str]:
    """Sentences about files that a run must not leave."""
    found = []
    for file in sorted(run.rglob("*")):
        name = file.relative_to(run)
        if _DRAFT.search(file.name) or (file.name[0] == "." and file.parent.name == "generations"):
            found.append(f"{name} is a draft that was left.")
        elif file.is_file() and file.suffix == ".json" and _json(file) is None:
            found.append(f"{name} is no whole JSON.")
    return found


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError:
        return None


def numbers_of(events: Iterable[Line]) -> dict[str, int]:
    """How often each event stands there."""
    return dict(Counter(str(event["event"]) for event in events).most_common())

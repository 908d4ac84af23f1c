"""What rules say can be followed and can be true: commands, settings, figures; over all rules.

Figures by random Subjects: heavy tails, nothing recorded, ranks that wait for all of a step. Pure.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cli import app
from paceline.config.job import Job
from paceline.explain.changes import changed_job, runnable_changes
from paceline.explain.explain import explain_subject
from paceline.explain.finding import Evidence, Finding
from paceline.explain.rules import RULES, findings, sound
from paceline.explain.subject import Subject
from paceline.observe import caveats
from tests.explain.accounts import account, job, line, subject
from tests.explain.cases import CASES

SOURCES = Path(__file__).parents[2] / "src" / "paceline"
SETTING = re.compile(
    r"\b(?!cluster\.toml)((?:layout|comm|train|observe|checkpoint|optim|model|cluster|elastic)\.[a-z_.]+\w)\b"
)
COMMAND = re.compile(r"`?\bpaceline ((?:[a-z]+)(?: [^`\n]*)?)")
SHARE = re.compile(r"([\d.]+)% of (?:it|a step|the step|the time)")
# Words that follow the name where a text isn't about a command.
PROSE = {"is", "and", "knows", "does"}


# ---- texts in the code ---------------------------------------------------------------------------


def texts() -> Iterator[tuple[str, str]]:
    """Every text that rules, tuning and pages may print: not what documents the code."""
    for room in ("explain", "tune", "observe"):
        for file in sorted((SOURCES / room).rglob("*.py")):
            tree = ast.parse(file.read_text())
            documents = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                and node.body
                and isinstance(node.body[0], ast.Expr)
            }
            for node in ast.walk(tree):
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if is_text and id(node) not in documents:
                    yield file.name, node.value
        for page in sorted((SOURCES / room).rglob("*.html")):
            yield page.name, page.read_text()


def check_command(text: str) -> None:
    """Fail unless the words of a command are commands and options of the program."""
    words = text.split()
    node: Any = typer.main.get_command(app)
    while hasattr(node, "commands") and words and re.fullmatch("[a-z]+", words[0]):
        known = node.commands.get(words[0])
        assert known is not None, f"paceline {text}: no command {words[0]}"
        node, words = known, words[1:]
    options = {name for parameter in node.params for name in parameter.opts}
    for word in words:
        if word.startswith("--"):
            assert word.rstrip(",.;:").partition("=")[0] in options, f"paceline {text}: {word}"


def check_setting(name: str) -> None:
    """Fail unless a dotted name is a setting, or a part, of a Job."""
    if name == "cluster.file":  # resolved when a Job is read: config.job
        return
    fields: Any = Job
    for part in name.split("."):
        known = getattr(fields, "model_fields", None)
        if known is None:
            return  # Within a part of several kinds: its values are told by `changed_job`.
        assert part in known, f"{name}: a Job has no {part}"
        fields = known[part].annotation


def test_every_command_that_a_text_names_exists() -> None:
    found = 0
    for _, text in texts():
        for match in COMMAND.finditer(text):
            words = match[1].split()
            if words and words[0] not in PROSE and "`" in match[0][:1]:
                check_command(match[1])
                found += 1
    assert found >= 6


def test_every_setting_that_a_text_sets_exists() -> None:
    found = 0
    for file, text in texts():
        for match in re.finditer(r"--set\s+'?([a-z_.]+)=", text):
            check_setting(match[1])
            found += 1
        if file in {"stalls.py", "memory.py", "kernels.py", "links.py", "pipeline.py"}:
            for match in re.finditer(r"^([a-z_]+\.[a-z_.]+)=", text):
                check_setting(match[1])
                found += 1
    assert found >= 10


def test_a_command_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(AssertionError, match="no command network"):
        check_command("bench network")
    with pytest.raises(AssertionError, match="--nothing"):
        check_command("explain runs/demo --nothing")
    with pytest.raises(AssertionError, match="no bucket"):
        check_setting("layout.bucket")


# ---- what each rule says of its case -------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_a_rule_advises_can_be_followed(name: str, tmp_path: Path) -> None:
    of = CASES[name].speaks(tmp_path)
    found = RULES[name](of)
    assert found is not None
    check_followed(of, found)


def check_followed(of: Subject, found: Finding) -> None:
    """Fail where advice is none, or names what this Subject doesn't have."""
    assert found.changes or found.advice
    said = " ".join([found.title, found.advice, *(each.sentence for each in found.evidence)])
    named = SETTING.findall(said)
    if of.job is None:
        assert not found.changes
        assert not named, f"a trace alone has no settings: {named}"
    for setting in named:
        check_setting(setting)
    for match in COMMAND.finditer(said):
        check_command(match[1])
    if found.changes:
        assert of.job is not None
        then = changed_job(of.job, found.changes)
        assert then is not None
        assert then != of.job
        for every in (then.train.eval_every, then.checkpoint.every):
            assert every <= then.train.steps or every in (
                of.job.train.eval_every,
                of.job.checkpoint.every,
            )


def test_the_next_command_is_one(tmp_path: Path) -> None:
    for case in CASES.values():
        command = explain_subject(case.speaks(tmp_path)).next_command
        if command is not None:
            check_command(command.removeprefix("paceline "))


def test_what_was_chosen_for_an_axis_goes_with_it() -> None:
    """A plan's own algorithm for shards once kept every rule from advising replicas."""
    sharded = job(dp=1, fsdp=2, zero=3)
    chosen = sharded.comm.fsdp.replace(algorithm="halving_doubling")
    one = sharded.replace(comm=sharded.comm.replace(fsdp=chosen))
    replicas = changed_job(one, ("layout.dp=2", "layout.fsdp=1", "layout.zero=0"))
    assert replicas is not None
    assert replicas.comm.fsdp.algorithm == "backend"
    still = changed_job(one, ("layout.zero=2",))
    assert still is not None
    assert still.comm == one.comm


def test_an_interval_beyond_the_run_is_not_offered() -> None:
    one = job(2)
    assert runnable_changes(one, "train.eval_every=41") == ()  # of 40 steps
    assert runnable_changes(one, "train.eval_every=40") == ("train.eval_every=40",)
    assert runnable_changes(one, "checkpoint.every=2000") == ()
    assert runnable_changes(one, "layout.dp=2") == ()  # it is so already


# ---- figures -------------------------------------------------------------------------------------


def finding(gain: float, **more: Any) -> Finding:
    told = (Evidence("host", "Seen."), Evidence("device", "Idle."))
    return Finding("x", "X.", told, gain * 0.1, gain, (), "Do it.", "measured", **more)


def test_what_is_collected_is_sound_whatever_a_rule_says() -> None:
    of = subject(account([{"matmul": 100.0}]))
    for gain in (float("nan"), float("inf"), -0.1):
        assert sound(of, finding(gain)) is None
    most = sound(of, finding(1.16))
    assert most is not None
    assert (most.gain, most.gain_s) == (1.0, pytest.approx(0.1))
    assert sound(of, Finding("x", "X.", (), 0.01, 0.1)) is None  # nothing to do
    unmarked = subject(account([{"matmul": 100.0}], caveats=[caveats.NO_STEPS]))
    low = sound(unmarked, finding(0.2))
    assert low is not None
    assert low.confidence == "low"


seconds = st.floats(0, 2) | st.sampled_from([0.0, 1e-9, 30.0])
milliseconds = st.floats(0, 200) | st.sampled_from([0.0, 1e-6, 5000.0])
lost = st.sampled_from(
    ["host_gap", "data_wait", "straggler_wait", "exposed_comm.dp", "exposed_comm", "bubble"]
)
terms = st.dictionaries(lost | st.sampled_from(["matmul", "other_kernels"]), milliseconds).map(
    lambda each: {"matmul": 1.0, **each}
)
a_line: st.SearchStrategy[Mapping[str, Any]] = st.fixed_dictionaries(
    {
        "step_time_s": st.floats(1e-3, 5),
        "between_s": seconds,
        "eval_s": seconds,
        "gc_s": seconds,
        "checkpoint_cpu_s": seconds,
        "core": st.lists(seconds, min_size=2, max_size=2),
        "busy": st.lists(seconds, min_size=2, max_size=2),
        "terms": st.fixed_dictionaries({"data_wait": seconds, "checkpoint_stall": seconds}),
    }
)


@st.composite
def subjects(draw: st.DrawFn) -> Subject:
    """Runs and traces of two ranks, of any lengths, waits and settings."""
    lines = [
        line(
            at,
            each["step_time_s"] * 1e3,
            ranks={"core_wait_s": each["core"], "busy_s": each["busy"]},
            **{key: each[key] for key in ("between_s", "eval_s", "gc_s", "checkpoint_cpu_s")},
            terms=dict(each["terms"]),
        )
        for at, each in enumerate(draw(st.lists(a_line, max_size=14)), 1)
    ]
    ranks = draw(st.lists(terms, min_size=2, max_size=2))
    is_device = draw(st.booleans())
    gaps = [{"name": draw(st.sampled_from(["aten::item", "paceline.gc", "cudaMalloc", "x"])),
             "duration_ms": draw(milliseconds)}]  # fmt: skip
    sent = {"name": "all_reduce", "axis": "dp", "bytes": draw(st.sampled_from([8, 1 << 22])),
            "duration_ms": draw(milliseconds), "members": "[0, 1]",
            "times": draw(st.integers(1, 5)), "micro_batch": draw(st.integers(-1, 3))}  # fmt: skip
    made = account(ranks, collectives=[sent], gaps=gaps, is_device=is_device)
    one = draw(st.sampled_from([job(2), None]))
    if one is None:
        return subject(made)
    steps, every = draw(st.integers(1, 400)), draw(st.integers(0, 50))
    one = one.replace(train=one.train.replace(steps=steps, eval_every=every))
    facts = {"num_cores": draw(st.integers(1, 4)), "num_ranks": 2, "threads_per_rank": 1}
    recorded = draw(st.sampled_from([made, None])) if lines else made
    return subject(recorded, one, lines=lines, facts=facts)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(subjects())
def test_no_figure_is_above_the_whole_and_no_arithmetic_complains(of: Subject) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = explain_subject(of)
        found = findings(of)
    for each in found:
        assert 0 <= each.gain <= 1, each
        check_followed(of, each)
        said = [each.title, *(told.sentence for told in each.evidence)]
        for text in said:
            assert all(float(share) <= 100.001 for share in SHARE.findall(text)), text
    assert all(0 < left.share <= 1 for left in one.unexplained)
    assert all(float(share) <= 100 for share in SHARE.findall(one.headline)), one.headline

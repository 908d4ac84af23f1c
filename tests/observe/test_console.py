"""What the terminal shows, on terminals made of text (one process, a clock that is set by hand)."""

import io
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from paceline.observe import console
from paceline.observe.console import Progress, step_time_table
from paceline.observe.generations import generations, kept_steps
from tests.observe import interrupted, synthetic


@pytest.fixture
def clock(monkeypatch):
    """Seconds, moved on by the test."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def terminal(width=140):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def screen(shown):
    """The lines a terminal shows in the end: an erased line keeps what was written after it."""
    return [line.split("\x1b[2K")[-1].rstrip() for line in shown.file.getvalue().split("\n")]


def feed(progress, lines, clock, step_s):
    for line in lines:
        clock.s += step_s
        progress.update(line)


def test_a_file_gets_a_plain_line_every_ten_seconds_first_and_last(capsys, clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    progress = Progress(32)
    feed(progress, synthetic.lines(32), clock, 1.0)
    progress.close()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\r" not in out
    steps = [line.split(" | ")[0] for line in out.splitlines()]
    assert steps == ["step 1/32", "step 11/32", "step 21/32", "step 31/32", "step 32/32"]


def test_a_plain_line_holds_the_figures_and_is_never_wrapped(capsys, clock):
    lines = synthetic.lines(12)
    lines[10] |= {"loss": 4.20134, "tokens_per_s": 9990.4, "skipped": 2}
    progress = Progress(240)
    feed(progress, lines, clock, 1.0)
    progress.say("a message " + "of many words " * 10 + "[bold]as it is[/]")
    first, last, message = capsys.readouterr().out.splitlines()
    eval_loss = lines[9]["eval_loss"]
    assert last == (
        f"step 11/240 | loss 4.201 | held out {eval_loss:.4g} | 9,990 tokens/s | "
        "3 min 49 s left | 2 skipped | MFU: peak unknown"
    )
    assert first.startswith("step 1/240 | loss ")
    assert message.endswith("[bold]as it is[/]")


def test_a_custom_model_counts_samples(capsys, clock):
    feed(Progress(9, "samples"), synthetic.lines(1, unit="samples"), clock, 1.0)
    assert " samples/s | " in capsys.readouterr().out


def test_a_terminal_shows_one_live_line_and_messages_above_it(clock):
    shown = terminal()
    num_threads = threading.active_count()
    progress = Progress(20, console=shown)
    lines = synthetic.lines(20)
    feed(progress, lines[:10], clock, 1.0)
    progress.say("checkpoint written")
    print("something printed by a library")
    feed(progress, lines[10:], clock, 1.0)
    assert threading.active_count() == num_threads
    progress.close()
    progress.close()
    message, printed, live, *rest = screen(shown)
    assert message == "checkpoint written"
    assert printed == "something printed by a library"
    assert live.startswith("step 20/20  " + "━" * 20 + f"  loss {lines[-1]['loss']:.4g}")
    assert "MFU: peak unknown" in live
    assert "left" not in live
    assert "".join(rest).strip("\x1b[?25h") == ""
    assert shown.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_a_terminal_is_redrawn_five_times_a_second_at_most(clock):
    shown = terminal()
    progress = Progress(10**6, console=shown)
    feed(progress, synthetic.lines(200), clock, 0.01)
    assert shown.file.getvalue().count("step ") <= 2.0 * 5 + 1
    progress.close()
    assert "step 200/" in screen(shown)[0]


@pytest.mark.parametrize("width", [30, 80, 200])
def test_the_live_line_stays_one_line(clock, width):
    shown = terminal(width)
    progress = Progress(20, console=shown)
    feed(progress, synthetic.lines(20), clock, 1.0)
    progress.say("a message that is wider than the terminal " * 10)
    progress.close()
    assert max(len(line) for line in screen(shown)) <= width
    lines = [line for line in screen(shown) if "step" in line]
    assert len(lines) == 1
    assert ("━" in lines[0]) == (width == 200)


def table(lines, facts, **more):
    shown = Console(file=io.StringIO(), width=100, color_system=None)
    shown.print(step_time_table(lines, facts, **more))
    return shown.file.getvalue()


def test_the_table_of_profiled_steps():
    text = table(synthetic.lines(240), synthetic.FACTS)
    rows = {row.split()[0]: row.split()[1:3] for row in text.splitlines() if "%" in row}
    assert "Step time, mean of 7 profiled steps" in text
    whole_ms = float(text.split("whole step")[1].split()[0])
    parts = {term: float(row[0]) for term, row in rows.items() if term not in ("whole", "MFU")}
    assert {"matmul", "attention", "exposed_comm.dp", "host_gap"} < parts.keys()
    assert sum(parts.values()) == pytest.approx(whole_ms, abs=0.05 * len(parts))
    assert "a unigram model of this text can't get below 6.31; reached 3.71" in text
    assert "peak unknown" in text
    assert "810 MB" in text


def test_the_table_counts_interruptions_where_a_run_is_elastic():
    made = interrupted.started_again(interrupted.simulated())
    found = generations(made.events, kept_steps(made.lines))
    text = table(made.lines, synthetic.FACTS, generations=found)
    plain = table(made.lines, synthetic.FACTS)
    # Of 232 s 168 went into steps: 42 went into waiting for nodes.
    last = text.splitlines()[-1].split(maxsplit=1)
    assert [each.rstrip() for each in last] == [
        *("interruptions", "3 (2 dead, 1 vanished), goodput 72.7%")
    ]
    assert "interruptions" not in plain
    quiet = generations(made.events[:3], kept_steps(made.lines[:60]))
    assert table(made.lines[:60], {}, generations=quiet).split("interruptions")[1].strip() == (
        "none, goodput 82.5%"
    )


def test_the_table_says_when_nothing_was_profiled():
    assert "No step was profiled" in table(synthetic.lines(20, profile_every=0), {})
    # Their lines came too early: asking for profile_every would be no advice.
    untold = table(synthetic.lines(20, profile_every=0), {}, has_windows=True)
    assert "profile_every" not in untold
    assert "paceline explain has their terms" in " ".join(untold.split())


def test_the_table_before_the_first_step_and_without_terms():
    assert table([], {}).strip() == "No step has finished yet."
    assert "no step had a finite loss" in table([{"step": 1}], {})

"""`paceline top`: following a file that grows, what is concluded from it, and the picture of it.

Pure, on terminals made of text; the last test is the command in a pseudo-terminal.
"""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.job import to_toml
from paceline.config.job_sections import Observe
from paceline.observe.metrics import Metrics
from paceline.observe.rank_spread import mean_figure, record_of_ranks, slowest_rank, spread_of
from paceline.observe.run import Run, json_lines
from paceline.observe.top.command import top_command
from paceline.observe.top.follow import FollowedFile
from paceline.observe.top.frame import frame, overview, sparkline
from paceline.observe.top.gpus import parsed
from paceline.observe.top.state import WatchedRun
from tests.observe import interrupted, synthetic
from tests.parallel.training import FP32, job_of

LATE, LAG_S = 2, 0.06


def lines(num_steps=173, num_ranks=4, profile_every=60):
    """Steps of 0.42 s that ended just now; rank 2 is late."""
    steps = synthetic.lines(num_steps, profile_every)
    for at, line in enumerate(steps, start=1):
        busy_s = [0.3 + LAG_S * (rank == LATE) for rank in range(num_ranks)]
        memory = [7e8 + 1e6 * rank for rank in range(num_ranks)]
        line["ranks"] = {"busy_s": record_of_ranks(busy_s), "memory_bytes": record_of_ranks(memory)}
        line["time"] = time.time() - 0.42 * (num_steps - at)
    return steps


def run_of(folder, steps, num_steps=240):
    run = synthetic.run(folder, steps)
    run.write("job.toml", to_toml(job_of(4, [*FP32, "layout.dp=4", f"train.steps={num_steps}"])))
    return run


def picture(shown, width=80, height=24):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(shown)
    return console.file.getvalue()


# ---- ranks --------------------------------------------------------------------------------------


def test_of_many_ranks_a_line_keeps_what_stands_out():
    values = [1.0] * 1000 + [3.0] + [0.5] * 10
    kept = record_of_ranks(values)
    assert kept == {"min": 0.5, "median": 1.0, "max": 3.0, "at": 1000}
    assert spread_of(kept) == spread_of(values)
    assert slowest_rank(kept) == (1000, 2.0)
    assert record_of_ranks(values[:64]) == values[:64]


def test_of_two_ranks_the_other_one_is_typical():
    assert slowest_rank([0.2, 0.5]) == (1, pytest.approx(0.3))
    assert slowest_rank(None) is None


def test_a_rank_that_is_new_since_a_restart_counts_with_what_it_has():
    steps = [{"ranks": {"busy_s": [1.0, 9.0]}}] + [{"ranks": {"busy_s": [1.0, 2.0, 3.0]}}] * 2
    assert mean_figure(steps, "busy_s") == [1.0, 2.0, 3.0]
    assert mean_figure([{"step": 1}], "busy_s") is None


# ---- following ----------------------------------------------------------------------------------


def test_only_what_is_new_is_read_and_half_a_line_waits(tmp_path):
    file, steps = tmp_path / "metrics.jsonl", synthetic.lines(5)
    follow = FollowedFile(file)
    assert not follow.look()
    file.write_text(json_lines(steps[:2]))
    assert follow.look()
    whole = json.dumps(steps[2]) + "\n"
    with file.open("a") as out:
        out.write(whole[:50])
        out.flush()
        assert not follow.look()
        out.write(whole[50:])
    assert follow.look()
    assert list(follow.lines) == steps[:3]
    # What was read is not read again: it may be overwritten unseen.
    text = file.read_bytes()
    with file.open("r+b") as out:
        out.write(b"x" * 20)
        out.seek(len(text))
        out.write((json.dumps(steps[3]) + "\n").encode())
    assert follow.look()
    assert list(follow.lines) == steps[:4]


def test_a_run_that_goes_on_from_a_checkpoint_takes_its_later_steps_back(tmp_path):
    run, steps = Run(tmp_path), synthetic.lines(10)
    run.write("metrics.jsonl", json_lines(steps[:8]))
    follow = FollowedFile(run.metrics_file)
    follow.look()
    resumed = Metrics(run, Observe(tensorboard=False), "tokens", 4)
    for line in steps[4:]:  # more than there was: the file's size doesn't tell
        resumed.record({**line, "loss": 99.0})
    resumed.close()
    assert follow.look()
    assert [line["step"] for line in follow.lines] == list(range(1, 11))
    assert [line["loss"] == 99.0 for line in follow.lines] == [False] * 4 + [True] * 6


def test_of_a_long_file_the_end_is_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    steps = [{"step": step, "pad": "x" * 500} for step in range(1, 9001)]
    file.write_text(json_lines(steps))
    follow = FollowedFile(file)
    assert follow.look()
    assert follow.lines[-1]["step"] == 9000
    assert len(follow.lines) == 600


# ---- what is concluded --------------------------------------------------------------------------


def test_the_figures_of_a_run(tmp_path):
    steps = lines()
    found = WatchedRun(run_of(tmp_path / "demo", steps).path).look().as_json()
    assert found["state"] == "running"
    assert (found["step"], found["num_steps"]) == (173, 240)
    assert found["loss"] == steps[-1]["loss"]
    assert found["late_rank"] == {"rank": LATE, "lag_s": pytest.approx(LAG_S)}
    assert found["remaining_s"] == pytest.approx(67 * 0.42, rel=0.01)
    profiled = [line["terms"]["matmul"] for line in steps if line["profiled"]][-2:]
    assert found["terms"]["matmul"] == pytest.approx(sum(profiled) / 2)


@pytest.mark.parametrize(
    ("ages_s", "step", "stop", "word"),
    [
        (0, 0, False, "starting"),
        (5, 100, False, "running"),
        (200, 100, False, "silent 3 min 20 s"),
        (5, 100, True, "stopping"),
        (9999, 240, False, "complete"),
    ],
)
def test_what_a_run_does_is_a_word(tmp_path, ages_s, step, stop, word):
    steps = lines(step)
    for line in steps:
        line["time"] -= ages_s
    run = run_of(tmp_path / "demo", steps)
    if stop:
        run.stop_file.touch()
    assert WatchedRun(run.path).look().word == word


def test_the_newest_checkpoint_is_told_with_its_age(tmp_path):
    run = run_of(tmp_path / "demo", lines())
    assert run.last_checkpoint() is None
    saved = run.checkpoint_folder / "step-150"
    saved.mkdir(parents=True)
    os.utime(saved, (time.time() - 90,) * 2)
    (run.checkpoint_folder / "latest").symlink_to("step-150")
    assert "step 150, 1 min 30 s ago" in picture(frame(WatchedRun(run.path).look(), 80, 24))


# ---- pictures -----------------------------------------------------------------------------------


def test_a_sparkline_goes_from_the_least_to_the_largest():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0] * 5) == "▁" * 5
    assert sparkline([]) == ""
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert sparkline([1, 8], plain=True).isascii()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 16), (160, 50)])
@pytest.mark.parametrize("num_ranks", [1, 4, 60, 1000])
def test_a_frame_fits_the_terminal(tmp_path, width, height, num_ranks):
    state = WatchedRun(run_of(tmp_path / "demo", lines(num_ranks=num_ranks)).path).look()
    gpus = parsed("0, 97, 61440, 54, 612.3, 1980\n1, [N/A], 10, 33, [N/A], 345\n")
    rows = picture(frame(state, width, height, gpus), width, height).rstrip("\n").split("\n")
    assert len(rows) <= height
    assert max(cell_len(row) for row in rows) <= width
    text = "\n".join(rows)
    for word in ("demo", "running", "173 of 240", "loss", "matmul"):
        assert word in text
    if num_ranks > LATE:
        latest = [row for row in rows if "360.0" in row]
        assert len(latest) == 1
        assert f"{LAG_S * 1e3:.1f}" in latest[0]


def test_before_the_first_step_there_is_a_frame(tmp_path):
    text = picture(frame(WatchedRun(run_of(tmp_path / "demo", []).path).look(), 80, 24))
    assert "starting" in text
    assert "0 of 240" in text


def interrupted_run(folder):
    """A run that was interrupted, and whose newest step was just now."""
    made = interrupted.started_again(interrupted.simulated())
    late_s = time.time() - made.now_s
    run = run_of(folder, [{**line, "time": line["time"] + late_s} for line in made.lines], 600)
    later = ({**event, "time": event["time"] + late_s} for event in made.events)
    run.write("events.jsonl", json_lines(later))
    return run


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 16), (160, 50)])
def test_a_frame_of_an_elastic_run_says_who_trains_and_what_was_lost(tmp_path, width, height):
    run = interrupted_run(tmp_path / "demo")
    state = WatchedRun(run.path).look()
    rows = picture(frame(state, width, height), width, height).rstrip("\n").split("\n")
    assert len(rows) <= height
    assert max(cell_len(row) for row in rows) <= width
    told = dict(row.split(maxsplit=1) for row in rows if row.startswith(("generation", "lost")))
    assert told["generation"].rstrip() == "6: 2 nodes, 4 ranks, fsdp=4"
    assert told["lost"].rstrip() == "3 (2 dead, 1 vanished), goodput 72.7%"
    (last,) = (row for row in rows if row.startswith("last lost"))
    assert "1 h 01 min ago, rank 1 on n0 died: CUDA" in last
    found = state.as_json()
    assert (found["generation"], found["nodes"]) == (6, ["n0", "n2"])
    assert found["lost"] == {"dead": 2, "vanished": 1}
    assert found["goodput"] == pytest.approx(0.727, abs=1e-3)
    with run.events_file.open("a") as file:
        file.write("nonsense\n")
    assert "line 36 holds no event" in picture(frame(WatchedRun(run.path).look(), 200, 24), 200)


def test_a_frame_of_a_run_without_events_is_as_it_was(tmp_path):
    run = run_of(tmp_path / "demo", lines())
    state = WatchedRun(run.path).look()
    text = picture(frame(state, 80, 24))
    assert not {"generation", "lost", "goodput"} & {*text.split(), *state.as_json()}
    assert "interruptions" not in picture(overview([state, state]))


def test_several_runs_are_a_line_each(tmp_path):
    states = [
        WatchedRun(run_of(tmp_path / name, lines(count)).path).look()
        for name, count in (("one", 50), ("two", 240))
    ]
    head, one, two = picture(overview(states)).splitlines()
    assert "MFU" not in head, "a column that no run fills"
    assert one.split()[:3] == ["one", "running", "50/240"]
    assert two.split()[:3] == ["two", "complete", "240/240"]
    assert "2: 60 ms" in one


def test_what_nvidia_smi_cannot_say_is_unknown():
    first, second = parsed("0, 97, 61440, 54, 612.3, 1980\n1, [N/A], 10, 33, [N/A], 345\n")
    assert (first.busy, first.memory_bytes, first.watts) == (0.97, 61440 * 2**20, 612.3)
    assert (second.index, second.busy, second.watts) == (1, None, None)


# ---- the command --------------------------------------------------------------------------------


def test_what_is_no_run_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `make demo` leaves a run in the clone
    with pytest.raises(InputError, match="is not the directory of a run"):
        top_command([tmp_path], once=True, every_s=1, as_json=False)
    with pytest.raises(InputError, match="no run is named"):
        top_command([], once=True, every_s=1, as_json=False)


def test_once_prints_a_frame_and_its_figures(tmp_path, capsys):
    run = run_of(tmp_path / "demo", lines())
    top_command([run.path], once=True, every_s=1, as_json=True)
    *shown, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["late_rank"]["rank"] == LATE
    assert "173 of 240" in "\n".join(shown)


def test_on_a_terminal_it_follows_the_run_until_q(tmp_path):
    run = run_of(tmp_path / "demo", lines(10))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline", "top", str(run.path), "--every", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = _read_until(ours, "10 of 240")
    with run.metrics_file.open("a") as file:
        file.write(json_lines(lines(11)[-1:]))
    shown += _read_until(ours, "11 of 240")
    os.write(ours, b"q")
    shown += _read_until(ours, "\x1b[?1049l")  # the terminal's own screen is back
    assert process.wait(timeout=300) == 0
    os.close(ours)
    assert "\x1b[?1049h" in shown


@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_has_not_begun_is_waited_for(tmp_path, named):
    ours, theirs = pty.openpty()
    path = tmp_path / "runs" / "run"
    command = [sys.executable, "-m", "paceline", "top", *[str(path)][:named], "--every", "0.1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    _read_until(ours, "to begin")
    assert process.poll() is None
    path.parent.mkdir()
    run_of(tmp_path / "made", lines(10)).path.rename(path)  # whole at once
    _read_until(ours, "10 of 240")
    os.write(ours, b"q")
    _read_until(ours, "\x1b[?1049l")
    assert process.wait(timeout=300) == 0
    os.close(ours)


def test_waiting_for_a_run_ends_with_an_interrupt(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline", "top", "nowhere"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert "waiting for nowhere to begin" in _read_until(ours, "ends this")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 0
    os.close(ours)


def _read_until(terminal, text):
    seen = ""
    deadline = time.monotonic() + 60
    while text not in seen and time.monotonic() < deadline:
        seen += os.read(terminal, 65536).decode(errors="replace")
    assert text in seen
    return seen

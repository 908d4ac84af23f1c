"""What interruptions cost: the summary of a simulated run whose every second is known."""

import json
import random

import pytest

from paceline.config.errors import InputError
from paceline.observe.generations import (
    CLASSES,
    GenerationsSoFar,
    generations,
    generations_of,
    kept_steps,
)
from paceline.observe.run import Run, json_lines
from tests.observe import interrupted, synthetic
from tests.observe.interrupted import STEP_S, simulated, started_again


def summary(made):
    return generations(made.events, kept_steps(made.lines))


def rounded(seconds):
    return {name: pytest.approx(value, abs=1e-3) for name, value in seconds.items() if value}


def test_every_second_of_two_starts_is_in_its_class():
    made = started_again(simulated())
    found = summary(made)
    assert found.seconds == rounded(made.seconds)
    run_s = sum(made.seconds.values())
    assert found.run_s == pytest.approx(run_s)
    assert found.goodput == pytest.approx(made.seconds["kept"] / run_s)
    # An hour lies between the starts, in which no run was.
    assert found.wall_s == pytest.approx(run_s + 3600)
    assert found.effective_ratio == pytest.approx(made.seconds["kept"] / (run_s + 3600))


def test_the_generations_say_who_trained_what_and_why_it_ended():
    found = summary(started_again(simulated()))
    assert [one.number for one in found.all] == [1, 2, 3, 4, 5, 6]
    assert [one.start for one in found.all] == [1, 1, 1, 1, 1, 2]
    assert [(one.steps.first, one.steps.last) for one in found.all] == [
        *((1, 60), (61, 157), (158, 278), (279, 329), (330, 360), (361, 421))
    ]
    third = found.all[2]
    assert third.nodes == ("n0", "n4", "n2", "n3")
    assert found.all[0].spares == ("n4",)
    assert (third.source, third.recomputed, third.layout) == ("buddy", 3, "fsdp=8")
    assert third.reason == interrupted.VANISHED
    assert third.back_s == pytest.approx(0.02 + 0.5 + STEP_S + 0.01)
    assert third.recovery_s == rounded(
        {"notice": 2.0, "decide": 0.02, "connect": 0.05, "build": 0.3, "restore": 0.15}
    )
    assert found.all[0].recovery_s == found.all[5].recovery_s == {}
    assert found.last_recovery is found.all[4]
    assert found.recomputed == 3
    # That a rank is slow was said, and nothing followed.
    assert found.num_losses == {"dead": 2, "vanished": 1}
    assert [loss.kind for one in found.all for loss in one.losses if loss.is_report] == ["slow"]
    kept_s = sum(one.steps.seconds for one in found.all)
    assert found.summary == f"3 (2 dead, 1 vanished), goodput {kept_s / found.run_s:.1%}"
    assert found.losses[0].sentence == interrupted.DEAD


def test_a_generation_has_as_many_seconds_as_it_is_long():
    for one in summary(started_again(simulated())).all:
        assert sum(one.seconds.values()) == pytest.approx(one.ended_s - one.began_s)
        assert list(one.seconds) == [name for name in CLASSES if name in one.seconds]


def test_a_start_that_was_killed_ends_with_what_is_known_of_it():
    """All nodes lost their power 20 steps after the checkpoint: nobody wrote an end."""
    made = simulated()
    assert made.events.pop()["event"] == "end"
    made.train(20)
    for _ in range(20):  # the next start takes them back
        made.lines.pop()
        made.step -= 1
    made.now_s += 7200
    made.tell("admitted", node="n1", check="passed")
    made.decide("wait", 5.0, "waiting")  # as the leader counts, still of the last generation
    made.decide("start", 0.0)
    made.claim(["n0", "n1"], 2, "start")
    made.recover("disk", 20)
    found = summary(made)
    assert found.recomputed == 23
    before = found.all[-2]
    assert before.start == 1
    assert before.seconds["recomputed"] == pytest.approx(20 * STEP_S, abs=1.6)
    assert found.wall_s - found.run_s == pytest.approx(7205, abs=2)


def test_the_wait_for_nodes_at_a_start_is_no_part_of_a_recovery():
    made = started_again(simulated())
    assert made.events.pop()["event"] == "end"
    lost = {"node": "n2", "rank": 3, "class": "dead", "sentence": interrupted.DEAD}
    at_s = made.lose(0.1, 0.02, 0, **lost)
    made.decide("replace")
    made.claim(["n0", "n2"], 2, interrupted.DEAD)
    made.recover("live", 0, at_s, notice=0.02)
    found = summary(made)
    assert found.all[-2].seconds["waiting"] == pytest.approx(12)
    assert found.all[-1].recovery_s == rounded(
        {"notice": 0.02, "decide": 0.02, "connect": 0.05, "build": 0.3, "restore": 0.15}
    )


def test_the_end_that_rank_0_tells_is_not_that_of_the_start():
    """The agents may still lose somebody who has to save, and make one more generation."""
    made = started_again(simulated())
    expected = summary(made)
    for at, event in enumerate(list(made.events)):
        if event["event"] == "saved":
            own = {"time": event["time"], "event": "end", "state": "saved", "exit_code": 75}
            made.events.insert(at, own)
    made.events.insert(5, {"time": made.events[5]["time"], "event": "end", "state": "saved"})
    assert summary(made) == expected


def test_a_run_that_goes_on_counts_to_its_newest_moment():
    made = simulated()
    events = [event for event in made.events if event["time"] < made.events[0]["time"] + 20]
    lines = [line for line in made.lines if line["generation"] == 1][:30]
    (only,) = generations(events, kept_steps(lines)).all
    assert only.ended_s == lines[-1]["time"]
    assert "recomputed" not in only.seconds
    assert only.seconds["start"] == pytest.approx(4.01)


def test_a_loss_shows_before_the_next_generation_is_there():
    made = simulated()
    at = next(i for i, event in enumerate(made.events) if event["event"] == "lost")
    found = generations(
        made.events[: at + 1], kept_steps(line for line in made.lines if line["generation"] == 1)
    )
    assert found.num_losses == {"dead": 1}
    assert found.newest.seconds["recomputed"] == pytest.approx(0.28)  # nobody said how it splits


def test_a_number_that_is_claimed_again_has_the_newest_steps():
    """Somebody removed the folder of generations, and the run began anew."""
    made = simulated()
    for event in started_again(simulated()).events[len(made.events) :]:
        made.events.append({**event, "generation": 1} if event["generation"] == 6 else event)
    lines = [{**line, "generation": 1} for line in started_again(simulated()).lines[-61:]]
    found = generations(made.events, kept_steps(lines))
    assert [one.steps is None for one in found.all] == [True] * 5 + [False]
    assert found.seconds["kept"] == pytest.approx(61 * STEP_S)


def test_a_run_without_events_has_no_generations(tmp_path):
    run = synthetic.run(tmp_path, synthetic.lines(5))
    assert run.events() == ([], None)
    assert generations_of(run) is None
    # Stops of a run that isn't elastic are events too.
    run.write("events.jsonl", '{"time": 5, "event": "saved", "step": 3, "kind": "disk"}\n')
    assert generations_of(run) is None
    assert GenerationsSoFar(run).look() is None


@pytest.mark.parametrize("seed", range(30))
def test_no_class_is_negative_whatever_the_clocks_say(seed):
    """Moments jump by minutes, lines and events are missing: the classes still add up."""
    rng = random.Random(seed)
    made = started_again(simulated())
    events = [
        {**event, "time": max(0.0, event["time"] + rng.choice([0, 0, rng.gauss(0, 100)]))}
        for event in made.events
        if rng.random() > 0.2
    ]
    lines = [{**line, "time": line["time"] + rng.gauss(0, 5)} for line in made.lines]
    found = generations(events, kept_steps(rng.sample(lines, len(lines) - 50)))
    if found is None:
        return
    for one in found.all:
        assert all(value >= 0 for value in one.seconds.values())
        assert sum(one.seconds.values()) == pytest.approx(one.ended_s - one.began_s)
    assert found.goodput is None or 0 <= found.goodput <= 1
    assert found.effective_ratio is None or found.effective_ratio <= (found.goodput or 0)


def test_looks_at_a_run_that_goes_on_see_what_one_look_at_the_end_sees(tmp_path):
    made = started_again(simulated())
    run = interrupted.write(tmp_path, made)
    order = sorted(
        [(line["time"], "line", line) for line in made.lines]
        + [(event["time"], "event", event) for event in made.events],
        key=lambda one: one[0],
    )
    so_far, written, told = GenerationsSoFar(run), [], []
    for at, (_, kind, record) in enumerate(order):
        (written if kind == "line" else told).append(record)
        if at % 7 == 0 or at == len(order) - 1:
            run.write("metrics.jsonl", json_lines(written))
            run.write("events.jsonl", json_lines(told))
            so_far.take(written[-40:])
            found = so_far.look()
            assert found == generations(told, kept_steps(written))
    assert found.num_losses["dead"] == 2


def test_steps_that_were_taken_back_between_two_looks_count_once(tmp_path):
    made = simulated()
    run = interrupted.write(tmp_path, made)
    so_far = GenerationsSoFar(run)
    so_far.take(made.lines[:150])
    again = [{**line, "generation": 3} for line in made.lines[90:200]]
    run.write("metrics.jsonl", json_lines(made.lines[:90] + again))
    so_far.take(again[-60:])
    assert sum(one.steps.num for one in so_far.look().all if one.steps) == 200


HOSTILE = {
    "a list": b"[1]",
    "no time": b'{"event": "end"}',
    "no name": b'{"time": 3}',
    "an infinite time": b'{"time": 1e999, "event": "end"}',
    "a negative generation": b'{"time": 3, "event": "generation", "generation": -1, "nodes": []}',
    "nodes that are none": b'{"time": 3, "event": "generation", "generation": 1, "nodes": "n0"}',
    "a loss without class": b'{"time": 3, "event": "lost", "generation": 1}',
    "words for seconds": b'{"time": 3, "event": "recovered", "generation": 1, "seconds": "long"}',
    "negative seconds": b'{"time":3,"event":"recovered","generation":1,"seconds":{"notice":-1}}',
    "half": b'{"time": 3, "event": "en',
    "binary": bytes(range(128, 256)),
    "an endless line": b'{"time": 3, "event": "' + b"9" * 3_000_000 + b'"}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_line_of_events_is_left_out_and_said(tmp_path, line):
    made = simulated()
    run = interrupted.write(tmp_path, made)
    first, *others = json_lines(made.events).encode().splitlines()
    run.events_file.write_bytes(b"\n".join([first, line, *others, b""]))
    found = run.events()
    assert found.lines == [json.loads(one) for one in [first, *others]]
    assert found.damage.endswith("events.jsonl: line 2 holds no event and is left out.")


def test_events_that_are_no_file_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(InputError, match=r"events\.jsonl"):
        Run(tmp_path).events()

"""events.jsonl: written whole lines, read around damage; a disk that is full stops nothing."""

from paceline.elastic.events import EventLog
from paceline.observe.run import Run


def test_events_are_read_around_damage(tmp_path):
    run = Run(tmp_path)
    assert run.events().lines == []
    log = EventLog(run, print)
    log.add("left_out", 1, node="a", why="its ranks died")
    log.close()
    with (tmp_path / "events.jsonl").open("ab") as out:
        out.write(b"\xff\xfe\n[]\n{}\n" + b"[" * 100_000 + b'\n{"event": "lost", "gene')
    EventLog(run, print).close()
    assert [event["event"] for event in run.events().lines] == ["left_out"]


def test_a_disk_that_takes_nothing_is_said_once_and_stops_nothing(tmp_path):
    said: list[str] = []
    log = EventLog(Run(tmp_path / "missing"), said.append)
    for number in range(3):
        log.add("lost", number)
    log.close()
    assert len(said) == 1
    assert said[0].endswith("; the run goes on.")


def test_a_full_disk_stops_nothing(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    log = EventLog(Run(tmp_path), said.append)
    log.add("lost", 1)
    log.close()
    assert "No space left" in said[0]

"""A node that is merely slow, in a real run: its rank says so by the run's own figures, and with
`elastic.replace_slow` a spare takes its place."""

import json
import sys
from pathlib import Path

from paceline.config.errors import EXIT_LEFT_OUT
from tests.command_line import Started, metrics, write_tiny_job

STEPS = 70
PROGRAM = """
import os, time
from paceline.train.trainer import Trainer

step = Trainer.step

def slow(*arguments, **told):
    time.sleep(0.3)
    return step(*arguments, **told)

if os.environ["PACELINE_NODE"] == "b":
    Trainer.step = slow
if __name__ == "__main__":
    from paceline.cli import main

    main()
"""


def test_a_slow_node_gives_its_place_to_a_spare(tmp_path: Path):
    job, program = write_tiny_job(tmp_path), tmp_path / "program.py"
    program.write_text(PROGRAM)
    sets = {
        "cluster.num_nodes": 2,
        "cluster.devices_per_node": 1,
        "layout.dp": 2,
        "train.steps": STEPS,
        "elastic.min_nodes": 1,
        "elastic.spares": 1,
        "elastic.replace_slow": "true",
        "elastic.heartbeat_s": 10,
    }
    command = [str(program), "train", str(job), *(f"--set={k}={v}" for k, v in sets.items())]
    told = {"PACELINE_ADDRESS": "127.0.0.1", "PACELINE_MEASURE": "off", "OMP_NUM_THREADS": "1"}
    told["PYTHONPATH"] = ":".join(sys.path)
    nodes = {name: Started(command, tmp_path, 1, {**told, "PACELINE_NODE": name}) for name in "abc"}
    try:
        printed = {name: node.communicate(240)[0] for name, node in nodes.items()}
    finally:
        for node in nodes.values():
            node.kill()
    codes = {name: node.returncode for name, node in nodes.items()}
    assert codes == {"a": 0, "b": EXIT_LEFT_OUT, "c": 0}, printed
    lines = (tmp_path / "runs/tiny/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (lost,) = (event for event in events if event["event"] == "lost")
    assert (lost["class"], lost["node"]) == ("slow", "b")
    assert f"rank {lost['rank']} " in lost["sentence"]
    (left_out,) = (event for event in events if event["event"] == "left_out")
    assert left_out["node"] == "b"
    trained = [e["nodes"][: e["num_active"]] for e in events if e["event"] == "generation"]
    assert [sorted(nodes) for nodes in trained] == [["a", "b"], ["a", "c"]]
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, STEPS + 1))

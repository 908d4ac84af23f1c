"""A rank's end of the socket to its agent, with an agent that the test plays."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from paceline.elastic.wire import encode

# In a process of its own: a rank whose agent is gone ends with all that it started.
_RANK = """
import sys, time
from paceline.elastic.link import RankLink

begun, ended = [], []

def on_leave(number):
    begun.append(number)
    time.sleep(0.3)
    ended.append(number)

link = RankLink(sys.argv[1], on_leave, lambda within_s: None, first_limit_s=60.0)
print(link.next_generation()[0].number, flush=True)
while len(begun) < 2:  # the second comes from the thread that cuts again and again
    time.sleep(0.01)
print(link.next_generation()[0].number, len(begun) - len(ended), flush=True)
"""


def _generation(number: int) -> dict[str, object]:
    fields = {"number": number, "leader": "a", "nodes": [], "num_active": 0, "job": {}}
    return fields | {"store": ["127.0.0.1", 1], "reason": "", "time": 0.0}


def test_a_cut_that_is_under_way_ends_before_the_next_generation_begins(tmp_path: Path):
    path = str(tmp_path / "agent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        command = [sys.executable, "-c", _RANK, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as rank:
            agent = listener.accept()[0]
            with agent:
                for number in (1, 2):
                    given = {"rank": 0, "local_rank": 0, "generation": _generation(number)}
                    agent.sendall(encode({"kind": "generation", **given}))
                    if number == 1:
                        assert rank.stdout.readline() == "1\n"
                        agent.sendall(encode({"kind": "leave", "generation": 1}))
                assert rank.stdout.readline() == "2 0\n"

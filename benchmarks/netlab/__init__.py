"""A laboratory of several hosts on one machine, with links of a chosen rate that can be cut.

python -m benchmarks.netlab --hosts 2 --rate 200mbit -- paceline train job.toml

with Laboratory(num_hosts=2, rate_bits_per_s=200e6) as lab:
    ranks = lab.start(["paceline", "train", "job.toml"])
    lab.cut(1)
    finished = ranks.wait(timeout_s=60)
"""

from benchmarks.netlab.laboratory import Laboratory, why_not
from benchmarks.netlab.ranks import Finished, StartedRanks
from benchmarks.netlab.wires import Traffic, rate_text, read_rate

__all__ = ["Finished", "Laboratory", "StartedRanks", "Traffic", "rate_text", "read_rate", "why_not"]

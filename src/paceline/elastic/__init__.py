"""Replicas that step for themselves, and may be lost and come back.

| module | what |
|---|---|
| local_rounds | local SGD, DiLoCo: after which steps workers meet, and what they exchange |
| membership | who takes part in an exchange: a late worker is out, one that asks comes in |
| elastic_rounds | local rounds over a membership: an exchange is repeated without a lost worker |
| state_transfer | the state of the run, handed to a worker that comes |
| peer_failure | who is missing when a collective of any run fails, and what the others are doing |

A worker has no process group that a lost one would break: it is a world of its own, and meets the
others in groups made for one set of members. The first worker keeps the store and can't be lost.

Not here: what needs the trainer or the launcher. `train.elastic_start` gives a worker that comes
the state of the run, `train.elastic_workers` starts a lost one again.
"""

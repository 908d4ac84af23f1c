"""Runs that survive what breaks, and replicas that step for themselves.

| module | what |
|---|---|
| agent, leader | the agent of a node, and the one that makes the generations of a run |
| generation, decision, planned, budget | who trains together, and what follows from a loss |
| local_ranks, link, cut | the processes of a node, and how one leaves a generation |
| verdict, check_node, peer_failure | who holds up the others, is bad, or is missing |
| local_rounds | local SGD, DiLoCo: after which steps workers meet, and what they exchange |

Not here: what needs the trainer or the launcher (`train.generations`, `train.elastic_launch`).
"""

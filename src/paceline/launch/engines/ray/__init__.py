"""Engine "ray": a Ray cluster. A job is a placement group, and an actor of it runs each node.

connection.py   reaching the cluster; the only file that imports Ray
node.py         the actor on a node
placement.py    a job's placement group, for its supervisor
engine.py       what is asked and told
"""

from paceline.launch.engines.ray.engine import RayEngine


def engine() -> RayEngine:
    """See `paceline.launch.engines`."""
    return RayEngine()

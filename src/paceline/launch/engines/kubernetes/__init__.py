"""Engine "kubernetes": a job is a JobSet with one pod on each node, which Kueue admits.

Pods run the job's start script from a volume that this machine sees as well, at the same path; so
logs and records are read from there. Restarts, the queue and quotas are the cluster's.
"""

from paceline.launch.engines.kubernetes.engine import KubernetesEngine


def engine() -> KubernetesEngine:
    """See `paceline.launch.engines`."""
    return KubernetesEngine()

"""Engine "skypilot": rented and spot machines, as a managed job of SkyPilot that the person's own
`sky` submits.

SkyPilot finds machines, sets them up, and puts others in their place when they are taken away or
the job asks for it (exit code 75). They see a folder that this machine sees as well, at the same
path; so logs and records are read from there, and a job is told there to save or to stop.
"""

from paceline.launch.engines.skypilot.engine import SkyPilotEngine


def engine() -> SkyPilotEngine:
    """See `paceline.launch.engines`."""
    return SkyPilotEngine()

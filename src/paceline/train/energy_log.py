"""While this node trains: what it takes, written into the Run (`observe.energy`)."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.machine.energy import LOOK_EVERY_S, EnergyMeter
from paceline.observe.energy import EnergyRecord
from paceline.observe.run import Run


@contextmanager
def energy_logged(run: Run, node: str, num_devices: int) -> Iterator[None]:
    """Count while the block runs.

    Args:
        node: its name.
        num_devices: NVIDIA's, that this node trains on.
    """
    began, meter, is_over = time.time(), EnergyMeter(num_devices), threading.Event()

    def write() -> None:
        now = meter.read()
        record = EnergyRecord(node, began, time.time(), now.devices_j, now.host_j, now.missing)
        with suppress(OSError):  # a full disk ends no run
            record.write(run)

    def write_on() -> None:
        while meter.counts and not is_over.wait(LOOK_EVERY_S):
            write()

    thread = threading.Thread(target=write_on, name="energy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        write()

"""A rank whose main thread is in native code, where no handler of Python's runs: told to stop it
must end by its watch. Arguments: a Run's folder, seconds of the notice, steps done ("-": none,
"7+": they are saved, and being copied to a store)."""

import hashlib
import sys
from pathlib import Path

from paceline.config.elastic import Elastic
from paceline.observe.run import Run
from paceline.train.stopping import StopRequest

if __name__ == "__main__":
    folder, within_s, done = sys.argv[1:]
    stop = StopRequest(Run(Path(folder)), Elastic(save_within_s=float(within_s)))
    stop.speaks = True
    if done != "-":
        stop.in_exchange()
        stop.stepped(int(done.rstrip("+")))
    stop.is_copying = done.endswith("+")
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)

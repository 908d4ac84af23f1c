"""`paceline ARGUMENTS` that ignores SIGINT by birth: python -m tests.train.ignoring ARGUMENTS"""

import signal

from paceline.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()

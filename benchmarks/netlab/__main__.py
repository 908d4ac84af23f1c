"""Run a program on the hosts of a laboratory, and say what crossed their links."""

import argparse
import sys

from benchmarks.netlab.laboratory import Laboratory
from benchmarks.netlab.ranks import Finished
from benchmarks.netlab.wires import read_rate
from paceline.config.errors import InputError


def main() -> None:
    options = _options()
    try:
        with Laboratory(options.hosts, read_rate(options.rate)) as lab:
            finished = lab.run(
                options.command,
                ranks_per_host=options.ranks_per_host,
                timeout_s=options.limit,
                show_first=True,
            )
            for host in range(lab.num_hosts):
                link = lab.traffic(host)
                print(
                    f"host{host}: {link.sent_bytes:,} bytes sent, {link.received_bytes:,} received",
                    file=sys.stderr,
                )
    except InputError as error:
        print(f"netlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(_told(finished))


def _told(finished: list[Finished]) -> int:
    """Show what ranks wrote that failed; return the first bad code. Rank 0 has been shown."""
    bad = [rank for rank in finished if rank.code != 0]
    for rank in bad:
        if rank.rank != 0:
            print(f"--- rank {rank.rank} on host{rank.host} ---\n{rank.output}", file=sys.stderr)
        print(f"rank {rank.rank} on host{rank.host} ended with {rank.code}", file=sys.stderr)
    return 0 if not bad else max(1, bad[0].code)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netlab", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--rate", default="none", help='of every link, each way: "50mbit", "1gbit", "none"'
    )
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument(
        "--limit", type=float, default=86400, help="seconds after which the ranks are killed"
    )
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()

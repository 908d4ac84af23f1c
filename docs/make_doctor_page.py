"""Write docs/doctor.md: the introduction below, and the table of checks from the code's own."""

from pathlib import Path

from paceline.doctor import readings
from paceline.doctor.checks import GROUPS

INTRODUCTION = """# Is this machine fit to train on?

`paceline doctor` looks at devices, links, network, NCCL, software and host, and says of each check
whether it is in order, a warning, a problem, or could not be looked at. What isn't in order comes
with why it matters and what to do. It changes nothing; only `storage-speed` writes a file (at most
256 MiB, at most 3 s) to `--folder`, and removes it. Run it where and as the job will run: limits,
bindings and variables are those of the process that asks.

```
paceline doctor --folder /scratch                                  this machine
NCCL_DEBUG=INFO torchrun ... -m paceline train my.toml > job.log
paceline doctor --nccl-log job.log                                 and what NCCL chose in a job
paceline doctor --save host-17                                     what this machine says, as files
paceline doctor --from host-17 --json                              judged elsewhere, as JSON
paceline doctor --run runs/big                                     kept with a run that trains now
```

The exit code is 1 if there is a problem, else 0: a job's script may stop there. `--json` makes the
last line one object. It has `facts` (devices with clocks and what holds them down, links, ports,
NCCL's paths, versions, limits, storage), `checks` (status, seen and fix by name), and how many
`problems` and `warnings` there are.

Clocks tell the truth under load: `--run` keeps what was found as the run's doctor.json, where
`paceline explain` looks for throttled clocks and a wrong fabric. On a machine without
accelerators most checks are "not checked", which is what they say.

## From another machine

`--from FOLDER` reads the same texts that are read here, from files of these names; any may be
missing, and a folder can be filled by hand:

"""
CHECKS = """
## The checks

A check is a function from facts to a verdict (`src/paceline/doctor/checks/`). Its limits are
assumed where no maker states any, and stand beside it.
"""


def page() -> str:
    """The whole page as Markdown."""
    tables = "".join(
        f"\n### {group}\n\n| check | looks at | why |\n|---|---|---|\n"
        + "".join(f"| `{each.name}` | {each.looks_at} | {each.why} |\n" for each in checks)
        for group, checks in GROUPS.items()
    )
    return INTRODUCTION + _files() + CHECKS + tables


def _files() -> str:
    said = {name: f"`{' '.join(command)}`" for name, command in readings.COMMANDS.items()}
    said |= {name: f"`{file}`" for name, file in readings.FILES.items()}
    said |= dict.fromkeys(readings.ASKED, "what `paceline doctor --save` found")
    said |= {
        "ibstat.txt": "`ibstat`, instead of infiniband.json",
        "nccl.log": "a job's output with `NCCL_DEBUG=INFO`",
        "storage.json": "what was measured in `--folder`",
    }
    return "| file | holds |\n|---|---|\n" + "".join(f"| {k} | {v} |\n" for k, v in said.items())


if __name__ == "__main__":
    Path(__file__).with_name("doctor.md").write_text(page())

"""The shell script that starts a job's command on one node, whatever the engine.

It makes the environment that the site asks for, starts the command, passes SIGTERM and SIGUSR1 on
to it, and ends with its exit code. What the command prints goes to log/<attempt>-<node>.log in the
job's folder, and when it started and ended to nodes/<node>.jsonl (`launch.node_records`). The last
line of its own output is "exit <code>": who started the script knows from it that the command has
ended, and was not lost with its node.
"""

import re
import shlex
import signal
from collections.abc import Iterator

from paceline.config.errors import EXIT_LEFT_OUT, EXIT_SAVED, InputError
from paceline.config.site import Site
from paceline.launch.contract import ATTEMPT, Request
from paceline.observe.run import LAUNCH

START_SCRIPT = "start.sh"
LOG_FOLDER, NODE_FOLDER = "log", "nodes"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_RECORDS = f"""\
attempt=${{{ATTEMPT}:-1}}
node=${{PACELINE_NODE:-${{SLURMD_NODENAME:-$(hostname)}}}}
node=${{node//[^A-Za-z0-9._-]/_}}
export PACELINE_NODE="$node" {LAUNCH}="$folder"
unset SLURM_STEP_NUM_TASKS  # the command is no rank: it starts those of its node
mkdir -p "$folder/{LOG_FOLDER}" "$folder/{NODE_FOLDER}" || exit 2
exec 4>&1 >>"$folder/{LOG_FOLDER}/$(printf %03d "$attempt")-$node.log" 2>&1
started=$(date +%s.%3N)
record() {{
  printf '{{"attempt": %d, "node": "%s", "started": %s, "ended": %s, "exit_code": %s}}\\n' \\
    "$attempt" "$node" "$started" "$1" "$2" >>"$folder/{NODE_FOLDER}/$node.jsonl"
}}
record null null
ended() {{
  code=$?
  record "$(date +%s.%3N)" "$code"
  echo "exit $code" >&4
  # The others go on without this node: no failure to who sees exit codes alone.
  [ "$code" != "$left_out" ] || exit 0
}}
trap ended EXIT
"""

# A signal ends `wait`, which then says nothing of the command: it is asked again. A command that
# the passed signal killed had not begun to heed it (Python's start takes tenths of a second). Of a
# command that ends just as a signal comes, bash loses the status and says -1: Slurm tells both.
_WAIT = f"""\
command= told= passed=
pass_on() {{
  [ -n "$command" ] || exit {EXIT_SAVED}
  told=1 passed=1
  kill -s "$1" "$command"
}}
trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1
"""
_START = """\
{command} </dev/null 4>&- &
command=$! told=1
while [ -n "$told" ]; do
  told=
  wait "$command"
  code=$?
done
case $passed-$code in
  1-{by_term} | 1-{by_usr1} | 1--1) code={saved} ;;
esac
exit "$code"
"""


def start_script(request: Request, site: Site) -> str:
    """The text of the script, for bash.

    Raises:
        InputError: a variable's name, or a path in a container, can't be written.
    """
    parts = [
        "#!/bin/bash\n# Starts the job on this node; written by paceline launch.\n",
        f"folder={_quoted(request.folder)}\n",
        f"left_out={EXIT_LEFT_OUT if request.goes_on else ''}\n",
        _RECORDS,
        _WAIT,
        f"cd -- {_quoted(request.directory)} || exit 2\n",
        *_environment(request, site),
        _START.format(
            command=_command(request, site),
            by_term=128 + signal.SIGTERM,
            by_usr1=128 + signal.SIGUSR1,
            saved=EXIT_SAVED,
        ),
    ]
    return "".join(parts)


def _environment(request: Request, site: Site) -> Iterator[str]:
    if site.modules:
        yield "command -v module >/dev/null || . /etc/profile\n"
        yield f"module load {shlex.join(site.modules)} || exit 2\n"
    if site.venv:
        yield f'export VIRTUAL_ENV={_quoted(site.venv)} PATH={_quoted(site.venv)}/bin:"$PATH"\n'
    if site.scratch:
        yield f"export TMPDIR={_quoted(site.scratch)}\n"
        yield 'mkdir -p "$TMPDIR" || exit 2\n'
    for name, value in request.environment.items():
        if not _VARIABLE.fullmatch(name):
            raise InputError(
                f"{name!r} can't be set for a job: name a variable by letters, digits and '_'."
            )
        yield f"export {name}={_quoted(value)}\n"
    yield from (f"{line}\n" for line in site.setup)


def _command(request: Request, site: Site) -> str:
    if not site.container:
        return shlex.join(request.command)
    for path in (request.directory, request.folder):
        if re.search(r"[:,]", str(path)):
            raise InputError(
                f"{path} can't be bound into a container, since its name has ':' or ',': launch "
                "from another folder."
            )
    places = ["--bind", str(request.directory), "--bind", str(request.folder)]
    inside = ["apptainer", "exec", "--nv", *places, "--pwd", str(request.directory)]
    return shlex.join([*inside, site.container, *request.command])


def _quoted(value: object) -> str:
    text = str(value)
    if "\0" in text:
        raise InputError(f"{text!r} holds a NUL, which no shell can take: leave it out.")
    return shlex.quote(text)

"""The batch script that Slurm runs on a job's first node (pure).

It starts `start.sh` once on each node, and asks Slurm to start the job again where that ends with
75: saved. One that may start with fewer nodes (--nodes=1-4) gets those that are free each time, and
is saved when more are. Slurm signals the tasks, so this script only waits; what it says goes to
slurm.log in the job's folder. Slurm itself puts the job back after a preemption or a lost node
(--requeue).

Values that Slurm reads stand in #SBATCH lines and are refused where it would read something else;
paths stand in the script, quoted for bash.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator

from paceline.config.errors import EXIT_LEFT_OUT, EXIT_SAVED, InputError
from paceline.config.site import NodeType, Site
from paceline.launch.contract import ATTEMPT, NUM_NODES, Rendered, Request
from paceline.launch.start_script import NODE_FOLDER, START_SCRIPT, start_script

BATCH_SCRIPT = "job.sbatch"
SLURM_LOG = "slurm.log"
_GUARD_SCRIPT = "guard.sh"
STOP = "USR2"
"""The signal that the batch script takes for a person's stop."""
SHAPE_FILE = "slurm.json"
"""How many devices a node of the job has: Slurm's accounts know it only of what it hands out."""
_VAIN, _MOST_VAIN = "vain", 3
"""A line for each attempt in a row of which no node began, and how many may come back."""
_LOOK_S = 60
"""Between looks for free nodes."""
_NICE = 100
"""Of Slurm's priority, for each step of `Request.priority` below 0."""
_TOGETHER_S = 5
"""Nodes that save do so together, but for what each of them closes."""
_GRES = ("--gres", "--gpus", "--tres-per")
_CPUS = ("--cpus-per", "--exclusive", "--mincpus")
_WHOLE = re.compile(r"(?:\d+x)?(\d+)x")
"""Of a Cluster such as "8xH100-SXM": the devices of a node."""

# Who stops a job takes its right to come back first: the script may have been too young to hear.
# Nodes that others could take are taken by them: what is free at two looks is worth a restart.
_BEGIN = f"""\
cd -- "$folder" || exit 2
exec >>{SLURM_LOG} 2>&1
export {ATTEMPT}=$((${{SLURM_RESTART_COUNT:-0}} + 1)) {NUM_NODES}=$SLURM_JOB_NUM_NODES
stopped= step=

end_step() {{
  scancel --quiet --signal=TERM "$SLURM_JOB_ID.0"
  sleep "$grace_s"
  scancel --quiet --signal=KILL "$SLURM_JOB_ID.0"
}} 2>/dev/null

stop() {{
  stopped=1
  [ -z "$step" ] || end_step &
}}

end_stopped() {{
  scancel "$SLURM_JOB_ID"
  sleep 60
}}

starts_now() {{
  local start
  start=$(SLURM_TIME_FORMAT=%s sbatch --test-only --nodes="$1" {BATCH_SCRIPT} 2>&1) || return
  start=${{start##*to start at }}
  [ "${{start%% *}}" -le $(($(date +%s) + 2)) ]
}} 2>/dev/null

grow() {{
  local more seen=
  [ "$grow_after_s" != 0 ] || return
  sleep "$grow_after_s"
  while sleep "$(({_LOOK_S} < grow_after_s ? {_LOOK_S} : grow_after_s))"; do
    more=$((most - {NUM_NODES}))
    while [ "$more" -gt 0 ] && ! starts_now "$more"; do
      more=$((more - 1))
    done
    [ "$more" = 0 ] || [ -z "$seen" ] || break
    seen=${{more#0}}
  done
  echo "attempt ${ATTEMPT} is saved: $more more nodes are free"
  scancel --quiet --signal=USR1 "$SLURM_JOB_ID.0"
}}

trap : TERM
trap stop {STOP}
case $(squeue --noheader --jobs="$SLURM_JOB_ID" --Format=requeue) in
  0*) end_stopped ;;
esac
[ "${ATTEMPT}" -le "$restarts" ] || scontrol update JobId="$SLURM_JOB_ID" Requeue=0
"""
# A node's script says how it ended. The first that failed ends the others, and so does the first
# that saved, if they don't follow by themselves. 138 and 143: USR1 or TERM came before anything
# could hear. Where nodes may go on without one, one whose command was killed counts as lost, and
# one that the others left out doesn't count. Slurm may give a node that can't take a step, which is
# no fault of the command: others are tried.
_JUDGE = f"""\
judge() {{
  local word code=1 number begun= failed= saved= finished=
  while read -r word number; do
    code=$number
    [ "$word" = srun ] || begun=1
    [ "$goes_on $word $code" != "1 exit {EXIT_LEFT_OUT}" ] || continue
    case $word,$code in
      exit,0) finished=$goes_on ;;
      *,{EXIT_SAVED} | *,138 | *,143)
        [ -n "$saved$failed" ] || {{ sleep {_TOGETHER_S}; end_step; }} &
        saved=1 ;;
      exit,*)
        if [ -z "$failed" ] && {{ [ -z "$goes_on" ] || [ "$code" -le 128 ]; }}; then
          failed=$code
          end_step &
        fi ;;
    esac
  done
  kill $(jobs -p) 2>/dev/null
  # A shared folder may show late what other nodes wrote; who was lost has said nothing here.
  if [ -n "$begun" ] || grep -qs '"attempt": '"${ATTEMPT}," {NODE_FOLDER}/*; then
    rm -f {_VAIN}
  else
    echo "no node began" | tee -a {_VAIN}
    [ "$(wc -l <{_VAIN})" -gt {_MOST_VAIN} ] || return {EXIT_SAVED}
  fi
  [ -z "$failed" ] || return "$failed"
  [ -z "$saved" ] || return {EXIT_SAVED}
  [ -z "$finished" ] || return 0
  return "$code"
}}
"""
# Where nodes go on without the one that had the batch script, nobody would tell Slurm of the end:
# the next nodes do. A run that has finished ends at once when it is started again.
_GUARD = f"""\
#!/bin/bash
# Runs {START_SCRIPT} on a node; written by paceline launch.
trap : TERM USR1
bash {START_SCRIPT}
code=$?
case $SLURM_PROCID in
  1 | 2 | 3)
    ask="squeue --noheader --jobs=$SLURM_JOB_ID"
    if left=$($ask --nodelist="$1") && [ -z "$left" ]; then
      case $($ask --Format=requeue) in
        0*) scancel "$SLURM_JOB_ID" ;;
        *) scontrol requeue "$SLURM_JOB_ID" ;;
      esac
    fi ;;
esac
exit "$code"
"""
# A signal ends `wait`, which then says nothing of the step: it is asked again. A job that Slurm has
# ended meanwhile isn't RUNNING: who cancels it doesn't want it back.
_END = f"""\
step=$!
[ "${NUM_NODES}" = "$most" ] || grow &
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done
kill $(jobs -p) 2>/dev/null
echo "attempt ${ATTEMPT} ended with $code"
if [ -n "$stopped" ] && [ "$code" != 0 ]; then
  end_stopped
elif [ "$code" = {EXIT_SAVED} ] &&
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
"""


def rendered(request: Request, site: Site) -> Rendered:
    """The batch script and the script of a node.

    Raises:
        InputError: a value can't be written so that Slurm reads it, or the site has no such type.
    """
    is_kept = "1" if request.goes_on else ""
    lines = [f"#SBATCH {option}\n" for option in _options(request, site)]
    parts = [
        "#!/bin/bash\n",
        *lines,
        "# Starts the job on its nodes; written by paceline launch.\n",
        f"folder={shlex.quote(str(request.folder))}\n",
        f"restarts={request.restarts} grace_s={request.grace_s}\n",
        f"goes_on={is_kept} most={request.num_nodes} grow_after_s={request.grow_after_s}\n",
        _BEGIN,
        _JUDGE,
        '[ -z "$stopped" ] || end_stopped\n',
        f'{{ {_step(request)}; echo "srun $?"; }} | judge &\n',
        _END,
    ]
    files = {
        BATCH_SCRIPT: "".join(parts),
        START_SCRIPT: start_script(request, site),
        SHAPE_FILE: json.dumps({"devices_per_node": request.devices_per_node}) + "\n",
    }
    if is_kept:
        files[_GUARD_SCRIPT] = _GUARD
    return Rendered(files, BATCH_SCRIPT)


def where(site: Site, spot: bool) -> list[str]:
    """The options that say in which queue, and on whose account.

    Raises:
        InputError: a name can't be one of Slurm's.
    """
    partition = site.spot_partition if spot and site.spot_partition else site.partition
    named = {"partition": partition, "account": site.account, "qos": site.qos}
    return [_option(f"--{name}={value}", name) for name, value in named.items() if value]


def selected(kind: NodeType | None) -> list[str]:
    """The options by which a site asks for machines of a type.

    Raises:
        InputError: one is no option.
    """
    options = list(kind.select) if kind else []
    for option in options:
        if not option.startswith("--"):
            raise InputError(
                f"select has {option!r}, which is no option of sbatch: write it as "
                '"--constraint=NAME".'
            )
        _option(option, "select")
    return options


def job_name(request: Request) -> str:
    """What Slurm shows: the name, without what it or a shell might read otherwise."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", request.name)[:100] or "paceline"


def _options(request: Request, site: Site) -> Iterator[str]:
    kind = site.node_type(request.node_type)
    select = selected(kind)
    yield f"--job-name={job_name(request)}"
    # Slurm would expand % in a path; the script opens its log itself.
    yield "--output=/dev/null"
    if request.fewest:  # a number of tasks would bound the nodes: one for the fewest
        yield f"--nodes={request.fewest}-{request.num_nodes}"
    else:
        yield f"--nodes={request.num_nodes}"
        yield "--ntasks-per-node=1"
    yield from where(site, request.spot)
    yield from _devices(request, kind, select)
    yield from select
    yield "--requeue"
    yield f"--signal=TERM@{request.grace_s}"
    if request.time_limit_s is not None:
        yield f"--time={math.ceil(request.time_limit_s / 60)}"
    if request.priority < 0:
        yield f"--nice={-request.priority * _NICE}"
    if request.goes_on:
        yield "--no-kill"
    for job in request.after:
        if not job.isdecimal():
            raise InputError(f"{job!r} is no job of Slurm's: give the number that it was given.")
    if request.after:
        yield f"--dependency=afterok:{':'.join(request.after)}"


def _devices(request: Request, kind: NodeType | None, select: list[str]) -> Iterator[str]:
    """What of a node the job gets, where the site does not say it: GPUs, and all of a node's cores
    and memory where it takes all of its GPUs."""
    if not any(each.startswith(_GRES) for each in select):
        yield f"--gpus-per-node={request.devices_per_node}"
    whole = _WHOLE.match(kind.cluster) if kind else None
    is_whole = whole is not None and int(whole[1]) == request.devices_per_node
    if is_whole and not any(each.startswith(_CPUS) for each in select):
        yield "--exclusive"
        yield "--mem=0"


def _step(request: Request) -> str:
    count = f'"${NUM_NODES}"'
    nodes = f"--nodes={count} --ntasks={count} --ntasks-per-node=1"
    # Nodes end at their own times, and some of them still save: none is killed with the first.
    ends = f"--kill-on-bad-exit=0 --wait=0{' --no-kill' if request.goes_on else ''}"
    cpus = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
    what = f'{_GUARD_SCRIPT} "$SLURMD_NODENAME"' if request.goes_on else START_SCRIPT
    return f"srun {nodes} --export=ALL --cpu-bind=none {ends} {cpus} bash {what}"


def _option(option: str, name: str) -> str:
    """An option as Slurm's parser of #SBATCH lines takes it, which knows quotes and comments."""
    if re.search(r"[\s'\"#\\\0]", option):
        raise InputError(
            f"{name} has {option!r}, which no line of a batch script can hold: leave out blanks, "
            "quotes, '#' and '\\'."
        )
    return option

"""The shell script that SkyPilot runs on each machine of a job.

It numbers attempts, which SkyPilot doesn't: a machine joins the newest one, if it has the same
machines and this one's place in it is free, and begins another otherwise. Then it runs the start
script, passes on what the job's folder says (a stop, a save, the time limit), and ends with the
exit code that has SkyPilot do what the job asks for.
"""

import shlex

from paceline.config.errors import EXIT_SAVED
from paceline.launch.contract import ATTEMPT, Request
from paceline.launch.start_script import START_SCRIPT

NODE_SCRIPT = "node.sh"
ATTEMPTS = "attempts"
"""In the job's folder: a folder <number>.<sum of its machines> for each attempt."""
NODES, SAVE, STOPPED = "nodes", "save", "stopped"
"""In an attempt's folder: its machines, one a line; a wish to save. In the job's folder: a person
ended it."""

_FOREVER_S = 10**12
_SCRIPT = """\
#!/bin/bash
# Starts the job on this machine; written by paceline launch.
folder={folder} grace_s={grace_s} limit_s={limit_s} restarts={restarts}
rank=$SKYPILOT_NODE_RANK
mapfile -t nodes <<<"$SKYPILOT_NODE_IPS"
together=$(printf %s "$SKYPILOT_NODE_IPS" | cksum)
together=${{together%% *}}
mkdir -p "$folder/{attempts}" || exit 2
newest=$(ls "$folder/{attempts}" | sort -n | tail -n 1)
number=${{newest%%.*}}
at=$folder/{attempts}/$newest
if [ "${{newest#*.}}" != "$together" ] || ! mkdir "$at/$rank" 2>/dev/null; then
  number=$((number + 1))
  at=$folder/{attempts}/$number.$together
  mkdir -p "$at/$rank" || exit 2
fi
printf '%s\\n' "${{nodes[@]}}" >"$at/.$rank" && mv "$at/.$rank" "$at/{names}" || exit 2
[ ! -e "$folder/{stopped}" ] || exit 0
export {attempt}=$number PACELINE_NODE=${{nodes[rank]}} PACELINE_ADDRESS=${{nodes[rank]}}

command= told=1 watcher=
trap 'told=1; kill -s TERM "$command" 2>/dev/null' TERM
setsid bash "$folder/{start}" &
command=$!
watch() {{
  local is_asked=
  while sleep 0.5; do
    if [ -e "$folder/{stopped}" ] || [ "$SECONDS" -ge "$limit_s" ]; then
      kill -s TERM "$command"
      sleep "$grace_s"
      kill -s KILL -- "-$command"
      return
    fi
    if [ -z "$is_asked" ] && [ -e "$at/{save}" ]; then
      kill -s USR1 "$command"
      is_asked=1
    fi
  done
}}
watch >/dev/null 2>&1 &
watcher=$!
while [ -n "$told" ]; do
  told=
  wait "$command"
  code=$?
done
kill "$watcher" 2>/dev/null
touch "$at/$rank/ended"
[ ! -e "$folder/{stopped}" ] || exit 0
if [ "$code" = {saved} ]; then
  # SkyPilot kills what still saves on other machines as soon as one has ended so.
  for ((turn = 0; turn < 2 * grace_s; turn++)); do
    ended=("$at"/*/ended)
    [ "${{#ended[@]}}" -lt "${{#nodes[@]}}" ] || break
    sleep 0.5
  done
  [ "$number" -le "$restarts" ] || exit 1  # {saved} would start it again
fi
exit "$code"
"""


def node_script(request: Request) -> str:
    """The text of the script, for bash."""
    limit = request.time_limit_s
    return _SCRIPT.format(
        folder=shlex.quote(str(request.folder)),
        grace_s=request.grace_s,
        limit_s=_FOREVER_S if limit is None else max(1, limit - request.grace_s),
        restarts=request.restarts,
        attempts=ATTEMPTS,
        attempt=ATTEMPT,
        names=NODES,
        save=SAVE,
        stopped=STOPPED,
        start=START_SCRIPT,
        saved=EXIT_SAVED,
    )

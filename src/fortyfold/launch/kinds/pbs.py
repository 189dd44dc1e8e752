"""PBS Pro and OpenPBS: qsub, and an agent on each node by pbs_tmrsh, pbsdsh or ssh, the first that there is.

Tasks get neither environment nor folder: node.sh sets all of it, and is told the rest by arguments. There is no warning
before the walltime ends, so agents have a timer. At its end an owner may not requeue a job: the script submits itself
again; a preempted job PBS requeues by itself. What agents print and, with pbsdsh, return is lost on the way: each has a
log of its own, and only `ended` counts.
"""

import json
import os
import pty
import time
from pathlib import Path

from fortyfold.launch.contract import Job, Rendered, Say
from fortyfold.launch.foreground import ask_to_stop, run_in_foreground
from fortyfold.launch.plan import Plan
from fortyfold.launch.requeue import AGAIN, read_exit_code
from fortyfold.launch.run_command import run_command
from fortyfold.launch.script import comment, job_name, quote, render_node
from fortyfold.spec.errors import UserError
from fortyfold.spec.nodes import NodeShape, clock_text, memory_text, parse_seconds
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import PbsSite
from fortyfold.spec.stop import StopFlag

BATCH = True
_STATES = {"Q": "queued", "H": "held", "W": "waiting", "R": "running", "S": "suspended", "E": "ending", "B": "running"}

_BODY = """\
run={run}
logs={logs}
job=${{PBS_JOBID%%.*}}
exec >> "$logs/job-$job.log" 2>&1
rm -f "$run/launch/ended"
{note}start=$job-$(date +%s)
mapfile -t nodes < <(awk '!seen[$0]++ {{ print NR - 1, $0 }}' "$PBS_NODEFILE")
PATH=$PATH:${{PBS_EXEC:-/opt/pbs}}/bin
# When to save: shortly before the end that PBS tells of, which may be a queue's; without its word, that asked for.
deadline={deadline}
facts=$(timeout 30 qstat -f "$PBS_JOBID" 2> /dev/null)
began=$(sed -n 's/^ *stime = //p' <<< "$facts")
walltime=$(sed -n 's/^ *Resource_List.walltime = //p' <<< "$facts")
if [ -n "$began" ] && [[ $walltime =~ ^([0-9]+):([0-9]+):([0-9]+)$ ]]; then
    seconds=$((10#${{BASH_REMATCH[1]}} * 3600 + 10#${{BASH_REMATCH[2]}} * 60 + 10#${{BASH_REMATCH[3]}}))
    deadline=$(($(date -d "$began" +%s) + seconds - {warn}))
fi
by=$(command -v pbs_tmrsh || command -v pbsdsh || echo ssh)
# By ssh an agent hears of the end only by its connection: when that closes, it is told to save and end.
attended="\\"\\$@\\" < /dev/null & agent=\\$!; {{ cat > /dev/null; kill -TERM \\"\\$agent\\"; }} <&0 > /dev/null 2>&1 &"
attended+=" wait \\"\\$agent\\""
start_node() {{
    local number=$1 index=${{2%% *}} host=${{2#* }} log=$logs/job-$job.log
    if [ "$number" -gt 0 ]; then log=$logs/job-$job-node-$number.log; fi
    local command=(/bin/bash "$run/launch/node.sh" "$start" "$number" "${{#nodes[@]}}" "$deadline" "$log")
    case $by in
    */pbs_tmrsh) exec pbs_tmrsh "$host" "${{command[@]}}" ;;
    */pbsdsh) exec pbsdsh -n "$index" -- "${{command[@]}}" ;;
    *)
        exec ssh -o BatchMode=yes -o ServerAliveInterval=15 "$host" \\
            "$(printf '%q ' bash -c "$attended" node "${{command[@]}}")" < <(exec tail -f /dev/null --pid=$$)
        ;;
    esac
}}
agents=()
trap : USR1 INT  # agents hear these themselves; this shell waits for them
trap 'if [ "$by" = ssh ]; then kill "${{agents[@]}}"; fi' TERM
for number in "${{!nodes[@]}}"; do
    start_node "$number" "${{nodes[$number]}}" &
    agents+=("$!")
done
until wait; do :; done
for _ in {{1..60}}; do  # the agents may outlive what started them by the time of a save
    if [ -e "$run/launch/ended" ]; then break; fi
    sleep 1
done
read -r word 2> /dev/null < "$run/launch/ended" || word=failed
"""
_RESUBMIT = """\
case $word in
{again})
    if again=$(qsub "$run/launch/job.sh"); then
        echo "$again" > "$run/launch/job-id"
        echo "fortyfold: $word; submitted again"
    else
        echo "fortyfold: $word, and $(hostname) may not submit it again; give the train command again"
    fi
    ;;
esac
"""
_EXIT = """\
case $word in
trained) exit 0 ;;
failed) exit 1 ;;
*) exit 75 ;;
esac
"""


def render(plan: Plan, interactive: bool) -> Rendered:
    run_dir, site, options = RunDir(plan.run), _site(plan), _options(plan)
    lines = ["-r y", "-W umask=022", "-j oe", *site.lines]
    head = [] if interactive else [f"#PBS {option}" for option in [*options, *lines]]
    about = comment(f"The run {plan.name} on the site {plan.site_name}, written by fortyfold train.")
    note = 'echo "$PBS_JOBID" > "$run/launch/job-id"\n' if interactive else ""
    script = "\n".join(["#!/bin/bash", *head, about, _body(plan, note)])
    if not interactive:
        script += _RESUBMIT.format(again=" | ".join(map(quote, AGAIN)))
    files = {run_dir.job_script: script + _EXIT, run_dir.node_script: render_node(plan)}
    if interactive:
        words = [word for option in [*options, *site.lines] for word in option.split(" ", 1)]
        return Rendered(files, [["qsub", "-I", *words], ["bash", str(run_dir.job_script)]])
    return Rendered(files, [["qsub", str(run_dir.job_script)]])


def _site(plan: Plan) -> PbsSite:
    assert isinstance(plan.site, PbsSite)
    return plan.site


def _body(plan: Plan, note: str) -> str:
    site = _site(plan)
    deadline = ""
    if site.time_limit:
        deadline = f"$(($(date +%s) + {parse_seconds(site.time_limit) - site.warn_seconds}))"
    logs = quote(site.logs) if site.logs else "$run/logs"
    return _BODY.format(run=quote(str(plan.run)), logs=logs, deadline=deadline, warn=site.warn_seconds, note=note)


def _options(plan: Plan) -> list[str]:
    site = _site(plan)
    options = [f"-N {job_name(plan)}", f"-l select={'+'.join(_chunks(plan))}", "-l place=scatter"]
    if site.time_limit:
        options.append(f"-l walltime={clock_text(parse_seconds(site.time_limit))}")
    if site.account:
        options.append(f"-A {site.account}")
    if site.queue:
        options.append(f"-q {site.queue}")
    return options


def _chunks(plan: Plan) -> list[str]:
    """Equal nodes that follow one another are one chunk with a count."""
    chunks: list[tuple[int, str]] = []
    for shape in plan.shapes:
        text = _chunk(plan, shape)
        if chunks and chunks[-1][1] == text:
            chunks[-1] = (chunks[-1][0] + 1, text)
        else:
            chunks.append((1, text))
    return [f"{count}:{text}" for count, text in chunks]


def _chunk(plan: Plan, shape: NodeShape) -> str:
    if shape.gpus.type:
        raise UserError(
            f"site {plan.site_name}: PBS has no common word for a GPU's type; write gpus = {shape.gpus.count} and name "
            f'the type as your site does, for example attributes = {{ gpu_model = "{shape.gpus.type}" }}'
        )
    parts = [f"ncpus={shape.cpus or shape.procs}", "mpiprocs=1"]
    if shape.memory_mib:
        number, unit = memory_text(shape.memory_mib)
        parts.append(f"mem={number}{unit}b")
    if shape.gpus.count:
        parts.append(f"ngpus={shape.gpus.count}")
    return ":".join([*parts, *(f"{name}={value}" for name, value in _site(plan).attributes.items())])


def submit(plan: Plan, rendered: Rendered) -> Job:
    number = run_command(rendered.commands[0]).strip()
    folder = _site(plan).logs or RunDir(plan.run).logs
    return Job("pbs", number, plan.site_name, str(Path(folder, f"job-{number.partition('.')[0]}.log")), time.time())


def state(job: Job) -> str | None:
    facts = _ask(job)
    return _STATES.get(str(facts.get("job_state"))) if facts else None


def _ask(job: Job) -> dict[str, object] | None:
    """What qstat says; None of a job that is over. Its JSON is broken now and then, so it is asked again."""
    for _ in range(3):
        try:
            answer = run_command(["qstat", "-x", "-f", "-F", "json", job.id])
            return dict(next(iter(json.loads(answer)["Jobs"].values())))
        except UserError as error:
            if "has finished" in str(error) or "Unknown Job" in str(error):
                return None
            raise
        except (ValueError, KeyError, StopIteration, AttributeError):
            time.sleep(0.5)
    return {"job_state": "R"}  # it is there, and that is all that is known


def cancel(job: Job, run_dir: RunDir) -> None:
    if state(job) == "running":
        ask_to_stop(run_dir)
    else:
        run_command(["qdel", job.id])


def shell(job: Job, node: int, inside: str) -> list[str]:
    places = str((_ask(job) or {}).get("exec_host", ""))  # host/0*4+other/0*4
    hosts = list(dict.fromkeys(place.partition("/")[0] for place in places.split("+") if place))
    if node >= len(hosts):
        raise UserError(f"PBS job {job.id} has no node {node} now")
    return ["ssh", "-t", "--", hosts[node], *([f"bash -c {quote(inside)}"] if inside else [])]


def run(plan: Plan, rendered: Rendered, run_dir: RunDir, stop: StopFlag, say: Say) -> int:
    """In the job around this command, or else in one that is asked for now, to which the command is typed."""
    ask, work = rendered.commands
    if "PBS_NODEFILE" in os.environ:
        return run_in_foreground(work, run_dir, stop)
    ours, theirs = pty.openpty()
    os.write(ours, f"{' '.join(map(quote, work))}; exit\n".encode())
    try:
        run_in_foreground(ask, run_dir, stop, terminal=theirs)
        return read_exit_code(run_dir)  # qsub gives 0 whatever happened
    finally:
        os.close(ours)
        os.close(theirs)

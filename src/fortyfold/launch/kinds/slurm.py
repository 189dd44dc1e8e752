"""Slurm: sbatch, or salloc for --interactive, and srun for an agent on each node.

Only plain words stand in #SBATCH lines; paths go to sbatch as arguments, which need no quoting. The batch shell hears
the warning before the time limit (B:USR1) and passes it to srun, which passes it to every node. Preemption's SIGTERM
reaches the nodes directly. When they have saved and ended, the script asks for what it is to do: `ended` says why the
run stopped, and of SIGTERM Slurm itself says whether it was a preemption. So it is inside a batch job that somebody
else wrote (--interactive there), of which a task of an array may be requeued alone.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from fortyfold.launch.contract import Job, Rendered, Say
from fortyfold.launch.foreground import ask_to_stop, run_in_foreground
from fortyfold.launch.plan import Plan
from fortyfold.launch.requeue import AGAIN, MAYBE_AGAIN
from fortyfold.launch.run_command import run_command
from fortyfold.launch.script import comment, job_name, quote, render_node
from fortyfold.spec.errors import UserError
from fortyfold.spec.nodes import clock_text, memory_text, parse_seconds
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.site import SlurmSite
from fortyfold.spec.stop import StopFlag

BATCH = True
_BODY = """\
run={run}
job=$SLURM_JOB_ID
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
rm -f "$run/launch/ended"
{note}srun {srun} bash "$run/launch/node.sh" "$job-${{SLURM_RESTART_COUNT:-0}}"{log} &
nodes=$!
trap 'kill -USR1 "$nodes"' USR1
trap 'kill -TERM "$nodes"' TERM
trap 'kill -INT "$nodes"' INT
code=
until [ -n "$code" ]; do
    wait "$nodes"
    code=$?
    if kill -0 "$nodes" 2>/dev/null; then code=; fi  # a trap ended the waiting, not the nodes
done
"""
_REQUEUE = """\
read -r word 2> /dev/null < "$run/launch/ended" || word={maybe}  # ended before it could hear a signal
case $word in
{maybe})
    if scontrol show job --oneliner "$job" | grep -q ' PreemptTime=[0-9]'; then again=preempted; fi
    ;;
{again}) again=$word ;;
esac
if [ -n "${{again:-}}" ]{condition}; then
    echo "fortyfold: $again; queued again"
    echo "$again" > "$run/launch/ended"
    trap - USR1 TERM INT
    scontrol requeue "$job"
fi
"""


def render(plan: Plan, interactive: bool) -> Rendered:
    run_dir, options = RunDir(plan.run), _options(plan)
    site = _site(plan)
    batch = ["--requeue", "--open-mode=append", f"--signal=B:USR1@{site.warn_seconds}"]  # partitions have limits, too
    head = [] if interactive else [f"#SBATCH {option}" for option in [*options, *batch, *site.lines]]
    about = comment(f"The run {plan.name} on the site {plan.site_name}, written by fortyfold train.")
    deadline = f"export FORTYFOLD_DEADLINE=$((SLURM_JOB_END_TIME - {site.warn_seconds}))"
    log = ' >> "$run/logs/job-$SLURM_JOB_ID.log" 2>&1' if interactive else ""
    note = 'echo "$SLURM_JOB_ID" > "$run/launch/job-id"\n' if interactive else ""  # srun knows no other name of a task
    body = _BODY.format(run=quote(str(plan.run)), srun=" ".join(_srun_options(plan)), log=log, note=note)
    if interactive:
        body = f'if [ -n "${{SLURM_JOB_END_TIME:-}}" ]; then {deadline}; fi\n{body}'
    condition = """ && scontrol show job --oneliner "$job" | grep -q ' BatchFlag=1 '""" if interactive else ""
    body += _REQUEUE.format(maybe=quote(MAYBE_AGAIN), again=" | ".join(map(quote, AGAIN)), condition=condition)
    script = "\n".join(["#!/bin/bash", *head, about, body]) + 'exit "$code"\n'
    files = {run_dir.job_script: script, run_dir.node_script: render_node(plan)}
    if interactive:
        return Rendered(files, [["salloc", *options, *site.lines, "bash", str(run_dir.job_script)]])
    return Rendered(files, [["sbatch", "--parsable", f"--output={_log_pattern(plan)}", str(run_dir.job_script)]])


def _site(plan: Plan) -> SlurmSite:
    assert isinstance(plan.site, SlurmSite)
    return plan.site


def _options(plan: Plan) -> list[str]:
    site, shapes = _site(plan), plan.shapes
    first, num_gpus = shapes[0], sum(shape.gpus.count for shape in shapes)
    if len({(shape.cpus, shape.memory_mib, shape.gpus.type) for shape in shapes}) > 1:
        raise UserError(f"site {plan.site_name}: in a Slurm job nodes may differ in the number of GPUs only")
    options = [f"--job-name={job_name(plan)}", f"--nodes={len(shapes)}", "--ntasks-per-node=1"]
    if len({shape.gpus.count for shape in shapes}) > 1:  # which node gets how many is up to Slurm
        options.append(f"--gpus={first.gpus.type + ':' if first.gpus.type else ''}{num_gpus}")
    elif num_gpus:
        options.append(f"--gpus-per-node={first.gpus}")
    if first.cpus:
        options.append(f"--cpus-per-task={first.cpus}")
    if first.memory_mib:
        number, unit = memory_text(first.memory_mib)
        options.append(f"--mem={number}{unit.upper()}")
    if site.time_limit:
        options.append(f"--time={clock_text(parse_seconds(site.time_limit))}")
    named = {"account": site.account, "partition": site.partition, "qos": site.qos, "constraint": site.constraint}
    return options + [f"--{name}={value}" for name, value in named.items() if value]


def _srun_options(plan: Plan) -> list[str]:
    """One agent a node; one that ends leaves the others to theirs. (Not --overlap: Slurm 22.05 then grants each node
    the GPUs of the poorest.)"""
    options = [f"--nodes={len(plan.shapes)}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    return options + ([f"--cpus-per-task={cpus}"] if (cpus := plan.shapes[0].cpus) else [])


def _log_pattern(plan: Plan) -> str:
    folder = Path(_site(plan).logs or RunDir(plan.run).logs)
    return f"{str(folder).replace('%', '%%')}/job-%j.log"


def submit(plan: Plan, rendered: Rendered) -> Job:
    answer = run_command(rendered.commands[0], environment=outside_environment(os.environ))
    number = answer.strip().partition(";")[0]  # a federation adds the cluster's name
    log = _log_pattern(plan).replace("%j", number).replace("%%", "%")
    return Job("slurm", number, plan.site_name, log, time.time())


def outside_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a job around this command says: its options would become those of the new one."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")) or name == "SLURM_CONF"
    }


def state(job: Job) -> str | None:
    try:
        answer = run_command(["squeue", "--noheader", "--jobs", job.id, "--format=%T %r"])
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise UserError(f"{error}; whether job {job.id} still runs cannot be told; try again") from None
    word, _, reason = answer.strip().partition(" ")
    if not word:
        return None
    return f"{word.lower()} ({reason})" if word == "PENDING" and reason not in ("None", "") else word.lower()


def cancel(job: Job, run_dir: RunDir) -> None:
    if (state(job) or "").startswith("running"):
        ask_to_stop(run_dir)
    else:
        run_command(["scancel", job.id])


def shell(job: Job, node: int, inside: str) -> list[str]:
    where = [f"--jobid={job.id}", "--overlap", "--nodes=1", "--ntasks=1", f"--relative={node}"]
    return ["srun", *where, "--pty", "bash", *(["-c", inside] if inside else [])]


def run(plan: Plan, rendered: Rendered, run_dir: RunDir, stop: StopFlag, say: Say) -> int:
    """In the allocation around this command, or else in one that is asked for now."""
    command = rendered.commands[0]
    if "SLURM_JOB_ID" in os.environ:
        command = command[command.index("bash") :]
    return run_in_foreground(command, run_dir, stop)

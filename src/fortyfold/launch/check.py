"""The part of `fortyfold sites check` that runs on the nodes: what each says is wrong, and whether their ranks meet.

All problems of all nodes are collected in launch/check.json of the (passing) run directory. Only when there are none
do ranks try to meet: the same way, by the same code, as for training.
"""

import json
from collections.abc import Sequence

from fortyfold.launch.culprit import find_culprit, tell
from fortyfold.launch.facts import Facts, lay_out, name_node
from fortyfold.launch.plan import Plan
from fortyfold.spec.errors import UserError
from fortyfold.spec.failure import Ending
from fortyfold.spec.run_dir import RunDir, write_json


def find_problems(plan: Plan, nodes: Sequence[Facts]) -> list[str]:
    """What the nodes have told, and how they differ from one another and from the plan."""
    problems = [f"{name_node(facts)}: {problem}" for facts in nodes for problem in facts["problems"]]
    try:
        lay_out(plan.shapes, nodes, in_order=plan.site.kind != "slurm")
    except UserError as error:
        if not any("GPUs are seen" in problem for problem in problems):
            problems.append(str(error))
    return problems


def describe_ending(ending: Ending) -> list[str]:
    """Why ranks could not meet."""
    return [] if ending == Ending() else [f"ranks did not meet: {tell(find_culprit(ending), ending)}"]


def require_no_problems(plan: Plan, nodes: Sequence[Facts]) -> None:
    """Write the report; a UserError if it has any."""
    problems = find_problems(plan, nodes)
    write_json(RunDir(plan.run).check, {"problems": problems, "nodes": list(nodes)})
    if problems:
        raise UserError(problems[0])


def add_problems(plan: Plan, problems: Sequence[str]) -> None:
    path = RunDir(plan.run).check
    report = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, report | {"problems": [*report["problems"], *problems], "met": True})

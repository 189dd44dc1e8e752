"""A node's own ranks: what it is asked about itself, what it does before they start, and how they are run."""

from fortyfold.launch.attempt import Rendezvous, run_node
from fortyfold.launch.environment import worker_environment
from fortyfold.launch.facts import Facts, own_facts
from fortyfold.launch.gang import Attend, RunNode
from fortyfold.launch.local import WORKER
from fortyfold.launch.network import interface_towards
from fortyfold.launch.place import Place
from fortyfold.launch.plan import Plan
from fortyfold.launch.prepare import prepare_data, stage_here
from fortyfold.launch.probe import probe
from fortyfold.spec.failure import Ending


def tell_facts(plan: Plan, place: Place) -> Facts:
    """What this node says of itself when the nodes meet."""
    procs = plan.shapes[min(place.node, len(plan.shapes) - 1)].procs
    problems = probe(plan, procs, place.num_gpus) if plan.checks else []
    return own_facts(place) | {"problems": problems}


def prepare_workers(plan: Plan, address: str, procs: int, world: int, attend: Attend) -> RunNode:
    """Bring the data here, if it is wanted here; gives how to run this node's workers."""
    if plan.apart and not plan.checks:
        prepare_data(plan, attend)
    staged = None if plan.checks else stage_here(plan, attend)
    interface = interface_towards(address, plan.site.interface) if len(plan.shapes) > 1 else None
    here = {"run": str(plan.run), "staged": staged.to_json() if staged else None}
    job = plan.job | here | {"world": world, "apart": plan.apart}
    presets = plan.site.kind == "pbs" and "OMP_NUM_THREADS" not in plan.site.variables
    environment = worker_environment(job, procs, interface, preset_threads=presets)

    def run(where: Rendezvous, attend: Attend) -> Ending:
        return run_node(WORKER, procs, environment, where, attend)

    return run

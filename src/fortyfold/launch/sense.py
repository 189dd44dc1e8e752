"""Mistakes that would show only on the nodes, hours later, looked for before a run is handed over. No torch here."""

import os
import sys
from pathlib import Path

from fortyfold.data.demo import wanted_demo
from fortyfold.launch.plan import Plan
from fortyfold.spec import plugin
from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError
from fortyfold.spec.recipe import Recipe


def require_sense(recipe: Recipe, plan: Plan) -> None:
    """A UserError for what cannot work; a note on what is not seen from here, where nodes may see it."""
    plugin.require("fortyfold.schedules", recipe.schedule.name)
    plugin.require("fortyfold.parallel.strategies", recipe.strategy.name)
    plugin.require("fortyfold.topologies", recipe.strategy.topology)
    for sink in recipe.log.sinks:
        plugin.require("fortyfold.sinks", sink)
    for batch in [recipe.global_batch, *(phase.global_batch for phase in recipe.phases)]:
        if batch is not None and batch < plan.num_ranks:
            raise UserError(f"global_batch {batch} is less than an image for each of {plan.num_ranks} ranks")
    for name in plan.site.secrets:
        if name not in os.environ:
            raise UserError(f"site {plan.site_name} names the secret {name}, and it is not set here")
    identity = plan.site.identity if isinstance(plan.site, AwsSite) else None
    if identity and not Path(identity).expanduser().is_file():
        raise UserError(f"site {plan.site_name}: there is no file {identity}; see identity")
    if not plan.apart:
        _tell_of_unseen(recipe, plan)


def _tell_of_unseen(recipe: Recipe, plan: Plan) -> None:
    container = plan.site.container if plan.site.container and "://" not in plan.site.container else None
    data = None if wanted_demo(recipe.data) else recipe.data.root
    for what, path in {"data": data, "venv": plan.site.venv, "container": container}.items():
        if path and not Path(path).expanduser().exists():
            print(f"note: {what} {path} is not seen from here; the nodes must see it", file=sys.stderr)

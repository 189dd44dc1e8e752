"""What a node tells of itself when the nodes meet, and whether all of them together are what was planned."""

import socket
from collections.abc import Sequence
from typing import Any

from fortyfold.data import decode
from fortyfold.launch.place import Place
from fortyfold.spec.errors import UserError
from fortyfold.spec.nodes import NodeShape
from fortyfold.spec.versions import installed_versions

Facts = dict[str, Any]


def own_facts(place: Place) -> Facts:
    return {
        "node": place.node,
        "num_nodes": place.num_nodes,
        "host": socket.gethostname(),
        "gpus": place.num_gpus,
        "versions": installed_versions(),
        "decoder": decode.NAME,
    }


def name_node(facts: Facts) -> str:
    return f"node {facts['node']} ({facts['host']})"


def lay_out(planned: Sequence[NodeShape], nodes: Sequence[Facts], *, in_order: bool = False) -> list[int]:
    """How many ranks each node runs. A UserError says what is not as planned, and where.

    `in_order`: nodes are in the order in which they were asked for, and may have more GPUs than are to be used. Else
    the scheduler has placed unequal ones in an order of its own, and shows each node only what it may use.
    """
    _require_alike(nodes)
    if len(planned) != len(nodes):
        raise UserError(f"{len(nodes)} nodes came, and {len(planned)} were asked for; --nodes says how many")
    if in_order or len({shape.procs for shape in planned}) == 1 or not planned[0].gpus.count:
        procs = [shape.procs for shape in planned]
    else:
        procs = [min(int(facts["gpus"] or 0), max(shape.procs for shape in planned)) for facts in nodes]
        if sum(procs) != sum(shape.procs for shape in planned):
            raise UserError(
                f"{sum(procs)} GPUs were found ({_list_gpus(nodes)}), and {sum(shape.procs for shape in planned)} "
                "ranks were planned; the world would not be the one that was asked for"
            )
    for shape, facts, count in zip(planned, nodes, procs, strict=True):
        if shape.gpus.count and (facts["gpus"] or 0) < count:
            raise UserError(
                f"{name_node(facts)} has {facts['gpus'] or 'no'} GPUs, and {count} were asked for; "
                "see that the scheduler grants them (gpus)"
            )
    return procs


def _list_gpus(nodes: Sequence[Facts]) -> str:
    return ", ".join(f"{facts['host']}: {facts['gpus'] or 0}" for facts in nodes)


def _require_alike(nodes: Sequence[Facts]) -> None:
    first = nodes[0]
    for facts in nodes[1:]:
        for name, here in facts["versions"].items():
            if here != first["versions"].get(name):
                raise UserError(
                    f"{name_node(facts)} has {name} {here}, and {name_node(first)} {first['versions'].get(name)}; "
                    "all nodes need the same versions (modules, conda, venv, container)"
                )
        if facts["decoder"] != first["decoder"]:
            raise UserError(
                f"{name_node(facts)} decodes by {facts['decoder']}, and {name_node(first)} by {first['decoder']}; "
                "their pixels differ; FORTYFOLD_DECODER=pillow in the site's variables makes them alike"
            )

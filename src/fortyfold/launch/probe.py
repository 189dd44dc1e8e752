"""What could be wrong with a node, looked at before anything is trained there. A problem is a line that says it all."""

import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fortyfold.data.splits import find_split
from fortyfold.data.stage import scratch_folder
from fortyfold.launch.attempt import free_port
from fortyfold.launch.network import own_addresses
from fortyfold.launch.plan import Plan
from fortyfold.spec.errors import UserError

SHM = Path("/dev/shm")  # noqa: S108
SHM_BYTES_A_PROCESS = 128 * 2**20  # NCCL's, of which a container's usual 64 MiB are not enough
OPEN_FILES = 4096
SPACE_BYTES = 2 * 2**30


def probe(plan: Plan, procs: int, num_gpus: int | None) -> list[str]:
    """All that is wrong with this node."""
    return [
        *_probe_network(plan),
        *_probe_memory(procs),
        *_probe_files(),
        *_probe_folders(plan),
        *_probe_data(plan),
        *_probe_gpus(plan, procs, num_gpus),
    ]


def _probe_network(plan: Plan) -> Iterator[str]:
    try:
        if len(plan.shapes) > 1:
            own_addresses(plan.site.interface)
        free_port(plan.site.ports)
    except UserError as error:
        yield str(error)


def _probe_memory(procs: int) -> Iterator[str]:
    wanted = SHM_BYTES_A_PROCESS * procs
    try:
        free = shutil.disk_usage(SHM).free
    except OSError as error:
        yield f"{SHM}: {error.strerror}; processes on a node need it to share memory"
        return
    if free < wanted:
        yield (
            f"{SHM} has {free >> 20} MiB free, and {wanted >> 20} are needed ({SHM_BYTES_A_PROCESS >> 20} a process); "
            "enlarge it (docker: --shm-size, /etc/fstab: size=)"
        )


def _probe_files() -> Iterator[str]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < OPEN_FILES:
        yield f"only {most} files may be open at once; ask for a hard limit of {OPEN_FILES} (ulimit -Hn)"


def _probe_folders(plan: Plan) -> Iterator[str]:
    folders = {"run_root": plan.run.parent}
    try:
        if plan.site.scratch:
            folders["scratch"] = scratch_folder(plan.site.scratch, key="scratch")
    except UserError as error:
        yield str(error)
    for key, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            yield f"{key} {folder} cannot be written: {error.strerror}"
            continue
        if (free := shutil.disk_usage(folder).free) < SPACE_BYTES:
            yield f"{key} {folder} has only {free >> 20} MiB free"


def _probe_data(plan: Plan) -> Iterator[str]:
    if root := plan.job.get("data"):
        try:
            list(find_split(Path(root), "train").iterdir())
        except (UserError, OSError) as error:
            yield f"the data in {root} cannot be read: {error}"


def _probe_gpus(plan: Plan, procs: int, num_gpus: int | None) -> Iterator[str]:
    if plan.site.kind == "slurm" and len(set(plan.shapes)) > 1:
        return  # which node is which is Slurm's choice: only all together can tell (facts.py)
    if plan.shapes[0].gpus.count and (num_gpus or 0) < procs:
        yield f"{num_gpus or 'no'} GPUs are seen, and {procs} were asked for"

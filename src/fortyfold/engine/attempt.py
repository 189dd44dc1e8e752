"""Starting a run, or going on with it: the same command does whichever fits.

Going on is refused when the recipe, the data or the decoder differ in a way that would change the weights;
the line says which keys. Keys that change no weight (recipe.FREE_KEYS) may differ.
"""

import platform
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Any

from fortyfold.data.blocks import storage_digest
from fortyfold.data.index import Index
from fortyfold.engine import checkpoint
from fortyfold.engine.device import decoder_name
from fortyfold.engine.setup import Job
from fortyfold.parallel.ranks import Ranks
from fortyfold.spec.errors import UserError
from fortyfold.spec.events import last_attempt, read_events
from fortyfold.spec.recipe import FREE_KEYS, Recipe
from fortyfold.spec.recipe_file import flatten, parse_recipe
from fortyfold.spec.records import StepReader
from fortyfold.spec.run_dir import RunDir, write_json
from fortyfold.spec.versions import installed_versions

RUN_FORMAT = 4
_SHARED_SECONDS = 60.0


def _identity(index: Index | None) -> dict[str, Any] | None:
    if index is None:
        return None
    folder = str(index.folder) if index.items is None else None
    return {"folder": folder, "images": len(index), "fingerprint": index.fingerprint}


def build_spec(job: Job, command: Sequence[str]) -> dict[str, Any]:
    """What run.json says."""
    return {
        "format": RUN_FORMAT,
        "recipe": job.recipe.model_dump(mode="json"),
        "data": {
            "train": _identity(job.train_index),
            "val": _identity(job.val_index),
            "copies": [data.copy for data in job.phase_data],
            "layout": [storage_digest(data.train) for data in job.phase_data] if _reads_blocks(job) else None,
            "classes": list(job.train_index.classes),
        },
        "model": job.model_name,
        "ranks": job.ranks.world.size,
        "decoder": decoder_name(job.recipe.data, job.device),
        "versions": installed_versions(),
        "host": platform.node(),
        "git_commit": _git_commit(),
        "command": list(command),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _reads_blocks(job: Job) -> bool:
    return job.recipe.data.shuffle == "block"


def check_run(run_dir: RunDir, spec: dict[str, Any], recipe: Recipe) -> None:
    """Refuse a folder that holds something else, or a run that `spec` would not go on with.

    A run that never took a step (a misspelt model, say) binds nobody.
    """
    if not run_dir.exists:
        run_dir.refuse_foreign()
    elif len(StepReader(run_dir.steps()).poll()):
        refuse_other_run(run_dir, run_dir.read_spec(), spec, recipe)


def open_attempt(run_dir: RunDir, spec: dict[str, Any], damaged: Iterable[str]) -> int:
    """Write run.json; gives the attempt's number. The run must be held, and checked."""
    checkpoint.retire(run_dir, damaged)
    attempt = max(last_attempt(read_events(run_dir.events())), run_dir.read_attempt() or 0) + 1
    name = run_dir.read_id() or secrets.token_hex(8)
    write_json(run_dir.spec, {**spec, "id": name, "attempt": attempt})
    run_dir.stopped.unlink(missing_ok=True)
    return attempt


def require_same(first: dict[str, Any], own: dict[str, Any], ranks: Ranks) -> None:
    """Every rank must train the same on the same images: a UserError on all that names what differs, and where."""
    differing = [key for key in ("recipe", "data", "model", "decoder") if _known(first[key]) != _known(own[key])]
    told = [f"{key} of rank {rank} ({host})" for rank, (keys, host) in
            enumerate(ranks.gather([differing, platform.node()])) for key in keys]  # fmt: skip
    if told:
        raise UserError(f"ranks are not alike: the {', the '.join(told[:4])} differs from rank 0's")


def _known(value: Any) -> Any:
    """As it is after JSON, and wherever the images are."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if key not in ("folder", "root", "copies", "stage")}
    return list(value) if isinstance(value, tuple) else value


def require_shared(run_dir: RunDir, attempt: int) -> None:
    """Every rank must see what rank 0 wrote just now. Network disks may take some seconds to show it."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while run_dir.read_attempt() != attempt:
        if time.monotonic() > deadline:
            raise UserError(
                f"{platform.node()} does not see in {run_dir.path} what rank 0 writes there; with ranks on several "
                "hosts the run directory must be on a disk that they share (--out)"
            )
        time.sleep(0.1)


def refuse_other_run(run_dir: RunDir, before: dict[str, Any], now: dict[str, Any], recipe: Recipe) -> None:
    """A UserError that says what differs between the run that is there and the one asked for."""
    if before.get("format") != RUN_FORMAT:
        raise UserError(f"{run_dir.path} was made by another version of fortyfold; choose another --out")
    old = flatten(parse_recipe(before["recipe"], source=str(run_dir.spec)))
    new = flatten(recipe)
    differing = [
        f"{key} = {old.get(key)} (now {new.get(key)})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_free(key)
    ]
    patterns = [list(before["recipe"]["optim"]["decay_by_name"]), list(recipe.optim.decay_by_name)]
    if patterns[0] != patterns[1] and sorted(patterns[0]) == sorted(patterns[1]):
        differing.append(f"optim.decay_by_name in the order {patterns[0]} (now {patterns[1]})")
    if any(phase.rank_batch for phase in recipe.all_phases()) and before["ranks"] != now["ranks"]:
        differing.append(f"rank_batch on {before['ranks']} ranks (now {now['ranks']})")
    for split in ("train", "val"):
        then, here = before["data"][split] or {}, now["data"][split] or {}
        if then.get("fingerprint") != here.get("fingerprint"):
            differing.append(f"{split} data of {then.get('images')} images (now {here.get('images')}, or other files)")
    for what, name in (("copies", "the copies"), ("layout", "shards laid out as")):
        then, here = before["data"].get(what), now["data"].get(what)
        if then != here:
            differing.append(f"{name} {then} (now {here})")
    differing += [
        f"the {what} {before[what]} (now {now[what]})" for what in ("model", "decoder") if before[what] != now[what]
    ]
    if differing:
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise UserError(
            f"{run_dir.path} was started with {', '.join(differing[:4])}{more}; "
            "--fresh starts anew, --out DIR starts elsewhere"
        )


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)


def _git_commit() -> str | None:
    """The commit of the folder the command runs in, with + when files differ from it; None outside git."""
    if shutil.which("git") is None:
        return None
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], capture_output=True, timeout=10)
    except (subprocess.SubprocessError, OSError):
        return None
    return commit.stdout.strip() + ("+" if changed.returncode else "")

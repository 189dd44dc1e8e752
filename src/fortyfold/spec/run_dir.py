"""The run directory: the one module that names every file in it.

    run.json                      an id, resolved recipe, versions, decoder, data, git commit, command line
    steps-00000.bin               one fixed-width record a step (spec/records.py), a file a rank
    events-00000.jsonl            evaluations, saves, restarts, warnings (spec/events.py), a file a rank
    checkpoints/step-000000420-0001/  model, ema and training.safetensors, manifest.json
    stopped.json                  why an unfinished run stopped; absent while it runs and when it crashed
    stop-request.json             asks a run of several ranks to stop, as the signal that it names would
    launch/plan.json              recipe, site and nodes of a run on a site; job.sh and node.sh, as they were submitted
    launch/job.json               the scheduler's name of the job; job-id its later one, if it submitted itself again
    launch/ssh.conf, known_hosts  how to reach instances that were made for the run; instances.json what was asked for
    launch/ended                  a job's last word (launch/requeue.py); requeues.json how far it was the time before
    launch/invitation-….json      where the first node awaits the others, while it does
    logs/job-….log                a job's own output
    logs/rank-00000.log           what a rank of several had to say besides; a file a rank
    summary.csv, dawnbench.tsv    a row an evaluation
    points.csv, tensorboard/, wandb/  what the sinks wrote, of those that were attached
    sinks/csv.log, csv.lock       what a sink said when training started it; held by the process that writes it
    lock                          held (flock) by the process that trains; it dies with its holder
    launcher.lock                 the same, by the command that trains, between the attempts of several ranks too

A run is one such directory. Everything that concerns it is in there, and nothing in it is pickled.
"""

import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fortyfold.spec.errors import UserError

MODEL = "model.safetensors"  # a checkpoint's weights
MANIFEST = "manifest.json"  # what a checkpoint holds; without it there is none
RECEIVING = ".receiving-"  # begins the name of a checkpoint that is being copied here
SPEC_KEYS = {"format", "recipe", "data", "decoder"}  # of every run that was ever written
_CHECKPOINT = re.compile(r"step-(\d+)-(\d+)")
LOCK_PATIENCE_SECONDS = 0.5  # a reader that asks "is it running?" holds the lock for microseconds


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "run.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stopped(self) -> Path:
        return self.path / "stopped.json"

    @property
    def stop_request(self) -> Path:
        return self.path / "stop-request.json"

    @property
    def launch(self) -> Path:
        return self.path / "launch"

    @property
    def plan(self) -> Path:
        return self.launch / "plan.json"

    @property
    def job_script(self) -> Path:
        return self.launch / "job.sh"

    @property
    def node_script(self) -> Path:
        return self.launch / "node.sh"

    @property
    def job(self) -> Path:
        return self.launch / "job.json"

    @property
    def job_id(self) -> Path:
        return self.launch / "job-id"

    @property
    def ended(self) -> Path:
        return self.launch / "ended"

    @property
    def requeues(self) -> Path:
        return self.launch / "requeues.json"

    @property
    def check(self) -> Path:
        """What `sites check` found; its run directory is there for the time being."""
        return self.launch / "check.json"

    @property
    def ssh_config(self) -> Path:
        return self.launch / "ssh.conf"

    @property
    def known_hosts(self) -> Path:
        return self.launch / "known_hosts"

    @property
    def instances(self) -> Path:
        return self.launch / "instances.json"

    def invitation(self, start: str) -> Path:
        return self.launch / f"invitation-{start}.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    @property
    def scores(self) -> Path:
        """Where ranks that evaluate leave what they found, in a folder that is there for the time being."""
        return self.path / "scores.json"

    @property
    def scores_progress(self) -> Path:
        return self.path / "scores-progress.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.csv"

    @property
    def dawnbench(self) -> Path:
        return self.path / "dawnbench.tsv"

    @property
    def points_csv(self) -> Path:
        return self.path / "points.csv"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def wandb_id(self) -> Path:
        """The run's name at Weights & Biases, so that it is resumed and not duplicated."""
        return self.wandb / "fortyfold-id"

    def sink_log(self, name: str) -> Path:
        return self.path / "sinks" / f"{name}.log"

    def sink_lock(self, name: str) -> Path:
        return self.path / "sinks" / f"{name}.lock"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def launcher_lock(self) -> Path:
        return self.path / "launcher.lock"

    def steps(self, rank: int = 0) -> Path:
        return self.path / f"steps-{rank:05d}.bin"

    def events(self, rank: int = 0) -> Path:
        return self.path / f"events-{rank:05d}.jsonl"

    def checkpoint(self, step: int, attempt: int) -> Path:
        """Where `attempt` saves after `step` steps; names sort from old to new."""
        return self.checkpoints / f"step-{step:09d}-{attempt:04d}"

    def brought(self, node: int) -> Path:
        """Where a node that does not see rank 0's disk has the checkpoint that it begins with, while it reads it."""
        return self.path / f".brought-{node}"

    def checkpoint_names(self) -> list[str]:
        """The names of the whole checkpoints, newest first."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_CHECKPOINT.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        found = [(int(match[1]), int(match[2]), match[0]) for match in matches if match]
        return [name for _, _, name in sorted(found, reverse=True)]

    def saved_steps(self) -> int | None:
        """How many steps the newest checkpoint holds; None without one."""
        names = self.checkpoint_names()
        return int(names[0].split("-")[1]) if names else None

    @property
    def exists(self) -> bool:
        return self.spec.is_file()

    def refuse_foreign(self) -> None:
        """A UserError for a folder that holds something, but no run and nothing that a run begins with."""
        own = (self.lock, self.launcher_lock, self.stop_request, self.logs, self.launch)
        beginnings = {path.name for path in own}
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() and not self.exists else []
        foreign = [name for name in names if name not in beginnings and not name.startswith(f".{self.spec.name}")]
        if foreign:
            raise UserError(f"{self.path} holds {foreign[0]} but no run; choose an empty folder for --out")

    def read_spec(self) -> dict[str, Any]:
        """run.json, or a UserError when this is not a run."""
        try:
            spec: dict[str, Any] = json.loads(self.spec.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run: it has no run.json; `fortyfold runs` lists runs") from None
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.spec}: {error}") from None
        if not isinstance(spec, dict) or not spec.keys() >= SPEC_KEYS:
            raise UserError(f"{self.spec} is damaged, or of another version of fortyfold")
        return spec

    def is_locked(self) -> bool:
        """Whether a process is training in here now, or will start the ranks that do again."""
        return _is_locked(self.lock) or _is_locked(self.launcher_lock)

    def read_attempt(self) -> int | None:
        """The number of the attempt that began last; None where run.json says none."""
        try:
            attempt = json.loads(self.spec.read_text(encoding="utf-8")).get("attempt")
        except (OSError, ValueError, AttributeError):
            return None
        return attempt if isinstance(attempt, int) else None

    def read_id(self) -> str:
        """What tells this run from every other, whatever they are called; empty before the first attempt."""
        try:
            return str(json.loads(self.spec.read_text(encoding="utf-8")).get("id", ""))
        except (OSError, ValueError, AttributeError):
            return ""

    def hold(self) -> AbstractContextManager[None]:
        """Hold the run for this process; a second holder is refused. Makes the directory when needed."""
        return self._hold(self.lock)

    def hold_launch(self) -> AbstractContextManager[None]:
        """Hold it for this command, whichever processes train in it for a while."""
        return self._hold(self.launcher_lock)

    def set_aside(self, *, only_if_run: bool = True) -> Path | None:
        """For --fresh: move a run that nobody holds out of the way; gives its new place. Nodes other than the first
        may have records of one, and no run.json."""
        if not (self.exists if only_if_run else self.path.is_dir()):
            return None
        with self.hold_launch(), self.hold():
            here = self.path.resolve()
            aside = here.with_name(f"{here.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            if aside.exists():
                raise UserError(f"{aside} is in the way; try again in a second")
            return here.rename(aside)

    @contextmanager
    def _hold(self, lock: Path) -> Iterator[None]:
        try:
            descriptor = self._take(lock)
        except OSError as error:
            raise UserError(
                f"cannot lock the run directory {self.path}: {error.strerror}; choose another --out"
            ) from None
        try:
            with suppress(OSError):  # a full disk is not the lock's business
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def _take(self, lock: Path) -> int:
        """A descriptor of the locked lock file."""
        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still(lock, descriptor):
                    return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
                    os.close(descriptor)
                    raise UserError(
                        f"{self.path} is being trained by {holder}; stop that one, or choose another --out"
                    ) from None
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(0.02)


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system: nobody can hold one
        return False
    finally:
        os.close(descriptor)
    return False


def _is_still(lock: Path, descriptor: int) -> bool:
    """Whether the lock is this run's still: --fresh may have moved the folder away meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace `path` by `data`: a reader, or a crash, sees the old content or the new, never a part.

    `mode`, less the umask, says who may read it. When writing fails nothing is left beside it, and the OSError names
    `path`.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")  # other hosts have the same numbers
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())

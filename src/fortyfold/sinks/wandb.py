"""Weights & Biases: the resolved recipe as config, the x axis is examples seen; files in the run's wandb/.

A run directory has one run there, whose id it keeps. Online that run is resumed, and only what it does not have yet
is sent: it cannot take points back, so of steps that a restart did again the first report stays (their losses are
the same, their times may differ). Offline every opening writes a whole new copy in place of the one before, and
`wandb sync` replaces the run by it.

Nothing but the recipe and the points is handed over: no code, no git state, no terminal output, no packages. wandb's
own record of a run has, besides, the host's name, the platform and the versions of Python and wandb.

What the recipe leaves open, wandb's own settings decide (WANDB_MODE, WANDB_PROJECT, WANDB_NAME, its settings file).
"""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import wandb

from fortyfold.metrics.points import Point
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.recipe import Recipe
from fortyfold.spec.run_dir import RunDir, write_atomically

X_AXIS = "examples_seen"
LAST = {"steps": "last/steps", "evaluation": "last/evaluation"}  # examples seen at the last point of either kind


class WandbSink:
    def __init__(self, run_dir: RunDir, recipe: Recipe) -> None:
        settings = _read_settings()
        offline = recipe.log.wandb_offline or settings.mode in ("offline", "dryrun")
        if settings.mode == "disabled" and not offline:
            raise UserError("wandb is disabled here; set WANDB_MODE to online or offline, or leave the sink out")
        before = list(run_dir.wandb.glob("offline-run-*")) if offline else []
        with _errors_in_one_line():
            if not offline and not wandb.login(prompt=False, verify=False):
                raise UserError(
                    "wandb has no API key; run `wandb login`, set WANDB_API_KEY, or keep it here with "
                    "--set log.wandb_offline=true"
                )
            self._run = _open_run(run_dir, recipe, offline, settings)
        self._run.define_metric("*", step_metric=X_AXIS)
        for name in LAST.values():
            self._run.define_metric(name, hidden=True)
        self.place = str(run_dir.wandb) if offline else self._run.url
        sent = dict(self._run.summary) if self._run.resumed else {}
        self._sent = {kind: sent.get(name, -1) for kind, name in LAST.items()}
        for old in before:
            shutil.rmtree(old)

    def write(self, points: list[Point]) -> None:
        for point in points:
            if point.examples_seen > self._sent[point.kind]:
                marks = {X_AXIS: point.examples_seen, LAST[point.kind]: point.examples_seen, "_timestamp": point.time}
                self._run.log({**point.values, **marks})

    def close(self) -> None:
        with _errors_in_one_line():
            self._run.finish()


def open_sink(run_dir: RunDir, recipe: Recipe) -> WandbSink:
    return WandbSink(run_dir, recipe)


def _read_settings() -> "wandb.Settings":
    """From the environment and wandb's files."""
    try:
        return wandb.setup().settings
    except ValueError as error:  # pydantic's, in several lines: the second and third say which and why
        reason = ": ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UserError(f"wandb's settings are wrong: {reason}") from None


def _open_run(run_dir: RunDir, recipe: Recipe, offline: bool, given: "wandb.Settings") -> "wandb.Run":
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    return wandb.init(
        project=recipe.log.wandb_project or given.project or "fortyfold",
        id=_run_id(run_dir),
        name=given.run_name or run_dir.path.resolve().name,
        dir=run_dir.path.resolve(),
        config=recipe.model_dump(mode="json"),
        allow_val_change=True,
        mode="offline" if offline else "online",
        resume=None if offline else "allow",
        settings=settings,
    )


def _run_id(run_dir: RunDir) -> str:
    try:
        return run_dir.wandb_id.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        run_dir.wandb.mkdir(exist_ok=True)
        write_atomically(run_dir.wandb_id, f"{secrets.token_hex(4)}\n".encode())
        return _run_id(run_dir)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except wandb.Error as error:
        raise RunFailed(f"wandb: {(str(error) or type(error).__name__).splitlines()[0]}") from None

"""fortyfold from Python: public names, own models and data sets, events, going on."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import fortyfold
from fortyfold.engine import checkpoint
from fortyfold.spec.run_dir import MODEL, RunDir, write_json

Items = list[tuple[Any, Any]]

PUBLIC = {
    "Evaluation", "Outcome", "Recipe", "RunFailed", "UserError", "__version__", "evaluate", "load_recipe", "train",
}  # fmt: skip


def stripes(count: int = 24) -> Items:
    """Level stripes are class 0, upright ones class 1; sizes differ."""
    return [
        (np.repeat((np.indices((30 + n, 40))[n % 2] // 4 % 2 * 200)[:, :, None], 3, axis=2).astype(np.uint8), n % 2)
        for n in range(count)
    ]


class Named(list[Any]):
    def __init__(self, items: Items, classes: str) -> None:
        super().__init__(items)
        self.classes = [*classes]


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 5), torch.nn.AdaptiveMaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(24, 2)
    )


def outputs(number: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, number))


UNSCORED = {"evaluate.every_epochs": 0}


def recipe(**changes: Any) -> fortyfold.Recipe:
    return fortyfold.load_recipe("tiny", {"global_batch": 6, "epochs": 2, **changes})


def last_weights(folder: Path) -> bytes:
    run_dir = RunDir(folder)
    return (run_dir.checkpoints / checkpoint.names(run_dir)[0] / MODEL).read_bytes()


def test_the_public_names_are_these() -> None:
    assert set(fortyfold.__all__) == set(dir(fortyfold)) == PUBLIC
    for name in PUBLIC - {"__version__"}:
        assert inspect.getdoc(getattr(fortyfold, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        fortyfold.trian  # noqa: B018
    quick = "import sys, fortyfold; fortyfold.load_recipe('tiny'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", quick], check=True)


def test_an_own_network_and_own_images_are_trained_and_scored(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    model, before = network(), network().state_dict()
    outcome = fortyfold.train(
        recipe(), model=model, train_data=stripes(), val_data=stripes(10), num_classes=2, out=tmp_path,
        on_event=events.append,
    )  # fmt: skip
    assert outcome.finished and outcome.progress.step == 8
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "started" and kinds[-1] == "finished" and kinds.count("evaluated") == 2
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])  # trained in place

    scores = fortyfold.evaluate(tmp_path, model=network(), data=stripes(10), flip=True)
    evaluated = [event for event in events if event["kind"] == "evaluated"][-1]
    assert (scores[""].top1, scores[""].num_images) == (evaluated["top1"], 10)
    assert scores[""].loss == pytest.approx(evaluated["loss"], rel=1e-6)
    assert set(scores) == {"", "flip_"}
    with pytest.raises(fortyfold.UserError, match=r"trained with an own model, torch.*Sequential \w+; evaluate it in"):
        fortyfold.evaluate(tmp_path, data=stripes(10))
    with pytest.raises(fortyfold.UserError, match="was trained on an own data set"):
        fortyfold.evaluate(tmp_path, model=network())
    with pytest.raises(fortyfold.UserError, match=r"was trained with .*Sequential .*, not with .*Linear "):
        fortyfold.evaluate(tmp_path, model=torch.nn.Linear(2, 2), data=stripes(10))


def test_it_goes_on_after_an_abrupt_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fortyfold.engine.learner import Learner

    def run(name: str) -> fortyfold.Outcome:
        spec = recipe(**{"checkpoint.every_steps": 3, "evaluate.every_epochs": 0, "augment.mixup": 0.5})
        return fortyfold.train(spec, model=network(), train_data=stripes(), num_classes=2, out=tmp_path / name)

    class Killed(BaseException):
        pass

    whole = Learner.update

    def update(self: Learner, number: int) -> None:
        if number == 5:
            raise Killed
        whole(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", update)
        with pytest.raises(Killed):
            run("killed")
    assert run("killed").finished and run("calm").finished
    assert last_weights(tmp_path / "killed") == last_weights(tmp_path / "calm")


def test_it_does_not_go_on_with_another_network_or_other_images(tmp_path: Path) -> None:
    def run(model: torch.nn.Module, images: Items, **options: Any) -> fortyfold.Outcome:
        spec = recipe(**{"evaluate.every_epochs": 0, "epochs": 1})
        return fortyfold.train(spec, model=model, train_data=images, num_classes=2, out=tmp_path / "run", **options)

    assert run(network(), stripes()).finished
    model = network()
    assert run(model, stripes()).already
    assert torch.equal(
        model.state_dict()["0.weight"], safetensors.torch.load(last_weights(tmp_path / "run"))["0.weight"]
    )
    wider = torch.nn.Sequential(torch.nn.Conv2d(3, 7, 5), torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten(1))
    with pytest.raises(fortyfold.UserError, match=r"was started with the model torch.*Sequential \w+ \(now "):
        run(wider, stripes())
    with pytest.raises(fortyfold.UserError, match="train data of 24 images"):
        run(network(), stripes(30))
    assert run(network(), stripes(30), fresh=True).progress.step == 5


def test_a_listener_that_raises_is_warned_about_and_does_not_stop_the_run(tmp_path: Path) -> None:
    def listen(event: dict[str, Any]) -> None:
        raise ZeroDivisionError("in the listener")

    spec = recipe(**{"evaluate.every_epochs": 0, "epochs": 1})
    with pytest.warns(RuntimeWarning, match=r"(?s)on_event raised.*ZeroDivisionError: in the listener"):
        outcome = fortyfold.train(
            spec, model=network(), train_data=stripes(), num_classes=2, out=tmp_path, on_event=listen
        )
    assert outcome.finished


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ({"train_data": stripes()}, {}, "evaluate.every_epochs wants validation images: give val_data"),
        ({"val_data": stripes()}, {}, "val_data without train_data"),
        ({"train_data": 5}, {}, "train_data is no data set but .* int; it needs a length"),
        ({"train_data": []}, {}, "train_data is empty"),
        ({"train_data": [(np.zeros((8, 8, 3)), 0)]}, {}, "uint8"),
        ({"train_data": stripes(), "num_classes": 1, "model": outputs(1)}, UNSCORED, "has the label 1"),
        ({"train_data": stripes(), "model": outputs(5)}, UNSCORED, r"each of 2 classes.*gives \(1, 5\)"),
        ({"train_data": stripes(), "model": torch.nn.ReLU()}, UNSCORED, "has no parameters"),
        ({"train_data": stripes()}, {**UNSCORED, "data.copies": "x"}, "not of an own data set"),
        ({"model": torch.nn.Linear}, {}, "model is no torch.nn.Module"),
        ({"num_classes": 2}, {}, "num_classes is for train_data"),
        ({"num_classes": None}, {"log.sinks": ["tensorbord"]}, "did you mean tensorboard"),
        ({"train_data": stripes()}, {**UNSCORED, "data.stage": "x"}, "data.stage copies data.root"),
        ({"train_data": stripes()}, {**UNSCORED, "data.backend": "dali"}, "decodes files, not an own"),
        (
            {"train_data": Named(stripes(), "abc"), "val_data": Named(stripes(), "ab"), "num_classes": None},
            {},
            "val_data.classes names 2 classes, but train_data has 3",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: Any, changes: Any, message: str) -> None:
    with pytest.raises(fortyfold.UserError, match=message) as raised:
        fortyfold.train(recipe(**changes), out=tmp_path, **{"model": network(), "num_classes": 2, **arguments})
    assert "\n" not in str(raised.value)


def stopped_by(number: signal.Signals, tmp_path: Path) -> fortyfold.Outcome:
    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "saved":
            os.kill(os.getpid(), number)

    spec = recipe(**{"evaluate.every_epochs": 0, "epochs": 1000, "checkpoint.every_epochs": 2})
    return fortyfold.train(spec, model=network(), train_data=stripes(), num_classes=2, out=tmp_path, on_event=stop)


def test_a_signal_saves_and_stops_and_handlers_are_as_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    outcome = stopped_by(signal.SIGTERM, tmp_path)
    assert not outcome.finished and outcome.reason == "terminated" and 8 <= outcome.progress.step < 4000
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_runs_in_another_thread_too(tmp_path: Path) -> None:
    outcomes: list[fortyfold.Outcome] = []
    spec = recipe(**{"evaluate.every_epochs": 0, "epochs": 1})
    work: Callable[[], None] = lambda: outcomes.append(  # noqa: E731
        fortyfold.train(spec, model=network(), train_data=stripes(), num_classes=2, out=tmp_path)
    )
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcomes[0].finished


def test_a_recipe_by_name_makes_its_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = fortyfold.train(fortyfold.load_recipe("tiny", {"epochs": 1, "data.demo.images": 60}))
    assert outcome.finished and (tmp_path / "runs" / "tiny" / "run.json").is_file()
    (scores,) = fortyfold.evaluate("runs/tiny").values()
    assert scores.num_images == 10
    run_dir = RunDir(tmp_path / "runs" / "tiny")
    spec = run_dir.read_spec()
    del spec["model"]  # as older runs have it
    write_json(run_dir.spec, spec)
    assert fortyfold.evaluate("runs/tiny")[""] == scores

"""The engine's parts by themselves: optimiser, step, evaluation, device, saver, journal, stop flag."""

import math
import os
import signal
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from learners import make_batch, plain_model

from fortyfold.data.reader import Batch
from fortyfold.engine import checkpoint, device, saver
from fortyfold.engine.checkpoint import Own, Snapshot
from fortyfold.engine.device import Feeder
from fortyfold.engine.evaluate import Company, Networks, evaluate
from fortyfold.engine.journal import Journal
from fortyfold.engine.progress import Progress
from fortyfold.models.build import build_model
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.events import read_events
from fortyfold.spec.recipe import Checkpoint, Data, Model
from fortyfold.spec.records import read_steps
from fortyfold.spec.run_dir import RunDir
from fortyfold.spec.stop import StopFlag

DATA = Data(root="x")


class TestModel:
    def test_a_wrong_name_suggests_the_nearest(self) -> None:
        with pytest.raises(UserError, match="has no 'resnet50x'; did you mean resnet50"):
            build_model(Model(name="resnet50x"), 3)

    def test_a_wrong_argument_is_a_users_error(self) -> None:
        with pytest.raises(UserError, match=r"test_resnet does not take .'colour': 3.: .*colour"):
            build_model(Model(name="test_resnet", arguments={"colour": 3}), 3)


class FakeStream:
    """Stands in for a CUDA stream: notes what was asked of it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def record_event(self) -> "FakeStream":
        self._log.append(f"{self._name} records")
        return self

    def wait_event(self, event: "FakeStream") -> None:
        self._log.append(f"{self._name} waits for {event._name}")

    def query(self) -> bool:
        return False


class TestCopyingAhead:
    def test_on_the_cpu_batches_pass_through(self) -> None:
        batches = [make_batch(), make_batch()]
        assert list(Feeder(torch.device("cpu"), DATA, True).ahead(iter(batches))) == batches

    def test_a_gpu_copies_the_next_batch_while_one_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log: list[str] = []
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(log, "main"))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append("held"))
        feed = Feeder(torch.device("cpu"), DATA, True)
        feed._copy_stream = FakeStream(log, "copy")  # type: ignore[assignment]
        batches = [make_batch() for _ in range(3)]
        expected = Feeder(torch.device("cpu"), DATA, True)(batches[0]).images
        for number, batch in enumerate(feed.ahead(iter(batches))):
            assert batch is batches[number]
            assert log.count("copy records") == min(number + 2, 3)  # one ahead
            assert torch.equal(feed(batch).images, expected)
        assert log.count("main waits for copy") == 3
        assert log.count("held") == 9
        assert not feed._under_way and len(feed._arriving) == 3  # nothing is given back before it has arrived
        other = make_batch()
        assert torch.equal(feed(other).images, expected)  # one that was not copied ahead works as well

    def test_an_evaluation_between_two_steps_leaves_nothing_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log: list[str] = []
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(log, "main"))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        feed = Feeder(torch.device("cpu"), DATA, True)
        feed._copy_stream = FakeStream(log, "copy")  # type: ignore[assignment]
        training = feed.ahead(iter([make_batch() for _ in range(6)]))
        for _ in range(3):
            feed(next(training))
        for batch in feed.ahead(iter([make_batch() for _ in range(5)])):
            feed(batch)
        stopped = feed.ahead(iter([make_batch() for _ in range(5)]))
        feed(next(stopped))
        stopped.close()  # type: ignore[attr-defined]
        for batch in training:
            feed(batch)
        assert not feed._under_way
        assert log.count("copy records") == 6 + 5 + 2  # each once


class TestFeeder:
    def test_pixels_are_normalised_as_torchvision_does(self) -> None:
        batch = make_batch()
        images = torch.from_numpy(batch.images_nhwc).permute(0, 3, 1, 2).float() / 255
        expected = (images - torch.tensor(DATA.mean).view(1, 3, 1, 1)) / torch.tensor(DATA.std).view(1, 3, 1, 1)
        for channels_last in (True, False):
            fed = Feeder(torch.device("cpu"), DATA, channels_last)(batch)
            torch.testing.assert_close(fed.images, expected)
            assert fed.images.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert batch.images_nhwc.dtype == np.uint8

    def test_it_feeds_another_device(self) -> None:
        fed = Feeder(torch.device("meta"), DATA, True)(make_batch())
        assert {tensor.device.type for tensor in (fed.images, fed.labels, fed.weights)} == {"meta"}
        assert fed.images.dtype == torch.float32

    def test_the_gpu_is_chosen_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda chosen: f"Test GPU {chosen.index}")
        assert device.describe(device.choose_device()) == "cuda:3 Test GPU 3"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert device.choose_device() == torch.device("cpu")


class TestEvaluate:
    @pytest.mark.parametrize("batch_sizes", [[10], [3, 3, 4], [1] * 10])
    def test_each_readable_image_counts_once_however_they_are_cut(self, batch_sizes: list[int]) -> None:
        model, feed = plain_model(), Feeder(torch.device("cpu"), DATA, True)
        whole = make_batch(10)
        whole.weights[4] = 0
        model.eval()
        with torch.inference_mode():
            logits = model(feed(whole).images)[[0, 1, 2, 3, 5, 6, 7, 8, 9]]
        labels = torch.from_numpy(np.delete(whole.labels, 4))
        starts = np.cumsum([0, *batch_sizes])
        parts = [
            Batch(whole.images_nhwc[a:b], whole.labels[a:b], whole.weights[a:b], whole.ids[a:b],
                  bad=[(4, "why")] if a <= 4 < b else [])
            for a, b in pairwise(starts)
        ]  # fmt: skip
        scores = evaluate(Networks({"": model}), iter(parts), feed)
        assert scores is not None and not model.training and list(scores) == [""]
        result = scores[""]
        assert (result.num_images, result.unreadable) == (9, [(4, "why")])
        assert result.top1 == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
        assert result.top5 == 100  # three classes
        assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
        assert str(result) == f"top-1 {result.top1:.1f} % (9 images, 1 unreadable left out)"

    def test_averages_and_mirror_images_are_scored_apart(self) -> None:
        model, average, feed = plain_model(), plain_model(1).eval(), Feeder(torch.device("cpu"), DATA, True)
        batch = make_batch(10)
        scores = evaluate(Networks({"": model, "ema_": average}), iter([batch]), feed, flip=True)
        assert scores is not None and list(scores) == ["", "flip_", "ema_", "ema_flip_"]
        assert model.training and not average.training
        images, labels = feed(batch).images, torch.from_numpy(batch.labels)
        for name, network in (("", model), ("ema_", average)):
            logits = network(images)
            loss = torch.nn.functional.cross_entropy(logits, labels).item()
            assert scores[name].loss == pytest.approx(loss, rel=1e-5)
            both = (logits + network(images.flip(3))) / 2
            loss = torch.nn.functional.cross_entropy(both, labels).item()
            assert scores[f"{name}flip_"].loss == pytest.approx(loss, rel=1e-5)

    def test_it_ends_early_when_asked_to_stop(self) -> None:
        feed, stopped = Feeder(torch.device("cpu"), DATA, True), Company(stopping=lambda: True)
        assert evaluate(Networks({"": plain_model()}), iter([make_batch()]), feed, stopped) is None


def snapshot(step: int) -> Snapshot:
    own = Own({"rng/cpu": torch.zeros(1)}, {})
    return Snapshot(f"step-{step:09d}-0001", Progress(step=step), {"w": torch.zeros(3)}, own=(own,))


class TestSaver:
    def test_the_policy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        run_dir = RunDir(tmp_path)

        def due(policy: Checkpoint, step: int, epochs: int | None = None) -> bool:
            one = saver.Saver(run_dir, policy, step=10)
            one.changed = True
            now[0] += 61
            return one.due(step, epochs)

        never = Checkpoint(every_steps=0, every_minutes=0.0, every_epochs=0)
        assert not due(never, 1000, 5)
        assert due(never.model_copy(update={"every_steps": 3}), 13)
        assert not due(never.model_copy(update={"every_steps": 3}), 12)
        assert due(never.model_copy(update={"every_minutes": 1.0}), 11)
        assert not due(never.model_copy(update={"every_minutes": 1.1}), 11)
        assert due(never.model_copy(update={"every_epochs": 2}), 11, 4)
        assert not due(never.model_copy(update={"every_epochs": 2}), 11, 3)
        assert not due(never.model_copy(update={"every_epochs": 2}), 11, None)
        unchanged = saver.Saver(run_dir, Checkpoint(every_steps=1), step=10)
        assert not unchanged.due(11, 1)

    def test_the_loop_goes_on_while_it_writes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        go_on = threading.Event()
        write = checkpoint.write

        def slow(run_dir: RunDir, one: Snapshot, post: None, far: bool) -> Path:
            assert go_on.wait(10)
            return write(run_dir, one)

        monkeypatch.setattr(checkpoint, "write", slow)
        one = saver.Saver(RunDir(tmp_path), Checkpoint(every_steps=1), step=0)
        one.changed = True
        one.save(lambda: snapshot(1))
        assert one.poll() is None
        one.changed = True
        assert not one.due(2, None)  # not while one is being written
        go_on.set()
        assert one.wait() == tmp_path / "checkpoints" / "step-000000001-0001"
        one.changed = False
        assert one.due(2, None)  # but it is owed
        one.close()

    def test_an_error_surfaces_and_names_what_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        one = saver.Saver(RunDir(tmp_path), Checkpoint(), step=0)
        one.save(lambda: snapshot(1))
        one.wait()

        def full(run_dir: RunDir, two: Snapshot, post: None, far: bool) -> Path:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "write", full)
        one.save(lambda: snapshot(2))
        with pytest.raises(RunFailed, match=r"No space left on device; step-000000001-0001 is intact"):
            one.wait()
        one.close()


class TestJournal:
    FIELDS: ClassVar = {
        "epoch": 0, "phase": 0, "images": 4, "samples_digest": 9,
        "data_wait_seconds": 0.5, "step_seconds": 1.0, "lr": 0.1,
        "read_seconds": 0.1, "decode_seconds": 0.2, "resize_seconds": 0.3,
    }  # fmt: skip

    def test_records_come_out_as_they_went_in(self, tmp_path: Path) -> None:
        run_dir = RunDir(tmp_path)
        journal = Journal(run_dir, attempt=3)
        for step in range(4):
            journal.step(torch.tensor(step / 2), step=step, **self.FIELDS)
        assert len(read_steps(run_dir.steps())) == 0  # not yet
        journal.flush(durable=True)
        records = read_steps(run_dir.steps())
        assert records["step"].tolist() == [0, 1, 2, 3]
        assert records["loss"].tolist() == [0, 0.5, 1, 1.5]
        assert set(records["attempt"]) == {3}
        assert records["samples_digest"].tolist() == [9] * 4
        assert (journal.loss_sum, journal.images) == (12.0, 16)
        journal.event("warning", 4, message="näh")
        assert read_events(run_dir.events())[0]["message"] == "näh"
        journal.close()

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_loss_that_is_not_finite_is_found_and_still_recorded(self, tmp_path: Path, value: float) -> None:
        run_dir = RunDir(tmp_path)
        journal = Journal(run_dir, attempt=1)
        for step, loss in enumerate([1.0, value, 2.0]):
            journal.step(torch.tensor(loss), step=step, **self.FIELDS)
        journal.flush()
        assert journal.not_finite is not None and journal.not_finite.step == 1
        assert len(read_steps(run_dir.steps())) == 3
        journal.close()


def test_the_first_signal_counts_and_the_handler_only_sets_a_flag() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        stop = StopFlag().listen()
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert (stop.signal, stop.reason) == (signal.SIGUSR1, "out of time")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

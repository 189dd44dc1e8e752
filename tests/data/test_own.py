"""Somebody's own data set object gives the batches that its images would give as files."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, pixels
from PIL import Image

from fortyfold.data import Loader, decode
from fortyfold.data.index import Index, with_classes
from fortyfold.data.own import open_own
from fortyfold.data.reader import Batch, Reader
from fortyfold.data.requests import BatchShape, Sampler, eval_requests, rectangular_requests
from fortyfold.data.splits import open_folder
from fortyfold.spec.errors import RunFailed, UserError
from fortyfold.spec.recipe import Augment

AUGMENT = Augment(policy="rand", erase=0.3, mixup=1, mix_each="pair", repeats=2)
BAD = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """40 images of many sizes in two classes, some of them turned by their EXIF data, one that cannot be read."""
    place = tmp_path_factory.mktemp("own")
    exif = Image.Exif()
    exif[0x0112] = 6
    for number in range(40):
        (place / "ab"[number // 20]).mkdir(exist_ok=True)
        image = pixels(40 + number, 70 - number, number)
        blob = b"no" if number == BAD else encoded(image, "PNG", **({"exif": exif} if number % 3 else {}))
        (place / "ab"[number // 20] / f"{number:02d}.png").write_bytes(blob)
    return open_folder(place)


class Own:
    """The folder's images in memory; the unreadable one raises."""

    def __init__(self, folder: Index, convert: Callable[[Image.Image], Any], **attributes: Any) -> None:
        self.folder, self.convert, self.threads = folder, convert, set[str]()
        self.__dict__ |= attributes

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.threads.add(threading.current_thread().name)
        image = Image.open(io.BytesIO(Path(self.folder.path(index)).read_bytes()))
        return self.convert(image), int(self.folder.labels[index])


def as_array(image: Image.Image) -> Any:
    return np.asarray(image.convert("RGB"))


def as_tensor(image: Image.Image) -> Any:
    return torch.from_numpy(as_array(image).copy()).permute(2, 0, 1)


@pytest.fixture
def by_pillow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode, "_native", None)
    yield


def batches(index: Index, reader: Reader, augment: Augment = AUGMENT) -> list[Batch]:
    """Two batches of an epoch, and an evaluation."""
    sampler, shape = Sampler(2, augment=augment), BatchShape(3, 14, 24, 0.3)
    requests = [sampler.request(index, 1, batch, shape) for batch in (0, 2)]
    return list(reader.stream([*requests, *eval_requests(index, 24, 0.9, 25)]))


def assert_alike(one: list[Batch], other: list[Batch]) -> None:
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert np.array_equal(a.images_nhwc, b.images_nhwc)
        assert np.array_equal(a.weights, b.weights)
        assert np.array_equal(a.labels[a.weights == 1], b.labels[b.weights == 1])
        assert [sample for sample, _ in a.bad] == [sample for sample, _ in b.bad]


@pytest.mark.usefixtures("by_pillow")
@pytest.mark.parametrize("convert", [as_array, as_tensor, lambda image: image], ids=["array", "tensor", "pil"])
def test_it_gives_the_batches_that_its_images_give_as_files(folder: Index, convert: Callable[[Any], Any]) -> None:
    own = Own(folder, convert, classes=["a", "b"])
    for num_threads in (1, 3):
        found = batches(open_own(own), Reader(num_threads, read_ahead=1))
        assert_alike(batches(folder, Reader(2)), found)
    assert len(own.threads) > 2  # the first loads were the caller's
    reasons = dict(entry for batch in found for entry in batch.bad)
    assert reasons == {BAD: "not an image that Pillow knows"}


@pytest.mark.usefixtures("by_pillow")
def test_pil_images_are_turned_upright_where_that_is_asked_for(folder: Index) -> None:
    own = open_own(Own(folder, lambda image: image, classes=["a", "b"]))
    assert_alike(batches(folder, Reader(2, upright=True)), batches(own, Reader(2, upright=True)))


@pytest.mark.usefixtures("by_pillow")
def test_sizes_are_remembered_for_rectangles(folder: Index) -> None:
    own, reader = Own(folder, as_array, classes=["a", "b"]), Reader(2)
    index = open_own(own)
    sizes = reader.sizes(index)
    assert np.array_equal(sizes, reader.sizes(folder)) and sizes[BAD].tolist() == [1, 1]
    own.convert = lambda image: 1 / 0
    again = np.delete(np.arange(len(index)), BAD)
    assert np.array_equal(reader.sizes(index)[again], sizes[again])  # without loading them
    own.convert = as_array
    rectangles = list(reader.stream(rectangular_requests(index, sizes, 24, 0.9, 13)))
    assert_alike(list(reader.stream(rectangular_requests(folder, sizes, 24, 0.9, 13))), rectangles)


def test_the_public_loader_takes_it_too() -> None:
    images = [(np.asarray(pixels(30 + n, 24, n)), n % 3) for n in range(10)]
    loader = Loader(images, num_classes=3, threads=2)
    assert len(loader) == 10 and loader.classes == ("0", "1", "2")
    seen = list(loader.epoch(0, px=16, rank_batch=4, augment=Augment(mixup=1)))
    assert sorted(np.concatenate([batch.ids for batch in seen]).tolist()) == list(range(10))
    for batch in seen:
        assert batch.labels.tolist() == (batch.ids % 3).tolist() and batch.labels.dtype == np.int64
    assert sum(len(batch) for batch in loader.evaluation(px=16, rank_batch=4)) == 10
    with pytest.raises(UserError, match="is for data set objects"):
        Loader("somewhere", num_classes=3)


def test_labels_may_be_probabilities() -> None:
    image = np.asarray(pixels(30, 24))
    items = [(image, np.array([0.25, 0.75])), (image, torch.tensor([1.0, 0.0])), (image, [0.5, 0.5]), (image, [0.0, 1])]
    loader = Loader(items, threads=1)
    (batch,) = loader.evaluation(px=16, rank_batch=4)
    assert loader.classes == ("0", "1") and batch.labels.dtype == np.float32
    assert batch.labels.tolist() == [[0.25, 0.75], [1, 0], [0.5, 0.5], [0, 1]]


class Plain:
    """Any items and attributes."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        self.__dict__ |= attributes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]


IMAGE = np.zeros((20, 30, 3), np.uint8)


def test_what_tells_the_classes() -> None:
    items = [(IMAGE, 0), (IMAGE, 1)]
    assert open_own(Plain(items, classes=["x", "y", "z"])).classes == ("x", "y", "z")
    assert open_own(Plain(items, labels=[0, 1])).classes == ("0", "1")
    assert open_own(Plain(items, targets=torch.tensor([0, 1])), num_classes=4).classes == ("0", "1", "2", "3")
    prints = {
        open_own(source, num_classes=2).fingerprint
        for source in (Plain(items), Plain(items[:1]), Plain(items, classes=["a", "b"]))
    }
    assert len(prints) == 3
    index = open_own(Plain(items), "train_data", 2)
    assert index.relative_path(1) == "item 1" and index.path(1) == "item 1 of train_data"


class Unreadable:
    """Such as a tensor on a GPU."""

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_labels_count_classes_only_where_nothing_else_tells_and_they_fit() -> None:
    items = [(IMAGE, 0), (IMAGE, 1)]
    for labels in ([281, 285], [0, 1, 2], [-1, 0], Unreadable()):  # a target_transform made 0 and 1 of them, say
        assert open_own(Plain(items, classes=["a", "b"], labels=labels)).classes == ("a", "b")
        assert open_own(Plain(items, labels=labels), num_classes=2).classes == ("0", "1")
    for labels in ([0, 1, 2], [-1, 0], Unreadable()):
        assert open_own(Plain(items, labels=labels, targets=[0, 1])).classes == ("0", "1")
        with pytest.raises(UserError, match="does not tell its classes"):
            open_own(Plain(items, labels=labels))


def test_classes_of_a_validation_set_are_the_training_sets() -> None:
    val = open_own(Plain([(IMAGE, 0)]), "val_data", num_classes=2)
    assert with_classes(val, ("cat", "dog")).classes == ("cat", "dog")
    named = open_own(Plain([(IMAGE, 0)], classes=["dog", "cat"]), "val_data")
    with pytest.raises(UserError, match="val_data has other classes than the training set"):
        with_classes(named, ("cat", "dog"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Plain([]), "data_set is empty"),
        (7, r"data_set is no data set but an object of type int"),
        (Plain([{"image": IMAGE}]), r"data_set\[0\] is a dict; an item is \(image, label\)"),
        (Plain([("cat.jpg", 0)]), r"data_set\[0\] has a str for an image"),
        (Plain([(IMAGE.astype(np.float32), 0)]), r"float32 array of shape \(20, 30, 3\)"),
        (Plain([(IMAGE[..., 0], 0)]), r"uint8 array of shape \(20, 30\)"),
        (Plain([(torch.zeros(20, 30, 3, dtype=torch.uint8), 0)]), r"uint8 tensor of shape \(20, 30, 3\)"),
        (Plain([(IMAGE, "cat")]), r"data_set\[0\] has the label 'cat'; a label is"),
        (Plain([(IMAGE, [0.5, np.nan])]), "a probability for each class"),
        (Plain([(IMAGE, 0)]), "does not tell its classes"),
        (Plain([KeyError("x")] * 9), r"its first 8 items cannot be loaded; data_set\[0\]: KeyError: 'x'"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_own(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([(IMAGE, 0), (IMAGE, 5)], r"data_set\[1\] has the label 5; there are classes 0 to 1"),
        ([(IMAGE, 0), (IMAGE, [0.5, 0.5])], "a label of another kind"),
        ([(IMAGE, [0.5, 0.5]), (IMAGE, [1.0])], r"data_set\[1\] has 1 probabilities for 2 classes"),
        ([(IMAGE, 0), (None, 0)], r"data_set\[1\] has a NoneType for an image"),
    ],
)
def test_so_is_what_only_shows_later(items: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(Loader(items, num_classes=2, threads=1).evaluation(px=16, rank_batch=2))


def test_what_raises_is_a_bad_image_unless_it_may_pass() -> None:
    items = [(IMAGE, 0), ValueError("two\nlines"), FileNotFoundError(2, "gone"), (IMAGE, 1)]
    (batch,) = Loader(Plain(items), num_classes=2, threads=2).evaluation(px=16, rank_batch=4)
    assert batch.bad == [(1, "ValueError: two"), (2, "FileNotFoundError: [Errno 2] gone")]
    assert batch.weights.tolist() == [1, 0, 0, 1] and batch.labels.tolist() == [0, 0, 0, 1]


class Gone(Image.Image):
    """Its file's disk fails when the pixels are wanted."""

    def load(self) -> Any:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (OSError(5, "Input/output error"), "OSError: .*Input/output error"),
        (TimeoutError("the store"), "TimeoutError: the store"),
        (ConnectionError("reset"), "ConnectionError: reset"),
        (MemoryError(), "MemoryError"),
        ((Gone(), 0), "OSError: .*Input/output error"),
    ],
)
def test_what_may_pass_ends_the_run_and_names_the_item(item: Any, message: str) -> None:
    loader = Loader(Plain([(IMAGE, 0), item]), num_classes=2, threads=2)
    with pytest.raises(RunFailed, match=rf"^data_set\[1\] cannot be loaded now: {message}"):
        list(loader.evaluation(px=16, rank_batch=2))


class Alone(Image.Image):
    """Notices when a second thread loads it meanwhile, as Pillow's lazy images do not."""

    inside = 0
    met = False

    def load(self) -> Any:
        self.inside += 1
        time.sleep(0.005)
        self.met |= self.inside > 1
        self.inside -= 1
        return super().load()


def test_threads_do_not_load_one_pil_image_at_once() -> None:
    image = Alone()
    image.__dict__ |= pixels(30, 24).__dict__
    list(Loader([(image, 0)] * 8, num_classes=2, threads=4).evaluation(px=16, rank_batch=8))
    assert not image.met

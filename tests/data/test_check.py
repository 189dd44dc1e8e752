import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from images import encoded, pixels
from PIL import Image

from fortyfold.data.places import Place
from fortyfold.data.prepare import check as module
from fortyfold.data.prepare.check import CHECKS, DataSet, imagenet_lines
from fortyfold.data.prepare.file_facts import look_at
from fortyfold.data.prepare.findings import KINDS, Findings
from fortyfold.data.splits import open_folder

Call = Callable[..., tuple[int, str, str]]


def jpeg(seed: int, width: int = 24, height: int = 20) -> bytes:
    return encoded(pixels(width, height, seed))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes with two images each in train, one each in val; nothing wrong."""
    for number, name in enumerate(["train/a/1", "train/a/2", "train/b/1", "train/b/2", "val/a/1", "val/b/1"]):
        put(tmp_path / f"set/{name}.jpg", jpeg(number))
    return tmp_path / "set"


def put(path: Path, blob: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(blob)
    return path


def found(root: Path, num_threads: int = 2) -> dict[str, list[tuple[str, str]]]:
    """Everything that all checks find."""
    data = DataSet(root, num_threads)
    findings = Findings(data.name)
    for check in CHECKS.values():
        check(data, findings, lambda done, total: None)
    return {key: list(findings.entries(key)) for key, _, _ in findings.found()}


def test_a_sound_set_has_no_findings(root: Path, fortyfold: Call) -> None:
    assert found(root) == {}
    code, out, err = fortyfold("data", "check", root, "--threads", 2)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"train   4 images, 2 classes, {root}/train",
        f"val     2 images, 2 classes, {root}/val",
        "nothing is wrong (pixels were not looked at: --pixels)",
    ]
    code, out, _ = fortyfold("data", "check", root / "train", "--pixels")
    assert (code, out.splitlines()) == (
        0,
        [f"classes 4 images, 2 classes, {root}/train", "nothing is wrong"],
    )


def test_classes_that_one_split_lacks(root: Path, fortyfold: Call) -> None:
    put(root / "val/dog/1.jpg", jpeg(10))
    put(root / "train/cat/1.jpg", jpeg(11))
    assert found(root) == {"only_in_val": [("dog", "")], "only_in_train": [("cat", "")]}
    code, out, _ = fortyfold("data", "check", root)
    assert code == 1
    assert "wrong        1  classes of val that train lacks\n" in out
    assert out.endswith("wrong: 2 findings that stop a training, lose an image or spoil the result\n")


def test_val_may_count_the_classes(root: Path) -> None:
    (root / "val/a").rename(root / "val/0")
    (root / "val/b").rename(root / "val/1")
    assert found(root) == {}
    (root / "val/1").rename(root / "val/2")
    assert found(root).keys() == {"only_in_val", "only_in_train"}


def test_folders_without_images_and_files_that_are_none_do_no_harm(root: Path, fortyfold: Call) -> None:
    (root / "val/a/1.jpg").rename(root / "val/a/1.jpg.part")
    put(root / "train/b/deep/.DS_Store", b"x")
    assert found(root) == {
        "empty_classes": [("val/a", "")],
        "not_images": [("train/b/deep/.DS_Store", ""), ("val/a/1.jpg.part", "")],
    }
    code, out, _ = fortyfold("data", "check", root)
    assert code == 0
    assert "note         2  files in class folders that are no images by their names\n" in out


def test_images_outside_the_class_folders(root: Path) -> None:
    put(root / "train/lost.PNG", jpeg(10))
    (root / "train/folder.jpg").mkdir()
    put(root / "train/folder.jpg/1.jpg", jpeg(11))
    put(root / "val/folder.jpg/1.jpg", jpeg(12))
    assert found(root) == {"outside": [("train/lost.PNG", "")]}


def test_unreadable_files(root: Path, fortyfold: Call) -> None:
    put(root / "train/a/empty.jpg", b"")
    put(root / "train/a/nothing.jpg", b"")  # no twin of the other
    put(root / "train/a/text.jpg", b"no image" * 4000)
    (root / "val/a/gone.jpg").symlink_to("nowhere")
    os.mkfifo(root / "val/a/pipe.jpg")
    put(root / "val/b/header.jpg", jpeg(10)[:100])
    put(root / "val/b/huge.png", encoded(Image.new("1", (9000, 9000)), "PNG"))
    unreadable = dict(found(root)["unreadable"])
    assert found(root).keys() == {"unreadable"}
    assert unreadable == {
        "train/a/empty.jpg": "the file is empty",
        "train/a/nothing.jpg": "the file is empty",
        "train/a/text.jpg": "not an image that Pillow knows",
        "val/a/gone.jpg": "No such file or directory",
        "val/a/pipe.jpg": "not a file",
        "val/b/header.jpg": unreadable["val/b/header.jpg"],
        "val/b/huge.png": "9000 × 9000 pixels are more than the limit of 64000000",
    }
    assert fortyfold("data", "check", root)[0] == 1


def with_thumbnail(blob: bytes, thumbnail: bytes) -> bytes:
    """The JPEG with another whole one in a segment of its own."""
    return blob[:2] + b"\xff\xe5" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail + blob[2:]


def test_truncated_files(root: Path, fortyfold: Call) -> None:
    whole = jpeg(10, 400, 300)
    png = encoded(pixels(30, 30), "PNG")
    cut = {
        "train/a/half.jpg": whole[: len(whole) // 2],
        "train/a/marker.jpg": whole[:-2],
        "train/a/thumbnail.jpg": with_thumbnail(whole, jpeg(1))[:-200],
        "train/a/zeros.jpg": whole[: len(whole) // 2] + bytes(5000),
        "train/b/half.png": png[:-20],
    }
    for name, blob in cut.items():
        put(root / name, blob)
    put(root / "train/a/behind.jpg", jpeg(11) + b"\r\nmore behind the end")
    put(root / "train/a/with.jpg", with_thumbnail(jpeg(12), jpeg(13)))
    put(root / "train/b/behind.png", png + b"more")
    findings = found(root)
    assert findings["truncated"] == [(name, "") for name in cut]
    assert findings.keys() == {"truncated", "undecodable"}
    assert fortyfold("data", "check", root)[0] == 1


def test_headers_longer_than_the_first_read(tmp_path: Path) -> None:
    blob = with_thumbnail(with_thumbnail(jpeg(0), bytes(60_000)), bytes(60_000))
    about = look_at(Place(bytes(put(tmp_path / "x.jpg", blob))))
    assert (about.reason, about.width, about.height, about.truncated) == ("", 24, 20, False)
    assert look_at(Place(bytes(put(tmp_path / "y.jpg", blob[:-2])))).truncated
    tiff = encoded(pixels(120, 100), "TIFF")  # 36 KB, its directory behind the pixels in some writers' files
    assert look_at(Place(bytes(put(tmp_path / "x.tif", tiff)))).format == "TIFF"


def test_damage_that_only_decoding_finds(root: Path, fortyfold: Call) -> None:
    blob = bytearray(encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)), "PNG"))
    blob[1000:1100] = bytes(100)
    put(root / "train/a/damaged.png", bytes(blob))
    assert fortyfold("data", "check", root)[0] == 0
    code, out, _ = fortyfold("data", "check", root, "--pixels", "--threads", 2)
    assert code == 1
    assert "wrong        1  images whose pixels cannot be decoded\n" in out
    assert "  train/a/damaged.png: " in out


def test_files_that_are_not_what_their_names_say(root: Path, fortyfold: Call) -> None:
    put(root / "train/a/png.JPEG", encoded(pixels(30, 30), "PNG"))
    put(root / "train/a/grey.jpg", encoded(pixels(30, 30).convert("L")))
    put(root / "train/a/deep-grey.png", encoded(Image.new("I;16", (30, 30)), "PNG"))
    cmyk = encoded(pixels(30, 30).convert("CMYK"))
    put(root / "train/b/cmyk.jpg", cmyk)
    transform = cmyk.index(b"Adobe") + 11
    put(root / "train/b/ycck.jpg", cmyk[:transform] + b"\x02" + cmyk[transform + 1 :])
    findings = found(root)
    findings.pop("undecodable", None)  # Pillow's versions differ on 16-bit grey
    assert findings == {
        "other_format": [("train/a/png.JPEG", "PNG")],
        "cmyk": [("train/b/cmyk.jpg", "CMYK"), ("train/b/ycck.jpg", "YCCK")],
        "grey": [("train/a/deep-grey.png", ""), ("train/a/grey.jpg", "")],
    }
    assert fortyfold("data", "check", root)[0] == 0


def test_duplicates_and_leaks_are_named_apart(root: Path, fortyfold: Call) -> None:
    twin = jpeg(10)
    for name in ("train/a/3.jpg", "train/b/3.jpg", "val/a/3.jpg", "val/b/3.jpg"):
        put(root / name, twin)
    put(root / "val/b/4.jpg", (root / "val/a/1.jpg").read_bytes())
    assert (
        found(root)
        == {
            "leaks": [("val/a/3.jpg", "the same as train/a/3.jpg"), ("val/b/3.jpg", "the same as train/a/3.jpg")],
            "duplicates": [
                ("train/b/3.jpg", "the same as train/a/3.jpg"),
                ("val/b/3.jpg", "the same as val/a/3.jpg"),
                ("val/b/4.jpg", "the same as val/a/1.jpg"),
            ],
        }
        or found(root)["duplicates"][0][0] == "val/b/4.jpg"
    )
    code, out, _ = fortyfold("data", "check", root)
    assert code == 1
    assert "wrong        2  images of val that train has as well, byte for byte\n" in out
    assert "note         3  images that their split has twice, byte for byte\n" in out


def test_only_files_alike_at_both_ends_are_hashed_and_only_equal_ones_are_twins(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bytearray(encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 99, 3), np.uint8)), "BMP"))
    put(root / "train/a/3.bmp", bytes(whole))
    whole[20_000] ^= 1
    put(root / "train/a/4.bmp", bytes(whole))  # the same size, and the same at both ends
    whole[-1] ^= 1
    put(root / "train/b/3.bmp", bytes(whole))
    hashed: list[str] = []
    sha256 = module._sha256

    def noting(place: Place) -> bytes:
        hashed.append(Path(os.fsdecode(place.file)).name)
        return sha256(place)

    monkeypatch.setattr(module, "_sha256", noting)
    assert found(root, num_threads=1) == {}
    assert sorted(hashed) == ["3.bmp", "4.bmp"]


def test_the_terminal_names_ten_and_the_report_all(root: Path, tmp_path: Path, fortyfold: Call) -> None:
    for number in range(13):
        put(root / f"train/a/bad-{number:02d}.jpg", b"x" * number)
    put(root / "val/a/twin.jpg", (root / "train/a/1.jpg").read_bytes())
    os.rename(root / "train/a/bad-12.jpg", os.fsencode(root / "train/a") + b"/\xff\n.jpg")  # noqa: PTH104
    code, out, _ = fortyfold("data", "check", root, "--report", tmp_path / "report.json")
    assert code == 1
    lines = out.splitlines()
    assert lines.count("  and 3 more") == 1
    assert sum(line.startswith("  train/a/bad-") for line in lines) == 10
    assert f"every finding is in {tmp_path}/report.json" in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["splits"]["train"] == {"folder": f"{root}/train", "classes": 2, "images": 17}
    assert report["findings"].keys() == {"unreadable", "leaks"}
    unreadable = report["findings"]["unreadable"]
    assert (unreadable["count"], unreadable["wrong"], len(unreadable["each"])) == (13, True, 13)
    assert unreadable["each"][-1]["name"] == "train/a/\\xff\\n.jpg"
    assert report["findings"]["leaks"]["each"] == [{"name": "val/a/twin.jpg", "about": "the same as train/a/1.jpg"}]


def test_a_folder_that_is_no_data_set_is_one_line(tmp_path: Path, fortyfold: Call) -> None:
    code, out, err = fortyfold("data", "check", tmp_path / "missing")
    assert (code, out, err) == (2, "", f"fortyfold: no data folder {tmp_path}/missing\n")
    put(tmp_path / "flat/val/1.jpg", jpeg(0))
    code, _, err = fortyfold("data", "check", tmp_path / "flat")
    assert (code, err.count("\n")) == (2, 1)
    assert "images but no class folders" in err


def test_imagenet_is_known_by_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "train/0/1.jpg", jpeg(0))
    put(tmp_path / "train/0/2.jpg", jpeg(1))
    for number in range(1000):
        (tmp_path / f"train/{number}").mkdir(exist_ok=True)
    data = DataSet(tmp_path)
    assert list(imagenet_lines(data)) == []
    monkeypatch.setitem(module.IMAGENET, "train", 2)
    (line,) = imagenet_lines(data)
    assert line == "2 images in train, as ImageNet has; of those, one PNG and 22 CMYK JPEGs are known"
    monkeypatch.setattr(type(data.splits["train"]), "__len__", lambda index: 20)
    monkeypatch.setitem(module.IMAGENET, "train", 21)
    assert list(imagenet_lines(data)) == ["ImageNet (ILSVRC 2012) has 21 images in train, this one 20"]


def test_every_kind_has_a_text_and_samples_are_named_by_split(root: Path) -> None:
    assert all(kind.text for kind in KINDS.values())
    data = DataSet(root)
    train = open_folder(root / "train")
    assert [data.name(sample) for sample in range(len(data))] == [
        *(f"train/{train.relative_path(sample)}" for sample in range(4)),
        "val/a/1.jpg",
        "val/b/1.jpg",
    ]
    assert data.place(5) == Place(bytes(root / "val/b/1.jpg"))


def test_shards_are_checked_against_their_checksums(root: Path, tmp_path: Path, fortyfold: Call) -> None:
    for split in ("train", "val"):
        put(root / split / "c/grey.jpg", encoded(pixels(30, 30, len(split)).convert("L")))
    fortyfold("data", "shard", root, tmp_path / "shards", "--shards", "2")
    assert found(tmp_path / "shards") == found(root)
    index = open_folder(tmp_path / "shards/train")
    place = index.places(np.array([1])).one(0)
    with open(place.file, "r+b") as file:  # noqa: PTH123
        file.seek(place.offset + place.length // 2)
        file.write(b"????")
    findings = found(tmp_path / "shards")
    assert findings["altered"] == [(f"train/{index.relative_path(1)}", "")]
    Path(os.fsdecode(place.file)).unlink()
    code, _, err = fortyfold("data", "check", tmp_path / "shards")
    assert code == 2 and "is missing or has another size than shards.index says" in err

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import start
from images import encoded, pixels
from kills import contents, finish_despite_kills
from PIL import Image

from fortyfold.data.prepare import resize as module
from fortyfold.data.prepare.resize import ResizeSpec, make_resized
from fortyfold.data.prepare.work import replace_file
from fortyfold.data.splits import open_folder
from fortyfold.spec.errors import UserError

Call = Callable[..., tuple[int, str, str]]
SPEC = ResizeSpec((20, 50))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Every kind of image, in the layout of ImageNet's own archives."""
    jpeg = encoded(pixels(90, 60), quality=95)
    files = {
        "train/cat/wide.JPEG": jpeg,
        "train/cat/high.jpg": encoded(pixels(61, 99)),
        "train/cat/deep/png.JPEG": encoded(pixels(80, 64), "PNG"),
        "train/cat/picture.png": encoded(pixels(80, 64), "PNG"),
        "train/ü 1/cmyk.jpg": encoded(pixels(70, 70).convert("CMYK")),
        "train/ü 1/tiny.jpg": encoded(pixels(15, 30)),
        "train/ü 1/between.jpg": encoded(pixels(50, 30)),
        "validation/cat/torn.jpg": jpeg[:700],
        "validation/cat/text.jpg": b"no image",
        "validation/cat/empty.jpg": b"",
        "validation/cat/grey.jpg": encoded(pixels(70, 70).convert("L")),
    }
    root = tmp_path / "source"
    for name, blob in files.items():
        path = root / "ILSVRC/Data/CLS-LOC" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)
    (root / "ILSVRC/Data/CLS-LOC/train/none").mkdir()
    (root / "ILSVRC/Data/CLS-LOC/validation/cat/gone.jpg").symlink_to("nowhere")
    (root / "ILSVRC/Data/CLS-LOC/validation/cat/notes.txt").write_text("not copied")
    return root


def test_every_file_is_in_every_copy_under_its_name(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    result = make_resized(source, target, SPEC, num_threads=2)
    original = source / "ILSVRC/Data/CLS-LOC"
    for side in ("20", "50"):
        for split, name in (("train", "train"), ("validation", "val")):
            before, after = open_folder(original / split), open_folder(target / side / name)
            assert after.fingerprint == before.fingerprint
            assert after.classes == before.classes
            assert [after.relative_path(i) for i in range(len(after))] == [
                before.relative_path(i) for i in range(len(before))
            ]
    assert list(target.rglob("*.txt")) == [target / "unreadable.txt"]
    assert result.num_images == 12
    assert result.copies[20].counts == {"made": 7, "kept": 1, "unreadable": 4}
    assert result.copies[50].counts == {"made": 6, "kept": 2, "unreadable": 4}
    assert result.source_bytes == num_bytes(original) - len("not copied")
    assert all(copy.num_bytes == num_bytes(target / str(side)) for side, copy in result.copies.items())


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_copies_are_what_their_names_say(source: Path, tmp_path: Path) -> None:
    make_resized(source, tmp_path / "target", SPEC, num_threads=1)

    def look(path: str) -> tuple[str | None, str, tuple[int, int]]:
        with Image.open(tmp_path / "target" / path) as image:
            return image.format, image.mode, image.size

    assert look("20/train/cat/wide.JPEG") == ("JPEG", "RGB", (30, 20))
    assert look("50/train/cat/wide.JPEG") == ("JPEG", "RGB", (75, 50))
    assert look("50/train/cat/high.jpg") == ("JPEG", "RGB", (50, 81))
    assert look("20/train/cat/deep/png.JPEG") == ("JPEG", "RGB", (25, 20))
    assert look("20/train/cat/picture.png") == ("PNG", "RGB", (25, 20))
    assert look("20/train/ü 1/cmyk.jpg") == ("JPEG", "RGB", (20, 20))
    assert look("20/train/ü 1/between.jpg") == ("JPEG", "RGB", (33, 20))
    assert look("20/val/cat/grey.jpg") == ("JPEG", "L", (20, 20))


def test_small_and_unreadable_images_are_copied_byte_for_byte(source: Path, tmp_path: Path) -> None:
    make_resized(source, tmp_path / "target", SPEC, num_threads=1)
    original, target = source / "ILSVRC/Data/CLS-LOC", tmp_path / "target"
    same = [("20", "ü 1/tiny.jpg"), ("50", "ü 1/tiny.jpg"), ("50", "ü 1/between.jpg")]
    for side, name in same:
        assert (target / side / "train" / name).read_bytes() == (original / "train" / name).read_bytes()
    for side in ("20", "50"):
        for name in ("torn.jpg", "text.jpg", "empty.jpg"):
            copy = target / side / "val/cat" / name
            assert copy.read_bytes() == (original / "validation/cat" / name).read_bytes()
        assert (target / side / "val/cat/gone.jpg").read_bytes() == b""


def test_the_closing_lines_count_and_name(source: Path, tmp_path: Path, fortyfold: Call) -> None:
    command = ("data", "resize", source, tmp_path / "target", "--short-side", "50,20", "--threads", 2)
    code, out, err = fortyfold(*command)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{tmp_path}/target/20: 7 made, 1 kept, 4 unreadable; ")
    assert lines[1].startswith(f"{tmp_path}/target/50: 6 made, 2 kept, 4 unreadable; ")
    assert " KB before, " in lines[0] and lines[0].endswith(" after")
    assert lines[2:6] == [
        "unreadable, copied as it is: val/cat/empty.jpg: the file is empty",
        "unreadable, copied as it is: val/cat/gone.jpg: No such file or directory",
        "unreadable, copied as it is: val/cat/text.jpg: not an image that Pillow knows",
        lines[5],
    ]
    assert lines[5].startswith("unreadable, copied as it is: val/cat/torn.jpg: OSError: ")
    assert lines[6].startswith("12 images in ") and lines[6].endswith(" images/s")
    named = (tmp_path / "target/unreadable.txt").read_text().splitlines()
    assert [f"unreadable, copied as it is: {line}" for line in named] == lines[2:6]
    code, out, _ = fortyfold(*command)
    assert (code, out.strip()) == (0, f"12 images, shorter side 50,20, in {tmp_path}/target (already there)")


def test_many_unreadable_files_are_named_in_the_text_file(tmp_path: Path, fortyfold: Call) -> None:
    (tmp_path / "source/a").mkdir(parents=True)
    for number in range(13):
        (tmp_path / f"source/a/{number:02d}.jpg").write_bytes(b"x")
    os.rename(tmp_path / "source/a/12.jpg", os.fsencode(tmp_path / "source/a") + b"/\xff\n.jpg")  # noqa: PTH104
    _, out, _ = fortyfold("data", "resize", tmp_path / "source", tmp_path / "target", "--short-side", 20)
    assert out.count("unreadable, copied as it is") == 10
    assert f"3 more are named in {tmp_path}/target/unreadable.txt" in out
    lines = (tmp_path / "target/unreadable.txt").read_text().splitlines()
    assert len(lines) == 13
    assert lines[-1] == "a/\\xff\\n.jpg: not an image that Pillow knows"


def test_a_folder_of_class_folders_or_one_split_will_do(source: Path, tmp_path: Path) -> None:
    original = source / "ILSVRC/Data/CLS-LOC"
    make_resized(original / "train", tmp_path / "classes", ResizeSpec((20,)), num_threads=1)
    assert open_folder(tmp_path / "classes/20").fingerprint == open_folder(original / "train").fingerprint
    shutil.rmtree(original / "train")
    make_resized(source, tmp_path / "one", ResizeSpec((20,)), num_threads=1)
    assert [path.name for path in (tmp_path / "one/20").iterdir()] == ["val"]


@pytest.mark.parametrize("sides", ["abc", "0", "160,160", "", "160,", "-5", "1e3", "160,0"])
def test_bad_sides_are_one_line(tmp_path: Path, fortyfold: Call, sides: str) -> None:
    code, out, err = fortyfold("data", "resize", tmp_path, tmp_path / "x", f"--short-side={sides}")
    assert (code, out) == (2, "")
    assert "give a number of pixels, as in 160, or different ones, as in 160,352" in err
    assert err.count("\n") == 1


def test_other_arguments_or_another_source_are_refused(source: Path, tmp_path: Path) -> None:
    make_resized(source, tmp_path / "target", SPEC, num_threads=1)
    with pytest.raises(UserError, match=r"was made with quality = 90 \(now 80\)"):
        make_resized(source, tmp_path / "target", ResizeSpec((20, 50), 80))
    with pytest.raises(UserError, match=r"was made with short_side = \[20, 50\] \(now \[20\]\)"):
        make_resized(source, tmp_path / "target", ResizeSpec((20,)))
    image = source / "ILSVRC/Data/CLS-LOC/train/cat/wide.JPEG"
    image.write_bytes(image.read_bytes() + b"other")
    with pytest.raises(UserError, match="was made with sampled_bytes"):
        make_resized(source, tmp_path / "target", SPEC)
    image.rename(image.with_name("renamed.JPEG"))
    with pytest.raises(UserError, match="was made with source"):
        make_resized(source, tmp_path / "target", SPEC)


def test_places_that_cannot_be_are_one_line(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data folder"):
        make_resized(tmp_path / "missing", tmp_path / "target", SPEC)
    with pytest.raises(UserError, match="where it would count as a class"):
        make_resized(source, source / "ILSVRC/Data/CLS-LOC/train/small", SPEC)
    with pytest.raises(UserError, match="already has files in it"):
        make_resized(source, source, SPEC)
    assert not list(source.rglob("20"))


def test_a_disk_that_is_too_small_is_found_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = 64 << 20
    free = 20 * 4096 + spare  # two copies of twelve images, each within a block, but two images are empty
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free - 4096 * 2))
    with pytest.raises(UserError, match=r"needs about .* KB, but its disk has .* free"):
        make_resized(source, tmp_path / "target", SPEC, num_threads=1)
    assert not (tmp_path / "target/20").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    make_resized(source, tmp_path / "target", SPEC, num_threads=1)
    whole = contents(tmp_path / "target")
    begin_again(tmp_path / "target")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=spare))
    make_resized(source, tmp_path / "target", SPEC, num_threads=1)  # it is all there
    assert contents(tmp_path / "target") == whole


def begin_again(target: Path) -> None:
    manifest = json.loads((target / "made.json").read_text())
    (target / "made.json").write_text(json.dumps({**manifest, "complete": False}))


def test_what_is_there_is_not_made_again_and_is_counted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    first = make_resized(source, target, SPEC, num_threads=1)
    whole = contents(target)
    begin_again(target)
    (target / "20/train/cat/wide.JPEG").unlink()
    (target / "20/train/cat/.wide.JPEG.part").write_bytes(b"half")
    (target / "50/train/cat/high.jpg").write_bytes(b"")  # what a power cut may leave
    (target / "unreadable.txt").unlink()
    written: list[str] = []

    def watched(path: Path, content: bytes) -> None:
        written.append(path.name)
        replace_file(path, content)

    monkeypatch.setattr(module, "replace_file", watched)
    second = make_resized(source, target, SPEC, num_threads=1)
    assert sorted(written) == ["high.jpg", "unreadable.txt", "wide.JPEG"]
    assert contents(target) == whole
    assert (second.copies, second.unreadable) == (first.copies, first.unreadable)
    assert second.num_worked == 8  # two to make; small and unreadable ones are looked at again


def test_a_source_that_fails_for_a_moment_ends_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        with pytest.raises(UserError, match=r"cannot read .*source/.*: Input/output error"):
            make_resized(source, tmp_path / "target", SPEC, num_threads=1)
    assert make_resized(source, tmp_path / "target", SPEC, num_threads=1).num_worked == 12


def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(tmp_path: Path) -> None:
    source, calm, killed = (tmp_path / name for name in ("source", "calm", "killed"))
    for number in range(360):
        path = source / f"train/{number % 3}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = encoded(pixels(320, 240, seed=number))
        path.write_bytes(blob if number % 50 else blob[:900])
    make_resized(source, calm, ResizeSpec((40, 90)), num_threads=2)
    command = ("data", "resize", source, killed, "--short-side", "40,90", "--threads", 1)
    process = start(*command)
    while not list(killed.glob("40/train/0/*.jpg")):
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert 0 < len(contents(killed)) < len(contents(calm))
    finish_despite_kills(3, *command, most_seconds=1.5)
    assert contents(killed) == contents(calm)
    assert not list(killed.rglob("*.part"))

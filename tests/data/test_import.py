import gzip
import os
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from archives import (
    devkit,
    gzipped,
    jpeg,
    member,
    meta_mat,
    tar_of,
    train_images,
    train_tar,
    val_tar,
    wnid,
    write,
)  # fmt: skip
from kills import contents, finish_despite_kills

from fortyfold.data.index import with_classes
from fortyfold.data.prepare import work
from fortyfold.data.prepare.mat5 import Mat5Error, struct_fields
from fortyfold.data.splits import open_split

Fortyfold = Callable[..., tuple[int, str, str]]
NUM_CLASSES, NUM_VAL = 12, 36
IDS = [1 + 5 * number % NUM_CLASSES for number in range(NUM_VAL)]  # ILSVRC2012_ID of each validation image
PAIRS = [(label + 1, wnid(label)) for label in range(NUM_CLASSES)] + [(1001, "n00001740"), (1860, "n00001930")]
CLASSES = train_images(NUM_CLASSES, 20)


@pytest.fixture(autouse=True)
def _calm_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for everybody's writes proves nothing here."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archives")
    write(folder / "train.tar", train_tar(CLASSES))
    write(folder / "val.tar", val_tar(NUM_VAL))
    write(folder / "devkit.tar.gz", devkit(IDS, meta_mat(PAIRS, compressed=True)))
    write(folder / "v2.tar.gz", imagenetv2())
    return folder


def imagenetv2() -> bytes:
    top = "imagenetv2-matched-frequency-format-val"
    images = [member(f"{top}/{n % 11}/{n:040x}.jpeg", jpeg(n)) for n in range(88)]
    return gzipped(tar_of([member(top, type=tarfile.DIRTYPE), *images], tarfile.PAX_FORMAT))


def imagenet_options(archives: Path) -> list[object]:
    return [
        "--train", archives / "train.tar", "--val", archives / "val.tar", "--devkit", archives / "devkit.tar.gz",
    ]  # fmt: skip


def expected_imagenet() -> dict[str, bytes]:
    train = {f"train/{name}/{file}": data for name, files in CLASSES.items() for file, data in files.items()}
    val = {
        f"val/{wnid(id - 1)}/ILSVRC2012_val_{number:08d}.JPEG": jpeg(-number % 2**31)
        for number, id in enumerate(IDS, start=1)
    }
    return train | val


def unfinish(folder: Path) -> None:
    """As if killed before the end."""
    manifest = (folder / "made.json").read_text()
    (folder / "made.json").write_text(manifest.replace('"complete": true', '"complete": false'))


def images_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*/*")}


def test_imagenet_comes_out_of_its_archives(archives: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    command = ("data", "import", "imagenet", tmp_path / "made", *imagenet_options(archives), "--threads", 2)
    code, out, err = fortyfold(*command)
    assert (code, err) == (0, "")
    assert "train 240 images, 12 classes" in out and "(the full set has 1281167)" in out
    assert "val   36 images, 12 classes" in out and "skipped" not in out
    assert images_in(tmp_path / "made") == expected_imagenet()
    assert len(open_split(tmp_path / "made", "train")) == 240
    code, out, _ = fortyfold(*command)
    assert code == 0 and "is there already" in out


def test_killed_and_started_again_it_is_the_same(archives: Path, tmp_path: Path) -> None:
    command = ("data", "import", "imagenet", tmp_path / "killed", *imagenet_options(archives), "--threads", 2)
    finish_despite_kills(5, *command, most_seconds=0.55)
    finish_despite_kills(0, *command[:3], tmp_path / "whole", *command[4:])
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {"train", "val", "made.json", ".making"}


def test_images_are_on_the_disk_before_the_mark(
    archives: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    mark = tmp_path / "made/made.json"
    monkeypatch.setattr(
        os, "sync", lambda: seen.append((len(images_in(tmp_path / "made")), '"complete": true' in mark.read_text()))
    )
    fortyfold("data", "import", "imagenet", tmp_path / "made", "--train", archives / "train.tar")
    assert seen == [(240, False)] and '"complete": true' in mark.read_text()


def test_what_a_kill_left_is_kept_or_removed(archives: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    command = ("data", "import", "imagenet", tmp_path, "--train", archives / "train.tar")
    fortyfold(*command)
    before = contents(tmp_path)
    unfinish(tmp_path)
    (tmp_path / ".made.json.1234").touch()
    folder = tmp_path / "train" / wnid(3)
    (folder / f"{wnid(3)}_7.JPEG").replace(folder / f".{wnid(3)}_7.JPEG.part")
    (folder / ".other.part").touch()
    (folder / f"{wnid(3)}_8.JPEG").write_bytes(b"")  # a power cut's doing
    kept = (folder / f"{wnid(3)}_9.JPEG").stat().st_mtime_ns
    code, out, _ = fortyfold(*command)
    assert code == 0 and "238 were there already" in out
    assert contents(tmp_path) == before
    assert (folder / f"{wnid(3)}_9.JPEG").stat().st_mtime_ns == kept


@pytest.mark.parametrize(
    "line",
    [
        "ILSVRC2012_val_{0:08d}.JPEG {1}", "ILSVRC2012_val_{0:08d}.JPEG\t{1}", "ILSVRC2012_val_{0:08d}.JPEG,{1}",
        "ILSVRC2012_val_{0:08d},{1} 85 1 499 272 {1} 3 4 5 6 ",
    ],
)  # fmt: skip
def test_a_val_map_serves_as_well(archives: Path, tmp_path: Path, fortyfold: Fortyfold, line: str) -> None:
    lines = [line.format(number, wnid(id - 1)) for number, id in enumerate(IDS, start=1)]
    head = ["ImageId,PredictionString"] if "85" in line else []
    (tmp_path / "map").write_text("\n".join([*head, *reversed(lines)]) + "\n")
    command = ("data", "import", "imagenet", tmp_path / "made", "--val", archives / "val.tar")
    assert fortyfold(*command, "--val-map", tmp_path / "map")[0] == 0
    expected = {name: data for name, data in expected_imagenet().items() if name.startswith("val/")}
    assert images_in(tmp_path / "made") == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ILSVRC2012_val_00000001.JPEG n01440764\nrubbish", "line 2 is 'rubbish'"),
        ("ILSVRC2012_val_00000001 n01440764\nILSVRC2012_val_00000001 n01440777", "a second class"),
        ("ILSVRC2012_val_00000001.JPEG ../../etc", "line 1 is"),
        ("ILSVRC2012_val_00000001.JPEG n01440764", "ILSVRC2012_val_00000002.JPEG of .* has no label"),
    ],
)
def test_a_bad_val_map_is_one_line(archives: Path, tmp_path: Path, fortyfold: Fortyfold, text: str, line: str) -> None:
    (tmp_path / "map").write_text(text)
    code, _, err = fortyfold(
        "data", "import", "imagenet", tmp_path / "made", "--val", archives / "val.tar", "--val-map", tmp_path / "map"
    )
    assert code == 2 and err.count("\n") == 1
    assert re.search(line, err)


def test_other_labels_are_not_mixed_with_an_earlier_attempts(
    archives: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    made, labels = tmp_path / "made", tmp_path / "map"
    command = ("data", "import", "imagenet", made, "--val", archives / "val.tar", "--val-map", labels)
    labels.write_text(f"ILSVRC2012_val_00000001.JPEG {wnid(11)}\n")
    assert "ILSVRC2012_val_00000002.JPEG" in fortyfold(*command)[2]
    labels.write_text("".join(f"ILSVRC2012_val_{n:08d}.JPEG {wnid(id - 1)}\n" for n, id in enumerate(IDS, start=1)))
    code, _, err = fortyfold(*command)
    assert code == 2 and f"{wnid(11)} has 1 files that are not of these archives" in err
    shutil.rmtree(made / "val")
    assert fortyfold(*command)[0] == 0


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("compressed", [False, True])
def test_meta_mat_is_read(compressed: bool, order: str) -> None:
    pairs = [(number, f"n{number:08d}") for number in range(1, 1861)]
    meta = meta_mat(pairs, compressed, order)
    ids, wnids = struct_fields(meta, "synsets", ("ILSVRC2012_ID", "WNID"))
    assert list(zip(ids, wnids, strict=True)) == pairs
    with pytest.raises(Mat5Error, match="no struct nothing"):
        struct_fields(meta, "nothing", ())
    with pytest.raises(Mat5Error, match="no field nothing"):
        struct_fields(meta, "synsets", ("nothing",))


def test_a_damaged_meta_mat_is_refused_never_more() -> None:
    whole = meta_mat(PAIRS, compressed=False)
    with pytest.raises(Mat5Error, match="cut short"):
        struct_fields(whole[:-8], "synsets", ("ILSVRC2012_ID", "WNID"))
    rng = random.Random(0)
    num_refused = 0
    for attempt in range(600):
        damaged = bytearray(whole[: rng.randrange(len(whole))] if attempt % 2 else whole)
        for _ in range(rng.randrange(1, 5)):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 255, rng.randrange(256)]) if damaged else 0
        try:
            struct_fields(bytes(damaged), "synsets", ("ILSVRC2012_ID", "WNID"))
        except Mat5Error:
            num_refused += 1
    assert num_refused > 300


def test_a_meta_mat_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fortyfold.data.prepare.mat5._MOST_BYTES", 1000)
    with pytest.raises(Mat5Error, match="absurdly large"):
        struct_fields(meta_mat(PAIRS, compressed=True), "synsets", ("ILSVRC2012_ID", "WNID"))


@pytest.mark.parametrize(
    ("ids", "pairs", "line"),
    [
        ([1, 2], [(1, "n01440764")], "line 2 of .*ground_truth.txt is '2', no class"),
        ([1], [(1, "../../x")], "does not give each class one WordNet id"),
        ([1], [(1, "n01440764"), (1, "n01440777")], "does not give each class one WordNet id"),
        ([1001], [(1001, "n01440764")], "line 1 of .*ground_truth.txt is '1001', no class"),
    ],
)
def test_a_devkit_that_does_not_fit_is_one_line(
    archives: Path, tmp_path: Path, fortyfold: Fortyfold, ids: list[int], pairs: list[tuple[int, str]], line: str
) -> None:
    kit = write(tmp_path / "kit", devkit(ids, meta_mat(pairs, compressed=True)))
    code, _, err = fortyfold(
        "data", "import", "imagenet", tmp_path / "made", "--val", archives / "val.tar", "--devkit", kit
    )
    assert code == 2 and err.count("\n") == 1 and re.search(line, err)


def test_imagenetv2_is_a_validation_set_for_imagenet(archives: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    code, out, _ = fortyfold("data", "import", "imagenetv2", tmp_path, archives / "v2.tar.gz")
    assert code == 0 and "val   88 images, 11 classes" in out
    assert images_in(tmp_path) == {f"val/{n % 11}/{n:040x}.jpeg": jpeg(n) for n in range(88)}
    index = with_classes(open_split(tmp_path, "val"), tuple(wnid(label) for label in range(1000)))
    assert index.labels[-1] == 10


def test_imagenetv2_survives_kills(archives: Path, tmp_path: Path) -> None:
    command = ("data", "import", "imagenetv2", tmp_path / "killed", archives / "v2.tar.gz")
    finish_despite_kills(3, *command, most_seconds=0.5)
    finish_despite_kills(0, *command[:3], tmp_path / "whole", archives / "v2.tar.gz")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9999])
@pytest.mark.parametrize("name", ["train.tar", "val.tar", "devkit.tar.gz", "v2.tar.gz"])
def test_a_truncated_archive_is_one_line_and_the_whole_one_goes_on(
    archives: Path, tmp_path: Path, fortyfold: Fortyfold, name: str, share: float
) -> None:
    for path in archives.iterdir():
        write(tmp_path / path.name, path.read_bytes())
    whole = (archives / name).read_bytes()
    data = whole.rstrip(b"\0") if name.endswith(".tar") else whole  # zeros end a tar, and pad it to 10 KB
    write(tmp_path / name, data[: int(share * len(data))])
    what = ["imagenetv2", tmp_path / "made", tmp_path / name]
    if not name.startswith("v2"):
        what = ["imagenet", tmp_path / "made", *imagenet_options(tmp_path)]
    code, _, err = fortyfold("data", "import", *what)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{name} is cut short" in err
    write(tmp_path / name, whole)
    assert fortyfold("data", "import", *what)[0] == 0
    assert len(images_in(tmp_path / "made")) == (88 if name.startswith("v2") else 276)


def test_a_tar_cut_between_two_members_is_not_taken_for_whole(
    archives: Path, tmp_path: Path, fortyfold: Fortyfold
) -> None:
    whole = (archives / "train.tar").read_bytes()
    with tarfile.open(archives / "train.tar") as tar:
        cut = tar.getmembers()[5].offset
    write(tmp_path / "train.tar", whole[:cut])
    code, _, err = fortyfold("data", "import", "imagenet", tmp_path / "made", "--train", tmp_path / "train.tar")
    assert code == 2 and "is cut short" in err


@pytest.mark.parametrize("level", [0, 9])
def test_damage_is_seen_and_the_good_archive_mends_it(
    archives: Path, tmp_path: Path, fortyfold: Fortyfold, level: int
) -> None:
    whole = gzip.compress(gzip.decompress((archives / "v2.tar.gz").read_bytes()), level)
    damaged = bytearray(whole)
    damaged[(whole.index(jpeg(30)) if level == 0 else len(whole) // 2) + 200] ^= 0x10
    command = ("data", "import", "imagenetv2", tmp_path / "made", write(tmp_path / "v2.tar.gz", bytes(damaged)))
    code, _, err = fortyfold(*command)
    assert code == 2 and err.count("\n") == 1 and "is damaged at byte" in err
    if level == 0:  # nothing shows until the checksum behind the last image
        assert images_in(tmp_path / "made")[f"val/8/{30:040x}.jpeg"] != jpeg(30)
    write(tmp_path / "v2.tar.gz", whole)
    assert fortyfold(*command)[0] == 0
    assert images_in(tmp_path / "made") == {f"val/{n % 11}/{n:040x}.jpeg": jpeg(n) for n in range(88)}


def test_a_damaged_header_in_a_class_is_named(archives: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    whole = bytearray((archives / "train.tar").read_bytes())
    with tarfile.open(archives / "train.tar") as tar:
        inner = tar.getmembers()[2].offset_data
    whole[inner + 20] ^= 1
    code, _, err = fortyfold(
        "data", "import", "imagenet", tmp_path / "made", "--train", write(tmp_path / "train.tar", bytes(whole))
    )
    assert code == 2 and "train.tar is damaged at byte" in err and err.count("\n") == 1


def test_members_that_do_not_belong_are_skipped_and_named(tmp_path: Path, fortyfold: Fortyfold) -> None:
    name, other = wnid(0), wnid(1)
    good = member(f"{name}_1.JPEG", jpeg(1))
    inner = tar_of(
        [
            good, member(f"../{name}_2.JPEG", b"x"), member(f"/tmp/{name}_3.JPEG", b"x"),  # noqa: S108
            member(f"{name}_4.JPEG", type=tarfile.SYMTYPE, link="/etc/passwd"),
            member(f"{name}_5.JPEG", type=tarfile.LNKTYPE, link=f"{name}_1.JPEG"),
            member(f"{name}_6.JPEG", type=tarfile.CHRTYPE), member(f"{name}_7.JPEG", type=tarfile.FIFOTYPE),
            member(f"{name}_1.JPEG", jpeg(2)), member(f"again/{name}_1.JPEG", jpeg(2)),
            member(f"{other}_1.JPEG", b"x"), member(f"{name}_8.JPEG"), member("._x", b"x"),
            member(f"{name}_9\x1b[2J.JPEG", b"x"),
        ]
    )  # fmt: skip
    outer = tar_of([member("d", type=tarfile.DIRTYPE), member(f"{name}.tar", inner), member(f"./{name}.tar", inner),
                    member("readme", b"x"), member("x/../../n00000001.tar", inner)])  # fmt: skip
    code, out, _ = fortyfold(
        "data", "import", "imagenet", tmp_path / "made", "--train", write(tmp_path / "train.tar", outer)
    )
    assert code == 0 and "train 1 images, 1 classes" in out
    assert images_in(tmp_path / "made") == {f"train/{name}/{name}_1.JPEG": jpeg(1)}
    assert "skipped 15 members of the archives" in out and "and 5 more" in out
    assert "\x1b" not in out
    assert f"'./{name}.tar' (a second one of this class)" in out
    assert f"'../{name}_2.JPEG' (not a plain name)" in out and f"'{name}_4.JPEG' (a link)" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "train.tar"]


def test_long_names_and_pax_headers_are_read(tmp_path: Path, fortyfold: Fortyfold) -> None:
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info, content = member(f"{'folder-' * 20}/7/{'a' * 120}.jpeg", jpeg(0))
        info.mtime = 1.5
        archive = write(tmp_path / "long.tar", tar_of([(info, content)], format))
        assert fortyfold("data", "import", "imagenetv2", tmp_path / f"made-{format}", archive)[0] == 0
        assert images_in(tmp_path / f"made-{format}") == {f"val/7/{'a' * 120}.jpeg": jpeg(0)}


def test_mistakes_are_one_line_and_bind_nobody(archives: Path, tmp_path: Path, fortyfold: Fortyfold) -> None:
    train, val, v2 = archives / "train.tar", archives / "val.tar", archives / "v2.tar.gz"
    mistakes: dict[str, list[object]] = {
        "give --train ILSVRC2012_img_train.tar, or": ["imagenet"],
        "--val needs its labels": ["imagenet", "--val", val],
        "has no n01440764.tar": ["imagenet", "--train", val],
        "is compressed; unpack it first": ["imagenet", "--train", v2],
        "has no ILSVRC2012_val_00000001.JPEG": ["imagenet", "--val", train, "--devkit", archives / "devkit.tar.gz"],
        "has no ILSVRC2012_validation_ground_truth.txt": ["imagenet", "--val", val, "--devkit", v2],
        "cannot read": ["imagenet", "--train", tmp_path / "none.tar"],
        "none.tar: No such file": ["imagenet", "--val", tmp_path / "none.tar", "--devkit", archives / "devkit.tar.gz"],
        "has no <0…999>": ["imagenetv2", train],
        "give ARCHIVE, or --download": ["imagenetv2"],
        "--download needs --sha256": ["imagenetv2", "--download", "http://localhost/x"],
        "give 64 hexadecimal digits": ["imagenetv2", v2, "--sha256", "abc"],
        "has the SHA-256": ["imagenetv2", v2, "--sha256", "0" * 64],
        "is damaged at byte 512": ["imagenetv2", write(tmp_path / "noise", os.urandom(5000))],
    }  # fmt: skip
    for line, (verb, *options) in mistakes.items():
        code, _, err = fortyfold("data", "import", verb, tmp_path / "made", *options)
        assert code == 2 and line in err and err.count("\n") == 1, err
    assert fortyfold("data", "import", "imagenet", tmp_path / "made", "--train", train)[0] == 0


def test_the_disk_is_looked_at_before_and_what_is_there_counts(
    archives: Path, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("data", "import", "imagenet", tmp_path / "made", "--train", archives / "train.tar")
    half = (archives / "train.tar").stat().st_size // 2
    free = work._SPARE_BYTES + half
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(free, 0, free))
    code, _, err = fortyfold(*command)
    assert code == 2 and "needs about" in err and not (tmp_path / "made/train").exists()
    free = 1 << 40
    assert fortyfold(*command)[0] == 0
    unfinish(tmp_path / "made")
    next((tmp_path / "made/train").glob("*/*")).unlink()
    free = work._SPARE_BYTES + half
    assert fortyfold(*command)[0] == 0

"""Images a second of our loader over those of what a user would take instead, in one run.

    .venv/bin/python benchmarks/loader.py                          # generated 500 × 375 JPEGs
    .venv/bin/python benchmarks/loader.py --images FOLDER           # a folder of JPEGs of your own

All read the same images from the page cache and make batches of 256 at 224 px: random crops, or with
--validation the centre of a shorter side of 256. Ours has two threads, the others two threads or worker
processes. They take turns of two batches, the machine's speed drifting as it may (turns.py says how); a round is
some turns of each, and the figures are medians over the rounds. A rival that is not installed is left out;
benchmarks/README.md says how to install them.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rivals import PX, RIVALS, SHORTER_PX, Rival, Setting
from turns import Missing, Player, play

from fortyfold.data import decode
from fortyfold.data.demo import DemoSpec, make_demo
from fortyfold.data.index import Index
from fortyfold.data.prepare.shard import Sharding, make_shards, source_sizes
from fortyfold.data.reader import Reader
from fortyfold.data.speed import endless_centres, endless_crops, measure
from fortyfold.data.splits import open_folder
from fortyfold.models import timm_import

# Makes torchvision importable beside a CPU build of torch. Here, and not in the rivals that need it, so that
# torch and timm, which every training process has, are part of the bare process whose memory does not count.
assert timm_import

Rounds = list[float]  # images a second in each


def ours(setting: Setting) -> Iterator[int]:
    """Our loader on the folder, the images' sizes known, as from the second epoch on."""
    index = open_folder(setting.folder)
    Reader(setting.threads).sizes(index)
    return our_batches(index, setting)


def ours_sharded(setting: Setting) -> Iterator[int]:
    """Our loader on tiled shards."""
    source = open_folder(setting.folder)
    work, folder = Sharding(source, num_shards=8, tile="auto"), setting.scratch / "train"
    make_shards(work, folder, (0, 1), setting.threads, source_sizes(source, setting.threads), lambda done, total: None)
    return our_batches(open_folder(folder), setting)


def our_batches(index: Index, setting: Setting) -> Iterator[int]:
    centres = endless_centres(index, setting.batch, PX, PX / SHORTER_PX)
    crops = endless_crops(index, setting.batch, PX, setting.min_scale)
    return map(len, Reader(setting.threads).stream(centres if setting.validation else crops))


OURS: dict[str, Rival] = {"fortyfold": ours, "fortyfold-shards": ours_sharded}


def link_images(source: Path, folder: Path, count: int) -> None:
    """A class folder of links to the source's JPEGs, repeated to `count`."""
    paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"{source} has no .jpg or .jpeg in it")
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        (folder / "images" / f"{number:06d}.jpg").symlink_to(paths[number % len(paths)].resolve())


def open_players(arguments: argparse.Namespace, place: Path, stack: ExitStack) -> dict[str, Player]:
    """Each pipeline of --only, started and warm, one after the other."""
    players = {}
    for name in arguments.only:
        command = [__file__, *sys.argv[1:], "--play", name, "--place", str(place)]
        try:
            players[name] = Player(command)
        except Missing as reason:
            print(f"{name}: left out, {reason}", flush=True)
            continue
        stack.callback(players[name].close)
    return players


def play_rounds(players: dict[str, Player], arguments: argparse.Namespace) -> dict[str, Rounds]:
    rates: dict[str, Rounds] = {name: [] for name in players}
    for number in range(arguments.rounds):
        images, seconds = dict.fromkeys(players, 0), dict.fromkeys(players, 0.0)
        for _ in range(arguments.turns):
            for name, player in players.items():
                made, taken = player.turn(arguments.turn_images)
                images[name] += made
                seconds[name] += taken
        for name in players:
            rates[name].append(images[name] / seconds[name])
        print(f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:.0f}" for name in players), flush=True)
    return rates


def table(rates: dict[str, Rounds], players: dict[str, Player]) -> str:
    """A row a pipeline: its median rate, our rates over it, its memory."""
    ours = [name for name in OURS if name in rates]
    heads = ["pipeline", "img/s", *(f"{name} / it (min–max)" for name in ours), "memory MB"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, rounds in rates.items():
        ratios = [_ratio(rates[our], rounds) for our in ours]
        memory = players[name].memory_bytes() / 1e6
        lines.append(f"| {' | '.join([name, f'{statistics.median(rounds):.0f}', *ratios, f'{memory:.0f}'])} |")
    return "\n".join(lines)


def _ratio(ours: Rounds, theirs: Rounds) -> str:
    """The median over the rounds, and the extremes."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def python_cost(folder: Path, arguments: argparse.Namespace) -> str:
    """What our loader does beside the decoder, holding the interpreter's lock; the other pipelines are frozen."""
    index = open_folder(folder)
    Reader(arguments.threads).sizes(index)
    costs = [
        measure(Reader(arguments.threads), endless_crops(index, arguments.batch, PX, arguments.min_scale), 2.0)
        for _ in range(3)
    ]
    cost = statistics.median(speed.python_seconds_per_image for speed in costs)
    return f"Python beside the decoder: {1e6 * cost:.1f} µs an image at batches of {arguments.batch} (median of 3)"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of JPEGs; without it 500 × 375 ones are generated")
    parser.add_argument("--count", type=int, default=16384, help="images an epoch, by links to those in the folder")
    parser.add_argument("--threads", type=int, default=2, help="or worker processes, of each pipeline")
    parser.add_argument("--min-scale", type=float, default=0.08, help="smallest crop, as a part of the area")
    parser.add_argument("--validation", action="store_true", help="centre crops instead of random ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4, help="of each pipeline in a round")
    parser.add_argument("--turn-images", type=int, help="of each turn; default: a batch for each thread")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", nargs="+", choices=[*OURS, *RIVALS], default=[*OURS, *RIVALS], metavar="NAME")
    parser.add_argument("--play", help=argparse.SUPPRESS)  # this process is the pipeline of that name
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.turn_images = arguments.turn_images or arguments.threads * arguments.batch
    return arguments


def run_pipeline(arguments: argparse.Namespace) -> None:
    scratch = arguments.place / arguments.play
    scratch.mkdir()
    setting = Setting(
        arguments.place / "linked", scratch, arguments.threads, arguments.batch, arguments.min_scale,
        arguments.validation,
    )  # fmt: skip
    play(partial((OURS | RIVALS)[arguments.play], setting), num_warm_images=4 * arguments.batch)


def main() -> None:
    arguments = parse()
    if arguments.play:
        run_pipeline(arguments)
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        if arguments.images is None:
            make_demo(place / "demo", DemoSpec(classes=10, images=600, width=500, height=375, seed=0))
        link_images(arguments.images or place / "demo", place / "linked", arguments.count)
        players = open_players(arguments, place, stack)
        print(table(play_rounds(players, arguments), players))
        print(python_cost(place / "linked", arguments))
    crops = "centre crops" if arguments.validation else f"min_scale {arguments.min_scale}"
    how = f"{arguments.threads} threads or workers, {crops}, medians of {arguments.rounds} rounds"
    print(f"{how}, our decoder {decode.NAME}")


if __name__ == "__main__":
    main()

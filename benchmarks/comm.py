"""Seconds and bytes of a step by each way for ranks to agree, on links of a given rate: four hosts, a rank on each.

    sudo .venv/bin/python benchmarks/comm.py                                  # 1 Gbit/s and 200 Mbit/s
    sudo .venv/bin/python benchmarks/comm.py --rates 1gbit --only allreduce gossip-exponential

The hosts are network namespaces (hosts.py), the network is ResNet-50's parameters with layers that sleep (sleeping.py),
the methods are in agreeing.py. At the usual 5 ms a layer, computing and sending the network once take about as long at
1 Gbit/s; at 200 Mbit/s sending takes five times as long. Methods take turns, round by round; figures are medians over
the rounds. No step can be shorter than computing alone in the same round, nor than its least bytes at the goodput of
one TCP connection between two of the hosts, the best of the rounds: that is what a step's time is compared with.
Decent-DP is left out where it is not installed; benchmarks/README.md says how to install it.
"""

import argparse
import signal
import statistics
import sys
from dataclasses import dataclass, field

from agreeing import METHODS, least_copies
from goodput import goodput
from hosts import Host, hosts
from ranks import Ranks, Turn, Work, serve
from sleeping import model_bytes
from turns import Missing

NUM_RANKS = 4
OURS, RIVAL = "gossip-exponential", "decent-dp-one-peer-exp"


Round = dict[str, Turn]  # by method


@dataclass
class Played:
    """All rounds on links of one rate."""

    rounds: list[Round] = field(default_factory=list)
    bytes_per_second: float = 0.0
    """The best goodput seen: the links stay as they are, only the machine is slower at times."""

    def over_least(self, method: str) -> list[float]:
        """In each round, a step's time over the least possible."""
        sending = least_copies(method, NUM_RANKS) * model_bytes() / self.bytes_per_second
        return [turns[method].seconds / max(turns["alone"].seconds, sending) for turns in self.rounds]

    def over_other(self, method: str, other: str) -> list[float]:
        return [turns[method].seconds / turns[other].seconds for turns in self.rounds]


def play_rounds(made: list[Host], arguments: argparse.Namespace) -> Played:
    ranks = Ranks(made, [__file__, *sys.argv[1:], "--serve"])
    methods = ["alone", *(method for method in arguments.only if method != "alone")]
    played = Played()
    for number in range(arguments.rounds):
        seen = goodput(made[0], made[1])
        played.bytes_per_second = max(played.bytes_per_second, seen)
        print(f"round {number + 1}: goodput {seen * 8e-6:.0f} Mbit/s", end="", flush=True)
        played.rounds.append(play_round(ranks, methods))
    return played


def play_round(ranks: Ranks, methods: list[str]) -> Round:
    """A turn of each method; one that is not installed is taken off the list."""
    turns: Round = {}
    for method in list(methods):
        try:
            turns[method] = ranks.turn(method)
            print(f", {method} {turns[method].seconds:.2f}", end="", flush=True)
        except Missing as reason:
            print(f", {method} left out ({reason})", end="", flush=True)
            methods.remove(method)
    print()
    return turns


def table(played: Played) -> str:
    """A row a method."""
    heads = ["method", "s a step", "steps/s", "MB a step and rank", "least MB", "s over the least (min–max)"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for method in played.rounds[0]:
        seconds = statistics.median(turns[method].seconds for turns in played.rounds)
        sent = statistics.median(turns[method].sent_bytes for turns in played.rounds)
        least = least_copies(method, NUM_RANKS) * model_bytes()
        figures = [f"{seconds:.3f}", f"{1 / seconds:.3f}", f"{sent / 1e6:.1f}", f"{least / 1e6:.1f}"]
        lines.append(f"| {' | '.join([method, *figures, spread(played.over_least(method))])} |")
    return "\n".join(lines)


def spread(figures: list[float]) -> str:
    """The median over the rounds, and the extremes."""
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}–{max(figures):.2f})"


def ratios(played: Played) -> str:
    lines = []
    if OURS in played.rounds[0]:
        lines.append(f"{OURS} over max(alone, bytes / goodput): {spread(played.over_least(OURS))}")
    if {OURS, RIVAL} <= played.rounds[0].keys():
        lines.append(f"{OURS} over {RIVAL}: {spread(played.over_other(OURS, RIVAL))}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], metavar="RATE", help="in tc's words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a turn; a multiple of 8, localsgd's period")
    parser.add_argument("--warm-steps", type=int, default=3, help="before them")
    parser.add_argument("--layer-ms", type=float, default=5.0, help="that a layer sleeps forward; backward twice")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # this process is a rank
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.serve:
        serve(Work(arguments.warm_steps, arguments.steps, arguments.layer_ms / 1e3))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the hosts are removed then, too
    for rate in arguments.rates:
        with hosts(NUM_RANKS, rate) as made:
            played = play_rounds(made, arguments)
        megabits = played.bytes_per_second * 8e-6
        print(f"\nlinks of {rate}, goodput {megabits:.0f} Mbit/s, {arguments.steps} steps a turn")
        print(table(played), ratios(played), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()

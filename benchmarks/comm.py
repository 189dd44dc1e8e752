"""Seconds and bytes of a step by each way for ranks to agree, on links of a given rate: four hosts, a rank on each.

    sudo .venv/bin/python benchmarks/comm.py                                  # 1 Gbit/s and 200 Mbit/s
    sudo .venv/bin/python benchmarks/comm.py --rates 1gbit --only allreduce gossip-exponential

The hosts are network namespaces (hosts.py), the network is ResNet-50's parameters with layers that sleep (sleeping.py),
the methods are in agreeing.py. At the usual 5 ms a layer, computing and sending the network once take about as long at
1 Gbit/s; at 200 Mbit/s sending takes five times as long. Methods take turns, round by round; figures are medians over
the rounds. No step can be shorter than computing alone, nor than its least bytes at the goodput of one TCP connection
between two of the hosts, measured in the same round: that is what a step's time is compared with. Decent-DP is left
out where it is not installed; benchmarks/README.md says how to install it.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from agreeing import METHODS, least_copies
from goodput import goodput
from hosts import Host, hosts
from ranks import Ranks, Turn, Work, serve
from sleeping import model_bytes
from turns import Missing

NUM_RANKS = 4
OURS, RIVAL = "gossip-exponential", "decent-dp-one-peer-exp"


@dataclass
class Round:
    """One turn of each method, and what the network gave just before."""

    bytes_per_second: float
    turns: dict[str, Turn] = field(default_factory=dict)

    def over_least(self, method: str) -> float:
        """A step's time over the least possible."""
        sending = least_copies(method, NUM_RANKS) * model_bytes() / self.bytes_per_second
        return self.turns[method].seconds / max(self.turns["alone"].seconds, sending)

    def over_rival(self) -> float:
        return self.turns[OURS].seconds / self.turns[RIVAL].seconds


def play_rounds(made: list[Host], arguments: argparse.Namespace) -> list[Round]:
    ranks = Ranks(made, [__file__, *sys.argv[1:], "--serve"])
    methods = ["alone", *(method for method in arguments.only if method != "alone")]
    rounds = []
    for number in range(arguments.rounds):
        rounds.append(Round(goodput(made[0], made[1])))
        print(f"round {number + 1}: goodput {rounds[-1].bytes_per_second * 8e-6:.0f} Mbit/s", end="", flush=True)
        for method in list(methods):
            try:
                rounds[-1].turns[method] = ranks.turn(method)
            except Missing as reason:
                print(f", {method} left out ({reason})", end="", flush=True)
                methods.remove(method)
                continue
            print(f", {method} {rounds[-1].turns[method].seconds:.2f}", end="", flush=True)
        print()
    return rounds


def table(rounds: list[Round]) -> str:
    """A row a method."""
    heads = ["method", "s a step", "steps/s", "MB a step and rank", "least MB", "s over the least (min–max)"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for method in rounds[0].turns:
        seconds = statistics.median(each.turns[method].seconds for each in rounds)
        sent = statistics.median(each.turns[method].sent_bytes for each in rounds)
        least = least_copies(method, NUM_RANKS) * model_bytes()
        over_least = spread(each.over_least(method) for each in rounds)
        figures = [f"{seconds:.3f}", f"{1 / seconds:.3f}", f"{sent / 1e6:.1f}", f"{least / 1e6:.1f}", over_least]
        lines.append(f"| {' | '.join([method, *figures])} |")
    return "\n".join(lines)


def spread(figures: Iterable[float]) -> str:
    """The median over the rounds, and the extremes."""
    found = list(figures)
    return f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"


def ratios(rounds: list[Round]) -> str:
    lines = []
    if OURS in rounds[0].turns:
        lines.append(f"{OURS} over max(alone, bytes / goodput): {spread(each.over_least(OURS) for each in rounds)}")
    if {OURS, RIVAL} <= rounds[0].turns.keys():
        lines.append(f"{OURS} over {RIVAL}: {spread(each.over_rival() for each in rounds)}")
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
    for rate in arguments.rates:
        with hosts(NUM_RANKS, rate) as made:
            rounds = play_rounds(made, arguments)
        megabits = statistics.median(each.bytes_per_second for each in rounds) * 8e-6
        print(f"\nlinks of {rate}, goodput {megabits:.0f} Mbit/s, {arguments.steps} steps a turn, {len(rounds)} rounds")
        print(table(rounds), ratios(rounds), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()

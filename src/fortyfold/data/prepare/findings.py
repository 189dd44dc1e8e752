"""What a check found: kinds, how many of each, and which.

A finding costs two words of memory as long as it is a sample id and a shared text, so that a million of them
(every image of a set may be grey) are no burden; names are made when they are asked for.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """`wrong`: it stops a training, loses an image or spoils the result. Otherwise it is only noted."""

    text: str
    wrong: bool


KINDS = {
    "only_in_val": Kind("classes of val that train lacks", wrong=True),
    "only_in_train": Kind("classes of train that val lacks", wrong=True),
    "outside": Kind("images outside the class folders: no training sees them", wrong=True),
    "altered": Kind("images in shards whose bytes are not those that were written", wrong=True),
    "unreadable": Kind("images whose header cannot be read", wrong=True),
    "truncated": Kind("images cut short: the end-of-image marker is missing", wrong=True),
    "undecodable": Kind("images whose pixels cannot be decoded", wrong=True),
    "leaks": Kind("images of val that train has as well, byte for byte", wrong=True),
    "empty_classes": Kind("class folders without an image", wrong=False),
    "not_images": Kind("files in class folders that are no images by their names", wrong=False),
    "duplicates": Kind("images that their split has twice, byte for byte", wrong=False),
    "other_format": Kind("images of another format than their name says", wrong=False),
    "cmyk": Kind("CMYK or YCCK images, read as RGB", wrong=False),
    "grey": Kind("grey images, read as RGB", wrong=False),
}

Detail = str | int  # a text, or another sample's id


@dataclass
class Group:
    """The findings of one kind: names of folders and files, or sample ids, each with a detail."""

    names: list[str] = field(default_factory=list)
    samples: "array[int]" = field(default_factory=lambda: array("q"))
    details: list[Detail] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names) + len(self.samples)


class Findings:
    """All that was found. `name_of` gives a sample's path."""

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self.groups = {kind: Group() for kind in KINDS}

    def add_name(self, kind: str, name: str) -> None:
        self.groups[kind].names.append(name)

    def add_sample(self, kind: str, sample: int, detail: Detail = "") -> None:
        self.groups[kind].samples.append(sample)
        self.groups[kind].details.append(detail)

    def found(self) -> Iterator[tuple[str, Kind, int]]:
        """Kinds that were found, and how often; what is wrong first."""
        return ((key, kind, len(self.groups[key])) for key, kind in KINDS.items() if len(self.groups[key]))

    def num_wrong(self) -> int:
        return sum(count for _, kind, count in self.found() if kind.wrong)

    def entries(self, key: str) -> Iterator[tuple[str, str]]:
        """Each finding of a kind: its name, and what there is to say about it."""
        group = self.groups[key]
        yield from ((name, "") for name in group.names)
        for sample, detail in zip(group.samples, group.details, strict=True):
            about = f"the same as {self._name_of(detail)}" if isinstance(detail, int) else detail
            yield self._name_of(sample), about

    def as_json(self) -> dict[str, Any]:
        """Everything that was found, by kind."""
        return {
            key: {
                "what": kind.text,
                "wrong": kind.wrong,
                "count": count,
                "each": [{"name": name, "about": about} for name, about in self.entries(key)],
            }
            for key, kind, count in self.found()
        }

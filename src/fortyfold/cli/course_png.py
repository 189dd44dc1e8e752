"""A course as a PNG image: three panels, one above another, with axes, labels and the borders of phases.

Drawn by Pillow at twice the size and reduced, since Pillow draws lines without antialiasing.
"""

import io
from dataclasses import dataclass
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

from fortyfold.cli.course import Course, Series, number, tick_epochs

WIDTH, LEFT, RIGHT = 1200, 110, 1160
PANELS = ((110, 390), (460, 605), (675, 820))  # top and bottom of each
HEIGHT = 890
LINE, INK, FAINT, PAPER = (31, 90, 160), (40, 40, 40), (225, 225, 225), (255, 255, 255)
BORDER = (200, 120, 60)
_SCALE = 2
_HEADROOM = 1.08  # so that the highest value is not drawn on the edge


@dataclass(frozen=True)
class Panel:
    """A series' place on the image, in pixels."""

    top: int
    bottom: int
    series: Series
    num_epochs: int

    def x(self, epoch: float) -> float:
        return LEFT + (RIGHT - LEFT) * epoch / self.num_epochs

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * value / ((self.series.highest or 1) * _HEADROOM)


def draw_png(course: Course) -> bytes:
    image = Image.new("RGB", (_SCALE * WIDTH, _SCALE * HEIGHT), PAPER)
    pen = Pen(image)
    pen.text((LEFT, 40), course.title, anchor="ls", size=22)
    for panel in lay_panels(course):
        _draw_axes(pen, panel, course)
        _draw_line(pen, panel, course)
    pen.text(((LEFT + RIGHT) / 2, HEIGHT - 8), "epoch", anchor="ms")
    file = io.BytesIO()
    image.reduce(_SCALE).save(file, "PNG")
    return file.getvalue()


def lay_panels(course: Course) -> list[Panel]:
    return [Panel(*place, series, course.num_epochs) for place, series in zip(PANELS, course.series, strict=True)]


class Pen:
    """Draws in the reduced image's pixels."""

    def __init__(self, image: Image.Image) -> None:
        self._draw = ImageDraw.Draw(image)

    def line(self, points: list[tuple[float, float]], colour: tuple[int, int, int], width: int) -> None:
        scaled = [(_SCALE * x, _SCALE * y) for x, y in points]
        self._draw.line(scaled, colour, _SCALE * width, joint="curve")

    def text(self, place: tuple[float, float], text: str, *, anchor: str, size: int = 16) -> None:
        font = ImageFont.load_default(_SCALE * size)
        self._draw.text((_SCALE * place[0], _SCALE * place[1]), text, INK, font, anchor)


def _draw_axes(pen: Pen, panel: Panel, course: Course) -> None:
    pen.text((LEFT, panel.top - 12), panel.series.in_words(), anchor="ls")
    for value in (panel.series.highest, panel.series.highest / 2):
        pen.line([(LEFT, panel.y(value)), (RIGHT, panel.y(value))], FAINT, 1)
    for value in {0.0, panel.series.highest / 2, panel.series.highest}:
        pen.text((LEFT - 12, panel.y(value)), number(value), anchor="rm")
    for epoch in course.borders:
        pen.line([(panel.x(epoch), panel.top), (panel.x(epoch), panel.bottom)], BORDER, 1)
    for epoch in tick_epochs(course.num_epochs, 12):
        pen.line([(panel.x(epoch), panel.bottom), (panel.x(epoch), panel.bottom + 6)], INK, 1)
        pen.text((panel.x(epoch), panel.bottom + 12), number(epoch), anchor="mt")
    pen.line([(LEFT, panel.top), (LEFT, panel.bottom), (RIGHT, panel.bottom)], INK, 1)


def _draw_line(pen: Pen, panel: Panel, course: Course) -> None:
    """A step's value holds until the next one's."""
    points: list[tuple[float, float]] = []
    for (start, end), value in zip(pairwise((*course.epochs, course.num_epochs)), panel.series.values, strict=True):
        points += [(panel.x(start), panel.y(value)), (panel.x(end), panel.y(value))]
    pen.line(points, LINE, 3)

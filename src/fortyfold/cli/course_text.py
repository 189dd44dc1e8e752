"""A course as text: three charts of block characters, one above another, for a terminal or a file."""

from bisect import bisect_right

from fortyfold.cli.course import Course, Series, number, tick_epochs

ROWS = (8, 3, 3)  # of each chart
BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS_A_TICK = 9


def draw_text(course: Course, width: int) -> str:
    """`course` in lines of at most `width` characters; a phase's border is a dotted line."""
    margin = max(len("epoch"), *(len(number(series.highest)) for series in course.series))
    columns = width - margin - 2
    lines = [course.title[:width]]
    for series, rows in zip(course.series, ROWS, strict=True):
        lines += ["", series.in_words()[:width], *_chart(course, series, rows, margin, columns)]
    return "\n".join(line.rstrip() for line in [*lines, _epochs(course, margin, columns)]) + "\n"


def _chart(course: Course, series: Series, rows: int, margin: int, columns: int) -> list[str]:
    eighths = _heights(course, series, rows * 8, columns)
    borders = _columns_of(course, course.borders, columns)
    lines = []
    for row in range(rows):
        below = 8 * (rows - 1 - row)
        blocks = (BLOCKS[min(8, max(0, height - below))] for height in eighths)
        cells = ("┊" if block == " " and column in borders else block for column, block in enumerate(blocks))
        label, edge = (number(series.highest), "┤") if row == 0 else ("", "│")
        lines.append(f"{label:>{margin}} {edge}{''.join(cells)}")
    axis = "".join("┴" if column in borders else "─" for column in range(columns))
    return [*lines, f"{0:>{margin}} └{axis}"]


def _heights(course: Course, series: Series, full: int, columns: int) -> list[int]:
    """The series in each column, from 0 to `full`."""
    middles = ((column + 0.5) * course.num_epochs / columns for column in range(columns))
    values = (series.values[bisect_right(course.epochs, epoch) - 1] for epoch in middles)
    return [round(full * value / (series.highest or 1)) for value in values]


def _columns_of(course: Course, epochs: tuple[int, ...], columns: int) -> set[int]:
    return {int(epoch * columns / course.num_epochs + 0.5) for epoch in epochs}


def _epochs(course: Course, margin: int, columns: int) -> str:
    line = f"{'epoch':>{margin}} "
    for epoch in tick_epochs(course.num_epochs, columns // _COLUMNS_A_TICK):
        place = margin + 2 + int(epoch * columns / course.num_epochs + 0.5)
        text = number(epoch)
        line = line.ljust(min(place - len(text) // 2, margin + 2 + columns - len(text))) + text
    return line

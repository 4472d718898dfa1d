"""Line charts as inline SVG. Knows points and names; not what they mean."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 620, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 34, 40
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#9c6b4e", "#ff8ab7", "#97bbf5")
_MAX_NAMES = len(COLOURS)
_TICKS = 5


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        points: x and y, by x.
        is_filled: the area below it is, too.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_filled: bool = False


def stacked(series: Sequence[Series]) -> list[Series]:
    """The same, each on top of those before; all have the same x. The topmost comes first, so that lower ones cover it."""
    result: list[Series] = []
    sums = [0.0] * len(series[0].points) if series else []
    for one in series:
        sums = [below + y for below, (_, y) in zip(sums, one.points, strict=True)]
        result.append(Series(one.name, [(x, y) for (x, _), y in zip(one.points, sums, strict=True)], is_filled=True))
    return result[::-1]


def line_chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, x_high: float = 0.0, y_high: float = 0.0
) -> str:
    """An SVG element. Both axes begin at 0 and go to x_high and y_high at least, so that neighbours can have the same ones."""
    x_high = max([x_high, 1e-9, *(x for one in series for x, _ in one.points)])
    y_high = max([y_high, *(y for one in series for _, y in one.points)])
    x_ticks, y_ticks = ticks(0.0, x_high), ticks(0.0, y_high)
    y_high = y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = x / x_high * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + across, _HEIGHT - _BOTTOM - y / y_high * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="14">{html.escape(title)}</text>',
    ]
    for y in y_ticks:
        _, at = place(0.0, y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    for x in x_ticks:
        if x <= x_high:
            at, _ = place(x, 0.0)
            parts.append(f'<text class="tick" x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_number(x)}</text>')
    parts.append(f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{html.escape(x_label)}</text>')
    parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{_TOP - 6}" text-anchor="end">{html.escape(y_label)}</text>')
    for number, one in enumerate(series):
        parts.append(_drawn(one, COLOURS[number % _MAX_NAMES], [place(x, y) for x, y in one.points]))
    if not any(one.points for one in series):
        parts.append(f'<text class="tick" x="{_WIDTH // 2}" y="{_HEIGHT // 2}" text-anchor="middle">nothing to show</text>')
    parts.append(_legend([one.name for one in series]))
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low on; the last one is not below high."""
    span = max(high - low, 1e-9)
    rough = span / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.floor(low / step)
    return [step * number for number in range(first, math.ceil(high / step - 1e-9) + 1)] if high > low else [low, low + step]


def _drawn(one: Series, colour: str, places: Sequence[tuple[float, float]]) -> str:
    if not places:
        return ""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    name = html.escape(one.name)
    if one.is_filled:
        floor = _HEIGHT - _BOTTOM
        area = f"{places[0][0]:.1f},{floor} {line} {places[-1][0]:.1f},{floor}"
        return f'<polygon points="{area}" fill="{colour}" stroke="none"><title>{name}</title></polygon>'
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"><title>{name}</title></polyline>'


def _legend(names: Sequence[str]) -> str:
    parts, at = [], float(_WIDTH - _RIGHT)
    for number, name in reversed(list(enumerate(names[:_MAX_NAMES]))):
        at -= 7.0 * len(name) + 20
        parts.append(f'<rect x="{at:.0f}" y="6" width="10" height="10" rx="2" fill="{COLOURS[number]}"/>')
        parts.append(f'<text class="tick" x="{at + 14:.0f}" y="15">{html.escape(name)}</text>')
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"

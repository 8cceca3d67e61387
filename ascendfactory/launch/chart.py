"""Line charts as inline SVG, and the loss curve as PNG: no script, no network, legible in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_HEIGHT = 260
HALF_WIDTH, FULL_WIDTH = 560, 1140  # pixels of the page: text in a picture is then as large as the text around it
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 34
_MAX_POINTS = 1500  # a line is at most 1140 pixels wide; more points only weigh


@dataclass(frozen=True)
class Line:
    """One curve.

    Args:
        title: its name in the legend.
        points: (x, y), x rising; points with a y that is not finite are left out.
        style: `main` (solid), `faint` (thin, the raw values behind a smoothed curve) or `dots` (marked points).
    """

    title: str
    points: Sequence[tuple[float, float]]
    style: str = "main"


def smooth(points: Sequence[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Exponential moving average with bias correction (Adam's, arXiv:1412.6980, section 3)."""
    mean, norm, out = 0.0, 0.0, []
    for x, y in points:
        if math.isfinite(y):
            mean, norm = weight * mean + (1 - weight) * y, weight * norm + (1 - weight)
            out.append((x, mean / norm))
    return out


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """About `num` round values (1, 2, 2.5 or 5 times a power of ten apart) from low to high."""
    if high <= low:
        return [low]
    rough = (high - low) / num
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number_text(value: float) -> str:
    """A tick's label: short, with K, M and G for large values."""
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(value) >= size:
            return f"{value / (size if letter != 'K' else 1e3):.4g}{letter}"
    return f"{value:.4g}"


def svg_chart(title: str, lines: Sequence[Line], *, width: int = HALF_WIDTH, from_zero: bool = False) -> str:
    """A chart over steps, or "" where no line has a finite point.

    Args:
        title: the heading.
        lines: what is drawn; the legend names them where there are several.
        width: of the picture, pixels.
        from_zero: the y axis begins at 0, so that small changes look small.
    """
    kept = [Line(line.title, _thin([p for p in line.points if math.isfinite(p[1])]), line.style) for line in lines]
    kept = [line for line in kept if line.points]
    if not kept:
        return ""
    xs = [x for line in kept for x, _ in line.points]
    ys = [y for line in kept for _, y in line.points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_low, y_high = _padded(min([0.0, *ys]) if from_zero else min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (width - _LEFT - _RIGHT),
            _TOP + (y_high - y) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_axes((x_low, x_high), (y_low, y_high), width, place),
    ]
    for index, line in enumerate(kept):
        places = [place(x, y) for x, y in line.points]
        colour = f"c{index if line.style != 'faint' else 0}"
        if line.style == "dots" or len(places) == 1:
            parts += [f'<circle class="{colour} dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{colour} {line.style}" points="{path}"/>')
    parts.append("</svg>")
    named = [(i, line) for i, line in enumerate(kept) if line.style != "faint"]
    legend = "".join(f'<span class="key k{i}">{escape(line.title)}</span>' for i, line in reversed(named)) if len(named) > 1 else ""
    return f"<figure><figcaption>{escape(title)}{legend}</figcaption>{''.join(parts)}</figure>"


def _axes(
    x_range: tuple[float, float], y_range: tuple[float, float], width: int, place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    parts = []
    for y in ticks(*y_range):
        _, at = place(x_range[0], y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 8}" y="{at + 4:.1f}">{number_text(y)}</text>')
    for x in ticks(*x_range, num=width // 90):
        if x == int(x):
            at, _ = place(x, y_range[0])
            parts.append(f'<text class="x" x="{at:.1f}" y="{_HEIGHT - 12}">{number_text(x)}</text>')
    return parts


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (low - room if low < 0 or low - room > 0 else 0.0), high + room


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MAX_POINTS` points: of each bucket the lowest and the highest, so that spikes stay visible."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / (_MAX_POINTS // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def write_png(path: Path, title: str, lines: Sequence[Line]) -> None:
    """The same lines as a PNG picture."""
    from matplotlib.figure import Figure  # a second to import: only when a run has ended

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    colours = ["#2f6fed", "#e5782b", "#2a9d5c"]
    for index, line in enumerate(lines):
        points = [p for p in line.points if math.isfinite(p[1])]
        faint = line.style == "faint"
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colours[0 if faint else index % len(colours)],
            alpha=0.3 if faint else 1.0,
            linewidth=1.0 if faint else 1.8,
            marker="o" if line.style == "dots" or len(points) == 1 else None,
            markersize=4,
            label=None if faint else line.title,
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)

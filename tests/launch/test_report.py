"""The report: complete, self-contained, safe with any text, and right in its lines."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendfactory.launch.chart import Line, number_text, smooth, svg_chart, ticks
from ascendfactory.launch.report import duration_text, write_report
from ascendfactory.launch.runs import create_run
from tests.examples import make
from tests.launch.test_runs import write_steps


class Balanced(HTMLParser):
    """Checks that every element is closed."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = create_run(make(tmp_path / "run"))
    write_steps(made, *range(1, 51), num_steps=50)
    write_steps(made, 51, num_steps=51, eval_loss=1.25, mfu=0.4)
    (made / "samples.json").write_text(json.dumps([{"prompt": "<script>", "before": "no", "after": "yes & more"}]))
    (made / "provenance.json").write_text(json.dumps({"python": "3.11", "counts": {"samples": 1234, "dropped": 0}, "git": None}))
    return made


def test_a_report_shows_everything_and_needs_nothing_else(folder: Path) -> None:
    page = write_report(folder).read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    for text in ("Loss", "Learning rate", "Gradient norm", "51/51", "40.0%", "<script>", "yes & more", "1,234", "3.11", "<b>escaped</b>"):
        assert text in parser.text
    assert "optim.lr" in parser.text
    assert "3.00\u00a0GiB" in parser.text  # the sum of the memory terms
    assert "dropped" not in parser.text
    assert not re.search(r"(?:src|href)=|url\(|https?:", page)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_headings_follow_the_locale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    page = write_report(folder).read_text()
    assert '<html lang="zh">' in page
    for text in ("学习率", "训练前后的回答", "为何如此计划", "设置"):
        assert text in page


def test_a_run_without_steps_has_a_report_without_charts(tmp_path: Path) -> None:
    page = write_report(create_run(make(tmp_path / "run"))).read_text()
    assert "<svg" not in page
    assert not (tmp_path / "run" / "loss.png").exists()


def test_a_line_goes_through_its_points() -> None:
    svg = svg_chart("t", [Line("a", [(0, 0.0), (50, 1.0), (100, 0.5)])])
    found = re.search(r'points="([^"]+)"', svg)
    assert found
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in found[1].split()]
    assert (x0, x1, x2) == (64.0, 304.0, 544.0)
    assert y1 < y2 < y0
    assert (y0 - y2) * 2 == pytest.approx(y0 - y1, abs=0.2)


def test_values_that_are_not_finite_leave_a_gap_not_a_crash() -> None:
    assert "nan" not in svg_chart("t", [Line("a", [(1, math.nan), (2, 1.0), (3, math.inf)])])
    assert svg_chart("t", [Line("a", [(1, math.nan)])]) == ""


def test_spikes_survive_thinning() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 100.0)
    svg = svg_chart("t", [Line("a", points)])
    assert len(svg) < 60_000
    assert re.search(r",2[0-9]\.[0-9]", svg)  # near the top of the picture


def test_smoothing_starts_without_bias() -> None:
    assert smooth([(1, 3.0), (2, 3.0), (3, 3.0)]) == [(1, pytest.approx(3.0)), (2, pytest.approx(3.0)), (3, pytest.approx(3.0))]
    assert smooth([(1, 0.0), (2, 1.0)], 0.5)[1][1] == pytest.approx(2 / 3)  # (0.25·0 + 0.5·1) / 0.75


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_few_and_inside(low: float, width: float) -> None:
    high = low + width
    found = ticks(low, high)
    if high - low > 1e-9 * max(1.0, abs(low)):
        assert len(found) <= 7
        assert all(low - 1e-6 * width <= t <= high + 1e-6 * width for t in found)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1500, "1500"), (25_000, "25K"), (3e6, "3M"), (2.5e9, "2.5G"), (1e-5, "1e-05")])
def test_tick_labels_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "4 s"), (59.6, "1 min 0 s"), (3599.0, "59 min 59 s"), (7800, "2 h 10 min")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text

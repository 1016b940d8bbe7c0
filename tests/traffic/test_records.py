"""What records add up to, by hand and by NumPy."""

import numpy as np
import pytest

from localllm.errors import BadRequest
from localllm.traffic import plot
from localllm.traffic.records import Goal, Record, Spread, Summary, percentile
from localllm.traffic.workload import Scale, Span, Workload

TEN = Record(0, 0, 1.0, [1.5, 1.6, 2.0], 2.4, prompt_tokens=7, output_tokens=10)


def test_figures_of_one_request_by_hand() -> None:
    assert TEN.milliseconds("ttft") == pytest.approx(500)
    assert TEN.milliseconds("e2el") == pytest.approx(1400)
    assert TEN.milliseconds("tpot") == pytest.approx(100)  # 900 ms for 9 tokens
    assert TEN.gaps == pytest.approx([100, 400])
    assert TEN.milliseconds("itl") == pytest.approx(250)


def test_requests_without_text_have_no_figures() -> None:
    empty, single = Record(0, 0, 0.0, ended_at=1.0), Record(0, 0, 0.0, [0.5], 1.0)
    assert [empty.milliseconds(m) for m in ("ttft", "tpot", "itl", "e2el")] == [None] * 4
    assert single.milliseconds("ttft") == pytest.approx(500)
    assert single.milliseconds("tpot") is None


def test_only_finished_requests_count() -> None:
    failed = Record(0, 0, 0.0, [0.1], 0.2, output_tokens=5, error="cut off")
    running = Record(0, 0, 0.0, [0.1])
    summary = Summary.of([TEN, failed, running], 2.0)
    assert (summary.completed, summary.running, summary.errors) == (1, 1, {"cut off": 1})
    flat = summary.to_json()
    assert flat["output_throughput"] == 5.0
    assert flat["total_token_throughput"] == 8.5
    assert flat["request_throughput"] == 0.5
    assert flat["mean_ttft_ms"] == pytest.approx(500)
    assert Summary.of([], 0.0).to_json()["p99_itl_ms"] is None


@pytest.mark.parametrize("count", [1, 2, 3, 100, 1001])
def test_percentiles_are_numpys(count: int) -> None:
    values = sorted(np.random.default_rng(count).exponential(size=count).tolist())
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.quantile(values, share))
    spread = Spread.of(values)
    assert spread is not None
    assert spread.median == pytest.approx(np.median(values))


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "speed:3", "ttft:x", "tpot:-1"])
def test_goals_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--goodput"):
        Goal.parse([text])


@pytest.mark.parametrize("text", ["", "0", "9-3", "a", "1-", "-1"])
def test_spans_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--prompt-tokens"):
        Span.parse(text, "--prompt-tokens")


def test_scale_is_the_line_through_two_prompts() -> None:
    scale = Scale.fit((10, 40), (20, 70))
    assert scale == Scale(3.0, 10.0)
    assert scale.num_words(100, is_first=True) == 30
    assert scale.num_words(100, is_first=False) == 33
    assert Scale.fit((10, 0), (20, 0)) == Scale()  # a server that does not count


def test_workloads_that_do_not_exist_are_refused() -> None:
    with pytest.raises(BadRequest, match="shared-prefix"):
        Workload("shared")
    with pytest.raises(BadRequest, match="--turns"):
        Workload(turns=0)


def test_plot_has_every_panel_and_stays_inside(tmp_path) -> None:
    from xml.etree import ElementTree

    records = [Record(i, 0, i / 10, [i / 10 + 0.1, i / 10 + 0.3], i / 10 + 0.4) for i in range(20)]
    path = tmp_path / "run.svg"
    plot.draw(path, "<model> & more", records, 3.0)
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}g")) == 4
    assert len(list(root.iter(f"{space}circle"))) == 20
    assert len(list(root.iter(f"{space}polyline"))) == 2 + 4
    for circle in root.iter(f"{space}circle"):
        assert plot.LEFT <= float(circle.get("cx")) <= plot.WIDTH - plot.RIGHT
        assert plot.TOP <= float(circle.get("cy")) <= plot.HEIGHT - plot.BOTTOM
    plot.draw(path, "nothing", [], 0.0)
    ElementTree.parse(path)


def test_plot_counts_requests_at_once_and_all_tokens() -> None:
    records = [
        Record(0, 0, 0.0, [1.0, 2.0], 4.0, output_tokens=4),
        Record(1, 0, 1.0, [2.5], None),
    ]
    levels = plot.at_once(records, 5.0)
    assert max(y for _, y in levels) == 2
    assert levels[-1] == (5.0, 0.0)
    points = plot.throughput(records, 6.0)
    assert sum(y for _, y in points) * 6.0 / len(points) == pytest.approx(5)


def test_other_pictures_than_svg_are_refused_in_advance(tmp_path) -> None:
    with pytest.raises(BadRequest, match=r"\.svg"):
        plot.check_path(tmp_path / "run.png")

"""The shape of a bench report; how fast anything is belongs to the benchmarks."""

import json
from pathlib import Path

import pytest

from localllm.config import Settings
from localllm.errors import BadRequest
from localllm.offline.bench import BenchOptions, Row, bench, row_of


def test_every_combination_gives_a_row(tiny_model, tmp_path: Path) -> None:
    options = BenchOptions(
        prompt=24,
        generate=6,
        depths=(0, 40),
        batch_sizes=(1, 3),
        repetitions=2,
        backend="reference",
        read_bandwidth=True,
    )
    report = bench(tiny_model("gemma3-dense"), options, Settings(cache_dir=tmp_path))
    parsed = json.loads(report.to_json())
    tests = [row["test"] for row in parsed["rows"]]
    assert tests == ["pp24", "tg6", "tg6b3", "pp24@d40", "tg6@d40", "tg6b3@d40"]
    assert all(row["tokens_per_second"] > 0 for row in parsed["rows"])
    assert all(row["spread"] >= 0 for row in parsed["rows"])
    assert parsed["load_seconds"] > 0
    assert parsed["first_token_seconds"] > 0
    assert parsed["read_bandwidth"] is None
    for test in tests:
        assert f"| {test} |" in report.to_markdown()


def test_a_count_of_zero_gives_no_row(tiny_model, tmp_path: Path) -> None:
    model, settings = tiny_model("llama-dense"), Settings(cache_dir=tmp_path)
    options = BenchOptions(prompt=0, generate=4, depths=(20,), repetitions=1, backend="reference")
    assert [r.test for r in bench(model, options, settings).rows] == ["tg4@d20"]


def test_the_median_and_the_farthest_run_are_reported() -> None:
    # 100 tokens in 1, 2 and 4 seconds: 100, 50, 25 tokens a second.
    assert row_of("pp100", 100, [1.0, 4.0, 2.0]) == Row("pp100", 50.0, 50.0)


def test_a_context_that_the_model_does_not_have_is_refused(tiny_model, tmp_path: Path) -> None:
    options = BenchOptions(depths=(10_000_000,), backend="reference")
    with pytest.raises(BadRequest, match="positions"):
        bench(tiny_model("llama-dense"), options, Settings(cache_dir=tmp_path))


def test_negative_counts_are_refused() -> None:
    with pytest.raises(BadRequest):
        BenchOptions(prompt=-1)

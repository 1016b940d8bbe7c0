import math

import pytest

from localllm.durations import format_duration, parse_duration, parse_keep_alive
from localllm.errors import BadRequest


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("0", 0), ("0s", 0), ("-1s", -1), ("1.5s", 1.5), ("300ms", 0.3)],
)
def test_go_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("300", 'time: missing unit in duration "300"'),
        ("1h30", 'time: missing unit in duration "1h30"'),
        ("x", 'time: invalid duration "x"'),
        ("", 'time: invalid duration ""'),
        ("5 m", 'time: invalid duration "5 m"'),
    ],
)
def test_other_durations_are_refused_in_go_words(text: str, message: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_duration(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        (300, 300),
        (0.5, 0.5),
        (-1, math.inf),
        ("-1m", math.inf),
        ("-1", math.inf),
        ("300", 300),
        ("9" * 400, math.inf),
        ("9" * 400 + "s", math.inf),
    ],
)
def test_keep_alive_takes_numbers_and_durations(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", [True, [], {}])
def test_keep_alive_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="Unsupported type: "):
        parse_keep_alive(value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((4.2, "4.2s"), (0.045, "45ms"), (0.0453, "45.3ms"), (62.5, "1m2.5s"), (0, "0s")),
        *((3603, "1h0m3s"), (1e-6, "1µs"), (5e-9, "5ns"), (60, "1m0s"), (0.9999, "999.9ms")),
    ],
)
def test_durations_print_as_go_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text

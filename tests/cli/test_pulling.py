"""How a pull looks."""

import io
import re

import pytest

from localllm.cli import pulling
from localllm.cli.pulling import PlainBoard, TerminalBoard, bar_line, remaining_text

DIGEST = "sha256:" + "6a0746a1ec1a" + "0" * 52


def chunk(completed: int, rate: int = 0, total: int = 4_700_000_000) -> dict[str, object]:
    found = {"status": "pulling 6a0746a1ec1a", "digest": DIGEST, "total": total}
    return {**found, "completed": completed, "bytes_per_second": rate}


@pytest.mark.parametrize(
    ("completed", "rate", "columns", "left", "right"),
    [
        (4_700_000_000, 0, 60, "100% ▕" + 24 * "█" + "▏", " 4.7 GB"),
        (
            2_350_000_000,
            50_000_000,
            80,
            " 50% ▕" + 11 * "█" + 12 * " " + "▏",
            " 2.4 GB/4.7 GB  50 MB/s  47s",
        ),
        (0, 0, 60, "  0% ▕" + 20 * " " + "▏", " 0 B/4.7 GB"),
        (0, 0, 40, "  0% ", " 0 B/4.7 GB"),
    ],
)
def test_bar_fills_the_line(completed: int, rate: int, columns: int, left: str, right: str) -> None:
    assert bar_line(chunk(completed, rate), columns) == f"pulling 6a0746a1ec1a: {left}{right}"


@pytest.mark.parametrize("columns", range(1, 200, 7))
@pytest.mark.parametrize("completed", [0, 1, 3_333_333_333, 4_700_000_000])
def test_bar_never_wraps(columns: int, completed: int) -> None:
    assert len(bar_line(chunk(completed, 123), columns)) <= columns


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (250, "4m10s"), (3720, "1h2m"), (360_000, "99h+"), (1e12, "99h+")],
)
def test_time_left(seconds: float, text: str) -> None:
    assert remaining_text(seconds) == text


def test_log_has_each_status_once_and_each_tenth_once() -> None:
    stream = io.StringIO()
    board = PlainBoard(stream)
    for status in ("pulling manifest", "pulling manifest"):
        board.show({"status": status})
    for completed in range(0, 101):
        board.show(chunk(completed, 1, 100))
    board.show({"status": "success"})
    board.finish()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "pulling manifest"
    assert lines[-1] == "success"
    assert [line.split()[2] for line in lines[1:-1]] == [f"{n}%" for n in range(0, 101, 10)]


class Screen:
    """What a terminal shows of a board's output: lines, cursor-up, clearing."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = 0

    def write(self, text: str) -> None:
        for code, up, end, plain in re.findall(r"(\x1b\[(\d*)([AKJ]))|([^\x1b]+)", text):
            if end == "A":
                self.row -= int(up)
            elif end == "J":
                self.lines[self.row :] = [""]
            elif not code:
                self._write(plain)

    def _write(self, text: str) -> None:
        for part in re.findall(r"\n|[^\n\r]+", text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            else:
                self.lines[self.row] = part

    def flush(self) -> None:
        pass


def test_terminal_shows_every_file_and_status_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "DRAW_SECONDS", 0)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: (80, 24))
    screen = Screen()
    board = TerminalBoard(screen)  # type: ignore[arg-type]
    board.show({"status": "pulling manifest"})
    for completed in range(0, 4_700_000_001, 470_000_000):
        board.show(chunk(completed, 1_000_000))
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        board.show({"status": status})
    board.finish()
    assert [line.split(":")[0] for line in screen.lines] == [
        *("pulling manifest", "pulling 6a0746a1ec1a", "verifying sha256 digest"),
        *("writing manifest", "success", ""),
    ]

"""Which request a log line is about.

The server takes a client's `X-Request-Id` or makes one; it follows the request through tasks, and
over the wire into the runner's threads. A filter on the log's handler puts it into every line.
"""

import logging
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar

HEADER = "x-request-id"
FORMAT = "%(levelname)s %(name)s%(request)s: %(message)s"
# What is safe in a header and a log line, and long enough for every scheme in use.
ACCEPTED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")

current: ContextVar[str] = ContextVar("request_id", default="")


def accept(given: str) -> str:
    """The id that a client gave, or a new one if it gave none or one that cannot be logged."""
    return given if ACCEPTED.fullmatch(given) else secrets.token_hex(8)


class RequestFilter(logging.Filter):
    """Adds ` [id]` as `request` to records.

    numbers  ids by the numbers under which other threads log of requests (as `extra`'s `number`)
    """

    def __init__(self, numbers: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._numbers = numbers or {}

    def filter(self, record: logging.LogRecord) -> bool:
        found = self._numbers.get(getattr(record, "number", "")) or current.get()
        record.request = f" [{found}]" if found else ""
        return True

"""Times as Ollama writes them: RFC 3339, and durations in nanoseconds."""

import time
from datetime import datetime, timedelta

# What Go's longest duration adds to now: a pinned model never expires.
FOREVER = timedelta(days=106_751)


def now_text() -> str:
    """Now in UTC with nanoseconds: `2026-01-31T12:00:00.123456789Z`."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    fraction = f".{nanoseconds:09}".rstrip("0").rstrip(".")
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + fraction + "Z"


def local_text(timestamp: float) -> str:
    """A time stamp with the local offset."""
    return datetime.fromtimestamp(timestamp).astimezone().isoformat()


def nanoseconds(seconds: float) -> int:
    """A duration as responses have it."""
    return round(seconds * 1e9)


def expiry_text(seconds_left: float) -> str:
    """When something that lasts for `seconds_left` ends, with the local offset."""
    span = min(timedelta(seconds=min(seconds_left, 1e9)), FOREVER)
    if seconds_left > FOREVER.total_seconds():
        span = FOREVER
    return (datetime.now().astimezone() + span).isoformat()

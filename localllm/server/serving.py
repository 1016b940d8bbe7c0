"""The fields by which a request says how it wants to be served; every dialect may have them.

Not here: what becomes of them (engine/).
"""

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from localllm.durations import parse_keep_alive
from localllm.errors import BadRequest
from localllm.server.body import BOOL, INT, STRING, Kind
from localllm.server.state import state_of

LONGEST_TIMEOUT = 1e9  # seconds; event loops cannot count much further

TURN_FIELDS: Mapping[str, Kind] = {
    **{"priority": INT, "timeout": Kind((int, float), "float64"), "cache_salt": STRING},
}
SERVING_FIELDS: Mapping[str, Kind] = {
    **TURN_FIELDS,
    **{"exact": BOOL, "cache_prompt": BOOL, "speculate": BOOL},
}


def serving(request: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `messages.Generate`. Raises BadRequest."""
    return {
        **turn(request, fields),
        "exact": fields.get("exact", state_of(request).settings.exact),
        "cache_prompt": fields.get("cache_prompt", True),
        "speculate": fields.get("speculate", True),
    }


def keep_alive_of(fields: Mapping[str, Any]) -> float | None:
    """Seconds that the request wants its model kept; None: as is. Raises BadRequest."""
    return parse_keep_alive(fields["keep_alive"]) if "keep_alive" in fields else None


def turn(request: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that all requests for a model have. The time of a `timeout` begins now.

    Raises BadRequest.
    """
    timeout = fields.get("timeout")
    if timeout is not None and timeout <= 0:
        raise BadRequest(f"timeout must be more than 0 seconds, got {timeout:g}")
    # Callers with different keys share nothing, whatever salt they ask for.
    salt = (request.state.caller, fields.get("cache_salt", ""))
    return {
        "salt": ":".join(salt) if any(salt) else "",
        "priority": fields.get("priority", 0),
        "deadline": None if timeout is None else time.monotonic() + min(timeout, LONGEST_TIMEOUT),
    }

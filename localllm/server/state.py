"""What the handlers share: the daemon, the catalog, the pulls, the secret, how to end the server."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from localllm.catalog import Catalog, Resolved
from localllm.compiling import Compiler
from localllm.config import Settings
from localllm.daemon import Daemon
from localllm.pull.apart import Pulls

SECRET_HEADER = "x-localllm-secret"


@dataclass(frozen=True, slots=True)
class State:
    """Set once, when the application is made."""

    settings: Settings
    daemon: Daemon
    catalog: Catalog
    pulls: Pulls
    compiler: Compiler
    secret: str
    stop: Callable[[], None]
    is_background: bool = False

    def is_trusted(self, request: Request) -> bool:
        """Whether the caller can read the data folder, and so is the user this daemon runs as."""
        given = request.headers.get(SECRET_HEADER, "")
        return hmac.compare_digest(given.encode(), self.secret.encode())

    def resolve(self, request: Request, model: str) -> Resolved:
        """The model that a name means to the caller. Raises BadRequest or ModelNotFound."""
        return self.catalog.resolve(model, is_trusted=self.is_trusted(request))


def state_of(request: Request) -> State:
    state: State = request.app.state.localllm
    return state

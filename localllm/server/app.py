"""The route list, and running it: sockets, logging, start and end of the daemon."""

import asyncio
import contextlib
import logging
import logging.handlers
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from localllm.address import Address
from localllm.catalog import Catalog
from localllm.compiling import Compiler
from localllm.config import Settings
from localllm.daemon import Daemon, StartRunner, runner_starter
from localllm.errors import DaemonUnavailable, LocalLLMError
from localllm.identity import Build, read_secret, version_body
from localllm.launch import Launched
from localllm.pull.apart import Pulls
from localllm.request_id import FORMAT, RequestFilter
from localllm.server import embed, metrics, models, ollama, openai, pull, tokens
from localllm.server.guard import Guard, Keys
from localllm.server.respond import error_response, json_response
from localllm.server.state import State, state_of
from localllm.store import Store

LOG_BYTES = 10 << 20
NUM_LOGS = 3
# For requests that run when the daemon is told to end, and then for telling them so.
GRACE_SECONDS = 2
LAST_WORDS_SECONDS = 4
# Clients keep idle connections for some seconds and use them again: the server must not end them
# at the very moment.
KEEP_ALIVE_SECONDS = 120
NOBODY_IS_THERE = 499  # nginx's status for the log

log = logging.getLogger("localllm.server")


async def root(_: Request) -> Response:
    return PlainTextResponse("Ollama is running")


async def health(_: Request) -> Response:
    return json_response({"status": "ok"})


async def version(request: Request) -> Response:
    return json_response(request.app.state.version)


async def status(_: Request) -> Response:
    return json_response({"cloud": {"disabled": True, "source": "env"}})


async def recommendations(_: Request) -> Response:
    """GET /api/experimental/model-recommendations: there are none."""
    return json_response({"recommendations": []})


async def shutdown(request: Request) -> Response:
    """POST /api/shutdown: end an idle daemon, for who knows the secret."""
    state = state_of(request)
    if not state.is_trusted(request):
        return json_response({"error": "shutdown needs the data folder's secret"}, 403)
    if state.daemon.is_busy or state.pulls.is_busy:
        return json_response({"error": "requests are running"}, 409)
    state.stop()
    return json_response({"status": "success"})


ROUTES = (
    ("GET", "/", root),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics.metrics),
    ("GET", "/api/version", version),
    ("GET", "/api/status", status),
    ("GET", "/api/experimental/model-recommendations", recommendations),
    ("GET", "/api/tags", models.tags),
    ("GET", "/api/ps", models.ps),
    ("POST", "/api/show", models.show),
    ("POST", "/api/create", models.create),
    ("POST", "/api/copy", models.copy),
    ("DELETE", "/api/delete", models.delete),
    ("HEAD", "/api/blobs/{digest}", models.head_blob),
    ("POST", "/api/blobs/{digest}", models.post_blob),
    ("POST", "/api/pull", pull.pull),
    ("POST", "/api/push", pull.push),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/embed", embed.embed),
    ("POST", "/api/embeddings", embed.embeddings),
    ("POST", "/v1/embeddings", openai.embeddings),
    ("POST", "/api/tokenize", tokens.tokenize),
    ("POST", "/api/detokenize", tokens.detokenize),
    ("POST", "/api/shutdown", shutdown),
)


async def _plain_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: "404 page not found", 405: "405 method not allowed"}
    text = texts.get(error.status_code, str(error.detail))
    return PlainTextResponse(text, error.status_code)


async def _json_error(request: Request, error: Exception) -> Response:
    return error_response(request, error)


async def _unheard(_: Request, error: Exception) -> Response:
    """For a client that went while it was still sending."""
    return Response(status_code=NOBODY_IS_THERE)


def make_app(state: State, *, check_host: bool) -> ASGIApp:
    """The application with its guard around it."""
    handlers: dict[Any, Any] = {
        HTTPException: _plain_error,
        LocalLLMError: _json_error,
        ClientDisconnect: _unheard,
        Exception: _json_error,
    }

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await state.daemon.close()

    routes = [_route(method, path, handler) for method, path, handler in ROUTES]
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.localllm = state
    app.state.registry = None
    app.state.version = version_body(Build.current(), is_background=state.is_background)
    keys = Keys(state.settings.api_keys, state.secret)
    return Guard(app, state.settings.origins, keys, check_host=check_host)


def _route(method: str, path: str, handler: Callable[..., object]) -> Route:
    return Route(path, handler, methods=[method])


class _Server(uvicorn.Server):
    """A server whose signals are ours: both mean to stop and exit with 0.

    Running requests have a moment to end; then `end_work` gives those that are left their error,
    in their protocol's words. A second signal does so at once.
    """

    def __init__(self, config: uvicorn.Config, end_work: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._end_work = end_work
        self._hurry = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        """Stop accepting, give running requests a moment, end."""
        if self.should_exit:
            self._hurry.set()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), GRACE_SECONDS)
        await self._end_work()


def serve(
    settings: Settings,
    start_runner: StartRunner | None = None,
    *,
    is_background: bool = False,
    prepared: Launched | None = None,
    on_listening: Callable[[Address], None] | None = None,
) -> None:
    """Run the daemon until a signal ends it.

    `prepared` is a first runner that was started already: whoever starts the daemon needs it.
    Raises DaemonUnavailable if the address is taken.
    """
    _set_up_logging(settings, is_background=is_background)
    address = Address.parse(settings.host)
    with _listen(address) as sock:
        address = replace(address, port=sock.getsockname()[1])
        with contextlib.suppress(ImportError):
            import uvloop

            asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        asyncio.run(
            _serve(
                settings,
                address,
                sock,
                start_runner,
                on_listening,
                prepared=prepared,
                is_background=is_background,
            )
        )


async def _serve(
    settings: Settings,
    address: Address,
    sock: socket.socket,
    start_runner: StartRunner | None,
    on_listening: Callable[[Address], None] | None,
    *,
    prepared: Launched | None,
    is_background: bool,
) -> None:
    daemon = Daemon(settings, start_runner or runner_starter(settings))
    if prepared is not None:
        daemon.prepare(prepared)
    store = Store(settings.data_dir / "models")
    servers: list[_Server] = []
    state = State(
        settings,
        daemon,
        Catalog(store),
        Pulls(store),
        Compiler(settings),
        read_secret(settings.data_dir),
        stop=lambda: servers[0].stop(),
        is_background=is_background,
    )
    config = uvicorn.Config(
        make_app(state, check_host=address.is_loopback),
        loop="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS + LAST_WORDS_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    servers.append(_Server(config, daemon.close))
    log.info("listening on %s, models in %s", address, store.root)
    for warning in _warnings(settings, address):
        log.warning("%s", warning)
    if on_listening is not None:
        on_listening(address)
    if not settings.no_prune:
        store.prune()
    await servers[0].serve(sockets=[sock])


def _warnings(settings: Settings, address: Address) -> list[str]:
    """What the log's reader would want to know before others do."""
    warnings = list(settings.problems)
    if not address.is_loopback and not settings.api_keys:
        place = f"{address.bind_host}:{address.port}"
        warnings.append(
            f"everybody who reaches {place} can use this daemon and change its models; "
            "set LOCALLLM_API_KEY, or listen on 127.0.0.1"
        )
    return warnings


def _listen(address: Address) -> socket.socket:
    """A socket that listens on the address. Raises DaemonUnavailable."""
    family = socket.AF_INET6 if ":" in address.bind_host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address.bind_host, address.port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise DaemonUnavailable(
            f"cannot listen on {address.bind_host}:{address.port}: {error.strerror}"
        ) from error
    return sock


def _set_up_logging(settings: Settings, *, is_background: bool) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if is_background:
        path = settings.data_dir / "logs" / "daemon.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=NUM_LOGS
        )
    handler.setFormatter(logging.Formatter(f"%(asctime)s {FORMAT}"))
    handler.addFilter(RequestFilter())
    logging.basicConfig(
        level=logging.DEBUG if settings.debug else logging.INFO, handlers=[handler], force=True
    )
    # The HTTP client would log whole URLs, and those that files come from hold signatures.
    for name in ("asyncio", "uvicorn", "httpx2", "httpcore2", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)

"""Pulls for a program that has an event loop: each in a thread, as a stream of events."""

import asyncio
import threading
from collections.abc import AsyncGenerator

from localllm.config import Settings
from localllm.errors import Busy
from localllm.pull.events import Event
from localllm.store import Store

MAX_PULLS = 16


class Pulls:
    """Pulls into one store. Those that want the same file share it (staging.py)."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._num_running = 0

    @property
    def is_busy(self) -> bool:
        """Whether a pull is running."""
        return self._num_running > 0

    async def events(self, name: str, *, is_insecure: bool = False) -> AsyncGenerator[Event, None]:
        """Pull a model. Closing the iterator cancels; what was fetched is kept.

        Raises what `pull` raises, and Busy if there are too many at once.
        """
        if self._num_running >= MAX_PULLS:
            raise Busy(f"{MAX_PULLS} pulls are running; try again later")
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        cancel = threading.Event()

        def tell(item: Event | BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.put_nowait, item)

        def run() -> None:
            # The HTTP client and the Hub's take a while to import; the daemon starts without them.
            from localllm.pull.puller import pull

            try:
                pull(name, self._store, self._settings, tell, cancel, is_insecure=is_insecure)
                tell(None)
            except BaseException as error:
                tell(error)

        self._num_running += 1
        threading.Thread(target=run, name="pull", daemon=True).start()
        try:
            while (item := await news.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._num_running -= 1
            cancel.set()

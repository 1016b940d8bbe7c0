"""Connections are closed whatever happens."""

import asyncio
import gc
import socket
import warnings

import pytest
from pulling import IMPATIENT
from standin import HubStandIn

from localllm.pull.transport import Access, Http, what_failed


def test_cancel_while_connections_are_closed_leaves_none_open(hub: HubStandIn) -> None:
    async def work() -> None:
        async with Http(IMPATIENT) as http:
            await http.read(f"{hub.url}/nothing", Access(), 1000)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(work())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_failures_are_told_as_the_system_puts_them() -> None:
    """Whatever wraps them; a name that is not found most often means no network."""

    def wrapped(cause: Exception, text: str) -> Exception:
        try:
            try:
                raise cause
            except OSError as error:
                raise RuntimeError(text) from error
        except RuntimeError as error:
            return error

    refused = ConnectionRefusedError(111, "Connection refused")
    assert what_failed(wrapped(refused, "All attempts failed")) == "Connection refused"
    unknown = socket.gaierror(-2, "Name or service not known")
    expected = "Name or service not known; is this machine online?"
    assert what_failed(wrapped(unknown, "[Errno -2] Name or service not known")) == expected
    assert what_failed(RuntimeError("[Errno 5] Input error")) == "Input error"
    assert what_failed(RuntimeError()) == "RuntimeError"

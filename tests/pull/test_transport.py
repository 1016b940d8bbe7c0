"""Connections are closed whatever happens."""

import asyncio
import gc
import warnings

import pytest
from pulling import IMPATIENT
from standin import HubStandIn

from localllm.pull.transport import Access, Http


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

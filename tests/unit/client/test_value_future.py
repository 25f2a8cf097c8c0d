"""Futures that can be used as their values: pending in coroutines, resolved elsewhere."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import json
import logging
import pickle
import threading
from typing import Any

import pytest

from tinkex.client import compat
from tinkex.client.future import IO_THREADS, APIFuture
from tinkex.client.value_future import ValueFuture, wait_or_return
from tinkex.errors import InvalidInput, WrongThread
from tinkex.types import HealthResponse


def settled(value: Any) -> APIFuture[Any]:
    future: APIFuture[Any] = APIFuture()
    future.settle(value)
    return future


def failed(error: Exception) -> APIFuture[Any]:
    future: APIFuture[Any] = APIFuture()
    future.fail(error)
    return future


HEALTH = HealthResponse(status="ok")


def test_synchronous_code_receives_a_resolved_future_that_is_its_value() -> None:
    future: Any = wait_or_return(settled(HEALTH), HealthResponse)
    assert future.result() is HEALTH
    assert isinstance(future, APIFuture)
    assert isinstance(future, HealthResponse)
    assert (future.status, future == HEALTH, repr(future)) == ("ok", True, repr(HEALTH))
    assert "status" in dir(future)
    assert pickle.loads(pickle.dumps(future)) == copy.copy(future) == HEALTH
    assert concurrent.futures.wait([future], timeout=1).done == {future}
    with pytest.raises(AttributeError):
        _ = future.stat


def test_synchronous_code_raises_where_the_object_is_created() -> None:
    with pytest.raises(InvalidInput, match="no such model"):
        wait_or_return(failed(InvalidInput("no such model")), HealthResponse)


def test_coroutine_receives_a_pending_future() -> None:
    source: APIFuture[Any] = APIFuture()

    async def main() -> None:
        future: Any = wait_or_return(source, HealthResponse)
        assert not future.done()
        assert isinstance(future, HealthResponse)
        with pytest.raises(AttributeError):
            _ = future._repr_html_  # tools probe for such names; nothing may wait
        timer = threading.Timer(0.02, source.settle, [HEALTH])
        timer.start()
        assert future.status == "ok"  # waits, as scripts for 0.36 expect
        assert await future is HEALTH
        assert await asyncio.create_task(future.coroutine()) is HEALTH
        assert await asyncio.gather(future, future.result_async(1)) == [HEALTH, HEALTH]
        timer.join()

    asyncio.run(main())


def test_coroutine_raises_when_awaited() -> None:
    async def main() -> None:
        future = wait_or_return(failed(InvalidInput("no such model")), HealthResponse)
        with pytest.raises(InvalidInput):
            await future

    asyncio.run(main())


def test_use_as_a_value_raises_on_the_io_thread() -> None:
    future: Any = ValueFuture(HealthResponse)
    IO_THREADS.add(threading.get_ident())
    try:
        with pytest.raises(WrongThread) as caught:
            _ = future.status
    finally:
        IO_THREADS.discard(threading.get_ident())
    assert isinstance(caught.value, RuntimeError)


def test_cancelling_the_future_cancels_the_call() -> None:
    source: APIFuture[Any] = APIFuture()

    async def main() -> None:
        assert wait_or_return(source, HealthResponse).cancel()

    asyncio.run(main())
    assert source.cancelled()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_error_that_is_never_retrieved_is_logged(
    is_awaited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        future = wait_or_return(failed(InvalidInput("no such model")), HealthResponse)
        if is_awaited:
            with pytest.raises(InvalidInput):
                await future

    with caplog.at_level(logging.ERROR, "tinkex"):
        asyncio.run(main())
        gc.collect()
    assert [record.levelname for record in caplog.records] == ([] if is_awaited else ["ERROR"])


def test_resolved_string_is_a_string() -> None:
    name: Any = wait_or_return(settled("tinkex/tiny"), str)
    assert isinstance(name, str)
    assert isinstance(name, APIFuture)
    assert (name, name.result(), type(name.result())) == ("tinkex/tiny", "tinkex/tiny", str)
    assert json.dumps({name: [name]}) == '{"tinkex/tiny": ["tinkex/tiny"]}'
    assert "/".join([name, "x"]) == "tinkex/tiny/x"
    assert type(pickle.loads(pickle.dumps(name))) is str

    async def main() -> str:
        found: str = await name
        return found

    assert asyncio.run(main()) == "tinkex/tiny"


def test_pending_string_waits_when_it_is_used() -> None:
    async def main() -> None:
        name: Any = wait_or_return(settled("tinkex/tiny"), str)
        assert type(await name) is str
        assert (str(name), f"{name:>12}", len(name)) == ("tinkex/tiny", " tinkex/tiny", 11)
        assert name == "tinkex/tiny"
        assert "tiny" in name
        assert {name: 1}["tinkex/tiny"] == 1
        assert name.startswith("tinkex/")

    asyncio.run(main())


def test_use_as_a_value_warns_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    future: Any = wait_or_return(settled(HEALTH), HealthResponse)
    assert future.status == "ok"  # warnings are errors in this suite
    monkeypatch.setattr(compat, "WARNS_OF_DEPRECATIONS", True)
    with pytest.warns(FutureWarning, match=r"HealthResponse as the value \(.status\)") as caught:
        _ = future.status
    assert caught[0].filename == __file__

"""Work that may wait (for a disk, a planner) beside an event loop that may not.

asyncio's own threads are waited for when the process ends; nobody waits for these.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def aside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns, or raises, in a thread of its own."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        result, error = None, None
        try:
            result = work(*args, **kwargs)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=call, name="aside", daemon=True).start()
    return await done

"""`mooncake.async_store`: each call of the store as a coroutine, `async_<name>`, run by the loop's default executor."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore

_PREFIX = "async_"


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """The store's own calls work as before. Cancelling a coroutine does not stop the call that a thread is in."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Only asked for what is not there. Raises AttributeError for a name that stands for no call."""
        call = getattr(type(self), name.removeprefix(_PREFIX), None)
        if not name.startswith(_PREFIX) or not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(call)
        async def in_thread(*args: Any, **kwargs: Any) -> Any:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, functools.partial(call, self, *args, **kwargs))

        return in_thread

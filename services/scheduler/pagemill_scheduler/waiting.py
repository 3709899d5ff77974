"""The queue of requests that are not running: first come first served within equal priority."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pagemill_scheduler.request import Request


class WaitingQueue:
    """Sorted by ``Request.rank``, which never changes: a preempted request goes back to where its arrival puts it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._find(request) is not None

    def add(self, request: Request) -> None:
        if not self._requests or self._requests[-1].rank < request.rank:
            self._requests.append(request)
        else:
            insort(self._requests, request, key=lambda r: r.rank)

    def remove(self, request: Request) -> None:
        """
        Raises:
            RuntimeError: it is not in the queue.
        """
        index = self._find(request)
        if index is None:
            raise RuntimeError(f"request {request.request_id} is not in the waiting queue")
        del self._requests[index]

    def remove_first(self, requests: list[Request]) -> None:
        """Remove ``requests``, which stand in the queue in this order and, mostly, at its head."""
        count = len(requests)
        if self._requests[:count] == requests:
            del self._requests[:count]
        else:
            for request in requests:
                self.remove(request)

    def _find(self, request: Request) -> int | None:
        index = bisect_left(self._requests, request.rank, key=lambda r: r.rank)
        found = index < len(self._requests) and self._requests[index] is request
        return index if found else None

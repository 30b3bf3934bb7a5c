"""The store of keys that ranks talk over, asked by a thread of its own, so that every answer has a bound.

A client of torch's TCPStore waits without end for a server that hangs or is cut off, `wait` with a timeout included
(measured, torch 2.13). So whoever asks here waits for another thread, and gives up; that thread ends with its client.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from simckpt.errors import LostError

ANSWER = 30.0  # [s] a server is given for an answer, which it usually has within a millisecond

_CONNECT = 1 / 3  # of an answer's time for a connection, for torch tries for up to two and a half times as long

T = TypeVar("T")
_Calls = SimpleQueue[tuple[Callable[[Any], Any], "Future[Any]"] | None]


class Keys:
    """A connection to a store of keys, for all threads of a process: nothing here waits for a key.

    After a failure the next call connects anew, for the server may be within reach again.

    Args:
        store: of torch, whose server is within reach now; it is not used itself.
        prefix: of all keys.
        answer: how long an answer may take [s].

    Raises:
        LostError: the server is out of reach.
    """

    def __init__(self, store: Any, prefix: str, *, answer: float = ANSWER) -> None:
        self._source = store
        self._prefix = prefix
        self._answer = answer
        self._lock = threading.Lock()
        self._calls: _Calls | None = None
        _all.add(self)
        self._ask(lambda own: None)

    def set(self, key: str, value: str) -> None:
        """Sets a key; a store does not answer to that, so that it may be lost without an error."""
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> str:
        """Returns the value of a key that is there."""
        return _text(self._ask(lambda store: store.get(key)))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there."""
        return bool(self._ask(lambda store: store.check(list(keys))))

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """Returns the values of keys that are there."""
        return [_text(each) for each in self._ask(lambda store: store.multi_get(list(keys)))]

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Returns the value of a key, which is the given one if it had the expected one, or is new and "" expected."""
        return _text(self._ask(lambda store: store.compare_set(key, expected, value)))

    def delete(self, *keys: str) -> None:
        """Deletes keys, if they are there."""
        self._ask(lambda store: [store.delete_key(key) for key in keys])

    def close(self) -> None:
        """Ends the thread; a later call would begin another one."""
        self._end(self._calls)

    def _ask(self, call: Callable[[Any], T]) -> T:
        with self._lock:
            if self._calls is None:
                self._calls = SimpleQueue()
                serving = (self._calls, self._connect)
                thread = threading.Thread(target=_serve, args=serving, name="simckpt keys", daemon=True)
                _threads.add(thread)
                thread.start()
            calls, answer = self._calls, Future[T]()
            calls.put((call, answer))
        try:
            return answer.result(self._answer)
        except TimeoutError as error:
            self._end(calls)
            raise LostError(f"the store of the ranks has not answered for {self._answer:g} s: {_ADVICE}") from error
        except RuntimeError as error:
            self._end(calls)
            # torch adds a trace of its own
            first = str(error).partition("\n")[0]
            raise LostError(f"the store of the ranks is lost ({first}): {_ADVICE}") from error

    def _end(self, calls: _Calls | None) -> None:
        """Ends the thread that serves these calls, once it gets to it, unless that was done before."""
        with self._lock:
            if calls is not None and self._calls is calls:
                calls.put(None)
                self._calls = None

    def _connect(self) -> Any:
        own = self._source.clone()
        own.set_timeout(timedelta(seconds=self._answer * _CONNECT))
        # from here on a connection takes no longer than an answer
        self._source = own
        return sys.modules["torch.distributed"].PrefixStore(self._prefix, own)


_ADVICE = (
    "its server, torchrun's agent on the first machine or rank 0, has ended, hangs or is cut off; if it has ended, "
    "start the program again"
)


_all: weakref.WeakSet[Keys] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _let_threads_end() -> None:
    """Waits for threads that are about to come back from torch: later that would end the process by SIGABRT."""
    until = time.monotonic() + ANSWER
    for keys in list(_all):
        keys.close()
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))


def _serve(calls: _Calls, connect: Callable[[], Any]) -> None:
    """Answers calls, one after the other, until there is None."""
    store = None
    while (asked := calls.get()) is not None:
        call, answer = asked
        try:
            store = connect() if store is None else store
            found = call(store)
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(found)


def _text(found: bytes | str) -> str:
    return found if isinstance(found, str) else found.decode()

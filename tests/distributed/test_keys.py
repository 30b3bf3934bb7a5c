"""The store of keys: a server that dies, hangs or comes back, and how long whoever asks it waits."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks

from simckpt.distributed.keys import Keys
from simckpt.errors import CoordinationError, LostError

ANSWER = 1.0  # [s]
SLACK = 10.0  # [s] a loaded machine may take on top
CALLS: dict[str, Any] = {
    "set": lambda keys: keys.set("key", "value"),
    "get": lambda keys: keys.get("key"),
    "check": lambda keys: keys.check(["key"]),
    "multi_get": lambda keys: keys.multi_get(["key"]),
    "compare_set": lambda keys: keys.compare_set("other", "", "value"),
    "delete": lambda keys: keys.delete("other"),
}


def until(condition: Any) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def state_of(pid: int) -> str:
    """Returns the letter that the system has for a process: T of a stopped one, Z of a dead one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def without_server(rank: int, size: int, how: int) -> Any:
    """Rank 0, which serves the store, ends or stops; rank 1 asks it all the same."""
    base = dist.group.WORLD.get_group_store()
    keys = Keys(base, "test", answer=ANSWER)
    if rank == 0:
        keys.set("pid", str(os.getpid()))
        until(lambda: keys.check(["ready"]))
        os.kill(os.getpid(), how)
        until(lambda: keys.check(["done"]))
        return None
    own = {name: Keys(base, "test", answer=ANSWER) for name in CALLS}
    keys.set("key", "value")
    until(lambda: keys.check(["pid"]))
    pid = int(keys.get("pid"))
    keys.set("ready", "")
    until(lambda: state_of(pid) in "TZ")
    found = {}
    asked = {name: call for name, call in CALLS.items() if name != "set"}
    for name, call in {**asked, "connect": lambda _: Keys(base, "test", answer=ANSWER)}.items():
        begun = time.monotonic()
        with pytest.raises(CoordinationError) as caught:
            call(own.get(name))
        found[name] = str(caught.value), time.monotonic() - begun
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
        # the same connections work again, whatever they were in the middle of
        for name, call in CALLS.items():
            until(lambda call=call, name=name: answers(call, own[name]))
        keys.set("done", "")
    return found


def answers(call: Any, keys: Keys) -> bool:
    try:
        call(keys)
    except LostError:
        return False
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_whoever_asks_a_server_that_is_gone_or_hangs_is_told_so_in_time(ranks: Ranks, how: int) -> None:
    server, asking = ranks.outcomes(2, without_server, how, host="rank0", destroy=False)
    assert server.kind == ("killed" if how == signal.SIGKILL else "stopped")
    assert asking.kind == "returned", asking
    # a store does not answer to `set`
    assert asking.value.keys() == {*CALLS, "connect"} - {"set"}
    for message, seconds in asking.value.values():
        assert "start the program again" in message
        assert "\n" not in message
        assert seconds < ANSWER + SLACK


def shared(rank: int, size: int) -> Any:
    """Eight threads of each rank use one connection."""
    keys, won = Keys(dist.group.WORLD.get_group_store(), "test"), []

    def work(number: int) -> None:
        for turn in range(20):
            mine = f"rank {rank} thread {number}"
            keys.set(f"{mine} turn {turn}", str(turn))
            assert keys.get(f"{mine} turn {turn}") == str(turn)
            if keys.compare_set(f"turn {turn}", "", mine) == mine:
                won.append(turn)
            keys.delete(f"{mine} turn {turn}")
            assert not keys.check([f"{mine} turn {turn}"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys.close()
    before = threading.active_count()
    assert keys.get("turn 0").startswith("rank")
    keys.close()
    until(lambda: threading.active_count() <= before)
    return won


def test_threads_share_a_connection_and_one_of_all_wins_each_key(ranks: Ranks) -> None:
    found = ranks.run(2, shared)
    assert sorted(turn for won in found for turn in won) == list(range(20))

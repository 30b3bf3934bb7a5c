"""One rank on a machine of its own; see `test_partition.py`. Trains to step 13, with its own objects alone.

On the way it waits for a line on its input, so that the cable is pulled at a moment that is known: in the save of step
10, before this rank votes, and before the step after it. The last line of its output says how it ended.
"""

import json
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
from training_runs import Training

import simckpt
from simckpt import shard_writing
from simckpt.errors import CoordinationError

TIMEOUT = 10.0  # [s] of the process group and of saves
LAST = 13


def train(rank: int, size: int, store: str, go_on: threading.Event | None = None) -> dict[str, str]:
    run = simckpt.Store(store).start("cart")
    training = Training(rank, size, "alone")
    own = {"agent": True, "optimizer": True}
    checkpointer = run.checkpointer(training.components, save_when=simckpt.EverySteps(5), timeout=TIMEOUT, per_rank=own)
    with run, checkpointer:
        checkpointer.restore_latest()
        training.begin()
        while training.loop.step < LAST:
            training.advance()
            checkpointer.step(training.loop.step)
            if training.loop.step == 10 and go_on is not None:
                go_on.wait()
        checkpointer.wait()
    return training.fingerprint()


def wait_in_the_second_save(go_on: threading.Event) -> None:
    vote, count = shard_writing.ShardPublisher._vote, []

    def waiting(*args):
        count.append(1)
        if len(count) == 2:
            print("voting", flush=True)
            go_on.wait()
        return vote(*args)

    shard_writing.ShardPublisher._vote = waiting


def main() -> None:
    store, disturbed = sys.argv[1], sys.argv[2] == "disturbed"
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    go_on, begun = threading.Event(), []
    if disturbed:
        wait_in_the_second_save(go_on)

        def listen() -> None:
            sys.stdin.readline()
            begun.append(time.monotonic())
            go_on.set()

        threading.Thread(target=listen, daemon=True).start()
    told: dict[str, object] = {"saves": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", simckpt.SaveFailedWarning)
        try:
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            told["fingerprint"] = train(rank, size, store, go_on if disturbed else None)
        except CoordinationError as error:
            told |= {"error": type(error).__name__, "message": str(error), "ranks": list(error.ranks)}
    told["saves"] = [str(each.message) for each in caught if issubclass(each.category, simckpt.SaveFailedWarning)]
    told["seconds"] = time.monotonic() - begun[0] if begun else None
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

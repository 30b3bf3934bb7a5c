"""What `torchrun` starts: trains to step 13; in its first life one of the ranks kills itself."""

import os
import signal
import sys
from pathlib import Path

import torch
from training_runs import Training

import simckpt


def main() -> None:
    store, victim, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    first_life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
    run = simckpt.Store(store).start("cart")
    training = Training(rank, size)
    checkpointer = run.checkpointer(training.components, save_when=simckpt.EverySteps(5), timeout=20.0)
    with run, checkpointer:
        checkpointer.restore_latest()
        training.begin()
        while training.loop.step < 13:
            training.advance()
            checkpointer.step(training.loop.step)
            if first_life and rank == victim and training.loop.step == 8:
                os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.wait()
    Path(f"{out}-{rank}").write_text(repr(training.fingerprint()))


if __name__ == "__main__":
    main()

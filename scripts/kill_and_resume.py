"""Kill a training run with SIGKILL, again and again, and show that it ends bit for bit where an undisturbed one ends.

    python scripts/kill_and_resume.py --kills 20
    python scripts/kill_and_resume.py --kills 20 --script train_sac.py
    python scripts/kill_and_resume.py --kills 20 --script train_ppo_ddp.py --ranks 4

The same command line starts and resumes the run. Kills are aimed at the moments that hurt: inside a save, before the
first commit, in an evaluation, and anywhere. What each one really hit is read from the store afterwards and printed
as a histogram. In the end every checkpoint that both runs kept is compared by `simckpt diff`. Flags that are not listed
here are the training script's: `--keep-last 5`.

Of several ranks a random one is killed, one time in four all at once. `--hangs 2` stops a rank (SIGSTOP) at two of the
moments instead, which the others have to notice by themselves. All ranks must end within `BOUND` each time.
"""

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import simckpt
from simckpt.comparison import compare

SCRIPTS = Path(__file__).parent
INSIDE_SAVE, BEFORE_COMMIT, IN_EVALUATION, ANYWHERE = (
    "inside a save",
    "before the first commit",
    "in evaluation",
    "elsewhere",
)
# for each training script, flags that make it short; SAC's replay buffer goes round five times
BRIEF = {
    "train_ppo.py": "--total-steps 100000 --save-every 1000 --eval-every 4000 --rollout-steps 128",
    "train_sac.py": "--total-steps 20000 --save-every 200 --eval-every 800 --buffer-size 4000 --learning-starts 500 "
    "--batch-size 64 --update-ratio 0.25 --hidden 64",
    "train_ppo_ddp.py": "--total-steps 30000 --save-every 500 --eval-every 2000 --rollout-steps 64 --epochs 2 "
    "--minibatches 2 --timeout 60",
}
STUCK = 600  # [s] without reaching the wanted moment; then something is wrong
# [s] from the loss of a rank to the end of all: twice the `--timeout` above and 30 for a save, 15 in which the others
# are called, 30 in which torchrun lets them end, and what a busy machine adds
BOUND = 150 + 15 + 30 + 60
ALL_AT_ONCE = 0.25  # share of the kills that hit all ranks


class Training:
    """One process of the training script, or torchrun with its ranks, with its output read line by line.

    Attributes:
        process: of the script, or torchrun.
        lines: that it has printed so far.
    """

    def __init__(self, command: list[str], on_line: Callable[[str], None]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._on_line(line.rstrip())

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        """Returns the process ids of the ranks that torchrun has started."""
        return children(self.process.pid)

    def lose(self, ranks: list[int], how: signal.Signals) -> float:
        """Sends some ranks a signal; returns how long it took until all of them and torchrun were gone [s]."""
        begun, started = time.monotonic(), self.ranks()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, how)
        left = [pid for pid in [*started, self.process.pid] if not is_gone(pid, begun + BOUND)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            sys.exit(f"{len(left)} processes were still there {BOUND} s later:\n" + "\n".join(self.lines[-40:]))
        self.process.wait()
        self._reader.join()
        return time.monotonic() - begun

    def finish(self) -> None:
        """Waits for the end; a run that failed by itself ends the script with its output."""
        status = self.process.wait()
        self._reader.join()
        if status:
            sys.exit("the training failed by itself:\n" + "\n".join(self.lines[-40:]))

    def running(self) -> bool:
        """Returns whether the process is alive."""
        return self.process.poll() is None

    def evaluating(self) -> bool:
        """Returns whether it has announced an evaluation and not yet its result."""
        last = next((line for line in reversed(self.lines) if line.startswith("eval")), "")
        return last.startswith("evaluating")


def children(pid: int) -> list[int]:
    """Returns the process ids of a process's children."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in path.read_text().split()]
    return found


def is_gone(pid: int, until: float) -> bool:
    """Waits until a moment for a process to end; returns whether it has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(until - time.monotonic(), 0))[0])
    finally:
        os.close(descriptor)


def committed(store: Path, run: str) -> int:
    """Returns the number of commits of a run, pruned ones included."""
    try:
        return sum(1 for entry in (store / "runs" / run / "checkpoints").iterdir() if entry.name.isdigit())
    except FileNotFoundError:
        return 0


def unfinished(store: Path) -> set[str]:
    """Returns the names of saves that are under way, or were when their writer died."""
    try:
        return {entry.name for entry in (store / "tmp").iterdir()}
    except FileNotFoundError:
        return set()


def wait_for(training: Training, happened: Callable[[], bool], *, pause: float) -> bool:
    """Returns whether it happened before the training ended."""
    deadline = time.monotonic() + STUCK
    while training.running():
        if happened():
            return True
        if time.monotonic() > deadline:
            for rank in training.ranks():
                os.kill(rank, signal.SIGKILL)
            training.kill()
            sys.exit("the training got stuck:\n" + "\n".join(training.lines[-40:]))
        time.sleep(pause)
    return False


def aim(training: Training, kind: str, store: Path, run: str, rng: random.Random, ranks: int) -> bool:
    """Waits for a moment of the wanted kind; returns whether it came before the end of the training."""
    if not wait_for(training, lambda: ranks == 0 or len(training.ranks()) == ranks, pause=0.01):
        return False
    if kind == BEFORE_COMMIT:
        time.sleep(rng.uniform(0.2, 6.0))
        return True
    before = committed(store, run)
    wait = rng.randint(1, 2)  # commits to let pass, so that the run gets on
    if not wait_for(training, lambda: committed(store, run) >= before + wait, pause=0.01):
        return False
    if kind == INSIDE_SAVE:
        old = unfinished(store)
        reached = wait_for(training, lambda: bool(unfinished(store) - old), pause=0.0002)
        # of several ranks the votes and the commit take longer than the files of one
        time.sleep(rng.uniform(0, 0.1 if ranks else 0.004))
        return reached
    if kind == IN_EVALUATION:
        reached = wait_for(training, training.evaluating, pause=0.001)
        time.sleep(rng.uniform(0, 0.05))
        return reached
    time.sleep(rng.uniform(0, 2.0))
    return True


def kill_repeatedly(
    command: list[str],
    store: Path,
    run: str,
    kinds: list[str],
    *,
    rng: random.Random,
    on_line: Callable[[str], None],
    ranks: int = 0,
    hangs: int = 0,
) -> Counter[str]:
    """Starts the training once for each kill, kills it, and in the end lets it finish; returns what was hit.

    Args:
        command: that starts and resumes it.
        store: that it writes.
        run: its name.
        kinds: the moments to be hit.
        rng: for what is left to chance.
        on_line: gets each line that it prints, and what happens.
        ranks: how many the command starts with torchrun; 0 if it is the script alone.
        hangs: how many of the kills stop a rank instead.
    """
    hits: Counter[str] = Counter()
    stopping = set(rng.sample(range(len(kinds)), hangs))
    for number, kind in enumerate(kinds):
        left_before = unfinished(store)
        commits_before = committed(store, run)
        training = Training(command, on_line)
        if not aim(training, kind, store, run, rng, ranks) or not training.running():
            training.finish()
            on_line("[the run was complete before the next kill]")
            break
        evaluating = training.evaluating()
        what = "SIGSTOP" if number in stopping else "SIGKILL"
        if ranks:
            pids = sorted(training.ranks())
            everybody = what == "SIGKILL" and rng.random() < ALL_AT_ONCE
            victims = pids if everybody else [rng.choice(pids)] if pids else []
            under_way = unfinished(store) - left_before  # the ranks that are left clean up after themselves
            took = training.lose(victims, signal.Signals[what])
            what += f" of {'all ranks' if everybody else 'a rank'}, all gone after {took:.1f} s,"
        else:
            training.kill()
            under_way = unfinished(store) - left_before
        if under_way:
            hit = INSIDE_SAVE
        elif committed(store, run) == 0:
            hit = BEFORE_COMMIT
        elif evaluating:
            hit = IN_EVALUATION
        else:
            hit = ANYWHERE
        hits[hit] += 1
        on_line(
            f"[{what} {hits.total()} of {len(kinds)}: {hit}, {committed(store, run) - commits_before} commits later]"
        )
    Training(command, on_line).finish()
    return hits


def command_for(script: str, store: Path, run: str, flags: list[str], ranks: int = 0) -> list[str]:
    start = [sys.executable, "-u"]
    if ranks:
        # the two dashes keep torchrun from taking flags of the script for its own
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    return [*start, str(SCRIPTS / script), "--store", str(store), "--run", run, *flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="kills in all")
    parser.add_argument("--inside-save", type=int, default=9, help="kills aimed at a save")
    parser.add_argument("--before-commit", type=int, default=2, help="kills aimed at the time before the first commit")
    parser.add_argument("--in-evaluation", type=int, default=3, help="kills aimed at an evaluation")
    parser.add_argument("--script", default="train_ppo.py", choices=sorted(BRIEF), help="the training script")
    parser.add_argument("--ranks", type=int, default=0, help="start so many with torchrun, for train_ppo_ddp.py")
    parser.add_argument("--hangs", type=int, default=0, help="how many of the kills stop a rank instead")
    parser.add_argument("--env-id", default="Ant-v5")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--vectorization", default="async", choices=["sync", "async"])
    parser.add_argument("--seed", type=int, default=1, help="of the training and of the moments of the kills")
    parser.add_argument("--store", type=Path, help="a new folder for the store; a temporary one by default")
    args, rest = parser.parse_known_args()
    if (args.script == "train_ppo_ddp.py") != (args.ranks > 0) or (args.hangs and not args.ranks):
        parser.error("--ranks goes with --script train_ppo_ddp.py, and --hangs with --ranks")

    store = args.store or Path(tempfile.mkdtemp(prefix="kill_and_resume-")) / "store"
    flags = ["--env-id", args.env_id, "--num-envs", str(args.num_envs), "--vectorization", args.vectorization]
    flags += ["--seed", str(args.seed), "--eval-episodes", "2", *BRIEF[args.script].split(), *rest]
    rng = random.Random(args.seed)
    aimed = [INSIDE_SAVE] * args.inside_save + [IN_EVALUATION] * args.in_evaluation
    aimed += [ANYWHERE] * (args.kills - len(aimed) - args.before_commit)
    rng.shuffle(aimed)
    aimed = [BEFORE_COMMIT] * args.before_commit + aimed

    def show(line: str) -> None:
        if line.startswith(("[SIG", "[the run")):
            print(line, flush=True)

    hits = kill_repeatedly(
        command_for(args.script, store, "killed", flags, args.ranks),
        store,
        "killed",
        aimed,
        rng=rng,
        on_line=show,
        ranks=args.ranks,
        hangs=args.hangs,
    )
    print("training the undisturbed twin", flush=True)
    Training(command_for(args.script, store, "undisturbed", flags, args.ranks), show).finish()

    print("\nwhat the kills hit:")
    for kind in (INSIDE_SAVE, BEFORE_COMMIT, IN_EVALUATION, ANYWHERE):
        print(f"  {kind:<24} {hits[kind]:>3}  {'#' * hits[kind]}")
    opened = simckpt.Store(store)
    twins = {checkpoint.step: checkpoint for checkpoint in opened.run("undisturbed").checkpoints()}
    killed = opened.run("killed").checkpoints()
    # with --keep-last the one that a run was restored from stays as well, and the twin was never restored
    both = [checkpoint for checkpoint in killed if checkpoint.step in twins]
    different = [checkpoint.step for checkpoint in both if not compare(checkpoint, twins[checkpoint.step]).identical]
    print(f"\n{len(both)} checkpoints compared with the twin's, {len(different)} differ {different or ''}")
    print(f"$ simckpt diff {store} killed undisturbed", flush=True)
    status = subprocess.run([sys.executable, "-m", "simckpt", "diff", str(store), "killed", "undisturbed"]).returncode
    if args.store is None and not status:
        shutil.rmtree(store.parent)
    sys.exit(status or bool(different))


if __name__ == "__main__":
    main()

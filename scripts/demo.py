"""The main job in three minutes: train PPO, kill it three times, resume it, and compare it with its undisturbed twin.

make demo
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from kill_and_resume import Training, command_for, unfinished
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import simckpt
from simckpt import cli
from simckpt.comparison import compare, fingerprint


def latest_step(store: Path, run: str) -> int:
    """Returns the step of a run's newest checkpoint, 0 before the first."""
    try:
        return simckpt.Store(store).run(run).latest().step
    except simckpt.SimckptError:
        return 0


def watch(training: Training, store: Path, run: str, progress: Progress, *, until: int) -> None:
    """Moves the run's progress bar until it has saved the given step or has ended."""
    bar = next(task.id for task in progress.tasks if task.fields["run"] == run)
    while training.running() and latest_step(store, run) < until:
        progress.update(bar, completed=latest_step(store, run))
        time.sleep(0.1)
    progress.update(bar, completed=latest_step(store, run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env-id", default="Hopper-v5")
    parser.add_argument("--total-steps", type=int, default=40_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--store", type=Path, help="a new folder for the store; a temporary one by default")
    args = parser.parse_args()

    console = Console()
    store = args.store or Path(tempfile.mkdtemp(prefix="simckpt-demo-")) / "store"
    flags = ["--env-id", args.env_id, "--num-envs", "4", "--vectorization", "async", "--rollout-steps", "256"]
    flags += ["--total-steps", str(args.total_steps), "--save-every", "4000", "--eval-every", "20000"]
    rng = random.Random(0)
    places = sorted(rng.uniform(0.1, 0.9) * args.total_steps for _ in range(args.kills))
    console.print(f"Two runs of PPO on {args.env_id}, {args.total_steps:,} steps each, saved every 4,000 steps.")
    console.print("One is left alone; the other is killed with SIGKILL and started again by the same command:")
    console.print(
        "  python " + " ".join(["scripts/train_ppo.py", *flags, "--run", "killed"]), style="dim", soft_wrap=True
    )

    columns = [TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console) as progress:
        for run in ("killed", "undisturbed"):
            progress.add_task(run, total=args.total_steps, run=run, start=run == "killed")
        for place in places:
            left = unfinished(store)
            training = Training(command_for("train_ppo.py", store, "killed", flags), lambda _: None)
            watch(training, store, "killed", progress, until=int(place))
            time.sleep(rng.uniform(0, 1))
            training.kill()
            where = (
                "inside a save"
                if unfinished(store) - left
                else f"after the checkpoint of step {latest_step(store, 'killed'):,}"
            )
            progress.console.print(f"[red]SIGKILL[/red] {where}")
        for run in ("killed", "undisturbed"):
            progress.start_task(next(task.id for task in progress.tasks if task.fields["run"] == run))
            training = Training(command_for("train_ppo.py", store, run, flags), lambda _: None)
            watch(training, store, run, progress, until=args.total_steps + 1)
            training.finish()

    console.print("\n$ simckpt ls STORE")
    cli.list_store(store)
    opened = simckpt.Store(store)
    killed, undisturbed = opened.run("killed").latest(), opened.run("undisturbed").latest()
    result = compare(killed, undisturbed)
    console.print("\nthe last checkpoints, all leaves together:")
    for checkpoint in (killed, undisturbed):
        console.print(f"  {fingerprint(checkpoint)}  {checkpoint.run} at step {checkpoint.step:,}", highlight=False)
    if result.identical:
        console.print(f"[green]identical[/green]: {result.compared} leaves, bit for bit")
    else:
        console.print(f"[red]different[/red]: {', '.join(each.path for each in result.differences)}")
    if args.store is None:
        shutil.rmtree(store.parent)
    sys.exit(0 if result.identical else 1)


if __name__ == "__main__":
    main()

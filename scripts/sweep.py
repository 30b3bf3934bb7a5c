"""Train branches of one checkpoint with several learning rates at a time, and print how they ended.

    python scripts/train_ppo.py --env-id Hopper-v5 --total-steps 400000
    python scripts/sweep.py ppo@200704 --learning-rates 1e-4 3e-4 1e-3 --env-id Hopper-v5 --total-steps 400000

Flags that are not listed here are the training script's, the same as the origin was trained with. Interrupted, the same
command goes on with what is missing.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import simckpt

SCRIPTS = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("origin", help="checkpoint: its id, or run, run@latest, run@<step>")
    parser.add_argument("--script", default="train_ppo.py", choices=["train_ppo.py", "train_sac.py"])
    parser.add_argument("--store", type=Path, default=Path("experiments"))
    parser.add_argument("--name", help="the branches are called <name>-<rate>; the origin's run by default")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--rng", choices=["continue", "reseed"], default="continue")
    parser.add_argument("--engine", choices=["local", "ray", "slurm"], default="local", help="where the branches run")
    parser.add_argument("--workers", type=int, help="branches at a time on this machine; its cores by default")
    parser.add_argument("--deadline", type=float, help="for each branch [s]")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder of what the branches print")
    args, flags = parser.parse_known_args()

    origin = simckpt.Store(args.store).checkpoint(args.origin)
    # :g would give two rates that agree in six digits one name
    rates = {f"{args.name or origin.run}-{rate}": {"learning_rate": rate} for rate in args.learning_rates}
    engines = {
        "local": lambda: simckpt.LocalEngine(args.workers),
        "ray": lambda: simckpt.RayEngine(),
        # its jobs outlive this program
        "slurm": lambda: contextlib.nullcontext(simckpt.SlurmEngine(args.logs / "slurm", cpus_per_task=1)),
    }
    print(f"{', '.join(rates)} from {origin!r}; what they print is in {args.logs}/")
    with engines[args.engine]() as engine:
        result = simckpt.fan_out(
            origin,
            rates,
            [str(SCRIPTS / args.script), *flags],
            engine=engine,
            rng=args.rng,
            deadline=args.deadline,
            logs=args.logs,
        )
    print(result)
    return 0 if result.complete else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except simckpt.SimckptError as error:
        sys.exit(f"sweep.py: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where the branches are", file=sys.stderr)
        sys.exit(130)

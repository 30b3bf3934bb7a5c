"""PPO with a learning rate that is too high, without and with automatic rollback, on the same budget of env steps.

    python scripts/rollback_experiment.py                    # prints the results that are kept beside this script
    python scripts/rollback_experiment.py --store STORE      # trains; what is there already goes on, or is done

Steps that a rollback abandons are paid for: a run with rollbacks ends earlier by as many. `--figure` draws all runs
into an HTML page. Flags that are not listed here are those of `train_ppo.py`; with them it is another experiment, and
`--results` says where its results go.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import train_ppo

import simckpt
from simckpt.decisions import evaluations_of
from simckpt.errors import RollbackLimitError

RESULTS = Path(__file__).with_suffix(".json")
KINDS = {"without": "--no-rollback", "with": "--rollback"}
SETTING = "--env-id InvertedDoublePendulum-v5 --learning-rate 4e-3 --clip 0.5 --no-anneal --total-steps 147456"
SETTING += " --save-every 4096 --eval-every 4096"
METRIC = "eval/return"
TOLD = ("step", "target_step", "level", "changes", "reason")
COLORS = {"without": "#b2182b", "with": "#2166ac"}


def train(args: train_ppo.Args) -> None:
    """Trains until `args.total_steps` env steps are made, abandoned ones among them; called again after a rollback."""
    try:
        rollbacks = rollbacks_of(simckpt.Store(args.store).run(args.run))
    except simckpt.SimckptError:  # there is no such store, or no such run yet
        rollbacks = []
    train_ppo.train(dataclasses.replace(args, total_steps=args.total_steps - abandoned_steps(rollbacks)))


def rollbacks_of(run: simckpt.Run) -> list[dict[str, Any]]:
    """Returns a run's rollbacks, oldest first: `step`, `target_step`, `level`, `reason`, `changes`, `saw`."""
    return list(run.latest()["checkpointer"]["rollbacks"]) if run.checkpoints() else []


def abandoned_steps(rollbacks: Sequence[dict[str, Any]]) -> int:
    return sum(each["step"] - each["target_step"] for each in rollbacks)


def story(run: simckpt.Run) -> dict[str, Any]:
    """Returns what a run did, as plain values.

    Returns:
        `evaluations`, all of them in the order in which they were made, each [env steps made until then, step, mean
        return, whether a rollback abandoned it]; and `rollbacks`.
    """
    commits, rollbacks = run.checkpoints(abandoned=True), rollbacks_of(run)
    by_id = {commit.id: commit for commit in commits}
    left = [by_id[commit.rollback["abandoned"]] for commit in commits if commit.rollback is not None]
    found: list[list[Any]] = []
    spent, start = 0, -1
    for head, rollback in zip(left, rollbacks, strict=True):
        # the evaluation that led to the rollback came too late for a checkpoint: the rollback remembers it
        seen = history(head) | {step: mean for step, mean, _ in rollback["saw"]}
        found += [[spent + step, step, mean, False] for step, mean in sorted(seen.items()) if step > start]
        start = rollback["target_step"]
        spent += rollback["step"] - start
        for each in found:
            each[3] |= each[1] > start
    found += [[spent + step, step, mean, False] for step, mean in history(run.latest()).items() if step > start]
    for each in found:
        each[2] = round(each[2], 2)
    return {"evaluations": found, "rollbacks": [{key: each[key] for key in TOLD} for each in rollbacks]}


def history(checkpoint: simckpt.Checkpoint) -> dict[int, float]:
    """Returns {step: mean return} of the evaluations that a checkpoint remembers."""
    evaluations = evaluations_of(checkpoint["checkpointer"]).get(METRIC, ())
    return {each.step: statistics.fmean(each.returns) for each in evaluations}


def run_all(store: str, seeds: Sequence[int], flags: Sequence[str]) -> dict[str, Any]:
    """Trains every run that is not complete and returns the results as plain values."""
    runs = []
    for seed in seeds:
        for kind, switch in KINDS.items():
            name = f"{kind}-rollback-{seed}"
            argv = [*SETTING.split(), *flags, switch, "--seed", str(seed), "--store", store, "--run", name]
            stopped = ""
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    simckpt.supervise(train, train_ppo.parse_args(argv))
            except RollbackLimitError as error:
                stopped = str(error)
            runs.append({"seed": seed, "kind": kind, "stopped": stopped, **story(simckpt.Store(store).run(name))})
            print(f"{name}: {summary(runs[-1])}", flush=True)
    return {"command": " ".join(["train_ppo.py", *SETTING.split(), *flags]), "runs": runs}


def summary(run: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of a run that the table shows; the best counts abandoned evaluations, too."""
    means = [mean for _, _, mean, _ in run["evaluations"]]
    line = [mean for _, _, mean, abandoned in run["evaluations"] if not abandoned]
    return {
        "best": max(means),
        "final": line[-1],
        "last five": statistics.fmean(line[-5:]),
        "rollbacks": len(run["rollbacks"]),
        "abandoned": abandoned_steps(run["rollbacks"]),
    }


def table(results: dict[str, Any]) -> str:
    """Returns the results as a table in Markdown; its last line has means and standard deviations over the seeds."""
    columns = [("best", "without"), ("best", "with"), ("last five", "without"), ("last five", "with")]
    columns += [("final", "without"), ("final", "with"), ("rollbacks", "with"), ("abandoned", "with")]
    by_seed: dict[int, dict[str, dict[str, float]]] = {}
    for run in results["runs"]:
        by_seed.setdefault(run["seed"], {})[run["kind"]] = summary(run)
    lines = [
        "| seed | " + " | ".join(f"{name}, {kind}" for name, kind in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    rows = {str(seed): [kinds[kind][name] for name, kind in columns] for seed, kinds in sorted(by_seed.items())}
    lines += [f"| {seed} | " + " | ".join(f"{value:,.0f}" for value in row) + " |" for seed, row in rows.items()]
    if len(rows) > 1:
        spreads = [(statistics.fmean(each), statistics.stdev(each)) for each in zip(*rows.values(), strict=True)]
        over = [f"{mean:,.0f} ± {std:,.0f}" if mean >= 10 else f"{mean:.1f} ± {std:.1f}" for mean, std in spreads]
        lines.append("| mean | " + " | ".join(over) + " |")
    return "\n".join(lines)


def figure(results: dict[str, Any]) -> Any:
    """Returns a plotly figure: a panel for each seed, env steps made against the evaluation's mean return."""
    from plotly.subplots import make_subplots

    seeds = sorted({run["seed"] for run in results["runs"]})
    panels = make_subplots(len(seeds), 1, shared_xaxes=True, subplot_titles=[f"seed {seed}" for seed in seeds])
    for run in results["runs"]:
        row, color, first = seeds.index(run["seed"]) + 1, COLORS[run["kind"]], run["seed"] == seeds[0]
        spent, _, means, _ = zip(*run["evaluations"], strict=True)
        panels.add_scatter(
            x=spent,
            y=means,
            mode="lines",
            line_color=color,
            row=row,
            col=1,
            name=f"{run['kind']} rollback",
            legendgroup=run["kind"],
            showlegend=first,
        )
        gone = [(x, mean) for x, _, mean, abandoned in run["evaluations"] if abandoned]
        if gone:
            panels.add_scatter(
                x=[x for x, _ in gone],
                y=[mean for _, mean in gone],
                mode="markers",
                row=row,
                col=1,
                marker={"symbol": "x-thin", "line": {"width": 1.5, "color": color}, "size": 7},
                name="abandoned",
                legendgroup="abandoned",
                showlegend=not any(trace.name == "abandoned" for trace in panels.data),
            )
        made = 0
        for each in run["rollbacks"]:
            panels.add_vline(x=made + each["step"], line={"dash": "dot", "color": color, "width": 1}, row=row, col=1)
            made += each["step"] - each["target_step"]
    panels.update_xaxes(title_text="env steps made, abandoned ones among them", row=len(seeds), col=1)
    panels.update_yaxes(title_text="return", rangemode="tozero", matches="y")
    title = {"text": "PPO without and with rollback", "subtitle": {"text": results["command"], "font": {"size": 9}}}
    legend = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.06, "yanchor": "bottom"}
    panels.update_layout(template="plotly_white", height=170 * len(seeds) + 150, width=900, title=title, legend=legend)
    return panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--store", help="a folder for the runs; without it nothing is trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, help="an HTML page to write")
    args, flags = parser.parse_known_args()
    if args.store is None and flags:
        parser.error(f"without --store nothing is trained: {' '.join(flags)}")
    if args.store is not None:
        results = run_all(args.store, args.seeds, flags)
        lines = ",\n".join(json.dumps(run) for run in results["runs"])
        args.results.write_text(f'{{"command": {json.dumps(results["command"])}, "runs": [\n{lines}\n]}}\n')
    results = json.loads(args.results.read_text())
    print(results["command"] + "\n")
    print(table(results))
    if args.figure is not None:
        figure(results).write_html(args.figure, include_plotlyjs=True)


if __name__ == "__main__":
    main()

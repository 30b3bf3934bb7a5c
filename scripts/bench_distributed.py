"""What checkpoints of several ranks cost: saves and restores beside DCP's own files, metadata, and up to 1,024 ranks.

    python scripts/bench_distributed.py saves --megabytes 128
    python scripts/bench_distributed.py simulate
    python scripts/bench_distributed.py metadata --ranks 1024

`saves` runs 1, 2 and 4 ranks on this machine (see bench_ranks.py). `metadata` makes the plan of FSDP over `ranks`
processes with Adam: each parameter and its two moments cut by rows, all ranks with a part of each, and the components
of its own that each rank has. `simulate` measures what that plan costs rank 0 with some tens of ranks, in one process,
by the code that a run uses and a real TCPStore, and draws a line through it to 1,024.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from simckpt.storage import CommitDraft, RunRecord, StoreFiles, digests, index, indexes, names, reader, shards
from simckpt.storage.index import LeafRecord
from simckpt.storage.preparing import Prepared
from simckpt.storage.records import SHARDS_FILE, CommitRecord, FileRecord, Shard, shards_of
from simckpt.storage.shards import Listing

T = TypeVar("T")
_SHAPES = ((4096, 4096), (4096, 11008), (4096,), (50_257, 1024), (3, 1000, 256), (1024, 4096))  # of parameters, in turn


def rank_leaves(shard: Shard, *, parameters: int, own: int) -> list[LeafRecord]:
    """Returns the lines of the index of one rank: a part of each parameter and moment, and `own` leaves of its own."""
    lines, position = [], 4096
    for number in range(parameters):
        shape = _SHAPES[number % len(_SHAPES)]
        rows = -(-shape[0] // shard.count)
        start = min(shard.number * rows, shape[0])
        part = (min(rows, shape[0] - start), *shape[1:])
        for prefix in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            size = 4
            for each in part:
                size *= each
            digest = f"xxh3-128:{(number * 977 + shard.number) % 2**63:032x}" if size else digests.digest(b"")
            path = f"agent/{prefix}/layers.{number // 10}.block{number % 10}.weight"
            lines.append(
                LeafRecord(
                    path,
                    "torch",
                    "float32",
                    shape,
                    "<f4",
                    part,
                    shard.state_file,
                    position if size else None,
                    size,
                    digest,
                    part=(start, *(0 for _ in shape[1:])),
                )
            )
            position += size
    for number in range(own):
        path, size = f"envs%40{shard.number}/physics/field{number}", 8 * 64 * 30
        digest = f"xxh3-128:{number:032x}"
        lines.append(
            LeafRecord(path, "numpy", "float64", (64, 30), "<f8", (64, 30), shard.state_file, position, size, digest)
        )
        position += size
    return lines


def _timed(work: Callable[[], T]) -> tuple[T, dict[str, float]]:
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}


def bench_metadata(ranks: int = 1024, *, parameters: int = 300, own: int = 30) -> dict[str, object]:
    """Returns what the metadata of a checkpoint of many ranks cost [s of wall and processor]; no arrays are written.

    Args:
        ranks: how many.
        parameters: of the model, each cut over all ranks, with two moments of Adam.
        own: leaves that each rank has of its own.
    """
    from simckpt.distributed import planning

    found: dict[str, object] = {"ranks": ranks, "leaves_per_rank": 3 * parameters + own}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = root / "checkpoint"
        folder.mkdir()
        files: list[FileRecord] = []
        states: list[FileRecord] = []
        sent: list[str] = []
        sealing = 0.0
        for shard in shards_of(ranks):
            lines = rank_leaves(shard, parameters=parameters, own=own)
            before = time.process_time()
            data = index.seal_index(lines)
            sealing += time.process_time() - before
            (folder / shard.index_file).write_bytes(data)
            files.append(FileRecord(shard.index_file, len(data), digests.digest(data), "file"))
            held = [
                planning.Item(line.path, line.dtype, line.shape, line.size, line.part, line.own_shape)
                for line in lines
                if line.part is not None
            ]
            sent.append(json.dumps(planning._report(held)))
            size = max((line.offset or 0) + line.size for line in lines)
            states.append(FileRecord(shard.state_file, size, digests.digest(b""), "metadata"))
        found["seal_one_index_cpu_s"] = sealing / ranks
        found["seal_all_indexes_cpu_s"] = sealing
        found["read_lists_and_plan"] = measure_plan(sent)
        sent.clear()
        listing = Listing(tuple(states), tuple(files))
        data, found["seal_shards_json"] = _timed(listing.to_bytes)
        (folder / SHARDS_FILE).write_bytes(data)
        found["shards_json_bytes"] = len(data)
        found["indexes_bytes"] = sum(file.size for file in files)
        record = CommitRecord(
            "0" * 32,
            "0" * 32,
            1,
            None,
            "save",
            0,
            0.0,
            files=(FileRecord(SHARDS_FILE, len(data), digests.digest(data), "file"),),
            shards=ranks,
            shards_size=sum(file.size for file in listing.files),
        )
        with reader.opened_folder(root, "checkpoint") as descriptor:
            merged, found["read_and_merge_and_verify_tiling"] = _timed(
                lambda: indexes.read_index(descriptor, record, folder)
            )
            _, found["read_shards_json"] = _timed(lambda: indexes.read_listing(descriptor, record, folder))
            last = Shard(ranks - 1, ranks)
            _, found["read_one_rank"] = _timed(lambda: indexes.read_shard(descriptor, record, folder, last))
        cut = [leaf for leaf in merged if leaf.parts]
        _, found["verify_tiling_alone"] = _timed(
            lambda: [shards.tiles(leaf.shape, [(part.start, part.shape) for part in leaf.parts]) for leaf in cut]
        )
        leaf = cut[0]
        wanted = leaf.parts[-1]
        _, found["find_one_part_of_each_leaf"] = _timed(
            lambda: [
                [part for part in each.parts if shards.meets(part, each.parts[-1].start, each.parts[-1].shape)]
                for each in cut
            ]
        )
        assert replace(leaf.line(wanted), rank=None).part == wanted.start
        _, found["lines_by_file"] = _timed(merged.lines_by_file)
        found["leaves"] = len(merged.leaves)
        found["parts"] = sum(len(each.parts) for each in cut)
    return found


@dataclass(frozen=True)
class Costs:
    """What a checkpoint of so many ranks costs rank 0, files on this machine's disk.

    Attributes:
        ranks: how many.
        report: of one rank, to rank 0 [bytes].
        plan: reading the lists of all ranks and making the plan, once as long as they stay the same [s of processor].
        first: from the last report to the verdict, of the first save, which reads all indexes [s].
        later: the same of those after it [s].
        merge: reading all indexes, as a restore does [s of processor].
    """

    ranks: int
    report: float
    plan: float
    first: float
    later: float
    merge: float


def measure_plan(sent: Sequence[str]) -> dict[str, float]:
    """Returns what reading the lists that all ranks have sent, and making a plan of them, costs rank 0 [s]."""
    from simckpt.distributed import planning

    return _timed(lambda: planning.assign(planning._lists([json.loads(each) for each in sent]), alike=True))[1]


def parent_of(files: StoreFiles) -> str | None:
    """Returns the id of the newest checkpoint."""
    known = [record for record in files.records("run") if isinstance(record, CommitRecord)]
    return known[-1].id if known else None


def _commit(files: StoreFiles, first: Prepared, draft: CommitDraft, reports: list[Any]) -> dict[str, Any]:
    others = [Prepared.from_json(files.path, report) for report in reports[1:]]
    record = files.publish_shards("run", draft, [first, *others]).record
    return {"seq": record.seq, "record": record.to_bytes().decode()}


def measure_costs(ranks: int, *, parameters: int, own: int) -> Costs:
    """Returns what a plan of so many ranks costs; its arrays are tiny, for what they cost is each rank's own."""
    import numpy as np
    import torch.distributed as dist

    from simckpt import state
    from simckpt.distributed import planning
    from simckpt.distributed.keys import Keys
    from simckpt.distributed.voting import Ballot
    from simckpt.state.leaf import Leaf, PartLeaf
    from simckpt.state.tree import Encoded

    paths = [f"{kind}/layers.{number}" for kind in ("model", "mean", "variance") for number in range(parameters)]
    structure = state.encode({path: np.zeros(1, np.float32) for path in paths}).structure

    def components(rank: int, number: int) -> dict[str, Encoded]:
        row = np.full((1, 2), rank + number, np.float32)
        leaves: dict[str, Leaf] = {
            names.encode_part(path): PartLeaf(row, "float32", (ranks, 2), "torch", (rank, 0)) for path in paths
        }
        mine = state.encode({f"field{each}": np.full(3, rank + number) for each in range(own)})
        return {"agent": Encoded(leaves, b"" if rank else structure), f"envs@{rank}": mine}

    items = [
        [planning.Item(path, "float32", (ranks, 2), 8, (rank, 0), (1, 2)) for path in paths] for rank in range(ranks)
    ]
    plan = measure_plan([json.dumps(planning._report(each)) for each in items])
    took: list[float] = []
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = Keys(server, "bench")
    with tempfile.TemporaryDirectory() as folder:
        files = StoreFiles.create(Path(folder) / "store")
        files.write_run("run", RunRecord(names.random_id(), "run", time.time()))
        for number in range(4):
            mine = [files.prepare("run", components(shard.number, number), shard=shard) for shard in shards_of(ranks)]
            reports = [each.to_json() for each in mine]
            ballots = [Ballot(keys, rank, ranks, f"save {number}") for rank in range(ranks)]
            for ballot, report in zip(ballots[1:], reports[1:], strict=True):
                # as a rank does in `hold`, which would wait here
                ballot._set(f"report/{ballot.rank}", {"report": report, "common": {"all": "0" * 32}})
            commit = functools.partial(_commit, files, mine[0], CommitDraft(parent_of(files), number))
            begun = time.perf_counter()
            ballots[0].hold(reports[0], commit)
            took.append(time.perf_counter() - begun)
            for each in mine:
                files.conclude("run", each)
        keys.close()
        _, merge = _timed(lambda: StoreFiles.open(files.path).index("run", 4))
    size = max(len(json.dumps(report)) for report in reports)
    return Costs(ranks, size, plan["cpu_s"], took[0], statistics.median(took[1:]), merge["cpu_s"])


def show_simulation(counts: Sequence[int], measured: Sequence[int], *, parameters: int, own: int) -> None:
    """Prints what so many ranks cost: measured, where that was asked for, and else from a line through it."""
    import numpy as np

    costs = [measure_costs(ranks, parameters=parameters, own=own) for ranks in measured]
    lines = {
        name: np.polyfit(measured, [getattr(each, name) for each in costs], 1)
        for name in ("report", "plan", "first", "later", "merge")
    }
    leaves = 3 * parameters + own
    print(f"{leaves} leaves of each rank, {3 * parameters} of them parts; rank 0's costs; (m) measured, else a line")
    print("   ranks    files  shards.json [KB]  indexes [MB]  reports [KB]  plan [s]", end="")
    print("  first commit [s]  later commits [s]  read indexes [s]")
    by_count = {each.ranks: each for each in costs}
    for ranks in sorted({*counts, *measured}):
        known = by_count.get(ranks)
        listing, all_indexes = _metadata_sizes(ranks, parameters=parameters, own=own)
        found = {
            name: getattr(known, name) if known else max(float(np.polyval(line, ranks)), 0.0)
            for name, line in lines.items()
        }
        print(
            f"{'(m)' if known else '':>3}{ranks:5}{2 * ranks + 2:9}{listing / 1e3:18.1f}{all_indexes / 1e6:14.2f}"
            f"{ranks * found['report'] / 1e3:14.1f}{found['plan']:10.3f}{found['first']:18.3f}{found['later']:19.3f}"
            f"{found['merge']:18.3f}"
        )
    print("plan, read indexes: processor time; commits: wall time, from rank 0's report, the last one, to its verdict")


def _metadata_sizes(ranks: int, *, parameters: int, own: int) -> tuple[int, int]:
    """Returns the sizes of `shards.json` and of all indexes together [bytes]."""
    # the first and the last rank differ by the digits of their offsets alone
    ends = [Shard(0, ranks), Shard(ranks - 1, ranks)]
    size = statistics.mean(len(index.seal_index(rank_leaves(each, parameters=parameters, own=own))) for each in ends)
    digest = digests.digest(b"")
    states = tuple(FileRecord(each.state_file, 10**8, digest, "metadata") for each in shards_of(ranks))
    files = tuple(FileRecord(each.index_file, round(size), digest, "file") for each in shards_of(ranks))
    return len(Listing(states, files).to_bytes()), round(ranks * size)


def show_saves(arguments: argparse.Namespace, folder: Path) -> None:
    """Prints tables of saves and restores, and by how much simckpt's are as fast as DCP's."""
    import torch
    from bench_harness import Bar
    from bench_ranks import SavePlan, Shown, measure_ranks
    from bench_save import milliseconds
    from bench_sim import ratios

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\.")
    bars = []

    def row(name: str, found: Shown) -> str:
        commit = milliseconds(found.commits) if found.commits[0] < float("inf") else "-"
        shares = " ".join(f"{found.bytes[rank] / 1e6:.2f}" for rank in sorted(found.bytes) if rank >= 0)
        return (
            f"  {name:22}{milliseconds(found.saves):>24}{commit:>24}{milliseconds(found.restores):>24}"
            f"{found.imbalance:>11.3f}  {shares}"
        )

    for layout in arguments.layouts:
        plan = SavePlan(
            tuple(arguments.counts),
            layout,
            round(arguments.megabytes * 1e6),
            round(arguments.own_megabytes * 1e6),
            arguments.rounds,
            arguments.restores,
            folder,
        )
        for size, shown in measure_ranks(plan):
            print(
                f"\n{layout}, {size} ranks: {arguments.megabytes:g} MB together, "
                f"{arguments.own_megabytes:g} MB of each rank; load average {os.getloadavg()[0]:.1f}"
            )
            print(f"  {'':22}{'save [ms]':>24}{'its commit [ms]':>24}{'restore [ms]':>24}{'imbalance':>11}  MB by rank")
            for name, found in shown.items():
                print(row(name, found), flush=True)
            dcp = shown["DCP, its own files"]
            for name in ("simckpt", "DCP, simckpt's files"):
                ratio = ratios(shown[name].saves, dcp.saves).value
                bars.append(Bar(f"({layout}, {size}) save of {name} over DCP's own", ratio, 1.0))
    print()
    for bar in bars:
        print(bar)


def main() -> None:
    """Prints what is asked for: `metadata` as JSON, the others as tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["metadata", "saves", "simulate"])
    parser.add_argument("--ranks", type=int, default=1024, help="metadata: how many")
    parser.add_argument("--parameters", type=int, default=300, help="metadata, simulate: of the module")
    parser.add_argument("--own", type=int, default=30, help="metadata, simulate: leaves that each rank has of its own")
    parser.add_argument("--counts", type=int, nargs="+", help="of ranks; saves: 1 2 4, simulate: 8 to 1024")
    parser.add_argument("--measured", type=int, nargs="+", default=[8, 16, 32], help="simulate: with so many ranks")
    parser.add_argument("--layouts", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"], help="saves")
    parser.add_argument("--megabytes", type=float, default=128, help="saves: module and moments, of all ranks together")
    parser.add_argument("--own-megabytes", type=float, default=8, help="saves: an array of each rank")
    parser.add_argument("--rounds", type=int, default=6, help="saves: how many are counted")
    parser.add_argument("--restores", type=int, default=3, help="saves: how many restores of each")
    parser.add_argument("--folder", type=Path, help="saves: where to write, on the disk to be measured")
    arguments = parser.parse_args()
    if arguments.what == "metadata":
        print(json.dumps(bench_metadata(arguments.ranks, parameters=arguments.parameters, own=arguments.own), indent=1))
    elif arguments.what == "simulate":
        counts = arguments.counts or [2**power for power in range(3, 11)]
        show_simulation(counts, arguments.measured, parameters=arguments.parameters, own=arguments.own)
    else:
        arguments.counts = arguments.counts or [1, 2, 4]
        with tempfile.TemporaryDirectory(prefix="bench-distributed-", dir=arguments.folder) as folder:
            show_saves(arguments, Path(folder))


if __name__ == "__main__":
    main()

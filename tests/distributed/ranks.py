"""Runs a function of a test module on several ranks: gloo, CPU, one forked process each.

`torchrun` takes 25 s for four ranks on this kind of machine, four imports of torch; a fork after one import takes 1 to
3 s. A rank gets `(rank, size, *arguments)` and a process group; what it returns or raises comes back.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATHS = [
    HERE.parent.parent,
    HERE.parent,
    HERE,
    HERE.parent / "sim",
    HERE.parent / "state",
    HERE.parent / "storage",
    HERE.parent / "archive",
]


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: `returned`, `raised`, `killed` by a signal, `stopped`, `died`, or `hung` at the limit."""

    kind: str
    value: Any = None
    trace: str = ""


class Ranks:
    """Starts ranks; made once for all tests of a process."""

    def __init__(self) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, PATHS)), OMP_NUM_THREADS="1")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def outcomes(
        self,
        n: int,
        function: Any,
        *args: Any,
        limit: float = 120.0,
        timeout: float | None = None,
        host: str = "server",
        group: bool = True,
        destroy: bool = True,
    ) -> list[Outcome]:
        """Returns what became of each rank.

        Args:
            n: how many ranks.
            function: of a test module's top level.
            args: pickled.
            limit: after which ranks that still run count as hung and are killed [s].
            timeout: of training's process group [s].
            host: who serves the TCPStore: "server", a process of its own, as under torchrun, or "rank0".
            group: whether a single rank gets a process group as well.
            destroy: whether ranks take part in destroying the group at the end.
        """
        request = {
            "file": function.__globals__["__file__"],
            "function": function.__name__,
            "n": n,
            "args": args,
            "limit": limit,
            "timeout": timeout,
            "host": host,
            "group": group,
            "destroy": destroy,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(pickle.dumps(request))
        self._process.stdin.flush()
        reply = pickle.load(self._process.stdout)
        assert not isinstance(reply, str), reply
        return [Outcome(each["kind"], each.get("value", each.get("signal")), each.get("trace", "")) for each in reply]

    def run(self, n: int, function: Any, *args: Any, **options: Any) -> list[Any]:
        """Returns what each rank returned; fails if one did anything else."""
        outcomes = self.outcomes(n, function, *args, **options)
        for rank, outcome in enumerate(outcomes):
            assert outcome.kind == "returned", f"rank {rank} of {n} {outcome.kind}: {outcome.value}\n{outcome.trace}"
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Ends the process that forks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=100)
        self._process.stdout.close()

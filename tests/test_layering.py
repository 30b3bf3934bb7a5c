"""The layering of the package, read from its imports."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "simckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500

# a module may import from its own layer and from those below it; a name that is not listed is its own file
LAYERS = [
    {"errors"},
    {"state"},
    {"storage", "sim", "replay", "policies"},
    {
        "distributed",
        "run",
        "store",
        "checkpoint",
        "restore",
        "finiteness",
        "resizing",
        "comparison",
        "configuration",
        "provenance",
        "redaction",
        "arguments",
        "suggest",
        "presentation",
        "catalog",
        "listing",
        "damage",
        "ancestry",
        "query",
        "ranks",
        "session_pruning",
        "addresses",
        "fallbacks",
    },
    {
        "checkpointer",
        "saver",
        "background",
        "loop_end",
        "searching",
        "independent_writing",
        "other_ranks",
        "shard_writing",
        "resuming",
        "decisions",
        "signals",
        "rollback",
        "rollback_notices",
        "branching",
        "maintenance",
        "archive",
    },
    {"hardware"},
    {"cli", "plots", "testing"},
    {"__main__"},
]
SEPARATE = [
    ("storage", "sim"),
    ("sim", "storage"),
    ("policies", "storage"),
    ("policies", "sim"),
    ("policies", "state"),
    ("policies", "replay"),
    ("replay", "storage"),
    ("replay", "sim"),
    ("replay", "policies"),
    ("storage", "replay"),
    ("sim", "replay"),
]
# the doors upward: users call run.checkpointer(...), checkpoint.branch(...), store.graph(), which need the run
UPWARD = {
    ("run", "checkpointer"),
    ("run", "branching"),
    ("store", "branching"),
    ("checkpoint", "branching"),
    ("store", "maintenance"),
    ("checkpoint", "maintenance"),
    ("store", "archive"),
    ("fallbacks", "archive"),
    ("store", "hardware"),
}
DOORS = {
    "h5py": {"storage"},
    "xxhash": {"storage"},
    "mujoco": {"sim", "hardware"},
    "gymnasium": {"sim", "hardware"},
    "stable_baselines3": {"replay"},
    "torchrl": {"replay"},
    "tensordict": {"replay"},
    "sqlite3": {"catalog"},
    "pickle": {"sim", "storage"},
    "safetensors": {"storage"},
    "typer": {"cli"},
    "rich": {"cli", "branching"},
    "scipy": {"policies"},
    "plotly": {"plots"},
    "ray": {"branching"},
    "submitit": {"branching"},
    "obstore": {"archive"},
    "serial": {"hardware"},
    "mcap": {"hardware"},
    "imageio": {"hardware"},
    "imageio_ffmpeg": {"hardware"},
}


def layer(part: str) -> int:
    (found,) = [index for index, parts in enumerate(LAYERS) if part in parts]
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Returns [(dotted module, whether it sits under TYPE_CHECKING)]."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in guarded) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "simckpt":
                found += [(f"simckpt.{alias.name}", id(node) in guarded) for alias in node.names]
            else:
                found.append((node.module or "", id(node) in guarded))
    return found


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name != "__init__.py" or path.parent != PACKAGE], ids=str
)
def test_imports_point_downward(path: Path) -> None:
    own = part_of(path)
    for name, guarded in imports(path):
        assert name != "simckpt", f"{path} imports the package root"
        if not name.startswith("simckpt."):
            continue
        other = name.split(".")[1]
        assert guarded or layer(other) <= layer(own) or (own, other) in UPWARD, (
            f"{path} imports {name}, which lies above it"
        )
        assert (own, other) not in SEPARATE, f"{path} imports {name}"


@pytest.mark.parametrize("library", DOORS)
def test_each_library_has_one_door(library: str) -> None:
    users = {part_of(path) for path in MODULES if any(name.split(".")[0] == library for name, _ in imports(path))}
    assert users <= DOORS[library]


def test_libraries_of_hardware_have_one_module_each() -> None:
    users = {
        library: {
            path.relative_to(PACKAGE).as_posix()
            for path in MODULES
            if any(name.split(".")[0] == library for name, _ in imports(path))
        }
        for library in ("serial", "mcap")
    }
    assert users == {"serial": {"hardware/transports.py"}, "mcap": {"hardware/mcap_export.py"}}


def test_hardware_is_used_by_people_alone() -> None:
    users = {
        part_of(path)
        for path in MODULES
        for name, guarded in imports(path)
        if name.startswith("simckpt.hardware") and not guarded
    }
    assert users <= {"hardware", "cli", "plots", "store"}


def test_torch_distributed_has_one_door() -> None:
    users = {
        part_of(path)
        for path in MODULES
        if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name, _ in imports(path))
    }
    assert users == {"distributed"}


def test_no_import_cycle_between_modules() -> None:
    names = {path: "simckpt." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in MODULES}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    known = set(names.values())
    graph = {
        name: {other for other, guarded in top_level_imports(path) if other in known and not guarded and other != name}
        for path, name in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for other in graph[name]:
            # a package's door imports its own modules; they never import the door
            visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def top_level_imports(path: Path) -> list[tuple[str, bool]]:
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found: list[tuple[str, bool]] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", False) for alias in node.names] + [(node.module, False)]
        elif isinstance(node, ast.Import):
            found += [(alias.name, False) for alias in node.names]
    package = "simckpt." + part_of(path)
    # `from simckpt.state import x` inside state/ names the door, which only looks like a cycle where x is a module
    return [(name, guarded) for name, guarded in found if name.startswith("simckpt.") and name != package]


def test_files_are_changed_in_durable_alone() -> None:
    forbidden = {"fsync", "replace", "rename", "renames", "pwrite", "write_text", "write_bytes", "posix_fallocate"}
    for path in MODULES:
        # the files of a memory-mapped replay buffer are the buffer's memory, no part of a store
        if path.relative_to(PACKAGE).as_posix() in ("storage/durable.py", "replay/mapped.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "os":
                assert function.attr not in forbidden, f"{path}:{node.lineno} calls os.{function.attr}"
            if isinstance(function, ast.Attribute):
                assert function.attr not in {"write_text", "write_bytes"}, f"{path}:{node.lineno}"
            if isinstance(function, ast.Name) and function.id == "open":
                modes = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
                assert not any(set(mode) & set("wax+") for mode in modes), f"{path}:{node.lineno} opens for writing"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_modules_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("statement", ["import simckpt", "import simckpt.cli", "import simckpt.state, simckpt.storage"])
def test_heavy_libraries_are_not_imported(statement: str) -> None:
    code = f"import sys; {statement}; print([n for n in ('torch', 'gymnasium', 'mujoco') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""A process that has imported torch once and forks the ranks of each case; see `ranks.py`.

It must stay single-threaded: a fork takes locks of other threads with it, and with a TCPStore server in the forking
process 2 of 13 cases hung. So the server runs in a child of its own.
"""

import importlib.util
import os
import pickle
import resource
import selectors
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

GROUP_TIMEOUT = 20.0  # [s] of training's own group, unless a case says otherwise


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    modules: dict[str, object] = {}
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            path = request["file"]
            if path not in modules:
                spec = importlib.util.spec_from_file_location(Path(path).stem, path)
                modules[path] = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = modules[path]
                spec.loader.exec_module(modules[path])
            threads = len(list(Path("/proc/self/task").iterdir()))
            assert threads == 1, f"{threads} threads: a fork would not be safe"
            reply = run(getattr(modules[path], request["function"]), request)
        except BaseException:
            reply = traceback.format_exc()
        pickle.dump(reply, replies)
        replies.flush()


def run(function, request) -> list[dict]:
    """Returns one outcome for each rank, in order."""
    begun = time.monotonic()
    server, port = start_server() if request["host"] == "server" else (None, free_port())
    ranks = {}
    try:
        for rank in range(request["n"]):
            ranks[rank] = start_rank(function, request, rank, port)
        collect(ranks, begun + request["limit"])
    finally:
        for rank in ranks.values():
            if rank["status"] is None or rank["status"] == "stopped":
                os.kill(rank["pid"], signal.SIGKILL)
                os.waitpid(rank["pid"], 0)
        if server is not None:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    return [outcome(ranks[rank]) for rank in sorted(ranks)]


def start_server() -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
        os._exit(0)
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    return pid, port


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_rank(function, request, rank: int, port: int) -> dict:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", module=r"torch\..*")
            try:
                result = ("returned", rank_main(function, request, rank, port))
            except BaseException as error:
                result = ("raised", error, traceback.format_exc())
            try:
                payload = pickle.dumps(result)
            except Exception:
                payload = pickle.dumps(("raised", AssertionError(f"{result!r:.2000} cannot be sent"), ""))
            while payload:
                payload = payload[os.write(writing, payload) :]
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    return {"pid": pid, "pipe": reading, "data": b"", "status": None, "ended": None}


def rank_main(function, request, rank: int, port: int):
    from datetime import timedelta

    size = request["n"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.manual_seed(0)
    if size > 1 or request["group"]:
        hosts = request["host"] == "rank0" and rank == 0
        store = dist.TCPStore(
            "127.0.0.1", port, size, is_master=hosts, timeout=timedelta(seconds=20), wait_for_workers=False
        )
        timeout = timedelta(seconds=request["timeout"] or GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    result = function(rank, size, *request["args"])
    if dist.is_initialized() and request["destroy"]:
        dist.destroy_process_group()
    return result


def collect(ranks: dict, until: float) -> None:
    """Waits until all ranks that are not stopped have ended, or the time is up."""
    selector = selectors.DefaultSelector()
    for rank in ranks.values():
        os.set_blocking(rank["pipe"], False)
        selector.register(rank["pipe"], selectors.EVENT_READ, rank)
    while time.monotonic() < until:
        for key, _ in selector.select(0.01):
            data = os.read(key.fd, 1 << 20)
            key.data["data"] += data
            if not data:
                selector.unregister(key.fd)
        for rank in ranks.values():
            if rank["status"] is None:
                pid, status = os.waitpid(rank["pid"], os.WNOHANG | os.WUNTRACED)
                if pid:
                    rank["ended"] = time.monotonic()
                    rank["status"] = "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        if all(rank["status"] is not None for rank in ranks.values()):
            break
    for rank in ranks.values():
        while True:
            try:
                data = os.read(rank["pipe"], 1 << 20)
            except BlockingIOError:
                break
            if not data:
                break
            rank["data"] += data
        os.close(rank["pipe"])


def outcome(rank: dict) -> dict:
    status = rank["status"]
    if status is None:
        return {"kind": "hung"}
    if status == "stopped":
        return {"kind": "stopped"}
    if status < 0:
        return {"kind": "killed", "signal": -status}
    if not rank["data"]:
        return {"kind": "died", "code": status}
    kind, value, *trace = pickle.loads(rank["data"])
    return {"kind": kind, "value": value, "trace": trace[0] if trace else ""}


if __name__ == "__main__":
    main()

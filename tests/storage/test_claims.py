"""Who may write a run: living, dead, forked, frozen and far-away processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from storage_helpers import assert_same, components, new_store, save

from simckpt.errors import ConflictError, RunLockedError, StorageError
from simckpt.storage import StoreFiles, claims, processes
from simckpt.storage.durable import Disk

HOLD = """
import sys
from simckpt.storage import StoreFiles
claim = StoreFiles.open(sys.argv[1]).claim("ant-ppo")
print("held", flush=True)
sys.stdin.read()
"""

HOLD_WITH_CHILD = """
import os, sys, time
from simckpt.storage import StoreFiles
claim = StoreFiles.open(sys.argv[1]).claim("ant-ppo")
child = os.fork()
if child == 0:
    claim.release()
    claim.beat(now=True)
    del claim
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path / "store")


def start(code, store):
    return subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def writer(store):
    return store.path / "runs" / "ant-ppo" / "writer"


def pretend_owner(store, **changes):
    """Makes the standing claim look like another process's, with a right digest."""
    path = writer(store) / "owner.json"
    owner = claims.parse_owner(path.read_bytes(), path)
    path.write_bytes(replace(owner, process=replace(owner.process, **changes)).to_bytes())


def leave_claim(store, **changes):
    """A claim whose process has ended, as another process sees it."""
    holder = start(HOLD, store)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    if changes:
        pretend_owner(store, **changes)


def age(store, seconds):
    moment = time.time() - seconds
    os.utime(writer(store) / "heartbeat", (moment, moment))


def test_a_claim_excludes_other_processes_and_names_the_holder(store):
    holder = start(HOLD, store)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunLockedError) as caught:
        store.claim("ant-ppo")
    assert caught.value.pid == holder.pid
    assert caught.value.host == os.uname().nodename
    with pytest.raises(RunLockedError):
        save(store)
    holder.kill()
    holder.communicate()


def test_after_kill_9_the_next_claim_succeeds_at_once(store):
    leave_claim(store)
    with store.claim("ant-ppo"):
        save(store)


def test_a_zombie_counts_as_dead(store):
    holder = start(HOLD, store)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has collected it
    store.claim("ant-ppo").release()
    holder.communicate()


def test_forked_children_neither_keep_nor_release_a_claim(store):
    holder = start(HOLD_WITH_CHILD, store)
    child = int(holder.stdout.readline())
    assert holder.wait() == -signal.SIGKILL
    try:
        os.kill(child, 0)
        assert (writer(store) / "owner.json").exists()
        store.claim("ant-ppo").release()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_a_forked_child_may_not_commit(store):
    with store.claim("ant-ppo") as claim:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                claim.verify()
            except ConflictError:
                try:
                    save(store)
                except RunLockedError:
                    code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        claim.verify()


def test_a_process_claims_a_run_once_whatever_path_it_takes(store, tmp_path):
    (tmp_path / "link").symlink_to(store.path)
    with store.claim("ant-ppo") as claim:
        for other in (store, StoreFiles.open(tmp_path / "link")):
            with pytest.raises(RunLockedError, match="this process"):
                other.claim("ant-ppo")
        claim.verify()
        assert start_and_try(store) == "RunLockedError"
    store.claim("ant-ppo").release()


def start_and_try(store) -> str:
    code = """
import sys
from simckpt.storage import StoreFiles
try:
    StoreFiles.open(sys.argv[1]).claim("ant-ppo").release()
    print("claimed")
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code, str(store.path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_releasing_twice_does_no_harm_to_the_next_holder(store):
    first = store.claim("ant-ppo")
    first.release()
    with store.claim("ant-ppo") as second:
        first.release()
        second.verify()
    assert not writer(store).exists()
    assert list((store.path / "tmp").iterdir()) == []


def test_a_released_claim_verifies_no_more(store):
    claim = store.claim("ant-ppo")
    claim.release()
    with pytest.raises(ConflictError):
        claim.verify()


def test_another_machine_is_trusted_until_it_was_silent_for_long(store):
    leave_claim(store, boot_id="f" * 32, host="elsewhere")
    age(store, claims.STALE_AFTER - 60)
    with pytest.raises(RunLockedError, match="600 s of silence") as caught:
        store.claim("ant-ppo")
    assert caught.value.host == "elsewhere"
    age(store, claims.STALE_AFTER + 1)
    store.claim("ant-ppo").release()


def test_another_container_of_this_machine_is_trusted_until_it_was_silent_for_long(store):
    leave_claim(store, namespace=1)
    with pytest.raises(RunLockedError):
        store.claim("ant-ppo")
    age(store, claims.STALE_AFTER + 1)
    store.claim("ant-ppo").release()


def test_a_claim_from_before_a_reboot_is_stale_at_once(store):
    leave_claim(store, boot_id="f" * 32)
    store.claim("ant-ppo").release()


def test_a_reused_process_id_does_not_keep_a_claim(store):
    leave_claim(store, pid=os.getpid(), started=1)
    store.claim("ant-ppo").release()


def test_a_held_lock_outweighs_every_other_sign(store):
    holder = start(HOLD, store)
    assert holder.stdout.readline() == "held\n"
    pretend_owner(store, boot_id="f" * 32, pid=1, started=1)
    age(store, 10 * claims.STALE_AFTER)
    with pytest.raises(RunLockedError):
        store.claim("ant-ppo")
    holder.kill()
    holder.communicate()


def test_a_claim_with_an_unreadable_owner_goes_stale_by_silence(store):
    leave_claim(store)
    (writer(store) / "owner.json").write_bytes(b"")
    with pytest.raises(RunLockedError):
        store.claim("ant-ppo")
    age(store, claims.STALE_AFTER + 1)
    store.claim("ant-ppo").release()


def test_a_writer_that_lost_its_claim_cannot_commit(store):
    with store.claim("ant-ppo"):
        save(store, 1)
        pretend_owner(store, host="elsewhere")
        owner = json.loads((writer(store) / "owner.json").read_bytes())
        (writer(store) / "owner.json").write_bytes(claims.Owner("f" * 32, processes.this_process(), 0.0).to_bytes())
        assert owner["host"] == "elsewhere"
        with pytest.raises(ConflictError, match="taken over"):
            save(store, 2)
    assert [record.seq for record in store.records("ant-ppo")] == [1]
    assert_same(store.read("ant-ppo", 1), components(1))
    assert writer(store).exists()  # it is the other's


def test_a_writer_that_loses_its_claim_while_it_saves_does_not_commit(tmp_path):
    class FrozenDisk(Disk):
        """Long enough frozen before the index is written that another machine takes over."""

        def create(self, path):
            if path.name == "leaves.json":
                (writer(store) / "owner.json").write_bytes(
                    claims.Owner("f" * 32, replace(processes.this_process(), host="elsewhere"), 0.0).to_bytes()
                )
            return super().create(path)

    store = new_store(tmp_path / "store", disk=FrozenDisk())
    with store.claim("ant-ppo"), pytest.raises(ConflictError, match="elsewhere"):
        save(store)
    assert store.records("ant-ppo") == []


def refuse(monkeypatch, name, error):
    """Makes opening or reading the files of this name fail for the moment."""
    function = "open" if error == errno.EMFILE else "preadv"
    real = getattr(os, function)

    def failing(subject, *arguments, **options):
        path = subject if function == "open" else os.readlink(f"/proc/self/fd/{subject}")  # noqa: PTH115
        if os.fspath(path).endswith(name):
            raise OSError(error, os.strerror(error))
        return real(subject, *arguments, **options)

    monkeypatch.setattr(os, function, failing)


TRANSIENT = pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO], ids=errno.errorcode.get)


@TRANSIENT
def test_a_claim_that_cannot_be_read_for_a_moment_is_not_lost(store, error):
    with store.claim("ant-ppo") as claim:
        save(store, 1)
        with pytest.MonkeyPatch.context() as patch:
            refuse(patch, "owner.json", error)
            with pytest.raises(StorageError):
                claim.verify()
            with pytest.raises(StorageError):
                save(store, 2)
        claim.verify()
        assert save(store, 3).seq == 2
    assert list((store.path / "tmp").iterdir()) == []


@TRANSIENT
def test_a_claim_that_cannot_be_read_for_a_moment_is_not_taken_from_its_holder(store, error, monkeypatch):
    leave_claim(store)
    age(store, 10 * claims.STALE_AFTER)
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "owner.json", error)
        with pytest.raises(StorageError):
            store.claim("ant-ppo")
        assert (writer(store) / "owner.json").exists()
    store.claim("ant-ppo").release()


@TRANSIENT
def test_a_release_that_could_not_look_is_made_up_for_by_the_next_claim(store, error):
    claim = store.claim("ant-ppo")
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "owner.json", error)
        with pytest.raises(StorageError):
            claim.release()
    assert not claim.held
    with store.claim("ant-ppo"):
        save(store)


def test_a_heartbeat_is_seen_and_costs_nothing_in_between(store):
    with store.claim("ant-ppo") as claim:
        age(store, 1000)
        before = (writer(store) / "heartbeat").stat().st_mtime
        claim.beat()
        assert (writer(store) / "heartbeat").stat().st_mtime == before
        claim.beat(now=True)
        assert (writer(store) / "heartbeat").stat().st_mtime > before
        age(store, 1000)
        save(store)
        assert (writer(store) / "heartbeat").stat().st_mtime > before


def test_many_claim_at_once_and_one_wins(store):
    leave_claim(store)
    code = f"""
import sys
from simckpt.storage import StoreFiles
from simckpt.errors import RunLockedError
store = StoreFiles.open({str(store.path)!r})
sys.stdin.readline()
try:
    store.claim("ant-ppo")
    print("won", flush=True)
except RunLockedError:
    print("lost", flush=True)
sys.stdin.read()
"""
    contenders = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for contender in contenders:
        contender.stdin.write("go\n")
        contender.stdin.flush()
    answers = [contender.stdout.readline().strip() for contender in contenders]
    for contender in contenders:
        contender.communicate()
    assert sorted(answers) == ["lost", "lost", "lost", "won"]


def test_threads_of_one_process_claim_once(store):
    won, lost = [], []
    barrier = threading.Barrier(6)

    def contend():
        barrier.wait()
        try:
            won.append(store.claim("ant-ppo"))
        except RunLockedError:
            lost.append(1)

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    won[0].release()


def test_a_process_knows_itself_and_the_dead():
    here = processes.this_process()
    assert here.is_alive() is True
    assert replace(here, started=here.started + 1).is_alive() is False
    assert replace(here, pid=2**22 + 1).is_alive() is False
    assert replace(here, host="elsewhere", boot_id="0" * 32).is_alive() is None
    assert replace(here, boot_id="").is_alive() is None
    assert processes.Process.from_token(here.token("01234567")) == here
    assert processes.Process.from_token("something else") is None

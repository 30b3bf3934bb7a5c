"""What a recorder does at each step: it takes the row, and has snapshots on their way, in the thread of the loop.

Nothing here waits for a disk, and nothing raises because something cannot be recorded: that is warned of once, an event
of the session tells which row it was, and a snapshot comes next, from which a replay goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

from simckpt import state
from simckpt.errors import ConfigurationError
from simckpt.hardware import columns, reset_arguments
from simckpt.hardware.channel import pack
from simckpt.hardware.link_tables import LinkTables, UnknownLinks
from simckpt.hardware.loop_thread import LoopThread
from simckpt.hardware.part_buffers import PartBuffers
from simckpt.hardware.recording_messages import OUTBOX, RecordingProcess, Settings, warn
from simckpt.hardware.triggers import check_sizes
from simckpt.sim import EnvHandle
from simckpt.storage.session_records import SessionRecord

if TYPE_CHECKING:
    from simckpt.hardware.link import Link

_NEVER = 2**63 - 1
_TROUBLES = 100  # snapshots after something went wrong that are taken at once; then one each second
_SECOND = 1_000_000_000  # [ns]
_TOLD = 100  # causes that are warned of

Signals = Mapping[str, Callable[[Any, Mapping[str, Any]], Any]]


class Recording:
    """One recording; a resource for those who capture the env that it belongs to.

    Attributes:
        active: whether it still records.
        root: the store's folder.
        name: of the session.
        process: that writes.

    Args:
        env: what is recorded, the env inside the recorder.
        root: the store's folder.
        record: of the session.
        settings: see there.
        signals: {name: what returns it, given the env and the step's info}.
        links: of the env.

    Raises:
        UnsupportedStateError: the env cannot be captured.
        ConfigurationError: its observations or actions have no fixed size.
        StoreError: the session cannot be written.
    """

    def __init__(
        self,
        env: Any,
        root: Path,
        record: SessionRecord,
        settings: Settings,
        *,
        signals: Signals,
        links: Mapping[str, Link],
    ) -> None:
        self.root, self.name = root, record.name
        self.active = True
        self._closed = False
        self._env = env
        self._triggers = settings.triggers
        self._signals = dict(signals)
        self._handle = None if settings.snapshot_every is None else EnvHandle(env)
        self._snapshot_ns = 0 if settings.snapshot_every is None else round(settings.snapshot_every * 1e9)
        self._snapshot_due, self._snapshot_reason = (0 if self._handle is not None else _NEVER), "start"
        self._sent_models: set[str] = set()
        self._troubles = self._next_trouble = 0
        self._told: set[str] = set()
        self._unrecorded = range(0)  # rows one after the other, of which the event tells the first
        self._failed_with = 0  # the id of the last exception that was taken note of
        self._last_exception = getattr(sys, "last_value", None)
        forms = columns.forms_of(env)
        forms |= {"reset observation": forms["observation"], "signals": {}}
        self.process = RecordingProcess(self._process_gone)
        self._buffers = buffers = PartBuffers(self.process, forms, settings.part_seconds, self._want_after_trouble)
        self._loop = LoopThread(self._lost_of_others)
        buffers.links.update({name: LinkTables(buffers, self._loop, name, link) for name, link in links.items()})
        self._hearing: list[LinkTables | UnknownLinks] = [*buffers.links.values(), UnknownLinks(buffers, self._loop)]
        try:
            self.process.begin(root, record, settings)
            buffers.begin()
        except BaseException:
            self.active = False
            self.process.end()
            raise
        for each in self._hearing:
            each.attach()
        _recordings.add(self)

    @property
    def row(self) -> int:
        """The number of the next row."""
        return self._buffers.row

    # what the loop's thread does at each step

    def begin(self, action: Any) -> None:
        """Notes that a step begins; raises RecorderBusyError if another thread is in one."""
        buffers, loop = self._buffers, self._loop
        # the ordinary case without the call, which is as long as all that follows
        if get_ident() == loop.ident and not loop.asked and loop.acquire(False):
            loop.busy = True
        elif not loop.enter():
            self._interrupted()
        try:
            if time.monotonic_ns() >= self._snapshot_due:
                self._snapshot(self._snapshot_reason)
            if self.process.channel.waiting:
                self.process.flush()
            if not self.active:  # closed while this waited, or the process turned out to be gone
                return
            buffers.spoilt, buffers.in_step, buffers.place = None, True, buffers.rows
            if not columns.put(buffers.action, buffers.rows, action):
                buffers.put("action", action)
            buffers.order += 1
            place = buffers.rows
            buffers.row_order[place] = buffers.order
            buffers.row_wall[place] = time.time_ns()
            buffers.row_started[place] = time.monotonic_ns()
        except Exception as error:
            buffers.spoilt, buffers.in_step = _why(error), True
        except BaseException:
            self._lose_row("it was interrupted", None)
            loop.leave()
            raise
        finally:
            loop.busy = False

    def end(self, result: Any) -> None:
        """Takes the row that is complete now."""
        finished = time.monotonic_ns()
        buffers, loop = self._buffers, self._loop
        loop.busy = True
        begun = buffers.in_step
        try:
            if begun and buffers.spoilt is None:
                observation, reward, terminated, truncated, info = result
                if not columns.put(buffers.observation, buffers.rows, observation):
                    buffers.put("observation", observation)
                if self._signals:
                    self._put_signals(info)
                place = buffers.rows
                buffers.row_reward[place] = reward if type(reward) is float else columns.number(reward, "the reward")
                buffers.row_terminated[place] = terminated if type(terminated) is bool else columns.flag(terminated)
                buffers.row_truncated[place] = truncated if type(truncated) is bool else columns.flag(truncated)
                # by then links may have lost something of it
                if buffers.spoilt is None:
                    buffers.row_is_whole(finished)
        except Exception as error:
            buffers.spoilt = _why(error)
        except BaseException:
            self._lose_row("it was interrupted", result)
            raise
        finally:
            if buffers.in_step or buffers.spoilt is not None or loop.asked or self._unrecorded or not begun:
                self._end_oddly(result)
            else:
                loop.busy = False
                loop.release()

    def _end_oddly(self, result: Any) -> None:
        buffers = self._buffers
        try:
            if buffers.in_step:
                self._lose_row(buffers.spoilt or "it was interrupted", result)
            elif buffers.spoilt is not None:
                why, buffers.spoilt = buffers.spoilt, None
                self._lost_of_others(why)
            elif self._unrecorded:
                self._note_unrecorded()
        except BaseException:
            self._loop.ask(self._interrupted)
            raise
        finally:
            self._loop.leave()

    def failed(self, error: BaseException, where: str) -> None:
        """Notes that `step` or `reset` has raised; raises nothing itself."""
        buffers = self._buffers
        self._loop.busy = True
        try:
            buffers.in_step, buffers.spoilt = False, None
            if self.active:
                self._note_unrecorded()
                reason = f"{where} raised {type(error).__name__}: {error}"
                buffers.event("error", reason)
                self._want_after_trouble("error")  # what has become of the env is not known
                self._failed_with = id(error)
                self.process.trigger(buffers.row, reason, error=isinstance(error, Exception))
        except Exception as own:
            with contextlib.suppress(Exception):
                self._tell(f"an exception of {where} was not recorded: {_why(own)}")
        except BaseException:
            self._loop.ask(self._interrupted)
            raise
        finally:
            with contextlib.suppress(Exception):
                self._loop.leave()

    def begin_reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[int, int, int, int | None, str]:
        """Returns what `end_reset` needs; raises RecorderBusyError if another thread is in a step."""
        buffers = self._buffers
        if not self._loop.enter():
            self._interrupted()
        text: str | None = ""
        try:
            self._note_unrecorded()
            # the env may change them
            text = reset_arguments.to_text(seed, options)
            if text is None:
                buffers.event("unrecorded", "the options of the reset before this row cannot be recorded")
                self._want_after_trouble()
                self._tell(
                    f"the options of the reset before row {buffers.row} cannot be recorded; a replay passes over it: "
                    f"{str(options)[:200]}"
                )
            buffers.order += 1
        except Exception as error:
            self._tell(f"row {buffers.row}: {_why(error)}")
        except BaseException:
            self._loop.leave()
            raise
        finally:
            self._loop.busy = False
        text = reset_arguments.UNKNOWN if text is None else text
        return buffers.order, time.monotonic_ns(), time.time_ns(), seed, text

    def end_reset(self, begun: tuple[int, int, int, int | None, str], result: Any) -> None:
        """Takes a reset that is complete now."""
        buffers = self._buffers
        self._loop.busy = True
        try:
            if self.active:
                order, started, wall, seed, text = begun
                buffers.take_reset((order, started, wall), seed, text, result[0])
        except Exception as error:
            buffers.event("unrecorded", f"the reset before row {buffers.row} was not recorded: {_why(error)}")
            self._want_after_trouble()
            self._tell(f"the reset before row {buffers.row} was not recorded: {_why(error)}")
        except BaseException:
            self._loop.ask(self._interrupted)
            raise
        finally:
            self._loop.leave()

    def _put_signals(self, info: Any) -> None:
        values = {}
        for name, read in self._signals.items():
            try:
                values[name] = read(self._env, info)
            except Exception as error:
                raise ConfigurationError(f"signal {name!r} raised {type(error).__name__}: {error}") from error
        buffers = self._buffers
        if not columns.put(buffers.tables["rows"].get("signals"), buffers.rows, values):
            buffers.put("signals", values)
            for text in check_sizes(self._triggers, values):
                self._tell(text)

    # what went wrong

    def _lose_row(self, why: str, result: Any) -> None:
        """Passes over the row in progress, whose number is used up, and tells why."""
        buffers = self._buffers
        buffers.settle()
        if not buffers.in_step:
            # it was taken all the same
            return
        row, observation = buffers.row, None
        with contextlib.suppress(Exception):
            observation = state.copy_tree(result[0])
        buffers.skip_row(observation)
        if row == self._unrecorded.stop and len(self._unrecorded):
            self._unrecorded = range(self._unrecorded.start, row + 1)
        else:
            self._note_unrecorded()
            self._unrecorded = range(row, row + 1)
            buffers.event("unrecorded", f"row {row} was not recorded: {why}", row=row)
        self._want_after_trouble()
        self._tell(f"row {row} was not recorded: {why}", about=why.partition(":")[0])

    def _interrupted(self) -> None:
        """Notes that a step or reset began, and that nobody has told how it ended."""
        if self._buffers.in_step:
            self._lose_row("it was interrupted", None)
        elif self.active:
            self._lost_of_others("a call of the env was interrupted")

    def _note_unrecorded(self) -> None:
        """Tells of the rows after the one that an event has told."""
        rows, self._unrecorded = self._unrecorded, range(0)
        if len(rows) > 1:
            text = f"rows {rows.start + 1} to {rows.stop - 1} were not recorded either"
            self._buffers.event("note", text, row=rows.start + 1)

    def _lost_of_others(self, text: str) -> None:
        self._buffers.spoil(text)
        self._tell(f"row {self.row}: lost: {text}", about=text)

    def _tell(self, text: str, *, about: str | None = None) -> None:
        """Warns, once of each cause."""
        about = text if about is None else about
        if about not in self._told and len(self._told) < _TOLD:
            self._told.add(about)
            warn(text)

    def _process_gone(self, error: BaseException) -> None:
        if self.active:
            self.active = self._buffers.in_step = False
            self._snapshot_due = _NEVER
            self._detach()
            warn(f"the recording process is gone, and nothing more is recorded from row {self.row} on: {error}")

    # snapshots

    def snapshot(self, reason: str) -> None:
        """Takes a snapshot, now if this is the loop's thread and no step is in progress, else before the next one."""
        if self._handle is None:
            raise ConfigurationError(
                "this recorder takes no snapshots: snapshot_every is None", keys=["snapshot_every"]
            )
        if self.active:
            if self._loop.may_act():
                try:
                    self._snapshot(reason)
                finally:
                    self._loop.leave()
            else:
                self.want_snapshot(reason)

    def want_snapshot(self, reason: str) -> None:
        """Has the next step begin with a snapshot; any thread may call this."""
        if self._handle is not None and self.active:
            self._snapshot_reason, self._snapshot_due = reason, 0

    def _want_after_trouble(self, reason: str = "unrecorded") -> None:
        """Wants a snapshot, but not at each step where each goes wrong."""
        now = time.monotonic_ns()
        self._troubles += 1
        if self._troubles <= _TROUBLES or now >= self._next_trouble:
            self._next_trouble = now + _SECOND
            self.want_snapshot(reason)
        elif self._handle is not None and self.active and self._next_trouble < self._snapshot_due:
            self._snapshot_reason, self._snapshot_due = reason, self._next_trouble

    def _snapshot(self, reason: str) -> None:
        """Captures the env and sends that on its way; what cannot be captured is warned of, and noted."""
        try:
            self._take_snapshot(reason)
        except BaseException:
            # an interrupt: it may be the one behind which alone a replay can go on
            self.want_snapshot(reason)
            raise

    def _take_snapshot(self, reason: str) -> None:
        buffers, handle = self._buffers, self._handle
        assert handle is not None
        now, wall = time.monotonic_ns(), time.time_ns()
        self._snapshot_due, self._snapshot_reason = now + self._snapshot_ns, "interval"
        try:
            captured = handle.capture()
            models = handle.models
            encoded = pack(state.encode({"env": captured, "observation": buffers.newest_observation()}))
            fields = {digest: pack(state.encode(models[digest])) for digest in models.keys() - self._sent_models}
        except Exception as error:
            self._no_snapshot(_why(error))
            return
        if self.process.channel.waiting > OUTBOX:
            self._sent_models &= models.keys()
            self._no_snapshot("the recording process is too slow")
            return
        self._note_unrecorded()
        for digest, each in fields.items():
            self.process.send({"model": {"digest": digest, "form": each.form}}, each.parts)
        # the recording process lets go of models that no snapshot needs
        self._sent_models = set(models)
        buffers.order += 1
        message = {
            "row": buffers.row,
            "order": buffers.order,
            "monotonic": now,
            "wall": wall,
            "reason": reason,
            "models": sorted(models),
            "form": encoded.form,
        }
        self.process.send({"snapshot": message}, encoded.parts)

    def _no_snapshot(self, why: str) -> None:
        self._buffers.event("no snapshot", why)
        self._tell(f"no snapshot before row {self.row}: {why}", about=f"no snapshot: {why}")

    # what any thread or signal handler may ask for

    def note(self, kind: str, text: str) -> None:
        """Notes an event."""
        self._ask(self._note, self.row, kind, text, time.monotonic_ns(), time.time_ns())

    def trigger(self, reason: str) -> None:
        """Has a ring keep what there is."""
        self._ask(self._trigger, self.row, reason, time.monotonic_ns())

    def _note(self, row: int, kind: str, text: str, monotonic: int, wall: int) -> None:
        self._buffers.order += 1
        self.process.event(self._buffers.order, row, kind, text, monotonic=monotonic, wall=wall)

    def _trigger(self, row: int, reason: str, monotonic: int) -> None:
        self.process.trigger(row, reason, monotonic=monotonic)

    def _ask(self, function: Callable[..., None], *arguments: Any) -> None:
        if self.active:
            self._loop.ask(function, *arguments)
            if self._loop.may_act():
                self._loop.leave()

    # the end

    def close(self, how: str, text: str, error: BaseException | None = None) -> None:
        """Ends the recording, and waits until all of it is on the disk, as long as the recording process gets on.

        Args:
            how: "closed" or "error".
            text: for people.
            error: that ends it; keeps a ring if `OnError` is among the triggers.
        """
        if self.active:
            self._loop.close(self._close, how, text, error)
        elif not self._closed:
            # the recording process was gone before
            self._closed = True
            self.process.end()

    def _close(self, how: str, text: str, error: BaseException | None) -> None:
        if not self.active:
            return
        self.active, self._closed = False, True
        self._snapshot_due = _NEVER
        self._detach()
        buffers = self._buffers
        # a row in progress is not whole, and never will be
        buffers.in_step = False
        try:
            self._note_unrecorded()
            buffers.hand_over_last()
            if error is not None and id(error) != self._failed_with:
                self.process.trigger(buffers.row, text, error=True)
        finally:
            self.process.close(how, text, buffers.row)

    def close_at_exit(self) -> None:
        """Closes it when nobody has: a program that ends has not been killed, and may have ended by an exception."""
        error: BaseException | None = getattr(sys, "last_value", None)  # that has ended the program
        if error is None or error is self._last_exception:
            self.close("closed", "the program ended")
        else:
            self.close("error", f"{type(error).__name__}: {error}", error)

    def abandon(self) -> None:
        """Leaves the recording to the process that this one was forked from."""
        self.active = False
        self._detach()
        self.process.abandon()

    def _detach(self) -> None:
        for each in self._hearing:
            each.detach()


_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    for recording in list(_recordings):
        with contextlib.suppress(Exception):
            recording.abandon()
    _recordings.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"

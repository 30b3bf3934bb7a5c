"""How values are shown to people: sizes, moments and metrics as text, tables for notebooks.

Names and texts in a store may come from strangers: nothing here lets control characters or HTML through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from simckpt.errors import StoreError

if TYPE_CHECKING:
    from simckpt.checkpoint import Checkpoint

SHORT_ID = 12  # hex digits of an id where people read it


def printable(text: str, *, keep: str = "") -> str:
    """Returns a text whose control characters are spelled out, but for those in `keep`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


def size(nbytes: float) -> str:
    """Returns a number of bytes as "21.5 MB"; units are powers of 1,000."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count(number: int, what: str) -> str:
    """Returns "1 checkpoint", "1,024 checkpoints"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def moment(seconds: float) -> str:
    """Returns a UTC time as "2026-11-29 23:50:11", from seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def metrics(values: Mapping[str, float]) -> str:
    """Returns "eval/return 1024.37  loss 0.5"."""
    return printable("  ".join(f"{name} {value:.6g}" for name, value in values.items()))


def hyperparameters(values: Mapping[str, Any]) -> str:
    """Returns "learning_rate=0.0001  clip=0.2"."""
    return printable("  ".join(f"{name}={value}" for name, value in values.items()))


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", numbers: Iterable[int] = ()
) -> str:
    """Returns an HTML table of texts; whatever they hold is shown as it is.

    Args:
        header: a text for each column.
        rows: of as many texts; a shorter one's last text goes on to the end of the line.
        caption: above the table.
        numbers: the columns that are set to the right.
    """
    right = set(numbers)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(cell(tag, place, text, len(row)) for place, text in enumerate(row))

    def cell(tag: str, place: int, text: str, length: int) -> str:
        last = place == length - 1
        span = f' colspan="{len(header) - place}"' if last and length < len(header) else ""
        # the last column wraps, the others are as wide as they need
        style = f"text-align:{'right' if place in right else 'left'};white-space:{'pre-wrap' if last else 'pre'}"
        style += ";vertical-align:top;padding:1px 14px 1px 0"
        return f'<{tag}{span} style="{style}">{escape(printable(text))}</{tag}>'

    head = f"<thead><tr>{cells('th', header)}</tr></thead>" if any(header) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    # no <caption>, which is no wider than the table
    title = f"<div><b>{escape(printable(caption))}</b></div>" if caption else ""
    return f"<div>{title}<table>{head}<tbody>{body}</tbody></table></div>"


def html_facts(title: str, facts: Mapping[str, str]) -> str:
    """Returns an HTML table with a line for each fact that is not empty."""
    return html_table(("", ""), [(name, text) for name, text in facts.items() if text], caption=title)


def html_checkpoint(checkpoint: Checkpoint) -> str:
    """Returns what a checkpoint knows of itself, as an HTML table; what is damaged is told in it."""
    facts = {
        "kind": "" if checkpoint.kind == "save" else checkpoint.kind,
        "saved (UTC)": moment(checkpoint.created),
        "size": f"{size(checkpoint.nbytes)}, added {size(checkpoint.size)} to the store",
    }
    try:
        facts["metrics"] = metrics(checkpoint.metrics)
        facts["marks"] = "  ".join([*(["pinned"] if checkpoint.pinned else []), *sorted(checkpoint.tags)])
        facts["hyperparameters"] = hyperparameters(checkpoint.hyperparameters)
        facts["components"] = "  ".join(checkpoint.components())
    except StoreError as error:
        facts["damaged"] = str(error)
    return html_facts(f"{checkpoint.run} at step {checkpoint.step:,}, checkpoint {checkpoint.id}", facts)

"""The language of `simckpt find --where`: which checkpoints are wanted, as a text.

    eval/return > 3000 and git.commit = '4f2c9a1' and not tag = 'broken'

A condition is a name, one of `= != < <= > >= like`, and a number, a quoted text, `true`, `false` or `null`; conditions
are joined by `not`, `and`, `or`, which bind in this order, and by brackets. A name alone means `= true`.

- Names are those of `FIELDS`; `metrics.<name>`, `hyperparameters.<name>`, `versions.<package>`; and for short the names
  of metrics and hyperparameters by themselves. A name with other characters than letters, digits and `_ . / : - % @`
  stands in backticks.
- In `like` patterns `%` stands for any text and `_` for any one character. Upper and lower case differ.
- An id or a commit equals a text that it begins with. `created` is compared with seconds since 1970 or with a text
  such as '2027-01-15' or '2027-01-15 08:30', in UTC.
- A checkpoint that lacks what a name stands for meets no condition on it but `= null`; so `not (eval/return > 3000)`
  finds those without that metric too, and `eval/return <= 3000` does not. NaN is neither below nor above
  anything; `loss = nan` finds it.

Nothing is evaluated as code or handed to a database: a text becomes a small tree of the classes below, and that is all.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from simckpt.errors import QueryError
from simckpt.suggest import nearest

# what every checkpoint has, and of which type; a moment is compared as seconds
FIELDS: Mapping[str, str] = {
    "id": "id",
    "run": "text",
    "seq": "number",
    "step": "number",
    "kind": "text",
    "parent": "id",
    "created": "moment",
    "duration": "number",
    "size": "number",
    "tier": "text",
    "host": "text",
    "device": "text",
    "experiment": "text",
    "git.commit": "id",
    "git.dirty": "bool",
    "tag": "text",
    "pinned": "bool",
}
DEPTH = 50  # brackets in each other
DIGITS = 400  # of a number, signs and all; a float ends at 309, and Python takes no text of 5,000 for a number
GROUPS = ("metrics", "hyperparameters", "versions")

_ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./])|[+-](?i:inf)\b)"
    r"|(?P<text>'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")"
    r"|(?P<quoted>`[^`]+`)"
    r"|(?P<sign>!=|<>|<=|>=|==|[=<>()])"
    r"|(?P<word>[^\W\d][\w./:%@-]*))"
)
_VALUES = {"true": True, "false": False, "null": None, "nan": math.nan, "inf": math.inf}
_JOINS = ("and", "or", "not", "like")

ValueOf = Callable[[str], Any]


@dataclass(frozen=True)
class Condition:
    """`<name> <comparison> <value>`.

    Attributes:
        name: as written.
        comparison: "=", "!=", "<", "<=", ">", ">=" or "like".
        value: None, a bool, a number or a text.
        position: where the name stands in the query [characters].
    """

    name: str
    comparison: str
    value: bool | float | str | None
    position: int

    def matches(self, value_of: ValueOf) -> bool:
        """Returns whether the condition is met, given a function from names to values (None: there is none)."""
        found = value_of(self.name)
        if isinstance(found, frozenset):
            return self._matches_any(found)
        if self.value is None:
            return (found is None) == (self.comparison == "=")
        if found is None:
            return False
        if self.comparison == "!=":
            return not self._equals(found)
        return self._equals(found) if self.comparison == "=" else self._compares(found)

    def _matches_any(self, found: frozenset[str]) -> bool:
        if self.value is None:
            return (not found) == (self.comparison == "=")
        if self.comparison == "!=":
            return self.value not in found
        return any(self._equals(each) if self.comparison == "=" else self._compares(each) for each in found)

    def _equals(self, found: Any) -> bool:
        if isinstance(self.value, str) and isinstance(found, str) and FIELDS.get(self.name) == "id":
            return found.startswith(self.value)
        if isinstance(self.value, float) and math.isnan(self.value):
            return isinstance(found, float) and math.isnan(found)
        return _is_like(found, self.value) and bool(found == self.value)

    def _compares(self, found: Any) -> bool:
        if not _is_like(found, self.value):
            return False
        if self.comparison == "like":
            return _pattern(str(self.value)).fullmatch(found) is not None
        return _ORDER[self.comparison](found, self.value)


@dataclass(frozen=True)
class Both:
    """`<part> and <part> ...`."""

    parts: tuple[Query, ...]

    def matches(self, value_of: ValueOf) -> bool:
        """Returns whether all parts are met."""
        return all(part.matches(value_of) for part in self.parts)


@dataclass(frozen=True)
class Either:
    """`<part> or <part> ...`."""

    parts: tuple[Query, ...]

    def matches(self, value_of: ValueOf) -> bool:
        """Returns whether one of the parts is met."""
        return any(part.matches(value_of) for part in self.parts)


@dataclass(frozen=True)
class Not:
    """`not <part>`."""

    part: Query

    def matches(self, value_of: ValueOf) -> bool:
        """Returns whether the part is not met."""
        return not self.part.matches(value_of)


Query = Condition | Both | Either | Not


def parse(text: str) -> Query:
    """Returns the tree of a query.

    Raises:
        QueryError: the text is none; the message shows the place.
    """
    return _Parser(text).parse()


def conditions(query: Query) -> list[Condition]:
    """Returns all conditions of a query, from left to right."""
    if isinstance(query, Condition):
        return [query]
    parts = (query.part,) if isinstance(query, Not) else query.parts
    return [condition for part in parts for condition in conditions(part)]


def full_name(name: str) -> str:
    """Returns the name with its group; a short one that is no metric's is taken for a hyperparameter's."""
    return name if name in FIELDS or name.partition(".")[0] in GROUPS else f"hyperparameters.{name}"


def is_of_start(name: str) -> bool:
    """Returns whether a full name stands for something that the record of a start holds, not that of a checkpoint."""
    return name in ("device", "experiment") or name.partition(".")[0] in ("git", "hyperparameters")


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Gives the names of all values in nested dicts: `lr`, `optimizer`, `optimizer.lr`."""
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")


def check_names(text: str, query: Query, *known: Collection[str]) -> None:
    """Raises QueryError at the first name that is neither a field nor among the known ones.

    Args:
        text: what the query was parsed from, for the message.
        query: its tree.
        *known: the names of all metrics, hyperparameters and packages, in this order.
    """
    metrics, hyperparameters, _ = known
    names = {*metrics, *hyperparameters}
    full = {f"{group}.{name}" for group, each in zip(GROUPS, known, strict=True) for name in each}
    for condition in conditions(query):
        if condition.name not in FIELDS and condition.name not in names and condition.name not in full:
            near = nearest(condition.name, [*FIELDS, *sorted(names), *sorted(full)])
            message = f"nothing here is called {condition.name!r}: no field, metric or hyperparameter{near}"
            raise _error(message, text, condition.position)


def _is_like(found: Any, value: Any) -> bool:
    """Returns whether two values can be compared: both texts, both truth values, or both numbers."""
    if isinstance(found, bool) or isinstance(value, bool):
        return isinstance(found, bool) and isinstance(value, bool)
    if isinstance(found, str) or isinstance(value, str):
        return isinstance(found, str) and isinstance(value, str)
    return isinstance(found, int | float)


def _pattern(pattern: str) -> re.Pattern[str]:
    parts = {"%": ".*", "_": "."}
    return re.compile("".join(parts.get(each) or re.escape(each) for each in pattern), re.DOTALL)


def _error(message: str, text: str, position: int) -> QueryError:
    # a query is one line for the message, so that the caret stands under its place
    line = re.sub(r"\s", " ", text)
    return QueryError(f"{message}\n  {line}\n  {' ' * position}^", query=text, position=position)


@dataclass(frozen=True)
class _Token:
    kind: str  # number, text, quoted, sign, word, end
    text: str
    position: int

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.lower() in words


class _Parser:
    """A recursive descent: either := both {or both}; both := negated {and negated}; negated := not negated | atom."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._place = 0
        self._depth = 0

    def parse(self) -> Query:
        if self._next.kind == "end":
            raise self._wrong("a condition such as step >= 1000")
        query = self._either()
        if self._next.kind != "end":
            raise self._wrong("`and`, `or` or the end")
        return query

    def _split(self) -> list[_Token]:
        tokens, position = [], 0
        end = len(self._text.rstrip())
        while position < end:
            match = _TOKEN.match(self._text, position)
            if match is None:
                start = position + len(self._text[position:]) - len(self._text[position:].lstrip())
                raise _error(self._what_is_wrong(start), self._text, start)
            kind = str(match.lastgroup)
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            position = match.end()
        return [*tokens, _Token("end", "", end)]

    def _what_is_wrong(self, start: int) -> str:
        character = self._text[start]
        if character in "'\"`":
            return f"the closing {character} is missing"
        if character.isdigit() or character in "+-.":
            return "this is neither a number nor a name: put text in quotes, names in backticks"
        return f"{character!r} has no meaning here: put text in quotes, names in backticks"

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _take(self) -> _Token:
        token = self._next
        self._place += 1
        return token

    def _wrong(self, expected: str) -> QueryError:
        found = f"found {self._next.text}" if self._next.text else "the query ends"
        return _error(f"here should stand {expected}; {found}", self._text, self._next.position)

    def _either(self) -> Query:
        parts = [self._both()]
        while self._next.is_word("or"):
            self._take()
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _both(self) -> Query:
        parts = [self._negated()]
        while self._next.is_word("and"):
            self._take()
            parts.append(self._negated())
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def _negated(self) -> Query:
        negations = 0
        while self._next.is_word("not"):
            self._take()
            negations += 1
        query = self._atom()
        return Not(query) if negations % 2 else query

    def _atom(self) -> Query:
        token = self._next
        if token.text == "(" and token.kind == "sign":
            self._take()
            self._depth += 1
            if self._depth > DEPTH:
                raise self._wrong(f"at most {DEPTH} brackets in each other")
            query = self._either()
            if self._next.text != ")":
                raise self._wrong("`)`")
            self._take()
            self._depth -= 1
            return query
        if token.kind == "quoted" or (token.kind == "word" and not token.is_word(*_JOINS, *_VALUES)):
            return self._condition()
        raise self._wrong("a name, such as step or eval/return")

    def _condition(self) -> Condition:
        token = self._take()
        name = token.text.strip("`")
        sign = self._next
        if not (sign.kind == "sign" and sign.text not in "()") and not sign.is_word("like"):
            if sign.kind in ("number", "text"):
                raise self._wrong("one of = != < <= > >= like")
            return Condition(name, "=", True, token.position)
        self._take()
        comparison = {"==": "=", "<>": "!="}.get(sign.text, sign.text.lower())
        value_token = self._next
        value = self._typed(name, comparison, self._value())
        self._check_comparison(name, comparison, value, sign, value_token)
        return Condition(name, comparison, value, token.position)

    def _value(self) -> bool | float | str | None:
        token = self._next
        if token.kind == "text":
            self._take()
            quote = token.text[0]
            return token.text[1:-1].replace(quote * 2, quote)
        if token.kind == "number":
            number = token.text.replace("_", "")
            if len(number) > DIGITS:
                raise _error(f"a number has at most {DIGITS} digits", self._text, token.position)
            self._take()
            return int(number) if re.fullmatch(r"[+-]?\d+", number) else float(number)
        if token.is_word(*_VALUES):
            self._take()
            return _VALUES[token.text.lower()]
        if token.kind == "word" and not token.is_word(*_JOINS):
            raise self._wrong(f"a value: put text in quotes, {token.text!r}")
        raise self._wrong("a number, a text in quotes, true, false or null")

    def _typed(self, name: str, comparison: str, value: bool | float | str | None) -> bool | float | str | None:
        """Returns the value as the field is compared with it: a moment in seconds."""
        if FIELDS.get(name) != "moment" or not isinstance(value, str) or comparison == "like":
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self._place -= 1
            raise self._wrong(f"a moment such as '2027-01-15' or '2027-01-15 08:30' for {name}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    def _check_comparison(
        self, name: str, comparison: str, value: bool | float | str | None, sign: _Token, value_token: _Token
    ) -> None:
        """Raises QueryError for a comparison that nothing could meet."""
        kind = {"id": "text", "moment": "number"}.get(FIELDS.get(name, ""), FIELDS.get(name))
        given = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
        if value is None or isinstance(value, bool):
            if comparison not in ("=", "!="):
                message = f"true, false and null are compared by = and != alone, not by {sign.text}"
                raise _error(message, self._text, sign.position)
        elif comparison == "like" and given != "text":
            raise _error("after `like` comes a text in quotes, such as '%gpu%'", self._text, value_token.position)
        if name == "tag" and comparison in _ORDER:
            raise _error("tags are compared by =, != and like", self._text, sign.position)
        if value is not None and kind is not None and kind != given:
            wanted = {"text": "a text in quotes", "number": "a number", "bool": "true or false"}[kind]
            raise _error(f"{name} is compared with {wanted}", self._text, value_token.position)

"""Write schemas as TOML: a commented draft for a new log, or any schema."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

import polars as pl

from stoker.base.errors import ConfigError, SchemaError
from stoker.base.settings import checked_arguments
from stoker.base.units import listed, plural
from stoker.prep.features.base import Derivation
from stoker.prep.guess import USER_NAME, Guess, Sample, decimal_commas, guess_columns, look, null_texts
from stoker.prep.inputs import Input, Inputs, files_of
from stoker.prep.parse.layout import COMPARE
from stoker.prep.parse.notation import with_point
from stoker.prep.parse.quarantine import DEFAULT_BAD
from stoker.prep.parse.sources import FRAME, expand, source_kind
from stoker.prep.schema import COLUMNS, RULE_KEYS, VALUE_TYPES, Label, Schema, SplitRule
from stoker.prep.settings import DRAFT_ROWS
from stoker.prep.source_format import SourceFormat

AUTO = "auto"  # instead of a recipe: prepare with the draft as it is
_UNNAMED = re.compile(r"c\d+").fullmatch  # the names that a log without a header gets
_GROUP_NAME = re.compile(
    r"session|impression|search|query|request|clickout|slate|visit(_|$)|list_?id|basket|order", re.I
)
_TIME_NAME = re.compile(r"time|(^|_)ts($|_)", re.I)
_ITEM_NAME = re.compile(r"item|product|article|sku|song|track|movie|film|video|book|game|hotel|(^|_)ad($|_)", re.I)
_STRONG = 3  # candidates for the label up to this order have the name of an outcome
_MOST_MISSING = 0.2  # a column that this share of rows lacks is not used as [timestamp]
_CLASS_ROWS = 10  # rows of each class from which a value that only one class has does not come by chance
_VALUE_ROWS = 3  # rows of each class for each value from which values of one class each are no chance


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft of a schema and what it is based on."""

    text: str  # the schema, TOML with comments
    columns: Sequence[Guess]  # one for each column, in the order of the log
    label: str | None  # the column to predict; None: none was found, and ``[label]`` is a comment
    features: int  # number of columns that a model would see
    rows: int  # number of rows read
    unsure: int  # number of comments that ask a question
    lacking: float  # share of rows without label or time, which are bad lines
    known: str = ""  # which recipe knows such a log, and the command

    def role(self, column: Guess) -> str:
        """Return the role of a column in the draft: label, dense, categorical, sequence, time or left out."""
        return "label" if column.name == self.label else column.kind

    @property
    def positive(self) -> str:
        """The column of the label and, if its values are not 0 and 1, which of them count as 1."""
        outcome = next((one.outcome for one in self.columns if one.name == self.label), None)
        return " ".join(text for text in (self.label, outcome and outcome.rule) if text)

    @property
    def notes(self) -> Iterator[str]:
        """Yield a recipe that knows the log, each doubt, and each column that is left out."""
        yield from [f"this {self.known}"] if self.known else []
        for part in self.text.split("\n\n"):
            name = re.search(r"^(?:name|column) = (.*)", part, re.MULTILINE)
            for doubt in re.findall(r"^# unsure: (.*)", part, re.MULTILINE):
                yield f"unsure: column {name[1]}: {doubt}" if name else f"unsure: {doubt}"
        yield from (f"left out: {one.name}: {one.reason}" for one in self.columns if self.role(one) == "left out")

    @property
    def doubts(self) -> str:
        """A warning for a user who has not read the draft, or an empty text if there is no doubt."""
        if not self.unsure:
            return ""
        doubts = plural(self.unsure, "doubt")
        return f"the drafted schema has {doubts}: stoker init writes it to a file, with a comment at each."

    def schema(self) -> Schema:
        """Return the drafted schema as it is, without your answers.

        Raises:
            SchemaError: no column looks like a label, none like a feature, or dates have two possible formats.
        """
        lacking = "label" if self.label is None else "feature" if not self.features else None
        if lacking is not None:
            columns = [f"{one.name} ({one.reason})" if one.reason else one.name for one in self.columns]
            twice = "".join(f"{note[8:].capitalize()}. " for note in self.notes if note.startswith("unsure: several"))
            raise SchemaError(
                f"no column of the log looks like a {lacking}: {listed(columns, longest=150)}. {twice}"
                + (f"It {self.known}. Or draft" if self.known else "Draft")
                + " a schema with stoker init LOG, fill in what is missing, and prepare with that file."
                + " If all rows are positive, such as purchases, uncomment [negatives] there." * (lacking == "label")
            )
        time = next((one for one in self.columns if self.role(one) == "time" and len(one.formats) > 1), None)
        if time is not None:
            formats = " or ".join(f'format = "{one}"' for one in time.formats)
            raise SchemaError(
                f"the dates of column {time.name}, such as {time.example!r}, can be read in two ways: {formats}. "
                "Draft a schema with stoker init LOG, choose one of them there, and prepare with that file."
            )
        return Schema.from_dict(tomllib.loads(self.text), where="the drafted schema")


@checked_arguments
def draft_schema(log: Input | Sequence[Input], *, rows: int = DRAFT_ROWS, command: str | None = None) -> str:
    """Draft a schema for your log from its first rows, as TOML text with comments.

    Comments that begin with ``unsure:`` are questions to you. If no label was found, ``[label]`` is a comment for you
    to fill in.

    >>> import polars as pl
    >>> log = pl.DataFrame({"item": ["a", "b", "a"], "price": [1.5, 2.5, 4.0], "clicked": [0, 1, 0]})
    >>> print(stoker.draft_schema(log))  # doctest: +ELLIPSIS
    # Draft of a schema from 3 rows of polars.DataFrame.
    ...
    [[categorical]]  # 2 values in 3 rows; such as 'a'
    name = "item"
    <BLANKLINE>

    Args:
        log: files, URLs or glob patterns: delimited text or JSON lines, also as .gz or .zst, or Parquet; or tables,
            as :func:`stoker.prepare` takes them. The draft uses up the rows that it reads from a stream.
        rows: number of rows to read, the same from the beginning of each file, and at most 128 MiB of text.
        command: the next command to show in the first lines; None: one with the names of the files.

    Raises:
        DataError: a file does not exist, is empty, or is not a log.
        ConfigError: ``rows`` is below 1.
    """
    return draft_log(log, rows=rows, command=command).text


def draft_log(log: Input | Sequence[Input], *, rows: int = DRAFT_ROWS, command: str | None = None) -> Draft:
    """Draft a schema as :func:`draft_schema` does; return it with a guess for each column."""
    if not rows >= 1:
        raise ConfigError(f"rows={rows} is below 1: there is nothing to look at.", settings=("rows",))
    with files_of(log, rows=rows + 1) as inputs:
        return draft_inputs(inputs, log, rows=rows, command=command)


def draft_inputs(inputs: Inputs, log: Any, *, rows: int = DRAFT_ROWS, command: str | None = None) -> Draft:
    """Draft a schema for local files; ``log`` is what the user named."""
    tables = [name for path, name in inputs.names.items() if path.suffix == FRAME]
    files, _ = expand(inputs.files)
    sample = look(files, rows)
    if tables:
        sample.source = SourceFormat()
    if source_kind(files[0], sample.source.kind) == "csv":
        if sample.source.separator in (";", "\t") and (commas := decimal_commas(sample.frame)):
            sample.source = replace(sample.source, decimal=",")
            sample.frame = sample.frame.with_columns(with_point(sample.frame.get_column(name)) for name in commas)
        sample.source = replace(sample.source, null_values=tuple(null_texts(sample.frame)))
    columns = guess_columns(sample)
    outcomes = [column for column in columns if column.outcome]
    label = min(outcomes, key=lambda one: one.outcome.order if one.outcome else 0, default=None)
    time = _choose_time(columns, label)
    _leave_out_others(columns, label, time)
    if label is not None:
        _leave_out_tells(columns, label, sample.frame)
    if tables:
        stem, names = "log", ", ".join(tables)
        usual = 'stoker.prepare("schema.toml", frame, out="data")'
    else:
        given = [log] if not isinstance(log, Sequence) or isinstance(log, str) else log
        stem, names = files[0].name.split(".")[0] or "log", " ".join(shlex.quote(str(one)) for one in given)
        usual = f"stoker prepare schema.toml {names} --out data"
    height = sample.frame.height
    lacking = sum(one.missing for one in (label, time) if one)
    head = [
        f"Draft of a schema from {plural(height, 'row')} of {names}{'' if sample.whole else ', not all of its rows'}.",
        "Comments that begin with `unsure:` want your answer; docs/prepare.md describes every key. Then:",
        f"  {command or usual}",
    ]
    from stoker.prep import recipes  # they import much

    recipe, known = recipes.known(files[0].name, sample.frame.columns, sample.source), ""
    if recipe is not None:
        known = f"looks like a log that the recipe {recipe.name} knows: {usual.replace('schema.toml', recipe.name)}"
        head.append(f"This {known}")
    features = [column for column in columns if column is not label and column.kind in COLUMNS]
    if not features:
        head.append(
            "unsure: no column could be a feature. Add at least one [[dense]], [[categorical]] or [[sequence]]."
        )
    parts = [
        [*map(_comment, head)],
        [f"name = {toml_value(stem)}", *_group(columns)],
        _source(sample),
        _label(label, columns, lacking),
        _timestamp(time, lacking),
        _split(columns, label, time),
        *_columns(features, height),
        _left_out([column for column in columns if column is not label and column.kind == "left out"]),
    ]
    text = "\n\n".join("\n".join(part) for part in parts if part) + "\n"
    unsure = sum(line.lstrip("# ").startswith("unsure:") for line in text.splitlines())
    return Draft(
        text=text, columns=columns, label=label.name if label else None, features=len(features), rows=height,
        unsure=unsure, lacking=lacking, known=known,
    )  # fmt: skip


def _choose_time(columns: Sequence[Guess], label: Guess | None) -> Guess | None:
    """Return the column for ``[timestamp]``: one with few missing values, by its name and then its place."""
    found = [one for one in columns if one.kind == "time" and one is not label and one.missing < _MOST_MISSING]
    return min(found, key=lambda one: (_TIME_NAME.search(one.name) is None, one.missing > 0), default=None)


def _leave_out_others(columns: Sequence[Guess], label: Guess | None, time: Guess | None) -> None:
    """Leave out other times, and other outcomes, from which a model could read the label."""
    for column in columns:
        if column is label or column.kind == "left out":
            continue
        if column.kind == "time" and column is not time:
            empty = column.missing >= _MOST_MISSING
            why = f"a time that {column.missing:.0%} of the rows lack" if empty else "another time than [timestamp]"
            column.kind, column.reason = "left out", f"{why}; docs/features.md makes features of times"
        elif column.outcome is not None and column.outcome.order <= _STRONG:
            column.kind = "left out"
            column.reason = "another outcome? As a feature it could reveal the label"


def _leave_out_tells(columns: Sequence[Guess], label: Guess, frame: pl.DataFrame) -> None:
    """Leave out columns that reveal the label.

    They have one value, or none, in all rows of a class and in no others, or values that are each in one class only.
    """
    rule = Label(column=label.name, rule=label.outcome.rule if label.outcome else None).parsed() or ("==", 1.0)
    texts = frame[label.name].cast(pl.String)
    values = texts if isinstance(rule[1], str) else texts.str.strip_chars().cast(pl.Float64, strict=False)
    positive = COMPARE[rule[0]](values, rule[1])
    for column in columns:
        if column is label or column.kind == "left out" or frame[column.name].dtype.is_nested():
            continue
        yes, no = (frame[column.name].filter(one) for one in (positive, ~positive))
        for name, one, other in (("0", no, yes), ("1", yes, no)):
            if min(len(one), len(other)) >= _CLASS_ROWS and one.n_unique() == 1 and not other.eq_missing(one[:1]).any():
                what = "empty" if one[0] is None else f"{str(one[0])[:30]!r}"
                column.leave_out(f"{what} in all rows with label {name} and in no others: it reveals the label")
        enough = max(_CLASS_ROWS, _VALUE_ROWS * column.distinct)
        if column.kind in COLUMNS and min(yes.count(), no.count()) >= enough and set(yes).isdisjoint(no.drop_nulls()):
            column.leave_out("no value is in rows of both labels: it reveals the label")


def _comment(text: str) -> str:
    return "# " + "".join(letter if letter.isprintable() else "?" for letter in text)


def _table(head: str, said: Sequence[str], doubts: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table: its head with facts, its doubts, and its keys."""
    first = f"{head}  {_comment('; '.join(said))}" if said else head
    return [first, *(_comment(f"unsure: {text}") for text in doubts), *_lines(values)]


def _source(sample: Sample) -> list[str]:
    values = entries(sample.source)
    if not values and not sample.unsure and not sample.bad:
        return []
    said = "the first line names the columns" if sample.header else "no header: c1, c2, ... are for you to rename"
    lines = _table("[source]", [said] if "separator" in values else [], sample.unsure, {})
    if sample.bad:
        lines.append(_comment(f"{plural(sample.bad, 'line')} with other fields than the rest: bad lines, set aside"))
    return lines + _lines(values)


def _group(columns: Sequence[Guess]) -> list[str]:
    codes = [one for one in columns if one.kind != "time" and one.repeats > 1 and one.distinct > 1]
    found = [one.name for one in codes if _GROUP_NAME.search(one.name)]
    said = "if its rows are one list to rank: MRR, nDCG and hit rate are reported"
    return [f"# group = {_printable(name)}  # {said}" for name in found[:1]]


def _printable(text: str) -> str:
    """Return a text as TOML that a comment can hold."""
    return _comment(toml_value(text))[2:]


def _label(label: Guess | None, columns: Sequence[Guess], lacking: float) -> list[str]:
    others = [one for one in columns if one is not label and one.kind != "left out"]
    two = [_printable(one.name) for one in others if one.distinct == 2]
    candidates = [_comment(f"columns with two values: {', '.join(two[:20])}")] if two else []
    if label is None or label.outcome is None:
        return [
            _comment("unsure: no column looks like a label. Name the column to predict and uncomment these lines;"),
            _comment("a rule (>=, >, <=, <, ==, != and a number, or == and quoted text) says which values are 1."),
            *candidates, "# [label]", '# column = "?"', '# rule = ">= 4"', *_negatives(columns),
        ]  # fmt: skip
    found = label.outcome
    rivals = [_printable(one.name) for one in columns if one is not label and one.outcome]
    names = ", ".join(rivals[:20])
    more = [_comment(f"other candidates: {names}")] if rivals else []
    doubts = [found.doubt] if found.doubt else []
    if rivals and found.order > _STRONG:  # no name says which: a user who trains at once must hear of it
        said = f"Or is it {names}? Choose with column in [label] of the schema, which stoker init writes"
        doubts, more = [f"{found.doubt}. {said}"], []
    if label.missing:
        doubts.append(_lacking("label", label.missing, lacking))
    said = f"{plural(label.distinct, 'value')}, such as {label.example!r}"
    values = {"column": label.name, **({"rule": found.rule} if found.rule else {})}
    return [*_table("[label]", [said], doubts, {}), *more, *_lines(values)]


def _lacking(what: str, share: float, both: float) -> str:
    allow = f"; with a schema file add --max-bad {min(100, int(100 * both) + 1)}%" if both >= DEFAULT_BAD else ""
    return f"{share:.1%} of the rows have no {what}: they are bad lines, set aside{allow}"


def _negatives(columns: Sequence[Guess]) -> list[str]:
    """Propose rows of label 0 to sample, for a log of positive rows."""
    codes = [one for one in columns if one.code and one.kind == "categorical" and one.repeats > 1]
    codes = [one for one in codes if not USER_NAME.search(one.name)]
    item = min(codes, key=lambda one: _ITEM_NAME.search(one.name) is None, default=None)
    if item is None:
        return []
    return [
        _comment("If all rows are positive, such as purchases, there is no label. Uncomment these lines instead:"),
        _comment("each row is then followed by rows of label 0 with the columns of other items. Name all of the item."),
        "# [negatives]", f"# columns = [{_printable(item.name)}]", "# per_positive = 4",
    ]  # fmt: skip


def _timestamp(time: Guess | None, lacking: float) -> list[str]:
    if time is None:
        return []
    missing = [_lacking("time", time.missing, lacking)] if time.missing else []
    settings = {key: value for key, value in time.settings.items() if value != "int"}
    said = [*time.notes, f"such as {time.example!r}"]
    return _table("[timestamp]", said, [*time.doubts, *missing], {"column": time.name, **settings})


def _split(columns: Sequence[Guess], label: Guess | None, time: Guess | None) -> list[str]:
    """Split by time if there is one; for logs of users, propose leave_last_out in a comment."""
    codes = [one for one in columns if one is not label and one.code and one.kind != "left out" and one.repeats >= 2]
    users = [one for one in codes if one.kind == "categorical" and USER_NAME.search(one.name)]
    unnamed = [one for one in codes if time and one.kind == "categorical" and not one.missing and _UNNAMED(one.name)]
    rule = 'rule = "hash"  # by row number' if time is None else 'rule = "time"  # the earliest rows train'
    lines = ["[split]", rule, "train = 0.8", "valid = 0.1", "test = 0.1"]
    for user in (users or unnamed)[:1]:
        needs = "" if time is not None else ", with a [timestamp]"
        whose = "each user's" if users else f"if {user.name} is the user, each user's"
        lines += [
            _comment(f"instead, {whose} last row for the test, the one before for validation{needs}:"),
            '# rule = "leave_last_out"',
            f"# column = {_printable(user.name)}",
        ]
    return lines


def _columns(features: Sequence[Guess], rows: int) -> Iterator[list[str]]:
    names: set[str] = set()
    for column in sorted(features, key=lambda one: COLUMNS.index(one.kind)):
        name = _safe(column.name, names)
        names.add(name)
        values = {"name": name, **({} if name == column.name else {"source": column.name}), **column.settings}
        said = [plural(column.distinct, "value") + (f" in {rows:,} rows" if column.kind == "categorical" else "")]
        said += [f"{column.missing:.1%} missing"] if column.missing else []
        said += [*column.notes, f"such as {column.example!r}"]
        yield _table(f"[[{column.kind}]]", said, column.doubts, values)


def _safe(name: str, taken: set[str]) -> str:
    """Return a name for a column that is also a valid file name."""
    safe = re.sub(r"[\x00-\x1f\x7f/\\*]", "_", name)
    if safe != name or name.startswith(("__", ".")) or len(name.encode()) > 100:
        safe = safe.lstrip("_.")[:60] or "column"
    number = 2
    while safe in taken:
        safe, number = f"{safe}_{number}", number + 1
    return safe


def _left_out(columns: Sequence[Guess]) -> list[str]:
    if not columns:
        return []
    lines = [_comment("Left out. To use a column all the same, uncomment its table.")]
    for column in columns:
        lines += ["", "# [[categorical]]  " + _comment(column.reason), f"# name = {_printable(column.name)}"]
        if column.settings.get("type") in VALUE_TYPES:
            lines.append(f'# type = "{column.settings["type"]}"')
    return lines


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def schema_toml(schema: Schema) -> str:
    """Return a schema as TOML text. Loading the text gives an equal schema with an equal hash."""
    values = entries(schema)
    tables = {name: values.pop(name, None) for name in ("source", "label", "timestamp", "split", "negatives")}
    lists = {name: values.pop(name, ()) for name in (*COLUMNS, "feature")}
    parts = [_lines(values)]
    parts += [[f"[{name}]", *keys] for name, part in tables.items() if part and (keys := _lines(entries(part)))]
    parts += [[f"[[{name}]]", *_lines(entries(part))] for name, some in lists.items() for part in some]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def entries(part: Any) -> dict[str, Any]:
    """Return the keys of a schema, or of a part of one, that differ from their defaults."""
    values: dict[str, Any] = {"kind": part.kind} if isinstance(part, Derivation) else {}
    values |= {item.name: getattr(part, item.name) for item in fields(part) if _differs(item, getattr(part, item.name))}
    if isinstance(part, SplitRule):
        rule = {"rule": part.rule} if values else {}
        if set(values) - {"rule", *RULE_KEYS[part.rule]}:  # keys of another rule need all keys to be written
            values = {item.name: getattr(part, item.name) for item in fields(part)}
        values = rule | values
    return {key: "" if value is None else value for key, value in values.items() if value is not None or key == "quote"}


def _differs(item: Field[Any], value: Any) -> bool:
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return repr(value) != repr(default)  # 0 and 0.0 have different hashes


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_key(key)} = {toml_value(value)}" for key, value in values.items()]


def _toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml_value(key)


def toml_value(value: object) -> str:
    """Return a text, number, truth value, list or table in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        items = [toml_value(item) for item in value]
        line = f"[{', '.join(items)}]"
        return line if len(line) <= 100 else "[\n" + "".join(f"    {row}\n" for row in _rows(items)) + "]"
    return repr(value)


def _rows(items: list[str]) -> Iterator[str]:
    row = ""
    for item in items:
        if row and len(row) + len(item) > 100:
            yield row.rstrip()
            row = ""
        row += f"{item}, "
    yield row.rstrip()

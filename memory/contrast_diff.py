"""How two variants differ: a knob table for plans of one family, a unified diff of the sources otherwise. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from memory.contrast_budget import Block, one_line, source_lines
from tools.records import Plan, Variant

#: Lines of a source that are compared: difflib takes time with the square of what differs.
MAX_LINES = 4000
#: Of the shorter source's distinct lines, how many must stand in the other for a diff to say anything.
RELATED = 0.3


def difference(worse: Variant, better: Variant, names: tuple[str, str], priority: int) -> Block:
    """What leads from ``worse`` to ``better``. ``names`` are what the text calls them, in that order."""
    if worse.plan is not None and better.plan is not None:
        if worse.plan.family == better.plan.family:
            return Block("knobs", tuple(knob_table(worse, better, names)), priority)
        lines = [f"- {name}: {one_line(v.label)}" for name, v in zip(names, (worse, better), strict=True)]
        return Block("families", ("Two families, so a diff of their sources says nothing:", *lines), priority)
    if not related(source_lines(worse.source)[:MAX_LINES], source_lines(better.source)[:MAX_LINES]):
        return Block("diff", (f"The sources of {names[0]} and {names[1]} have little in common.",), priority)
    lines = source_diff(worse.source, better.source, names)
    if not lines:
        return Block("diff", (f"The sources of {names[0]} and {names[1]} are the same; the launch differs.",), priority)
    title = f"From {names[0]} to {names[1]}:"
    return Block("diff", tuple(lines), priority, "diff", title, cuttable=True)


def knob_rows(a: Plan, b: Plan) -> list[tuple[str, object, object]]:
    """The layout and the knobs of two plans of a family, side by side."""
    absent = 0 if a.revision == b.revision else "-"  # an optional knob, or one of another revision
    names = dict.fromkeys((*a.knobs, *b.knobs))
    return [("b_layout", a.b_layout, b.b_layout), *((n, a.knobs.get(n, absent), b.knobs.get(n, absent)) for n in names)]


def knob_table(worse: Variant, better: Variant, names: tuple[str, str]) -> list[str]:
    """The knobs that differ as a table, the others in one line."""
    assert worse.plan is not None and better.plan is not None
    rows = knob_rows(worse.plan, better.plan)
    differ = [row for row in rows if row[1] != row[2]]
    same = [f"{name} = {value}" for name, value, other in rows if value == other]
    table = [f"Both are plans of {worse.plan.family}."]
    if differ:
        table += [f"| knob | {names[0]} | {names[1]} |", "|---|---|---|"]
        table += [f"| {name} | {old} | {new} |" for name, old, new in differ]
    if same:
        table.append(f"The same in both: {', '.join(same)}.")
    return table


def source_diff(worse: str, better: str, names: tuple[str, str] = ("B", "A")) -> list[str]:
    """Unified, without the text's own line ends; blanks at a line's end do not count. Of a source over ``MAX_LINES``
    only the beginning is compared, and a last line says so. Empty for equal sources."""
    old, new = ([line.rstrip() for line in source_lines(text)] for text in (worse, better))
    cut = max(len(old), len(new)) > MAX_LINES
    found = difflib.unified_diff(old[:MAX_LINES], new[:MAX_LINES], names[0], names[1], lineterm="")
    lines = [line.rstrip("\n") for line in found]
    return [*lines, f"[lines after {MAX_LINES} were not compared]"] if cut else lines


def related(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether one could have been made from the other."""
    first, second = ({line.strip() for line in lines} - {"", "{", "}"} for lines in (old, new))
    smaller = min(len(first), len(second))
    return smaller == 0 or len(first & second) >= RELATED * smaller

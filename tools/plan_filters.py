"""Plans named by family and values of knobs, and which of them to try at which shapes: ``wgmma_tile/nk BM=64,128``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tools.families import plans, render
from tools.hgemm import hgemm, parse_shape
from tools.launching import accepts
from tools.records import Family, Task, Variant


class FilterError(ValueError):
    """A filter or a job line that names what there is not; the message says what there is."""


@dataclass(frozen=True)
class Filter:
    """Plans of ``family`` with these values of knobs; layouts and knobs that are not named may be anything."""

    family: str
    layouts: tuple[str, ...]
    knobs: Mapping[str, tuple[int, ...]]

    @classmethod
    def parse(cls, text: str, families: Mapping[str, Family]) -> Filter:
        """From "family[/layout] KNOB=V[,V…] …". Raises FilterError."""
        words = text.split()
        name, _, layout = words[0].partition("/") if words else ("", "", "")
        if name not in families:
            raise FilterError(f"'{text}' begins with no family: there are {', '.join(families)}")
        family = families[name]
        if layout and layout not in family.b_layouts:
            raise FilterError(f"{name} has layouts {', '.join(family.b_layouts)} of B, not '{layout}'")
        knobs: dict[str, tuple[int, ...]] = {}
        for word in words[1:]:
            knob, _, listed = word.partition("=")
            if knob not in family.knobs:
                raise FilterError(f"{name} has no knob '{knob}'; it has {', '.join(family.knobs)}")
            allowed = family.knobs[knob].values
            values = tuple(int(v) if v.isascii() and v.isdigit() and len(v) < 10 else -1 for v in listed.split(","))
            if not set(values) <= set(allowed):
                raise FilterError(f"{name}: knob {knob} is one of {', '.join(map(str, allowed))}, not '{listed}'")
            knobs[knob] = values
        return cls(name, (layout,) if layout else tuple(family.b_layouts), knobs)

    def variants(self, families: Mapping[str, Family]) -> Iterator[Variant]:
        """In the manifest's order."""
        family = families[self.family]
        for plan in plans(family):
            if plan.b_layout in self.layouts and all(plan.knob(name) in v for name, v in self.knobs.items()):
                yield render(family, plan)


def parse_job(lines: Iterable[str], families: Mapping[str, Family]) -> list[tuple[Task, list[Variant]]]:
    """(task, plans that take it) in the order in which shapes are first named. Raises FilterError, ShapeError."""
    wanted: dict[str, tuple[Task, dict[str, Variant]]] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        shapes, colon, words = text.partition(":")
        if not colon:
            raise FilterError(f"job line {number} has no colon between shapes and filter: '{text}'")
        chosen = list(Filter.parse(words.strip(), families).variants(families))
        if not chosen:
            raise FilterError(f"job line {number}: the constraints leave no plan of '{words.strip()}'")
        for shape in shapes.replace(",", " ").split():
            task = hgemm(*parse_shape(shape))
            _, variants = wanted.setdefault(task.task_id, (task, {}))
            variants.update({v.key: v for v in chosen if accepts(v, task) is None})
    return [(task, list(variants.values())) for task, variants in wanted.values()]

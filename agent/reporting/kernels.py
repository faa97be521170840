"""The kernels that are the best somewhere, and their sources. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.reporting.measured import Measured
from agent.reporting.model import Kernel, ShapeReport, Source
from tools.families import defines
from tools.records import Family, Plan

#: Raw sources beyond this many characters in all are named, not shown, so that a page stays one that opens.
SOURCE_CHARS = 2_000_000


def describe_kernels(
    measured: Measured, families: Mapping[str, Family], shapes: Sequence[ShapeReport]
) -> tuple[tuple[Kernel, ...], tuple[Source, ...]]:
    """Best kernels, most often best first; each source once."""
    best_at: dict[str, list[str]] = {}
    for shape in shapes:
        if shape.best is not None:
            best_at.setdefault(shape.best, []).append(shape.label)
        for key in shape.by_layout.values():
            best_at.setdefault(key, [])
    layouts = {key: next(iter(modes.values())).rows[0].b_layout for (_, key), modes in measured.timings.items()}
    sources: dict[str, Source] = {}
    kernels = []
    for key, where in sorted(best_at.items(), key=lambda item: (-len(item[1]), item[0])):
        plan = measured.plans.get(key)
        family = families.get(plan.family) if plan else None
        compiled = measured.compiled.get(key)
        sanitized = next((result for (_, k), result in measured.sanitized.items() if k == key), None)
        source, note = _source(measured, families, key, plan, sources)
        kernels.append(
            Kernel(
                key=key,
                label=plan.label if plan else f"source {key} ({layouts[key]})",
                b_layout=layouts[key],
                family=plan.family if plan else None,
                revision=plan.revision if plan else None,
                knobs=plan.knobs if plan else {},
                defines=defines(plan, family.knobs if family else {}) if plan else "",
                source=source,
                source_note=note,
                registers=compiled.registers if compiled else None,
                spill_bytes=compiled.spill_bytes if compiled else None,
                mma=compiled.mma if compiled else {},
                sanitize_checks=len(sanitized.checks) if sanitized else 0,
                best_at=tuple(where),
            )
        )
    return tuple(kernels), tuple(sources.values())


def _source(
    measured: Measured, families: Mapping[str, Family], key: str, plan: Plan | None, sources: dict[str, Source]
) -> tuple[str | None, str]:
    """The id of the kernel's source, added to ``sources`` where it is new, and a remark."""
    if plan is not None:
        family = families.get(plan.family)
        if family is None:
            return None, f"the family {plan.family} is not in this installation"
        if family.revision != plan.revision:
            return (
                None,
                f"measured at revision {plan.revision} of {plan.family}, this installation has {family.revision}",
            )
        source_id = f"{plan.family}-{plan.revision}"
        title = f"{plan.family}, revision {plan.revision}: {family.summary}"
        sources.setdefault(source_id, Source(source_id=source_id, title=title, text=family.source))
        return source_id, ""
    variant = measured.variants.get(key)
    if variant is None:
        return None, "the source is not in this database"
    if sum(len(s.text) for s in sources.values()) + len(variant.source) > SOURCE_CHARS:
        return None, f"left out for its length: `agent show --source {key}` prints it"
    sources[key] = Source(source_id=key, title=variant.label, text=variant.source)
    return key, ""

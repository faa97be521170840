"""The nodes of the finish: the best variants through the whole gate, one measurement a task, then the summary."""

from __future__ import annotations

from typing import Any

from agent.deps import Deps
from agent.files import write_atomic
from agent.finish import STAGES, candidates, judge, next_measures, pull
from agent.state import FinalCall, Finalist, MeasureInput, SessionState, Spent, Verdict
from agent.summary import Entry, References, Summary, entry, summarise
from memory.answer_ids import final_id
from policy.pricing import price_of
from tools.records import (
    Outcome,
    TimingResult,
    Variant,
)

Update = dict[str, Any]


class FinishNodes:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    def shortlist(self, state: SessionState) -> Update:
        finalists = pull([], self._candidates(state), self._deps.settings.session.top_k)
        self._deps.emit("finish", f"{len(finalists)} finalists", total=len(finalists))
        return self._next(finalists)

    def measure(self, state: MeasureInput) -> Update:
        """One tool on one finalist. The result is kept for the summary, whatever it says."""
        deps = self._deps
        deps.check_stop()
        call = state["measure"]
        variant = deps.variant(call["key"])
        what = f"{call['tool']} {call['mode'] or ''}".strip()
        deps.emit("measuring", f"{what}: {variant.label}", tool=call["tool"])
        with deps.device_lock:
            result = self._measure(call, variant)
        deps.store.put(self._final_id(call["key"], call["tool"], call["mode"]), "final", result.to_json())
        deps.emit(
            "measured",
            f"{what}: {variant.label}",
            tool=call["tool"],
            key=variant.key,
            status=result.status.value,
            reason=result.reason.value if result.reason else None,
            detail=result.detail,
        )
        verdict = Verdict(
            key=call["key"],
            tool=call["tool"],
            mode=call["mode"],
            status=result.status.value,
            reason=result.reason.value if result.reason else None,
            detail=result.detail,
        )
        return {"verdicts": [verdict]}

    def _measure(self, call: FinalCall, variant: Variant) -> Outcome:
        toolbox, task = self._deps.toolbox, self._deps.task
        match call["tool"]:
            case "verify":
                return toolbox.verify(variant, task, "full")
            case "sanitize":
                return toolbox.sanitize(variant, task)
            case "time":
                mode = next(m for m in self._deps.settings.session.modes if m == call["mode"])
                return toolbox.time(variant, task, mode, "final")
            case _:
                return toolbox.profile(variant, task)

    def judge(self, state: SessionState) -> Update:
        finalists = judge(state["finalists"], state["verdicts"], self._barred)
        finalists = pull(finalists, self._candidates(state), self._deps.settings.session.top_k)
        spent = Spent(**{**state["spent"], "wall_s": state["spent"]["wall_s"] + self._deps.lap_s()})
        return {**self._next(finalists), "verdicts": None, "spent": spent}

    def conclude(self, state: SessionState) -> Update:
        """The summary, and the winner's source, launch spec and result where the user finds them."""
        for mode in self._deps.settings.session.modes:
            self._deps.emit("measuring", f"baselines {mode}", tool="baselines")
            self._deps.baselines(mode)
        summary = self.summary(state)
        if summary.best is not None:
            variant = self._deps.variant(summary.best.key)
            best = self._deps.folder / "best"
            write_atomic(best / "kernel.cu", variant.source)
            write_atomic(best / "launch.json", variant.launch.model_dump_json(indent=2, exclude_defaults=True) + "\n")
            write_atomic(best / "result.json", summary.best.model_dump_json(indent=2, exclude_none=True) + "\n")
        write_atomic(self._deps.folder / "summary.json", summary.model_dump_json(indent=2, exclude_none=True) + "\n")
        self._deps.store.set_session_status(self._deps.session_id, "finished")
        self._deps.emit("concluded", summary.best.label if summary.best else "no kernel passed the whole gate")
        return {"calls": []}

    # --- parts ---------------------------------------------------------------------------------------------------

    def summary(self, state: SessionState) -> Summary:
        deps = self._deps
        settings = deps.settings
        model = deps.policy.name.partition(":")[2]
        is_free = settings.policy.name == "local" or not model
        source = deps.folder / "best" / "kernel.cu"
        entries = [self._entry(finalist) for finalist in state["finalists"]]
        return summarise(
            session_id=deps.session_id,
            task=deps.task,
            device=deps.toolbox.info,
            policy=deps.policy.name,
            seed=settings.session.seed,
            state=state,
            entries=entries,
            references=[self._references(mode) for mode in settings.session.modes],
            source_path=str(source) if any(e.admitted for e in entries) else None,
            cost_known=is_free or price_of(model, settings.policy.prices) is not None,
        )

    def _references(self, mode: Any) -> References:
        found = self._deps.baselines(mode)
        return References(mode=mode, status=found.status, detail=found.detail, times=found.times)

    def _entry(self, finalist: Finalist) -> Entry:
        stages: dict[str, Outcome] = {}
        for tool in ("verify", "sanitize", "profile"):
            found = self._final(finalist["key"], tool, None)
            if found is not None:
                stages[tool] = found
        timings = [
            found
            for mode in self._deps.settings.session.modes
            if isinstance(found := self._final(finalist["key"], "time", mode), TimingResult)
        ]
        return entry(finalist, self._deps.variant(finalist["key"]), stages, timings)

    def _final(self, key: str, tool: str, mode: str | None) -> Outcome | None:
        payload = self._deps.store.get(self._final_id(key, tool, mode))
        return STAGES[tool].from_json(payload) if payload is not None else None

    def _final_id(self, key: str, tool: str, mode: str | None) -> str:
        return final_id(self._deps.session_id, key, tool, mode)

    def _barred(self, key: str) -> str:
        return self._deps.toolbox.on_leaderboard(self._deps.variant(key), self._deps.task).why

    def _candidates(self, state: SessionState) -> list[Finalist]:
        keys = {row["key"] for row in state["trials"] if row["ratio"] is not None}
        return candidates(state["trials"], {key: self._deps.variant(key).b_layout for key in keys})

    def _next(self, finalists: list[Finalist]) -> Update:
        return {"finalists": finalists, "measures": next_measures(finalists, self._deps.settings.session.modes)}

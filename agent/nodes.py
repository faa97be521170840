"""The nodes of the search: prompt → policy turn → tool calls → results, in rounds of groups.

Every node can be killed at any point and run again: a policy's step and a call's answer are in the store before the
checkpoint says so, and what is in the store is used, not made again.
"""

from __future__ import annotations

import json
import math
from typing import Any

from agent.accounting import (
    answer_payload,
    ended,
    exhausted,
    failures_in_a_row,
    near_floor,
    plus,
    search_refused,
    tokens,
    trial_row,
    with_call_ids,
)
from agent.calls import Prepared, Ran, look_up, prepare, run
from agent.deps import Deps
from agent.errors import SessionError
from agent.recalling import Memory
from agent.routing import evaluations_left
from agent.state import (
    ActInput,
    Answer,
    Call,
    EndedBy,
    Rollout,
    SessionState,
    Spent,
    ThinkInput,
    Thought,
    TrialRow,
    to_trial,
)
from memory.answer_ids import answer_id
from policy.base import PolicyRequest
from policy.compact import compact_prompt
from policy.prompts import analytical_floor_us, prompt
from policy.reward import Reward, reward, smooth
from policy.settings import LOCAL_QUOTA
from policy.tool_schemas import EVALUATING, SEARCH_DOCS, CallError, DocsArguments, tool_schemas
from tools.records import (
    BaselineResult,
    Status,
    Step,
    ToolCall,
    Usage,
)

Update = dict[str, Any]


class SearchNodes:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._memory = Memory(deps)
        self._reference: BaselineResult | None = None

    # --- opening and rounds --------------------------------------------------------------------------------------

    def open(self, state: SessionState) -> Update:
        deps = self._deps
        reference = self._offline_reference()
        deps.emit("opened", deps.task.label, reference_us=reference.best_us(), detail=reference.detail)
        return {"spent": self._lapped(state["spent"])}

    def start_group(self, state: SessionState) -> Update:
        """A group of rollouts from one prompt, the evaluations that are left shared out evenly."""
        deps = self._deps
        size = deps.settings.group_size
        rounds_left = max(1, deps.settings.rounds - state["round"])
        left = evaluations_left(state, deps.settings.evaluations)
        quota = max(1, left // (rounds_left * size))
        if deps.settings.spends_budget:
            quota = min(quota, LOCAL_QUOTA)
        steps = self._prompt(state, quota)
        group = []
        for index in range(size):
            number = state["next_rollout"] + index
            if not deps.has_trajectory(number):
                deps.put_trajectory(number, deps.new_trajectory(number, index, state["round"], quota, steps))
            group.append(
                Rollout(
                    number=number,
                    index=index,
                    steps=len(steps),
                    turns=0,
                    quota=quota,
                    spent=0,
                    nudged=False,
                    ended_by=None,
                    submitted=None,
                )
            )
        number, planned = state["round"] + 1, deps.settings.rounds
        deps.emit("round", f"round {number} of {planned}" if number <= planned else f"round {number}", rollouts=size)
        return {"group": group, "next_rollout": state["next_rollout"] + size}

    def _prompt(self, state: SessionState, quota: int) -> tuple[Step, ...]:
        """Read back where a killed run already began this group: the memory may have grown since."""
        deps = self._deps
        if deps.policy.is_search:
            return ()
        if deps.has_trajectory(state["next_rollout"]):
            return deps.trajectory(state["next_rollout"]).steps
        tried = [row["key"] for row in state["trials"]]
        if deps.settings.policy.name == "local":
            known = self._memory.selection(tried, state["round"])
            lacks = any(row["status"] == Status.NOT_RECORDED for row in state["trials"])
            listed = self._memory.shortlist(tried, is_partly_recorded=lacks)
            reference_us = self._offline_reference().best_us()
            return compact_prompt(deps.task, deps.toolbox.info, reference_us, known, quota, listed)
        return prompt(
            deps.templates,
            deps.task,
            deps.toolbox.info,
            [self._offline_reference()],
            self._memory.text(tried, state["round"]),
            quota,
            deps.settings.policy.max_turns,
        )

    def _offline_reference(self) -> BaselineResult:
        if self._reference is None:
            self._reference = self._deps.baselines("offline")
        return self._reference

    # --- a policy's turn -----------------------------------------------------------------------------------------

    def think(self, state: ThinkInput) -> Update:
        """Asks the policy, unless a killed run already has its answer in the store."""
        deps = self._deps
        deps.check_stop()
        rollout = state["rollout"]
        trajectory = deps.trajectory(rollout["number"])
        if len(trajectory.steps) <= rollout["steps"]:
            reference = self._offline_reference()
            step = deps.policy.step(
                PolicyRequest(
                    task=deps.task,
                    device=deps.toolbox.info,
                    tools=() if deps.policy.is_search else tool_schemas(docs=deps.documents is not None),
                    steps=trajectory.steps,
                    trials=tuple(self._trial(row) for row in state["trials"]),
                    reference_us={f"{t.reference} ({t.b_layout})": t.time_us for t in reference.times},
                    evaluations_left=state["evaluations_left"],
                    turns_left=deps.max_turns - rollout["turns"],
                    seed=deps.settings.session.seed,
                    rollout=rollout["number"],
                    beside=state.get("beside", 1),
                )
            )
            step = with_call_ids(step, rollout["steps"])
            usage = trajectory.usage + (step.usage or Usage())
            steps = (*trajectory.steps, step)
            deps.put_trajectory(rollout["number"], trajectory.model_copy(update={"steps": steps, "usage": usage}))
        return {"thoughts": [Thought(rollout=rollout["number"])]}

    def admit(self, state: SessionState) -> Update:
        """Counts what the turns cost and decides, in proposal order, which calls the budget still pays for."""
        deps = self._deps
        thinking = {thought["rollout"] for thought in state["thoughts"]}
        spent, seen = state["spent"], list(state["seen"])
        group, calls = [], []
        for rollout in state["group"]:
            if rollout["number"] not in thinking:
                group.append(rollout)
                continue
            step = deps.trajectory(rollout["number"]).steps[rollout["steps"]]
            spent = plus(spent, step.usage)
            rollout = Rollout(**{**rollout, "steps": rollout["steps"] + 1, "turns": rollout["turns"] + 1})
            own = {row["key"] for row in state["trials"] if row["rollout"] == rollout["number"]}
            for index, tool_call in enumerate(step.tool_calls):
                call, is_evaluated = self._admit(rollout, index, tool_call, seen, own, spent)
                if is_evaluated and (key := call["key"]):
                    own.add(key)
                    rollout["spent"] += 1
                    if key not in seen:
                        seen.append(key)
                        spent = Spent(**{**spent, "evaluations": spent["evaluations"] + 1})
                calls.append(call)
            group.append(rollout)
        return {"group": group, "calls": calls, "spent": spent, "seen": seen, "thoughts": None}

    def _admit(
        self, rollout: Rollout, index: int, tool_call: ToolCall, seen: list[str], own: set[str], spent: Spent
    ) -> tuple[Call, bool]:
        """The call, and whether it evaluates: what nobody tried costs the session an evaluation, and what the rollout
        did not try costs one of its quota, whoever else did, or a group that agrees would go on for ever."""
        deps = self._deps
        call = Call(rollout=rollout["number"], index=index, key=None, refused="")
        try:
            prepared = prepare(tool_call, deps.families, deps.find_variant, seen)
        except CallError as error:
            return Call(**{**call, "refused": str(error)}), False
        if prepared.name == SEARCH_DOCS:
            call["refused"] = search_refused(rollout, deps.settings.policy.docs_searches)
        if prepared.variant is None:
            return call, False
        twin = self._memory.twin(prepared, seen)
        call["key"] = twin or prepared.variant.key
        if prepared.name not in EVALUATING or call["key"] in own:
            return call, False
        is_new = call["key"] not in seen
        left = deps.settings.evaluations - spent["evaluations"] if is_new else 1
        if left < 1 or rollout["spent"] >= rollout["quota"]:
            call["refused"] = "no evaluations are left in this attempt; submit the key of your best variant"
            return call, False
        if is_new and twin is None:
            deps.put_variant(prepared.variant)
        return call, True

    # --- tool calls ----------------------------------------------------------------------------------------------

    def act(self, state: ActInput) -> Update:
        """One tool call. Its answer goes to the store first, so that a resumed turn reads the same words."""
        deps = self._deps
        call = state["call"]
        tool_call = self._tool_call(call, state["steps"])
        stored_as = self._answer_id(call, state["steps"])
        stored = deps.store.get(stored_as)
        if stored is None:
            deps.check_stop()
            ran = self._run(call, tool_call)
            stored = json.dumps(answer_payload(ran))
            deps.store.put(stored_as, "answer", stored)
        payload = json.loads(stored)
        answer = Answer(
            rollout=call["rollout"],
            index=call["index"],
            key=payload.get("key") or call["key"],
            tool=tool_call.name,
            status=payload["status"],
            reason=payload["reason"],
            ratio=payload["ratio"],
            time_us=payload.get("time_us"),
        )
        return {"answers": [answer]}

    def _run(self, call: Call, tool_call: ToolCall) -> Ran:
        deps = self._deps
        if call["refused"]:
            return Ran.refusal(call["refused"])
        known = [call["key"]] if call["key"] else []
        try:
            prepared = prepare(tool_call, deps.families, deps.find_variant, known)
            if tool_call.name == "submit":
                return Ran(json.dumps({"submitted": call["key"]}))
            if isinstance(prepared.arguments, DocsArguments):
                self._announce(prepared)
                return look_up(prepared.arguments, deps.documents)
            prepared = self._memory.recognised(prepared, call["key"])
            self._announce(prepared)
            with deps.device_lock:
                ran = run(prepared, deps.toolbox, deps.task, deps.families)
        except CallError as error:
            return Ran.refusal(str(error))
        if prepared.fresh and ran.result is not None and ran.result.status is Status.UNAVAILABLE:
            # This machine can evaluate nothing: say so, leave the budget alone, and try again on a resume.
            why = ran.result.detail.rstrip(".")
            deps.broken = f"{why}; `agent doctor` says what is missing on this machine, then resume the session"
            raise SessionError(deps.broken)
        if ran.result is not None and prepared.variant is not None:
            deps.emit(
                "tried",
                prepared.variant.label,
                key=prepared.variant.key,
                status=ran.result.status.value,
                reason=ran.result.reason.value if ran.result.reason else None,
                detail=ran.result.detail,
                ratio=ran.ratio,
                tool=prepared.name,
            )
            self._memory.note_failed_compile(prepared.variant, ran)
        return ran

    def _announce(self, prepared: Prepared) -> None:
        what = prepared.variant.label if prepared.variant else ""
        self._deps.emit("trying", f"{prepared.name} {what}".strip(), tool=prepared.name)

    def tell(self, state: SessionState) -> Update:
        """Answers into the conversations, in proposal order, and who goes on."""
        deps = self._deps
        answers = sorted(state["answers"], key=lambda a: (a["rollout"], a["index"]))
        spent = self._lapped(state["spent"])
        stopped_by = state["stopped_by"] or exhausted(spent, deps.settings.budget)
        floor_us = analytical_floor_us(deps.task, deps.toolbox.info)
        if not stopped_by and near_floor(answers, floor_us, deps.settings.floor_pct):
            stopped_by = "floor"
        trials, seen = list(state["trials"]), list(state["seen"])
        told = {(row["rollout"], row["key"]) for row in trials}
        group = []
        for rollout in state["group"]:
            if rollout["ended_by"] is None:
                mine = [a for a in answers if a["rollout"] == rollout["number"]]
                rollout = self._tell(rollout, mine, stopped_by)
                for answer in mine:
                    row = trial_row(answer)
                    if row is not None and (row["rollout"], row["key"]) not in told:
                        told.add((row["rollout"], row["key"]))
                        trials.append(row)
                        if row["key"] not in seen:  # a twin by machine code, which the sent one's evaluation paid for
                            seen.append(row["key"])
            group.append(rollout)
        deps.emit("told", evaluations=spent["evaluations"], usd=spent["usd"], tokens=tokens(spent))
        return {
            "group": group,
            "trials": trials,
            "seen": seen,
            "spent": spent,
            "stopped_by": stopped_by,
            "calls": [],
            "answers": None,
        }

    def _tell(self, rollout: Rollout, answers: list[Answer], stopped_by: str) -> Rollout:
        deps = self._deps
        number, count = rollout["number"], rollout["steps"]
        limit = deps.settings.policy.max_failed_repairs
        trajectory = deps.trajectory(number)
        step = trajectory.steps[count - 1]
        added = [self._tool_step(step.tool_calls[a["index"]], a, count) for a in answers]
        submit = next((a for a in answers if a["tool"] == "submit" and a["status"] == Status.OK), None)
        ended: EndedBy | None = None
        nudged = False
        failures = failures_in_a_row(rollout.get("failures", 0), answers)
        # The first failure is no repair.
        left = math.inf if deps.policy.is_search or limit is None else limit + 1 - failures
        if submit is not None:
            ended = "submit"
        elif stopped_by or rollout["turns"] >= deps.max_turns:
            ended = "floor" if stopped_by == "floor" else "budget"
        elif left <= 0:
            ended = "repairs"
        elif not step.tool_calls:
            nudged = True
            if deps.policy.is_search or step.stop == "refusal" or rollout["nudged"]:
                ended = "policy"
            else:
                added.append(self._note("cut-off" if step.stop == "length" else "no-call"))
        elif failures > rollout.get("failures", 0) and math.isfinite(left):
            added.append(self._note("failed", failed=failures, left=left))
        steps = (*trajectory.steps[:count], *added)
        deps.put_trajectory(number, trajectory.model_copy(update={"steps": steps}))
        return Rollout(
            **{
                **rollout,
                "steps": len(steps),
                "nudged": nudged,
                "failures": failures,
                "ended_by": ended,
                "submitted": submit["key"] if submit else None,
            }
        )

    def _note(self, name: str, **values: object) -> Step:
        return Step(role="user", text=self._deps.templates.note(name, **values))

    def _tool_step(self, tool_call: ToolCall, answer: Answer, steps: int) -> Step:
        call = Call(rollout=answer["rollout"], index=answer["index"], key=answer["key"], refused="")
        stored_as = self._answer_id(call, steps)
        payload = json.loads(self._deps.store.get(stored_as) or "{}")
        return Step(
            role="tool",
            text=payload.get("text", ""),
            call_id=tool_call.call_id,
            tool=tool_call.name,
            result_id=stored_as,
        )

    # --- the end of a round --------------------------------------------------------------------------------------

    def end_group(self, state: SessionState) -> Update:
        """Rewards, and whether another round comes."""
        deps = self._deps
        rewards = [self._reward(rollout, state) for rollout in state["group"]]
        smoothed = smooth([r.value if r else None for r in rewards], deps.settings.reward)
        for rollout, own, relative in zip(state["group"], rewards, smoothed, strict=True):
            trajectory = deps.trajectory(rollout["number"])
            parts = {**own.parts, "group": relative} if own is not None and relative is not None else {}
            deps.put_trajectory(rollout["number"], ended(trajectory, rollout, own, parts))
        done = state["round"] + 1
        left = evaluations_left(state, deps.settings.evaluations)
        goes_on = done < deps.settings.rounds or (deps.settings.spends_budget and _brought_new(state))
        searched = not goes_on or left < 1 or bool(state["stopped_by"])
        return {"round": done, "searched": searched, "group": []}

    def _reward(self, rollout: Rollout, state: SessionState) -> Reward | None:
        """Of what was submitted; without a submit, of the best variant evaluated, else of the last."""
        deps = self._deps
        mine = [row for row in state["trials"] if row["rollout"] == rollout["number"]]
        known = [row for row in mine if row["status"] in (Status.OK, Status.FAILED)]
        key = rollout["submitted"]
        if key is None and known:
            passed = [row for row in known if row["ratio"] is not None]
            key = max(passed, key=lambda row: row["ratio"] or 0.0)["key"] if passed else known[-1]["key"]
        if key is None or key not in {row["key"] for row in known}:
            return None
        variant = deps.variant(key)
        with deps.device_lock:
            evaluation = deps.toolbox.evaluate(variant, deps.task)
        return reward(evaluation, len(variant.source), deps.settings.reward)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _trial(self, row: TrialRow) -> Any:
        variant = self._deps.variant(row["key"])
        return to_trial(row, variant.label, variant.plan)

    def _tool_call(self, call: Call, steps: int) -> ToolCall:
        return self._deps.trajectory(call["rollout"]).steps[steps - 1].tool_calls[call["index"]]

    def _answer_id(self, call: Call, steps: int) -> str:
        """Of the answer to a call of the step before ``steps``."""
        return answer_id(self._deps.session_id, call["rollout"], steps, call["index"])

    def _lapped(self, spent: Spent) -> Spent:
        return Spent(**{**spent, "wall_s": spent["wall_s"] + self._deps.lap_s()})


def _brought_new(state: SessionState) -> bool:
    """Whether the round that ends evaluated what no earlier one had."""
    group = {rollout["number"] for rollout in state["group"]}
    before = {row["key"] for row in state["trials"] if row["rollout"] not in group}
    return any(row["key"] not in before for row in state["trials"] if row["rollout"] in group)

"""What calls come to: the answer kept of each."""

from __future__ import annotations

import json

from agent.accounting import answer_payload
from agent.calls import Ran
from tools.records import CompileResult, Reason, Status


def test_a_refused_call_is_known_by_its_field_and_not_by_its_text() -> None:
    refused = answer_payload(Ran.refusal("no evaluations are left"))
    assert (refused["status"], refused["reason"]) == ("failed", None)
    assert json.loads(refused["text"]) == {"error": "no evaluations are left"}
    source = answer_payload(Ran('{"error" is a word that a source may begin with'))
    assert source["status"] == "ok"


def test_a_result_says_its_own_status() -> None:
    failed = CompileResult(status=Status.FAILED, reason=Reason.REGISTER_SPILL, detail="spills", variant_id="v")
    assert Ran("", failed).status is Status.FAILED
    payload = answer_payload(Ran("", failed))
    assert (payload["status"], payload["reason"]) == ("failed", "register_spill")

"""What a language model is told: the prompt's own example must pass our checks; results must be said as they are."""

from __future__ import annotations

import json
import re

import pytest
from fakes import ScriptedDevice, raw_variant

from policy.prompts import load_templates, prompt
from policy.rendering import result_text
from policy.tool_schemas import CallError, parse_arguments, tool_schemas
from tools.gate import MemoryResults, Toolbox
from tools.hgemm import hgemm
from tools.launching import accepts, resolve
from tools.records import LaunchSpec, Reason, ToolCall, Variant
from tools.sourcecheck import check_source

TASK = hgemm(512, 256, 128)
DEVICE = ScriptedDevice()


def worked_example() -> Variant:
    """The kernel and the launch spec of the system prompt."""
    text = load_templates().system
    source = re.search(r"```cuda\n(.*?)```", text, re.DOTALL)
    launch = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert source and launch
    return Variant(source=source[1], launch=LaunchSpec.model_validate_json(launch[1]), b_layout="nk")


def test_worked_example_is_a_valid_candidate() -> None:
    variant = worked_example()
    assert check_source(variant.source) is None
    assert accepts(variant, TASK) is None
    spec = resolve(variant, TASK, 132, lambda *_: (8, 132))
    assert spec.launches[0].grid == (16, 32, 1) and spec.launches[0].block == (16, 16, 1)
    assert [a.kind for a in spec.launches[0].args] == ["tensor"] * 3 + ["i32"] * 3


def test_prompt_holds_task_device_references_and_memory() -> None:
    references = [DEVICE.baselines(TASK, "offline", "final")]
    system, user = prompt(load_templates(), TASK, DEVICE.info, references, "A is $12 faster than B.", 12, 40)
    assert (system.role, user.role) == ("system", "user")
    for words in ("M = 512, N = 256, K = 128", "132 SMs", "cublaslt_auto (nk)", "12 evaluations and 40 turns"):
        assert words in user.text, words
    assert "A is $12 faster than B." in user.text, "what was stored is not a template"
    assert "$" not in user.text.replace("$12", "") and "$" not in system.text


def test_system_prompt_speaks_of_tools_that_exist() -> None:
    text = load_templates().system
    known = {schema.name for schema in tool_schemas()}
    mentioned = {"list_families", "read_source", "evaluate_plan", "evaluate_source", "profile", "submit"}
    assert mentioned <= known and all(f"`{name}`" in text for name in mentioned)


def test_results_read_as_what_they_are() -> None:
    toolbox = Toolbox(DEVICE, MemoryResults())
    variant = raw_variant()
    found = json.loads(result_text(toolbox.evaluate(variant, TASK), variant.key, variant.label))
    assert found["status"] == "ok" and found["key"] == variant.key and found["reference"] == "cublaslt_auto_max"
    assert found["interval_95"][0] <= found["ratio"] <= found["interval_95"][1] and found["registers"] == 64
    broken = ScriptedDevice(lambda tool, v, task: Reason.WRONG_RESULT if tool == "verify" else None)
    failed = json.loads(result_text(Toolbox(broken, MemoryResults()).evaluate(variant, TASK), "k", "v"))
    assert failed["reason"] == "wrong_result" and "ratio" not in failed and failed["detail"]


def test_schemas_are_plain_json_schema() -> None:
    for schema in tool_schemas():
        assert schema.parameters["type"] == "object" and schema.parameters["additionalProperties"] is False
        assert "$ref" not in json.dumps(schema.parameters) and schema.description
        assert "title" not in schema.parameters


def test_argument_errors_are_one_sentence() -> None:
    call = ToolCall(call_id="1", name="evaluate_plan", arguments={"family": "toy", "b_layout": "xy", "knobs": {}})
    with pytest.raises(CallError) as caught:
        parse_arguments(call)
    assert str(caught.value) == "evaluate_plan: b_layout: must be 'kn' or 'nk', not 'xy'"

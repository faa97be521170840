"""Conversations as tokens and back: boundaries, masks, templates, calls that cannot be read."""

import json

import pytest

from policy.chat import ChatError, encode, messages_of, own_template, parse_turn, segments, template_for
from policy.compact import compact_answer, compact_tools
from tools.records import SampledTokens, Step, ToolCall

CALL = ToolCall(call_id="call-0", name="submit", arguments={"key": "ab"})
STEPS = (
    Step(role="system", text="choose"),
    Step(role="user", text="64x64x64"),
    Step(role="assistant", text="first", tool_calls=(CALL,)),
    Step(role="tool", text='{"status":"ok"}', call_id="call-0", tool="submit"),
    Step(role="assistant", text="second"),
)
TOOLS = [{"type": "function", "function": tool.model_dump(mode="json")} for tool in compact_tools()]


class Bytes:
    """A tokenizer of the least kind: a token a character, templates rendered as transformers does."""

    eos_token = "<|im_end|>"

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, conversation, *, tokenize, tools=None, add_generation_prompt=False, **given):
        import jinja2

        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = json.dumps  # jinja's own escapes for HTML
        template = environment.from_string(given.get("chat_template") or self.chat_template)
        return template.render(
            messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt, eos_token=self.eos_token
        )

    def encode(self, text, *, add_special_tokens):
        return [ord(letter) for letter in text]


def test_the_mask_covers_the_models_turns_with_their_end_and_nothing_else() -> None:
    found = encode(Bytes(), messages_of(STEPS), TOOLS, own_template())
    own = "".join(chr(i) for i, m in zip(found.ids, found.mask, strict=True) if m)
    call = json.dumps({"name": "submit", "arguments": {"key": "ab"}})
    assert own == f"first<tool_call>{call}</tool_call><|im_end|>second<|im_end|>"
    told = "".join(chr(i) for i in found.ids[: found.prompt_length])
    assert told.endswith("64x64x64<|im_end|>\n<|im_start|>assistant\n")


def test_what_a_turn_is_sampled_from_is_what_it_is_trained_on() -> None:
    whole = encode(Bytes(), messages_of(STEPS), TOOLS, own_template())
    told = segments(Bytes(), messages_of(STEPS[:4]), TOOLS, own_template(), next_turn=True)
    context = Bytes().encode("".join(segment.text for segment in told), add_special_tokens=False)
    assert whole.ids[: len(context)] == context
    assert whole.mask[len(context)] == 1 and whole.mask[len(context) - 1] == 0


def test_a_turn_that_is_not_trained_is_masked() -> None:
    found = encode(Bytes(), messages_of(STEPS), TOOLS, own_template(), trained=[False, True])
    assert "".join(chr(i) for i, m in zip(found.ids, found.mask, strict=True) if m) == "second<|im_end|>"


def test_the_tools_are_told_in_the_system_message() -> None:
    told = segments(Bytes(), messages_of(STEPS), TOOLS, own_template())[0].text
    assert "evaluate_plan(" in told and "submit(key)" in told and told.startswith("<|im_start|>system\nchoose")


def test_a_template_without_tools_is_replaced_and_one_with_them_kept() -> None:
    deaf = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    assert template_for(Bytes(deaf)) == own_template()
    assert template_for(Bytes(own_template())) is None
    assert template_for(Bytes()) == own_template()
    assert template_for(Bytes("{{ nonsense.that.fails() }}")) == own_template()


def test_a_template_that_rewrites_history_is_refused_in_a_sentence() -> None:
    counting = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatError, match="earlier turns anew"):
        encode(Bytes(), messages_of(STEPS), [], counting)


@pytest.mark.parametrize(
    ("text", "names", "malformed"),
    [
        ('think<tool_call>{"name": "submit", "arguments": {"key": "a"}}</tool_call>', ["submit"], False),
        ('<tool_call>{"name": "submit", "arguments": {"key"', ["unreadable"], True),
        ("<tool_call>no json</tool_call>", ["unreadable"], True),
        ('<tool_call>["submit"]</tool_call>', ["unreadable"], True),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', ["unreadable"], True),
        ("nothing to call", [], False),
        ("<tool_call>" + "[" * 100_000, ["unreadable"], True),
    ],
)
def test_calls_are_read_or_answered_with_a_sentence(text: str, names: list[str], malformed: bool) -> None:
    step = parse_turn(text)
    assert [call.name for call in step.tool_calls] == names
    assert all((call.malformed is not None) == malformed for call in step.tool_calls)
    assert step.stop == ("tool_calls" if names else "end")


def test_an_answer_is_cut_to_its_verdict() -> None:
    text = json.dumps({"key": "k", "status": "ok", "ratio": 1.23456, "mma": {"HMMA": 4}, "interval_95": [1, 2]})
    assert compact_answer(text) == '{"key":"k","status":"ok","ratio":1.235}'
    failed = compact_answer(json.dumps({"key": "k", "status": "failed", "reason": "hang", "detail": "x" * 500}))
    assert json.loads(failed)["reason"] == "hang" and len(failed) < 260
    assert compact_answer("no json") == "no json" and compact_answer("[1]") == "[1]"


def test_sampled_tokens_are_of_one_length() -> None:
    given = {"model": "m", "tokenizer": "t", "context_ids": (1,), "token_ids": (2, 3)}
    SampledTokens(**given, logprobs=(-0.1, -0.2), mask=(1, 0))
    for wrong in ({"logprobs": (-0.1,)}, {"logprobs": (-0.1, -0.2), "mask": (1,)}):
        with pytest.raises(ValueError, match="one log-probability"):
            SampledTokens(**given, **wrong)

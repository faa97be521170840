"""Records the conversations of tests/data/cassettes anew, with servers of our own: python tests/record_cassettes.py

The answers are made up in the forms that the providers' documentation and vLLM's server give them. Nothing is sent
anywhere, and no key is in what is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from cassette_kit import FOLDER, MODEL, Conversation, Reply, record, text_of
from policy_kit import events

PLAN = {"family": "mma_ldg", "b_layout": "nk", "knobs": {"BN": 16, "SLICES": 4, "UNROLL": 1, "CLUSTER_K": 1}}
WIDER = {**PLAN, "knobs": {**PLAN["knobs"], "BN": 32}}
GO = ("Find the fastest kernel for hgemm 64x64x64.",)
FIRST = '{"key": "aaaa", "status": "ok", "ratio": 1.213}'
SECOND = '{"key": "bbbb", "status": "ok", "ratio": 1.604}'


def plain(body: dict[str, Any]) -> Reply:
    return {"body": body}


def stream(provider: str, body: dict[str, Any], piece: int = 24) -> Reply:
    return {"events": events(provider, body, piece)}


def failed(status: int, kind: str, words: str, **headers: str) -> Reply:
    return {"status": status, "headers": headers, "body": {"type": "error", "error": {"type": kind, "message": words}}}


# --- Anthropic --------------------------------------------------------------------------------------------------------


def claude(*content: dict[str, Any], stop: str = "tool_use", **usage: int) -> dict[str, Any]:
    return {
        "id": "msg_01",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": list(content),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 900, "output_tokens": 120, **usage},
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number:02}", "name": name, "input": arguments}


def thinking(words: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": "c2lnbmVkIGJ5IHRoZSBwcm92aWRlcg=="}


def anthropic_thinking() -> Conversation:
    hidden = {"type": "redacted_thinking", "data": "ZW5jcnlwdGVk"}
    first = claude(
        thinking("64 is tiny: latency decides.\nTwo tiles to compare."),
        hidden,
        text("Two independent candidates: BN = 16 and 32."),
        use(1, "evaluate_plan", PLAN),
        use(2, "evaluate_plan", WIDER),
        cache_creation_input_tokens=5200,
    )
    second = claude(
        thinking("The wider tile halves the loads of A."),
        text("32 columns win: 1.604 against 1.213."),
        use(3, "profile", {"key": "bbbb"}),
        use(4, "verify", {"key": "bbbb", "depth": "full"}),
        input_tokens=180,
        cache_read_input_tokens=5200,
        cache_creation_input_tokens=320,
    )
    third = claude(text("Latency is what is left."), use(5, "submit", {"key": "bbbb"}), cache_read_input_tokens=5900)
    return Conversation(
        "A stream with thinking, hidden thinking and parallel calls; the blocks go back as they came, cache markers.",
        "anthropic",
        [
            (GO, [stream("anthropic", first)]),
            ((FIRST, SECOND), [stream("anthropic", second, 7)]),
            (('{"limits": ["It is latency-bound."]}', '{"status": "ok"}'), [stream("anthropic", third, 1000)]),
        ],
        settings={"thinking": {"type": "enabled", "budget_tokens": 2048}, "effort": "high"},
    )


def anthropic_refusal() -> Conversation:
    first = claude(text("A first look."), use(1, "evaluate_plan", PLAN))
    refused = claude(text("I will not go on with this."), stop="refusal")
    return Conversation(
        "Whole answers, no stream: a call, and then a refusal.",
        "anthropic",
        [(GO, [plain(first)]), ((FIRST,), [plain(refused)])],
        settings={"stream": False, "temperature": 0.5},
    )


def anthropic_limited() -> Conversation:
    answer = claude(text("Here."), use(1, "evaluate_plan", PLAN))
    limited = failed(429, "rate_limit_error", "slow down", **{"retry-after": "0"})
    overloaded = failed(529, "overloaded_error", "Overloaded")
    broken = stream("anthropic", answer)
    broken["events"] = broken["events"][: len(broken["events"]) // 2]
    return Conversation(
        "Too many requests, overloaded, a stream that stops in the middle, then an answer: one request, four times.",
        "anthropic",
        [(GO, [limited, overloaded, broken, stream("anthropic", answer)])],
    )


def anthropic_malformed() -> Conversation:
    odd = claude(
        use(1, "evaluate_plan", ["BN", 16]), use(2, "evaluate-everything", {}), use(3, "profile", {"key": "aaaa"})
    )
    cut = claude(text("Now a source."), use(4, "evaluate_plan", '{"family": "mma_'), stop="max_tokens")
    sorry = claude(text("A plan it is."), use(5, "evaluate_plan", PLAN))
    no = '{"error": "arguments must be a JSON object, not list"}'
    return Conversation(
        "Arguments that are no object, a tool that is none, a call that was cut off: none goes back as it was.",
        "anthropic",
        [
            (GO, [plain(odd)]),
            ((no, '{"error": "there is no tool"}', '{"error": "no variant"}'), [stream("anthropic", cut)]),
            (('{"error": "the call was cut off"}',), [plain(sorry)]),
        ],
    )


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def chat(
    content: str | None, *calls: tuple[str, str], finish: str = "", usage: Any = None, number: int = 1, **message: Any
) -> dict[str, Any]:
    """``calls``: name and arguments, the latter as the text that the server sends."""
    said: dict[str, Any] = {"role": "assistant", "content": content, **message}
    if calls:
        said["tool_calls"] = [
            {"id": f"call_{number}{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": said, "finish_reason": finish or ("tool_calls" if calls else "stop")}],
        "usage": usage or {"prompt_tokens": 900, "completion_tokens": 120, "total_tokens": 1020},
    }


def openai_parallel() -> Conversation:
    cached = {
        "prompt_tokens": 6100,
        "completion_tokens": 310,
        "total_tokens": 6410,
        "prompt_tokens_details": {"cached_tokens": 5200, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 256},
    }
    both = chat("Two at once.", ("evaluate_plan", json.dumps(PLAN)), ("evaluate_plan", json.dumps(WIDER)))
    done = chat(None, ("submit", '{"key": "bbbb"}'), usage=cached, number=2)
    return Conversation(
        "A stream with parallel calls; usage with cached tokens.",
        "openai",
        [(GO, [stream("openai", both)]), ((FIRST, SECOND), [stream("openai", done, 5)])],
        settings={"effort": "low"},
    )


def openai_refusal() -> Conversation:
    filtered = chat("", finish="content_filter", number=2)
    return Conversation(
        "Whole answers, no stream: a refusal, and a filter's.",
        "openai",
        [(GO, [plain(chat(None, refusal="I cannot help with that."))]), (("Please go on.",), [plain(filtered)])],
        settings={"stream": False, "temperature": 0.0},
    )


def openai_malformed() -> Conversation:
    odd = chat(None, ("evaluate_plan", '{"family": '), ("profile", "[1]"), ("submit", ""), ("", "{}"))
    cut = chat("Next.", ("evaluate_plan", '{"family": "mma_'), finish="length", number=2)
    sorry = chat("A plan it is.", ("evaluate_plan", json.dumps(PLAN)), number=3)
    return Conversation(
        "Arguments that are no JSON, no object, nothing; no name; a call cut off: servers read back only what is JSON.",
        "openai",
        [
            (GO, [stream("openai", odd)]),
            (("no JSON", "no object", "no key", "no name"), [plain(cut)]),
            (("cut off",), [stream("openai", sorry)]),
        ],
    )


def openai_limited() -> Conversation:
    limited = failed(429, "rate_limit_exceeded", "slow down", **{"retry-after": "0"})
    unavailable: Reply = {"status": 503, "headers": {}, "body": "<html>busy</html>"}
    answer = chat("Here.", ("evaluate_plan", json.dumps(PLAN)))
    return Conversation(
        "Too many requests, a proxy's page, and then an answer.",
        "openai",
        [(GO, [limited, unavailable, plain(answer)])],
        settings={"stream": False},
    )


# --- vLLM -------------------------------------------------------------------------------------------------------------


def vllm_stream(reasoning: str, content: str, calls: list[tuple[str, str]], field: str) -> Reply:
    """As vLLM's server sends it: fields of its own, a call's name first and then its arguments in pieces."""
    common = {"id": "chatcmpl-5f0c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{field: word + " "} for word in reasoning.split(" ")]
    deltas += [{"content": word + " "} for word in content.split(" ")]
    for index, (name, arguments) in enumerate(calls):
        call = {"id": f"chatcmpl-tool-{index}a7", "type": "function", "index": index, "function": {"name": name}}
        deltas.append({"tool_calls": [call]})
        for at in range(0, len(arguments), 16):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 16]}}]})
    chunks: list[dict[str, Any]] = [
        {
            **common,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}],
        }
        for delta in deltas
    ]
    last = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "tool_calls", "stop_reason": None}
    usage = {"prompt_tokens": 2100, "total_tokens": 2180, "completion_tokens": 80, "prompt_tokens_details": None}
    chunks += [{**common, "choices": [last]}, {**common, "choices": [], "usage": usage}]
    return {"events": [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]}


def vllm_streams() -> Conversation:
    first = vllm_stream(
        "K is short. Compare two tiles.",
        "Both at once.",
        [("evaluate_plan", json.dumps(PLAN)), ("evaluate_plan", json.dumps(WIDER))],
        "reasoning_content",
    )
    second = vllm_stream("The wider one wins.", "Done.", [("submit", '{"key": "bbbb"}')], "reasoning")
    return Conversation(
        "vLLM's server, without a key: reasoning under either of its names, parallel calls as it streams them.",
        "openai",
        [(GO, [first]), ((FIRST, SECOND), [second])],
        keyless=True,
    )


def vllm_whole() -> Conversation:
    answer = chat(
        None,
        ("evaluate_plan", json.dumps(PLAN)),
        usage={"prompt_tokens": 2100, "total_tokens": 2180, "completion_tokens": 80, "prompt_tokens_details": None},
        reasoning_content="\nSmall tiles first.\n",
        refusal=None,
        annotations=None,
        audio=None,
        function_call=None,
    )
    answer["choices"][0] |= {"logprobs": None, "stop_reason": None, "token_ids": None}
    answer |= {"service_tier": None, "system_fingerprint": None, "prompt_logprobs": None, "kv_transfer_params": None}
    full: Reply = {"status": 429, "headers": {}, "body": {"object": "error", "message": "queue is full", "code": 429}}
    return Conversation(
        "vLLM's server, no stream: a full queue, and then an answer with all its null fields.",
        "openai",
        [(GO, [full, plain(answer)]), ((FIRST,), [plain(chat("That was all.", number=2))])],
        settings={"stream": False},
        keyless=True,
    )


CONVERSATIONS = {
    function.__name__.replace("_", "-"): function
    for function in (
        anthropic_thinking,
        anthropic_refusal,
        anthropic_limited,
        anthropic_malformed,
        openai_parallel,
        openai_refusal,
        openai_malformed,
        openai_limited,
        vllm_streams,
        vllm_whole,
    )
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, conversation in CONVERSATIONS.items():
        path = FOLDER / f"{name}.json"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = text_of(record(conversation()))
        path.write_text(after, encoding="utf-8")
        print(f"{path.name}: {'unchanged' if after == before else 'written'}")


if __name__ == "__main__":
    main()

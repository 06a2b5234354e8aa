"""What clients get: OpenAI's own client, and httpx where that hides what is sent."""

from __future__ import annotations

import gzip
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from edgecc.backends.server import Server

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

PROMPT = "def f(x):"
DATA_URL = "data:image/png;base64,"
CHAT = [{"role": "user", "content": "Say hi"}]


@pytest.fixture
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: Any, prompt: Any = PROMPT, **options: Any) -> Any:
    options = {"max_tokens": 24, "temperature": 0} | options
    return client.completions.create(model="tiny", prompt=prompt, **options)


def idle(server: Server) -> bool:
    """Whether all slots are free, after a while for what was just dropped."""
    engine = server.service.engine
    deadline = time.monotonic() + 30
    while (engine.running or engine.waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine.running == engine.waiting == 0


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").max_model_len == 384
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_a_stream_adds_up_to_the_answer(client: Any) -> None:
    options = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    events = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = events

    assert "".join(e.choices[0].delta.content or "" for e in pieces) == (
        whole.choices[0].message.content
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage.completion_tokens == 40
    assert 0 < whole.usage.accepted_tokens <= whole.usage.draft_tokens


def test_events_tell_of_their_rounds(client: Any) -> None:
    stream = {"include_usage": True, "include_rounds": True}
    options = {"n": 2, "temperature": 1, "seed": 3, "stop": "zz", "stream": True}
    *events, last = list(complete(client, **options, stream_options=stream))
    rounds = [event.choices[0].edgecc for event in events]

    for name in ("completion_tokens", "draft_tokens", "accepted_tokens"):
        assert sum(told[name] for told in rounds) == getattr(last.usage, name)
    assert any(told["completion_tokens"] > 1 for told in rounds)
    for told in rounds:
        assert told["accepted_tokens"] <= told["draft_tokens"]
        assert bool(told["drafts"]) == bool(told["draft_tokens"])
    without = complete(client, **options)
    assert not any(hasattr(event.choices[0], "edgecc") for event in without)


def test_a_confidence_threshold_changes_what_is_verified(client: Any, server: Server) -> None:
    name = 'edgecc_spec_decode_num_withheld_tokens_total{model_name="tiny"}'
    everything = complete(client)
    before = _metrics(server).get(name, 0)
    sure = complete(client, extra_body={"confidence_threshold": 0.5})
    assert sure.choices[0].text == everything.choices[0].text
    assert 0 < sure.usage.draft_tokens < everything.usage.draft_tokens
    assert _metrics(server)[name] > before


def test_speculation_is_chosen_by_request_and_changes_no_text(client: Any) -> None:
    alone = complete(client, extra_body={"disable_spec_decode": True})
    one = complete(client, extra_body={"num_speculative_tokens": 1})
    all_ = complete(client)

    assert alone.choices[0].text == one.choices[0].text == all_.choices[0].text
    assert alone.usage.draft_tokens == 0
    assert 0 < one.usage.draft_tokens <= 24
    assert all_.usage.draft_tokens > one.usage.draft_tokens


def test_a_stop_string_across_tokens(client: Any) -> None:
    text = complete(client).choices[0].text
    stop = text[5:12]
    events = list(complete(client, stop=stop, stream=True))

    assert "".join(e.choices[0].text for e in events) == text[: text.index(stop)]
    assert events[-1].choices[0].finish_reason == "stop"


def test_seeds(client: Any) -> None:
    first, again = (complete(client, temperature=1, seed=5, n=2) for _ in range(2))
    other = complete(client, temperature=1, seed=6)

    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] != texts[1] == other.choices[0].text


def test_logprobs_of_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]

    assert len(choice.logprobs.content) == 8
    assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode() == (
        choice.message.content
    )
    for token in choice.logprobs.content:
        assert token.top_logprobs[0].token == token.token  # greedy: the best one was taken
        assert token.top_logprobs[0].logprob == token.logprob <= 0


def test_several_prompts(client: Any, server: Server) -> None:
    answer = complete(client, prompt=[PROMPT, "the"], logprobs=1)
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()
    by_ids = complete(client, prompt=ids["tokens"])

    assert [c.text for c in answer.choices] == [
        complete(client, prompt=p).choices[0].text for p in (PROMPT, "the")
    ]
    assert by_ids.choices[0].text == answer.choices[0].text
    assert by_ids.usage.prompt_tokens == ids["count"]
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_token_itself_is_among_the_top_of_a_completion(client: Any, most: int) -> None:
    answer = complete(client, logprobs=most, temperature=2.0, seed=5)
    logprobs = answer.choices[0].logprobs
    told = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    for token, value, top in told:
        assert top[token] == value
        assert most <= len(top) <= most + 1


def test_together_as_alone(client: Any, server: Server) -> None:
    prompts = [PROMPT, "the", "import os\n", "class A:", "x = 1", "for i in"]
    alone = [complete(client, prompt=p).choices[0].text for p in prompts]

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda p: complete(client, prompt=p).choices[0].text, prompts))

    assert together == alone
    assert idle(server)


def test_who_leaves_takes_no_slot_along(client: Any, server: Server) -> None:
    expected = complete(client).choices[0].text
    chance = random.Random(3)
    plans = [(chance.random() < 0.5, chance.uniform(0, 0.05), n) for n in range(16)]

    def leave(plan: tuple[bool, float, int]) -> None:
        stream, seconds, number = plan
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": stream}
        timeout = httpx.Timeout(10, read=0.001 + seconds)
        try:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=timeout
            ) as answer:
                for count, _ in enumerate(answer.iter_lines()):
                    if count >= number:
                        return
        except httpx.TimeoutException:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, plans))

    assert idle(server)
    assert complete(client).choices[0].text == expected
    with ThreadPoolExecutor(3) as pool:  # in each of the slots
        texts = pool.map(lambda _: complete(client).choices[0].text, range(3))
    assert set(texts) == {expected}


BAD: list[tuple[Any, str | None]] = [
    ({"prompt": "a " * 2000}, "context_length_exceeded"),
    ({"prompt": 5}, "server/bad-field"),
    ({"prompt": []}, "server/bad-field"),
    ({"prompt": ""}, "request/empty-prompt"),
    ({"prompt": "a", "max_tokens": "5"}, "server/bad-field"),
    ({"prompt": "a", "max_tokens": -1}, "request/bad-max-new-tokens"),
    ({"prompt": "a", "temperature": -1}, "request/bad-temperature"),
    ({"prompt": "a", "seed": 10**30}, "request/bad-seed"),
    ({"prompt": "a", "logprobs": 21}, "request/bad-logprobs"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "request/bad-logit-bias"),
    ({"prompt": "a", "n": 100}, "server/too-many-choices"),
    ({"prompt": "a", "stop": ""}, "request/bad-stop"),
    ({"prompt": "a", "num_speculative_tokens": 99}, "request/bad-num-speculative-tokens"),
    ({"prompt": "a", "confidence_threshold": 2}, "request/bad-confidence-threshold"),
    ({"prompt": "a", "confidence_threshold": "high"}, "server/bad-field"),
    ({"prompt": [10**9]}, "request/token-out-of-range"),
    ({"prompt": "\ud800"}, "request/not-unicode"),
    ({"prompt": ["a", "\ud800"]}, "request/not-unicode"),
    ({"prompt": "a", "suffix": "b"}, "server/unsupported-field"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "server/bad-field"),
    ({"prompt": "a", "guided_json": {}}, "server/unsupported-field"),
    ([], "server/bad-field"),
]


@pytest.mark.parametrize(("body", "code"), BAD)
def test_bad_requests(server: Server, body: Any, code: str | None) -> None:
    answer = _post(server, json.dumps(body))

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize("body", ["", "{", "[" * 100_000, '{"prompt": NaN}', "\xff", "{} {}"])
def test_what_is_no_json(server: Server, body: str) -> None:
    answer = _post(server, body.encode("latin-1"))
    assert answer.status_code == 400
    assert not (answer.json()["error"]["param"] or "").isdecimal()


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"Content-Type": "text/plain"}, "Content-Type: application/json"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "not compressed"),
    ],
)
def test_bodies_in_other_forms(server: Server, headers: dict[str, str], told: str) -> None:
    body = gzip.compress(b'{"prompt": "a"}') if len(headers) > 1 else b'{"prompt": "a"}'
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_bad_json_is_told_with_its_place(server: Server) -> None:
    error = _post(server, '{"prompt": "a secret" x}').json()["error"]

    assert (error["code"], error["param"]) == ("server/bad-json", None)
    assert error["message"].startswith("the body is not JSON: ")
    assert error["message"].endswith(", at character 22")
    assert "secret" not in error["message"]


@pytest.mark.parametrize("body", [b"[]", b"5", b'"a"', b""])
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
def test_a_body_that_is_no_object(server: Server, body: bytes, kind: str) -> None:
    """Also what `curl -d` sends without a header."""
    answer = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"Content-Type": kind}
    )
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_field_is_told_by_its_own_name(server: Server, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], field: -1}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]

    assert (error["code"], error["param"]) == ("request/bad-max-new-tokens", field)
    assert error["message"] == f"{field} must be 0 or more, not -1"


def test_a_long_prompt_is_told_with_both_numbers(server: Server) -> None:
    message = _post(server, json.dumps({"prompt": [5] * 500})).json()["error"]["message"]

    assert "500" in message
    assert "384" in message


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image", "image": "/etc/hostname"}, "image/no-files"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "image/remote"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "image/remote"),
        (
            {"type": "image_url", "image_url": {"url": DATA_URL + "?"}},
            "image/bad-base64",
        ),
        ({"type": "image_url", "image_url": {"url": DATA_URL + "AA=="}}, "request/no-vision"),
    ],
)
def test_images_come_as_bytes(server: Server, part: Any, code: str) -> None:
    body = {"messages": [{"role": "user", "content": [part]}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


def test_parts_of_text_are_one_text(client: Any) -> None:
    whole, parts = (
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],
            max_tokens=12,
            temperature=0,
        )
        for content in (
            "Say\nhi",
            [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi"}],
        )
    )

    assert parts.choices[0].message.content == whole.choices[0].message.content
    assert parts.usage == whole.usage


def test_fields_nobody_knows_are_named(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "bogus": 1, "b\r\nad": 2, "tools": None}
    answer = _post(server, json.dumps(body))

    assert answer.status_code == 200
    assert answer.headers["x-edgecc-ignored-fields"] == "bogus"


def test_other_models_and_paths(server: Server) -> None:
    answer = _post(server, json.dumps({"prompt": "a", "model": "large"}))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "server/unknown-model"
    assert httpx.get(f"{server.url}/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405


def test_metrics_count_what_was_answered(client: Any, server: Server) -> None:
    before = _metrics(server)
    usage = complete(client).usage
    after = _metrics(server)
    label = '{model_name="tiny"}'

    def grown(name: str) -> float:
        return after[name + label] - before.get(name + label, 0)

    assert grown("edgecc_generation_tokens_total") == usage.completion_tokens
    assert grown("edgecc_prompt_tokens_total") == usage.prompt_tokens
    assert grown("edgecc_spec_decode_num_draft_tokens_total") == usage.draft_tokens
    assert grown("edgecc_spec_decode_num_accepted_tokens_total") == usage.accepted_tokens
    assert grown("edgecc_time_to_first_token_seconds_count") == 1
    by_position = sum(
        value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith("edgecc_spec_decode_num_accepted_tokens_per_pos_total")
    )
    assert by_position == usage.accepted_tokens
    assert after["edgecc_num_requests_running" + label] == 0


def _post(server: Server, body: str | bytes) -> Any:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)


def _metrics(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}

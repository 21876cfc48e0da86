"""The server answers what transformers would, to many at once, and bears whatever clients do."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

pytest.importorskip("fastapi", reason="needs the serve extra")
openai = pytest.importorskip("openai", reason="needs openai's own client, of the dev extra")

from serving import TEMPLATE, Serving, offline, serving, tiny_model  # noqa: E402

from selfspec.inference import request as requests  # noqa: E402
from selfspec.inference.certify.models import wide_model  # noqa: E402
from selfspec.inference.serve.app import Front  # noqa: E402
from selfspec.inference.serve.scheduler import Limits  # noqa: E402
from selfspec.screen import Screen, Screened  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return tiny_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def up(pair: Pair) -> Iterator[Serving]:
    """A server of the tiny model with a chat template."""
    model, tokenizer = pair
    tokenizer.chat_template = TEMPLATE
    with serving(model, tokenizer) as found:
        yield found
    tokenizer.chat_template = None


def client(up: Serving, **kwargs: Any) -> Any:
    return openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0, **kwargs)


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def until(what: Any, seconds: float = 20) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# Many clients


PROMPTS = [f"{chr(97 + n % 26) * (1 + n % 5)} and {n} and {n} and " for n in range(32)]


def malformed(url: str, number: int) -> int:
    bodies: list[Any] = [
        b"{",
        b"\xff\xfe",
        [],
        {"prompt": "x", "temperature": "hot"},
        {"prompt": 7},
        {"messages": "x"},
        {"prompt": [10**9]},
        {"prompt": "x", "max_tokens": 10**9},
    ]
    path = "chat/completions" if number % 8 == 5 else "completions"
    return post(f"{url}/v1/{path}", bodies[number % 8])[0]


async def leave(client: Any, prompt: str, number: int) -> None:
    """Read a part of a long answer and close the connection."""
    stream = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=400, temperature=0, stream=True, seed=number
    )
    async for _ in stream:
        break
    await stream.close()


async def crowd(url: str, wanted: dict[tuple[str, int], str], seconds: float, bothers: int) -> int:
    """32 clients that stream; some leave, others send rubbish. How many answers were read."""
    answered = 0
    end = time.monotonic() + seconds
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def reader(number: int) -> None:
            nonlocal answered
            chance = random.Random(number)
            while True:
                prompt, most = chance.choice(list(wanted))
                text, ends = "", 0
                async for chunk in await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=most, temperature=0, stream=True
                ):
                    text += chunk.choices[0].text
                    ends += chunk.choices[0].finish_reason is not None
                assert text == wanted[prompt, most], (prompt, most)
                assert ends == 1
                answered += 1
                if time.monotonic() > end:
                    return

        async def bother(number: int) -> None:
            await asyncio.sleep(seconds * number / max(bothers, 1))
            await leave(client, PROMPTS[number % 32], number)
            assert 400 <= await asyncio.to_thread(malformed, url, number) < 500

        await asyncio.gather(*(reader(n) for n in range(32)), *(bother(n) for n in range(bothers)))
    return answered


def expected(pair: Pair, lengths: tuple[int, ...]) -> dict[tuple[str, int], str]:
    return {
        (prompt, most): offline(*pair, prompt, max_new_tokens=most)
        for number, prompt in enumerate(PROMPTS)
        for most in (lengths[number % len(lengths)],)
    }


def test_32_streams_with_leavers_and_rubbish_among_them_read_their_own_offline_answers(up: Serving, pair: Pair) -> None:
    wanted = expected(pair, (5, 12, 24))
    answered = asyncio.run(crowd(up.url, wanted, 0.5, bothers=20))
    assert answered >= 32
    until(lambda: up.scheduler.running == 0 and up.scheduler.waiting == 0)


@pytest.mark.nightly
def test_two_minutes_of_32_streams_leave_no_tensor_behind(pair: Pair) -> None:
    model, tokenizer = pair
    wanted = expected(pair, (5, 12, 24, 60, 150))
    counts = []
    with serving(model, tokenizer, limits=Limits(rows=24)) as up:
        for _ in range(4):
            assert asyncio.run(crowd(up.url, wanted, 30, bothers=20)) >= 32
            until(lambda: up.scheduler.running == 0)
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert max(counts[1:]) <= counts[0] + 5, counts


@pytest.mark.parametrize("draft", [None, "early-exit"])
def test_without_a_draft_and_with_one_that_cannot_join_answers_are_the_same(draft: str | None, pair: Pair) -> None:
    model, tokenizer = pair
    wanted = {key: text for key, text in list(expected(pair, (4, 9)).items())[:6]}
    with serving(model, tokenizer, draft) as up:

        async def ask() -> None:
            async with openai.AsyncOpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0) as client:
                found = await asyncio.gather(
                    *(
                        client.completions.create(model="tiny", prompt=prompt, max_tokens=most, temperature=0)
                        for prompt, most in wanted
                    )
                )
            assert [one.choices[0].text for one in found] == list(wanted.values())

        asyncio.run(ask())


# What can be asked


def test_a_seeded_answer_is_that_of_generate_with_the_seed(up: Serving, pair: Pair) -> None:
    given = {"prompt": PROMPTS[3], "max_tokens": 20, "temperature": 0.9, "top_p": 0.9, "seed": 5}
    found = client(up).completions.create(model="tiny", n=3, extra_body={"top_k": 40, "min_p": 0.01}, **given)
    wanted = [
        offline(
            *pair, PROMPTS[3], seed, max_new_tokens=20, do_sample=True, temperature=0.9, top_p=0.9, top_k=40, min_p=0.01
        )
        for seed in (5, 6, 7)
    ]
    assert [choice.text for choice in found.choices] == wanted
    assert found.usage.completion_tokens <= 60 and found.usage.prompt_tokens == len(PROMPTS[3])


@pytest.mark.skipif(not Screen.applies(torch.empty(40_000, 1)), reason="no kernels for bytes on this processor")
def test_a_seeded_answer_without_all_logits_is_the_same_after_another_start(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_LONG", 4)
    model, tokenizer = wide_model(), pair[1]
    drawn: list[list[int]] = []
    draw = Screened.draw

    def noted(self: Screened, *given: Any) -> int | None:
        token = draw(self, *given)
        drawn[-1].append(-1 if token is None else token)
        return token

    monkeypatch.setattr(Screened, "draw", noted)
    wish = {"model": "tiny", "prompt": [65, 66, 67, 65, 66], "max_tokens": 30, "temperature": 1, "seed": 5}
    for earlier in ([], ["something else was asked before", "in many words, " * 9]):
        with serving(model, tokenizer) as up:
            for prompt in earlier:
                client(up).completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
            drawn.append([])
            client(up).completions.create(**wish)
    assert drawn[0] == drawn[1] and len(drawn[0]) == 29


def test_a_chat_uses_the_models_template_and_counts_what_the_draft_did(up: Serving, pair: Pair) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "hello hello"}]},
    ]
    found = client(up).chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=20, temperature=0, user="somebody", store=False
    )
    prompt = "<system>be brief<user>hello hello hello<assistant>"
    assert found.choices[0].message.content == offline(*pair, prompt, max_new_tokens=20)
    assert found.choices[0].finish_reason in ("length", "stop")
    assert found.usage.prompt_tokens == len(prompt)
    counts = found.usage.speculation
    assert counts["rounds"] > 0 and counts["drafted_tokens"] > 0
    assert found.usage.completion_tokens == counts["rounds"] + counts["accepted_tokens"] + 1


def test_a_streamed_chat_ends_with_usage_and_tells_origins(up: Serving, pair: Pair) -> None:
    stream = client(up).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "again again"}],
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"origins": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == offline(*pair, "<user>again again<assistant>", max_new_tokens=30)
    segments = [segment for c in chunks[1:-1] for segment in c.choices[0].origins]
    assert "".join(piece for piece, _ in segments) == text
    assert {depth > 0 for _, depth in segments} == {True, False} or chunks[-1].usage.speculation["accepted_tokens"] == 0
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens <= 30
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count(None) == len(chunks) - 2


def test_stop_strings_end_the_text_and_never_show(up: Serving, pair: Pair) -> None:
    whole = offline(*pair, PROMPTS[7], max_new_tokens=60)
    start = next(n for n in range(9, len(whole) - 3) if "\ufffd" not in whole[n : n + 3])
    stop = whole[start : start + 3]
    wanted = whole[: whole.index(stop)]
    given = {"model": "tiny", "prompt": PROMPTS[7], "max_tokens": 60, "temperature": 0, "stop": ["never", stop]}
    found = client(up).completions.create(**given)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (wanted, "stop")
    parts = [c.choices[0].text for c in client(up).completions.create(stream=True, **given)]
    assert "".join(parts) == wanted
    assert found.usage.completion_tokens < 60


def test_several_prompts_echo_and_tokens(up: Serving, pair: Pair) -> None:
    found = client(up).completions.create(
        model="tiny", prompt=["one ", "two "], n=2, max_tokens=6, temperature=0, echo=True
    )
    texts = [prompt + offline(*pair, prompt, max_new_tokens=6) for prompt in ("one ", "one ", "two ", "two ")]
    assert [c.text for c in found.choices] == texts and [c.index for c in found.choices] == [0, 1, 2, 3]
    ids = pair[1]("two ")["input_ids"]
    again = client(up).completions.create(model="tiny", prompt=ids, max_tokens=6, temperature=0)
    assert "two " + again.choices[0].text == texts[2]


def test_penalties_and_bias_follow_openais_formula(up: Serving, pair: Pair) -> None:
    model, tokenizer = pair
    ids = tokenizer("aaaa")["input_ids"]
    written: list[int] = []
    bias = {40: 4.0, 41: -100.0}
    for _ in range(20):
        scores = model(torch.tensor([ids + written])).logits[0, -1].clone()
        for token in set(written):
            scores[token] -= 0.7 * written.count(token) + 1.1
        for token, value in bias.items():
            scores[token] += value
        written.append(int(scores.argmax()))
    found = client(up).completions.create(
        model="tiny",
        prompt="aaaa",
        max_tokens=20,
        temperature=0,
        frequency_penalty=0.7,
        presence_penalty=1.1,
        logit_bias={str(token): value for token, value in bias.items()},
    )
    text = tokenizer.decode(written, skip_special_tokens=True)
    assert text.startswith(found.choices[0].text) and len(found.choices[0].text) > 5
    forced = client(up).completions.create(model="tiny", prompt="a", max_tokens=3, logit_bias={"70": 100})
    assert forced.choices[0].text == tokenizer.decode([70, 70, 70])


def test_log_probabilities_in_both_forms(up: Serving, pair: Pair) -> None:
    model, tokenizer = pair
    found = client(up).completions.create(model="tiny", prompt="abc", max_tokens=4, temperature=0, logprobs=2)
    scores = model(torch.tensor([tokenizer("abc")["input_ids"]])).logits[0, -1].detach().log_softmax(-1)
    shown = found.choices[0].logprobs
    assert shown.token_logprobs[0] == pytest.approx(float(scores.max()), abs=1e-4)
    assert len(shown.tokens) == len(shown.top_logprobs) == 4
    chat = client(up).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "abc"}], max_tokens=4, logprobs=True, top_logprobs=3
    )
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 4 and all(len(entry.top_logprobs) == 3 for entry in entries)


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "tempreature": 1}, 400, "tempreature"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("completions", {"prompt": "x", "best_of": 4}, 400, "best_of"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, 400, "echo"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("completions", {"prompt": []}, 400, "empty"),
        ("completions", {"prompt": [100000]}, 400, "token 100000"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
        ("completions", {"prompt": "x", "logit_bias": {"100000": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "n": 1000}, 400, "at most"),
        ("completions", {"prompt": "x" * 600}, 400, "limit is 512"),
        ("completions", {"prompt": "x", "max_tokens": 600}, 400, "limit is 512"),
        ("completions", {"prompt": "x", "model": "gpt-9"}, 404, "gpt-9"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'text'"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, 400, "top_logprobs"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
            400,
            "system comes first",
        ),
        ("nowhere", {}, 404, "Not Found"),
    ],
)
def test_bad_requests_get_one_clear_error_in_openais_form(
    up: Serving, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    found, answer = post(f"{up.url}/v1/{path}", body)
    assert found == status
    assert said in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_model_without_a_chat_template_says_so(pair: Pair) -> None:
    model, tokenizer = pair
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with serving(model, tokenizer, None) as up, pytest.raises(openai.BadRequestError, match="no chat template"):
            client(up).chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    finally:
        tokenizer.chat_template = template


def test_the_key_is_asked_for_and_the_body_is_bounded(pair: Pair) -> None:
    with serving(*pair, None, Front("tiny", key="sesame", body=2000)) as up:
        body = {"prompt": "x", "max_tokens": 1}
        url = up.url + "/v1/completions"
        assert post(url, body)[0] == 401
        assert post(url, body, {"Authorization": "Bearer sesam"})[0] == 401
        assert post(url, body, {"Authorization": "Basic sesame"})[0] == 401
        right = {"Authorization": "Bearer sesame"}
        assert post(url, body, right)[0] == 200
        status, answer = post(url, {"prompt": "x" * 3000}, right)
        assert status == 413 and "2000 bytes" in answer["error"]["message"]
        assert json.loads(urllib.request.urlopen(up.url + "/health").read()) == {"status": "ok"}


def test_a_full_queue_and_a_slow_answer_are_refused_by_name(pair: Pair) -> None:
    limits = Limits(rows=1, queue=1, seconds=1.0, tokens=600)
    with serving(*pair, None, limits=limits) as up:

        async def ask() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0) as client:
                given = {"model": "tiny", "prompt": "x", "max_tokens": 500, "temperature": 0}
                slow = []
                for n in range(6):
                    slow.append(asyncio.ensure_future(client.completions.create(**given)))
                    await asyncio.sleep(0.02 if n else 0.1)
                return await asyncio.gather(*slow, return_exceptions=True)

        # Rounds slow enough that the first answer cannot be ready in time.
        slowly(up, 0.05)
        found = asyncio.run(ask())
        codes = [getattr(error, "status_code", 200) for error in found]
        assert codes[0] == 504 and 429 in codes and set(codes) <= {429, 504}
        assert "waiting already" in str(found[codes.index(429)])


def test_a_row_leaves_when_its_client_does(pair: Pair) -> None:
    with serving(*pair, "lookup") as up:
        slowly(up, 0.02)
        for stream in (True, False):
            body = json.dumps({"prompt": "long", "max_tokens": 450, "temperature": 0, "stream": stream}).encode()
            with socket.create_connection(("127.0.0.1", int(up.url.rsplit(":", 1)[1]))) as line:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                line.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                until(lambda: up.scheduler.running == 1)
            until(lambda: up.scheduler.running == 0)
        assert up.scheduler.stats.new_tokens < 800


def test_a_model_that_fails_fails_its_own_requests_and_no_later_one(pair: Pair) -> None:
    model, tokenizer = pair
    with serving(model, tokenizer, None) as up:
        broken = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
        assert post(up.url + "/v1/completions", {"prompt": "x"})[0] == 500
        broken.remove()
        status, answer = post(up.url + "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0})
        assert (status, answer["choices"][0]["text"]) == (200, offline(model, tokenizer, PROMPTS[0], max_new_tokens=8))


# Around it


def test_prometheus_reads_what_was_done(up: Serving) -> None:
    client(up).completions.create(model="tiny", prompt="measure measure", max_tokens=9, temperature=0)
    from prometheus_client.parser import text_string_to_metric_families as parse

    def values() -> dict[str, float]:
        page = urllib.request.urlopen(up.url + "/metrics").read().decode()
        return {s.name: s.value for family in parse(page) for s in family.samples if not s.labels}

    until = time.monotonic() + 10
    while values()["selfspec_running"] and time.monotonic() < until:  # the answer is out before its row is counted off
        time.sleep(0.02)
    found = values()
    assert found["selfspec_generated_tokens_total"] >= 9
    assert found["selfspec_rounds_total"] > 0 and found["selfspec_drafted_tokens_total"] > 0
    assert found["selfspec_running"] == found["selfspec_waiting"] == 0
    assert found["selfspec_first_token_seconds_count"] >= 1


def test_the_page_needs_nothing_from_elsewhere(up: Serving) -> None:
    with urllib.request.urlopen(up.url + "/") as response:
        page = response.read().decode()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "<html" in page and "http://" not in page and "https://" not in page and "//cdn" not in page


def test_models_are_listed(up: Serving) -> None:
    listed = client(up).models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert client(up).models.retrieve("tiny").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client(up).models.retrieve("other")


def slowly(up: Serving, seconds: float) -> None:
    """Make every round take so long at least."""
    step = up.scheduler._step
    up.scheduler._step = lambda batch: (time.sleep(seconds), step(batch))


@pytest.mark.parametrize("grace", [30.0, 0.3])
def test_told_to_stop_it_ends_running_answers_or_cuts_them_at_its_limit(pair: Pair, grace: float) -> None:
    with serving(*pair, None, grace=grace) as up:
        slowly(up, 0.01)
        with client(up) as connection:
            stream = connection.completions.create(
                model="tiny", prompt=PROMPTS[2], max_tokens=90, temperature=0, stream=True
            )
            text = next(stream).choices[0].text
            up.server.handle_exit(signal.SIGTERM, None)
            assert not up.scheduler.alive
            with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
                client(up).completions.create(model="tiny", prompt="x")
            wanted = offline(*pair, PROMPTS[2], max_new_tokens=90)
            if grace > 1:
                assert text + "".join(chunk.choices[0].text for chunk in stream) == wanted
            else:
                with pytest.raises(openai.APIError, match="stopped before"):
                    for chunk in stream:
                        text += chunk.choices[0].text
                assert wanted.startswith(text) and len(text) < len(wanted)


@pytest.mark.nightly
def test_sigterm_lets_running_answers_end_and_takes_no_new_ones(pair: Pair) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfspec", "serve", pair[0].config._name_or_path, "--draft", "lookup"]
    command += ["--port", "0", "--dtype", "float32", "--threads", "1", "--name", "tiny"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "tiny at http://" in line, line
        url = line.split()[3]
        up = Serving(None, url)
        stream = client(up).completions.create(
            model="tiny", prompt=PROMPTS[2], max_tokens=200, temperature=0, stream=True
        )
        text = next(stream).choices[0].text
        server.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == offline(*pair, PROMPTS[2], max_new_tokens=200)
        assert server.wait(30) == 0
        with pytest.raises(openai.APIConnectionError):
            client(up).models.list()
    finally:
        server.kill()
        server.wait()

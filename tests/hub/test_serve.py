"""mrp-serve, asked by the OpenAI client library over the loopback device."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from modeling_mrp.hub import serve
from modeling_mrp.hub.stop_text import StopText
from modeling_mrp.modeling_mrp import MRPForCausalLM

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
CHAT = [{"role": "user", "content": "Add 3 and 4."}]


@pytest.fixture(scope="module")
def client(exported, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        sys.executable,
        "-m",
        "modeling_mrp.hub.serve",
        str(exported),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=log.parent)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, log.read_text()[-3000:]
                time.sleep(0.1)
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def ask(client, exported):
    def ask(stream: bool = False, messages=None, **options):
        return client.chat.completions.create(
            model=str(exported), messages=messages or CHAT, stream=stream, **{"max_tokens": 20, **options}
        )

    return ask


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def expected(exported: Path, mode: str = "none", tokens: int = 20) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = MRPForCausalLM.from_pretrained(exported)
    ids = model.generate(**prompt, mrp_mode=mode, max_new_tokens=tokens)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_models_are_listed(client, exported):
    assert [model.id for model in client.models.list()] == [str(exported)]


def test_chat_and_streaming_give_what_generate_gives(ask, exported):
    answer = ask()
    assert answer.choices[0].message.content == expected(exported)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    pieces = list(ask(stream=True))
    assert text_of(pieces) == answer.choices[0].message.content
    assert len([p for p in pieces if p.choices and p.choices[0].delta.content]) > 3


def test_each_mode_by_request(ask, exported):
    for mode in ("none", "speculative", "direct", "remask"):
        options = {"extra_body": {"generation_config": json.dumps({"mrp_mode": mode, "max_new_tokens": 20})}}
        assert ask(**options).choices[0].message.content == expected(exported, mode), mode


def test_stop_strings_end_the_answer_and_are_not_part_of_it(ask):
    whole = ask().choices[0].message.content
    stop = whole[9:11]
    until = whole[: whole.index(stop)]
    stopped = ask(stop=[stop])
    assert stopped.choices[0].message.content == until
    assert stopped.choices[0].finish_reason == "stop"
    assert text_of(ask(stop=stop, stream=True)) == until


def test_two_requests_at_once(ask):
    alone = [ask(messages=[{"role": "user", "content": text}]).choices[0].message.content for text in ("One", "Two")]
    together: dict[str, str] = {}

    def work(text: str) -> None:
        together[text] = text_of(ask(stream=True, messages=[{"role": "user", "content": text}]))

    threads = [threading.Thread(target=work, args=(text,)) for text in ("One", "Two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together["One"], together["Two"]] == alone


def test_a_temperature_samples_and_a_seed_repeats(ask):
    answers = [ask(temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    assert answers[0] != ask().choices[0].message.content


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"extra_body": {"generation_config": '{"mrp_mode": "fast"}'}}, "mrp_mode='fast'"),
        ({"extra_body": {"generation_config": "{mrp_mode"}}, "generation_config="),
        ({"extra_body": {"generation_config": "[1]"}}, "not an object"),
        ({"extra_body": {"generation_config": '{"num_beams": 4}'}}, "num_beams=4"),
        ({"extra_body": {"generation_config": '{"mrp_stepz": 4}'}}, "mrp_steps"),
        ({"max_tokens": 100000}, "max_position_embeddings"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"frequency_penalty": 0.5}, "repetition_penalty=1.5"),
        ({"stop": [1]}, "stop=[1]"),
        ({"messages": [{"content": "no role"}]}, "messages hold"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split("=")[0],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_with_the_reason(ask, options, said, stream):
    with pytest.raises(openai.APIStatusError) as error:
        ask(stream=stream, **options)
    assert 400 <= error.value.status_code < 500
    assert said in str(error.value)


def test_without_a_limit_the_answer_may_fill_the_context(exported):
    model = MRPForCausalLM.from_pretrained(exported)
    config = serve.request_config(lambda body, config: GenerationConfig(), {"messages": CHAT}, None)
    ids = torch.ones(1, 500, dtype=torch.int64)
    serve.check_request(model, {"input_ids": ids, "attention_mask": ids}, config)
    assert config.max_new_tokens == 12  # 512 positions


@pytest.mark.parametrize("option", ["--compile", "--continuous-batching"])
def test_unsupported_server_options_are_refused(exported, option, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mrp-serve", str(exported), option])
    with pytest.raises(SystemExit, match=f"{option} is not supported"):
        serve.main()


def test_stop_text():
    for pieces in (["one STOP two"], ["one ST", "OP two"], list("one STOP two")):
        text = StopText(["STOP", "two"])
        assert "".join(map(text.push, pieces)) + text.rest() == "one "
    text = StopText(["STOP"])
    assert "".join(map(text.push, ["a S", "T", "O"])) == "a "
    assert text.rest() == "STO"
    assert StopText([]).cut("as it is") == "as it is"
    assert StopText(["aab"]).cut("aaab") == "a"

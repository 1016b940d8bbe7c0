"""`LLM` in the caller's process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from localllm import LLM, SamplingParams
from localllm.errors import BadRequest, LocalLLMError

GREEDY = SamplingParams(temperature=0, num_predict=8)


@pytest.fixture(scope="module")
def llm(tiny_path: Path):
    with LLM(tiny_path, backend="reference") as opened:
        yield opened


def test_weights_that_are_nowhere_are_refused(tiny_path: Path) -> None:
    with pytest.raises(BadRequest, match="'bogus' is none of auto, mapped, resident"):
        LLM(tiny_path, backend="reference", weights="bogus")


def test_many_prompts_give_each_its_own_answer(llm) -> None:
    prompts = [f"text {i}" for i in range(40)]
    together = llm.generate(prompts, GREEDY)
    assert len(together) == 40
    for i in (0, 17, 39):
        alone = llm.generate(prompts[i], GREEDY)
        assert together[i].tokens == alone.tokens
        assert together[i].text == alone.text
    assert together[0].finish_reason in ("length", "stop")
    assert together[0].stats.prompt_tokens == len("text 0")


def test_chat_and_stream_agree(llm) -> None:
    answer = llm.chat("hello", GREEDY)
    assert "".join(llm.stream("hello", GREEDY)) == answer.text
    assert llm.chat([{"role": "user", "content": "hello"}], GREEDY).tokens == answer.tokens


def test_answers_keep_to_a_format(llm) -> None:
    schema = {"enum": ["yes", "no"]}
    assert json.loads(llm.chat("well?", format=schema, think=False).text) in schema["enum"]
    for answer in llm.generate(["a", "b"], format=schema):
        assert json.loads(answer.text) in schema["enum"]
        assert (answer.thinking, answer.tool_calls) == ("", [])


def test_tokens_and_back(llm) -> None:
    assert llm.detokenize(llm.tokenize("héllo")) == "héllo"
    assert len(llm.tokenize("<|im_end|>")) > 1
    assert len(llm.tokenize("<|im_end|>", special=True)) == 1


def test_one_bad_prompt_fails_the_call_and_leaves_the_model_usable(llm) -> None:
    with pytest.raises(BadRequest, match="tokens"):
        llm.generate(["fine", "x" * 10_000], GREEDY)
    with pytest.raises(BadRequest, match="stop"):
        llm.generate("fine", GREEDY, stop="a")
    assert llm.generate("fine", GREEDY).tokens


def test_a_closed_model_says_so(tiny_path) -> None:
    llm = LLM(tiny_path, backend="reference")
    llm.close()
    llm.close()
    with pytest.raises(LocalLLMError, match="closed"):
        llm.generate("hello")


SCRIPT = """
import os, sys
from localllm import LLM, SamplingParams
llm = LLM(sys.argv[1], backend="reference")
llm.generate("hello", SamplingParams(num_predict=2))
"""


def run_script(tiny_path: Path, code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + code, str(tiny_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_its_copy_is_closed(tiny_path) -> None:
    code = """
pid = os.fork()
if pid == 0:
    try:
        llm.generate("hello")
    except Exception as error:
        print(error, flush=True)
    sys.exit(0)
os.waitpid(pid, 0)
print(len(llm.generate("hello", SamplingParams(num_predict=3)).tokens) > 0)
"""
    out, err = run_script(tiny_path, code).communicate(timeout=120)
    assert "fork" in out, err
    assert out.splitlines()[-1] == "True"


def test_ctrl_c_ends_a_call_and_the_model_goes_on(tiny_path) -> None:
    code = """
try:
    print("go", flush=True)
    while True:
        llm.generate(["a", "b"], SamplingParams(num_predict=200, ignore_eog=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(len(llm.generate("hello", SamplingParams(num_predict=3, ignore_eog=True)).tokens))
llm.close()
"""
    child = run_script(tiny_path, code)
    assert child.stdout.readline().strip() == "go"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert out.split() == ["interrupted", "3"], err
    assert child.returncode == 0


def test_a_program_that_ends_without_closing_exits(tiny_path) -> None:
    child = run_script(tiny_path, "print('done')")
    out, err = child.communicate(timeout=120)
    assert (out.strip(), child.returncode) == ("done", 0), err

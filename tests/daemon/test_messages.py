import socket

import pytest

from localllm.errors import BadFile, LocalLLMError
from localllm.messages import (
    HEADER,
    Cancel,
    Channel,
    Delta,
    Deltas,
    Estimate,
    Failed,
    Generate,
    Load,
    Loading,
    Message,
    Proceed,
    Pulse,
    Ready,
    Statistics,
    decode,
    encode,
    error_of,
    kind_of,
)

MESSAGES: list[Message] = [
    Load("/models/x.gguf", digest="ab", threads=2),
    Generate(7, prompt="héllo \x00 \U0001f642", stop=["\n"], options={"seed": 1}, logprobs=0),
    Generate(8, messages=[{"role": "user", "content": "hi"}], truncate=False),
    Cancel(7),
    Loading("compiling kernels", 3, 40),
    Ready(4096, 10),
    Failed("x.gguf: truncated", "BadFile"),
    Pulse(12),
    Pulse(12, num_running=2, kv_usage=0.5, waiting=[7, 8]),
    Estimate(1 << 34),
    Proceed(1 << 35),
    Deltas([Delta(7, "a"), Delta(8, done_reason="stop", statistics=Statistics(3, 0, 1))]),
    Deltas([Delta(1, logprobs=[{"token": "a", "logprob": -0.5, "bytes": [97]}], tokens=[1, 2])]),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_message_survives_the_wire(message: Message) -> None:
    data = encode(message)
    size, kind = HEADER.unpack(data[: HEADER.size])
    assert size == len(data) - HEADER.size
    assert decode(kind, data[HEADER.size :]) == message


def test_channel_gives_messages_in_order_and_then_the_end() -> None:
    left, right = socket.socketpair()
    with left, right:
        sender, receiver = Channel(left), Channel(right)
        for message in MESSAGES:
            sender.send(message)
        left.shutdown(socket.SHUT_WR)
        assert [receiver.receive() for _ in MESSAGES] == MESSAGES
        assert receiver.receive() is None


@pytest.mark.parametrize("cut", [1, 4, 5, 6, 20])
def test_message_cut_short_is_the_end(cut: int) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(encode(MESSAGES[0])[:cut])
        left.shutdown(socket.SHUT_WR)
        assert Channel(right).receive() is None


def test_errors_keep_their_class_across_the_wire() -> None:
    assert isinstance(error_of("BadFile", "x"), BadFile)
    assert type(error_of("ValueError", "x")) is LocalLLMError
    assert type(error_of("Exception", "x")) is LocalLLMError


def test_errors_outside_the_tree_travel_as_the_class_they_belong_to() -> None:
    class Odd(BadFile):
        pass

    assert isinstance(error_of(kind_of(Odd("x")), "x"), BadFile)
    assert kind_of(ValueError("x")) == "ValueError"

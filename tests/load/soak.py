"""Clients that misbehave as real ones do, many at once, against a daemon with two models.

What is sent is drawn by seed; which model, and when its runner is killed, follows a schedule.
"""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from localllm.traffic.workload import WORDS

AT_ONCE = 24
MENU = 40  # different well-formed requests; the same one must get the same answer every time
KILLED = "the model runner has unexpectedly stopped"
BAD_BODIES: tuple[tuple[str, bytes, int], ...] = (
    ("/api/generate", b"{", 400),
    ("/api/generate", b"[]", 400),
    ("/api/chat", b'{"model": 7}', 400),
    ("/api/chat", b'{"model": "a", "messages": "hello"}', 400),
    ("/api/chat", b'{"model": "a", "messages": [{"role": "user", "content": 5}]}', 400),
    ("/api/chat", b'{"model": "a", "messages": [7]}', 400),
    ("/api/chat", b'{"model": "nonsuch", "messages": [{"role": "user", "content": "x"}]}', 404),
    ("/api/generate", b'{"model": "a", "prompt": "x", "options": {"temperature": "hot"}}', 400),
    ("/api/generate", b'{"model": "a", "prompt": "x", "options": {"temperature": -1}}', 400),
    ("/api/generate", b'{"model": "a", "prompt": "x", "format": {"not": {}}}', 400),
    ("/api/generate", b'{"model": "a", "prompt": "' + b"x" * 5000 + b'"}', 400),
    ("/api/generate", b'{"model": "a", "prompt": "x", "context": [99999999]}', 400),
    ("/api/generate", b"\xff\xfe\x00", 400),
    ("/api/generate", b"[" * 5000, 400),
)
GETS = ("/api/ps", "/api/tags", "/api/version", "/health")


@dataclass
class Tally:
    """What happened, and what should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: dict[tuple[str, int], str] = field(default_factory=dict)

    def check(self, claim: object, text: str) -> None:
        if not claim:
            self.wrong.append(text)


class Soak:
    """Drives a daemon at `url`; `process` is the daemon's."""

    def __init__(self, url: str, process: psutil.Process, models: tuple[str, str], seed: int):
        self.url = url
        self.process = process
        self.models = models
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.pids: set[int] = set()
        self.num_kills = 0
        self._kill_at: list[int] = []
        self._killed: list[psutil.Process] = []

    async def run(self, count: int, *, switch_every: int, kills: int = 0) -> None:
        """Send `count` requests; the model changes every so many, runners die `kills` times."""
        self._kill_at = [count * (i + 1) // (kills + 1) for i in range(kills)]
        numbers = iter(range(count))
        # Who leaves has a connection of its own: a pool of httpx whose requests are cancelled
        # confuses connections now and then.
        alone = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=300) as http,
            httpx.AsyncClient(base_url=self.url, timeout=300, limits=alone) as rude,
        ):
            workers = (self._work(http, rude, numbers, switch_every) for _ in range(AT_ONCE))
            await asyncio.gather(*workers)

    async def touch(self, model: str) -> None:
        """Ask everything there is of one model, so that a new runner holds what an old one does.

        That is more than the menu: the whole KV pool has been used then.
        """
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            bodies = [self._body(model, number) for number in range(3 * MENU)]
            posts = [http.post(path, json={**body, "exact": False}) for path, body in bodies]
            posts += [
                http.post(path, content=self._bad_body(body, model)) for path, body, _ in BAD_BODIES
            ]
            await asyncio.gather(*posts)

    def _bad_body(self, body: bytes, model: str) -> bytes:
        return body.replace(b'"model": "a"', f'"model": "{model}"'.encode())

    async def _work(
        self,
        http: httpx.AsyncClient,
        rude: httpx.AsyncClient,
        numbers: Iterator[int],
        switch: int,
    ) -> None:
        for number in numbers:
            model = self.models[number // switch % 2]
            if self._kill_at and number >= self._kill_at[0]:
                self._kill_at.pop(0)
                self._kill()
            kind = self.rng.choices(("good", "leave", "bad", "get"), (64, 16, 14, 6))[0]
            self.tally.counts[kind] += 1
            try:
                await getattr(self, f"_{kind}")(rude if kind == "leave" else http, model)
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self.tally.wrong.append(f"{kind} {model} {number}: {error!r}")

    def runners(self) -> list[psutil.Process]:
        """The daemon's runners; other children, such as those of `pull`, there are none."""
        children = [child for child in self.process.children() if is_alive(child)]
        self.pids |= {child.pid for child in children}
        return children

    def _kill(self) -> None:
        for runner in self.runners()[:1]:
            os.kill(runner.pid, signal.SIGKILL)
            self._killed.append(runner)
            self.num_kills += 1

    def _body(self, model: str, number: int) -> tuple[str, dict[str, Any]]:
        """The request of that number of the menu."""
        rng = random.Random(f"menu {number}")
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 36)))
        options = {
            "seed": number + 1,
            "num_predict": rng.randint(1, 40),
            "temperature": rng.choice((0, 0.8, 1.2)),
            "repeat_penalty": rng.choice((1.0, 1.2)),
        }
        body: dict[str, Any] = {"model": model, "options": options, "exact": True}
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2}
        if rng.random() < 0.5:
            return "/api/generate", {**body, "prompt": text}
        system = {"role": "system", "content": "shared words " * 4}
        return "/api/chat", {**body, "messages": [system, {"role": "user", "content": text}]}

    async def _good(self, http: httpx.AsyncClient, model: str) -> None:
        """A well-formed request: it succeeds, with the same answer as the last time."""
        number = self.rng.randrange(MENU)
        path, body = self._body(model, number)
        body["stream"] = self.rng.random() < 0.6
        kills = self._num_over()
        name = f"good-{self.tally.counts.total()}-{number}"
        response = await http.post(path, json=body, headers={"X-Request-Id": name})
        told = response.headers["x-request-id"]
        self.tally.check(told == name, f"{path}: {name} got the answer of {told}")
        lines = [json.loads(line) for line in response.text.splitlines()]
        last = lines[-1]
        if "error" in last:
            excused = KILLED in str(last["error"]) and self._was_hit(kills)
            self.tally.counts["hit by a kill"] += excused
            self.tally.check(excused, f"{path} {model} {number}: {response.status_code} {last}")
            return
        self.tally.check(last.get("done") is True, f"{path}: no end: {last}")
        said = "".join(x.get("response") or x.get("message", {}).get("content", "") for x in lines)
        logprobs = [entry for x in lines for entry in x.get("logprobs", ())]
        answer = json.dumps([said, logprobs, last.get("eval_count"), last.get("done_reason")])
        known = self.tally.answers.setdefault((model, number), answer)
        self.tally.check(known == answer, f"{path} {model} {number}: {answer} after {known}")

    def _num_over(self) -> int:
        """Runners that were killed and are gone; a request can still meet one that is going.

        One is gone when the daemon has taken note, which it can when the last thread has ended.
        """
        self._killed = [p for p in self._killed if psutil.pid_exists(p.pid)]
        return self.num_kills - len(self._killed)

    def _was_hit(self, kills_before: int) -> bool:
        """A kill happened after the request was sent, or was not over then."""
        return self.num_kills > kills_before

    async def _leave(self, http: httpx.AsyncClient, model: str) -> None:
        """A client that goes: at once, or after some of the answer, streamed or not."""
        path, body = self._body(model, self.rng.randrange(MENU))
        body["options"] |= {"num_predict": 400, "ignore_eog": True}
        body["stream"] = self.rng.random() < 0.7
        left = self.rng.randint(0, 6)
        if left == 0 or not body["stream"]:
            sending = asyncio.create_task(http.post(path, json=body))
            await asyncio.wait({sending}, timeout=self.rng.random() / 20)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            return
        async with http.stream("POST", path, json=body) as response:
            async for _ in response.aiter_lines():
                left -= 1
                if left == 0:
                    return

    async def _bad(self, http: httpx.AsyncClient, model: str) -> None:
        """A body that is wrong is told so, by status and in words."""
        path, body, status = self.rng.choice(BAD_BODIES)
        kills = self._num_over()
        response = await http.post(path, content=self._bad_body(body, model))
        if response.status_code == 500 and self._was_hit(kills):
            return
        claim = response.status_code == status and response.json()["error"]
        self.tally.check(claim, f"{path} {body[:60]!r}: {response.status_code} {response.text}")

    async def _get(self, http: httpx.AsyncClient, model: str) -> None:
        response = await http.get(self.rng.choice(GETS))
        self.tally.check(response.status_code == 200, f"{response.url}: {response.status_code}")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Held:
    """What a process holds while it is idle."""

    resident_bytes: int
    num_threads: int
    num_descriptors: int

    @classmethod
    def of(cls, process: psutil.Process) -> "Held":
        return cls(process.memory_info().rss, process.num_threads(), process.num_fds())

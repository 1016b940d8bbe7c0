"""What guessing tokens from the context gains and costs: decode rates with and without, in turn.

    python -m benchmarks.speculation [MODEL.gguf ...] [--only edit|chat] [--rounds N] [--tokens N]

`edit` tasks say a text again with a change or without one, greedily; `chat` tasks are questions,
answered at temperature 0.8. Every answer is computed `rounds` times either way, in turn; a row has
the medians of the rates, the median of the pairwise ratios, and how many tokens were guessed and
how many of those were right. The tokens have to be the same, or the run fails.

Without models: the two real ones of the package index.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import MODELS, fetch
from localllm.answers import TextDelta
from localllm.config import load_settings
from localllm.prompts import TextRequest
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams

STORY = """\
The old lighthouse stood at the end of the pier, and every evening Martin walked there with his dog. \
He had been the keeper for thirty years, and he knew every stone of the path. In winter the waves \
came over the wall and froze on the steps, so that he had to hold the rope with both hands. In \
summer the visitors came from the town and asked him how high the tower was, how far the light \
could be seen, and whether he was ever afraid. He answered all of them in the same way. The tower \
is forty metres high, he said, the light can be seen for thirty kilometres, and only a fool is \
never afraid of the sea. Then he climbed the stairs, two hundred and twelve of them, and lit the \
lamp. From the top he could see the harbour, the church, the fish market and the long grey line of \
the northern coast. Sometimes a ship answered with its horn, and the dog barked, and Martin raised \
his cap although nobody could see him. When the lamp was burning he sat down at the small table, \
opened the book of the watch and wrote the date, the weather and the names of the ships. The book \
was the ninth since he had come, and the others stood in a row on the shelf above the bed."""

LETTER = """\
Dear Mrs Palmer, thank you for your letter of the third of May. We are sorry to hear that the \
kettle you bought from us leaks. Please send it to the address below, together with the bill, and \
we will repair it free of charge or give you a new one. The parcel must not be heavier than two \
kilograms. You do not have to pay the postage: write the number 4711 on the parcel, and the post \
office will send us the account. Repairs take about ten days. If you have not heard from us by the \
end of the month, please call us; our office is open from eight to five on all working days. We \
hope that you will enjoy your kettle for many years, and we enclose a small bag of our best tea. \
With kind regards, your friends of the kettle shop."""

CODE = '''\
```python
def load_users(path):
    """Read all users from a file."""
    users = []
    with open(path) as file:
        for line in file:
            name, email, age = line.strip().split(",")
            user = {"name": name, "email": email, "age": int(age)}
            users.append(user)
    return users


def find_user(users, name):
    """Return the user with that name, or None."""
    for user in users:
        if user["name"] == name:
            return user
    return None


def average_age(users):
    """Return the average age of all users."""
    total = 0
    for user in users:
        total += user["age"]
    return total / len(users)
```
'''

EDITS = {
    "repeat story": f"Repeat the following text word for word.\n\n{STORY}",
    "rename keeper": "Rewrite the following text. Change the name Martin to Robert and keep every "
    f"other word exactly as it is.\n\n{STORY}",
    "correct story": "Correct the spelling mistakes in this text and return the whole text:\n\n"
    + STORY.replace("winter", "wintr").replace("answered", "anserwed", 1),
    "repeat letter": f"Repeat the following text word for word.\n\n{LETTER}",
    "rename users": "Here is a Python file. Rename the variable users to people and return the "
    f"complete file.\n\n{CODE}",
}
CHATS = {
    "sky": "Why is the sky blue? Explain in detail.",
    "dragon": "Tell me a story about a dragon and a baker.",
    "war": "What were the causes of the First World War?",
    "soup": "Give me a recipe for vegetable soup.",
    "energy": "List ten ways to save energy at home.",
    "summary": f"Summarize the following text in three sentences.\n\n{STORY}",
    "account": "Write a Python class for a bank account with deposit and withdraw.",
    "letter": f"Answer this letter as Mrs Palmer, who is angry.\n\n{LETTER}",
}


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to compute."""

    kind: str
    name: str
    text: str
    temperature: float

    def request(self, num_predict: int) -> TextRequest:
        params = SamplingParams(temperature=self.temperature, seed=1, num_predict=num_predict)
        messages = [{"role": "user", "content": self.text}]
        return TextRequest(self.name, messages=messages, params=params)


TASKS = [Task("edit", name, text, 0.0) for name, text in EDITS.items()]
TASKS += [Task("chat", name, text, 0.8) for name, text in CHATS.items()]


@dataclass(frozen=True, slots=True)
class Row:
    """A task's figures; rates in tokens per second after the first token."""

    task: Task
    num_tokens: int
    plain: float
    guessed: float
    ratio: float
    drafted: int
    accepted: int

    def __str__(self) -> str:
        return (
            f"| {self.task.kind} | {self.task.name} | {self.num_tokens} | {self.plain:.0f} | "
            f"{self.guessed:.0f} | **{self.ratio:.2f}** | {self.drafted} | {self.accepted} |"
        )


def rate(answer: TextDelta) -> float:
    assert answer.stats is not None
    return (answer.stats.generated_tokens - 1) / answer.stats.decode_seconds


def measure(model: LoadedModel, task: Task, rounds: int, num_predict: int) -> Row | None:
    """Both ways in turn; None for an answer that is too short to be timed."""
    request = task.request(num_predict)
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        plain = model.generate_text(replace(request, speculate=False))
        guessed = model.generate_text(request)
        if plain.tokens != guessed.tokens:
            sys.exit(f"{task.name}: the answers differ")
        if len(plain.tokens) < 16:
            return None
        if number:  # the first pair lays the prompt down in the cache
            pairs.append((rate(plain), rate(guessed)))
    assert guessed.stats is not None
    return Row(
        task,
        len(guessed.tokens),
        *(statistics.median(side) for side in zip(*pairs)),
        statistics.median(b / a for a, b in pairs),
        guessed.stats.drafted_tokens,
        guessed.stats.accepted_tokens,
    )


def report(path: Path, tasks: list[Task], rounds: int, num_predict: int) -> Iterator[str]:
    """Lines of a table, with the mean of the ratios of each kind."""
    ratios: dict[str, list[float]] = {}
    with LoadedModel.open(path, replace(load_settings(), speculate=True)) as model:
        for task in tasks:
            row = measure(model, task, rounds, num_predict)
            if row is not None:
                ratios.setdefault(task.kind, []).append(row.ratio)
                yield str(row)
    for kind, values in ratios.items():
        mean = math.exp(statistics.fmean(math.log(value) for value in values))
        yield f"{path.stem}, {kind}: {mean:.3f} (lowest {min(values):.3f}) of {len(values)} tasks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--only", choices=("edit", "chat"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    tasks = [task for task in TASKS if args.only in (None, task.kind)]
    for path in args.models or [fetch(name) for name in MODELS]:
        print("| kind | task | tokens | plain t/s | guessed t/s | ratio | guesses | right |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for line in report(path, tasks, args.rounds, args.tokens):
            print(line, flush=True)


if __name__ == "__main__":
    main()

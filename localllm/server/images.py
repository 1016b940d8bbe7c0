"""Images of a request: no model sees them, but a debug render shows where they would stand."""

from collections.abc import Sequence
from typing import Any

from localllm.errors import BadRequest

PLACE = "[img]"


def settle_images(
    model: str, messages: Sequence[dict[str, Any]], *, is_render: bool
) -> tuple[list[dict[str, Any]], int]:
    """The messages without their images, and how many those were.

    In a debug render each becomes `[img-N]`, in place of the next `[img]` of its message's text or
    in front of that. Raises BadRequest for any other request that has some.
    """
    settled, number = [], 0
    for message in messages:
        images = message.get("images") or ()
        if images and not is_render:
            raise BadRequest(f'"{model}" does not support images')
        text, front = message["content"], ""
        for _ in images:
            mark = f"[img-{number}]"
            if PLACE in text:
                text = text.replace(PLACE, mark, 1)
            else:
                front += mark
            number += 1
        rest = {key: value for key, value in message.items() if key != "images"}
        settled.append({**rest, "content": front + text})
    return settled, number

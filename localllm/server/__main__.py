"""`python -m localllm.server`: the daemon, as clients start it in the background."""

import os
import sys

from localllm.config import load_settings
from localllm.errors import LocalLLMError


def main() -> int:
    """Serve until a signal comes. `--background` logs to a file, `--prepare` starts a runner."""
    from localllm.server.app import serve

    if "--background" in sys.argv:
        os.chdir("/")
    try:
        serve(
            load_settings(),
            is_background="--background" in sys.argv,
            prepares="--prepare" in sys.argv,
        )
    except LocalLLMError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

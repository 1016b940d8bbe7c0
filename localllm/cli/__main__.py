"""`python -m localllm.cli`: the command line."""

import sys

from localllm.cli import main

sys.exit(main())

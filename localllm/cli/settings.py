"""`localllm serve --help`: every setting, its value in force and where that comes from."""

import os
from typing import Any

from typer.core import TyperCommand

from localllm.config import CONFIG_VARIABLE, Found, config_path, explain_settings
from localllm.errors import BadSettings


class SettingsHelp(TyperCommand):
    """A command whose help ends with the settings."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Settings"):
            try:
                path = config_path(os.environ)
                rows = [_row(found) for found in explain_settings()]
            except BadSettings as error:
                formatter.write_text(f"Error: {error}")
                return
            formatter.write_text(
                f"Variables, or keys of {path} ({CONFIG_VARIABLE} names another file); "
                "Ollama's names (OLLAMA_HOST, ...) work where it has the same setting."
            )
            formatter.write_paragraph()
            formatter.write_dl(rows)


def _row(found: Found) -> tuple[str, str]:
    about = found.row.metadata
    source = f", from {found.source}" if found.source else ""
    key = f"{about['names'][0]}, {found.row.name}"
    return key, f"{about['help']} [{_text(found)}{source}]"


def _text(found: Found) -> str:
    """The value as a variable would have it; not a secret's."""
    value = found.value
    if value is None or value == () or value == "":
        return "not set"
    if found.row.metadata.get("is_secret"):
        return "set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, tuple) else str(value)

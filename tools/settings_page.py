"""The table of settings in docs/settings.md, made from `kernelproxy.common.options`.

``python tools/settings_page.py`` writes it into the page; a test compares them.
"""

from __future__ import annotations

import re
from pathlib import Path

from kernelproxy.common.options import OPTIONS, Option, Reader

PAGE = Path(__file__).resolve().parents[1] / "docs/settings.md"
_TABLE = re.compile(r"(<!-- options: [^\n]* -->\n).*?(<!-- /options -->)", re.DOTALL)


def table() -> str:
    """Return the table in Markdown."""
    rows = ["| variable | trait of | meaning | default |\n|---|---|---|---|\n"]
    rows += [f"| {' | '.join(_row(each))} |\n" for each in OPTIONS]
    return "".join(rows)


def _row(option: Option) -> tuple[str, str, str, str]:
    traits = [each for each in (Reader.SERVER, Reader.PROVISIONER) if each in option.readers]
    more = f" ([more]({option.page}))" if option.page else ""
    return (
        f"`{option.variable}`" if option.has_variable else f"(only the trait `{option.name}`)",
        ", ".join(f"`{each}`" for each in traits),
        f"{option.help}{more}",
        option.default_text,
    )


def page(text: str) -> str:
    """Return the page with the table of today."""
    return _TABLE.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")

"""The policy that the documentation shows as an example passes the shipped suite."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvcache_factory.policy.base import EvictionPolicy
from kvcache_factory.testing import PolicyTests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def documented() -> type[EvictionPolicy]:
    """The class from the page, not registered: the page's own snippet does that."""
    text = re.search(
        r"^```python\n([^`]*class ShortestFirst.*?)^from kvcache", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert text is not None
    names: dict[str, Any] = {}
    exec(text[1].replace("@register_policy\n", ""), names)
    found: type[EvictionPolicy] = names["ShortestFirst"]
    return found


class TestDocumented(PolicyTests):
    """Twenty lines are enough."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return documented()(**options)

    def test_it_is_as_short_as_the_page_says(self) -> None:
        """From the class line to its last."""
        text = PAGE.read_text()
        body = text[text.index("class ShortestFirst") :].split("\n\n\n")[0]
        assert len([line for line in body.splitlines() if line.strip()]) <= 20

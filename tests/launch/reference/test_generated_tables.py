"""Pages have the tables that the code makes."""

import re

import pytest

from birthmark.launch.reference import quantities_page, run_directory, security_page
from birthmark.launch.reference.generated_tables import regenerated

PAGES = (quantities_page, run_directory, security_page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.FILE.name)
def test_the_tables_are_those_of_the_code(page):
    text = page.FILE.read_text(encoding="utf-8")
    assert regenerated(text, page.TABLES) == text, f"docs/{page.FILE.name} is old: python -m {page.__name__}"
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(page.TABLES)
    assert text.count("<!-- end -->") == len(page.TABLES)


def test_a_table_that_was_edited_by_hand_is_made_anew():
    text = quantities_page.FILE.read_text(encoding="utf-8")
    assert "| `drift` |" in text
    assert regenerated(text.replace("| `drift` |", "| `drifts` |"), quantities_page.TABLES) == text

"""docs/answers.md: a question takes three minutes at most, and says nothing that the page behind it does not say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "answers.md"
WORDS_A_MINUTE = 200  # of somebody who reads carefully, code and tables too
MINUTES = 3
SHORT = 45  # words of an answer
WORD = re.compile(r"\w[\w'.,/-]*")


class Row(NamedTuple):
    group: str
    question: str
    answer: str
    links: list[tuple[str, str]]


def words(text: str) -> int:
    return len(WORD.findall(re.sub(r"<!--.*?-->|\]\([^)]*\)", "", text)))


def groups() -> dict[str, str]:
    return {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]}


def rows() -> list[Row]:
    found = list[Row]()
    for group, text in groups().items():
        for line in text.splitlines():
            cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            if line.startswith("| ") and cells[0] not in ("question", "---"):
                question, answer, more = cells
                found.append(Row(group, question, answer, re.findall(r"\]\(([^)#]+)#?([^)]*)\)", more)))
    return found


ROWS = rows()


def place(heading: str) -> str:
    """What a heading is called in a link, on a forge and by mkdocs."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def section(page: str, anchor: str) -> str:
    """What a reader of a link reads: to the next heading, or what stands before the first one of the page's parts."""
    lines, code = list[str](), False
    for line in (PAGE.parent / page).read_text().splitlines():
        code ^= line.lstrip().startswith("```")
        heading = None if code else re.match(r"#+ (.*)", line)
        if heading and lines:
            break
        if lines or (heading and (not anchor or place(heading[1]) == anchor)):
            lines.append(line)
    assert lines, f"{page} has no heading #{anchor}"
    return "\n".join(lines)


def test_there_is_a_question_for_every_kind_of_reader() -> None:
    assert len(ROWS) >= 90
    assert len({row.question for row in ROWS}) == len(ROWS)
    listed = dict(re.findall(r"\[([^]]+)\]\(#([\w-]+)\)", PAGE.read_text()))
    assert list(listed.values()) == [place(group) for group in groups()]


@pytest.mark.parametrize("row", ROWS, ids=[row.question for row in ROWS])
def test_an_answer_takes_three_minutes(row: Row) -> None:
    """To read README to its figure, this page's head, the group's table with the answer, and all that a link leads to."""
    assert 1 <= words(row.answer) <= SHORT
    assert row.links
    head = (ROOT / "README.md").read_text().partition("![")[0] + PAGE.read_text().partition("\n## ")[0]
    for link in row.links:
        read = words(head) + words(groups()[row.group]) + words(section(*link))
        assert read <= WORDS_A_MINUTE * MINUTES, f"{read} words: link to a nearer heading, or cut the section"


@pytest.mark.parametrize("row", ROWS, ids=[row.question for row in ROWS])
def test_an_answer_s_figures_stand_where_it_leads(row: Row) -> None:
    """Those that are not generated: 4.8, 12 %, 1,540. A page that is measured anew takes its answers along."""
    behind = "".join((PAGE.parent / page).read_text() for page, _ in row.links)
    written = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->|`[^`]*`", "", row.answer)
    for figure in re.findall(r"\d+\.\d+|\d+(?= (?:%|times|ms|minutes))|\d+,\d{3}", written):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", behind), f"{figure} is not in {row.links}"


def test_the_tests_of_answers_can_fail() -> None:
    assert words("| One `a.b` | 4.8 times | [more](x.md) |") == 5
    assert section("tutorials/first-call.md", "").startswith("# A first call")
    assert "## The call" not in section("tutorials/first-call.md", "")
    assert section("tutorials/first-call.md", "lse").startswith("## lse\n")
    with pytest.raises(AssertionError, match="no heading"):
        section("tutorials/first-call.md", "nothing")

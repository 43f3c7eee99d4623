"""docs/answers: a question takes three minutes at most, and says nothing that the page behind it does not say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.answer_pages import FOLDER, GROUPS, MARK, contents, filled, place, questions

ROOT = Path(__file__).parent.parent
WORDS_A_MINUTE = 200  # of somebody who reads carefully, code and tables too
STEP = 1 / 6  # minutes to open a page, or to go to a heading
MINUTES = 3
SHORT = 90  # words of an answer, with its question and its code
WORD = re.compile(r"\w[\w'.,/-]*")


class Answer(NamedTuple):
    group: str
    question: str
    text: str
    links: list[tuple[str, str]]


def words(text: str) -> int:
    return len(WORD.findall(re.sub(r"<!--.*?-->|\]\([^)]*\)", "", text)))


def page(group: str) -> str:
    return (FOLDER / f"{group}.md").read_text()


def answers() -> list[Answer]:
    found = list[Answer]()
    for group in GROUPS:
        for part in re.split(r"^## ", page(group), flags=re.MULTILINE)[1:]:
            question, _, text = part.partition("\n")
            links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text)
            found.append(Answer(group, question, text, [(target or f"{group}.md", anchor) for target, anchor in links]))
    return found


ANSWERS = answers()


def section(target: str, anchor: str) -> str:
    """What a reader of a link reads: to the next heading, or what stands before the first one of the page's parts."""
    lines, code = list[str](), False
    for line in (FOLDER / target).read_text().splitlines():
        code ^= line.lstrip().startswith("```")
        heading = None if code else re.match(r"#+ (.*)", line)
        if heading and lines:
            break
        if lines or (heading and (not anchor or place(heading[1]) == anchor)):
            lines.append(line)
    assert lines, f"{target} has no heading #{anchor}"
    return "\n".join(lines)


def minutes(words: int, steps: int) -> float:
    return words / WORDS_A_MINUTE + steps * STEP


def way(group: str) -> str:
    """What is read on the way to an answer: README to the end of its list of pages, and the page's list of questions."""
    return (ROOT / "README.md").read_text().partition("\n## Install")[0] + page(group).partition("\n## ")[0]


def test_there_is_a_question_for_every_kind_of_reader() -> None:
    assert len(ANSWERS) >= 150
    assert {path.stem for path in FOLDER.glob("*.md")} == set(GROUPS)
    for group in GROUPS:
        found = questions(page(group))
        assert len(set(map(place, found))) == len(found) <= 18, f"{group}: split the page"
        assert f"](docs/answers/{group}.md)" in (ROOT / "README.md").read_text().partition("\n## Install")[0]


@pytest.mark.parametrize("answer", ANSWERS, ids=[f"{a.group}: {a.question}" for a in ANSWERS])
def test_an_answer_takes_three_minutes(answer: Answer) -> None:
    """README, its page's questions, the answer: three steps. What a link leads to is read in three minutes with them."""
    own = words(answer.question + answer.text)
    assert own <= SHORT, f"{own} words"
    assert answer.links
    read = words(way(answer.group)) + own
    assert minutes(read, 3) <= 2.5
    for link in answer.links:
        both = read + words(section(*link))
        assert both <= WORDS_A_MINUTE * MINUTES, f"{link}: {both} words: link to a nearer heading, or cut the section"


@pytest.mark.parametrize("answer", ANSWERS, ids=[f"{a.group}: {a.question}" for a in ANSWERS])
def test_an_answer_s_figures_stand_where_it_leads(answer: Answer) -> None:
    """Those that are not generated: 4.8, 12 %, 1,540. A page that is measured anew takes its answers along."""
    behind = "".join((FOLDER / target).read_text() for target, _ in answer.links)
    written = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", MARK.sub("", answer.text), flags=re.MULTILINE | re.DOTALL)
    for figure in re.findall(r"\d+\.\d+|\d+(?= (?:%|times|ms|minutes))|\d+,\d{3}", written):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", behind), f"{figure} is not in {answer.links}"


def test_the_tests_of_answers_can_fail() -> None:
    assert words("| One `a.b` | 4.8 times | [more](x.md) |") == 5
    assert section("../tutorials/first-call.md", "").startswith("# A first call")
    assert "## The call" not in section("../tutorials/first-call.md", "")
    assert section("../tutorials/first-call.md", "lse").startswith("## lse\n")
    with pytest.raises(AssertionError, match="no heading"):
        section("../tutorials/first-call.md", "nothing")
    assert minutes(500, 3) == 3.0


def test_the_site_s_search_finds_a_word_beside_punctuation() -> None:
    """Its words are what a pattern parts, and what is typed is their beginning: "(BigBird," must not be one."""
    (separator,) = re.findall(r"separator: '(.*?)' #", (ROOT / "mkdocs.yml").read_text())
    words = [word for answer in ANSWERS for word in re.split(separator, answer.question) if word]
    assert {"BigBird", "torch.compile", "GQA", "head_dim"} <= set(words)
    assert [word for word in words if not word[0].isalnum()] == []


def test_a_page_s_list_is_of_its_headings_and_an_unknown_mark_is_an_error() -> None:
    text = "# T\n\n<!-- contents:begin -->\n## old\n<!-- contents:end -->\n\n## A, b?\n\n## c\n"
    assert contents(text) == "- [A, b?](#a-b)\n- [c](#c)\n"
    with pytest.raises(KeyError, match="nothing"):
        filled("<!-- nothing:begin --><!-- nothing:end -->", ROOT / "benchmarks" / "results")

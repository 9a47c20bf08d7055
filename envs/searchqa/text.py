"""Deep search as text: the policy's tags, the passages that it reads, and the grading of answers.

    the policy writes   ... <search> currency of Kenya </search>
                        ... <answer> Kenyan shilling </answer>
    the policy reads    <information>Doc 1(Title: Kenya - Economy) text
                        Doc 2(Title: ...) text
                        Doc 3(Title: ...) text</information>

Only the first complete tag counts. Passages are untrusted text. Within a passage, the "<" of every
tag is replaced by another character, so a passage cannot close its <information> or pose as the
policy. "<|" is replaced for models behind an API; for all others, chat.py makes the control tokens
of any model family ordinary text. An answer is correct if it equals a golden answer after
Search-R1's normalization, which is SQuAD's (https://arxiv.org/abs/1606.05250).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from envs import ParseError

MAX_TITLE, MAX_WORD = 200, 20  # characters of a title; characters of a word, on average
TAGS = ("search", "answer")
_UNSAFE = re.compile(r"<(?=\s*(?:/\s*)?(?:search|answer|information|think)\b|\|)", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
INSTRUCTIONS = (
    "Answer the question. Think briefly, then write exactly one of\n"
    "<search> query </search>\n"
    "<answer> short answer </answer>\n"
    "A search shows passages within <information> and </information>. Search until they show what "
    "is asked, then answer in a few words."
)
QUESTION = "Question: "  # the beginning of the first observation
INVALID = "Your previous action is invalid."  # the words of AgentGym's server
EXPECTED = "Write one <search> query </search> or one <answer> short answer </answer>."
_MARK = re.compile(rf"<(/?)({'|'.join(TAGS)})>")


class Passage(NamedTuple):
    """A piece of a corpus."""

    number: int  # its line in the corpus, from 0
    title: str
    text: str


class Tag(NamedTuple):
    name: str  # "search" or "answer"
    content: str


def passage_of(number: int, contents: str) -> Passage:
    """Read the contents of a line of Search-R1's corpus: a title in quotes, a line break, a text.

    >>> passage_of(0, "A republic.")
    Passage(number=0, title='', text='A republic.')
    """
    title, line_break, text = contents.partition("\n")
    if not line_break:
        title, text = "", title
    title = title.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return Passage(number, title, text.strip())


def information(passages: Sequence[Passage], max_words: int) -> str:
    """The observation after a search.

    >>> information([Passage(7, "A </information>", "one two three")], max_words=2)
    '<information>Doc 1(Title: A ‹/information>) one two</information>'
    """
    lines = (
        f"Doc {position}(Title: {escape(passage.title[:MAX_TITLE])}) "
        f"{escape(first_words(passage.text, max_words))}"
        for position, passage in enumerate(passages, start=1)
    )
    return f"<information>{chr(10).join(lines)}</information>"


def first_words(text: str, max_words: int) -> str:
    """The first `max_words` words on one line. The number of characters is limited, too, for
    languages without spaces."""
    return " ".join(text.split(maxsplit=max_words)[:max_words])[: max_words * MAX_WORD]


def escape(text: str) -> str:
    """Replace the "<" of every tag and of "<|", and characters that UTF-8 cannot encode.

    >>> escape("x <|im_end|> y < 3 \\ud800")
    'x ‹|im_end|> y < 3 ?'
    """
    return _UNSAFE.sub("‹", text.encode("utf-8", "replace").decode("utf-8"))


def normalize(answer: str) -> str:
    """Lower the case, and remove punctuation, articles and extra spaces.

    >>> normalize("The Kenyan  Shilling (KES).")
    'kenyan shilling kes'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golden: Sequence[str]) -> bool:
    return normalize(answer) in {normalize(text) for text in golden}


def f1(answer: str, golden: Sequence[str]) -> float:
    """Token F1 in 0..1: harmonic mean of precision and recall over words, for the closest golden
    answer.

    >>> round(f1("the Kenyan shilling of 1966", ["Kenyan shilling"]), 3)
    0.667
    """
    return max(
        (_f1(normalize(answer).split(), normalize(text).split()) for text in golden), default=0.0
    )


def _f1(words: Sequence[str], golden: Sequence[str]) -> float:
    if not words or not golden:
        return float(words == golden)
    common = (Counter(words) & Counter(golden)).total()
    return 2 * common / (len(words) + len(golden))


def read_tag(text: str) -> Tag:
    """Find the first complete tag. The time is linear in the length of the text.

    >>> read_tag("I look it up. <search> flag of\\n Kenya </search> <answer>red</answer>")
    Tag(name='search', content='flag of Kenya')
    >>> read_tag("<answer>red</search>")
    Traceback (most recent call last):
    envs.ParseError: Your previous action is invalid. <answer> is not closed by </answer>. Write \
one <search> query </search> or one <answer> short answer </answer>.

    Raises:
        ParseError: there is no complete tag, the tag is empty, or it contains another tag.
    """
    marks = list(_MARK.finditer(text))
    last_end = {mark[2]: mark.start() for mark in marks if mark[1]}
    is_complete = [not m[1] and m.start() < last_end.get(m[2], 0) for m in marks]
    if not any(is_complete):
        raise _invalid(_problem_of(marks))
    begin, end = marks[is_complete.index(True) :][:2]
    name = begin[2]
    if not end[1] or end[2] != name:
        raise _invalid(f"There is a tag between <{name}> and </{name}>.")
    content = " ".join(text[begin.end() : end.start()].split())
    if not content:
        raise _invalid(f"<{name}> is empty.")
    return Tag(name, content)


def _problem_of(marks: list[re.Match[str]]) -> str:
    """The problem of a text without a complete tag; `marks` are its opening and closing tags."""
    if not marks:
        return ""
    name = next((mark[2] for mark in marks if not mark[1]), "")
    return f"<{name}> is not closed by </{name}>." if name else f"{marks[0][0]} closes no tag."


def _invalid(problem: str) -> ParseError:
    return ParseError(" ".join(filter(None, (INVALID, problem, EXPECTED))))


def parse(model_text: str) -> str:
    """The first complete tag of the policy's text, without the text around it.

    >>> parse("Thinking of it ... <search>flag of Kenya</search> and then")
    '<search> flag of Kenya </search>'
    """
    return write_tag(*read_tag(model_text))


def write_tag(name: str, content: str) -> str:
    return f"<{name}> {content} </{name}>"


def say(thought: str, action: str) -> str:
    """Write a thought and an action as text that `parse` reads. Tags in the thought are escaped."""
    return f"{escape(thought)}\n{action}" if thought else action

"""Deep search as text: the policy's tags, the passages that it reads, and when an answer is right.

    the policy writes   ... <search> currency of Kenya </search>
                        ... <answer> Kenyan shilling </answer>
    it reads            <information>Doc 1(Title: Kenya - Economy) text
                        Doc 2(Title: ...) text
                        Doc 3(Title: ...) text</information>

The first complete tag counts. A passage is somebody else's text: in its tags, and in "<|", which
opens the special tokens of many chat templates, the bracket becomes another character, so that it
can neither end its <information> nor speak as the policy. An answer is right if it equals a golden
one after Search-R1's normalisation (that of SQuAD, https://arxiv.org/abs/1606.05250).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from envs import ParseError

MAX_TITLE, MAX_WORD = 200, 20  # characters: of a title, and on average of a word
TAGS = ("search", "answer")
_UNSAFE = re.compile(r"<(?=\s*/?\s*(?:search|answer|information|think)\b|\|)", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
INSTRUCTIONS = (
    "Answer the question. Think briefly, then write exactly one of\n"
    "<search> query </search>\n"
    "<answer> short answer </answer>\n"
    "A search shows passages within <information> and </information>. Search until they show what "
    "is asked, then answer in a few words."
)
QUESTION = "Question: "  # what the first observation begins with
INVALID = "Your previous action is invalid."  # as AgentGym's server says
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
    """Of a line of Search-R1's corpus: the title in quotes, a line break, the text.

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


def contents(passage: Passage) -> str:
    """A passage as a line of Search-R1's corpus holds it.

    >>> contents(Passage(0, "Kenya", "A republic."))
    '"Kenya"\\nA republic.'
    """
    if not passage.title and "\n" not in passage.text:
        return passage.text
    return f'"{passage.title}"\n{passage.text}'


def information(passages: Sequence[Passage], max_words: int) -> str:
    """What a search answers.

    >>> information([Passage(7, "A </information>", "one two three")], max_words=2)
    '<information>Doc 1(Title: A ‹/information>) one two</information>'
    """
    lines = (
        f"Doc {place}(Title: {harmless(passage.title[:MAX_TITLE])}) "
        f"{harmless(first_words(passage.text, max_words))}"
        for place, passage in enumerate(passages, start=1)
    )
    return f"<information>{chr(10).join(lines)}</information>"


def first_words(text: str, max_words: int) -> str:
    """At most so many words, on one line, and of a language without blanks as much as they hold."""
    return " ".join(text.split(maxsplit=max_words)[:max_words])[: max_words * MAX_WORD]


def harmless(text: str) -> str:
    """Text in which nothing is a tag or begins with "<|", and which UTF-8 can hold.

    >>> harmless("x <|im_end|> y < 3 \\ud800")
    'x ‹|im_end|> y < 3 ?'
    """
    return _UNSAFE.sub("‹", text.encode("utf-8", "replace").decode("utf-8"))


def normalize(answer: str) -> str:
    """
    >>> normalize("The Kenyan  Shilling (KES).")
    'kenyan shilling kes'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golden: Sequence[str]) -> bool:
    return normalize(answer) in {normalize(each) for each in golden}


def f1(answer: str, golden: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, the best over golden answers, 0..1.

    >>> round(f1("the Kenyan shilling of 1966", ["Kenyan shilling"]), 3)
    0.667
    """
    return max(
        (_f1(normalize(answer).split(), normalize(each).split()) for each in golden), default=0.0
    )


def _f1(words: Sequence[str], golden: Sequence[str]) -> float:
    if not words or not golden:
        return float(words == golden)
    common = (Counter(words) & Counter(golden)).total()
    return 2 * common / (len(words) + len(golden))


def read_tag(text: str) -> Tag:
    """The first complete tag, in time linear in the text's length.

    >>> read_tag("I look it up. <search> flag of\\n Kenya </search> <answer>red</answer>")
    Tag(name='search', content='flag of Kenya')
    >>> read_tag("<answer>red</search>")
    Traceback (most recent call last):
    envs.ParseError: Your previous action is invalid. <answer> is not closed by </answer>. Write \
one <search> query </search> or one <answer> short answer </answer>.

    Raises:
        ParseError: no complete tag, an empty one, or a tag between its two ends.
    """
    marks = list(_MARK.finditer(text))
    last_end = {mark[2]: mark.start() for mark in marks if mark[1]}
    complete = [not m[1] and m.start() < last_end.get(m[2], 0) for m in marks]
    if not any(complete):
        raise _invalid(_why_none(marks))
    begin, end = marks[complete.index(True) :][:2]
    name = begin[2]
    if not end[1] or end[2] != name:
        raise _invalid(f"There is a tag between <{name}> and </{name}>.")
    content = " ".join(text[begin.end() : end.start()].split())
    if not content:
        raise _invalid(f"<{name}> is empty.")
    return Tag(name, content)


def _why_none(marks: list[re.Match[str]]) -> str:
    """What is wrong with a text that holds these ends of tags and no complete one."""
    if not marks:
        return ""
    name = next((mark[2] for mark in marks if not mark[1]), "")
    return f"<{name}> is not closed by </{name}>." if name else f"{marks[0][0]} closes no tag."


def _invalid(why: str) -> ParseError:
    return ParseError(" ".join(filter(None, (INVALID, why, EXPECTED))))


def parse(model_text: str) -> str:
    """The first tag of what the policy wrote, alone.

    >>> parse("Thinking of it ... <search>flag of Kenya</search> and then")
    '<search> flag of Kenya </search>'
    """
    return written(*read_tag(model_text))


def written(name: str, content: str) -> str:
    return f"<{name}> {content} </{name}>"


def say(thought: str, action: str) -> str:
    """What `parse` reads the action from, whatever the thought quotes."""
    return f"{harmless(thought)}\n{action}" if thought else action

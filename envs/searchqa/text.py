"""Deep search as text: the tags that the policy writes, the passages that it reads, and when an
answer is right.

    the policy writes   ... <search> currency of Kenya </search>
                        ... <answer> Kenyan shilling </answer>
    it reads            <information>Doc 1(Title: Kenya - Economy) text
                        Doc 2(Title: ...) text
                        Doc 3(Title: ...) text</information>

A passage is somebody else's text. Where it holds a tag of these, or "<|", which opens the special
tokens of many chat templates, the bracket becomes another character: a passage must not be able to
end the <information> that it stands in, or to speak as the policy. (In training no text from a
world is read as a special token, whatever it looks like: chat.py.)

An answer is right if it equals one of the golden ones after Search-R1's normalisation (that of
SQuAD, https://arxiv.org/abs/1606.05250): lower case, no punctuation, no articles, single blanks.

Read next: envs/searchqa/actions.py, how the tags are read.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_TITLE, MAX_WORD = 200, 20  # characters: of a title, and on average of a word
TAGS = ("search", "answer")
_UNSAFE = re.compile(r"<(?=\s*/?\s*(?:search|answer|information|think)\b|\|)", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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


def information(passages: Sequence[Passage], max_words: int) -> str:
    """What a search answers.

    >>> information([Passage(7, "A </information>", "one two three")], max_words=2)
    '<information>Doc 1(Title: A ‹/information>) one two</information>'
    """
    lines = (
        f"Doc {place}(Title: {harmless(passage.title[:MAX_TITLE])}) "
        f"{shortened(passage.text, max_words)}"
        for place, passage in enumerate(passages, start=1)
    )
    return f"<information>{chr(10).join(lines)}</information>"


def first_words(text: str, max_words: int) -> str:
    """At most so many words, on one line, and of a language without blanks as much as they hold."""
    return " ".join(text.split(maxsplit=max_words)[:max_words])[: max_words * MAX_WORD]


def shortened(text: str, max_words: int) -> str:
    """The first words, harmless."""
    return harmless(first_words(text, max_words))


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
    """Whether an answer is one of the golden ones, normalised."""
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

"""What the policy is asked to write, and how it is read: a thought, then one tag.

    The anthem is Kenya's. <search> currency
     of Kenya </search> I guess it is       ->     <search> currency of Kenya </search>
    <answer> shilling </answer>

The first complete tag counts, wherever it stands; what follows is not read. A tag inside another
one has no clear meaning and is not guessed at: `ParseError` says to the policy what is wrong.

Read next: envs/searchqa/env.py.
"""

import re

from envs import ParseError
from envs.searchqa.text import TAGS, Tag, harmless

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

    Raises:
        ParseError: as `read_tag`.
    """
    return written(*read_tag(model_text))


def written(name: str, content: str) -> str:
    """A tag as the policy should write it."""
    return f"<{name}> {content} </{name}>"


def say(thought: str, action: str) -> str:
    """What `parse` reads the action from, whatever the thought quotes.

    >>> say("I look it up.", written("search", "flag of Kenya"))
    'I look it up.\\n<search> flag of Kenya </search>'
    """
    return f"{harmless(thought)}\n{action}" if thought else action

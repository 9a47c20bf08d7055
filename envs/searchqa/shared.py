"""The retriever that all sessions of a process share, opened when it is first asked for.

An index is hundreds of megabytes where a session is a few kilobytes, so there is one, behind a
`Batcher` that any thread may ask. This module imports nothing that a trainer may lack; the packages
of retrieval come with the first search, or at the start of a server.

Read next: envs/searchqa/retrieval.py.
"""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envs.searchqa.retrieval import Batcher

_shared: "list[Batcher]" = []  # at most one
_lock = threading.Lock()


def shared_batcher() -> "Batcher":
    """The process's retriever, behind its batcher.

    Raises:
        RetrievalError: it cannot be had; the next call tries again.
        CorpusError: the corpus is not one.
    """
    with _lock:
        if not _shared:
            from envs.searchqa.retrieval import Batcher, open_retriever

            _shared.append(Batcher(open_retriever()))
        return _shared[0]


def close_shared() -> None:
    """Closes it; the next shared_batcher() opens another one."""
    with _lock:
        while _shared:
            _shared.pop().close()

"""What the tests of retrieval share: corpora, and a retriever that writes down its queries."""

import contextlib
import hashlib
import json
import random
import time

from envs.searchqa.ranking import RetrievalError, Retriever, Scored
from envs.searchqa.remote import contents
from envs.searchqa.retrieval import Batcher
from envs.searchqa.text import Passage


class Listed(list):
    """A corpus in a list."""

    @property
    def fingerprint(self):
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()


def corpus_of(*titles_and_texts):
    return Listed(Passage(number, *each) for number, each in enumerate(titles_and_texts))


def random_corpus(num_passages, seed=0, num_words=60):
    """Few different words, so that many passages are equally good."""
    rng = random.Random(seed)
    lexicon = [f"word{number}" for number in range(num_words)]
    return corpus_of(
        *(
            (rng.choice(lexicon), " ".join(rng.choices(lexicon, k=rng.randrange(4))))
            for _ in range(num_passages)
        )
    )


BOOK = corpus_of(
    ("Kenya - Economy", "Currency: Kenyan shilling (KES)"),
    ("Norway - Economy", "Currency: Norwegian krone"),
    ("Kenya - Government", "Capital: Nairobi"),
    ("Côte d'Ivoire - Government", "Capital: Yamoussoukro"),
    ("Nauru", "It is an island whose flag has a star"),
)


class Recorder(Retriever):
    """Finds passages named after the query; writes down what it was asked."""

    def __init__(self, sleep_s=0.0):
        self.asked, self.sleep_s = [], sleep_s

    def scored(self, queries, top_k):
        self.asked.append(list(queries))
        time.sleep(self.sleep_s)
        if "bad" in queries:
            raise RetrievalError("it broke")
        return [
            [Scored(Passage(rank, query, ""), -rank) for rank in range(top_k)] for query in queries
        ]


@contextlib.contextmanager
def batched(retriever, **options):
    batcher = Batcher(retriever, **options)
    try:
        yield batcher
    finally:
        batcher.close()


def write_corpus(path, corpus):
    lines = ({"id": str(passage.number), "contents": contents(passage)} for passage in corpus)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def numbers(found):
    return [passage.number for passage in found]

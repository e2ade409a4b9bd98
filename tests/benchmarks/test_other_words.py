"""The folder of LIMIT's form in other words: as hard as LIMIT in how words recur, and of LIMIT's shape."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from other_words import write

from icr_bench.benchmarks.limit import limit, words


def test_its_words_recur_as_those_of_limit_do(tmp_path: Path) -> None:
    write(tmp_path)
    made = limit(path=tmp_path, seed=0)
    assert (len(made.documents), len(made.queries)) == (2_500, 200)
    liked = {
        d.id: d.text.partition(" likes ")[2].rstrip(".").replace(" and ", ", ").split(", ") for d in made.documents
    }
    assert all(len(own) == len(set(own)) == 20 for own in liked.values())
    for query in made.queries:
        asked = query.text.removeprefix("Who likes ").removesuffix("?")
        assert {d for d, own in liked.items() if asked in own} == set(made.judgments[query.id])
        assert len(made.judgments[query.id]) == 2
    assert len({d for judged in made.judgments.values() for d in judged}) == 46
    assert all(". " in d.id for d in made.documents)  # initials

    attributes = {attribute for own in liked.values() for attribute in own}
    assert not attributes & {
        word for purpose in ("training", "benchmark", "development") for word in words("attributes", purpose)
    }
    uses = Counter(word for attribute in attributes for word in set(attribute.split()))
    assert all(" " in attribute for attribute in attributes)
    without_own = [a for a in attributes if all(uses[word] > 1 for word in a.split())]
    assert 0.10 < len(without_own) / len(attributes) < 0.20  # LIMIT-small: 0.12

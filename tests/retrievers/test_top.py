"""Picking the best k scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icr_bench.retrievers.top import top_k


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=20), st.integers(1, 20), st.data())
def test_equals_a_full_sort(scores: list[float], k: int, data: st.DataObject) -> None:
    among = sorted(data.draw(st.sets(st.integers(0, len(scores) - 1))))
    ranking = top_k(np.array(scores), min(k, len(scores)), np.array(among, dtype=np.int64))
    assert list(ranking.numbers) == sorted(among, key=lambda i: (-scores[i], i))[: min(k, len(scores))]
    assert list(ranking.scores) == [scores[i] for i in ranking.numbers]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_score_that_is_no_number_is_refused(place: int, k: int) -> None:
    """Nothing is above or below it: a ranking would lack documents, and look as if there were none."""
    scores = np.array([1.0, -np.inf, np.inf])
    assert len(top_k(scores, k).numbers) == k
    scores[place] = np.nan
    with pytest.raises(FloatingPointError, match=r"^1 of 3 documents have a score that is no number: .*--dtype"):
        top_k(scores, k)
    assert top_k(scores, 3, np.array([], np.int64)).numbers == []
    assert top_k(scores, 1, np.array([(place + 1) % 3])).numbers == [(place + 1) % 3]

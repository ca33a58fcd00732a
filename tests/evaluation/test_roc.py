"""AUC and its interval over clusters, against pairwise counting, DeLong's formula and sums over pairs of clusters."""

import math
import random
from statistics import variance

import pytest

from ludus.evaluation.roc import auc, clustered_auc


def kernel(high, low):
    return 1.0 if high > low else 0.5 if high == low else 0.0


def drawn(seed, num=60, per_cluster=4):
    """Scores rounded so that ties occur; items of a cluster share a part of their score and of their outcome."""
    rng = random.Random(seed)
    items = []
    for cluster in range(num // per_cluster):
        shared = rng.gauss(0, 1)
        for _ in range(per_cluster):
            positive = shared + rng.gauss(0, 1) > 0
            items.append((round(shared + positive + rng.gauss(0, 1), 1), positive, cluster))
    return tuple(map(list, zip(*items, strict=True)))


def counted(scores, positive):
    pairs = [(a, b) for a, p in zip(scores, positive, strict=True) if p
             for b, q in zip(scores, positive, strict=True) if not q]  # fmt: skip
    return sum(kernel(a, b) for a, b in pairs) / len(pairs)


def logit_interval(area, spread):
    centre, half = math.log(area / (1 - area)), 1.959963984540054 * spread / (area * (1 - area))
    return [1 / (1 + math.exp(-x)) for x in (centre - half, centre + half)]


@pytest.mark.parametrize("seed", range(5))
def test_auc_equals_the_share_of_ordered_pairs(seed):
    scores, positive, clusters = drawn(seed)
    assert auc(scores, positive) == pytest.approx(counted(scores, positive), abs=1e-12)
    assert clustered_auc(scores, positive, clusters).mean == pytest.approx(counted(scores, positive), abs=1e-12)


def test_auc_is_undefined_for_one_outcome():
    assert auc([0.1, 0.2], [True, True]) is None
    assert clustered_auc([0.1, 0.2], [False, False], "ab") is None
    assert auc([0.1, 0.4, 0.4, 0.9], [False, True, False, True]) == 3.5 / 4


@pytest.mark.parametrize("seed", range(3))
def test_interval_of_single_items_is_that_of_delong(seed):
    scores, positive, _ = drawn(seed)
    found = clustered_auc(scores, positive, range(len(scores)))
    high = [s for s, p in zip(scores, positive, strict=True) if p]
    low = [s for s, p in zip(scores, positive, strict=True) if not p]
    above = variance([sum(kernel(a, b) for b in low) / len(low) for a in high])
    below = variance([sum(kernel(a, b) for a in high) / len(high) for b in low])
    # Obuchowski's cross term sums (V10 - theta)(V01 - theta) within a cluster, which is 0 for single items.
    expected = logit_interval(found.mean, math.sqrt(above / len(high) + below / len(low)))
    assert [found.interval.low, found.interval.high] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_interval_over_clusters_is_obuchowskis_sum(seed):
    scores, positive, clusters = drawn(seed)
    found = clustered_auc(scores, positive, clusters)
    items = list(zip(scores, positive, clusters, strict=True))
    high, low = ([one for one in items if one[1] is kind] for kind in (True, False))
    area = counted(scores, positive)
    of_high = [(c, sum(kernel(s, b) for b, _, _ in low) / len(low) - area) for s, _, c in high]
    of_low = [(c, sum(kernel(a, s) for a, _, _ in high) / len(high) - area) for s, _, c in low]

    def within(first, second):
        return sum(a * b for c, a in first for d, b in second if c == d)

    num = [len({c for c, _ in one}) for one in (of_high, of_low)]
    total = len(set(clusters))
    spread = num[0] / (num[0] - 1) * within(of_high, of_high) / len(high) ** 2
    spread += num[1] / (num[1] - 1) * within(of_low, of_low) / len(low) ** 2
    spread += 2 * total / (total - 1) * within(of_high, of_low) / (len(high) * len(low))
    expected = logit_interval(area, math.sqrt(spread))
    assert [found.interval.low, found.interval.high] == pytest.approx(expected, rel=1e-9)
    assert found.mean in found.interval


def test_copies_within_a_cluster_do_not_narrow_the_interval():
    scores, positive, clusters = drawn(1)
    once, copied = clustered_auc(scores, positive, clusters), clustered_auc(scores * 3, positive * 3, clusters * 3)
    assert copied.interval.low == pytest.approx(once.interval.low)
    naive = clustered_auc(scores * 3, positive * 3, range(3 * len(scores)))
    assert naive.interval.low > once.interval.low


@pytest.mark.parametrize(
    ("scores", "positive", "clusters"),
    [([0.9, 0.8, 0.1, 0.2], [1, 1, 0, 0], "abcd"), ([0.9, 0.1, 0.5], [1, 1, 0], "aab")],
)
def test_interval_is_everything_if_the_variance_is_unknown(scores, positive, clusters):
    found = clustered_auc(scores, [bool(p) for p in positive], clusters)
    assert (found.interval.low, found.interval.high) == (0.0, 1.0)

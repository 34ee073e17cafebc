"""Cases of the shelf: clients in clusters, each with its own model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from torch import Tensor

from fedlearn.algorithms.clustered import ClusteredFL
from fedlearn.algorithms.ifca import IFCA
from fedlearn.algorithms.recipes import FedAvg
from tests.parity.shelf import COHORTS, SGD, Case, examples, initial, loss, shares, train, weighted

#: Far enough apart that clients choose different models.
SPREAD = 0.2
IFCA_OF_THREE = IFCA(SGD, num_clusters=3, initial_spread=SPREAD, initial_seed=3)


def ifca_rounds(x: Tensor) -> Iterator[tuple[list[Tensor], Mapping[int, int]]]:
    """Algorithm 1, option II, of arXiv:2006.04088: the models before a round, and the choices."""
    others = IFCA_OF_THREE.init(initial())  # the same noise
    models = [x, *(others[f"cluster_{j}"].double() for j in (1, 2))]
    for round_num, cohort in enumerate(COHORTS):
        choice = {
            i: min(range(3), key=lambda j: float(loss(models[j], *examples(i)))) for i in cohort
        }
        yield models, choice
        trained = {i: train(models[choice[i]], i, round_num)[0] for i in cohort}
        members = [[i for i in cohort if choice[i] == j] for j in range(3)]
        models = [
            weighted(shares(own), [trained[i] for i in own]) if own else model
            for own, model in zip(members, models, strict=True)
        ]
    yield models, {}


def ifca(x: Tensor) -> Iterator[Tensor]:
    """The first model, which is the global one."""
    rounds = ifca_rounds(x)
    next(rounds)
    yield from (models[0] for models, _ in rounds)


def ifca_models(x: Tensor) -> Mapping[int, Tensor]:
    """Each client's model, as it received it in its last round."""
    return {i: models[j] for models, choice in ifca_rounds(x) for i, j in choice.items()}


#: Thresholds at which a cluster of two or more clients is always split, while there is room.
CLUSTERED = ClusteredFL(SGD, max_clusters=3, largest_mean=9.0, least_update=0.0)


def best_halves(updates: Mapping[int, Tensor]) -> list[list[int]]:
    """Of all ways to cut in two, that with the smallest largest cosine; the larger half first."""
    members = sorted(updates)

    def largest_cosine(half: tuple[int, ...]) -> float:
        pairs = [(updates[i], updates[j]) for i in half for j in members if j not in half]
        return max(float(g @ h / g.norm() / h.norm()) for g, h in pairs)

    cuts = [cut for n in range(1, len(members)) for cut in combinations(members, n)]
    best = min((cut for cut in cuts if members[0] in cut), key=largest_cosine)
    halves = [[*best], [i for i in members if i not in best]]
    return sorted(halves, key=len, reverse=True)


def clustered_rounds(x: Tensor) -> Iterator[tuple[list[Tensor], Mapping[int, int]]]:
    """Algorithms 1 and 3 of arXiv:1910.01991: the models before a round, and who trains which."""
    models, splits = [x], list[tuple[int, Tensor, Tensor]]()
    cluster, seen = dict[int, int](), dict[int, int]()
    for round_num, cohort in enumerate(COHORTS):
        start = {i: cluster.get(i, 0) for i in cohort}
        yield models, start
        updates = {i: train(models[start[i]], i, round_num)[0] - models[start[i]] for i in cohort}

        def mean(rows: Sequence[int], updates: Mapping[int, Tensor] = updates) -> Tensor:
            return weighted(shares(rows), [updates[i] for i in rows])

        for i in cohort:
            cluster[i] = start[i]
            for number, (parent, stays, leaves) in enumerate(splits, start=1):
                g = updates[i]
                nearer = g @ leaves / leaves.norm() > g @ stays / stays.norm()
                if number >= seen.get(i, 1) and parent == cluster[i] and nearer:
                    cluster[i] = number
            seen[i] = len(models)
        after = list(models)
        for number, model in enumerate(models):
            own = [i for i in cohort if start[i] == cluster[i] == number]
            if not own:
                continue
            halves = [own]
            if len(own) > 1 and len(after) < 3:
                halves = best_halves({i: updates[i] for i in own})
                splits.append((number, mean(halves[0]), mean(halves[1])))
                cluster |= dict.fromkeys(halves[1], len(after))
                after.append(model + mean(halves[1]))
                seen |= dict.fromkeys(own, len(after))
            after[number] = model + mean(halves[0])
        models = after
    yield models, {}


def clustered(x: Tensor) -> Iterator[Tensor]:
    """The model of the first cluster, which is the global one."""
    rounds = clustered_rounds(x)
    next(rounds)
    yield from (models[0] for models, _ in rounds)


def clustered_models(x: Tensor) -> Mapping[int, Tensor]:
    """Each client's model, as it received it in its last round."""
    return {i: models[j] for models, start in clustered_rounds(x) for i, j in start.items()}


CASES: Mapping[str, Case] = {
    "ifca": Case(
        IFCA_OF_THREE,
        ifca,
        control=FedAvg(SGD),
        protected=IFCA(
            SGD,
            num_clusters=2,
            initial_spread=SPREAD,
            update_bound=9.0,
            weight_by_examples=False,
        ),
        refused="lane 'cluster_1' .*has no bound.* set algorithm.update_bound",
        personal=ifca_models,
    ),
    "clustered fl": Case(
        CLUSTERED,
        clustered,
        control=FedAvg(SGD),
        protected=None,
        refused="each client gets its own task|ClusterMeans .*would not hide one client",
        personal=clustered_models,
    ),
}

"""Cases of the shelf: clients in clusters, each with its own model."""

from collections.abc import Iterator, Mapping

from torch import Tensor

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
        refused="lane 'cluster_1' .*has no bound",
        personal=ifca_models,
    ),
}

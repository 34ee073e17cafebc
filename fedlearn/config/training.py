"""What is trained and how: model, loss, algorithm, local training."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fedlearn.config.section import Args, Count, Factory, Problem, Section, Width


class MlpModel(Section):
    """Linear layers with ReLU between them."""

    kind: Literal["mlp"] = Field("mlp", description="Which model is trained.")
    hidden: Width = Field((128,), description="Units of each hidden layer, >= 1.")


class LogisticModel(Section):
    """One linear layer: multinomial logistic regression."""

    kind: Literal["logistic"] = Field("logistic", description="Which model is trained.")


class CnnModel(Section):
    """A small convolutional network for images."""

    kind: Literal["cnn"] = Field("cnn", description="Which model is trained.")


class PythonModel(Section):
    """A model that a function of yours returns."""

    kind: Literal["python"] = Field("python", description="Which model is trained.")
    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")


Model: TypeAlias = Annotated[
    MlpModel | LogisticModel | CnnModel | PythonModel, Field(discriminator="kind")
]


class StandardLoss(Section):
    """A loss of torch, averaged over the batch."""

    kind: Literal["cross_entropy", "mse", "bce_with_logits"] = Field(
        "cross_entropy", description="What local training minimises."
    )


class PythonLoss(Section):
    """A loss that a function of yours returns."""

    kind: Literal["python"] = Field("python", description="What local training minimises.")
    factory: Factory = Field(
        description='The function: "module:function" or "path/to/file.py:function".'
    )
    args: Args = Field({}, description="Keyword arguments of the function.")


Loss: TypeAlias = Annotated[StandardLoss | PythonLoss, Field(discriminator="kind")]


class _Algorithm(Section):
    name: str = Field(description="The federated algorithm.")
    weight_by_examples: bool = Field(
        True, description="Weight a client by its number of examples; otherwise all count the same."
    )


class FedAvgAlgorithm(_Algorithm):
    """The mean of the local models."""

    name: Literal["fedavg"] = Field("fedavg", description="The federated algorithm.")


class FedSgdAlgorithm(_Algorithm):
    """One gradient step a round: client.epochs is 1 and client.batch_size "all" by default."""

    name: Literal["fedsgd"] = Field("fedsgd", description="The federated algorithm.")


class FedProxAlgorithm(_Algorithm):
    """FedAvg with a pull of the local models towards the global one."""

    name: Literal["fedprox"] = Field("fedprox", description="The federated algorithm.")
    proximal: float = Field(
        0.01, ge=0, description="Strength mu of the proximal term, >= 0; 0 is FedAvg."
    )


class FedAvgMAlgorithm(_Algorithm):
    """FedAvg with momentum at the server."""

    name: Literal["fedavgm"] = Field("fedavgm", description="The federated algorithm.")
    server_learning_rate: float = Field(1.0, gt=0, description="Server step size, > 0.")
    server_momentum: float = Field(0.9, ge=0, lt=1, description="Server momentum, [0, 1).")


class _Adaptive(_Algorithm):
    server_learning_rate: float = Field(0.1, gt=0, description="Server step size, > 0.")
    tau: float = Field(
        1e-3, gt=0, description="Adaptivity, > 0: the smaller, the more the step adapts."
    )


class FedAdagradAlgorithm(_Adaptive):
    """Adagrad at the server."""

    name: Literal["fedadagrad"] = Field("fedadagrad", description="The federated algorithm.")
    beta_1: float = Field(0.0, ge=0, lt=1, description="Decay of the mean delta, [0, 1).")


class FedAdamAlgorithm(_Adaptive):
    """Adam at the server."""

    name: Literal["fedadam"] = Field("fedadam", description="The federated algorithm.")
    beta_1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean delta, [0, 1).")
    beta_2: float = Field(0.99, ge=0, lt=1, description="Decay of the squared delta, [0, 1).")


class FedYogiAlgorithm(_Adaptive):
    """Yogi at the server."""

    name: Literal["fedyogi"] = Field("fedyogi", description="The federated algorithm.")
    beta_1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean delta, [0, 1).")
    beta_2: float = Field(0.99, ge=0, lt=1, description="Decay of the squared delta, [0, 1).")


Algorithm: TypeAlias = Annotated[
    FedAvgAlgorithm
    | FedSgdAlgorithm
    | FedProxAlgorithm
    | FedAvgMAlgorithm
    | FedAdagradAlgorithm
    | FedAdamAlgorithm
    | FedYogiAlgorithm,
    Field(discriminator="name"),
]


class ClientSection(Section):
    """What a client does with its examples."""

    epochs: int = Field(2, ge=1, description="E, passes over the local examples a round, >= 1.")
    batch_size: Count | Literal["all"] = Field(
        3, description='Examples a step, >= 1; "all" takes all of a client at once.'
    )
    learning_rate: float = Field(0.3, gt=0, description="Local step size, > 0.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Local momentum, [0, 1).")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, >= 0.")
    shuffle: bool = Field(True, description="Visit the examples in a new order every epoch.")
    keep_momentum: bool = Field(
        False, description="Keep a client's velocity from one of its rounds to its next."
    )

    def problems(self) -> Iterator[Problem]:
        """Refuse to keep a momentum that there is not."""
        if self.keep_momentum and self.momentum == 0.0:
            text = "is true, but there is no momentum to keep; set client.momentum above 0"
            yield Problem(("keep_momentum", "momentum"), text)

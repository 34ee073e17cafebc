"""The ServerApp: Flower's FedAvg."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg, and print what the clients measured."""
    settings = context.run_config
    strategy = FedAvg(
        fraction_evaluate=float(settings["fraction-evaluate"]),
        min_train_nodes=3,
        min_available_nodes=3,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": float(settings["learning-rate"])}),
        num_rounds=int(settings["num-server-rounds"]),
    )
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"after round {number}: {dict(metrics)}")  # noqa: T201 (the app's output)

"""Matrix products have the same bits wherever their operands begin in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedlearn
from fedlearn.core.mkl_environment import prepare_for_mkl

ROOT = Path(fedlearn.__file__).parents[1]
#: Prints MKL's setting at the moment when torch's import begins, then exits.
AT_TORCH = """
import os, runpy, sys

def at_torch(event, arguments):
    if event == "import" and arguments[0] == "torch":
        print(os.environ.get("MKL_CBWR"), flush=True)
        os._exit(0)

sys.addaudithook(at_torch)
"""
#: Prints at how many of 16 offsets in a cache line the products of one batch have other bits.
OFFSETS = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
weight, memory, batch = torch.randn(8, 5), torch.empty(64), torch.randn(4, 5)
found = []
for offset in range(16):
    there = memory[offset : offset + 20].view(4, 5).copy_(batch)
    outputs = torch.nn.functional.linear(there, weight)
    found.append(torch.cat([outputs.flatten(), (outputs.t() @ there).flatten()]))
print(sum(not torch.equal(found[0], each) for each in found))
"""
#: What an application starts a training process with: its end of a socket, and the options.
STARTED = """
import io, socket
here, there = socket.socketpair()
sys.argv[1:] = [str(there.fileno())]
sys.stdin = io.TextIOWrapper(io.BytesIO(b'{"home": "nowhere", "trainer": "mine:make"}'))
"""
ENTRIES = {
    "the command line": "sys.argv[1:] = ['check']; runpy.run_module('fedlearn', None, '__main__')",
    "the training process": f"{STARTED}runpy.run_module('fedlearn.client.child', None, '__main__')",
    "a script": "import fedlearn as fl; fl.FedAvg",
    "an application's tests": "import fedlearn.testing; fedlearn.testing.FakeCoordinator",
    "a Flower app": "import fedlearn.client.flower",
    "our tests": "import tests.conftest, torch",
}


def print_of(script: str, **environ: str) -> str:
    """Run a script in a fresh interpreter without other MKL variables; return its output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return ended.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_mkl_is_asked_before_torch_is_imported(entry: str) -> None:
    """Whichever of our modules a process starts with; the control imports only torch."""
    assert print_of(AT_TORCH + ENTRIES[entry]) == "AUTO"
    assert print_of(AT_TORCH + "import torch") == "None"


@pytest.mark.parametrize(
    "imports", ["import fedlearn", pytest.param("import torch, fedlearn", marks=pytest.mark.slow)]
)
def test_a_product_has_the_same_bits_wherever_its_operands_begin(imports: str) -> None:
    """Even if a script imports torch first: MKL reads its environment at the first product."""
    assert print_of(imports + OFFSETS) == "0"


def test_what_the_environment_says_already_stays() -> None:
    """Variables that the user has set take precedence."""
    environ = {"MKL_CBWR": "COMPATIBLE"}
    prepare_for_mkl(environ)
    assert environ == {"MKL_CBWR": "COMPATIBLE"}
    assert print_of(AT_TORCH + ENTRIES["a script"], MKL_CBWR="") == ""
